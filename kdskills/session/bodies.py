"""Texts of skills: read from the current files, validated by stat, one read shared by all who wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from kdskills.errors import FileRefused, KdskillsError, SessionError, ToolCallRefused
from kdskills.session.codes import not_found, refuse
from kdskills.session.receipts import bytes_digest
from kdskills.skills.folder import confirm_bytes
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_skill_bytes
from kdskills.skills.roots import FarContent, far_content
from kdskills.skills.safe_open import open_file

T = TypeVar("T")


class Abandoned(Exception):
    """The last caller left; the work stops."""


class _Flight(Generic[T]):
    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self.abandoned = threading.Event()
        self.waiters = 0


class Flights(Generic[T]):
    """Runs blocking work once for all who ask for the same key while it runs.

    The work receives an event that is set when the last waiter has left, and should stop then by raising `Abandoned`.
    """

    def __init__(self, workers: int = 4) -> None:
        self._lock = threading.Lock()
        self._flying: dict[Hashable, _Flight[T]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._workers = workers

    async def fetch(self, key: Hashable, work: Callable[[threading.Event], T]) -> T:
        """Return the result of *work*, joining the flight of *key* if there is one."""
        flight = self._join(key, work)
        try:
            return await asyncio.shield(asyncio.wrap_future(flight.future))
        except (Abandoned, asyncio.CancelledError) as error:
            if isinstance(error, Abandoned) or flight.future.cancelled():  # stopped by `close`, not by this waiter
                raise SessionError("the runtime was closed", code="cancelled") from error
            raise
        finally:
            if self._forget(key, flight, waiters=1):
                flight.abandoned.set()

    def close(self) -> None:
        """Stop the workers; what runs is abandoned."""
        with self._lock:
            pool, self._pool = self._pool, None
            flying, self._flying = list(self._flying.values()), {}
        for flight in flying:
            flight.abandoned.set()
            flight.future.cancel()  # one not begun yet never will be
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _join(self, key: Hashable, work: Callable[[threading.Event], T]) -> _Flight[T]:
        with self._lock:
            flight = self._flying.get(key)
            if flight is not None:
                flight.waiters += 1
                return flight
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="kdskills-read")
            flight = self._flying[key] = _Flight()
            flight.waiters = 1
            self._pool.submit(self._run, key, flight, work)
            return flight

    def _run(self, key: Hashable, flight: _Flight[T], work: Callable[[threading.Event], T]) -> None:
        if not flight.future.set_running_or_notify_cancel():
            return
        try:
            result = work(flight.abandoned)
        except BaseException as error:  # noqa: BLE001 - carried to every waiter, none is swallowed
            self._forget(key, flight)
            flight.future.set_exception(error)
        else:
            self._forget(key, flight)
            flight.future.set_result(result)

    def _forget(self, key: Hashable, flight: _Flight[T], *, waiters: int = 0) -> bool:
        """Let the next caller fly anew, unless others still wait; whether nobody does. *waiters* leave by this."""
        with self._lock:
            flight.waiters -= waiters
            last = flight.waiters == 0 and not flight.future.done()
            if (last or not waiters) and self._flying.get(key) is flight:
                del self._flying[key]
        return last


class Ticket:
    """One load on its way. It ends early when a skill it watches is removed or its session is closed."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._lock = threading.Lock()
        self._removed: dict[str, KdskillsError] = {}
        self._watched: frozenset[str] = frozenset()
        self._ended: Future[KdskillsError] = Future()

    def watch(self, ids: Iterable[str]) -> None:
        """End the load when one of *ids* is removed, or was since the ticket was opened."""
        with self._lock:
            self._watched = frozenset(ids)
        self._look()

    def removed(self, full_id: str, error: KdskillsError) -> None:
        """Tell that a skill was removed."""
        with self._lock:
            self._removed.setdefault(full_id, error)
        self._look()

    def interrupt(self, error: KdskillsError) -> None:
        """End the load with *error*; the first one stays."""
        with suppress(InvalidStateError):
            self._ended.set_result(error)

    def check(self) -> None:
        """Raise what ended the load, if anything did."""
        if self._ended.done():
            raise self._ended.result()

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """Await *work*, leaving it at once when the ticket is interrupted."""
        task, stop = asyncio.ensure_future(work), asyncio.wrap_future(self._ended)
        try:
            waited: set[asyncio.Future[Any]] = {task, stop}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.cancelled():
                task.exception()  # looked at, so that an interrupted load leaves no warning behind

    def _look(self) -> None:
        with self._lock:
            hit = next((error for name, error in self._removed.items() if name in self._watched), None)
        if hit is not None:
            self.interrupt(hit)


