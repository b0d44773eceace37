"""What the parts of a worker share: the database with retries, the worker's name, its work in hand and the events of it.

Lines of its log carry the ids of the task and job they are about.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from kdskills.jobs.model import ArtifactRef, Scope, TaskHead
from kdskills.jobs.opening import Work
from kdskills.jobs.queue import Capacity
from kdskills.storage.database import DatabaseUnavailable

if TYPE_CHECKING:
    import sqlalchemy as sa


T = TypeVar("T")
WorkKind = Literal["batch", "service", "job"]

LOG: Final = logging.getLogger("kdskills.jobs")
_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """An output of a task, as a file on this host that is to be stored."""

    path: str
    size: int
    sha256: str
    mode: int
    file: Path


class OutputKeeper(Protocol):
    """Stores outputs of tasks and fetches them again."""

    async def keep(self, head: TaskHead, files: Sequence[TaskOutput]) -> tuple[ArtifactRef, ...]:
        """Store a task's outputs; doing it again for the same task gives the same ids."""
        ...

    async def fetch(self, scope: Scope, item: str) -> Path:
        """Return a copy of an artifact on this host, which nobody may change. Raises NotFound."""
        ...

    async def forget(self, task_ids: Sequence[str]) -> None:
        """Forget the artifacts of these tasks."""
        ...


class Buried(BaseException):
    """This worker was given up by the others: whatever it does next would be done twice.

    Args:
        reason: Why it must end, in words for the operator.
    """

    def __init__(self, reason: str = "the others gave it up") -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerContext:
    """Shared by the parts of one worker; used on one event loop.

    Args:
        work: The opened place.
        executor: Name of this process, new at each start.
        keeper: Keeps outputs.
    """

    def __init__(self, work: Work, executor: str, keeper: OutputKeeper) -> None:
        self.work = work
        self.executor = executor
        self.keeper = keeper
        self.records = work.records
        self.lease_file: Path | None = work.state_dir / "lease" if work.pooled else None
        self._cancel_events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._change_events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.active: dict[str, WorkKind] = {}
        self.busy_at = time.monotonic()
        self.wake = asyncio.Event()
        """Set whenever there may be work to claim, or a cancel to pass on."""

    async def read(self, question: Callable[[sa.Connection], T]) -> T:
        """Return what *question* reads; waits for a database that is away."""
        return await self.patiently(lambda: self.work.database.read(question))

    async def write(self, change: Callable[[sa.Connection], T]) -> T:
        """Do *change* in one transaction; waits for a database that is away, so *change* may happen twice."""
        return await self.patiently(lambda: self.work.database.write(change))

    async def head(self, item: str) -> TaskHead | None:
        """Return a task's head."""
        return await self.read(lambda link: self.records.task(link, item))

    def cancel_event(self, item: str) -> asyncio.Event:
        """Return the event that is set once a cancel of *item* was requested."""
        return self._cancel_events[item]

    def change_event(self, job: str) -> asyncio.Event:
        """Return the event that is set whenever a task of *job* ended in this worker."""
        return self._change_events[job]

    def note_change(self, job: str | None) -> None:
        """Wake the job a task belongs to."""
        if job is not None and job in self._change_events:
            self._change_events[job].set()

    def note_cancel(self, item: str) -> None:
        """Pass a cancel on to the run of *item*, if this worker has it in hand."""
        if item in self.active:
            self.cancel_event(item).set()
            self.change_event(item).set()

    def capacity(self) -> Capacity:
        """Return how much more this worker has room for."""
        settings, kinds = self.work.settings, list(self.active.values())
        return Capacity(
            batch=max(0, settings.slots - kinds.count("batch")),
            service=max(0, settings.services - kinds.count("service")),
            jobs=max(0, settings.held - len(kinds)),
        )

    def take_in_hand(self, item: str, kind: WorkKind) -> None:
        """Count *item* among what this worker has in hand, from its claim on."""
        self.active[item] = kind

    def let_go(self, item: str) -> None:
        """Count *item* no more: there is room for something else."""
        self.active.pop(item, None)
        self._cancel_events.pop(item, None)
        self._change_events.pop(item, None)
        self.busy_at = time.monotonic()
        self.wake.set()

    async def require_alive(self) -> None:
        """Raises Buried when this worker's row is dead: nothing it would write is accepted any more."""
        live = await self.read(self._lives)
        if not live:
            raise Buried

    def _lives(self, link: sa.Connection) -> bool:
        table = self.work.tables.workers
        query = table.select().where(table.c.executor == self.executor, table.c.state == "live")
        return link.execute(query).first() is not None

    async def patiently(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do *act*, again and again while the database is away, so *act* may happen twice."""
        pause = _PAUSE_S
        while True:
            try:
                return await act()
            except DatabaseUnavailable as error:
                if not passing(error):
                    raise
                LOG.warning("%s; trying again in %.1f s", error.message, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX_S)


def passing(error: DatabaseUnavailable) -> bool:
    """Whether the database may answer the same statement later: it is away, restarting or locked, not at odds with it."""
    from sqlalchemy import exc

    cause = error.__cause__
    if isinstance(cause, exc.DBAPIError) and cause.connection_invalidated:
        return True
    return isinstance(cause, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_ABOUT: Final[ContextVar[Mapping[str, str]]] = ContextVar("kdskills_work_in_hand")


@contextmanager
def about(**ids: str | None) -> Iterator[None]:
    """Give every line that is logged in the block these facts, such as `task` or `job`; None gives none."""
    facts = {name: item for name, item in ids.items() if item is not None}
    mark = _ABOUT.set({**_ABOUT.get(_NOTHING), **facts})
    try:
        yield
    finally:
        _ABOUT.reset(mark)


class AboutWork(logging.Filter):
    """Adds to a record's facts what it is about; facts of its own come first."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: every record passes."""
        record_facts = getattr(record, "facts", None)
        record.facts = {**_ABOUT.get(_NOTHING), **(record_facts if isinstance(record_facts, dict) else {})}
        return True
