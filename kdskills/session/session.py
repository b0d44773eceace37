"""A session: the runtime's methods bound to one id, within a turn or outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdskills.session.receipts import (
    ActiveSkill,
    LoadReceipt,
    PromptParts,
    ReadResult,
    ScriptResult,
    SkillReceipt,
    ToolReply,
    UnloadReceipt,
)
from kdskills.session.scope import NO_TURN, TurnScope
from kdskills.session.snapshots import SessionSnapshot

if TYPE_CHECKING:
    from kdskills.models import ToolSpec
    from kdskills.session.config import Budget
    from kdskills.session.runtime import SkillRuntime
    from kdskills.skills.selection import By


class Session:
    """One session. The model never names it: tools are called on this object.

    `within(scope)` gives the same session as calls of one turn see it.
    """

    def __init__(self, runtime: SkillRuntime, session_id: str, consumer: str, scope: TurnScope = NO_TURN) -> None:
        self._runtime = runtime
        self.id = session_id
        self.consumer = consumer
        self.scope = scope

    def __repr__(self) -> str:
        return f"Session({self.id!r}, consumer={self.consumer!r})"

    def within(self, scope: TurnScope) -> Session:
        """Return this session with *scope*: a turn's view, files, sources and listener."""
        return Session(self._runtime, self.id, self.consumer, scope)

    async def load(self, names: Sequence[str], mode: str | None = "replace", *, by: By = "model") -> LoadReceipt:
        """Load skills, all or nothing."""
        return await self._runtime.load(self.id, names, mode, by=by, scope=self.scope)

    async def unload(self, names: Sequence[str] = (), *, all: bool = False) -> UnloadReceipt:  # noqa: A002
        """Unload skills; what is not loaded has no effect."""
        return await self._runtime.unload(self.id, names, all=all, scope=self.scope)

    async def active(self) -> list[ActiveSkill]:
        """Return the loaded skills with their texts, in load order."""
        return await self._runtime.active(self.id, scope=self.scope)

    async def refresh(self) -> LoadReceipt:
        """Read every loaded skill again, in the same order."""
        return await self._runtime.refresh(self.id, scope=self.scope)

    async def describe(self, name: str) -> SkillReceipt:
        """Return the receipt of a visible skill, hashed afresh."""
        return await self._runtime.describe(name, session_id=self.id, scope=self.scope)

    async def read(self, path: str, *, skill: str | None = None, encoding: str = "text", offset: int = 0) -> ReadResult:
        """Read a file of a loaded skill."""
        return await self._runtime.read(self.id, path, skill=skill, encoding=encoding, offset=offset, scope=self.scope)

    async def run_script(
        self,
        path: str,
        *,
        skill: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: str = ".",
        timeout_s: float | None = None,
    ) -> ScriptResult:
        """Run a script of a loaded skill in isolation."""
        return await self._runtime.run_script(
            self.id, path, skill=skill, args=args, env=env, workdir=workdir, timeout_s=timeout_s, scope=self.scope
        )

    async def instructions(self, *, budget: Budget | None = None) -> PromptParts:
        """Return the top-level text of the next model call, part by part."""
        return await self._runtime.instructions(self.id, budget=budget, scope=self.scope)

    async def call(self, tool: str, arguments: Mapping[str, Any] | str) -> ToolReply:
        """Answer a tool call of a model; its mistakes are replies with `ok=False`, never raised."""
        return await self._runtime.call(self.id, tool, arguments, scope=self.scope)

    def tool_specs(self, *, style: str = "safe") -> tuple[ToolSpec, ...]:
        """Return the tools to offer now."""
        return self._runtime.tool_specs(self.id, style=style, scope=self.scope)

    async def snapshot(self, *, bodies: bool = True) -> SessionSnapshot:
        """Return the session as JSON-able values."""
        return await self._runtime.snapshot(self.id, bodies=bodies)

    async def close(self) -> bool:
        """Close the session: True, then False."""
        return await self._runtime.close_session(self.id)
