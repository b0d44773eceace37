"""One hostile program: its file, its area, what must be true, how the run may end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kdskills.execution.request import MIB, IsolationLevel, Limits, Status

ENDED: Final[frozenset[Status]] = frozenset({"ok"})
STOPPED: Final[frozenset[Status]] = frozenset({"oom", "limit", "nonzero", "timeout"})
ANY: Final[frozenset[Status]] = ENDED | STOPPED

SMALL = Limits(
    wall_s=10, memory=96 * MIB, pids=32, work_size=8 * MIB, tmp_size=8 * MIB, output_size=8 * MIB, fsize=8 * MIB
)
SHORT = Limits(wall_s=2, memory=96 * MIB, pids=32)


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile program.

    Attributes:
        name: Its file below `programs`, without suffix.
        area: Area of the table of hostile programs in `docs/reference/isolation.md`.
        must: What must be true, as a sentence.
        statuses: How the run may end.
        says: Words its standard output must hold, when it comes to its end.
        limits: Bounds of the run.
        outputs: Globs collected from it.
        artifacts: Paths that may come back; None when any may.
        level: Weakest engine it is meant for.
        needs: Limits the engine must enforce for the case to mean anything.
        env: Variables it is given; it sees them as `GIVEN` too.
        code: The exit code it must be told to have had.
    """

    name: str
    area: str
    must: str
    statuses: frozenset[Status] = ENDED
    says: str = "attempts made"
    limits: Limits = SMALL
    outputs: tuple[str, ...] = ()
    artifacts: frozenset[str] | None = field(default_factory=frozenset)
    level: IsolationLevel = IsolationLevel.NAMESPACE
    needs: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    code: int | None = None


NONE: Final = IsolationLevel.NONE
MEMORY: Final = frozenset({"memory"})
PIDS: Final = frozenset({"pids"})
