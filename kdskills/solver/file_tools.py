"""`files.read`, `files.edit`, `files.grep`, `files.glob`: files of the turn and of loaded skills, as skills assume them.

A path means what it means in a command: `a.txt` and `/work/a.txt` are the turn's, `/skills/<id>/a.md` and
`$SKILL_DIR/a.md` a loaded skill's. Nothing else of this host can be named, links are never followed, and policy plugins
are asked about each file of a skill.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import re2
from pydantic import BaseModel, Field

from kdskills.errors import ToolCallRefused
from kdskills.execution.check import OutputGlob, compile_glob, path_problem
from kdskills.models import ImageType, ModelImage
from kdskills.session.brief import BriefText
from kdskills.session.codes import invalid, path_denied, refuse
from kdskills.session.config import MIB, Budget
from kdskills.session.scripts import SKILL_DIR
from kdskills.session.workspace import MAX_TOTAL, clean_path
from kdskills.solver.events import FileWritten
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext
from kdskills.solver.turn_tools import (
    SKILLS,
    ToolArguments,
    decoded,
    loaded_skills,
    skill_paths,
    turn_bytes,
    turn_path,
)

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn

MAX_PATTERN: Final = 1_000
MAX_LINE: Final = 300
"""Characters of a matching line that are shown."""
MAX_MATCHES: Final = 1_000
MAX_SEARCHED: Final = 16 * MIB
"""Bytes of a file that is searched; a larger one is told."""
PATTERN_MEMORY: Final = 16 * MIB
MAX_IMAGE: Final = 3 * MIB
"""Bytes of an image that is shown; providers refuse requests with larger ones."""
MAX_IMAGES: Final = 16 * MIB
"""Bytes of all images that a turn shows."""
_IMAGES: Final[Mapping[bytes, ImageType]] = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}


@dataclass(frozen=True, slots=True)
class FileAddress:
    """A file or folder of the turn, or with `skill` of the loaded skill of that full id; `.` is its top."""

    path: str
    skill: str | None = None

    def spelled(self, path: str) -> str:
        """Return *path*, which lies in the same tree, as a model may write it."""
        return path if self.skill is None else f"{SKILLS}{self.skill}/{path}"

    def holds(self, path: str) -> bool:
        """Whether *path* is this one or lies below it."""
        return self.path in {".", path} or path.startswith(f"{self.path}/")


async def address_of(turn: Turn, text: str) -> FileAddress:
    """Return what *text* names. Raises `path_denied`, `no_active_skills` or `skill_not_active`."""
    match = SKILL_DIR.match(text)
    if match is None and not text.startswith(SKILLS):
        return FileAddress(turn_path(text))
    loaded = await loaded_skills(turn)
    if not loaded:
        raise refuse("no_active_skills", "no skill is loaded; load one first")
    if match is not None:
        full_id, below = next(reversed(loaded)), text[match.end() :]
    else:
        full_id, _, below = text.removeprefix(SKILLS).partition("/")
    if full_id not in loaded:
        raise refuse("skill_not_active", f"the skill {full_id!r} is not loaded; load it first", name=full_id)
    return FileAddress(clean_path(below) if below.strip("/.") or ".." in below else ".", full_id)


async def file_bytes(turn: Turn, address: FileAddress) -> bytes:
    """Return the bytes of a file. Raises as `skills.read`."""
    if address.path == ".":
        raise refuse("not_a_file", "this is a folder; files.glob lists what is in it", path=address.spelled("."))
    if address.skill is None:
        return await asyncio.to_thread(turn_bytes, turn, address.path)
    resource = await turn.session.read(address.path, skill=address.skill, encoding="binary")
    return base64.b64decode(resource.b64 or "")


async def paths_below(turn: Turn, address: FileAddress) -> list[str]:
    """Return the paths of all files at or below an address, in order."""
    if address.skill is None:
        paths: Collection[str] = await asyncio.to_thread(turn.workspace.names)
    else:
        paths = await asyncio.to_thread(skill_paths, turn.subsystem.registry[address.skill])
    return sorted(path for path in paths if address.holds(path))


# ---- read and edit ----


class FileReadInput(ToolArguments):
    """Arguments of `files.read`."""

    path: str = Field(description="File of this turn, or /skills/<id>/... of a loaded skill.")
    offset: int = Field(1, ge=1, le=10**9, description="First line, counted from 1.")
    limit: int = Field(2_000, ge=1, le=10**6, description="Most lines.")


async def _read(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, FileReadInput)
    turn = call.turn
    address = await address_of(turn, arguments.path)
    data = await file_bytes(turn, address)
    if (kind := image_type(data)) is not None:
        return _image(turn, address, data, kind)
    content = decoded(data, arguments.path)
    if address.skill is not None and address.path.lower().endswith(".md"):
        skill = turn.subsystem.registry[address.skill]
        await turn.sources.resolve([skill])
        content = turn.sources.adopt(skill, content)
    lines = content.splitlines(keepends=True)
    first, room = arguments.offset - 1, max(2_000, Budget.of(turn.window).result * 2)
    page: list[str] = []
    for line in lines[first : first + arguments.limit]:
        if len(line) > room:
            break
        page.append(line)
        room -= len(line)
    facts: dict[str, Any] = {"path": address.spelled(address.path), "size": len(data), "lines": len(lines)}
    if not page and first < len(lines):  # one line that is longer than an answer
        page = [lines[first][:room]]
        facts["cut"] = f"line {first + 1} has {len(lines[first])} characters"
    facts["shown"] = [first + 1, first + len(page)] if page else None
    if first + len(page) < len(lines):
        facts["next_offset"] = first + len(page) + 1
    return ToolAnswer(facts | {"text": "".join(page)})


def image_type(data: bytes) -> ImageType | None:
    """Return the media type of an image that models can be shown, by its first bytes, or None of anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES.items() if data.startswith(magic)), None)


