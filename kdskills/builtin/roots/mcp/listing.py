"""The catalog of an MCP root: a server's entries, checked before anything is made of them, and the files of its skills.

Files are fetched when used, checked on every read, and kept by digest. The sets of files the operator accepted are kept
in a file that several processes share.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from kdskills.builtin.roots.mcp.wire import SdkServer, ServerFailed
from kdskills.errors import Conflict, Diagnostic, FileRefused, KdskillsError, NotFound
from kdskills.execution.dirs import locked, write_note
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import read_frontmatter
from kdskills.skills.parse import parse_skill_bytes
from kdskills.skills.private_files import make_folder, private_folder, write_private
from kdskills.skills.roots import RootScan, SetChange, SkillRecord
from kdskills.skills.safe_open import NO_STAMP, is_withheld, rows_digest
from kdskills.skills.yaml_core import to_python

SKILL_FILE: Final = "SKILL.md"
MAX_FILES: Final = 512
MAX_BYTES: Final = 16 * 1024 * 1024
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class EntryRefused(Exception):  # internal to this package: every one becomes a diagnostic
    """Why an entry is not used."""


class FarFile(NamedTuple):
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
        if is_withheld(file.path):
            continue
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
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return first == second and (numbers or type(first) is type(second))


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
    if path == SKILL_FILE:
        header = read_frontmatter(data, FileFindings("lenient", SKILL_FILE))
        if header is None or header.repairs or header.document.duplicates:
            return "frontmatter"
        return None if same_value(to_python(header.fields), dict(entry.frontmatter)) else "frontmatter"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class FarFiles:
    """Content of a remote skill, read from its server alone; implements `kdskills.skills.roots.FarContent`.

    Fetched files lie in *cache* by digest. *changed* is called when what came is not what is listed, so that the entry is
    looked up again.
    """

    entry: ListedSkill
    server: SdkServer
    cache: Path
    changed: Callable[[ListedSkill], None]
    verify: Verify

    @property
    def paths(self) -> tuple[str, ...]:
        """Every listed file."""
        return tuple(sorted(self.entry.files or ()))

    def check(self, path: str) -> None:
        """Return when *path* is listed, evaluations never are. Raises FileRefused."""
        if is_withheld(path):
            raise FileRefused(f"{path} is no file of this skill", code="file_missing", path=path)
        if self.entry.files is not None and path not in self.entry.files:
            folder = any(name.startswith(f"{path}/") for name in self.entry.files)
            code = "not_regular" if folder else "file_missing"
            raise FileRefused(f"{path} is no file of this skill", code=code, path=path)

    def fetch(self, path: str, limit: int) -> bytes:
        """Return the checked bytes of *path*, from the cache when they are still those. Raises FileRefused."""
        self.check(path)
        file = None if self.entry.files is None else self.entry.files[path]
        too_large = FileRefused(f"{path} has more than {limit} bytes", code="too_large", path=path, limit=limit)
        if file is not None:
            if file.size > limit:
                raise too_large
            with suppress(OSError):  # missing or unreadable: it is fetched again
                cached = self.cache.joinpath(file.digest.removeprefix("sha256:")).read_bytes()
                if digest_of(cached) == file.digest and self.verify(self.entry, path, cached) is None:
                    return cached
        uri = f"{self.entry.base}/{quote(path)}" if file is None else file.uri
        try:
            data = self.server.read((uri,))[0]
        except ServerFailed as error:
            raise FileRefused(error.message, code="unreadable", path=path, reason="server") from error
        if len(data) > limit:
            raise too_large
        reason = self.verify(self.entry, path, data)
        if reason is not None:
            self.changed(self.entry)
            message = f"{path} is not what its server listed ({reason}): changed, needs approval"
            raise FileRefused(message, code=MISMATCH, path=path, reason=reason)
        if file is not None and digest_of(data) == file.digest:
            write_note(private_folder(self.cache) / file.digest.removeprefix("sha256:"), data)
        return data

    @contextmanager
    def materialized(self) -> Iterator[Path]:
        """Give a folder with every listed file, and remove it afterwards. Raises FileRefused."""
        if self.entry.files is None:
            raise FileRefused("the server does not say what files this skill has", code="unreadable", path=".")
        with tempfile.TemporaryDirectory(prefix="tree-", dir=private_folder(self.cache)) as name:
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


def digest_of(data: bytes) -> str:
    """Return `sha256:` and the hex digest."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


