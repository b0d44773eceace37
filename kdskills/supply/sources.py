"""What SOURCE means at `kdskills add`, and what comes of it: every kind ends as zip archives that the rules of archives judge.

Nothing of a source runs.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from kdskills.errors import BadRequest, Diagnostic, FileRefused, KdskillsError
from kdskills.execution.dirs import cache_dir, private_dir
from kdskills.skills.archives import (
    MIB,
    ArchiveLimits,
    ArchiveRefused,
    StoredZip,
    UnpackedSkill,
    ZipEntry,
    entry_path,
    printable,
    read_directory,
    unpack_entries,
    unpack_skill,
    write_archive,
)
from kdskills.skills.folder import SKILL_FILES
from kdskills.skills.safe_open import PREFIX, file_digest, read_file, split_relative
from kdskills.supply.fetching import (
    GitRepository,
    HttpFetch,
    SourceFailed,
    SourceFile,
    Tell,
    is_loopback,
    without_login,
)
from kdskills.supply.index import MAX_INDEX, SiteEntry, fetch_archive, index_urls, read_index

SourceKind = Literal["folder", "archive", "git", "site", "mcp"]
FetchMcp = Callable[[str, Path, Sequence[str]], "tuple[list[FetchedArchive], list[RefusedSkill]]"]
"""Fetches skills of an MCP server, of these names where any are given, as archives in a folder that is empty before."""

CONTAINER: Final = ArchiveLimits(
    archive_bytes=512 * MIB,
    directory_bytes=16 * MIB,
    entries=60_000,
    files=60_000,
    unpacked_bytes=1024 * MIB,
    depth=64,
    path_bytes=4096,
)
"""Bounds of what holds skills; each skill has those of `ArchiveLimits` itself."""

MAX_SOURCE: Final = 2048
"""Characters of what a person calls a source."""
MAX_CACHED: Final = 1024 * MIB
"""Bytes of archives in the cache."""
SKIPPED_FOLDERS: Final = frozenset({".git", "node_modules", "__pycache__", "__MACOSX"})
GIT_HOSTS: Final = frozenset({"github.com", "gitlab.com", "codeberg.org", "bitbucket.org"})
LFS_MARK: Final = b"version https://git-lfs.github.com/spec/"

_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}")
_SCP = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9.-]+:(?!//)(?P<path>[^:]+)")
_ARCHIVE_NAMES = (".zip", ".tar.gz", ".tgz", ".skill")


@dataclass(frozen=True, slots=True)
class SkillSource:
    """Where skills come from.

    Attributes:
        kind: What it is.
        location: Path on this machine, or the URL that is asked, credentials included.
        ref: Branch, tag or commit of a repository; empty for its usual branch.
        below: Folder in it to look in; empty for all of it.
        text: What the lock says of it: the same without credentials.
    """

    kind: SourceKind
    location: str
    ref: str
    below: str
    text: str


@dataclass(frozen=True, slots=True)
class RefusedSkill:
    """A skill of the source that is not taken: where it lies there, and why."""

    path: str
    code: str
    message: str


class FetchedArchive(NamedTuple):
    """A zip or tar.gz that nobody has judged yet, what the lock says it was, and skills that are not in it.

    Where its source has promised one skill, `promised` is its name, and every other one is refused.
    """

    path: Path
    resolved: str
    refused: tuple[RefusedSkill, ...] = ()
    promised: str = ""


@dataclass(frozen=True, slots=True)
class FetchedSkill:
    """A skill in scratch, judged and whole, with what its source was."""

    unpacked: UnpackedSkill
    resolved: str


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """What came of a source, and findings about it as a whole."""

    skills: tuple[FetchedSkill, ...]
    refused: tuple[RefusedSkill, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


def parse_source(text: str, *, base: Path, ref: str = "") -> SkillSource:
    """Return what *text* names; relative paths begin at *base*. *ref* stands for an `@ref` in it.

    Raises SourceFailed, `source_invalid`, for what is none; nothing is asked of a network.
    """
    target, _, below = text.partition("#")
    if not target or len(text) > MAX_SOURCE or not text.isprintable() or target.startswith("-"):
        raise _invalid(text, "it is empty, too long, begins with a dash, or has characters that cannot be printed")
    if target.startswith("mcp+stdio:"):
        raise _invalid(
            text, "a lock with it could name any program, which the next update would start; serve it by http"
        )
    if target.startswith("mcp+"):
        return _checked(SkillSource("mcp", text, ref, "", text))
    git = target.startswith("git+")
    target = target.removeprefix("git+")
    scheme = target.partition("://")[0].lower() if "://" in target else ""
    if scheme in {"", "file"} and not _SCP.fullmatch(target):
        return _checked(_local(text, target, ref, below, base, git=git))
    if scheme in {"", "ssh"}:
        split = urlsplit(target) if scheme else None
        if split is not None and split.password is not None:
            raise _invalid(text, "ssh takes no password from a URL")
        path = split.path if split is not None else target.partition(":")[2]
        head = target[: len(target) - len(path)]
        path, _, named_ref = path.partition("@")
        return _checked(
            SkillSource(
                "git", head + path, ref or named_ref, below, _locked_text("", head + path, ref or named_ref, below)
            )
        )
    if scheme not in {"https", "http"}:
        raise _invalid(text, f"sources of kind {scheme!r:.40} are not read")
    return _checked(_remote(text, target, ref, below, git=git))


def _local(text: str, target: str, ref: str, below: str, base: Path, *, git: bool) -> SkillSource:
    path_text = unquote(urlsplit(target).path) if target.startswith("file:") else target
    path = base / os.path.expanduser(path_text)  # noqa: PTH111 - that of `Path` fails for a user who is not there
    if not os.path.exists(path) and "@" in path_text:  # noqa: PTH110 - nor does it fail for a name that is too long
        path_text, _, named_ref = path_text.rpartition("@")
        path, ref = base / os.path.expanduser(path_text), ref or named_ref  # noqa: PTH111
    if not os.path.exists(path):  # noqa: PTH110
        raise _invalid(text, "there is no such file or folder")
    if not path.is_dir():
        kind: SourceKind = "archive"
    else:
        bare = (path / "HEAD").is_file() and (path / "objects").is_dir()
        kind = "git" if git or ref or bare else "folder"
    return SkillSource(
        kind, os.path.normpath(path.absolute()), ref, below, _locked_text("git+" * git, path_text, ref, below)
    )


def _remote(text: str, target: str, ref: str, below: str, *, git: bool) -> SkillSource:
    try:
        split = urlsplit(target)
        _ = split.port
    except ValueError as error:
        raise _invalid(text, str(error)) from None
    if not split.hostname:
        raise _invalid(text, "it names no host")
    if split.scheme == "http" and not is_loopback(split.hostname):
        raise _invalid(text, "plain http is for servers on loopback; use https")
    path, _, named_ref = split.path.partition("@")
    steps = [part for part in path.split("/") if part]
    is_git = git or path.endswith(".git") or (split.hostname in GIT_HOSTS and len(steps) == 2)
    if is_git and split.scheme == "https":
        url = split._replace(path=path, query="", fragment="").geturl()
        return SkillSource(
            "git", url, ref or named_ref, below, _locked_text("git+" * git, without_login(url), ref or named_ref, below)
        )
    if git:
        raise _invalid(text, "repositories come by https, ssh, or from this machine")
    kind: SourceKind = "archive" if split.path.lower().endswith(_ARCHIVE_NAMES) else "site"
    return SkillSource(kind, target, ref, below, _locked_text("", without_login(target), ref, below))


def _checked(source: SkillSource) -> SkillSource:
    if source.ref and (source.kind != "git" or not _REF.fullmatch(source.ref) or ".." in source.ref):
        raise _invalid(source.text, f"{source.ref!r:.100} is no branch, tag or commit of it")
    try:
        if source.below:
            split_relative(source.below)
    except FileRefused:
        raise _invalid(source.text, f"{source.below!r:.100} is no folder below it") from None
    return source


def _invalid(text: str, reason: str) -> SourceFailed:
    plain = without_login(text)
    return SourceFailed(f"{plain!r:.300} is no source of skills: {reason}")


def _locked_text(prefix: str, location: str, ref: str, below: str) -> str:
    return f"{prefix}{location}{'@' * bool(ref)}{ref}{'#' * bool(below)}{below}"


def locked_text(source: SkillSource, root: Path) -> str:
    """Return what the lock of the bundle in *root* says of a source: a relative path begins at the bundle."""
    if not source.location.startswith("/"):
        return source.text
    prefix, text = ("git+", source.text.removeprefix("git+")) if source.text.startswith("git+") else ("", source.text)
    if text.startswith(("/", "~", "file:")):
        return f"{prefix}{source.location}{_suffix(source)}"
    path = os.path.relpath(os.path.realpath(source.location), os.path.realpath(root))
    return f"{prefix}{path if path.startswith('.') else f'./{path}'}{_suffix(source)}"


def _suffix(source: SkillSource) -> str:
    return f"{'@' * bool(source.ref)}{source.ref}{'#' * bool(source.below)}{source.below}"


def same_source(text: str, source: SkillSource, base: Path) -> bool:
    """Whether an entry of the lock comes from *source*, of whatever branch or folder of it."""
    try:
        former = parse_source(text, base=base)
    except SourceFailed:  # what it came from is gone
        return False
    locations = [os.path.realpath(each.location) if each.location[0] == "/" else each.text for each in (former, source)]
    cut = [
        location.partition("#")[0].removesuffix(f"@{each.ref}")
        for location, each in zip(locations, (former, source), strict=True)
    ]
    return cut[0] == cut[1]


def fetch_source(
    source: SkillSource,
    scratch: Path,
    *,
    names: Sequence[str] = (),
    resolved: str = "",
    tell: Tell = lambda *_: None,
    mcp: FetchMcp | None = None,
) -> FetchedSource:
    """Fetch what *source* has into *scratch*, an empty folder, and judge every skill of it.

    Args:
        source: What was parsed.
        scratch: Where everything is left that comes.
        tell: Told the progress.
        names: Skills that are numbers_to_read; others of a site are not downloaded, others of any source not returned.
        resolved: Commit to fetch, instead of what the source's ref is now.
        mcp: Fetches the skills of an MCP server.

    Raises:
        SourceFailed: `source_invalid`, `source_unreachable`, `source_too_large`, `source_empty`.
        ArchiveRefused: An archive that is not sound as a whole.
        KdskillsError: As *mcp*, and MissingExtra where downloads need an optional part.
    """
    diagnostics: tuple[Diagnostic, ...] = ()
    refused: list[RefusedSkill] = []
    if source.kind == "site":
        archives, refused, diagnostics = _fetch_site(source, scratch, names, tell)
    elif source.kind == "mcp":
        archives, refused = _fetch_mcp(source, scratch, names, mcp)
    else:
        archives = [_FETCHERS[source.kind](source, scratch, resolved, tell)]
    skills: list[FetchedSkill] = []
    for number, archive in enumerate(archives):
        tell("look", source.text, number, len(archives))
        refused += archive.refused
        below = source.below if source.kind == "archive" else ""
        for item in _skills_of(archive.path, scratch / f"skills-{number}", below):
            if isinstance(item, RefusedSkill):
                refused.append(item)
            elif archive.promised not in {"", item.name}:
                message = f"it is listed as the skill {archive.promised}, and it calls itself {item.name}"
                refused.append(RefusedSkill(archive.promised, "site_name_mismatch", message))
            elif not names or item.name in names:
                skills.append(FetchedSkill(item, archive.resolved))
    twice = {each.unpacked.name for each in skills if [s.unpacked.name for s in skills].count(each.unpacked.name) > 1}
    for name in sorted(twice):
        message = f"several folders have a skill {name}: say which one, as SOURCE#folder"
        refused.append(RefusedSkill(name, "skill_ambiguous", message))
    singles = sorted((each for each in skills if each.unpacked.name not in twice), key=lambda each: each.unpacked.name)
    missing = sorted({*names} - {each.unpacked.name for each in singles})
    if missing or not (singles or refused):
        reason = f"no skill {', '.join(missing)}" if missing else "no skill"
        reasons = "; ".join(f"{each.path}: {each.message}" for each in refused[:3])
        raise SourceFailed(
            f"{source.text} has {reason}{f' that can be taken: {reasons}' if reasons else ''}",
            code="source_empty",
            missing=tuple(missing),
        )
    return FetchedSource(tuple(singles), tuple(refused), diagnostics)


# -- archives that hold skills ---------------------------------------------------------------------------------------


Contents = Callable[[Sequence[int]], Iterator[bytes]]
"""Yields the bytes of the rows with these numbers, which ascend."""


def _skill_folders(paths: Sequence[bytes]) -> list[bytes]:
    """Return the folders that have a skill file and lie in no other such folder; "" is the top."""
    skipped = {name.encode() for name in SKIPPED_FOLDERS}
    names = {name.encode() for name in SKILL_FILES}
    folders = sorted(
        {
            folder
            for folder, _, name in (path.rpartition(b"/") for path in paths)
            if name in names and skipped.isdisjoint(folder.split(b"/"))
        }
    )
    outermost: list[bytes] = []
    for folder in folders:
        if not any(_is_below(folder, top) for top in outermost):
            outermost.append(folder)
    return outermost


def _is_below(path: bytes, folder: bytes) -> bool:
    return not folder or path.startswith(folder + b"/")


def _pack(rows: Sequence[SourceFile], contents: Contents, archive: Path, resolved: str = "") -> FetchedArchive:
    """Write a zip of all files that belong to skills; those of a skill with too many bytes stay out, and it is refused."""
    limits = ArchiveLimits()
    tops = {tuple(top.split(b"/")) if top else (): top for top in _skill_folders([row.raw for row in rows])}
    depths = sorted({len(steps) for steps in tops})
    members: dict[bytes, list[int]] = {top: [] for top in tops.values()}
    for number, row in enumerate(rows):
        steps = row.raw.split(b"/")
        top = next((tops[key] for depth in depths if (key := tuple(steps[:depth])) in tops), None)
        if top is not None and row.raw and b".git" not in steps:
            members[top].append(number)
    numbers_to_read: list[int] = []
    refused: list[RefusedSkill] = []
    for top, numbers in members.items():
        if sum(rows[number].size for number in numbers) > limits.unpacked_bytes:
            message = f"it has more than {limits.unpacked_bytes} bytes"
            refused.append(RefusedSkill(printable(top) or ".", "archive_unpacked_too_large", message))
        else:
            numbers_to_read += numbers[: limits.entries]
    numbers_to_read.sort()
    if (
        len(numbers_to_read) > CONTAINER.entries
        or sum(rows[number].size for number in numbers_to_read) > CONTAINER.archive_bytes // 2
    ):
        raise SourceFailed("it has more skills than can be looked at together: name a folder", code="source_too_large")
    with archive.open("xb") as stream:
        out = StoredZip(stream)
        for number, data in zip(numbers_to_read, contents(numbers_to_read), strict=True):
            out.add(rows[number].raw, rows[number].mode, len(data), zlib.crc32(data), [data])
        out.end()
    return FetchedArchive(archive, resolved, tuple(refused))


def _skills_of(archive: Path, into: Path, below: str) -> Iterator[UnpackedSkill | RefusedSkill]:
    """Unpack every skill of an archive to a folder of its own in *into*, and yield it, or why it is refused."""
    with archive.open("rb") as stream:
        if stream.read(2) == b"\x1f\x8b":
            packed = _zip_of_tarball(archive, archive.with_name(f"{archive.name}.zip"))
            archive = packed.path
            yield from packed.refused
    into.mkdir()
    with archive.open("rb") as stream:
        entries = read_directory(stream, CONTAINER)
        for entry in entries:
            _check_name(entry)
        prefix = f"{below}/".encode() if below else b""
        entries = tuple(entry for entry in entries if entry.raw.startswith(prefix))
        for number, folder in enumerate(_skill_folders([entry.raw for entry in entries])):
            start = len(folder) + bool(folder)
            own_entries = [replace(entry, raw=entry.raw[start:]) for entry in entries if _is_below(entry.raw, folder)]
            try:
                yield unpack_entries(
                    stream, [entry for entry in own_entries if entry.raw], into / str(number), ArchiveLimits()
                )
            except ArchiveRefused as error:
                yield RefusedSkill(printable(folder) or ".", error.code, error.message)


def _check_name(entry: ZipEntry) -> None:
    """Refuse the archive for a name that leads elsewhere; kinds matter only where a skill has them."""
    try:
        entry_path(entry, CONTAINER)
    except ArchiveRefused as error:
        if error.code.startswith("archive_path_") or error.code == "archive_name_not_utf8":
            raise


class _BoundedStream:
    """Reads a stream up to a number of bytes, whatever it promises, and headers of one file up to 1 MiB."""

    def __init__(self, stream: gzip.GzipFile, bound: int) -> None:
        self._stream, self._remaining = stream, bound
        self.header = MIB

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._remaining -= len(data)
        self.header -= len(data)
        if self._remaining < 0:
            raise ArchiveRefused("archive_unpacked_too_large", "it unpacks to more bytes than an archive may")
        if self.header < 0:
            raise ArchiveRefused("archive_damaged", "it has more than 1 MiB of headers for one file")
        return data


def _zip_of_tarball(tarball: Path, archive: Path) -> FetchedArchive:
    """Write the skills of a tar.gz as a zip, to be judged like any other. Raises ArchiveRefused."""
    size = tarball.stat().st_size
    if size > CONTAINER.archive_bytes:
        raise ArchiveRefused("archive_too_large", f"it has more than {CONTAINER.archive_bytes} bytes")
    bound = min(CONTAINER.unpacked_bytes, ArchiveLimits().ratio * size + MIB)

    def members() -> Iterator[tuple[SourceFile, tarfile.TarFile, tarfile.TarInfo]]:
        with gzip.open(tarball) as raw:
            stream = _BoundedStream(raw, bound)
            with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
                for count, member in enumerate(tar):
                    if count >= CONTAINER.entries:
                        message = f"it has more than {CONTAINER.entries} entries"
                        raise ArchiveRefused("archive_too_many_entries", message)
                    stream.header = bound
                    yield _row_of(member), tar, member
                    stream.header = MIB + tarfile.BLOCKSIZE
                    tar.members.clear()  # type: ignore[attr-defined]  # it keeps every entry with its headers
                    tar.pax_headers = {}
            stream.header = bound
            while stream.read(MIB):  # the checksum stands at the very end
                pass

    def contents(numbers_to_read: Sequence[int]) -> Iterator[bytes]:
        numbers = set(numbers_to_read)
        for number, (row, tar, member) in enumerate(members()):
            if number in numbers:
                source = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                data = b"" if source is None else source.read(row.size + 1)
                yield data

    try:
        rows = [row for row, _, _ in members()]
        for row in rows:
            if row.raw:
                _check_name(ZipEntry(row.raw, 0, 0, 0, 0, 0, row.mode, False, 0))
        return _pack(rows, contents, archive)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError):
        raise ArchiveRefused("archive_damaged", "it cannot be read as a gzipped tar archive") from None


def _row_of(member: tarfile.TarInfo) -> SourceFile:
    """Return what a member is; links and devices keep their kinds, so that the rules see them."""
    raw = member.name.encode("utf-8", "surrogateescape")
    raw = raw[2:] if raw.startswith(b"./") else raw
    if member.isdir():
        return SourceFile(b"" if raw == b"." else raw + b"/", stat.S_IFDIR | 0o755, 0)
    regular = member.isreg() and not member.issparse()
    kind = stat.S_IFREG if regular else stat.S_IFLNK if member.issym() or member.islnk() else stat.S_IFCHR
    return SourceFile(raw, kind | (member.mode & 0o777), member.size if regular else 0)


# -- folders and files of this machine -------------------------------------------------------------------------------


def _fetch_folder(source: SkillSource, scratch: Path, _: str, tell: Tell) -> FetchedArchive:
    root = Path(source.location, source.below)
    if not root.is_dir():
        raise SourceFailed(f"{source.text} is no folder", code="source_empty")
    tell("look", source.text, 0, 0)
    rows: list[SourceFile] = []

    def refuse(error: OSError) -> None:
        raise SourceFailed(f"{source.text} cannot be read: {error.strerror}", code="source_unreachable")

    for top, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        linked = [name for name in folders if Path(top, name).is_symlink()]
        for name in sorted([*files, *linked]):
            info = Path(top, name).lstat()
            rows.append(SourceFile(os.fsencode(os.path.relpath(Path(top, name), root)), info.st_mode, info.st_size))
        if len(rows) > 4 * CONTAINER.entries:
            raise SourceFailed(f"{source.text} has too many files: name a folder of it", code="source_too_large")

    def contents(numbers_to_read: Sequence[int]) -> Iterator[bytes]:
        for number in numbers_to_read:
            row = rows[number]
            regular = stat.S_ISREG(row.mode)
            yield read_file(root, os.fsdecode(row.raw), limit=16 * MIB).data if regular else b""

    return _pack(rows, contents, scratch / "folder.zip")


def _fetch_archive(source: SkillSource, scratch: Path, _: str, tell: Tell) -> FetchedArchive:
    target = scratch / "archive"
    if "://" in source.location:
        with target.open("xb") as out:
            HttpFetch(source.location, tell).pieces_to(source.location, CONTAINER.archive_bytes, out.write)
    else:
        path = Path(source.location)
        target.write_bytes(read_file(path.parent, path.name, limit=CONTAINER.archive_bytes).data)
    return FetchedArchive(target, PREFIX + file_digest(scratch, target.name)[1])


# -- sites and servers -----------------------------------------------------------------------------------------------


def _fetch_site(
    source: SkillSource, scratch: Path, names: Sequence[str], tell: Tell
) -> tuple[list[FetchedArchive], list[RefusedSkill], tuple[Diagnostic, ...]]:
    """Fetch the artifacts that a site's index lists, those of *names* alone where any are given, and say which are refused."""
    http = HttpFetch(source.location, tell)
    for url in index_urls(source.location):
        try:
            data, final = http.get_from(url, MAX_INDEX)
            break
        except SourceFailed as error:
            if error.details.get("status") != 404:
                raise
    else:
        message = f"{source.text} has no index of skills; a repository's URL ends in .git or begins with git+"
        raise SourceFailed(message, code="source_empty")
    index = read_index(data, final)
    archives: list[FetchedArchive] = []
    refused: list[RefusedSkill] = []
    room = CONTAINER.archive_bytes
    entries: list[SiteEntry] = [entry for entry in index.entries if not names or entry.name in names]
    for number, entry in enumerate(entries):
        tell("fetch", entry.name, number, len(entries))
        folder = scratch / f"site-{number}"
        folder.mkdir()
        try:
            path = fetch_archive(entry, http.get, folder)
        except KdskillsError as error:
            refused.append(RefusedSkill(entry.name, error.code, error.message))
            continue
        room -= path.stat().st_size
        if room < 0:
            message = f"{source.text} has more than {CONTAINER.archive_bytes} bytes: name the skills that you want"
            raise SourceFailed(message, code="source_too_large")
        resolved = entry.digest or PREFIX + file_digest(folder, path.name)[1]
        archives.append(FetchedArchive(path, resolved, promised=entry.name))
    return archives, refused, index.diagnostics