class Tickets:
    """The loads on their way in one runtime."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Ticket] = set()

    @contextmanager
    def opened(self, session_id: str) -> Iterator[Ticket]:
        """Open a ticket for the length of a load."""
        ticket = Ticket(session_id)
        with self._lock:
            self._open.add(ticket)
        try:
            yield ticket
        finally:
            with self._lock:
                self._open.discard(ticket)

    def skill_removed(self, full_id: str, error: KdskillsError) -> None:
        """Tell every load that a skill is gone."""
        with self._lock:
            tickets = list(self._open)
        for ticket in tickets:
            ticket.removed(full_id, error)

    def session_closed(self, session_id: str, error: KdskillsError) -> None:
        """End the loads of one session."""
        with self._lock:
            tickets = [ticket for ticket in self._open if ticket.session_id == session_id]
        for ticket in tickets:
            ticket.interrupt(error)


CACHE_BYTES: Final = 16 * 1024 * 1024
RACY_NS: Final = 2_000_000_000
SKILL_FILE: Final = "SKILL.md"
_CHUNK: Final = 256 * 1024

Stamp = tuple[int, int, int, int]
Reader = Callable[[Path, str, int, threading.Event], bytes]


@dataclass(frozen=True, slots=True)
class Body:
    """A skill's text at one moment: `text` is what follows the frontmatter, `properties` is the frontmatter.

    `raw` is the whole SKILL.md, None for a skill that was never a file; `tree` is the digest over its files then.
    """

    digest: str
    text: str
    raw: str | None = field(default=None, repr=False)
    tree: str = ""
    properties: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read_pieces(folder: Path, name: str, limit: int, abandoned: threading.Event) -> bytes:
    """Read a file below *folder*, up to *limit* bytes; raises FileRefused, or Abandoned once nobody waits any more."""
    pieces: list[bytes] = []
    size = 0
    with open_file(folder, name) as stream:
        while piece := stream.read(_CHUNK):
            size += len(piece)
            if size > limit:
                raise FileRefused(f"{name} has more than {limit} bytes", code="too_large", path=name, limit=limit)
            if abandoned.is_set():
                raise Abandoned
            pieces.append(piece)
    return b"".join(pieces)


class Bodies:
    """Reads SKILL.md files: callers that ask at the same time share one read, and a failed read is never cached."""

    def __init__(self, limit: int, *, reader: Reader = read_pieces, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._limit = limit
        self._reader = reader
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, tuple[Stamp, int, Body]] = OrderedDict()  # with the time of the read
        self._texts: OrderedDict[str, Body] = OrderedDict()
        self._size = 0
        self._flights: Flights[Body] = Flights()

    async def current(self, skill: Skill) -> Body:
        """Return the text of *skill* as its file is now; raises `skill_not_found` or `skill_unreadable`."""
        if skill.path is None:
            return await self.fresh(skill)
        stamp = _stamp(skill.path)
        with self._lock:
            entry = self._cached.get(skill.full_id)
        # a file changed within one clock tick of the read may have the same stamp and another text
        if stamp is not None and entry is not None and entry[0] == stamp and entry[1] - stamp[1] > RACY_NS:
            return entry[2]
        return await self.fresh(skill)

    async def fresh(self, skill: Skill) -> Body:
        """Return the text of *skill*, read again whatever is cached. Raises as `current`."""
        content = far_content(skill)
        if content is not None:
            key = (skill.full_id, f"{skill.digest} {id(content)}")
            return await self._flights.fetch(key, lambda _: self._fetch(skill, content))
        if skill.path is None:
            return Body(skill.digest, skill.body, None, "", skill.frontmatter)
        return await self._flights.fetch(
            (skill.full_id, str(skill.path)), lambda abandoned: self._read(skill, abandoned)
        )

    async def current_digest(self, skill: Skill) -> str | None:
        """Return the digest of the file now, or None when it cannot be loaded as it is."""
        try:
            return (await self.current(skill)).digest
        except ToolCallRefused:
            return None

    def cached_body(self, digest: str) -> Body | None:
        """Return the text with this digest if it is in memory."""
        with self._lock:
            body = self._texts.get(digest)
            if body is not None:
                self._texts.move_to_end(digest)
            return body

    def keep(self, body: Body) -> Body:
        """Keep *body* in memory by its digest, dropping the least used ones beyond 16 MiB."""
        with self._lock:
            old = self._texts.pop(body.digest, None)
            self._size += _size(body) - (_size(old) if old else 0)
            self._texts[body.digest] = body
            while self._size > CACHE_BYTES and len(self._texts) > 1:
                _, dropped = self._texts.popitem(last=False)
                self._size -= _size(dropped)
        return body

    def close(self) -> None:
        """Stop reading."""
        self._flights.close()

    def _fetch(self, skill: Skill, content: FarContent) -> Body:
        """Fetch the text of a skill whose files are on another host; it must match its listed digest."""
        try:
            data = content.fetch(SKILL_FILE, self._limit)
        except FileRefused as error:
            reason = error.details.get("reason", error.code)
            raise refuse("skill_unreadable", f"{SKILL_FILE} of this skill: {error.message}", reason=reason) from error
        return parsed(data, skill, SKILL_FILE, skill.tree_digest())

    def _read(self, skill: Skill, abandoned: threading.Event) -> Body:
        path = skill.path
        assert path is not None  # skills without a file are answered before a flight starts
        stamp, now = _stamp(path), self._clock_ns()
        try:
            data = self._reader(path.parent, path.name, self._limit, abandoned)
            confirm_bytes(skill, path.name, data)
        except FileRefused as error:
            if error.code == "file_missing":
                raise not_found([skill.name], ()) from error
            message = f"{path.name} of this skill: {error.message}"
            raise refuse("skill_unreadable", message, reason=error.code) from error
        try:
            tree = skill.tree_digest()
        except FileRefused as error:
            message = f"the files of this skill cannot be read: {error.message}"
            raise refuse("skill_unreadable", message, reason=error.code) from error
        body = parsed(data, skill, path.name, tree)
        if stamp is not None and stamp == _stamp(path):
            with self._lock:
                self._cached[skill.full_id] = (stamp, now, body)
                self._cached.move_to_end(skill.full_id)
                while len(self._cached) > 1024:
                    self._cached.popitem(last=False)
        return body


def parsed(data: bytes, skill: Skill, file_name: str, tree: str) -> Body:
    """Return the body in SKILL.md bytes; raises `skill_unreadable` with the codes of the findings."""
    folder = skill.folder.name if skill.folder is not None else skill.id
    result = parse_skill_bytes(data, folder=folder, file_name=file_name)
    if result.skill is None:
        errors = [item for item in result.diagnostics if item.severity == "error"]
        problem = errors[0].message if errors else "it cannot be parsed"
        codes = [item.code for item in errors]
        raise refuse("skill_unreadable", f"the SKILL.md of this skill does not parse now: {problem}", codes=codes)
    raw = data.decode("utf-8")
    return Body(bytes_digest(data), result.skill.body, raw, tree, result.skill.frontmatter)


def _size(body: Body) -> int:
    return len(body.text) + len(body.raw or "")


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
