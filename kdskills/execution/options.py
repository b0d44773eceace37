"""What the operator decides about engines; handed to each engine's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from kdskills.errors import path_argument
from kdskills.execution.protocol import Executor


@dataclass(frozen=True, slots=True)
class E2bOptions:
    """How to reach E2B, and how long its sandboxes live.

    Attributes:
        api_key: The key; the variable `E2B_API_KEY` is read when None.
        template: Template new sandboxes are made from.
        api_url: Address of the API; the SDK's own when None.
        sandbox_url: Address of sandboxes; the SDK's own when None.
        idle_ttl_s: A sandbox nobody used for so long is ended.
        hard_ttl_s: No sandbox is used for longer than this after it was made.
    """

    api_key: SecretStr | None = None
    template: str = "base"
    api_url: str | None = None
    sandbox_url: str | None = None
    idle_ttl_s: float = 300.0
    hard_ttl_s: float = 3600.0


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
        pool: Sandboxes the bubblewrap engine keeps ready ahead of time, each for one run; 0 makes each when asked.
        e2b: The remote engine's own settings.
    """

    sandbox_uid: int = 10001
    best_effort: frozenset[str] = frozenset()
    allow_unisolated: bool = False
    image_packages: tuple[str, ...] = ()
    cache_dir: Path | None = None
    state_dir: Path | None = None
    pool: int = 0
    e2b: E2bOptions = E2bOptions()

    def __post_init__(self) -> None:
        """Accept folders as paths or as text. Raises TypeError for anything else."""
        for name in ("cache_dir", "state_dir"):
            if (folder := getattr(self, name)) is not None:
                object.__setattr__(self, name, path_argument(folder, name))


ExecutorFactory = Callable[[ExecutionOptions], Executor]
