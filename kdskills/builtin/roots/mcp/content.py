"""Entries of a server's listing, checked before anything is made of them, and the files of one remote skill.

Files are fetched when used, checked on every read, and kept by digest.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from kdskills.builtin.roots.mcp.wire import Server, ServerFailed
from kdskills.errors import FileRefused
from kdskills.skills.digest import rows_digest
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import read_frontmatter
from kdskills.skills.parse import parse_skill_bytes
from kdskills.skills.private_files import make_folder, private_folder, write_private
from kdskills.skills.yaml_core import to_python

SKILL_FILE: Final = "SKILL.md"
MAX_FILES: Final = 512
MAX_BYTES: Final = 16 * 1024 * 1024
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class EntryRefused(Exception):  # internal to this package: every one becomes a diagnostic
    """Why an entry is not used."""


@dataclass(frozen=True, slots=True)
class FarFile:
    """A file as the listing has it; `path` is relative to the skill."""

    path: str
    uri: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ListedSkill:
    """A skill as the listing has it. `files` is None when the server does not say (`"dynamic"`)."""

    uri: str
    frontmatter: Mapping[str, Any]
    files: Mapping[str, FarFile] | None

    @property
    def base(self) -> str:
        """Uri of the skill's directory, without a trailing slash."""
        return self.uri.removesuffix(f"/{SKILL_FILE}")

    @property
    def parts(self) -> tuple[str, ...]:
        """Path of the skill's directory in the server's names."""
        return tuple(unquote(part) for part in self.base.removeprefix("skill://").split("/"))

    @property
    def set_digest(self) -> str | None:
        """Digest over every (uri, digest): what an approval is bound to. None when the server does not say."""
        if self.files is None:
            return None
        return rows_digest(sorted((file.uri, file.size, file.digest) for file in self.files.values()))

    @property
    def tree(self) -> str | None:
        """Digest of the tree that these files make, as of a folder."""
        if self.files is None:
            return None
        rows = sorted(self.files.values(), key=lambda file: file.path.encode())
        return rows_digest([(file.path, file.size, file.digest.removeprefix("sha256:")) for file in rows])


def read_entry(row: Mapping[str, Any], *, allow_dynamic: bool) -> ListedSkill:
    """Return an entry of `skills/list` or `skills/get`. Raises EntryRefused."""
    uri, frontmatter, resources = row.get("uri"), row.get("frontmatter"), row.get("resources")
    if not isinstance(uri, str) or not uri.startswith("skill://") or not uri.endswith(f"/{SKILL_FILE}"):
        raise EntryRefused("its uri is no skill://…/SKILL.md")
    if not isinstance(frontmatter, dict):
        raise EntryRefused("it has no frontmatter")
    base = uri.removesuffix(SKILL_FILE)
    for part in base.removeprefix("skill://").removesuffix("/").split("/"):
        _plain(unquote(part))
    if resources == "dynamic":
        if not allow_dynamic:
            raise EntryRefused("its server does not say what files it has, and the root has no allow_dynamic")
        return ListedSkill(uri, frontmatter, None)
    if not isinstance(resources, list):
        raise EntryRefused("it lists no resources")
    if len(resources) > MAX_FILES:
        raise EntryRefused(f"it lists more than {MAX_FILES} files")
    files: dict[str, FarFile] = {}
    for resource in resources:
        file = _file(resource, base)
        if file.path in files:
            raise EntryRefused(f"it lists {file.path} twice")
        files[file.path] = file
    if SKILL_FILE not in files:
        raise EntryRefused(f"it does not list its {SKILL_FILE}")
    if sum(file.size for file in files.values()) > MAX_BYTES:
        raise EntryRefused(f"its files have more than {MAX_BYTES >> 20} MiB")
    folders = {path.rsplit("/", depth)[0] for path in files for depth in range(1, path.count("/") + 1)}
    if folders & files.keys():
        raise EntryRefused("a name is a file and a folder at once")
    return ListedSkill(uri, frontmatter, files)


