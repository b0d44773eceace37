"""Whether this Host can take new work (spec service §5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from kdskills.app.host import Host


@dataclass(frozen=True, slots=True)
class Readiness:
    """What each part says: `ok`, or the stable code of what is wrong; never words that could tell of this machine."""

    checks: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every part is in order."""
        return all(word == "ok" for word in self.checks.values())


async def readiness(host: Host) -> Readiness:
    """Ask the engines; probes are cached by the engines themselves."""
    checks: dict[str, str] = {}
    try:
        await host.wiring.executor(host.settings.executor)
        checks["engine"] = "ok"
    except KdskillsError as error:
        checks["engine"] = error.code
    return Readiness(checks)
