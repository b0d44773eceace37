"""The four runtime tools as operations, each within a session of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, StringConstraints

from kdskills.app.operations.models import Output
from kdskills.session.tools import LoadInput, ReadInput, RunScriptInput, UnloadInput

if TYPE_CHECKING:
    from kdskills.app.conversations import Conversations
    from kdskills.app.operations.table import Context

SessionId = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$"),
    Field(description="The caller's name for the conversation; the first use opens it."),
]


class LoadCall(LoadInput):
    """Arguments of `skills.load`."""

    session_id: SessionId = "main"


class UnloadCall(UnloadInput):
    """Arguments of `skills.unload`."""

    session_id: SessionId = "main"


class ReadCall(ReadInput):
    """Arguments of `skills.read`; the rules of paths answer NUL in one with `path_denied`."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/path",)

    session_id: SessionId = "main"


class RunCall(RunScriptInput):
    """Arguments of `skills.run_script`; the rules of paths answer NUL in one with `path_denied`."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/path",)

    session_id: SessionId = "main"


class LoadedSkillText(Output):
    """The instructions of a loaded skill."""

    name: str
    body: str


class ToolAnswer(Output):
    """What a runtime tool answered.

    `result` is the tool's own JSON object; `instructions` are the texts of skills that are loaded now, for `skills.load`.
    """

    result: dict[str, Any]
    instructions: tuple[LoadedSkillText, ...] = ()


async def load(conversations: Conversations, arguments: LoadCall, context: Context) -> ToolAnswer:
    """Load skills and return their instructions."""
    receipt = await conversations.load(context.identity, arguments.session_id, arguments.names, arguments.mode)
    return ToolAnswer.of(result=receipt.to_json(), instructions=receipt.bodies)


async def unload(conversations: Conversations, arguments: UnloadCall, context: Context) -> ToolAnswer:
    """Unload skills."""
    names, everything = arguments.names, arguments.all
    receipt = await conversations.unload(context.identity, arguments.session_id, names, everything=everything)
    return ToolAnswer(result=receipt.to_json())


async def read(conversations: Conversations, arguments: ReadCall, context: Context) -> ToolAnswer:
    """Read a file of a loaded skill."""
    piece = await conversations.read(
        context.identity, arguments.session_id, arguments.path, arguments.skill, arguments.encoding, arguments.offset
    )
    return ToolAnswer(result=piece.to_json())


async def run_script(conversations: Conversations, arguments: RunCall, context: Context) -> ToolAnswer:
    """Run a script of a loaded skill."""
    options = arguments.model_dump(include={"skill", "args", "env", "workdir", "timeout_s"})
    result = await conversations.run_script(context.identity, arguments.session_id, arguments.path, options)
    return ToolAnswer(result=result.to_json())
