"""What a solver would send first: a real turn is begun, and its first request is kept instead of sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from kdskills.errors import Diagnostic, ExecRefused
from kdskills.models import ModelReply, ModelRequest, TextDelta
from kdskills.solver.parts import SolverSettings
from kdskills.solver.react import ReactSolver
from kdskills.solver.system import SolverSystem

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.solver.events import TurnResult
    from kdskills.solver.parts import Wiring
    from kdskills.solver.turn import Turn


class PromptProbe:
    """A model provider that keeps the request instead of sending it; *window* bounds catalogs, None when unknown."""

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
    """A wiring of which plugins are not told that a turn begins or ends: there is none."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def __getattr__(self, name: str) -> Any:
        """Return what the wiring has."""
        return getattr(self._wiring, name)

    def turn_started(self, turn: Turn) -> None:
        """Tell nobody."""

    def turn_finished(self, turn: Turn, outcome: TurnResult) -> None:
        """Tell nobody."""


async def preview(
    wiring: Wiring, bundle: Bundle, *, consumer: str, skills: Sequence[str], model: str, executor: str
) -> tuple[ModelRequest, tuple[Diagnostic, ...]]:
    """Return what a solver over *bundle* would send first, and what is not as it would be; its `tools.py` runs.

    *model* says the context window that bounds the catalog. Raises as opening a `SolverSystem`, and for skills that
    cannot be loaded.
    """
    silent = cast("Wiring", PreviewWiring(wiring))
    findings: tuple[Diagnostic, ...] = ()
    engine: Executor | None = None
    try:
        engine = await silent.executor(executor)
    except ExecRefused as error:
        message = f"scripts and generated code are left out, and a turn would not begin: {error.message}"
        findings = (Diagnostic(error.code, "warning", message),)
    window = None
    if model.partition(":")[0] != "replay":  # recordings have none
        async with aclosing(wiring.model(model)) as provider:
            window = provider.context_window
    probe = PromptProbe(window)
    system = SolverSystem(bundle=bundle, model=probe, executor=engine, settings=SolverSettings(), wiring=silent)
    async with system:
        await ReactSolver(system, consumer=consumer).run("(the user's request)", skills=skills)
    assert probe.request is not None
    return probe.request, findings
