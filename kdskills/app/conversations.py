"""Conversation sessions of callers at the doors: the four runtime tools over a project's skills."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdskills.app.work import scope_of
from kdskills.errors import ExecRefused, SessionError
from kdskills.session import SkillRuntime
from kdskills.session.scope import NO_TURN, TurnScope
from kdskills.session.store import MemoryStore

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.settings import Settings
    from kdskills.app.wiring import HostWiring
    from kdskills.projects.views import ProjectSkills
    from kdskills.session import SessionStore
    from kdskills.session.receipts import LoadReceipt, ReadResult, ScriptResult, UnloadReceipt
    from kdskills.turn import SkillsSubsystem

ANONYMOUS = "anonymous"
"""Consumer of callers without an agent: no rule of a descriptor names it, so it sees what everybody may."""


class Conversations:
    """Sessions by caller. What one caller calls `main` is another session than anybody else's `main`.

    Args:
        settings: Which engine runs scripts, and where sessions are kept.
        wiring: Engines and the policy of plugins.
        skills_of: Gives the skills of a project.
        open_store: Opens a store of sessions by its URL.
    """

    def __init__(
        self,
        settings: Settings,
        wiring: HostWiring,
        skills_of: Callable[[str], Awaitable[ProjectSkills]],
        open_store: Callable[[str], SessionStore],
    ) -> None:
        self._settings = settings
        self._wiring = wiring
        self._skills_of = skills_of
        self._open_store = open_store
        self._lock = asyncio.Lock()
        self._runtimes: dict[str, tuple[SkillsSubsystem, SkillRuntime]] = {}
        self._store: SessionStore | None = None

    async def load(self, identity: Identity, session_id: str, names: list[str], mode: str | None) -> LoadReceipt:
        """Load skills; the session is opened by its first use. Raises ToolCallRefused."""
        runtime, key, scope = await self._open(identity, session_id)
        return await runtime.load(key, names, mode, by=identity.starter, scope=scope)

    async def unload(self, identity: Identity, session_id: str, names: list[str], *, everything: bool) -> UnloadReceipt:
        """Unload skills. Raises ToolCallRefused."""
        runtime, key, scope = await self._open(identity, session_id)
        return await runtime.unload(key, names, all=everything, scope=scope)

    async def read(
        self, identity: Identity, session_id: str, path: str, skill: str | None, encoding: str, offset: int
    ) -> ReadResult:
        """Read a file of a loaded skill. Raises ToolCallRefused."""
        runtime, key, scope = await self._open(identity, session_id)
        return await runtime.read(key, path, skill=skill, encoding=encoding, offset=offset, scope=scope)

    async def run_script(
        self, identity: Identity, session_id: str, path: str, options: Mapping[str, Any]
    ) -> ScriptResult:
        """Run a script of a loaded skill in isolation. Raises ToolCallRefused, and ExecRefused when no engine works."""
        runtime, key, scope = await self._open(identity, session_id)
        if not runtime.config.run_scripts:
            await self._wiring.executor()  # says what is wrong and what cures it
            self._runtimes.pop(identity.project, None)  # nothing is wrong any more
            runtime, key, scope = await self._open(identity, session_id)
        return await runtime.run_script(key, path, **options, scope=scope)

    async def _open(self, identity: Identity, session_id: str) -> tuple[SkillRuntime, str, TurnScope]:
        """Return the runtime of the caller's project, the key of the session there, and the caller's view as it is now."""
        project_skills = await self._skills_of(identity.project)
        async with self._lock:
            entry = self._runtimes.get(identity.project)
            if entry is None or entry[0] is not project_skills.subsystem:
                entry = (project_skills.subsystem, await self._runtime(project_skills.subsystem))
                self._runtimes[identity.project] = entry
        runtime = entry[1]
        key = scope_of(identity).session_key(session_id)
        try:
            await runtime.get_session(key)
        except SessionError:
            try:
                await runtime.create_session(key, consumer=identity.consumer or ANONYMOUS)
            except SessionError as error:  # somebody else's first use came between
                if error.code != "session_exists":
                    raise
        if identity.held_tools is None:
            return runtime, key, NO_TURN
        view = project_skills.subsystem.view(identity.consumer or ANONYMOUS, identity.held_tools)
        return runtime, key, TurnScope(view=view)

    async def _runtime(self, subsystem: SkillsSubsystem) -> SkillRuntime:
        """Return a runtime over *subsystem*; without a working engine it has no scripts, and `run_script` asks again."""
        try:
            executor = await self._wiring.executor()
        except ExecRefused:
            executor = None
        if self._store is None:
            url = self._settings.session_store
            self._store = MemoryStore() if url is None else await asyncio.to_thread(self._open_store, url)
        return SkillRuntime(
            subsystem=subsystem,
            executor=executor,
            run_scripts=executor is not None,
            interpreters=self._wiring.interpreters,
            locations="logical",
            body_in="result",
            store=self._store,
            deny=self._wiring.deny,
        )
