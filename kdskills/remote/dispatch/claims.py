"""Journal rows of calls: where each call is recorded, how it is claimed, and how its answer is awaited."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kdskills.remote.core import Driver
from kdskills.remote.dispatch.outcome import OUTCOME_UNKNOWN, failed
from kdskills.remote.dispatch.threads import HandlerThreads
from kdskills.remote.journal.identity import WeakIdentities, strong_key
from kdskills.remote.journal.memory import MemoryJournal
from kdskills.remote.journal.states import ANSWERED, takeover
from kdskills.remote.ports import CallClaim, CallIdentity, CallJournal, JournalRow

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill

T = TypeVar("T")

FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.2
AWAY_S: Final = 30.0
"""How long a waiting call tolerates a journal that does not answer."""
ACCEPTED_KEPT: Final = 65_536


class JournalAway(Exception):
    """The journal did not answer; its own error is the cause."""


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where a call is recorded, and by which attempt; *findable*: a repeated delivery gets the same key."""

    journal: CallJournal
    key: str
    owner: str
    findable: bool

    @property
    def reported_key(self) -> str | None:
        """The key if others can find the call by it, else None."""
        return self.key if self.findable else None


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call that is to be run or answered."""

    skill: RemoteSkill | None
    identity: CallIdentity
    arguments: Any
    tool: str
    connection: str = ""

    @property
    def idempotent(self) -> bool:
        """Whether this worker may run the call again after another worker died while running it."""
        return self.skill is not None and self.skill.idempotent


class CallAddresses:
    """Finds the journal and key of a call by its identity.

    Calls with a strong identity are in the shared journal. Those with a weak one stay in memory: a request id that is used
    again in another run must not find the first run's answer. Calls without an identity get a journal of their own.

    Args:
        journal: Keeps calls with a strong identity.
    """

    def __init__(self, journal: CallJournal) -> None:
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._journal = journal
        self._weak = MemoryJournal()
        self._names = WeakIdentities()

    def find(self, identity: CallIdentity) -> CallAddress:
        """Return the address of this call, for a new attempt."""
        key = strong_key(identity)
        if key is not None:
            return CallAddress(self._journal, key, self._attempt(), findable=True)
        key = self._names.key(identity)
        return self.unfindable() if key is None else CallAddress(self._weak, key, self._attempt(), findable=True)

    def unfindable(self) -> CallAddress:
        """Return an address that no other delivery finds."""
        return CallAddress(MemoryJournal(kept=1), f"once-{uuid.uuid4().hex}", self._attempt(), findable=False)

    def forget(self, session_id: str) -> None:
        """Drop the weak identities of a session."""
        self._names.forget(session_id)
        self._weak.forget(session_id)

    def _attempt(self) -> str:
        return f"{self.owner}:{uuid.uuid4().hex[:12]}"


class AcceptedAnswers:
    """Remembers which answers were accepted on which connection, the newest `ACCEPTED_KEPT`; thread-safe."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str, connection: str) -> None:
        """Record that the answer of a call was accepted."""
        with self._lock:
            self._pairs[key, connection] = None
            self._pairs.move_to_end((key, connection))
            if len(self._pairs) > ACCEPTED_KEPT:
                self._pairs.popitem(last=False)

    def has(self, key: str, connection: str) -> bool:
        """Return whether the answer of a call was accepted."""
        with self._lock:
            return (key, connection) in self._pairs


class JournalClaims:
    """Queries the journals for one facade.

    Args:
        driver: How to wait and call: on an event loop, or blocking.
        lease_s: How long a claim lasts unless it is renewed.
        no_skill_s: How long an idempotent call of a dead worker is left to workers that may run it.
    """

    def __init__(self, driver: Driver, lease_s: float, no_skill_s: float) -> None:
        self._driver = driver
        self._lease_s = lease_s
        self._no_skill_s = no_skill_s
        self._threads = HandlerThreads()

    async def claim(self, call: CallRequest, address: CallAddress) -> CallClaim:
        """Claim the call, or return its row as another attempt left it."""
        return await self.ask(
            address,
            lambda: address.journal.claim(
                address.key, call.identity, address.owner, self._lease_s, idempotent=call.idempotent
            ),
        )

    async def leave_to_others(self, address: CallAddress, seconds: float) -> None:
        """Wait until another worker has claimed the call, but not longer than *seconds*."""
        until = time.monotonic() + seconds
        pause = FIRST_LOOK_S
        while time.monotonic() < until:
            if await self.ask(address, lambda: address.journal.get(address.key)) is not None:
                return
            await self._driver.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(LAST_LOOK_S, pause * 2)

    async def wait_for_answer(
        self, call: CallRequest, address: CallAddress, row: JournalRow | None
    ) -> JournalRow | None:
        """Wait until the row has an answer and return it; return None when the call must be claimed again."""
        pause, since, left_since = FIRST_LOOK_S, time.monotonic(), None
        while row is not None and row.state not in ANSWERED:
            if takeover(row, idempotent=call.idempotent) is not None:
                return None
            if not row.alive:
                left_since = left_since or time.monotonic()
                if not row.idempotent or time.monotonic() - left_since >= self._no_skill_s:
                    row = await self._record_loss(call, address, row)
                    continue
            await self._driver.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 2)
            try:
                row = await self.ask(address, lambda: address.journal.get(address.key))
                since = time.monotonic()
            except JournalAway:
                if time.monotonic() - since > AWAY_S:
                    raise
        return row

    async def _record_loss(self, call: CallRequest, address: CallAddress, row: JournalRow) -> JournalRow | None:
        owner = row.owner
        unknown = failed(call.tool, OUTCOME_UNKNOWN)
        return await self.ask(address, lambda: address.journal.lose(address.key, owner, unknown))

    async def ask(self, address: CallAddress, question: Callable[[], T]) -> T:
        """Query the journal, on a thread where its disk must not block an event loop."""
        try:
            if self._driver.asynchronous and not isinstance(address.journal, MemoryJournal):
                return await self._threads.call(question)
            return question()
        except Exception as error:
            raise JournalAway(type(error).__name__) from error
