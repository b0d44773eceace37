"""Watches: they look at heads and tell what changed; what is watched never knows.

A watch is one task that looks at intervals. Callers with the same key join it; when the last of them leaves, it ends.
Numbers of events are made from the state itself, so that they go on growing in whichever process a watch is taken up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Generic, Literal, TypeVar

from kdskills.errors import Conflict
from kdskills.jobs.database import utc_now

EventKind = Literal["state", "output", "heartbeat"]

SHIFT: Final = 20
KEPT: Final = 1024
"""Events a watch keeps for those who join it."""


@dataclass(frozen=True, slots=True)
class Seen:
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
class Event:
    """Something a watch tells; `facts` are those of the look it was found by."""

    seq: int
    kind: EventKind
    at: datetime
    facts: object


@dataclass(frozen=True, slots=True)
class Watched:
    """How a watch ended for one caller: `timed_out` when the state was not final yet."""

    facts: object
    timed_out: bool


Look = Callable[[], Awaitable[Seen]]
Tell = Callable[[Event], None]


@dataclass(eq=False)
class _Listener:
    tell: Tell | None
    heartbeat_s: float
    last: int
    heard_at: float
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
    events: list[Event] = field(default_factory=list)
    listeners: list[_Listener] = field(default_factory=list)
    seen: Seen | None = None
    last: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def listen(self, tell: Tell | None, *, heartbeat_s: float, timeout_s: float, after: int) -> Watched:
        """Hear events until the end or the timeout; the answer is given once, here and nowhere else."""
        self.last = max(self.last, after)
        mine = _Listener(tell, heartbeat_s, after, self.loop.time())
        self.listeners.append(mine)
        try:
            for event in list(self.events):
                self._give(mine, event)
            if self.task is None:
                self.task = self.loop.create_task(self._run())
            elif self.seen is not None and mine.last < self.seen.revision << SHIFT:
                self._give(mine, Event(self.last, "state", utc_now(), self.seen.facts))
            return await self._until_over(mine, timeout_s)
        finally:
            self.listeners.remove(mine)
            if not self.listeners and self.task is not None:
                self.task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(self.task, return_exceptions=True)

    async def _until_over(self, mine: _Listener, timeout_s: float) -> Watched:
        assert self.task is not None
        end = self.loop.time() + timeout_s
        while True:
            seen = self.seen
            if mine.failure is not None:
                raise mine.failure
            if seen is not None and seen.over:
                return Watched(seen.facts, timed_out=False)
            if self.task.done():
                self.task.result()
            now = self.loop.time()
            if seen is not None and now >= end:
                return Watched(seen.facts, timed_out=True)
            quiet = mine.heard_at + mine.heartbeat_s - now
            if seen is not None and quiet <= 0:
                self._give(mine, Event(mine.last, "heartbeat", utc_now(), seen.facts))
                continue
            changed = self.changed
            waiting = self.loop.create_task(changed.wait())
            patience = quiet if seen is not None else None
            if seen is not None:
                patience = min(quiet, end - now)
            try:
                await asyncio.wait({waiting, self.task}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            finally:  # also when the listener leaves: nobody would end it then
                waiting.cancel()

    async def _run(self) -> None:
        while True:
            seen = await self.look()
            self._found(seen)
            if seen.over:
                return
            await asyncio.sleep(self.interval_s)

    def _found(self, seen: Seen) -> None:
        before, self.seen = self.seen, seen
        kind: EventKind | None = None
        if before is None:
            # Whoever comes back with the number of this very state knows it already.
            kind = "state" if seen.revision > self.last >> SHIFT else None
        elif seen.revision > before.revision:
            kind = "state"
        elif seen.output > before.output:
            kind = "output"
        if kind is not None:
            self.last = max(self.last + 1, seen.revision << SHIFT)
            event = Event(self.last, kind, utc_now(), seen.facts)
            self.events = [*self.events[1 - KEPT :], event]
            for listener in list(self.listeners):
                self._give(listener, event)
        signal, self.changed = self.changed, asyncio.Event()
        signal.set()

    def _give(self, listener: _Listener, event: Event) -> None:
        if event.kind != "heartbeat" and event.seq <= listener.last:
            return
        listener.last = max(listener.last, event.seq)
        listener.heard_at = self.loop.time()
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
        found = self._running.get(key)
        if found is not None and found.listeners and found.loop is asyncio.get_running_loop():
            if found.about != about:
                raise Conflict(f"this dedupe_key is of a watch of {found.about}", code="watch_key_taken")
            return found
        self._running = {known: watch for known, watch in self._running.items() if watch.listeners}
        made: Watch[object] = Watch(about, look, interval_s)
        self._running[key] = made
        return made
