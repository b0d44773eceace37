"""Agent Skills Discovery: the index of a site's skills, read strictly and written, and the one artifact of each.

A site lists its skills in `.well-known/agent-skills/index.json`, the format 0.2.0: each has one artifact, a `SKILL.md` or an
archive, and a digest over its bytes. The older 0.1.0, in `.well-known/skills/index.json`, lists the files of each and has no
digests. Whatever comes from a site is doubted: amounts are bounded, and what is not understood is left out with a finding.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, Literal, NoReturn, get_args
from urllib.parse import quote, urldefrag, urljoin, urlsplit

from kdskills.errors import CallerMustAct, Diagnostic, FileRefused
from kdskills.execution.dirs import locked
from kdskills.skills.archives import ArchiveLimits, plan, read_directory, write_archive
from kdskills.skills.fields import MAX_NAME, name_problem
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.private_files import make_folder, replace_file
from kdskills.skills.safe_open import TreeFile, bytes_digest, read_file, read_tree, split_relative

SCHEMA: Final = "https://schemas.agentskills.io/discovery/0.2.0/schema.json"
FOLDER: Final = ".well-known/agent-skills"
OLD_FOLDER: Final = ".well-known/skills"
INDEX_FILE: Final = "index.json"
SKILL_FILE: Final = "SKILL.md"
PUBLIC_MODE: Final = 0o644
PUBLIC_FOLDER_MODE: Final = 0o755
MAX_INDEX: Final = 4 * 1024 * 1024
"""Bytes of an index."""
MAX_ENTRIES: Final = 2048
MAX_URL: Final = 2048
MAX_DESCRIPTION: Final = 1024

ArtifactKind = Literal["skill-md", "archive"]
Get = Callable[[str, int], bytes]
"""Returns what a URL gives, of at most so many bytes; raises KdskillsError."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SUFFIX: Final[Mapping[str, str]] = MappingProxyType({"skill-md": ".md", "archive": ".zip"})
_ARTIFACT = r"[a-z0-9-]{1,64}-[0-9a-f]{64}\.(?:md|zip)"
_OWN_FILE = re.compile(rf"{_ARTIFACT}|\.(?:{_ARTIFACT}|index\.json)\.\d+\.[0-9a-f]{{12}}")
"""Names of artifacts, and of what a run that broke off had written aside."""
_URL = re.compile(r"[!-\[\]-~]+")
_ZIP, _GZIP = b"PK", b"\x1f\x8b"


class SiteRefused(CallerMustAct, code="site_refused"):
    """An index or artifact of a site cannot be used: `site_index_invalid`, `site_version_unknown`, `site_digest_mismatch`
    or `site_artifact_invalid`; `details["url"]` says which.
    """


