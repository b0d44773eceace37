"""Python skills of a session as the solver's tools: `remote.<name>`.

The session is any object with the two methods of `RemoteSession`; `kdskills.remote` has them. Its own dispatcher
validates arguments, runs the handler within its deadline and answers in words, so nothing of that is written here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from kdskills.solver.running import in_thread
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext, ToolError


class RemoteTool(Protocol):
    """What a solver must know of a registered function."""

    @property
    def qualified_name(self) -> str:
        """Its name, behind its namespace and a dot if it has one."""
        ...

    @property
    def description(self) -> str:
        """What it does, for the model."""
        ...

    @property
    def input_schema(self) -> Mapping[str, Any]:
        """JSON Schema of its arguments."""
        ...


@runtime_checkable
class RemoteSession(Protocol):
    """A session with registered functions; its methods may be coroutines."""

    def list(self) -> Sequence[Any]:
        """Return the functions, as `RemoteTool`s."""
        ...

    def dispatch_tool_call(self, *, tool: str, arguments: Any = None, call_id: str | None = None) -> Any:
        """Run one; the answer has `response_payload` and `error`."""
        ...


class RemoteArguments(BaseModel):
    """Any JSON object: the session validates it against the function's own schema."""

    model_config = ConfigDict(extra="allow", frozen=True)


def remote_tools(session: RemoteSession) -> tuple[SolverTool, ...]:
    """Return the session's functions as tools, as they are registered now."""
    return tuple(_tool(session, skill) for skill in session.list())


def _item_text(item: Mapping[str, Any]) -> str:
    """Return an item as text; an image or a sound is named, because the solver's answers are text."""
    return str(item["text"]) if item.get("type") == "inputText" else f"[{item.get('type')}]"


def _tool(session: RemoteSession, skill: RemoteTool) -> SolverTool:
    async def body(arguments: BaseModel, context: ToolContext) -> ToolAnswer:
        call_arguments = dict(arguments.model_extra or {})
        call = partial(
            session.dispatch_tool_call, tool=skill.qualified_name, arguments=call_arguments, call_id=context.call_id
        )
        if inspect.iscoroutinefunction(session.dispatch_tool_call):
            reply = await call()
        else:  # a sync session runs the handler in the calling thread, which must not be the event loop's
            reply = await in_thread(call)
        items: Sequence[Mapping[str, Any]] = reply.response_payload["contentItems"]
        text = "\n".join(_item_text(item) for item in items)
        if not reply.response_payload["success"]:
            raise ToolError(text)
        return ToolAnswer(text)

    return SolverTool(
        id=f"remote.{skill.qualified_name}",
        description=skill.description,
        input_model=RemoteArguments,
        body=body,
        schema=dict(skill.input_schema),
    )
