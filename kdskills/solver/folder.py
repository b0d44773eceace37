"""The folder of a turn: files handed in, and what the turn left there."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kdskills.errors import BadRequest, FileRefused, StrPath, ToolCallRefused, path_argument
from kdskills.session.paths import clean_path
from kdskills.session.workspace import MAX_FILES, MAX_TOTAL, FolderWorkspace, media_type
from kdskills.skills.private_files import make_folder
from kdskills.solver.result import TurnFile

GivenFile = StrPath | tuple[str, bytes | StrPath]
"""A file of this host, which keeps its name; or a name in the turn's folder and bytes or a file."""

PREFIX = "kdskills-turn-"


def open_workspace(
    turn_id: str, *, work_dir: Path | None, data: Path | None, files: Sequence[GivenFile]
) -> FolderWorkspace:
    """Make the folder of a turn, with *files* copied in and *data* seen read-only as `data/`.

    Raises:
        BadRequest: A file is missing, no regular file, named twice, or too large together with the others.
    """
    named_files = [_name_and_content(file) for file in files]
    names = [name for name, _ in named_files]
    for name in names:
        if names.count(name) > 1:
            raise _bad(name, "two files have this name")
        if data is not None and name.partition("/")[0] == "data":
            raise _bad(name, "data/ holds the bundle's own files")
    if len(named_files) > MAX_FILES:
        raise _bad(names[MAX_FILES], f"at most {MAX_FILES} files can be handed in")
    base = work_dir if work_dir is not None else Path(tempfile.gettempdir())
    make_folder(base)
    root = base / f"{PREFIX}{turn_id}"
    root.mkdir(mode=0o700)
    try:
        _copy(root, named_files)
    except BaseException:  # raised again: nothing half-copied stays
        shutil.rmtree(root)
        raise
    mounts = {"data": data} if data is not None and data.is_dir() else {}
    return FolderWorkspace(root, mounts=mounts, protected=names)


def _name_and_content(file: GivenFile) -> tuple[str, bytes | Path]:
    if isinstance(file, tuple):
        name, content = file
        try:
            return clean_path(name), content if isinstance(content, bytes) else path_argument(content, "file")
        except ToolCallRefused as error:
            raise _bad(name, error.message) from error
    path = path_argument(file, "file")
    return path.name, path


def _copy(root: Path, named_files: Sequence[tuple[str, bytes | Path]]) -> None:
    room = MAX_TOTAL
    for name, content in named_files:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path) and not content.is_file():
            raise _bad(name, f"there is no file {content}")
        room -= len(content) if isinstance(content, bytes) else content.stat().st_size
        if room < 0:
            raise _bad(name, f"the files handed in are larger than {MAX_TOTAL} bytes")
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)


def produced_files(workspace: FolderWorkspace) -> tuple[TurnFile, ...]:
    """Return the files a turn produced, by path; inputs and mounts are none of them."""
    files = []
    for entry in workspace.files():
        if entry.path in workspace.protected:
            continue
        try:
            data = workspace.read(entry.path, limit=MAX_TOTAL)
        except FileRefused:
            continue  # taken away between listing and reading
        files.append(
            TurnFile(
                path=entry.path,
                size=len(data),
                digest="sha256:" + hashlib.sha256(data).hexdigest(),
                media_type=media_type(entry.path),
                location=str(workspace.root / entry.path),
            )
        )
    return tuple(files)


def discard(workspace: FolderWorkspace) -> None:
    """Remove the folder of a turn that produced nothing: it holds copies only."""
    shutil.rmtree(workspace.root, ignore_errors=True)


def _bad(name: str, problem: str) -> BadRequest:
    return BadRequest(f"cannot hand in {name!r}: {problem}", errors=[{"path": "/files", "problem": problem}], file=name)
