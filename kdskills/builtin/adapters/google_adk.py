"""Skills for agents of Google's ADK, as a toolset. Needs the extra `google-adk`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kdskills.errors import MissingExtra, SessionError

try:
    from google.adk.agents.readonly_context import ReadonlyContext
    from google.adk.models.llm_request import LlmRequest
    from google.adk.tools.base_tool import BaseTool
    from google.adk.tools.base_toolset import BaseToolset
    from google.adk.tools.tool_context import ToolContext
    from google.genai.types import FunctionDeclaration
except ImportError:
    raise MissingExtra("the ADK adapter", "google-adk") from None

if TYPE_CHECKING:
    from kdskills.models import ToolSpec
    from kdskills.session import Session, SkillRuntime


class RuntimeToolset(BaseToolset):
    """The skill tools of a runtime, with instructions made anew for every model request.

    Each session of ADK (application, user, id) has a session of the runtime, opened when it is first needed; it ends when
    it was idle for the runtime's `idle_ttl`.

    Args:
        runtime: Answers; the only place where skills are granted or refused.
        consumer: Consumer of the sessions; the runtime's by default.
        session_id: A session that exists, used by every run.
    """

    def __init__(self, runtime: SkillRuntime, *, consumer: str | None = None, session_id: str | None = None) -> None:
        super().__init__()
        self._runtime, self._consumer, self._session_id = runtime, consumer, session_id
        self._use_invocation_cache = False  # loading changes the tools within an invocation

    async def get_tools(self, readonly_context: ReadonlyContext | None = None) -> list[BaseTool]:
        """Return the tools offered now; outside of a run, those of a session with nothing loaded."""
        session = await self.session(readonly_context) if readonly_context else None
        specs = session.tool_specs() if session else self._runtime.tool_specs()
        return [RuntimeTool(self, spec) for spec in specs]

    async def process_llm_request(self, *, tool_context: ToolContext, llm_request: LlmRequest) -> None:
        """Put rules, available and active skills as they are now behind the agent's own instructions."""
        text = (await (await self.session(tool_context)).instructions()).text
        if text:
            llm_request.append_instructions([text])

    async def session(self, context: ReadonlyContext) -> Session:
        """Return the runtime's session of the ADK session in *context*. Raises SessionError when the one named is gone."""
        if self._session_id is not None:
            return await self._runtime.get_session(self._session_id)
        owner = context.session
        names = json.dumps([self._consumer, owner.app_name, owner.user_id, owner.id])
        session_id = f"adk-{hashlib.sha256(names.encode()).hexdigest()}"
        try:
            return await self._runtime.create_session(session_id, consumer=self._consumer)
        except SessionError as error:
            if error.code != "session_exists":
                raise
        return await self._runtime.get_session(session_id)


class RuntimeTool(BaseTool):
    """One skill tool; a refused call is answered with `error`, the runtime's text, which the model can act on."""

    def __init__(self, toolset: RuntimeToolset, spec: ToolSpec) -> None:
        super().__init__(name=spec.name, description=spec.description)
        self._toolset, self._spec = toolset, spec

    def _get_declaration(self) -> FunctionDeclaration:
        schema = dict(self._spec.input_schema)
        return FunctionDeclaration(name=self.name, description=self.description, parameters_json_schema=schema)

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> dict[str, str]:
        """Answer a call."""
        reply = await (await self._toolset.session(tool_context)).call(self.name, args)
        return {"result" if reply.ok else "error": reply.text}
