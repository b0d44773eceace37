"""Answering tool calls by name: both spellings, typed arguments, replies instead of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kdskills.errors import KdskillsError, ModelMustAct, SessionError
from kdskills.session import loading, reading, scripts
from kdskills.session.codes import refuse
from kdskills.session.core import Call, Core
from kdskills.session.inputs import INPUTS, LoadInput, ReadInput, RunScriptInput, UnloadInput, parse, safe_name
from kdskills.session.receipts import (
    LoadReceipt,
    ReadResult,
    ScriptResult,
    ToolFailure,
    ToolReply,
    ToolSuccess,
    UnloadReceipt,
)

Answer = LoadReceipt | UnloadReceipt | ReadResult | ScriptResult


def offered(core: Core, selected: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the dotted ids of the tools in force, in their order."""
    enabled = tuple(tool for tool in INPUTS if tool != "skills.run_script" or core.config.run_scripts)
    return enabled if selected is None else tuple(tool for tool in enabled if tool in selected)


def dotted(tool: str) -> str | None:
    """Return the dotted id of either spelling, or None."""
    return next((tool_id for tool_id in INPUTS if tool in {tool_id, safe_name(tool_id)}), None)


def run_of(core: Core, arguments: RunScriptInput) -> scripts.Run:
    """Return the shaped call of `skills.run_script`."""
    timeout = core.config.limits.script_timeout_s if arguments.timeout_s is None else arguments.timeout_s
    return scripts.Run(
        arguments.path, arguments.skill, tuple(arguments.args), dict(arguments.env), arguments.workdir, timeout
    )


async def answer(core: Core, call: Call, tool: str, arguments: Mapping[str, Any] | str) -> Answer:
    """Do what one tool call asks.

    Raises:
        KdskillsError: Any code of the tools' table, and those of sessions.
    """
    await core.record(call.session_id)
    model = INPUTS[tool]
    if tool == "skills.run_script" and not core.config.run_scripts:
        raise refuse("run_disabled", "scripts are switched off here")
    request = parse(model, arguments)
    if isinstance(request, LoadInput):
        return await loading.load(core, call, request.names, request.mode, "model")
    if isinstance(request, UnloadInput):
        return await loading.unload(core, call, request.names, request.all)
    if isinstance(request, ReadInput):
        return await reading.read(core, call, request.path, request.skill, request.encoding, request.offset)
    if isinstance(request, RunScriptInput):
        return await scripts.run_script(core, call, run_of(core, request))
    raise refuse("tool_not_found", f"there is no tool {tool!r}", tool=tool)


async def reply(core: Core, call: Call, tool: str, arguments: Mapping[str, Any] | str) -> ToolReply:
    """Answer a tool call as the model reads it; refusals become replies.

    Errors of the calling program (`session_not_found`, `conflict`) become replies as well, so that each call has
    exactly one answer; cancellation is raised.
    """
    tool_id = dotted(tool)
    if tool_id is None:
        names = ", ".join(offered(core, call.scope.tools))
        return failed(tool, refuse("tool_not_found", f"there is no tool {tool!r}; there are {names}", tool=tool))
    try:
        receipt = await answer(core, call, tool_id, arguments)
    except (ModelMustAct, SessionError) as error:
        return failed(tool_id, error)
    return succeeded(core, tool_id, receipt)


def failed(tool: str, error: KdskillsError) -> ToolReply:
    """Return the reply of a refusal; the gate's own reason is never in it."""
    wire = error.to_json()
    return ToolFailure(tool, error=wire["error"], text=wire_text(wire))


def succeeded(core: Core, tool: str, receipt: Answer) -> ToolReply:
    """Return the reply of an answer, with the bodies and their pins when bodies travel in results."""
    wire = receipt.to_json()
    pin = None
    if isinstance(receipt, LoadReceipt):
        # Text of third parties is material for the model, not instructions: it always travels here.
        bodies = [skill for skill in receipt.bodies if core.config.body_in == "result" or skill.receipt.origin]
        if bodies or core.config.body_in == "result":
            wire["bodies"] = [
                {"name": skill.name, "origin": skill.receipt.origin, "text": skill.body} for skill in bodies
            ]
        pin = " ".join(f"skill:{skill.receipt.id}@{skill.receipt.digest}" for skill in bodies) or None
    return ToolSuccess(tool, result=wire, text=wire_text(wire), pin=pin)


def wire_text(wire: Mapping[str, Any]) -> str:
    """Return *wire* as JSON text that every transport can encode: half of a surrogate pair stays an escape."""
    text = json.dumps(wire, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # names and paths are repeated as the model gave them
        return json.dumps(wire)
    return text
