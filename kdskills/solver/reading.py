"""`react.read` and `react.write`: skills, sources and files of the turn."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kdskills.errors import FileRefused, ToolCallRefused
from kdskills.session.codes import refuse
from kdskills.solver.events import FileWritten
from kdskills.solver.refs import Ref, SkillRef, SourceRef, TurnFileRef, parse_ref
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn

WINDOW = 100_000
"""Characters of a turn file given at once."""

Outcome = Literal["loaded", "already_active", "ok", "error"]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReactReadInput(_Arguments):
    """Arguments of `react.read`."""

    refs: list[str] = Field(
        min_length=1,
        max_length=32,
        description="What to read: sk:<skill>, sk:<skill>/<path>, src:1-3,5, turn:<path> or turn:<path>#L10-40.",
    )


class ReactWriteInput(_Arguments):
    """Arguments of `react.write`."""

    path: str = Field(description="File of the turn to write, such as notes/plan.md.")
    text: str = Field("", description="The text to write.")
    b64: str = Field("", description="Bytes to write, in base64, instead of text.")
    mode: Literal["create", "replace", "append"] = Field(
        "create", description="create: the file must not exist. replace: put this in its place. append: add to its end."
    )


@dataclass(frozen=True, slots=True)
class ReadItem:
    """What came of one ref.

    Attributes:
        ref: As asked.
        status: `loaded`, `already_active`, `ok` or `error`.
        text: The rewritten body of a skill, or the text of a file.
        facts: Further facts of the answer.
        in_prompt: Whether the text stands in the prompt already, so that the model gets a pointer instead.
        changed: Whether the session is another one now.
        pin: Marks a text that must be kept while its skill is active.
    """

    ref: str
    status: Outcome
    text: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    in_prompt: bool = False
    changed: bool = False
    pin: str | None = None

    def for_model(self) -> dict[str, Any]:
        """Return the item as the model reads it."""
        row = {"ref": self.ref, "status": self.status, **self.facts}
        if self.in_prompt:
            row["note"] = "its instructions stand in <active_skills>"
        elif self.text is not None:
            row["text"] = self.text
        return row


async def read_refs(turn: Turn, refs: list[str]) -> list[ReadItem]:
    """Read each ref in order; one that fails spoils no other."""
    items = []
    for ref in refs:
        try:
            items.append(await _read(turn, ref, parse_ref(ref)))
        except ToolCallRefused as error:
            facts = {"error": {"code": error.code, "message": error.message, "details": error.details}}
            items.append(ReadItem(ref, "error", facts=facts))
    return items


async def _read(turn: Turn, text: str, ref: Ref) -> ReadItem:
    if isinstance(ref, SkillRef):
        return await (_skill(turn, text, ref.ref) if ref.path is None else _skill_file(turn, text, ref))
    if isinstance(ref, SourceRef):
        return _sources(turn, text, ref)
    return _turn_file(turn, text, ref)


async def _skill(turn: Turn, text: str, ref: str) -> ReadItem:
    before = {skill.full_id for skill in await turn.session.active()}
    loaded = (await turn.session.load([ref], mode="add", by="model")).bodies[-1]
    was_active = loaded.full_id in before
    turn.note_active(await turn.session.active())
    facts: dict[str, Any] = {"skill": loaded.name, "tokens": loaded.tokens}
    status: Outcome = "already_active" if was_active else "loaded"
    body, origin = turn.rewritten(loaded), loaded.receipt.origin
    if origin is None:
        return ReadItem(text, status, body, facts, in_prompt=True, changed=not was_active)
    # Text of third parties does not stand in the prompt, so a compactor must keep it here.
    pin = f"skill:{loaded.receipt.id}@{loaded.receipt.digest}"
    return ReadItem(text, status, body, facts | {"origin": origin}, changed=not was_active, pin=pin)


async def _skill_file(turn: Turn, text: str, ref: SkillRef) -> ReadItem:
    resource = await turn.session.read(ref.path or "", skill=ref.ref)
    facts: dict[str, Any] = {"skill": resource.skill, "path": resource.path, "size": resource.size}
    if resource.truncated:
        facts["next_offset"] = resource.next_offset
    return ReadItem(text, "ok", resource.text, facts)


def _sources(turn: Turn, text: str, ref: SourceRef) -> ReadItem:
    rows = [turn.source_json(sid) for sid in turn.pool.rows if ref.holds(sid)]
    if not rows:
        known_sids = ", ".join(map(str, list(turn.pool.rows)[:20])) or "none"
        raise ToolCallRefused(f"no such source; known: {known_sids}", code="source_not_found", ref=text)
    return ReadItem(text, "ok", facts={"sources": rows})


def _turn_file(turn: Turn, text: str, ref: TurnFileRef) -> ReadItem:
    try:
        data = turn.workspace.read(ref.path)
    except FileRefused as error:
        code = {"file_missing": "resource_not_found", "symlink": "path_denied", "too_large": "too_large"}
        details = {"path": ref.path, "reason": error.code}
        raise refuse(code.get(error.code, "not_a_file"), f"cannot read turn:{ref.path}", **details) from error
    content = _decoded(data)
    if content is None:
        raise refuse("not_text", f"turn:{ref.path} is not UTF-8 text", path=ref.path, size=len(data))
    lines = content.splitlines(keepends=True)
    facts: dict[str, Any] = {"path": ref.path, "size": len(data), "lines": len(lines)}
    if ref.first is not None:
        content = "".join(lines[ref.first - 1 : ref.last])
        facts["shown"] = [ref.first, min(ref.last or ref.first, len(lines))]
    if len(content) > WINDOW:
        content, facts["truncated"] = content[:WINDOW], True
    return ReadItem(text, "ok", content, facts)


def _decoded(data: bytes) -> str | None:
    """Return *data* as text by the rules of `skills.read`: strict UTF-8 without NUL, a leading BOM dropped."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


