"""Starting attempts and finding them again, whoever started them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Final, Protocol

from kdskills.execution.dirs import private_dir
from kdskills.jobs.attempts import shim
from kdskills.jobs.attempts.attempt import Attempt, attempt_alive
from kdskills.jobs.attempts.order import AttemptOrder, require_task_id
from kdskills.skills.private_files import private_folder

RUNS: Final = "runs"
SESSIONS: Final = "sessions"


class Starter(Protocol):
    """Makes a shim for an order that lies in its folder, and reaps after one that died."""

    async def start(self, folder: Path) -> None:
        """Start the shim of the attempt in *folder*; one that is alive already is left alone. Raises ExecFailed."""
        ...

    async def reap(self, engine: str) -> None:
        """End what dead runners left on *engine*. Raises ExecFailed."""
        ...


class Attempts:
    """The attempts below one state folder.

    Args:
        state_dir: The state folder; `runs/` and `sessions/` are made in it, closed to everybody else.
        starter: Starts shims; without one, attempts can only be found.
    """

    def __init__(self, state_dir: Path, starter: Starter | None = None) -> None:
        self._state = state_dir
        self._starter = starter

    def session_dir(self, session_key: str) -> Path:
        """Return the folder of a session's files; it need not be there yet."""
        return self._state / SESSIONS / require_task_id(session_key)

    async def start(self, order: AttemptOrder) -> Attempt:
        """Start an attempt and return once its shim holds the lock.

        The same attempt may be started again: one that began, whether it lives or not, is only found. So a worker that
        was killed between its decision and the start repeats the call without ever running a program twice.

        Raises:
            ExecFailed: No shim could be started.
        """
        assert self._starter is not None
        folder = self._folder(order.task_id, order.attempt)
        await asyncio.to_thread(self._write, folder, order)
        attempt = self.find(order.task_id, order.attempt)
        if attempt is None:
            await self._starter.start(folder)
            attempt = Attempt(folder, order, self._starter)
        return attempt

    def find(self, task_id: str, attempt: int) -> Attempt | None:
        """Return an attempt that has begun; None for one that never did, which may still be started."""
        folder = self._folder(task_id, attempt)
        facts = shim.read_json(folder / shim.ORDER)
        if facts is None:
            return None
        if not attempt_alive(folder) and shim.read_identity(folder) is None and not (folder / shim.EXIT).exists():
            return None
        return Attempt(folder, AttemptOrder.model_validate(facts["order"]), self._starter)

    def latest(self, task_id: str) -> Attempt | None:
        """Return the task's last attempt that has begun."""
        top = self._state / RUNS / require_task_id(task_id)
        if not top.is_dir():
            return None
        numbers = sorted((int(path.name) for path in top.iterdir() if path.name.isdigit()), reverse=True)
        return next((attempt for number in numbers if (attempt := self.find(task_id, number)) is not None), None)

    def remove(self, task_id: str) -> bool:
        """Remove everything of a task's attempts; False when one lives and was left."""
        top = self._state / RUNS / require_task_id(task_id)
        if not top.is_dir():
            return True
        for path in list(top.iterdir()):
            if attempt_alive(path):
                return False
        shutil.rmtree(top)
        return True

    def tasks(self) -> list[str]:
        """Return the ids of every task with a folder here."""
        top = self._state / RUNS
        return sorted(path.name for path in top.iterdir()) if top.is_dir() else []

    def _folder(self, task_id: str, attempt: int) -> Path:
        return self._state / RUNS / require_task_id(task_id) / str(attempt)

    def _write(self, folder: Path, order: AttemptOrder) -> None:
        """Make the folder and write the order, unless it is there from an earlier try."""
        private_dir(self._state)
        runs = self._state / RUNS
        for path in (runs, folder.parent, folder):
            private_folder(path)
        if not (folder / shim.ORDER).exists():
            shim.write_json(folder / shim.ORDER, order.to_json())
