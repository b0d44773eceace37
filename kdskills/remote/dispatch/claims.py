"""Where a call is written down, and how its row is asked for: claims, waits, journals that are away."""

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
"""How long a waiter bears with a journal that does not answer."""
ACCEPTED_KEPT: Final = 65_536


class JournalAway(Exception):
    """The journal did not answer; its own error is the cause."""


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where a call is written down, and by whom; *named* says whether it can be known again."""

    journal: CallJournal
    key: str
    owner: str
    findable: bool

    @property
    def reported_key(self) -> str | None:
        """The key, when it means something to others."""
        return self.key if self.findable else None


@dataclass(frozen=True, slots=True)
class Order:
    """A call as it came."""

    skill: RemoteSkill | None
    identity: CallIdentity
    arguments: Any
    tool: str
    connection: str = ""

    @property
    def idempotent(self) -> bool:
        """Whether this worker may run it although somebody began to."""
        return self.skill is not None and self.skill.idempotent


class CallAddresses:
    """Finds a call's place by its identity.

    Strong ones are in the shared journal. Weak ones stay in memory: a request id that comes back in another run must
    not find the first run's answer. Others have a place of their own that nobody finds again.

    Args:
        journal: Keeps calls with a strong identity.
    """

    def __init__(self, journal: CallJournal) -> None:
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._journal = journal
        self._weak = MemoryJournal()
        self._names = WeakIdentities()

    def find(self, identity: CallIdentity) -> CallAddress:
        """Return the place of this call, for a new attempt at it."""
        key = strong_key(identity)
        if key is not None:
            return CallAddress(self._journal, key, self._attempt(), findable=True)
        key = self._names.key(identity)
        return self.unfindable() if key is None else CallAddress(self._weak, key, self._attempt(), findable=True)

    def unfindable(self) -> CallAddress:
        """Return a place nobody finds again."""
        return CallAddress(MemoryJournal(kept=1), f"once-{uuid.uuid4().hex}", self._attempt(), findable=False)

    def forget(self, session_id: str) -> None:
        """Drop the weak identities of a session."""
        self._names.forget(session_id)
        self._weak.forget(session_id)

    def _attempt(self) -> str:
        return f"{self.owner}:{uuid.uuid4().hex[:12]}"


class Accepted:
    """Remembers which answers were accepted on which connection; the newest `ACCEPTED_KEPT`, safe from any thread."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str, connection: str) -> None:
        """Note one."""
        with self._lock:
            self._pairs[key, connection] = None
            self._pairs.move_to_end((key, connection))
            if len(self._pairs) > ACCEPTED_KEPT:
                self._pairs.popitem(last=False)

    def has(self, key: str, connection: str) -> bool:
        """Return whether it was noted."""
        with self._lock:
            return (key, connection) in self._pairs


class JournalClaims:
    """Asks journals on behalf of one facade.

    Args:
        driver: What may be waited for.
        lease_s: How long a claim lasts unless it is renewed.
        no_skill_s: How long an idempotent call of the dead is left to those who may run it.
    """

    def __init__(self, driver: Driver, lease_s: float, no_skill_s: float) -> None:
        self._driver = driver
        self._lease_s = lease_s
        self._no_skill_s = no_skill_s
        self._threads = HandlerThreads()

    async def claim(self, order: Order, address: CallAddress) -> CallClaim:
        """Claim the call, or learn how it stands."""
        return await self.ask(
            address,
            lambda: address.journal.claim(
                address.key, order.identity, address.owner, self._lease_s, idempotent=order.idempotent
            ),
        )

    async def leave_to_others(self, address: CallAddress, seconds: float) -> None:
        """Wait until another worker has claimed the call, or the time is over."""
        until = time.monotonic() + seconds
        pause = FIRST_LOOK_S
        while time.monotonic() < until:
            if await self.ask(address, lambda: address.journal.get(address.key)) is not None:
                return
            await self._driver.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(LAST_LOOK_S, pause * 2)

    async def answered(self, order: Order, address: CallAddress, row: JournalRow | None) -> JournalRow | None:
        """Wait for the row's answer; None when it is to be claimed again."""
        pause, since, left_since = FIRST_LOOK_S, time.monotonic(), None
        while row is not None and row.state not in ANSWERED:
            if takeover(row, idempotent=order.idempotent) is not None:
                return None
            if not row.alive:
                left_since = left_since or time.monotonic()
                if not row.idempotent or time.monotonic() - left_since >= self._no_skill_s:
                    row = await self._lost(order, address, row)
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

    async def _lost(self, order: Order, address: CallAddress, row: JournalRow) -> JournalRow | None:
        owner = row.owner
        unknown = failed(order.tool, OUTCOME_UNKNOWN)
        return await self.ask(address, lambda: address.journal.lose(address.key, owner, unknown))

    async def ask(self, address: CallAddress, question: Callable[[], T]) -> T:
        """Ask the journal, on a thread when others must not wait for its disk."""
        try:
            if self._driver.asynchronous and not isinstance(address.journal, MemoryJournal):
                return await self._threads.call(question)
            return question()
        except Exception as error:
            raise JournalAway(type(error).__name__) from error