def _fetch_mcp(
    source: SkillSource, scratch: Path, names: Sequence[str], mcp: FetchMcp | None
) -> tuple[list[FetchedArchive], list[RefusedSkill]]:
    if mcp is None:
        raise BadRequest("this program has no way to MCP servers", code="source_invalid")
    folder = scratch / "mcp"
    folder.mkdir()
    return mcp(source.location, folder, names)


# -- git -------------------------------------------------------------------------------------------------------------


def _fetch_git(source: SkillSource, scratch: Path, resolved: str, tell: Tell) -> FetchedArchive:
    repository = GitRepository(source.location, source.ref, scratch, tell)
    commit = repository.fetch(resolved)
    rows, objects = repository.rows(commit, source.below)

    def contents(numbers_to_read: Sequence[int]) -> Iterator[bytes]:
        return repository.contents([objects[number] for number in numbers_to_read])

    return _pack(rows, contents, scratch / "git.zip", commit)


def moved_reason(source: SkillSource, former: SkillSource, locked: str, resolved: str) -> str:
    """Return in words how a source broke what was locked of it; empty when it is as it was, or only went on.

    A tag that names another commit, a branch of which the locked commit is no part any more, and a file or URL with other
    bytes break it; another ref or folder of the source that somebody names does not. Raises SourceFailed.
    """
    if not locked or locked == resolved or (former.ref, former.below) != (source.ref, source.below):
        return ""
    if source.kind == "archive":
        return f"{source.text} has other bytes than were locked: {resolved}, not {locked}"
    if source.kind == "git":
        with tempfile.TemporaryDirectory(prefix="kdskills-", ignore_cleanup_errors=True) as folder:
            repository = GitRepository(source.location, source.ref, Path(folder), lambda *_: None)
            if repository.is_rewritten(locked):
                return f"{source.ref or 'the branch'} of {source.text} was moved or rewritten: {resolved}, not {locked}"
    return ""


