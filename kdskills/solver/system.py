"""`SolverSystem`: a bundle, models, an executor and sessions, open for any number of turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kdskills.bundle import Bundle, load_bundle
from kdskills.bundle.descriptor import DECISION
from kdskills.bundle.load import untrusted
from kdskills.errors import BadRequest, NameTaken, ReplayError, StrPath
from kdskills.execution import Executor, IsolationLevel
from kdskills.models import ModelProvider
from kdskills.session import SkillRuntime
from kdskills.session.tools import INPUTS, safe_name
from kdskills.solver.parts import Pacing, SolverParts, SolverSettings, Wiring, default_wiring, redactor_of
from kdskills.solver.tools import RemoteSession, SolverTool, ToolTable, as_tool, load_bundle_tools, remote_tools
from kdskills.solver.turn_tools import PYTHON, READ, WRITE

if TYPE_CHECKING:
    from kdskills.session.approval import Approver
    from kdskills.session.store import SessionStore
    from kdskills.solver.bus import Sink
    from kdskills.turn import SkillsSubsystem

UNSAFE = "unsafe-local"


class SolverSystem:
    """Everything turns share. Open it with `async with`; closing it closes the models, those given as objects, too.

    Args:
        bundle: The bundle, or its folder.
        model: A model string such as `openai:gpt-5`, or a provider. `replay` replays the bundle's `demo.yaml`.
        executor: An engine or its name; `auto` takes the first that works here, None turns scripts and generated
            code off.
        settings: Bounds and choices.
        store: Where sessions are kept; memory by default.
        tools: Further tools: typed functions, or `SolverTool`s.
        remote: A session of `kdskills.remote`, whose functions become tools `remote.<name>` when the system opens.
        approve: Asks a person before anything runs.
        sinks: Told of every event.
        wiring: Turns names into objects; the installed Host's by default.

    Raises:
        BundleError: `bundle_untrusted`: the bundle has a `tools.py`, and was loaded without leave to run code.
    """

    def __init__(
        self,
        *,
        bundle: Bundle | StrPath,
        model: str | ModelProvider = "replay",
        executor: str | Executor | None = "auto",
        settings: SolverSettings | None = None,
        store: SessionStore | None = None,
        tools: Sequence[object] = (),
        remote: object | None = None,
        approve: Approver | None = None,
        sinks: Sequence[Sink] = (),
        wiring: Wiring | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        if remote is not None and not isinstance(remote, RemoteSession):
            message = "remote must be a session of remote skills: it needs list() and dispatch_tool_call()"
            raise BadRequest(message, errors=[{"path": "/remote"}])
        self._remote = remote
        self.bundle = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
        if self.bundle.tools_path is not None and not self.bundle.trusted:
            raise untrusted(self.bundle.tools_path, 1, "it holds tools of the bundle")
        self.settings = settings or SolverSettings()
        self.wiring = wiring or default_wiring()
        self.subsystem: SkillsSubsystem = self.wiring.subsystem(self.bundle)
        self._model = model
        self._executor = executor
        self._store = store
        self._tools = tuple(as_tool(tool) for tool in tools)
        self._approve = approve
        self._sinks = tuple(sinks)
        self._pacing = pacing or Pacing()
        self._parts: SolverParts | None = None
        self._opened: list[ModelProvider] = []

    @property
    def parts(self) -> SolverParts:
        """The objects behind the system.

        Raises:
            BadRequest: The system is not open.
        """
        if self._parts is None:
            raise BadRequest("the system is not open: use it within `async with system:`", code="system_closed")
        return self._parts

    @property
    def runtime(self) -> SkillRuntime:
        """The sessions of this system. Raises BadRequest when it is not open."""
        return self.parts.runtime

    @property
    def executor(self) -> Executor | None:
        """The engine of scripts and generated code, or None where both are off."""
        return self.parts.executor

    async def __aenter__(self) -> SolverSystem:
        """Open models and executor.

        Raises:
            ExecRefused: No engine works here, or the named one does not.
            ReplayError: The recording is missing or malformed.
            UnknownName: A model or engine nobody registered.
        """
        try:
            models = self._open_models()
            executor, profile = await self._open_executor()
            self._parts = await asyncio.to_thread(self._build, models, executor, profile)
        except BaseException as error:
            await self._close_models(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything.

        Raises:
            ReplayError: `replay_unused`, unless another error is on its way.
        """
        if self._parts is not None:
            await self._parts.runtime.aclose()
            self._parts = None
        await self._close_models(error)

    def _open_models(self) -> dict[str, ModelProvider]:
        by_name: dict[str, ModelProvider] = {}

        def opened(model: str | ModelProvider) -> ModelProvider:
            provider = by_name.get(model) if isinstance(model, str) else model
            if provider is None:
                name = str(model)
                if name == "replay":
                    if self.bundle.demo_path is None:
                        message = f"the bundle {self.bundle.name} has no demo.yaml: name a model, or replay:FILE"
                        raise ReplayError(message, code="cassette_missing", path=str(self.bundle.root))
                    name = f"replay:{self.bundle.demo_path}"
                provider = by_name[str(model)] = self.wiring.model(name)
            redactor = redactor_of(provider)
            if redactor is not None:  # a recording must not hold what transcripts mask
                redactor.add(*self.settings.secret_values())
            if all(provider is not opened_provider for opened_provider in self._opened):
                self._opened.append(provider)
            return provider

        models = {DECISION: self._model, **self.settings.models}
        return {role: opened(model) for role, model in models.items()}

    async def _open_executor(self) -> tuple[Executor | None, str | None]:
        """Return the engine to use, or None where scripts and generated code are off, and the profile to ask for."""
        if self._executor is None or self.settings.run_scripts is False:
            return None, None
        choice = self._executor
        executor = await self.wiring.executor(choice) if isinstance(choice, str) else choice
        if executor.level > IsolationLevel.RLIMIT:
            return executor, None
        return (executor, UNSAFE) if self.settings.run_scripts else (None, None)

    def _build(self, models: dict[str, ModelProvider], executor: Executor | None, profile: str | None) -> SolverParts:
        runtime = SkillRuntime(
            subsystem=self.subsystem,
            consumer=DECISION,
            run_scripts=executor is not None,
            executor=executor,
            profile=profile,
            interpreters=self.wiring.interpreters,
            locations="logical",
            store=self._store,
            approve=self._approve,
            script_env=self.settings.script_env,
            script_approval="allow" if self._approve is None else "ask",
            deny=self.wiring.deny,
            window=models[DECISION].context_window,
        )
        return SolverParts(
            bundle=self.bundle,
            subsystem=self.subsystem,
            runtime=runtime,
            settings=self.settings,
            wiring=self.wiring,
            tools=self._table(executor),
            models=models,
            executor=executor,
            profile=profile,
            sinks=self._sinks,
            approve=self._approve,
            pacing=self._pacing,
        )

    def _table(self, executor: Executor | None) -> ToolTable:
        shipped = (READ, WRITE) if executor is None else (READ, WRITE, PYTHON)
        path = self.bundle.tools_path
        from_bundle: tuple[SolverTool, ...] = () if path is None else load_bundle_tools(path)
        remote = () if self._remote is None else remote_tools(self._remote)
        tools = (*shipped, *self.wiring.tools, *from_bundle, *self._tools, *remote)
        reserved = {spelling for tool_id in INPUTS for spelling in (tool_id, safe_name(tool_id))}
        for tool in tools:
            if tool.id in reserved or safe_name(tool.id) in reserved or tool.id.startswith(("skills.", "kd.")):
                raise NameTaken(f"the tool id {tool.id!r} is reserved", name=tool.id, kind="tool")
        return ToolTable(tools)

    async def _close_models(self, error: BaseException | None) -> None:
        providers, self._opened = self._opened, []
        for provider in providers:
            try:
                await provider.aclose()
            except ReplayError as unused:
                if error is None:
                    raise
                error.add_note(f"besides: {unused.message}")
