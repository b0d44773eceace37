"""`skills.files` and `skills.file`: what a skill's folder holds, and pieces of it, for people who look at skills.

Files are reached as sessions reach them: part by part, never through a link, and never those of evaluations.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field

from kdskills.app.operations.models import Output
from kdskills.app.operations.showing import RefInput, asked_skill
from kdskills.errors import FileRefused
from kdskills.session.codes import refuse
from kdskills.session.reading import skill_file
from kdskills.session.workspace import clean_path, media_type
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import (
    EntryKind,
    TreeEntry,
    bytes_digest,
    file_digest,
    is_withheld,
    printable_path,
    walk_tree,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kdskills.app.identity import Identity
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.skills import Skill

MAX_FILES: Final = 10_000
"""Most files of one skill that are looked at."""
MAX_FILE_BYTES: Final = 16 * 1024 * 1024
"""Largest file that is read."""
MAX_HASHED: Final = 64 * 1024 * 1024
"""Most bytes that are read for the digests of one page."""
MAX_PIECE: Final = 1024 * 1024


class SkillFilesInput(RefInput):
    """Which files of a skill."""

    below: str = Field("", max_length=1024, description="Only files whose paths begin so.")
    limit: int = Field(500, ge=1, le=1000, description="Most files in one answer.")
    offset: int = Field(0, ge=0, le=MAX_FILES, description="Files to pass over.")
    digests: bool = Field(default=True, description="Read the files of the page for their digests.")


class SkillFileRow(Output):
    """One file, by its path below the skill's folder.

    `kind` is `file`, `link` or `other`; only files are ever read. `size` and `executable` are null where the files lie elsewhere,
    `digest` where the file was not read. `withheld` are evaluations, which no model and no program sees.
    """

    path: str
    kind: EntryKind = "file"
    media_type: str
    size: int | None = None
    executable: bool | None = None
    digest: str | None = None
    withheld: bool = False


class SkillFilesOutput(Output):
    """A page of a skill's files, by path; `total` and `bytes` count all that are asked for.

    `truncated` means that there are more than 10,000 files, of which some are not told.
    """

    full_id: str
    files: tuple[SkillFileRow, ...]
    offset: int
    total: int
    bytes: int
    truncated: bool = False
    more: bool = False


def _is_told_of_evaluations(identity: Identity) -> bool:
    """Whether it is a person who is told of everything; behind MCP there is a model, whoever's token it has."""
    return identity.sees_all and identity.door != "mcp"


def _rows(skill: Skill, *, evaluations: bool) -> tuple[list[tuple[SkillFileRow, str]], bool]:
    """Return the files of a skill, each with its path on this host, and whether there are more. Raises as `skills.read`."""
    content = far_content(skill)
    if content is not None:
        return [
            (_row(TreeEntry(path, "file", 0, 0), remote=True), path) for path in sorted(content.paths)[:MAX_FILES]
        ], False
    if skill.folder is None:
        return [], False
    try:
        entries = walk_tree(skill.folder, most=MAX_FILES + 1)
    except FileRefused as error:
        message = "the files of this skill cannot be listed"
        raise refuse("skill_unreadable", message, path=".", reason=error.code) from error
    rows = [
        (_row(entry, remote=False), entry.path)
        for entry in entries[:MAX_FILES]
        if evaluations or not is_withheld(entry.path)
    ]
    return rows, len(entries) > MAX_FILES


def _row(entry: TreeEntry, *, remote: bool) -> SkillFileRow:
    is_file = entry.kind == "file"
    return SkillFileRow(
        path=printable_path(entry.path),
        kind=entry.kind,
        media_type=media_type(entry.path) if is_file else "",
        size=None if remote else entry.size,
        executable=None if remote else is_file and bool(entry.mode & 0o111),
        withheld=is_withheld(entry.path),
    )


