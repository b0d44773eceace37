"""How much work a token may have at one time (spec service §2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kdskills.app.work.owning import scope_of
from kdskills.errors import CallerMustAct
from kdskills.jobs.client import new_id

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.host import Host
    from kdskills.app.identity import Identity
    from kdskills.jobs.canceling import Kind


class TooMuchWork(CallerMustAct):
    """The caller has as many tasks and jobs as its token allows; `details["limit"]` tells how many (spec service §2)."""

    code = "too_much_work"


class Room:
    """Counts the work of callers with a token. Work belongs to an agent: tokens of one agent share what they have.

    Within one process a limit is exact; two services over one database may each let the last one in.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._locks: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def for_one_more(self, identity: Identity, kind: Kind, key: str | None) -> AsyncIterator[None]:
        """Keep the place of one piece of work while it is submitted; a call that is repeated needs none.

        Args:
            identity: The caller.
            kind: What is submitted.
            key: Its idempotency key.

        Raises:
            TooMuchWork: There is none.
        """
        own = identity.limits.concurrent_work
        limit = self._host.settings.concurrent_work if own is None else own
        if identity.token is None or not limit:
            yield
            return
        whose = (identity.tenant, identity.project, identity.agent)
        lock = self._locks.setdefault(whose, asyncio.Lock())
        async with lock:
            work = await self._host.work.client.work()
            scope = scope_of(identity)
            item = None if key is None else new_id(kind, scope, key)

            def refused(link: sa.Connection) -> bool:
                if item is not None and work.records.body_hash(link, kind, item) is not None:
                    return False  # it was submitted before
                return work.records.open_work(link, scope, limit) >= limit

            if await work.database.read(refused):
                raise TooMuchWork(
                    f"this token may have {limit} tasks and jobs at one time: wait until one is over",
                    limit=limit,
                    retry_after=1,
                )
            yield
