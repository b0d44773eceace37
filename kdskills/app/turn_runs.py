"""Turns that run in the process of a Host, and what is read of a turn while it runs, in whichever process it does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kdskills.bundle import Bundle, load_bundle
from kdskills.errors import CallerMustAct, KdskillsError
from kdskills.solver.events import Event, event_of

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kdskills.app.turns import TurnArchive
    from kdskills.projects.views import ProjectSkills
    from kdskills.solver.parts import Wiring
    from kdskills.turn import SkillsSubsystem

_LOG = logging.getLogger("kdskills.service")

NO_FOLDER: Final = Path("/nonexistent")
"""Root of a bundle that has none: nothing is looked for there."""
RETRY_S: Final = 5
"""Seconds after which a caller may try again to start a turn."""


class TooManyTurns(CallerMustAct, code="too_many_turns"):
    """As many turns run as this process runs at one time; `details["retry_after"]` is in seconds."""


class ProjectWiring:
    """A wiring by which a bundle has the skills of a project: uploaded ones, too, and none that is disabled."""

    def __init__(self, wiring: Wiring, skills: SkillsSubsystem) -> None:
        self._wiring, self._skills = wiring, skills

    def __getattr__(self, name: str) -> Any:
        """Return what the wiring has."""
        return getattr(self._wiring, name)

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the project's skills."""
        return self._skills


def project_bundle(skills: ProjectSkills) -> Bundle:
    """Return the bundle of a project; of one that has uploaded skills alone, a bundle without a folder. Blocks.

    Its code runs: an operator chose the folder. Raises BundleError.
    """
    root, descriptor = skills.subsystem.bundle_root, skills.subsystem.descriptor
    if root is not None:
        return load_bundle(root)
    return Bundle(root=NO_FOLDER, name=skills.name, descriptor=descriptor)


class TurnRuns:
    """The turns that run in this process, at most *most* at one time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_id: dict[str, asyncio.Task[None]] = {}

    async def start(self, work: Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]) -> str:
        """Run *work* in a task of its own until its turn is over; return the turn's id, which it tells when it has begun.

        Raises TooManyTurns, and what *work* raises before.
        """
        if len(self._tasks) >= self._most:
            message = f"{self._most} turns run already: wait until one is over, or stop one with turns.stop"
            raise TooManyTurns(message, limit=self._most, retry_after=RETRY_S)
        began: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work(began.set_result))
        self._tasks.add(task)
        task.add_done_callback(self._over)
        try:
            await asyncio.wait((task, began), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # who asked has gone, and nobody else knows of it
            task.cancel()
            raise
        if began.done():
            self._by_id[began.result()] = task
            return began.result()
        await task
        raise AssertionError("a turn begins, or says why it does not")

    async def stop(self, turn_id: str) -> bool:
        """End a turn, and return when it has ended; False when none of that id runs in this process."""
        task = self._by_id.get(turn_id)
        if task is None or task.done():
            return False
        task.cancel()
        await asyncio.wait((task,))
        return True

    async def wait(self) -> None:
        """Return when every turn is over."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def aclose(self) -> None:
        """End every turn."""
        for task in self._tasks:
            task.cancel()
        await self.wait()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._by_id = {turn_id: each for turn_id, each in self._by_id.items() if each is not task}
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KdskillsError):  # ours stand in the transcript
            _LOG.error("a turn ended by what nobody foresaw", exc_info=error)


class TurnFollower:
    """Reads a transcript as it grows. Everything here blocks; use it as a context manager."""

    def __init__(self, archive: TurnArchive, project: str, turn_id: str) -> None:
        self._archive, self._project, self._turn_id = archive, project, turn_id
        self._stream = archive.opened(project, turn_id)
        self._begun = False

    def read(self, most: int) -> tuple[list[Event], bool]:
        """Return at most *most* further events, and whether more may come.

        Raises NotFound when the turn was removed.
        """
        running = self._archive.running(
            self._project, self._turn_id
        )  # asked first: what is written later is read later
        events: list[Event] = []
        lines = 0
        while lines < most:
            line_start, lines = self._stream.tell(), lines + 1
            line = self._stream.readline()
            if not line.endswith(b"\n"):
                self._stream.seek(line_start)
                return events, running
            event = self._event(line)
            events += [] if event is None else [event]
        return events, True

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _event(self, line: bytes) -> Event | None:
        """Return the event of a line; None for the head of the file and for what is no event."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return event_of(row) if isinstance(row, dict) and "type" in row else None
