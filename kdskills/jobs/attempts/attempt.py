"""One attempt as its folder shows it, to whoever may read that folder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from kdskills.errors import ExecFailed
from kdskills.execution.logfile import LogPiece, read_log
from kdskills.jobs.attempts import shim
from kdskills.jobs.attempts.order import AttemptFacts, AttemptOrder, AttemptState, LogStream, Verdict

if TYPE_CHECKING:
    from kdskills.jobs.attempts.store import Starter

_LOG = logging.getLogger("kdskills.jobs")
QUICK_S: Final = 0.005
SLOW_S: Final = 0.1
_LOGS: Final = {"stdout": shim.STDOUT, "stderr": shim.STDERR}


class Attempt:
    """An attempt, found or started; made by `Attempts`. Any process of this host may hold one, and many may at once.

    Args:
        folder: The attempt's folder.
        order: What it was told.
        starter: Reaps what an engine left when the attempt turns out to be lost.
    """

    def __init__(self, folder: Path, order: AttemptOrder, starter: Starter | None = None) -> None:
        self.folder = folder
        self.order = order
        self._starter = starter

    def state(self) -> AttemptState:
        """Return where it stands; `lost` is one that died without a verdict."""
        if self.verdict() is not None:
            return "ended"
        if not attempt_alive(self.folder):
            return "ended" if self.verdict() is not None else "lost"
        facts = self.facts()
        return "running" if facts is not None and facts.ready_at is not None else "starting"

    def facts(self) -> AttemptFacts | None:
        """Return the facts its runner wrote; None before its program was started."""
        document = shim.read_json(self.folder / shim.FACTS)
        return None if document is None else AttemptFacts.model_validate(document)

    def verdict(self) -> Verdict | None:
        """Return how it ended; None while it has not."""
        document = shim.read_json(self.folder / shim.EXIT)
        if document is None:
            return None
        try:
            return Verdict.model_validate(document)
        except ValidationError as error:
            return Verdict(status="lost", error_code="lost", error_message=f"its verdict is unreadable: {error}")

    def endpoints_active(self) -> bool:
        """Whether its exposed ports can be reached now."""
        facts = self.facts()
        if facts is None or facts.forwarder is None or not facts.endpoints:
            return False
        return self.verdict() is None and shim.lives(facts.forwarder.model_dump())

    async def until_running(self) -> AttemptFacts | None:
        """Wait until it runs, and is ready if it is a service; None when it ended before."""
        pause = QUICK_S
        while True:
            state = self.state()
            if state in {"ended", "lost"}:
                return None
            if state == "running":
                return self.facts()
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, SLOW_S / 2)

    async def wait(self) -> Verdict:
        """Wait for the end and return the verdict; waiting may be cancelled without ending the attempt.

        One that died without a verdict is given the verdict `lost` here, once and for good, after what its engine left
        was ended: when this returns, nothing of the attempt runs any more.
        """
        pause, alone_since = QUICK_S, None
        while (verdict := self.verdict()) is None:
            if not attempt_alive(self.folder):
                return await self._settle()
            if not await self._shim_died(1.0):
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()  # the shim is dead; its runner still ends what it started
            if time.monotonic() - alone_since > shim.PATIENCE_S:
                self._kill_runner()
            await asyncio.sleep(pause)
            pause = min(2 * pause, SLOW_S)
        return verdict

    def cancel(self, reason: str = "") -> bool:
        """Ask it to end; False when it has ended already. `wait` tells when it is over. Works from any process."""
        if self.verdict() is not None:
            return False
        shim.write_json(self.folder / shim.CANCEL, {"reason": reason[:1000]})
        _send(self._pidfd(), signal.SIGTERM)
        return True

    def cancel_reason(self) -> str | None:
        """Return why somebody wanted it to end; None when nobody did."""
        document = shim.read_json(self.folder / shim.CANCEL)
        return None if document is None else str(document.get("reason", ""))

    def logs(self, stream: LogStream, offset: int = 0, limit: int = 65536) -> LogPiece:
        """Return up to *limit* bytes of *stream* from *offset*; a negative offset counts from the end."""
        return read_log(self.folder / _LOGS[stream], offset, limit, self.order.log_limit)

    def tail(self, stream: LogStream, size: int = 8192) -> LogPiece:
        """Return the last *size* bytes of *stream*."""
        if size <= 0:
            total = self.logs(stream, 0, 0).total
            return LogPiece(total, b"", total, truncated=total > 0)
        return self.logs(stream, -size, size)

    def output(self, file: str) -> Path:
        """Return where a declared output's bytes are, by its `file` in the verdict."""
        return self.folder / file

    def remove(self) -> bool:
        """Remove its folder; False while it lives."""
        lock = shim.take_lock(self.folder, 0.0) if self.folder.is_dir() else None
        if lock is None:
            return not self.folder.exists()
        try:
            shutil.rmtree(self.folder)
        finally:
            os.close(lock)
        return True

    async def _shim_died(self, patience_s: float) -> bool:
        """Wait for the death of the shim; whether it is dead."""
        fd = self._pidfd()
        if fd is None:
            return True
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(fd, over.set)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await over.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return over.is_set()

    def _kill_runner(self) -> None:
        """End a runner that did not end with its shim, as the shim would have done."""
        facts = self.facts()
        if facts is not None:
            _send(shim.open_living(facts.runner.model_dump()), signal.SIGKILL)

    def _pidfd(self) -> int | None:
        """Open the shim, if it is still the process that named itself in the lock; None when it is gone."""
        return shim.open_living(shim.read_identity(self.folder))

    async def _settle(self) -> Verdict:
        """Give an attempt that died its verdict; the lock makes sure that nobody else still could."""
        lock = await asyncio.to_thread(shim.take_lock, self.folder, 0.5)
        if lock is None:
            return await self.wait()
        try:
            early_verdict = self.verdict()
            if early_verdict is not None:
                return early_verdict
            trouble = await self._reap()
            await asyncio.to_thread(shim.settle, self.folder, trouble)
        finally:
            os.close(lock)
        verdict = self.verdict()
        assert verdict is not None
        return verdict

    async def _reap(self) -> str:
        """End what the engine left of dead runners; return what could not be ended, in words for the verdict."""
        if self._starter is None:
            return ""
        try:
            await self._starter.reap(self.order.spec.placement.engine)
        except ExecFailed as error:
            _LOG.warning("%s attempt %d: %s", self.order.task_id, self.order.attempt, error.message)
            return error.message
        return ""


def _send(fd: int | None, number: int) -> None:
    """Send a signal to the process open as *fd*, and close it."""
    if fd is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def attempt_alive(folder: Path) -> bool:
    """Whether something of the attempt in *folder* still lives: liveness is the lock, never a process number."""
    try:
        fd = os.open(folder / shim.LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
