"""The four runtime tools as operations, each within a session of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field, StringConstraints

from kdskills.app.operations.models import Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.session.tools import DESCRIPTIONS, LoadInput, ReadInput, RunScriptInput, UnloadInput

if TYPE_CHECKING:
    from kdskills.app.host import Host

SessionId = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$"),
    Field(description="The caller's name for the conversation; the first use opens it."),
]

REFUSALS: Final = (
    "invalid_argument",
    "skill_not_found",
    "skill_unreadable",
    "path_not_found",
    "policy_denied",
    "session_not_found",
    "no_bundle",
)


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


async def load(host: Host, arguments: LoadCall, context: Context) -> ToolAnswer:
    """Load skills and return their instructions."""
    receipt = await host.conversations.load(context.identity, arguments.session_id, arguments.names, arguments.mode)
    texts = tuple(LoadedSkillText(name=skill.name, body=skill.body) for skill in receipt.bodies)
    return ToolAnswer(result=receipt.to_json(), instructions=texts)


async def unload(host: Host, arguments: UnloadCall, context: Context) -> ToolAnswer:
    """Unload skills."""
    receipt = await host.conversations.unload(
        context.identity, arguments.session_id, arguments.names, everything=arguments.all
    )
    return ToolAnswer(result=receipt.to_json())


async def read(host: Host, arguments: ReadCall, context: Context) -> ToolAnswer:
    """Read a file of a loaded skill."""
    piece = await host.conversations.read(
        context.identity, arguments.session_id, arguments.path, arguments.skill, arguments.encoding, arguments.offset
    )
    return ToolAnswer(result=piece.to_json())


async def run_script(host: Host, arguments: RunCall, context: Context) -> ToolAnswer:
    """Run a script of a loaded skill."""
    options = arguments.model_dump(include={"skill", "args", "env", "workdir", "timeout_s"})
    result = await host.conversations.run_script(context.identity, arguments.session_id, arguments.path, options)
    return ToolAnswer(result=result.to_json())


LOAD = Implementation(LoadCall, ToolAnswer, REFUSALS, load, DESCRIPTIONS["skills.load"])
UNLOAD = Implementation(UnloadCall, ToolAnswer, REFUSALS, unload, DESCRIPTIONS["skills.unload"])
READ = Implementation(ReadCall, ToolAnswer, REFUSALS, read, DESCRIPTIONS["skills.read"])
RUN_SCRIPT = Implementation(
    RunCall,
    ToolAnswer,
    (*REFUSALS, "run_disabled", "engine_unavailable"),
    run_script,
    DESCRIPTIONS["skills.run_script"],
)
