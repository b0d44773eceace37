"""The end of a turn: citations checked, files collected, plugins told, everything closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kdskills.bundle.terms import DECISION
from kdskills.errors import Diagnostic, FileRefused, PluginFailed
from kdskills.solver.citing import cited_sids, drop_unknown, issues_of, rendered
from kdskills.solver.events import TurnFinished
from kdskills.solver.folder import discard, produced_files
from kdskills.solver.result import TurnFile, TurnResult

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn


async def finish(turn: Turn) -> TurnResult:
    """End *turn*: build its result, tell plugins, emit the last event, close the bus.

    Cancelling does not interrupt it: a turn that is cancelled once more still ends with its last event.

    Raises:
        asyncio.CancelledError: The turn was cancelled meanwhile; it has ended all the same.
    """
    ending = asyncio.ensure_future(_finish(turn))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    result = ending.result()
    if cancelled is not None:
        raise cancelled
    return result


async def _finish(turn: Turn) -> TurnResult:
    result = await asyncio.to_thread(_result, turn)
    try:
        turn.parts.wiring.turn_finished(turn, result)
    except Exception as error:  # noqa: BLE001 - a plugin that fails is told; the turn has ended all the same
        turn.bus.diagnose(plugin_diagnostic(error, "kdskills_turn_finished"))
        result = result.model_copy(update={"diagnostics": tuple(turn.bus.diagnostics)})
    result = TurnResult.from_json(turn.bus.redactor.value(result.to_json()))
    turn.result = result
    turn.bus.emit(TurnFinished, result=result)
    await turn.bus.aclose()
    return result


def tell_started(turn: Turn) -> None:
    """Tell plugins that the turn is active."""
    try:
        turn.parts.wiring.turn_started(turn)
    except Exception as error:  # noqa: BLE001 - a plugin that fails is told; it cannot end a turn
        turn.bus.diagnose(plugin_diagnostic(error, "kdskills_turn_started"))


def _result(turn: Turn) -> TurnResult:
    log, pool = turn.log, turn.pool
    drop = turn.parts.settings.on_unknown_sid == "drop"
    text = drop_unknown(log.text, pool) if drop else log.text
    files = _files(turn)
    model = turn.parts.model(DECISION)
    return TurnResult(
        turn_id=turn.id,
        session_id=turn.session_id,
        status=log.status,
        stop_reason=log.stop_reason,
        text=text,
        rendered=rendered(text, pool),
        sources=tuple(row.to_json() for row in pool.rows.values()),
        cited=cited_sids(text, pool),
        citation_issues=issues_of(text, pool),
        skills_used=tuple(log.skills.values()),
        files=files,
        steps=tuple(sorted(log.steps, key=lambda step: step.index)),
        usage=log.tokens,
        duration_ms=log.duration_ms,
        model=model.name,
        replayed=model.replayed,
        diagnostics=tuple(turn.bus.diagnostics),
    )


def _files(turn: Turn) -> tuple[TurnFile, ...]:
    """Return the files the turn produced; none, and a diagnostic, when what ran in its folder made it unreadable."""
    try:
        files = produced_files(turn.workspace)
    except FileRefused as error:
        message = f"the files of the turn cannot be listed: {error.message}"
        turn.bus.diagnose(Diagnostic("files_lost", "warning", message))
        return ()
    if not files:
        discard(turn.workspace)
    return files


def plugin_diagnostic(error: Exception, ref: str) -> Diagnostic:
    """Return the diagnostic for a plugin that failed; it names other errors than ours by their class only."""
    words = error.message if isinstance(error, PluginFailed) else f"a plugin's {ref} failed: {type(error).__name__}"
    return Diagnostic(PluginFailed.code, "warning", words, ref=ref)
