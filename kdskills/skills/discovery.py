"""Look through one root for skills, reusing what is certainly unchanged, and make a record of each skill's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field

from kdskills.errors import Diagnostic, FileRefused
from kdskills.skills.fields import fallback_id
from kdskills.skills.findings import FileFindings
from kdskills.skills.folder import (
    COMPACT_FILE,
    LIMITS,
    SKILL_FILES,
    SKILL_YAML,
    SOURCES_FILES,
    TOOLS_FILES,
    ContentReader,
    RegistryContent,
    read_compact,
    read_tools,
    unusable,
)
from kdskills.skills.index import JsonMapping
from kdskills.skills.model import ParsedSkill, SkillTool
from kdskills.skills.parse import parse_parts
from kdskills.skills.refs import DEFAULT_NAMESPACE
from kdskills.skills.roots import PlainFolder, RootScan, SkillRecord, SkillRoot, make_record
from kdskills.skills.safe_open import (
    MAX_DEPTH,
    NO_STAMP,
    RACY_NS,
    ROOT_FLAGS,
    bytes_digest,
    is_withheld,
    join,
    newest_of,
    open_file_at,
    open_folder_at,
    printable_path,
    read_descriptor,
    rows_digest,
    stamp_of,
    stamps_of,
)

MAX_FILES = 512
MAX_BYTES = 16 * 1024 * 1024

_NOT_ENTERED = frozenset({"node_modules", "__pycache__"})
_NOTED_FILES = frozenset((*SKILL_FILES, *SKILL_YAML, COMPACT_FILE, *SOURCES_FILES, *TOOLS_FILES))


def enters(name: str) -> bool:
    """Whether discovery looks into a folder of this name."""
    return not name.startswith(".") and name not in _NOT_ENTERED


@dataclass(slots=True)
class FolderListing:
    """One folder's entries, as far as discovery cares; `skill_file` is `SKILL.md`, else `skill.md`.

    `folders` are sorted; `files` maps the known file names present to whether each is a regular file. `count` and
    `size` add up the regular files and links directly inside.
    """

    stamp: bytes
    folders: list[str]
    files: dict[str, bool]
    count: int
    size: int
    notes: list[Diagnostic]
    skill_file: str | None

    @property
    def yaml_file(self) -> str | None:
        """A YAML file that looks as if it were meant for a skill file, or None."""
        return next((name for name in SKILL_YAML if name in self.files), None)


def list_folder(descriptor: int, path: str, stamps: dict[str, bytes] | None = None) -> FolderListing:
    """List an open folder; *path* is its path below the root, for findings. Raises OSError.

    Into *stamps*, if any, go those of the files that discovery does not read, by their paths below the root.
    """
    stamp = stamp_of(os.fstat(descriptor))
    folders: list[str] = []
    files: dict[str, bool] = {}
    notes: list[Diagnostic] = []
    count = size = 0
    with os.scandir(descriptor) as entries:
        for entry in entries:
            name = entry.name
            if name in _NOTED_FILES:
                # Of another kind than a file it is still there, and refuses or warns like one that cannot be read.
                files[name] = entry.is_file(follow_symlinks=False)
            elif entry.is_dir(follow_symlinks=False):
                if enters(name):
                    folders.append(name)
                continue
            elif entry.is_symlink():
                with suppress(OSError):  # a link in a ring, or to where this user may not look: no folder to enter
                    if entry.is_dir():
                        if enters(name):
                            printable = printable_path(join(path, name))
                            message = f"{printable} is a linked folder and was not entered."
                            notes.append(Diagnostic("symlink_skipped", "warning", message, printable))
                        continue
            count += 1
            with suppress(FileNotFoundError):  # gone since it was listed; the folder's stamp will tell
                facts = entry.stat(follow_symlinks=False)
                size += facts.st_size
                if stamps is not None and name not in files:
                    stamps[join(path, name)] = stamp_of(facts)
    folders.sort()
    if notes:
        notes.sort(key=lambda note: note.path or "")
    skill_file = next((name for name in SKILL_FILES if name in files), None) if files else None
    return FolderListing(stamp, folders, files, count, size, notes, skill_file)


def unreadable_note(path: str, reason: str | FileRefused | OSError) -> Diagnostic:
    """Say that a folder was left out because the system would not show it."""
    printable = printable_path(path) or "."
    if isinstance(reason, FileRefused):
        words = reason.__cause__.strerror if isinstance(reason.__cause__, OSError) else None
        reason = words or "it became something else than a folder while it was looked at"
    elif isinstance(reason, OSError):
        reason = reason.strerror or "the system refused"
    return Diagnostic("unreadable", "warning", f"The folder {printable} cannot be read: {reason}.", printable)


@dataclass(slots=True)
class SkillFolder:
    """A skill's folder as it is looked through and read; fields are those of `SkillRecord`, as far as it has them.

    `count` and `size` are of the files and links in it and in `below`, `findings` are about what was read.
    """

    stamps: bytes = b""
    below: list[str] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    count: int = 0
    size: int = 0
    files: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    findings: list[Diagnostic] = field(default_factory=list)
    tools: tuple[SkillTool, ...] = ()
    file_stamps: dict[str, bytes] | None = None

    @property
    def over(self) -> bool:
        """Whether the skill is beyond its bounds, so that looking further is useless."""
        return self.count > MAX_FILES or self.size > MAX_BYTES or len(self.below) >= MAX_FILES

    def add(self, listing: FolderListing) -> None:
        """Take in one folder."""
        self.stamps += listing.stamp
        self.notes += listing.notes
        self.count += listing.count
        self.size += listing.size


def walk_skill(
    descriptor: int, path: str, listing: FolderListing, stamps: dict[str, bytes] | None = None, *, nested: bool
) -> SkillFolder:
    """Look through everything an open skill's folder owns; *stamps* as for `list_folder`.

    With *nested* deeper skill files are skills of their own, and their folders are left to them.
    """
    skill = SkillFolder(file_stamps=stamps)
    skill.add(listing)
    _descend(descriptor, path, listing.folders, skill, nested, depth=1)
    if skill.over:
        message = f"The skill has more than {MAX_FILES} files or folders, or more than {MAX_BYTES // 2**20} MiB."
        skill.notes.append(Diagnostic("skill_large", "warning", message, printable_path(path)))
    return skill


def _descend(parent: int, path: str, names: list[str], skill: SkillFolder, nested: bool, depth: int) -> None:
    for name in names:
        if skill.over:
            return
        folder_path = join(path, name)
        if depth > MAX_DEPTH:
            skill.notes.append(unreadable_note(folder_path, f"it is deeper than {MAX_DEPTH} folders"))
            return
        try:
            descriptor = open_folder_at(parent, name, folder_path)
        except FileRefused as refusal:
            skill.notes.append(unreadable_note(folder_path, refusal))
            continue
        try:
            listing = list_folder(descriptor, folder_path, skill.file_stamps)
            skill.below.append(folder_path)
            if listing.skill_file is not None:
                skill.nested.append(folder_path)
                if nested:
                    # Its listing still counts here: without its skill file the folder falls back to this skill.
                    skill.stamps += listing.stamp
                    continue
                printable = printable_path(join(folder_path, listing.skill_file))
                message = f"{printable} lies inside another skill and is one of its resources."
                skill.notes.append(Diagnostic("nested_skill", "info", message, printable))
            skill.add(listing)
            _descend(descriptor, folder_path, listing.folders, skill, nested, depth + 1)
        except OSError as error:
            skill.notes.append(unreadable_note(folder_path, error))
        finally:
            os.close(descriptor)


DEEPEST = 6


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Bounds of one root."""

    folders: int = 50_000
    skills: int = 20_000


