"""Whether this Host can take new work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kdskills.errors import KdskillsError, OperatorMustAct
from kdskills.jobs.room import StateUnwritable, check_writable

if TYPE_CHECKING:
    from kdskills.app.host import Host

PATIENCE_S: Final = 10.0
"""Seconds a part may take to answer; one that takes longer is not ready."""
SLOW: Final = "no_answer_in_time"
_LOG: Final = logging.getLogger("kdskills.service")


class NoWorker(OperatorMustAct):
    """Work waits, and no worker is alive that would take it; it waits until one is."""

    code = "no_worker"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What each part says: `ok`, or the stable code of what is wrong; never words that could tell of this machine.

    Attributes:
        checks: The words of the parts.
        notices: What does not keep new work from being taken, though somebody should know.
    """

    checks: Mapping[str, str]
    notices: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every part is in order."""
        return all(word == "ok" for word in self.checks.values())


async def readiness(host: Host, *, patience_s: float = PATIENCE_S) -> Readiness:
    """Ask the database, the engines, the disk and the store of artifacts at one time; engines remember their own probes.

    Args:
        host: Who is asked.
        patience_s: Seconds each part may take.
    """
    checks = {
        "database": _database(host),
        "engine": host.wiring.executor(host.settings.executor),
        "disk": asyncio.to_thread(check_writable, host.settings.state_dir),
        "artifacts": _artifacts(host),
        "workers": _workers(host),
    }
    words = dict(zip(checks, await asyncio.gather(*(_word(each, patience_s) for each in checks.values())), strict=True))
    workers = words.pop("workers")
    if workers == NoWorker.code:
        _LOG.warning("work waits and no worker is alive: `kdskills worker` starts one")
    return Readiness(words, {} if workers == "ok" else {"workers": workers})


async def _word(check: Awaitable[object], patience_s: float) -> str:
    try:
        async with asyncio.timeout(patience_s):
            await check
    except KdskillsError as error:
        return error.code
    except TimeoutError:
        return SLOW
    except OSError:
        return StateUnwritable.code
    return "ok"


async def _workers(host: Host) -> None:
    """Raises NoWorker when work waits that nobody alive would take; without waiting work nobody is missed."""
    if not host.storage.present:
        return
    work = await host.work.client.work()
    await asyncio.to_thread(work.roster.bury)  # one that was killed had nobody to say so
    if await work.database.read(work.queue.stranded):
        raise NoWorker("work waits and no worker is alive")


async def _database(host: Host) -> None:
    await host.storage.database.read(lambda link: link.exec_driver_sql("SELECT 1").scalar())


async def _artifacts(host: Host) -> None:
    if host.settings.artifacts is not None:  # else they are in the state folder, which is looked at already
        await host.work.artifacts().check()