def _image(turn: Turn, address: FileAddress, data: bytes, kind: ImageType) -> ToolAnswer:
    """Show an image to a model that can be shown one; any other is told what the file is."""
    facts: dict[str, Any] = {"path": address.spelled(address.path), "size": len(data), "media_type": kind}
    if not turn.takes_images():
        return ToolAnswer(facts | {"shown": False, "note": "you cannot be shown images; look at it with a program"})
    if len(data) > MAX_IMAGE:
        message = "the image is too large to be shown; make a smaller one with a program"
        raise refuse("too_large", message, path=facts["path"], size=len(data), limit=MAX_IMAGE)
    if turn.image_bytes + len(data) > MAX_IMAGES:
        message = "no more images can be shown in this turn; look at it with a program"
        raise refuse("too_large", message, path=facts["path"], limit=MAX_IMAGES)
    turn.image_bytes += len(data)
    return ToolAnswer(facts | {"shown": True}, images=(ModelImage(kind, data),))


class FileEditInput(ToolArguments):
    """Arguments of `files.edit`."""

    path: str = Field(description="File of this turn.")
    old: str = Field(min_length=1, description="Text to replace, exactly as it stands in the file.")
    new: str = Field(description="Text to put there.")
    all: bool = Field(False, description="Replace it wherever it occurs; otherwise it must occur once.")


async def _edit(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, FileEditInput)
    turn = call.turn
    address = await address_of(turn, arguments.path)
    if address.skill is not None:
        message = "files of skills are read-only; copy it into /work and edit the copy"
        raise refuse("path_denied", message, path=arguments.path, reason="root")
    data = await file_bytes(turn, address)
    decoded(data, arguments.path)
    content = data.decode()  # as it stands: a byte order mark and line ends stay
    count = content.count(arguments.old)
    if arguments.old == arguments.new:
        raise invalid("old and new are the same", ("/new", "is the same as old"))
    if not count:
        message = f"old does not occur in {arguments.path!r}; read the file and give the text exactly as it stands"
        raise invalid(message, ("/old", "occurs 0 times"))
    if count > 1 and not arguments.all:
        message = f"old occurs {count} times in {arguments.path!r}; give more of what stands around it, or all: true"
        raise invalid(message, ("/old", f"occurs {count} times"))
    if len(content) + count * (len(arguments.new) - len(arguments.old)) > MAX_TOTAL:
        raise refuse("too_large", "the file would be too large", limit=MAX_TOTAL)
    text = content.replace(arguments.old, arguments.new).encode("utf-8", "backslashreplace")
    written = await asyncio.to_thread(turn.workspace.write, address.path, text, "replace")
    turn.bus.emit(FileWritten, path=written.path, size=written.size, tool="files.edit")
    return ToolAnswer({**written.to_json(), "replaced": count}, (written.path,), changed=True)


# ---- search ----


class FileGrepInput(ToolArguments):
    """Arguments of `files.grep`."""

    pattern: str = Field(min_length=1, max_length=MAX_PATTERN, description="RE2 expression that a line must match.")
    path: str = Field(".", description="File or folder of this turn, or /skills/<id> of a loaded skill.")
    glob: str = Field("", description="Only files of these names, such as *.py, or paths, such as src/**/*.py.")
    ignore_case: bool = Field(False, description="Whether capitals do not count.")
    limit: int = Field(100, ge=1, le=MAX_MATCHES, description="Most lines to return.")


async def _grep(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, FileGrepInput)
    pattern = linear_pattern(arguments.pattern, ignore_case=arguments.ignore_case)
    glob = file_glob(arguments.glob, "/glob") if arguments.glob else None
    address = await address_of(call.turn, arguments.path)
    paths = [path for path in await paths_below(call.turn, address) if glob is None or _matches_name(glob, path)]
    _require_files(paths, address, arguments.path, searched=glob is None)
    matches: list[str] = []
    skipped: list[str] = []
    async for path, lines in _texts(call.turn, address, paths, skipped):
        room = arguments.limit + 1 - len(matches)
        numbers = await asyncio.to_thread(matching_lines, pattern, lines, room)
        matches += [f"{address.spelled(path)}:{number}:{lines[number - 1][:MAX_LINE]}" for number in numbers]
        if len(matches) > arguments.limit:
            break
    facts: dict[str, Any] = {"matches": matches[: arguments.limit], "files": len(paths)}
    if len(matches) > arguments.limit:
        facts["more"] = "there are more matches; narrow the pattern or the path"
    if skipped:
        facts["skipped"] = skipped[:20]
    return ToolAnswer(facts)


