"""Skills for agents of LangChain and graphs of LangGraph, as a middleware or as tools. Needs the extra `langchain`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from kdskills.errors import MissingExtra, SessionError

try:
    from langchain.agents.middleware import AgentMiddleware
    from langchain.agents.middleware.types import (
        AgentState,
        ExtendedModelResponse,
        ModelRequest,
        ModelResponse,
        OmitFromSchema,
        ToolCallRequest,
    )
    from langchain_core.messages import AIMessage, SystemMessage, ToolMessage
    from langchain_core.tools import StructuredTool, ToolException
    from langgraph.config import get_config
    from langgraph.runtime import Runtime
    from langgraph.types import Command
except ImportError:
    raise MissingExtra("the LangChain adapter", "langchain") from None

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from kdskills.models import ToolSpec
    from kdskills.session import Session, SkillRuntime, ToolReply

Answer = Callable[[str, dict[str, Any]], Awaitable["ToolReply"]]


class SkillsState(AgentState[Any]):
    """State of a graph with skills: the id of the session, which goes neither in nor out."""

    skills_session: NotRequired[Annotated[str, OmitFromSchema(input=True, output=True)]]


class SkillsMiddleware(AgentMiddleware[SkillsState, Any, Any]):
    """The skill tools of a runtime, with instructions made anew before every model call.

    A thread keeps its session from run to run, where the graph has a checkpointer; a run without a thread has a session
    of its own, closed at its end. Agents are asynchronous: `ainvoke`, `astream`.

    Args:
        runtime: Answers; the only place where skills are granted or refused.
        consumer: Consumer of the sessions; the runtime's by default.
        session_id: A session that exists, used by every run and left open.
    """

    state_schema = SkillsState

    def __init__(self, runtime: SkillRuntime, *, consumer: str | None = None, session_id: str | None = None) -> None:
        super().__init__()
        self._runtime, self._consumer, self._session_id = runtime, consumer, session_id

    async def abefore_agent(self, state: SkillsState, runtime: Runtime[Any]) -> dict[str, Any]:
        """Open the session, or go on with the thread's. Raises SessionError when the one named does not exist."""
        session_id = self._session_id or state.get("skills_session")
        try:
            session = await self._runtime.get_session(session_id) if session_id else None
        except SessionError:
            if self._session_id:
                raise
            session = None  # the thread's was idle for too long
        return {"skills_session": (session or await self._runtime.create_session(consumer=self._consumer)).id}

    async def aafter_agent(self, state: SkillsState, runtime: Runtime[Any]) -> None:
        """Close the session of a run that belongs to no thread."""
        if not self._session_id and not get_config().get("configurable", {}).get("thread_id"):
            await self._runtime.close_session(_session_of(state))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any] | AIMessage | ExtendedModelResponse[Any]:
        """Put rules, available and active skills as they are now behind the agent's own text, and offer the tools."""
        session = await self._runtime.get_session(_session_of(request.state))
        instructions = await session.instructions()
        tools = [*request.tools, *skill_tools(session)]
        return await handler(
            request.override(system_message=_joined(request.system_message, instructions.text), tools=tools)
        )

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Let the runtime answer the calls of its tools."""
        session_id, name = _session_of(request.state), request.tool_call["name"]
        specs = self._runtime.tool_specs(session_id) if request.tool is None else ()
        tools = [_tool(partial(self._runtime.call, session_id), spec) for spec in specs if spec.name == name]
        return await handler(request.override(tool=tools[0]) if tools else request)


class SkillStructuredTool(StructuredTool):
    """One skill tool. Whatever names the model gives to arguments, none is taken for a parameter of the framework's."""

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Answer a call: all arguments go through one parameter."""
        is_call = isinstance(input, dict) and input.get("type") == "tool_call"
        wrapped = {**input, "args": {"arguments": input["args"]}} if is_call else {"arguments": input}
        return await super().ainvoke(wrapped, config, **kwargs)


def skill_tools(session: Session) -> list[StructuredTool]:
    """Return the tools *session* offers now, for graphs of one's own; ask anew before each model call.

    A refused call is answered with a message of status `error`, which the model can act on.
    """
    return [_tool(session.call, spec) for spec in session.tool_specs()]


def _tool(answer: Answer, spec: ToolSpec) -> StructuredTool:
    async def call(arguments: dict[str, Any]) -> str:
        reply = await answer(spec.name, arguments)
        if not reply.ok:
            raise ToolException(reply.text)
        return reply.text

    return SkillStructuredTool(
        name=spec.name,
        description=spec.description,
        args_schema=dict(spec.input_schema),
        coroutine=call,
        handle_tool_error=True,
    )


def _session_of(state: Any) -> str:
    return str(state["skills_session"])


def _joined(agent_message: SystemMessage | None, text: str) -> SystemMessage | None:
    """Return the agent's own system message with *text* behind it; None when there is neither."""
    if not text:
        return agent_message
    if agent_message is None:
        return SystemMessage(text)
    if isinstance(agent_message.content, str):
        return SystemMessage(f"{agent_message.content}\n\n{text}")
    return SystemMessage(content=[*agent_message.content, {"type": "text", "text": text}])