def _file(resource: object, base: str) -> FarFile:
    if not isinstance(resource, dict):
        raise EntryRefused("a resource is no object")
    uri, digest, size = resource.get("uri"), resource.get("digest"), resource.get("size")
    if not isinstance(uri, str) or not uri.startswith(base):
        raise EntryRefused("a resource lies outside its folder")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise EntryRefused(f"{uri} has no sha256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise EntryRefused(f"{uri} has no size")
    try:
        parts = [unquote(part, errors="strict") for part in uri.removeprefix(base).split("/")]
    except UnicodeDecodeError as error:
        raise EntryRefused(f"{uri} is no UTF-8") from error
    for part in parts:  # each by itself: an escaped slash must not make two of one
        _plain(part)
    return FarFile("/".join(parts), uri, digest, size)


def _plain(part: str) -> None:
    """Refuse a part of a path that could mean another place. Raises EntryRefused."""
    if part in {"", ".", ".."} or any(char in "/\\?#" or ord(char) < 32 for char in part) or len(part.encode()) > 255:
        raise EntryRefused("a path has empty, dotted or unsafe parts")


def same_value(first: object, second: object) -> bool:
    """Whether two JSON values are one: numbers by value, everything else by kind too."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return type(first) is type(second) and first == second if not _numbers(first, second) else first == second


def _numbers(first: object, second: object) -> bool:
    return isinstance(first, int | float) and isinstance(second, int | float)


Verify = Callable[[ListedSkill, str, bytes], str | None]
"""Takes an entry, a path and the bytes that came for it; returns what is wrong with them, or None."""

MISMATCH: Final = "mcp_mismatch"


def verify(entry: ListedSkill, path: str, data: bytes) -> str | None:
    """Compare bytes with what the listing says: size, digest, and the fields of a SKILL.md. None: they agree."""
    if entry.files is not None:
        file = entry.files.get(path)
        if file is None:
            return "unlisted"
        if len(data) != file.size:
            return "size"
        if digest_of(data) != file.digest:
            return "digest"
    if path == SKILL_FILE and not _agrees(data, entry.frontmatter):
        return "frontmatter"
    return None


class FarFiles:
    """Content of a remote skill; implements `kdskills.skills.roots.FarContent`.

    Args:
        entry: What the listing says.
        server: Where the files are; no other place is read from.
        cache: Folder of fetched files by digest.
        changed: Called when what came is not what is listed, so that the entry is looked up again.
        check: Compares bytes with the entry.
    """

    def __init__(
        self,
        entry: ListedSkill,
        server: Server,
        cache: Path,
        changed: Callable[[ListedSkill], None],
        check: Verify = verify,
    ) -> None:
        self.entry = entry
        self._server = server
        self._cache = cache
        self._changed = changed
        self._verify = check

    @property
    def paths(self) -> tuple[str, ...]:
        """Every listed file."""
        return tuple(sorted(self.entry.files or ()))

    def check(self, path: str) -> None:
        """Return when *path* is listed. Raises FileRefused."""
        if self.entry.files is not None and path not in self.entry.files:
            folder = any(name.startswith(f"{path}/") for name in self.entry.files)
            code = "not_regular" if folder else "file_missing"
            raise FileRefused(f"{path} is no file of this skill", code=code, path=path)

    def fetch(self, path: str, limit: int) -> bytes:
        """Return the checked bytes of *path*, from the cache when they are still those. Raises FileRefused."""
        self.check(path)
        file = None if self.entry.files is None else self.entry.files[path]
        if file is not None and file.size > limit:
            raise FileRefused(f"{path} has more than {limit} bytes", code="too_large", path=path, limit=limit)
        if file is not None:
            cached = self._cached(file.digest)
            if cached is not None and self._verify(self.entry, path, cached) is None:
                return cached
        uri = f"{self.entry.base}/{quote(path)}" if file is None else file.uri
        try:
            data = self._server.read((uri,))[0]
        except ServerFailed as error:
            raise FileRefused(error.message, code="unreadable", path=path, reason="server") from error
        if len(data) > limit:
            raise FileRefused(f"{path} has more than {limit} bytes", code="too_large", path=path, limit=limit)
        self._demand(path, data)
        if file is not None:
            self._keep(file.digest, data)
        return data

    @contextmanager
    def materialized(self) -> Iterator[Path]:
        """Give a folder with every listed file, and remove it afterwards. Raises FileRefused."""
        if self.entry.files is None:
            raise FileRefused("the server does not say what files this skill has", code="unreadable", path=".")
        private_folder(self._cache)
        with tempfile.TemporaryDirectory(prefix="tree-", dir=self._cache) as name:
            top = Path(name)
            for path in self.paths:
                target = top / path
                make_folder(target.parent)
                write_private(target, self.fetch(path, MAX_BYTES))
            yield top

    def body(self) -> str:
        """Return the instructions. Raises FileRefused."""
        data = self.fetch(SKILL_FILE, MAX_BYTES)
        skill = parse_skill_bytes(data, folder=self.entry.parts[-1]).skill
        if skill is None:
            raise FileRefused(f"{SKILL_FILE} does not parse", code="unreadable", path=SKILL_FILE, reason="frontmatter")
        return skill.body

    def compact(self) -> str | None:
        """Return None: a short variant is a file like any other, read only when asked for."""
        return None

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return nothing: a turn does not take sources from servers."""
        return ()

    def tree_digest(self) -> str:
        """Return the digest of the listed set; without a list a new random one each time, so nothing is cached by it."""
        return self.entry.tree or f"sha256:{secrets.token_hex(32)}"

    def _demand(self, path: str, data: bytes) -> None:
        reason = self._verify(self.entry, path, data)
        if reason is not None:
            self._changed(self.entry)
            message = f"{path} is not what its server listed ({reason}): changed, needs approval"
            raise FileRefused(message, code=MISMATCH, path=path, reason=reason)

    def _cached(self, digest: str) -> bytes | None:
        try:
            data = (self._cache / digest.removeprefix("sha256:")).read_bytes()
        except OSError:  # missing or unreadable: it is fetched again
            return None
        return data if digest_of(data) == digest else None

    def _keep(self, digest: str, data: bytes) -> None:
        if digest_of(data) != digest:
            return
        private_folder(self._cache)
        with tempfile.NamedTemporaryFile(dir=self._cache, prefix=".new-", delete=False) as new:
            new.write(data)
        Path(new.name).replace(self._cache / digest.removeprefix("sha256:"))


def digest_of(data: bytes) -> str:
    """Return `sha256:` and the hex digest."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _agrees(data: bytes, frontmatter: Mapping[str, Any]) -> bool:
    header = read_frontmatter(data, FileFindings("lenient", SKILL_FILE))
    if header is None or header.repairs or header.document.duplicates:
        return False
    fields: dict[str, Any] = to_python(header.fields)
    return same_value(fields, dict(frontmatter))