ACCEPTED: Final = "accepted.json"
NEVER: Final = ""
"""Stands for a set that was not accepted: no set has this digest."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """What an approval is bound to: the digest over every (uri, digest), and the digests of files by path. Files are
    None where a set was noted without them.
    """

    digest: str
    files: Mapping[str, str] | None = None

    @classmethod
    def from_row(cls, value: Any) -> FileSet:
        """Return the set in a row of the file; a malformed row gives a set that equals none, and so needs approval."""
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, dict) or not isinstance(value.get("set"), str):
            return cls(NEVER)
        files = value.get("files")
        has_digests = isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())
        return cls(value["set"], files if has_digests else None)

    def change(self, uri: str, full_id: str, accepted: FileSet | None) -> SetChange:
        """Return what is different from the set that was accepted."""
        has_files = accepted is not None and accepted.files is not None
        new, old = self.files or {}, (accepted and accepted.files) or {}
        return SetChange(
            uri=uri,
            full_id=full_id,
            digest=self.digest,
            files_known=has_files,
            added=tuple(sorted(new.keys() - old.keys())) if has_files else (),
            removed=tuple(sorted(old.keys() - new.keys())),
            changed=tuple(sorted(path for path in new.keys() & old.keys() if new[path] != old[path])),
        )


Sets = dict[str, FileSet]


class AcceptedSets:
    """Accepted sets by uri, in a file below *folder*; processes write one after the other, so that none is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Sets | None:
        """Return what was accepted; None when the file cannot be read: then no set counts as accepted."""
        try:
            rows = json.loads((self._folder / ACCEPTED).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return None
        return {str(uri): FileSet.from_row(value) for uri, value in rows.items()} if isinstance(rows, dict) else None

    def note(self, first: Mapping[str, FileSet]) -> Sets | None:
        """Accept what is listed for the first time, and return everything accepted. Raises OSError."""
        with locked(private_folder(self._folder) / ".lock"):
            accepted = self.read()
            if accepted is not None:
                accepted = {**first, **accepted}
                self._write(accepted)
            return accepted

    def accept(self, sets: Mapping[str, FileSet], *, listed: Mapping[str, FileSet]) -> None:
        """Accept *sets*, whatever was accepted before; where that is unreadable, nothing else *listed* is. Raises OSError."""
        with locked(private_folder(self._folder) / ".lock"):
            accepted = self.read()
            if accepted is None:
                accepted = {uri: FileSet(NEVER) for uri in listed}
            self._write({**accepted, **sets})

    def _write(self, sets: Sets) -> None:
        rows = {uri: {"set": each.digest, "files": each.files} for uri, each in sorted(sets.items())}
        write_note(self._folder / ACCEPTED, json.dumps(rows, indent=1))


FRESH_S: Final = 60.0


Rows = dict[str, ListedSkill | str]
"""What a server lists by uri: an entry, or why it is not used."""


class McpListing:
    """Lists a server's skills; implements `kdskills.skills.roots.ApprovedListing`. Safe from any thread.

    *folder* keeps fetched files and accepted sets; no discovery looks there. *allow_dynamic* takes skills without a list
    of files. *in_background* runs a function without making its caller wait; in a new thread when omitted.
    """

    def __init__(
        self,
        label: str,
        server: SdkServer,
        folder: Path,
        *,
        allow_dynamic: bool = False,
        check: Verify = verify,
        clock: Callable[[], float] = time.monotonic,
        in_background: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.label, self._server, self._folder = label, server, folder
        self._dynamic, self._check, self._clock = allow_dynamic, check, clock
        self._accepted = AcceptedSets(folder)
        self._in_background = in_background or (
            lambda task: threading.Thread(target=task, name=f"mcp-{label}-listing", daemon=True).start()
        )
        self._lock = threading.RLock()
        self._looked: float | None = None
        self._entries: Rows = {}
        self._added: Rows = {}
        self._scan = RootScan(0, {}, {}, (), rows_digest([]), present=False)

    def scan(self) -> RootScan:
        """Return what is listed. Only the first call waits for the server.

        Later the server is asked in the background, at most once a minute: this call returns the last listing, a later
        one the new. When the server fails, the last listing stays.
        """
        with self._lock:
            first, now = self._looked is None, self._clock()
            if self._looked is not None and now - self._looked < FRESH_S:
                return self._scan
            self._looked = now
            if first:
                self._look()
        if not first:  # `_looked` was renewed under the lock: one call a minute comes this far
            self._in_background(self._look)
        return self._scan

    def _look(self) -> None:
        """Ask the server, without the lock but for the first time, so that `scan` does not wait, and take its answer."""
        problem = None
        try:
            entries = dict(map(self._checked, self._server.entries()))
            with self._lock:
                self._entries = entries
                self._rebuild()
        except KdskillsError as error:
            problem = error.message
        except OSError as error:  # a first listing that cannot be written down as accepted must not be used
            problem = f"the accepted sets of files cannot be written: {error.strerror or error}"
        if problem is None:
            return
        words = f"The skills of {self.label} cannot be listed now: {problem.rstrip('.')}."
        note = Diagnostic("mcp_unreachable", "warning", words, ref=f"mcp:{self.label}")
        with self._lock:
            if self._scan.notes != (note,):
                self._scan = replace(self._scan, notes=(note,))

    def add(self, uri: str) -> str:
        """Add a skill that the server does not list, by its uri, and return its full id. Raises ServerFailed: the
        server does not answer, or not with this skill; NotFound: what it answered cannot be used.
        """
        other, entry = self._checked(self._server.entry(uri))
        if isinstance(entry, str) or other != uri:
            problem = entry if isinstance(entry, str) else "another uri"
            raise NotFound(f"the server {self.label!r} has no usable skill {uri}: {problem}")
        with self._lock:
            self._added[uri] = entry
            self._rebuild()
            return f"mcp-{self.label}.{self._ids()[uri]}"

    def changes(self) -> tuple[SetChange, ...]:
        """Ask the server now, and return what waits for approval, sorted by full id. Raises ServerFailed: it does not
        answer; MissingExtra: the mcp package is not installed.
        """
        entries = dict(map(self._checked, self._server.entries()))
        with self._lock:
            self._looked, self._entries = self._clock(), entries
            self._rebuild()
            accepted, ids = self._accepted.read(), self._ids()
            changes = [
                file_set.change(uri, f"mcp-{self.label}.{ids[uri]}", (accepted or {}).get(uri))
                for uri, file_set in self._sets().items()
                if _differs(file_set, uri, accepted)
            ]
        return tuple(sorted(changes, key=lambda change: change.full_id))

    def accept(self, changes: Sequence[SetChange]) -> None:
        """Accept these sets of files. Raises Conflict: `mcp_set_changed`; one of them is not listed any more."""
        with self._lock:
            listed = self._sets()
            for change in changes:
                if change.uri not in listed or listed[change.uri].digest != change.digest:
                    message = f"the files of {change.full_id} changed after the change was shown: look at it again"
                    raise Conflict(message, code="mcp_set_changed", uri=change.uri)
            self._accepted.accept({change.uri: listed[change.uri] for change in changes}, listed=listed)
            self._rebuild()

    def _checked(self, row: Mapping[str, Any]) -> tuple[str, ListedSkill | str]:
        try:
            entry = read_entry(row, allow_dynamic=self._dynamic)
        except EntryRefused as reason:
            return str(row.get("uri")), str(reason)
        named = entry.frontmatter.get("name") == entry.parts[-1]
        return entry.uri, entry if named else "its name is not the last part of its path"

    def _look_again(self, entry: ListedSkill) -> None:
        """Ask for one skill again after one of its files was not as listed."""
        try:
            uri, again = self._checked(self._server.entry(entry.uri))
        except ServerFailed:  # the reader gets the mismatch as an error; the next listing corrects the rest
            return
        with self._lock:
            entries = self._added if entry.uri in self._added else self._entries
            entries[entry.uri] = again if uri == entry.uri else "it is another skill now"
            self._rebuild()

    # What follows makes the catalog; the lock is held.

    def _usable(self) -> dict[str, ListedSkill]:
        rows = self._added | self._entries
        return {uri: entry for uri, entry in rows.items() if not isinstance(entry, str)}

    def _sets(self) -> Sets:
        """Return the sets of files listed now; skills whose server does not say are left out."""
        return {
            uri: FileSet(entry.set_digest, {path: file.digest for path, file in entry.files.items()})
            for uri, entry in self._usable().items()
            if entry.files is not None and entry.set_digest is not None
        }

    def _ids(self) -> dict[str, str]:
        """Return an id for each usable entry: its name, with path parts in front where names are equal."""
        parts = {uri: entry.parts for uri, entry in self._usable().items()}
        names = Counter(each[-1] for each in parts.values())
        return {uri: "-".join(each) if names[each[-1]] > 1 else each[-1] for uri, each in parts.items()}

    def _rebuild(self) -> None:
        accepted = self._accepted.read()
        sets = self._sets()
        if accepted is not None and (first := {uri: file_set for uri, file_set in sets.items() if uri not in accepted}):
            accepted = self._accepted.note(first)
        ids = self._ids()
        before = self._scan.skills
        records: dict[str, SkillRecord] = {}
        notes: list[Diagnostic] = []
        for uri, entry in sorted((self._added | self._entries).items(), key=itemgetter(0)):
            if isinstance(entry, str):
                notes.append(_note(self.label, "mcp_entry_invalid", "warning", uri, f"is not used: {entry}"))
                continue
            changed = accepted is None or (uri in sets and _differs(sets[uri], uri, accepted))
            record = self._record(ids[uri], entry, changed=changed)
            former = before.get(record.path, record)
            unchanged = former.digests == record.digests and (former.skill is None) == (record.skill is None)
            records[record.path] = former if unchanged else record
        total = rows_digest([(path, *record.digests) for path, record in records.items()])
        scan = RootScan(0, {}, records, tuple(notes), total, present=True)
        if scan != self._scan:
            self._scan = scan

    def _record(self, skill_id: str, entry: ListedSkill, *, changed: bool) -> SkillRecord:
        full_id, skill = f"mcp-{self.label}.{skill_id}", None
        text = json.dumps(dict(entry.frontmatter), ensure_ascii=False)
        parsed = parse_skill_bytes(f"---\n{text}\n---\n\n".encode("utf-8", "replace"), folder=entry.parts[-1])
        findings = tuple(finding for finding in parsed.diagnostics if finding.code != "empty_body")
        if changed:
            findings = (_note(self.label, "mcp_changed", "error", full_id, f"({entry.uri}) changed, needs approval"),)
        elif parsed.skill is not None:
            file = None if entry.files is None else entry.files[SKILL_FILE]
            skill = replace(
                parsed.skill,
                id=skill_id,
                namespace=f"mcp-{self.label}",
                content=FarFiles(entry, self._server, self._folder / "files", self._look_again, self._check),
                imports=(),
                allowed_tools=None,
                allowed_tool_names=(),
                diagnostics=findings,
                digest="" if file is None else file.digest,
                size=0 if file is None else file.size,
                tokens=0 if file is None else -(-file.size // 4),
                layer="user",
            )
        frontmatter = json.dumps(dict(entry.frontmatter), sort_keys=True)
        identity = rows_digest([(entry.uri, frontmatter, entry.set_digest or "")])
        facts = (NO_STAMP, 0, (), ())
        return SkillRecord(skill_id, "", (), (SKILL_FILE,), (identity,), *facts, full_id, skill, findings)


def _note(label: str, code: str, severity: Any, ref: str, problem: str) -> Diagnostic:
    fix = f"See what changed with `kdskills mcp accept {label} --dry-run`, then accept it without --dry-run."
    words = f"{ref} of the MCP server {label} {problem}."
    return Diagnostic(code, severity, words, ref=ref, fix=fix if code == "mcp_changed" else None)


def _differs(file_set: FileSet, uri: str, accepted: Sets | None) -> bool:
    """Whether a listed set is another one than was accepted."""
    return accepted is None or uri not in accepted or accepted[uri].digest != file_set.digest