async def _react_read(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ReactReadInput)
    items = await read_refs(call.turn, arguments.refs)
    return ToolAnswer(
        {"items": [item.for_model() for item in items]},
        changed=any(item.changed for item in items),
        pin=" ".join(item.pin for item in items if item.pin) or None,
        ok=any(item.status != "error" for item in items),
    )


def _loads_skill(arguments: BaseModel) -> bool:
    """Whether a `react.read` changes the session: it does when it reads a skill itself."""
    for ref in getattr(arguments, "refs", ()):
        try:
            parsed = parse_ref(ref)
        except ToolCallRefused:
            continue
        if isinstance(parsed, SkillRef) and parsed.path is None:
            return True
    return False


async def _react_write(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ReactWriteInput)
    if arguments.text and arguments.b64:
        problem = [{"path": "/b64", "problem": "give text or b64, not both"}]
        raise refuse("invalid_argument", "give text or b64, not both", errors=problem)
    data = arguments.text.encode("utf-8", "backslashreplace") if not arguments.b64 else _decode(arguments.b64)
    written = call.turn.workspace.write(arguments.path, data, arguments.mode)
    call.turn.bus.emit(FileWritten, path=written.path, size=written.size, tool="react.write")
    return ToolAnswer(written.to_json(), (written.path,), changed=True)


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        problem = [{"path": "/b64", "problem": "is not base64"}]
        raise refuse("invalid_argument", "b64 is not base64", errors=problem) from None


READ = SolverTool(
    "react.read",
    "Read skills (which loads them), files of loaded skills, sources by number, and files of this turn.",
    ReactReadInput,
    _react_read,
    barrier=_loads_skill,
)
WRITE = SolverTool(
    "react.write",
    "Write a file of this turn. Files handed in and data/ are read-only.",
    ReactWriteInput,
    _react_write,
    barrier=lambda _arguments: True,
)