SCAN_LIMITS = ScanLimits()


class _Folder:
    """A folder opened only when something in it must be read, by way of the folder it lies in."""

    __slots__ = ("_descriptor", "name", "parent", "path")

    def __init__(self, parent: _Folder | None, name: str, descriptor: int | None = None) -> None:
        self.parent = parent
        self.name = name
        self.path: str = join(parent.path, name) if parent is not None else ""
        self._descriptor = descriptor

    def descriptor(self) -> int:
        """Return the open folder. Raises `FileRefused`."""
        if self._descriptor is None:
            assert self.parent is not None  # the top is given open
            self._descriptor = open_folder_at(self.parent.descriptor(), self.name, self.path)
        return self._descriptor

    def close(self) -> None:
        """Close the folder if it was opened."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RootScanner:
    """One walk through one root, whose folder *base* was resolved just now.

    *old* is what an earlier walk found, and *load* is asked about skills' folders that are new or may have changed. `listed`
    holds the folders that had to be listed again. *stamps* as for `list_folder`.
    """

    def __init__(
        self,
        root: SkillRoot,
        base: str,
        old: RootScan | None,
        load: SkillLoader,
        clock: Callable[[], int],
        limits: ScanLimits = SCAN_LIMITS,
        stamps: dict[str, bytes] | None = None,
    ) -> None:
        self._root = root
        self._stamps = stamps
        self._base = base
        self._prefix = base.rstrip("/") + "/"
        self._old_folders = old.folders if old is not None else {}
        self._old_skills = old.skills if old is not None else {}
        self._old = old
        self._unchanged: dict[str, SkillRecord] = {}
        self._load = load
        self._limits = limits
        self._checked_at = clock()
        # Stamps of the last two seconds before the earlier walk prove nothing: the clock may not have ticked since.
        self._proof = (old.checked_at if old is not None else 0) - RACY_NS
        self._folders: dict[str, PlainFolder] = {}
        self._skills: dict[str, SkillRecord] = {}
        self._visited_count = 0
        self._cut = False
        self.listed: set[str] = set()

    def run(self) -> RootScan:
        """Walk the root. The earlier result itself comes back when nothing had to be read.

        A root that is not there gives an absent scan; nothing else about the file system raises.
        """
        try:
            descriptor = os.open(self._base, ROOT_FLAGS)
        except OSError as error:
            if self._old is not None and not self._old.present:
                return self._old
            reason = error.strerror or "the system refused"
            message = f"The skill root {self._root.label} ({self._root.uri}) is not there: {reason}."
            note = Diagnostic("root_missing", "warning", message, ref=self._root.label)
            return RootScan(self._checked_at, {}, {}, (note,), "", False)
        with closing(_Folder(None, "", descriptor)) as top:
            self._unchanged = self._look(descriptor)
            self._visit(top, 0, DEFAULT_NAMESPACE)
        if self._old is not None and self._old.present and not self.listed:
            return self._old
        notes: tuple[Diagnostic, ...] = ()
        if self._cut:
            message = (
                f"The root {self._root.label} has more than {self._limits.folders} folders or {self._limits.skills} "
                "skills; what comes later in sorted order is left out."
            )
            notes = (Diagnostic("scan_limit", "warning", message, ref=self._root.label),)
        return RootScan(self._checked_at, self._folders, self._skills, notes, root_digest(self._skills), True)

    def _visit(self, folder: _Folder, depth: int, namespace: str) -> None:
        """Look at one folder that may be a skill, or may hold some."""
        if self._visited_count >= self._limits.folders or len(self._skills) >= self._limits.skills:
            self._cut = True
            return
        self._visited_count += 1
        path = folder.path
        record = self._unchanged.get(path)
        if record is not None and depth and record.layout_namespace == namespace:
            self._adopt(folder, record, depth)
            return
        plain = self._old_folders.get(path)
        if plain is None or not self._is_unchanged(path, plain.stamp):
            self.listed.add(path)
            try:
                listing = list_folder(folder.descriptor(), path, self._stamps)
            except (FileRefused, OSError) as error:
                # No folder has this stamp: the next walk tries again.
                self._folders[path] = PlainFolder(NO_STAMP, (), (unreadable_note(path, error),))
                return
            if listing.skill_file is not None and depth:
                descriptor = folder.descriptor()
                skill = walk_skill(descriptor, path, listing, self._stamps, nested=self._root.nested)
                old = self._old_skills.get(path)
                self._adopt(folder, self._load(descriptor, path, namespace, listing, skill, old), depth)
                return
            plain = self._plain(path, listing, depth)
        self._folders[path] = plain
        self._below(folder, plain.children, depth, namespace)

    def _below(self, folder: _Folder, names: tuple[str, ...], depth: int, namespace: str) -> None:
        if not names:
            return
        namespace = self._root.fixed_namespace or (namespace if depth == 0 else folder.name)
        unchanged, skills, limits = self._unchanged, self._skills, self._limits
        above = f"{folder.path}/" if folder.path else ""
        for name in names:
            # Nearly every folder of a warm start is an unchanged skill: it is taken over here, without ceremony.
            path = above + name
            record = unchanged.get(path)
            if (
                record is not None
                and record.layout_namespace == namespace
                and not record.nested
                and self._visited_count < limits.folders
                and len(skills) < limits.skills
            ):
                self._visited_count += 1
                skills[path] = record
                continue
            with closing(_Folder(folder, name)) as child:
                self._visit(child, depth + 1, namespace)
            if self._cut:
                return

    def _plain(self, path: str, listing: FolderListing, depth: int) -> PlainFolder:
        notes = list(listing.notes)
        if listing.skill_file is not None:
            file_path = join(path, listing.skill_file)
            message = f"{file_path} lies directly in the root {self._root.label}; a skill needs a folder of its own."
            notes.append(Diagnostic("root_is_skill", "warning", message, file_path))
        elif listing.yaml_file is not None and depth:
            file_path = printable_path(join(path, listing.yaml_file))
            message = f"{file_path} is not a skill file; a skill is a SKILL.md with frontmatter."
            notes.append(Diagnostic("skill_yaml", "warning", message, file_path))
        deepest = DEEPEST if self._root.deep else 2
        return PlainFolder(listing.stamp, tuple(listing.folders) if depth < deepest else (), tuple(notes))

    def _adopt(self, folder: _Folder, record: SkillRecord, depth: int) -> None:
        self._skills[record.path] = record
        if not (self._root.nested and record.nested):
            return
        namespace = record.full_id.partition(".")[0]
        for nested_path in record.nested:
            if is_withheld(nested_path[len(record.path) + 1 :]):
                continue
            with ExitStack() as chain:
                inner = folder
                for name in nested_path[len(folder.path) + 1 :].split("/"):
                    inner = chain.enter_context(closing(_Folder(inner, name)))
                self._visit(inner, max(depth, DEEPEST), self._root.fixed_namespace or namespace)

    def _is_unchanged(self, path: str, stamp: bytes) -> bool:
        try:
            status = os.lstat(self._prefix + path)
        except OSError:
            return False
        return newest_of(stamp) < self._proof and stamp_of(status) == stamp

    def _look(self, root: int) -> dict[str, SkillRecord]:
        """Return by path the skills of which nothing can have changed. This is most of a warm start.

        All are asked about in one go, for what a call costs counts when there are thousands.
        """
        records = [record for record in self._old_skills.values() if record.newest < self._proof]
        unchanged: dict[str, SkillRecord] = {}
        try:
            stamps = stamps_of(root, _stamped_paths(records))
        except OSError:  # something is gone: one by one they show which
            for record in records:
                with suppress(OSError):
                    if stamps_of(root, _stamped_paths((record,))) == record.stamps:
                        unchanged[record.path] = record
            return unchanged
        position = 0
        for record in records:
            end = position + len(record.stamps)
            if stamps[position:end] == record.stamps:
                unchanged[record.path] = record
            position = end
        return unchanged


def _stamped_paths(records: Iterable[SkillRecord]) -> list[str]:
    """Return what the stamps of *records* are of, in their order, relative to the root."""
    paths: list[str] = []
    for record in records:
        path = record.path
        paths.append(path)
        if record.below:
            paths.extend(record.below)
        for name in record.files:
            paths.append(f"{path}/{name}")  # noqa: PERF401 - twice as quick as extending by a generator for one name
    return paths


def root_digest(skills: dict[str, SkillRecord]) -> str:
    """Return the digest over skill files and companions, by path bytes."""
    rows = [
        (f"{path}/{name}", size, digest)
        for path, record in skills.items()
        for name, size, digest in zip(record.files, record.sizes, record.digests, strict=True)
    ]
    # Text and bytes sort alike, but for names that are no UTF-8; those cannot be all ASCII.
    rows.sort(key=None if all(row[0].isascii() for row in rows) else lambda row: os.fsencode(row[0]))
    return rows_digest(rows)


_COMPANIONS = ((COMPACT_FILE,), SOURCES_FILES, TOOLS_FILES)
_AS_IS = frozenset({"symlink", "too_large"})


class SkillLoader:
    """Reads and parses the skills of one root; *reader* serves their long texts later."""

    def __init__(self, root: SkillRoot, base: str, reader: ContentReader) -> None:
        self._root = root
        self._base = base
        self._reader = reader

    def content(
        self, path: str, full_id: str, files: tuple[str, ...], digests: tuple[str, ...], below: tuple[str, ...]
    ) -> RegistryContent:
        """Return the source of a skill's long texts."""
        return RegistryContent(self._reader, self._base, path, full_id, files, digests, below)

    def __call__(
        self,
        descriptor: int,
        path: str,
        layout_namespace: str,
        listing: FolderListing,
        skill: SkillFolder,
        old: SkillRecord | None,
    ) -> SkillRecord:
        """Return the record of the skill in an open folder. Nothing in a file raises."""
        name = listing.skill_file
        assert name is not None  # the folder is a skill's because of it
        data = self._read(descriptor, path, name, skill, listing)
        for names in _COMPANIONS if len(listing.files) > 1 else ():
            companion = next((each for each in names if each in listing.files), None)
            text = None if companion is None else self._read(descriptor, path, companion, skill, listing)
            if companion is None or text is None:
                continue
            printable = printable_path(join(path, companion))
            # Sources are understood on first use: the digest is all that discovery needs of them.
            if names is TOOLS_FILES:
                skill.tools, findings, _ = read_tools(text, name=companion, path=printable)
                skill.findings += findings
            elif companion == COMPACT_FILE:
                skill.findings += read_compact(text, path=printable).diagnostics
        if (
            old is not None
            and old.layout_namespace == layout_namespace
            and (old.files, old.digests, old.below) == (skill.files, skill.digests, tuple(skill.below))
            and all(skill.digests)
        ):
            parsed = ParsedSkill(old.skill, old.diagnostics, old.full_id)
        else:
            parsed = self._parse(data, path, name, layout_namespace, skill)
        assert parsed.full_id is not None  # known for every folder
        return make_record(
            path,
            layout_namespace,
            tuple(skill.below),
            skill.files,
            skill.digests,
            skill.stamps,
            newest_of(skill.stamps),
            tuple(skill.nested),
            tuple(skill.notes),
            parsed.full_id,
            parsed.skill,
            parsed.diagnostics,
        )

    def _parse(
        self, data: bytes | None, path: str, name: str, layout_namespace: str, skill: SkillFolder
    ) -> ParsedSkill:
        folder = path.rpartition("/")[2]
        fixed = self._root.fixed_namespace
        if data is None:
            return ParsedSkill(None, tuple(skill.findings), ".".join(fallback_id(folder, fixed or layout_namespace)))
        return parse_parts(
            data,
            folder=folder,
            file_name=name,
            path=printable_path(join(path, name)),
            layout_namespace=layout_namespace,
            fixed_namespace=fixed,
            layer=self._root.kind,
            file=f"{self._base}/{path}/{name}",
            content=lambda full_id: self.content(path, full_id, skill.files, skill.digests, tuple(skill.below)),
            form=JsonMapping,
            tools=skill.tools,
            findings=skill.findings,
            digest=skill.digests[0],
        )

    def _read(self, folder: int, path: str, name: str, skill: SkillFolder, listing: FolderListing) -> bytes | None:
        """Read one file and note it; a refused one is a finding, has no digest, and the stamp the system gives its name."""
        file_path = join(path, name)
        data, digest, stamp = None, "", NO_STAMP
        try:
            descriptor = open_file_at(folder, name, file_path, listed=listing.files[name])
            try:
                data, status = read_descriptor(descriptor, file_path, LIMITS[name])
            finally:
                os.close(descriptor)
            digest, stamp = bytes_digest(data), stamp_of(status)
        except FileRefused as refusal:
            with suppress(OSError):  # gone between the listing and now: the next walk looks again
                stamp = stamp_of(os.stat(name, dir_fd=folder, follow_symlinks=False))
            if name == listing.skill_file:
                findings = FileFindings("lenient", printable_path(file_path))
                findings.add(refusal.code if refusal.code in _AS_IS else "unreadable", f"{refusal.message}.")
                skill.findings += findings.items
            else:
                skill.findings += unusable(name, refusal.message, path=printable_path(file_path))
        skill.files += (name,)
        skill.digests += (digest,)
        skill.stamps += stamp
        return data