@dataclass(frozen=True, slots=True)
class SiteEntry:
    """A skill of a site.

    Attributes:
        kind: What lies at `url`; None means the folder of `files`, as 0.1.0 lists them.
        url: Of the artifact, or of the folder with a slash at its end.
        digest: `sha256:` and 64 hex digits over the artifact's bytes; None where the index has none.
        files: Paths below the folder.
    """

    name: str
    description: str
    kind: ArtifactKind | None
    url: str
    digest: str | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteIndex:
    """What an index lists, in its order; each finding is an entry that was left out, or a part of one."""

    version: Literal["0.1.0", "0.2.0"]
    entries: tuple[SiteEntry, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


def index_urls(site: str) -> tuple[str, ...]:
    """Return where the index of *site* may be, the better place first; the URL of an index stands for itself.

    A path belongs to the site: one without an index is not answered by that of its host.
    """
    parts = urlsplit(site)
    if parts.path.endswith(f"/{INDEX_FILE}"):
        return (urldefrag(site).url,)
    top = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    for folder in (FOLDER, OLD_FOLDER):
        if top.endswith(f"/{folder}"):
            return (f"{top}/{INDEX_FILE}",)
    return f"{top}/{FOLDER}/{INDEX_FILE}", f"{top}/{OLD_FOLDER}/{INDEX_FILE}"


def read_index(data: bytes, url: str) -> SiteIndex:
    """Read an index of either version.

    Args:
        data: Its bytes, at most `MAX_INDEX`.
        url: Where it was in the end, after redirects: what its entries say is relative to it.

    Raises:
        SiteRefused: `site_index_invalid` when it is no index, or lists more than 2,048 skills; `site_version_unknown`
            when its `$schema` is another one.
    """
    document = _document(data, url)
    rows, old = document.get("skills"), "$schema" not in document
    if not old and document["$schema"] != SCHEMA:
        message = f"the index at {url} is of a version that is not known: {document['$schema']!r:.200}"
        raise SiteRefused(message, code="site_version_unknown", url=url)
    if not isinstance(rows, list):
        _refuse_index(url, "it has no list `skills`")
    if len(rows) > MAX_ENTRIES:
        _refuse_index(url, f"it lists more than {MAX_ENTRIES} skills")
    objects = [row if isinstance(row, dict) else {} for row in rows]
    counts = Counter(row["name"] for row in objects if isinstance(row.get("name"), str))
    twice = frozenset(name for name, count in counts.items() if count > 1)
    entries: list[SiteEntry] = []
    findings: list[Diagnostic] = []
    for number, row in enumerate(objects, 1):
        try:
            entries.append(_entry(row, url, twice, old=old))
        except ValueError as reason:
            label = f"{row['name']!r:.80}" if isinstance(row.get("name"), str) else f"number {number}"
            message = f"The skill {label} of the index is left out: {reason}."
            findings.append(Diagnostic("site_entry_invalid", "warning", message))
    return SiteIndex("0.1.0" if old else "0.2.0", tuple(entries), tuple(findings))


def write_index(entries: Iterable[SiteEntry]) -> bytes:
    """Return the 0.2.0 index of *entries*, sorted by name: the same bytes for the same entries.

    Each has an artifact with a digest, and a `url` that may be relative to the index.
    """
    rows = [
        {"name": each.name, "type": each.kind, "description": each.description, "url": each.url, "digest": each.digest}
        for each in sorted(entries, key=lambda entry: entry.name)
    ]
    return (json.dumps({"$schema": SCHEMA, "skills": rows}, ensure_ascii=False, indent=2) + "\n").encode()


def write_artifact(folder: Path, out: BinaryIO) -> tuple[ArtifactKind, tuple[TreeFile, ...]]:
    """Write the artifact of the skill in *folder* to *out*: its SKILL.md where that is all, else a zip with it at the top.

    The same files give the same bytes everywhere. Returns what the artifact is, and the files that are in it. Raises
    FileRefused as `write_archive`, and ArchiveRefused for a skill that nobody could unpack by the rules of archives.
    """
    files = read_tree(folder)
    if [(file.path, file.executable) for file in files] == [(SKILL_FILE, False)]:
        data = read_file(folder, SKILL_FILE, limit=MAX_SKILL_BYTES).data
        out.write(data)
        return "skill-md", (TreeFile(SKILL_FILE, len(data), bytes_digest(data).partition(":")[2], executable=False),)
    files, limits = write_archive(folder, out, name=""), ArchiveLimits()
    plan(read_directory(out, limits), limits)
    out.seek(0, os.SEEK_END)
    return "archive", files


def artifact_url(name: str, kind: ArtifactKind, digest: str) -> str:
    """Return where the artifact of a skill lies beside the index: its name changes with its bytes."""
    return f"{name}-{digest.partition(':')[2]}{_SUFFIX[kind]}"


def write_site(site: Path, artifacts: Iterable[tuple[SiteEntry, BinaryIO]]) -> Path:
    """Write the index of *artifacts* and their bytes below the folder *site*, and return the index.

    Whoever reads meanwhile finds the index as it was or as it is now, and every artifact that it names. What older indexes
    named goes in the end. Raises OSError when the system refuses, ExecRefused where it has no locks.
    """
    folder = site / FOLDER
    make_folder(folder, parents=PUBLIC_FOLDER_MODE)
    folder.chmod(PUBLIC_FOLDER_MODE)
    entries: list[SiteEntry] = []
    with locked(folder):
        for entry, stream in artifacts:
            replace_file(folder / entry.url, stream.read(), mode=PUBLIC_MODE, durable=True)
            entries.append(entry)
        replace_file(folder / INDEX_FILE, write_index(entries), mode=PUBLIC_MODE, durable=True)
        current = {entry.url for entry in entries}
        for path in folder.iterdir():
            if path.name not in current and _OWN_FILE.fullmatch(path.name):
                path.unlink()
    return folder / INDEX_FILE


def fetch_archive(entry: SiteEntry, get: Get, into: Path) -> Path:
    """Fetch a skill of a site and return it as an archive in the folder *into*: a `.zip` or a `.tar.gz`, not yet judged.

    What is no archive at the site is packed into a zip with SKILL.md at its top, so that the same rules judge it.

    Raises:
        SiteRefused: `site_digest_mismatch` for other bytes than the index promises, `site_artifact_invalid` for an archive
            that is neither zip nor gzip, or files of more than 16 MiB.
        KdskillsError: As *get*.
    """
    limits = ArchiveLimits()
    if entry.kind is None:
        return _fetch_files(entry, get, into / f"{entry.name}.zip", limits.unpacked_bytes)
    data = get(entry.url, limits.archive_bytes if entry.kind == "archive" else MAX_SKILL_BYTES)
    digest = bytes_digest(data)
    if digest != entry.digest:
        message = f"the file at {entry.url} is not the one its index promises: it has {digest}, not {entry.digest}"
        code = "site_digest_mismatch"
        raise SiteRefused(message, code=code, url=entry.url, expected=entry.digest, found=digest)
    if entry.kind == "skill-md":
        return _pack({SKILL_FILE: data}, into / f"{entry.name}.zip")
    if not data.startswith((_ZIP, _GZIP)):
        raise _bad_artifact(entry.url, "it is neither a zip nor a tar.gz archive")
    archive = into / f"{entry.name}{'.zip' if data.startswith(_ZIP) else '.tar.gz'}"
    archive.write_bytes(data)
    return archive


def _fetch_files(entry: SiteEntry, get: Get, archive: Path, room: int) -> Path:
    """Fetch the files of an older site, together of at most *room* bytes."""
    files: dict[str, bytes] = {}
    for path in entry.files:
        files[path] = get(urljoin(entry.url, quote(path)), room)
        room -= len(files[path])
        if room < 0:
            raise _bad_artifact(entry.url, "its files are too large together")
    return _pack(files, archive)


def _bad_artifact(url: str, reason: str) -> SiteRefused:
    return SiteRefused(f"the skill at {url} cannot be used: {reason}", code="site_artifact_invalid", url=url)


def _pack(files: Mapping[str, bytes], archive: Path) -> Path:
    with zipfile.ZipFile(archive, "x") as out:
        for path, data in files.items():
            out.writestr(zipfile.ZipInfo(path), data)
    return archive


def _refuse_index(url: str, reason: str) -> NoReturn:
    raise SiteRefused(f"the index at {url} cannot be used: {reason}", code="site_index_invalid", url=url)


def _document(data: bytes, url: str) -> Mapping[str, Any]:
    """Return the JSON object that an index is. Raises SiteRefused."""
    if len(data) > MAX_INDEX:
        _refuse_index(url, f"it has more than {MAX_INDEX} bytes")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        _refuse_index(url, f"it is no JSON: {error}")
    if not isinstance(document, dict):
        _refuse_index(url, "it is no JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose keys are all different: of equal ones, readers would take different ones."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return fields


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _entry(row: Mapping[str, Any], index_url: str, twice: frozenset[str], *, old: bool) -> SiteEntry:
    """Return one entry of an index. Raises ValueError with the reason, a clause, when it cannot be used."""
    name, description = (_text(row, key) for key in ("name", "description"))
    problem = f"its name has more than {MAX_NAME} characters" if len(name) > MAX_NAME else name_problem(name)
    if problem is not None or name in twice:
        raise ValueError(problem or "another one has its name")
    if len(description) > MAX_DESCRIPTION:
        raise ValueError(f"its description has more than {MAX_DESCRIPTION} characters")
    if old:
        return SiteEntry(name, description, None, urljoin(index_url, f"{name}/"), files=_paths(row.get("files")))
    kind = next((known for known in get_args(ArtifactKind) if known == row.get("type")), None)
    if kind is None:
        raise ValueError(f"its type {row.get('type')!r:.40} is not known")
    digest = _text(row, "digest")
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError("its digest is not `sha256:` and 64 hex digits in lower case")
    return SiteEntry(name, description, kind, _resolved(index_url, _text(row, "url")), digest)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip() or (key != "description" and not value.isprintable()):
        raise ValueError(f"its {key} is missing or no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"its {key} holds half a character") from None
    return value


def _resolved(index_url: str, reference: str) -> str:
    """Return the URL of an artifact. Raises ValueError unless it is one of http, or of https where the index came by it."""
    if len(reference) > MAX_URL or _URL.fullmatch(reference) is None:
        raise ValueError(f"its url is longer than {MAX_URL} characters, or has some that no URL has")
    url = urldefrag(urljoin(index_url, reference)).url
    parts = urlsplit(url)
    schemes = {"https"} if index_url.startswith("https:") else {"http", "https"}
    if parts.scheme not in schemes:
        raise ValueError(f"its url is not one of {' or '.join(sorted(schemes))}")
    if not parts.hostname or "@" in parts.netloc or parts.port == 0:
        raise ValueError("its url has no host, or names a user")
    return url


def _paths(value: object) -> tuple[str, ...]:
    """Return the paths that 0.1.0 lists. Raises ValueError unless they are plain, different, and one is SKILL.md."""
    limits = ArchiveLimits()
    if not isinstance(value, list) or not all(isinstance(path, str) for path in value):
        raise ValueError("its files are no list of paths")
    if len(value) > limits.files or len(set(value)) != len(value):
        raise ValueError(f"it has more than {limits.files} files, or one twice")
    for path in value:
        try:
            split_relative(path)
            long = len(path.encode()) > limits.path_bytes
        except (FileRefused, UnicodeEncodeError):
            raise ValueError(f"the path {path!r:.80} is not plain") from None
        if long or "\\" in path or not path.isprintable():
            raise ValueError(f"the path {path!r:.80} is not plain")
    if SKILL_FILE not in value:
        raise ValueError(f"it has no {SKILL_FILE}")
    return tuple(value)
