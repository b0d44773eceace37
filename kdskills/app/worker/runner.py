"""The runner: one attempt's engine, from the order to the result.

It runs in a process of its own below the shim, forked from the launcher, so everything is imported already. TERM means
cancel: the engine ends the whole tree and the result says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.errors import ExecRefused, KdskillsError
from kdskills.execution.probing import require_consent
from kdskills.jobs.attempts import AttemptFacts, AttemptOrder, ProcessIdentity, SessionFolder, Verdict, shim
from kdskills.jobs.attempts.exchange import refusal, to_request, to_verdict
from kdskills.jobs.attempts.sessions import Bounds, workdir_files
from kdskills.jobs.model import OutputError
from kdskills.jobs.services import ServiceSupervisor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kdskills.app.host import Host
    from kdskills.execution import ExecResult, Executor
    from kdskills.execution.protocol import Handle


def run_order(folder: Path, host: Host) -> int:
    """Run the order in *folder* and write `result.json`; return the process's exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    facts = shim.read_json(folder / shim.ORDER) or {}
    order = AttemptOrder.model_validate(facts["order"])
    try:
        verdict = asyncio.run(AttemptRunner(folder, order, host).main())
        shim.write_json(folder / shim.RESULT, verdict.model_dump(mode="json"))
    except OSError as error:
        if error.errno not in shim.FULL:
            raise
        return shim.DISK_FULL
    return 0


class AttemptRunner:
    """One attempt."""

    def __init__(self, folder: Path, order: AttemptOrder, host: Host) -> None:
        self._folder = folder
        self._order = order
        self._host = host
        self._cancelled = asyncio.Event()

    async def main(self) -> Verdict:
        """Run it to its verdict; what cannot be run is a verdict too."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._cancelled.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # programs inherit the mask
        try:
            return await self._run()
        except KdskillsError as error:
            return refusal(error)

    async def _run(self) -> Verdict:
        order, engine = self._order, self._engine()
        session = None if order.session_dir is None else SessionFolder(order.session_dir)
        if session is None:
            handle, snapshot = await self._start(engine, {}), None
        else:
            with session.reading() as snapshot:
                handle = await self._start(engine, snapshot.files)
        started_at = time.time()
        result, instead = await self._over(handle, engine, started_at)
        files = None if session is None else workdir_files(result)
        errors: list[OutputError] = []
        if session is not None and files is not None and snapshot is not None:
            limits = order.spec.placement.limits
            errors = session.commit(snapshot, files, Bounds(order.session_files, limits.work_size))
        return to_verdict(order, self._folder, result, started_at=started_at, session_errors=errors, override=instead)

    async def _over(
        self, handle: Handle, engine: Executor, started_at: float
    ) -> tuple[ExecResult, KdskillsError | None]:
        """Wait for the end, ending it when asked to or when it cannot be the service it should be."""
        service = self._order.spec.service
        me = ProcessIdentity.model_validate(shim.identity(os.getpid()))
        ready_at = started_at if service is None else None
        facts = AttemptFacts(started_at=started_at, ready_at=ready_at, engine=engine.name, runner=me)
        self._tell(facts)
        waiting = asyncio.create_task(handle.wait())
        ends = [asyncio.create_task(self._wait_for_cancel())]
        if service is not None:
            logs = [self._folder / shim.STDOUT, self._folder / shim.STDERR]
            supervisor = ServiceSupervisor(service, handle, logs, self._order.host_ports, facts, self._tell)
            ends.append(asyncio.create_task(supervisor.supervise()))
        await asyncio.wait({waiting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await handle.cancel()
        for end in ends:
            end.cancel()
        instead: KdskillsError | None = None
        for cause in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(cause, KdskillsError) and not self._cancelled.is_set():
                instead = cause
            elif isinstance(cause, Exception):
                raise cause
        return await waiting, instead

    async def _wait_for_cancel(self) -> None:
        await self._cancelled.wait()

    async def _start(self, engine: Executor, session: Mapping[str, tuple[Path, int]]) -> Handle:
        request = to_request(self._order, self._folder, session)
        require_consent(engine, request, allow_unisolated=self._host.settings.allow_unisolated)
        return await engine.start(request)

    def _engine(self) -> Executor:
        name = self._order.spec.placement.engine
        engine = next((engine for engine in self._host.engines() if engine.name == name), None)
        if engine is None:
            raise ExecRefused(f"no engine is named {name!r}", engine=name)
        return engine

    def _tell(self, facts: AttemptFacts) -> None:
        shim.write_json(self._folder / shim.FACTS, facts.model_dump(mode="json"))