async def _texts(
    turn: Turn, address: FileAddress, paths: Sequence[str], skipped: list[str]
) -> AsyncIterator[tuple[str, list[str]]]:
    """Give path and lines of each file that is text and may be read; the others are *skipped*."""
    for path in paths:
        try:
            data = await file_bytes(turn, FileAddress(path, address.skill))
            if len(data) > MAX_SEARCHED:
                raise refuse("too_large", "the file is too large to be searched")
            yield path, decoded(data, path).splitlines()
        except ToolCallRefused as error:
            skipped.append(f"{address.spelled(path)}: {error.code}")


def linear_pattern(pattern: str, *, ignore_case: bool = False) -> Any:
    """Return a pattern that is matched in time linear in the text, whatever a model wrote. Raises `invalid_argument`."""
    options = re2.Options()
    options.log_errors, options.max_mem, options.case_sensitive = False, PATTERN_MEMORY, not ignore_case
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0]
        words = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        message = f"the pattern cannot be used: {words}; it has no look-around and no references back"
        raise invalid(message, ("/pattern", words)) from None


def matching_lines(pattern: Any, lines: Sequence[str], limit: int) -> list[int]:
    """Return the numbers of up to *limit* lines that match, counted from 1."""
    numbers: list[int] = []
    for number, line in enumerate(lines, 1):
        if pattern.search(line) is not None:
            numbers.append(number)
            if len(numbers) == limit:
                break
    return numbers


class FileGlobInput(ToolArguments):
    """Arguments of `files.glob`."""

    pattern: str = Field("**", description="Path with *, ?, [...] within a part and ** for any number of folders.")
    path: str = Field(".", description="Folder of this turn, or /skills/<id> of a loaded skill, the pattern begins at.")


async def _glob(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, FileGlobInput)
    pattern, top = arguments.pattern, arguments.path
    if pattern.startswith("/") or SKILL_DIR.match(pattern):  # one path with everything in it, as skills write it
        parts = pattern.split("/")
        first = next((number for number, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))
        top, pattern = "/".join(parts[:first]), "/".join(parts[first:]) or "**"
    glob = file_glob(pattern, "/pattern")
    address = await address_of(call.turn, top)
    below = "" if address.path == "." else f"{address.path}/"
    paths = await paths_below(call.turn, address)
    _require_files(paths, address, top, searched=True)
    matched = [path for path in paths if glob.matches(tuple(path.removeprefix(below).split("/")))]
    facts: dict[str, Any] = {"paths": [address.spelled(path) for path in matched[:MAX_MATCHES]]}
    return ToolAnswer(facts if len(matched) <= MAX_MATCHES else facts | {"more": len(matched) - MAX_MATCHES})


def file_glob(pattern: str, pointer: str) -> OutputGlob:
    """Return a pattern of paths. Raises `invalid_argument`, or `path_denied` for one that leads out."""
    if ".." in pattern.split("/"):
        raise path_denied(pattern, "dotdot")
    clean = pattern.removeprefix("./")
    problem = path_problem(clean)
    if problem is not None:
        raise invalid(f"the pattern {problem}", (pointer, problem))
    return compile_glob(clean)


def _matches_name(glob: OutputGlob, path: str) -> bool:
    parts = tuple(path.split("/"))
    return glob.matches(parts if "/" in glob.pattern else parts[-1:])


def _require_files(paths: Sequence[str], address: FileAddress, text: str, *, searched: bool) -> None:
    if not paths and searched and address.path != ".":
        raise refuse("resource_not_found", f"there is no file or folder {text!r}", path=text, siblings=[])


FILE_TOOLS = (
    SolverTool("files.read", "Read lines of a text file of this turn or of a loaded skill: what skills call Read.",
               FileReadInput, _read, brief=BriefText("Read lines of a file.", {"offset": ""})),
    SolverTool("files.edit", "Replace a text in a file of this turn: what skills call Edit.",
               FileEditInput, _edit, barrier=lambda _arguments: True, brief=BriefText("Replace text in a file.", {"all": ""})),
    SolverTool("files.grep", "Find lines by a regular expression in files of this turn or of a loaded skill: what skills "
               "call Grep.", FileGrepInput, _grep, brief=BriefText("Find lines by a regular expression.", {"path": ""})),
    SolverTool("files.glob", "List files of this turn or of a loaded skill by a pattern: what skills call Glob.",
               FileGlobInput, _glob, brief=BriefText("List files.", {"pattern": "such as **/*.csv"})),
)  # fmt: skip