_FETCHERS: Final = {"folder": _fetch_folder, "archive": _fetch_archive, "git": _fetch_git}


# -- what was fetched before ----------------------------------------------------------------------------------------


class SkillCache:
    """Archives of skills by version, from which a lock can be followed without a network; *folder* is the cache's own."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = private_dir(private_dir(folder or cache_dir(), narrow=False) / "skills")

    def store(self, folder: Path, version: str) -> None:
        """Store a skill; a cache that cannot be written is as good as none."""
        target = self._target(version)
        if not target.is_file():
            with suppress(OSError), tempfile.TemporaryDirectory(prefix=".new-", dir=self._folder) as scratch:
                with Path(scratch, target.name).open("xb") as out:
                    write_archive(folder, out)
                Path(scratch, target.name).rename(target)
                self._prune()

    def unpacked(self, version: str, into: Path) -> UnpackedSkill | None:
        """Unpack a skill into a new folder, or return None where it is not stored, or is not what its name says."""
        if not version or not self._target(version).is_file():
            return None
        with suppress(OSError):  # what is used stays longest
            os.utime(self._target(version))
        try:
            skill = unpack_skill(self._target(version), into)
        except (ArchiveRefused, OSError):
            return None
        return skill if skill.version == version else None

    def _prune(self) -> None:
        """Remove what was used longest ago, beyond the bound. Raises OSError."""
        room = MAX_CACHED
        rows = [(file.stat(), file) for file in self._folder.glob("*.zip")]
        for facts, file in sorted(rows, key=lambda row: row[0].st_mtime_ns, reverse=True):
            room -= facts.st_size
            if room < 0:
                file.unlink(missing_ok=True)

    def _target(self, version: str) -> Path:
        return self._folder / f"{version.removeprefix('sha256:')}.zip"
