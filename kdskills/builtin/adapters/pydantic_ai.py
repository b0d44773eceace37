"""Skills for agents of pydantic-ai, as a toolset or a capability. Needs the extra `models`."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import SchemaValidator
from pydantic_core.core_schema import dict_schema, str_schema

from kdskills.errors import BadRequest, MissingExtra
from kdskills.session.tools import CHANGES

try:
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.exceptions import ModelRetry, ToolFailed
    from pydantic_ai.tools import AgentDepsT, RunContext, ToolDefinition
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
except ImportError:
    raise MissingExtra("the pydantic-ai adapter", "models") from None

if TYPE_CHECKING:
    from typing import Self

    from kdskills.models import ToolSpec
    from kdskills.session import Session, SkillRuntime

SEARCH: Final = "skills_search"


class SkillsToolset(AbstractToolset[AgentDepsT]):
    """The skill tools of a runtime, with instructions made anew for every model request.

    Args:
        runtime: Answers; the only place where skills are granted or refused.
        consumer: Consumer of the sessions; the runtime's by default.
        session_id: A session that exists, used by every run and left open. Without it each run has a session of its
            own, closed at its end.
        id: pydantic-ai's name of the toolset, for durable execution.
    """

    def __init__(
        self,
        runtime: SkillRuntime,
        *,
        consumer: str | None = None,
        session_id: str | None = None,
        id: str | None = None,  # noqa: A002 - pydantic-ai's name
    ) -> None:
        self._runtime, self._consumer, self._session_id, self._id = runtime, consumer, session_id, id
        self._of_run = False
        self._session: Session | None = None

    @property
    def id(self) -> str | None:  # noqa: D102 - pydantic-ai's
        return self._id

    async def for_run(self, ctx: RunContext[AgentDepsT]) -> SkillsToolset[AgentDepsT]:
        """Return the toolset of one run; its session opens when the run enters it."""
        fresh: SkillsToolset[AgentDepsT] = copy(self)
        fresh._of_run = True
        return fresh

    async def __aenter__(self) -> Self:
        """Open the run's session. Raises SessionError when the one named does not exist."""
        if self._of_run and self._session_id is None:
            self._session = await self._runtime.create_session(consumer=self._consumer)
        elif self._of_run and self._session_id is not None:
            self._session = await self._runtime.get_session(self._session_id)
        return self

    async def __aexit__(self, *args: object) -> None:
        """Close the run's own session."""
        session, self._session = self._session, None
        if session is not None and self._session_id is None:
            await session.close()

    async def get_instructions(self, ctx: RunContext[AgentDepsT]) -> str | None:
        """Return rules, available and active skills as they are now, or None when there are none."""
        return (await self._open().instructions()).text or None

    async def get_tools(self, ctx: RunContext[AgentDepsT]) -> dict[str, ToolsetTool[AgentDepsT]]:
        """Return the tools offered now."""
        return {spec.name: self._tool(spec, ctx.max_retries) for spec in self._open().tool_specs()}

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[AgentDepsT], tool: ToolsetTool[AgentDepsT]
    ) -> Any:
        """Answer a call. Raises ModelRetry for what the model can mend, ToolFailed for what others must."""
        reply = await self._open().call(name, tool_args)
        if reply.error is None:
            return reply.text if name == SEARCH else reply.result  # what a search located is its text
        raise (ModelRetry if reply.error["who"] == "model" else ToolFailed)(reply.text)

    def _tool(self, spec: ToolSpec, retries: int) -> ToolsetTool[AgentDepsT]:
        definition = ToolDefinition(name=spec.name, description=spec.description, sequential=spec.tool_id in CHANGES)
        definition.parameters_json_schema = dict(spec.input_schema)
        shape = SchemaValidator(dict_schema(str_schema()))  # the rest is the runtime's: one text answers each mistake
        return ToolsetTool(toolset=self, tool_def=definition, max_retries=retries, args_validator=shape)

    def _open(self) -> Session:
        if self._session is None:
            raise BadRequest("a SkillsToolset works within a run of an agent only", code="no_run")
        return self._session


@dataclass
class SkillsCapability(AbstractCapability[AgentDepsT]):
    """The same as a capability; arguments as `SkillsToolset`."""

    runtime: SkillRuntime
    consumer: str | None = None
    session_id: str | None = None

    def get_toolset(self) -> SkillsToolset[AgentDepsT]:
        """Return the toolset, which brings the instructions along."""
        return SkillsToolset(self.runtime, consumer=self.consumer, session_id=self.session_id, id=self.id)
