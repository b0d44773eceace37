"""Watches: they look at heads and tell what changed; what is watched never knows.

A watch is one task that looks at intervals. Callers with the same key join it; when the last of them leaves, it ends.
Numbers of events are made from the state's revision, which grows with each change and is the same in every process, so that
they go on growing in whichever process a watch is taken up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Generic, Literal, TypeVar

from kdskills.errors import Conflict
from kdskills.jobs.model import TERMINAL, JobHead, StepHead, TaskHead
from kdskills.storage.database import utc_now

EventKind = Literal["state", "output", "heartbeat"]

SHIFT: Final = 20
MAX_EVENTS: Final = 1024
"""Events a watch keeps for those who join it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one look found.

    Attributes:
        revision: A number that grows with every change of state.
        output: Bytes printed so far.
        over: Whether nothing will change any more.
        facts: What events tell of it.
    """

    revision: int
    output: int
    over: bool
    facts: object


F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Something a watch tells; `facts` are those of the look it was found by."""

    seq: int
    kind: EventKind
    time: datetime
    facts: object


@dataclass(frozen=True, slots=True)
class WatchEnd:
    """How a watch ended for one caller: `timed_out` when the state was not final yet."""

    facts: object
    timed_out: bool


Look = Callable[[], Awaitable[Snapshot]]
Tell = Callable[[ProgressEvent], None]


@dataclass(eq=False)
class _Listener:
    tell: Tell | None
    heartbeat_s: float
    last: int
    last_event_s: float
    failure: BaseException | None = None


@dataclass(eq=False)
class Watch(Generic[F]):
    """One running watch.

    Args:
        about: Id of what is watched.
        look: Takes one look.
        interval_s: Seconds between two looks.
    """

    about: str
    look: Look
    interval_s: float
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: list[ProgressEvent] = field(default_factory=list)
    listeners: list[_Listener] = field(default_factory=list)
    latest: Snapshot | None = None
    last: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def listen(self, tell: Tell | None, *, heartbeat_s: float, timeout_s: float, after: int) -> WatchEnd:
        """Hear events until the end or the timeout; the answer is given once, here and nowhere else."""
        self.last = max(self.last, after)
        mine = _Listener(tell, heartbeat_s, after, self.loop.time())
        self.listeners.append(mine)
        try:
            for event in list(self.events):
                self._give(mine, event)
            if self.task is None:
                self.task = self.loop.create_task(self._run())
            elif self.latest is not None and mine.last < self.latest.revision << SHIFT:
                self._give(mine, ProgressEvent(self.last, "state", utc_now(), self.latest.facts))
            return await self._until_over(mine, timeout_s)
        finally:
            self.listeners.remove(mine)
            if not self.listeners and self.task is not None:
                self.task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(self.task, return_exceptions=True)

    async def _until_over(self, mine: _Listener, timeout_s: float) -> WatchEnd:
        assert self.task is not None
        end = self.loop.time() + timeout_s
        while True:
            snapshot = self.latest
            if mine.failure is not None:
                raise mine.failure
            if snapshot is not None and snapshot.over:
                return WatchEnd(snapshot.facts, timed_out=False)
            if self.task.done():
                self.task.result()
            now = self.loop.time()
            if snapshot is not None and now >= end:
                return WatchEnd(snapshot.facts, timed_out=True)
            quiet = mine.last_event_s + mine.heartbeat_s - now
            if snapshot is not None and quiet <= 0:
                self._give(mine, ProgressEvent(mine.last, "heartbeat", utc_now(), snapshot.facts))
                continue
            changed = self.changed
            waiting = self.loop.create_task(changed.wait())
            patience = quiet if snapshot is not None else None
            if snapshot is not None:
                patience = min(quiet, end - now)
            try:
                await asyncio.wait({waiting, self.task}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            finally:  # also when the listener leaves: nobody would end it then
                waiting.cancel()

    async def _run(self) -> None:
        while True:
            snapshot = await self.look()
            self._take_snapshot(snapshot)
            if snapshot.over:
                return
            await asyncio.sleep(self.interval_s)

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        before, self.latest = self.latest, snapshot
        kind: EventKind | None = None
        if before is None:
            # Whoever comes back with the number of this very state knows it already.
            kind = "state" if snapshot.revision > self.last >> SHIFT else None
        elif snapshot.revision > before.revision:
            kind = "state"
        elif snapshot.output > before.output:
            kind = "output"
        if kind is not None:
            self.last = max(self.last + 1, snapshot.revision << SHIFT)
            event = ProgressEvent(self.last, kind, utc_now(), snapshot.facts)
            self.events = [*self.events[1 - MAX_EVENTS :], event]
            for listener in list(self.listeners):
                self._give(listener, event)
        signal, self.changed = self.changed, asyncio.Event()
        signal.set()

    def _give(self, listener: _Listener, event: ProgressEvent) -> None:
        if event.kind != "heartbeat" and event.seq <= listener.last:
            return
        listener.last = max(listener.last, event.seq)
        listener.last_event_s = self.loop.time()
        if listener.tell is None:
            return
        try:
            listener.tell(event)
        except Exception as error:  # noqa: BLE001 - one listener's failure is its own: the others and the watch go on
            listener.failure = error


class Watches:
    """The running watches of a Host, by key."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], Watch[object]] = {}

    def join(self, key: tuple[str, ...] | None, about: str, look: Look, interval_s: float) -> Watch[object]:
        """Return the running watch of *key*, or a new one; without a key always a new one.

        Raises:
            Conflict: `watch_key_taken`; the key's running watch is of something else.
        """
        if key is None:
            return Watch(about, look, interval_s)
        running = self._running.get(key)
        if running is not None and running.listeners and running.loop is asyncio.get_running_loop():
            if running.about != about:
                raise Conflict(f"this dedupe_key is of a watch of {running.about}", code="watch_key_taken")
            return running
        self._running = {running_key: watch for running_key, watch in self._running.items() if watch.listeners}
        new_watch: Watch[object] = Watch(about, look, interval_s)
        self._running[key] = new_watch
        return new_watch


_RANKS: Final = {"queued": 1, "starting": 2, "running": 3}
_OVER: Final = 9
_ATTEMPT: Final = 20
_TRY: Final = 10_000


def _rank(status: str) -> int:
    return _OVER if status in TERMINAL else _RANKS[status]


def task_revision(head: TaskHead) -> int:
    """Return the number of a task's state: attempts count most, then the state, then whether a cancel was asked for."""
    return head.attempt * _ATTEMPT + 2 * _rank(head.status) + (head.cancel_at is not None)


def job_revision(head: JobHead) -> int:
    """Return the number of a job's state: what its steps have been through, and its own."""
    return sum(map(_step, head.steps)) + 2 * _rank(head.status) + (head.cancel_at is not None)


def _step(step: StepHead) -> int:
    if step.task is None:
        return _TRY - 1 if step.status in TERMINAL else 0
    return step.tries * _TRY + min(task_revision(step.task), _TRY - 1)
