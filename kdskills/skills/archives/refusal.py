"""Why an archive is not taken, and how much of everything it may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdskills.errors import CallerMustAct, Diagnostic

MIB = 1024 * 1024


class ArchiveRefused(CallerMustAct):
    """The archive breaks a rule and nothing of it was kept; `details` has `entry`, `reason` and, for a skill file that cannot
    be used, `diagnostics`.

    Args:
        code: Stable code of the rule.
        reason: What is wrong, in words.
        entry: Name of the entry as it can be printed; None for the archive as a whole.
        diagnostics: Findings about the skill inside.
    """

    code = "archive_refused"

    def __init__(
        self, code: str, reason: str, *, entry: str | None = None, diagnostics: Sequence[Diagnostic] = ()
    ) -> None:
        where = "the archive" if entry is None else f"the archive's entry {entry!r}"
        super().__init__(f"{where} is refused: {reason}", code=code, entry=entry, reason=reason)
        if diagnostics:
            self.details["diagnostics"] = [found.to_json() for found in diagnostics]


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Bounds of an archive; the defaults are those of `docs/reference/archives.md`.

    Attributes:
        archive_bytes: Size of the zip file itself.
        directory_bytes: Size of the zip's central directory, which is held in memory.
        entries: Entries of any kind, left-out ones and folders too.
        files: Files of the skill.
        unpacked_bytes: All files of the skill together.
        ratio: Unpacked to packed size, of one file and of all together.
        depth: Parts of a path below the skill's folder.
        path_bytes: UTF-8 bytes of a path below the skill's folder.
    """

    archive_bytes: int = 32 * MIB
    directory_bytes: int = 2 * MIB
    entries: int = 2048
    files: int = 512
    unpacked_bytes: int = 16 * MIB
    ratio: int = 200
    depth: int = 12
    path_bytes: int = 255