def _with_digests(folder: Path, rows: list[tuple[SkillFileRow, str]]) -> list[SkillFileRow]:
    page, budget = [], MAX_HASHED
    for row, path in rows:
        size = row.size or 0
        if row.kind == "file" and not row.withheld and size <= min(budget, MAX_FILE_BYTES):
            budget -= size
            with suppress(FileRefused):  # gone or closed since it was listed: it stands there without a digest
                row = row.model_copy(update={"digest": f"sha256:{file_digest(folder, path)[1]}"})
        page.append(row)
    return page


def _page(skill: Skill, arguments: SkillFilesInput, *, evaluations: bool) -> SkillFilesOutput:
    rows, truncated = _rows(skill, evaluations=evaluations)
    chosen = [row for row in rows if row[0].path.startswith(arguments.below)]
    page = chosen[arguments.offset : arguments.offset + arguments.limit]
    return SkillFilesOutput.of(
        full_id=skill.full_id,
        files=_with_digests(skill.folder, page) if arguments.digests and skill.folder else [row for row, _ in page],
        offset=arguments.offset,
        total=len(chosen),
        bytes=sum(row.size or 0 for row, _ in chosen),
        truncated=truncated,
        more=arguments.offset + len(page) < len(chosen),
    )


async def list_files(bundles: BundleLoader, arguments: SkillFilesInput, context: Context) -> SkillFilesOutput:
    """Show which files a skill has, if the consumer may have it."""
    skill = (await asked_skill(bundles, arguments, context)).skill
    evaluations = _is_told_of_evaluations(context.identity)
    return await asyncio.to_thread(_page, skill, arguments, evaluations=evaluations)


class SkillFileInput(RefInput):
    """Which piece of which file."""

    path: str = Field(min_length=1, max_length=4096, description="Path below the skill's folder, as listed.")
    offset: int = Field(0, ge=0, description="Where to begin, in bytes.")
    limit: int = Field(256 * 1024, ge=4, le=MAX_PIECE, description="Most bytes of the piece.")
    encoding: Literal["auto", "text", "base64"] = Field(
        "auto", description="`auto` gives a file that is UTF-8 as text, and any other in base64."
    )


class SkillFileOutput(Output):
    """A piece of a file of `size` bytes, as `text` or in base64 as `data`; `next_offset` is null at the end.

    A piece of text ends with a whole character, so that pieces one after the other are the text.
    """

    full_id: str
    path: str
    media_type: str
    size: int
    digest: str
    offset: int
    next_offset: int | None = None
    text: str | None = None
    data: str | None = None


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _whole_characters(piece: bytes) -> bytes:
    """Return *piece* without the beginning of a character that goes on behind it."""
    for cut in range(1, min(4, len(piece)) + 1):
        byte = piece[-cut]
        if byte & 0xC0 != 0x80:  # a character begins here
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return piece if length <= cut else piece[:-cut]
    return piece


def _piece(skill: Skill, arguments: SkillFileInput) -> SkillFileOutput:
    path = clean_path(arguments.path)
    data = skill_file(skill, path, MAX_FILE_BYTES)
    as_text = arguments.encoding != "base64" and _is_text(data)
    if arguments.encoding == "text" and not as_text:
        raise refuse("not_text", f"{path!r} is not UTF-8 text; ask for base64", path=path, size=len(data))
    piece = data[arguments.offset : arguments.offset + arguments.limit]
    piece = _whole_characters(piece) if as_text else piece
    after = arguments.offset + len(piece)
    return SkillFileOutput.of(
        full_id=skill.full_id,
        path=path,
        media_type=media_type(path),
        size=len(data),
        digest=bytes_digest(data),
        offset=arguments.offset,
        next_offset=after if after < len(data) else None,
        text=piece.decode("utf-8", "replace") if as_text else None,
        data=None if as_text else base64.b64encode(piece).decode("ascii"),
    )


async def read_piece(bundles: BundleLoader, arguments: SkillFileInput, context: Context) -> SkillFileOutput:
    """Give a piece of one file of a skill, if the consumer may have it."""
    skill = (await asked_skill(bundles, arguments, context)).skill
    return await asyncio.to_thread(_piece, skill, arguments)
