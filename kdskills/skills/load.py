"""Make a record of one skill's folder: read, digest and parse it."""

from __future__ import annotations

import os
from typing import TypeVar

from kdskills.errors import Diagnostic, FileRefused
from kdskills.skills.companions import (
    COMPACT_FILE,
    SOURCES_FILES,
    TOOLS_FILES,
    limit_of,
    read_compact,
    read_tools,
    unusable,
)
from kdskills.skills.content import ContentReader
from kdskills.skills.digest import bytes_digest
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.listing import FolderListing, Subtree, join, printable_path
from kdskills.skills.marks import NO_STAMP, SkillRecord, make_record, newest_of, stamp_of
from kdskills.skills.model import ParsedSkill, SkillTool
from kdskills.skills.names import fallback_id
from kdskills.skills.parse import parse_parts
from kdskills.skills.roots import SkillRoot
from kdskills.skills.rows import compact_mapping
from kdskills.skills.safe_open import open_file_at, read_descriptor
from kdskills.skills.texts import RegistryContent, RootTexts

T = TypeVar("T")

_COMPANIONS = ((COMPACT_FILE,), SOURCES_FILES, TOOLS_FILES)
_AS_IS = frozenset({"symlink", "too_large"})


class _Read:
    """The files read, what they mean together, and the skill file's bytes unless it was refused."""

    __slots__ = ("data", "digests", "files", "findings", "stamps", "tools")

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()
        self.digests: tuple[str, ...] = ()
        self.stamps = b""
        self.findings: list[Diagnostic] = []
        self.data: bytes | None = None
        self.tools: tuple[SkillTool, ...] = ()


class SkillLoader:
    """Reads and parses the skills of one root.

    Args:
        root: The root.
        base: Its resolved folder.
        reader: Serves long texts later.
    """

    def __init__(self, root: SkillRoot, base: str, reader: ContentReader) -> None:
        self._root = root
        self._source = RootTexts(reader, base)

    def content(self, path: str, full_id: str, files: tuple[str, ...], digests: tuple[str, ...]) -> RegistryContent:
        """Return the source of a skill's long texts."""
        return RegistryContent(self._source, path, full_id, files, digests)

    def __call__(
        self,
        descriptor: int,
        path: str,
        layout_namespace: str,
        listing: FolderListing,
        subtree: Subtree,
        old: SkillRecord | None,
    ) -> SkillRecord:
        """Return the record of the skill in an open folder. Nothing in a file raises."""
        name = listing.skill_file
        assert name is not None  # the folder is a skill's because of it
        read = self._read(descriptor, path, name, listing)
        if (
            old is not None
            and old.layout_namespace == layout_namespace
            and (old.files, old.digests) == (read.files, read.digests)
            and all(read.digests)
        ):
            parsed = ParsedSkill(old.skill, old.diagnostics, old.full_id)
        else:
            parsed = self._parse(path, name, layout_namespace, read)
        assert parsed.full_id is not None  # known for every folder
        stamps = b"".join([mark.stamp for mark in subtree.marks]) + read.stamps
        return make_record(
            path,
            layout_namespace,
            tuple([mark.path for mark in subtree.marks[1:]]),
            read.files,
            read.digests,
            stamps,
            newest_of(stamps),
            tuple(subtree.nested),
            tuple(subtree.notes),
            parsed.full_id,
            parsed.skill,
            parsed.diagnostics,
        )

    def _parse(self, path: str, name: str, layout_namespace: str, read: _Read) -> ParsedSkill:
        folder = path.rpartition("/")[2]
        fixed = self._root.fixed_namespace
        if read.data is None:
            return ParsedSkill(None, tuple(read.findings), ".".join(fallback_id(folder, fixed or layout_namespace)))
        return parse_parts(
            read.data,
            folder=folder,
            file_name=name,
            path=printable_path(join(path, name)),
            layout_namespace=layout_namespace,
            fixed_namespace=fixed,
            layer=self._root.kind,
            file=f"{self._source.base}/{path}/{name}",
            content=lambda full_id: self.content(path, full_id, read.files, read.digests),
            form=compact_mapping,
            tools=read.tools,
            findings=read.findings,
            digest=read.digests[0],
        )

    # ---- reading ------------------------------------------------------------------------------------------------

    def _read(self, descriptor: int, path: str, name: str, listing: FolderListing) -> _Read:
        read = _Read()
        data = self._file(descriptor, path, name, MAX_SKILL_BYTES, read, listing)
        if isinstance(data, FileRefused):
            findings = FileFindings("lenient", printable_path(join(path, name)))
            findings.add(data.code if data.code in _AS_IS else "unreadable", f"{data.message}.")
            read.findings += findings.items
        else:
            read.data = data
        for names in _COMPANIONS if len(listing.files) > 1 else ():
            companion = next((each for each in names if each in listing.files), None)
            if companion is not None:
                self._companion(descriptor, path, companion, read, listing)
        return read

    def _companion(self, descriptor: int, path: str, name: str, read: _Read, listing: FolderListing) -> None:
        printable = printable_path(join(path, name))
        data = self._file(descriptor, path, name, limit_of(name), read, listing)
        if isinstance(data, FileRefused):
            read.findings += unusable(name, data.message, path=printable)
        elif name in TOOLS_FILES:
            tools = read_tools(data, name=name, path=printable)
            read.tools = tools.tools
            read.findings += tools.findings
        elif name == COMPACT_FILE:
            read.findings += read_compact(data, path=printable).findings
        # Sources are understood on first use: the digest is all that discovery needs of them.

    def _file(
        self, folder: int, path: str, name: str, limit: int, read: _Read, listing: FolderListing
    ) -> bytes | FileRefused:
        """Read one file and mark it; a refused one is marked by what the system says about its name."""
        try:
            file_path = join(path, name)
            descriptor = open_file_at(folder, name, file_path, listed=listing.files[name])
            try:
                file = read_descriptor(descriptor, file_path, limit)
            finally:
                os.close(descriptor)
        except FileRefused as refusal:
            try:
                stamp = stamp_of(os.stat(name, dir_fd=folder, follow_symlinks=False))
            except OSError:
                stamp = NO_STAMP  # gone between the listing and now: the next walk looks again
            self._mark(read, name, stamp, "")
            return refusal
        self._mark(read, name, stamp_of(file.stat), bytes_digest(file.data))
        return file.data

    @staticmethod
    def _mark(read: _Read, name: str, stamp: bytes, digest: str) -> None:
        read.files += (name,)
        read.digests += (digest,)
        read.stamps += stamp
