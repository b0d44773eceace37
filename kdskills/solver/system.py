"""`SolverSystem`: a bundle, models, an executor and sessions, open for any number of turns."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

from kdskills.bundle import Bundle, load_bundle
from kdskills.bundle.descriptor import DECISION
from kdskills.bundle.load import untrusted
from kdskills.errors import BadRequest, NameTaken, ReplayError, StrPath, UnknownName
from kdskills.execution import Executor, IsolationLevel
from kdskills.models import ModelProvider, Redactor
from kdskills.session import MemoryStore, SkillRuntime
from kdskills.session.config import UNKNOWN_WINDOW
from kdskills.session.conversations import conversations_of
from kdskills.session.tools import INPUTS, safe_name
from kdskills.solver.agents import agent_tool
from kdskills.solver.file_tools import FILE_TOOLS
from kdskills.solver.output import OUTPUT_TOOL
from kdskills.solver.parts import Pacing, SolverSettings, Wiring, default_wiring, redactor_of
from kdskills.solver.shell import SHELL, SHELL_OUTPUT
from kdskills.solver.tools import RemoteSession, ToolTable, as_tool, load_bundle_tools, remote_tools
from kdskills.solver.turn_tools import PYTHON, READ, WRITE

if TYPE_CHECKING:
    from kdskills.session.approval import AccessRequest, Approver, Denial
    from kdskills.session.store import SessionStore
    from kdskills.solver.bus import Sink
    from kdskills.solver.parts import AgentSpec
    from kdskills.turn import SkillsSubsystem

UNSAFE = "unsafe-local"
BRIEF_WINDOW: Final = 8_192
"""Tokens of a window below which rules and tools are told in few words."""


class SolverSystem:
    """Everything turns share. Open it with `async with`; closing it closes the models, those given as objects, too.

    Args:
        bundle: The bundle, or its folder.
        model: A model string such as `openai:gpt-5`, or a provider. `replay` replays the bundle's `demo.yaml`.
        executor: An engine or its name; `auto` takes the first that works here, None turns scripts and generated
            code off.
        settings: Bounds and choices.
        store: Where sessions are kept, and, by its `conversations`, what was said in them; memory by default.
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
        self.packages = self.wiring.packages(self.subsystem)
        self._model = model
        self._executor = executor
        self._store = MemoryStore() if store is None else store
        self.conversations = conversations_of(self._store)
        self._tools = tuple(as_tool(tool) for tool in tools)
        self.approve = approve
        self.sinks = tuple(sinks)
        self.pacing = pacing or Pacing()
        self.models: Mapping[str, ModelProvider] = {}
        self.tools = ToolTable(())
        self.scripts = True
        self.handed_over: dict[str, tuple[str, str]] = {}
        """By the session of an agent's turn, the consumer and session of the turn that handed over to it."""
        self.profile: str | None = None
        self._running: tuple[SkillRuntime, Executor | None] | None = None
        self._opened: list[ModelProvider] = []

    def _when_open(self) -> tuple[SkillRuntime, Executor | None]:
        if self._running is None:
            raise BadRequest("the system is not open: use it within `async with system:`", code="system_closed")
        return self._running

    @property
    def runtime(self) -> SkillRuntime:
        """The sessions of this system. Raises BadRequest when it is not open."""
        return self._when_open()[0]

    @property
    def executor(self) -> Executor | None:
        """The engine of scripts and generated code, or None where both are off. Raises BadRequest when it is not open."""
        return self._when_open()[1]

    @property
    def skill_tools(self) -> tuple[str, ...]:
        """Ids of the tools of skills that a turn has."""
        return tuple(tool for tool in INPUTS if tool != "skills.run_script" or (self.executor and self.scripts))

    @property
    def tool_ids(self) -> tuple[str, ...]:
        """Ids of every tool of a turn; skills that require a tool not among them are refused."""
        return (*self.skill_tools, *self.tools.ids)

    def for_agent(self, spec: AgentSpec, depth: int) -> SolverSystem:
        """Return this system as an agent sees it that is handed over to: the same but for its bounds and its tools.

        *depth* counts the turns above its own; an agent that lies as deep as may be hands over to none.
        """
        settings, agents = self.settings, set(self.settings.agents) if depth >= self.settings.agent_depth else set()
        bounds = spec.budget.model_dump(exclude_none=True)
        bounds["wall_s"] = min(settings.wall_s, bounds.get("wall_s", settings.wall_s))
        system = copy.copy(self)
        system.settings = settings.model_copy(update={**bounds, "answer_role": None})
        owned = [tool for tool in self.tools.all if tool.id not in agents and spec.has(tool.id)]
        system.tools = ToolTable(owned)
        system.scripts = self.scripts and spec.has("skills.run_script")
        return system

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first Denial of a plugin, of an agent's request as of a request of those that handed over to it."""
        denial = self.wiring.deny(request)
        while denial is None and request.session_id in self.handed_over:
            consumer, session_id = self.handed_over[request.session_id]
            request = replace(request, consumer=consumer, session_id=session_id)
            denial = self.wiring.deny(request)
        return denial

    def model(self, role: str) -> ModelProvider:
        """Return the provider of a role; roles without one of their own use the decision model."""
        return self.models.get(role) or self.models[DECISION]

    def window(self, role: str = DECISION) -> int | None:
        """Return the tokens the model of a role takes, as the settings or its provider say; None when unknown."""
        provider = self.model(role)
        own = self.settings.window if provider is self.model(DECISION) else None
        return own or provider.context_window

    def brief(self, role: str = DECISION) -> bool:
        """Return whether the model of a role is told rules and tools in few words."""
        choice = self.settings.brief
        return choice == "always" or (choice == "auto" and (self.window(role) or UNKNOWN_WINDOW) < BRIEF_WINDOW)

    def learn(self, redactor: Redactor, secrets: Iterable[str]) -> None:
        """Mask *secrets* from now on: in a turn's events by its *redactor*, and in the recordings of providers."""
        secret_values = tuple(secrets)
        for masker in (redactor, *map(redactor_of, self.models.values())):
            if masker is not None:
                masker.add(*secret_values)

    async def __aenter__(self) -> SolverSystem:
        """Open models and executor; raises ExecRefused, ReplayError, or UnknownName for one that cannot be had."""
        try:
            self.models = self._open_models()
            executor, self.profile = await self._open_executor()
            self._running = await asyncio.to_thread(self._build, executor), executor
        except BaseException as error:
            await self._close_models(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything; raises ReplayError `replay_unused`, unless another error is on its way."""
        if self._running is not None:
            await self._running[0].aclose()
            self._running = None
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
        choice = self._executor
        if choice is None or self.settings.run_scripts is False:
            return None, None
        executor = await self.wiring.executor(choice) if isinstance(choice, str) else choice
        if executor.level > IsolationLevel.RLIMIT:
            return executor, None
        return (executor, UNSAFE) if self.settings.run_scripts else (None, None)

    def _build(self, executor: Executor | None) -> SkillRuntime:
        """Make the table of tools, for which the bundle's `tools.py` runs, and the sessions."""
        path = self.bundle.tools_path
        tools = (
            *((READ, WRITE) if executor is None else (READ, WRITE, PYTHON)),
            *((SHELL, SHELL_OUTPUT, *FILE_TOOLS) if self._shell(executor) else ()),
            *self.wiring.tools,
            *(() if path is None else load_bundle_tools(path)),
            *self._tools,
            *(agent_tool(tool_id, spec, self.settings.wall_s) for tool_id, spec in self.settings.agents.items()),
            *(() if self._remote is None else remote_tools(self._remote)),
        )
        reserved = {OUTPUT_TOOL, *(spelling for tool_id in INPUTS for spelling in (tool_id, safe_name(tool_id)))}
        for tool in tools:
            if tool.id in reserved or safe_name(tool.id) in reserved or tool.id.startswith(("skills.", "kd.")):
                raise NameTaken(f"the tool id {tool.id!r} is reserved", name=tool.id, kind="tool")
        self.tools = ToolTable(tools)
        unknown = {tool for spec in self.settings.agents.values() for tool in spec.tools or ()} - {
            *self.tools.ids,
            *INPUTS,
        }
        if unknown:
            names = ", ".join(sorted(unknown))
            raise UnknownName(f"agents are to have tools that are not there: {names}", name=names, kind="tool")
        return SkillRuntime(
            subsystem=self.subsystem,
            consumer=DECISION,
            run_scripts=executor is not None,
            executor=executor,
            profile=self.profile,
            interpreters=self.wiring.interpreters,
            locations="logical",
            store=self._store,
            approve=self.approve,
            script_env=self.settings.script_env,
            network=self.settings.network,
            script_approval="allow" if self.approve is None else "ask",
            deny=self.deny,
            listing=self.settings.catalog,
            packages=self.packages,
            window=self.window(),
        )

    def _shell(self, executor: Executor | None) -> bool:
        """Whether the shell and the file tools are offered."""
        wanted = self.settings.shell
        return executor is not None and (wanted is True or (wanted is None and executor.level > IsolationLevel.RLIMIT))

    async def _close_models(self, error: BaseException | None) -> None:
        providers, self._opened = self._opened, []
        for provider in providers:
            try:
                await provider.aclose()
            except ReplayError as unused:
                if error is None:
                    raise
                error.add_note(f"besides: {unused.message}")
