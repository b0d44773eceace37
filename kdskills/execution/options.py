"""What the operator decides about engines; handed to each engine's factory (spec execution §2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kdskills.execution.protocol import Executor


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """The operator's settings for engines.

    Attributes:
        sandbox_uid: Dedicated uid programs run as when kdskills itself runs as root; never 0.
        best_effort: Names of limits that may go unenforced where an engine cannot hold them.
        allow_unisolated: The operator's half of the double opt-in of the bare engine.
        image_packages: Further installed distributions to copy into the prepared tree.
        cache_dir: Folder of prepared trees; None for the default of `kdskills.execution.dirs`.
        state_dir: Folder of run records; None for the default.
    """

    sandbox_uid: int = 10001
    best_effort: frozenset[str] = frozenset()
    allow_unisolated: bool = False
    image_packages: tuple[str, ...] = ()
    cache_dir: Path | None = None
    state_dir: Path | None = None


ExecutorFactory = Callable[[ExecutionOptions], Executor]
