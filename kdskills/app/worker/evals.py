"""The runner of evaluations: one attempt of a job of `evals.start`, in a process of kdskills' own, outside of every sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.host import Host
from kdskills.app.operations.eval_jobs import EvalOrder, report_of_task, require_iteration, run_order
from kdskills.errors import KdskillsError
from kdskills.errors.traces import Trace, in_trace
from kdskills.evals.results import EvalsRefused
from kdskills.execution.streams import LogWriter
from kdskills.jobs import shim
from kdskills.jobs.attempts import AttemptFacts, AttemptOrder, ProcessIdentity, Verdict
from kdskills.jobs.exchange import refusal

if TYPE_CHECKING:
    from kdskills.app.operations.evals import EvalOutput
    from kdskills.app.settings import Settings
    from kdskills.evals.runs import EvalProgress


@dataclass(eq=False)
class EvalsRunner:
    """One attempt; what it prints is a line for each row that ended."""

    folder: Path
    order: AttemptOrder
    settings: Settings
    canceled: asyncio.Event = field(default_factory=asyncio.Event)
    began: bool = False

    async def main(self) -> Verdict:
        """Run the rows that have not landed, and return the verdict; TERM ends it, with a report on what has."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.canceled.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        try:
            return await self._run(EvalOrder.model_validate_json(self.order.spec.command.argv[0]))
        except KdskillsError as error:
            return refusal(error)
        except OSError as error:
            if error.errno in shim.FULL:
                raise
            words = f"the results cannot be written: {error}"
            return Verdict(status="infra_error", error_code="path_unwritable", error_message=words)

    async def _run(self, order: EvalOrder) -> Verdict:
        started_at, task = time.time(), self.order.task_id
        if self._landed_before():
            require_iteration(order.workspace, task)  # to begin anew would run rows twice
        me = ProcessIdentity.model_validate(shim.identity(os.getpid()))
        facts = AttemptFacts(started_at=started_at, ready_at=started_at, engine=order.executor or "", runner=me)
        self.began = True
        shim.write_in_room(self.folder / shim.FACTS, facts.model_dump(mode="json"))
        host = Host(self.settings)
        with in_trace(Trace.read(self.order.spec.traceparent)):
            running = asyncio.create_task(run_order(host.bundles, host.wiring, host.settings, order, task, self._tell))
        cancellation = asyncio.create_task(self.canceled.wait())
        await asyncio.wait({running, cancellation}, return_when=asyncio.FIRST_COMPLETED)
        cancellation.cancel()
        canceled = running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        if not canceled:
            return self._verdict(await asyncio.to_thread(report_of_task, order.workspace, task), started_at)
        with suppress(EvalsRefused):  # it was not begun, and there is nothing to report on
            await asyncio.to_thread(report_of_task, order.workspace, task)
        ended_at, words = time.time(), "it was canceled"
        return Verdict(status="cancelled", error_code="canceled", error_message=words, finished_at=ended_at)

    def _landed_before(self) -> bool:
        """Whether an earlier attempt had rows to run, and so an iteration to go on with."""
        folders = (self.folder.with_name(str(number)) for number in range(1, self.order.attempt))
        return any((folder / shim.STDOUT).exists() for folder in folders)

    def _tell(self, progress: EvalProgress) -> None:
        counts = ", ".join(f"{number} {status}" for status, number in sorted(progress.counts.items()))
        line = f"{progress.done} of {progress.total} rows{': ' if counts else ''}{counts}\n"
        LogWriter(self.folder / shim.STDOUT, self.order.log_limit).write(line.encode())

    def _verdict(self, answer: EvalOutput, started_at: float) -> Verdict:
        errors = sum(row.status == "error" for row in answer.rows)
        unfinished = f"{errors} rows are errors, and {answer.missing} were not run"
        now = time.time()
        return Verdict(
            status="ok" if answer.complete else "nonzero",
            exit_code=0 if answer.complete else 1,
            error_code=None if answer.complete else "evals_incomplete",
            error_message=None if answer.complete else unfinished,
            started_at=started_at,
            finished_at=now,
            duration_ms=round((now - started_at) * 1000),
            stdout_total=(self.folder / shim.STDOUT).stat().st_size,
        )
