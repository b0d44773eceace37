"""The prompt a solver would send: a real turn is begun, and what it sends first is kept instead of sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdskills.errors import Diagnostic, ExecRefused
from kdskills.models import ModelReply, ModelRequest, TextDelta
from kdskills.skills.model import estimate_tokens
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.models import ModelProvider
    from kdskills.session.wiring import AccessRequest, Denial
    from kdskills.solver import TurnResult
    from kdskills.solver.turn import Turn
    from kdskills.solver.wiring import Wiring
    from kdskills.turn import SkillsSubsystem

REQUEST = "(the user's request)"


@dataclass(frozen=True)
class Preview:
    """What a solver would send first.

    Attributes:
        instructions: The top-level text.
        tools: The tools offered, as a model is told of them.
        diagnostics: What is not as it would be.
    """

    instructions: str
    tools: tuple[dict[str, Any], ...]
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def instruction_tokens(self) -> int:
        """Estimated tokens of the top-level text."""
        return estimate_tokens(self.instructions)

    @property
    def tool_tokens(self) -> int:
        """Estimated tokens of the tools, which servers put before the text as JSON."""
        return estimate_tokens(json.dumps(self.tools, ensure_ascii=False)) if self.tools else 0


class PromptProbe:
    """A model provider that keeps the request instead of sending it.

    Args:
        window: Tokens the real model takes, by which catalogs are cut; None when unknown.
    """

    name = "preview"
    replayed = False

    def __init__(self, window: int | None) -> None:
        self.context_window = window
        self.request: ModelRequest | None = None

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Keep *request*, and answer so that the turn ends."""
        self.request = self.request or request
        return ModelReply(text="-")

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Keep *request*, and answer so that the turn ends."""
        yield await self.reply(request)

    async def aclose(self) -> None:
        """Release nothing."""


class PreviewWiring:
    """A wiring of which plugins are not told that a turn begins or ends: there is none.

    Args:
        wiring: Answers everything else.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.interpreters = wiring.interpreters
        self.tools = wiring.tools

    def model(self, name: str) -> ModelProvider:
        """Return the provider a model string names. Raises UnknownName."""
        return self._wiring.model(name)

    async def executor(self, name: str) -> Executor:
        """Return the engine of that name. Raises ExecRefused."""
        return await self._wiring.executor(name)

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the skills of a bundle."""
        return self._wiring.subsystem(bundle)

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first Denial of a plugin, or None."""
        return self._wiring.deny(request)

    def source_key(self, row: Mapping[str, Any]) -> str | None:
        """Return the key under which a source row is merged."""
        return self._wiring.source_key(row)

    def turn_started(self, turn: Turn) -> None:
        """Tell nobody."""

    def turn_finished(self, turn: Turn, outcome: TurnResult) -> None:
        """Tell nobody."""


async def preview(host: Host, bundle: Bundle, *, consumer: str, skills: Sequence[str], model: str) -> Preview:
    """Return what a solver over *bundle* would send first.

    Args:
        host: Settings and plugins.
        bundle: The bundle; its `tools.py` runs, as in a turn.
        consumer: Who decides.
        skills: Skills loaded before the first decision.
        model: Model string, whose context window bounds the catalog.

    Raises:
        ToolCallRefused: A skill cannot be loaded.
        KdskillsError: As opening a `SolverSystem` raises.
    """
    wiring = PreviewWiring(host.wiring)
    findings: list[Diagnostic] = []
    executor: Executor | None = None
    try:
        executor = await wiring.executor(host.settings.executor)
    except ExecRefused as error:
        message = f"scripts and generated code are left out, and a turn would not begin: {error.message}"
        findings.append(Diagnostic(error.code, "warning", message))
    probe = PromptProbe(await _window(wiring, model))
    system = SolverSystem(bundle=bundle, model=probe, executor=executor, settings=SolverSettings(), wiring=wiring)
    async with system:
        await ReactSolver(system, consumer=consumer).run(REQUEST, skills=skills)
    assert probe.request is not None
    tools = tuple(
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.input_schema)}
        for tool in probe.request.tools
    )
    return Preview(probe.request.instructions, tools, tuple(findings))


async def _window(wiring: Wiring, model: str) -> int | None:
    """Return the context window of the model a string names; recordings have none."""
    if model.partition(":")[0] == "replay":
        return None
    provider = wiring.model(model)
    try:
        return provider.context_window
    finally:
        await provider.aclose()
