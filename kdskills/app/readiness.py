"""Whether this Host can take new work (spec service §5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from kdskills.app.host import Host

PATIENCE_S: Final = 10.0
"""Seconds a part may take to answer; one that takes longer is not ready."""
SLOW: Final = "no_answer_in_time"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What each part says: `ok`, or the stable code of what is wrong; never words that could tell of this machine."""

    checks: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every part is in order."""
        return all(word == "ok" for word in self.checks.values())


async def readiness(host: Host, *, patience_s: float = PATIENCE_S) -> Readiness:
    """Ask the database and the engines at one time; probes are cached by the engines themselves.

    Args:
        host: Who is asked.
        patience_s: Seconds each part may take.
    """
    database, engine = await asyncio.gather(
        _word(_database(host), patience_s), _word(host.wiring.executor(host.settings.executor), patience_s)
    )
    return Readiness({"database": database, "engine": engine})


async def _word(asked: Awaitable[object], patience_s: float) -> str:
    try:
        async with asyncio.timeout(patience_s):
            await asked
    except KdskillsError as error:
        return error.code
    except TimeoutError:
        return SLOW
    return "ok"


async def _database(host: Host) -> None:
    await host.storage.database.read(lambda link: link.exec_driver_sql("SELECT 1").scalar())
