"""Skills for agents of openai-agents, as an agent class or as tools. Needs the extra `openai-agents`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdskills.errors import BadRequest, MissingExtra
from kdskills.session import Session

try:
    from agents import Agent, FunctionTool, RunContextWrapper, TContext, Tool
except ImportError:
    raise MissingExtra("the openai-agents adapter", "openai-agents") from None

if TYPE_CHECKING:
    from agents.tool_context import ToolContext

    from kdskills.models import ToolSpec


@dataclass
class SkillsAgent(Agent[TContext]):
    """An agent with the skill tools of a session, and instructions made anew for every model request.

    Everything else is as in `Agent`; its own instructions stay in front.

    Args:
        skills: An open session, or a function of the run's context that gives it, where one agent serves many
            conversations. The program opens and closes sessions.
    """

    skills: Session | Callable[[TContext], Session] | None = None

    async def get_system_prompt(self, run_context: RunContextWrapper[TContext]) -> str | None:
        """Return the agent's own instructions, with rules, available and active skills as they are now."""
        agent_text = await super().get_system_prompt(run_context)
        skills = await self._session(run_context).instructions()
        return "\n\n".join(text for text in (agent_text, skills.text) if text) or None

    async def get_all_tools(self, run_context: RunContextWrapper[TContext]) -> list[Tool]:
        """Return the agent's own tools, and those the session offers now."""
        return [*await super().get_all_tools(run_context), *skill_tools(self._session(run_context))]

    def _session(self, run_context: RunContextWrapper[TContext]) -> Session:
        session = self.skills(run_context.context) if callable(self.skills) else self.skills
        if session is None:
            raise BadRequest("a SkillsAgent needs skills=, an open session", code="no_session")
        return session


def skill_tools(session: Session) -> list[FunctionTool]:
    """Return the tools *session* offers now, for agents that put `session.instructions()` before each request themselves.

    A refused call is answered with the runtime's text, which the model can act on.
    """
    return [_tool(session, spec) for spec in session.tool_specs()]


def _tool(session: Session, spec: ToolSpec) -> FunctionTool:
    async def answer(context: ToolContext[Any], arguments: str) -> str:
        return (await session.call(spec.name, arguments or "{}")).text

    return FunctionTool(
        name=spec.name,
        description=spec.description,
        params_json_schema=dict(spec.input_schema),
        on_invoke_tool=answer,
        strict_json_schema=False,  # strict mode wants every argument to be required
    )
