"""Turns that are kept: transcripts and files in the state folder, a small row beside each, and how long they stay.

::

    <state>/turns/<project>/<turn id>.jsonl              the transcript, written while the turn runs
    <state>/turns/<project>/<turn id>.json               its row: whose it is, what was asked, what came of it
    <state>/turns/<project>/kdskills-turn-<turn id>/     the files it made

Ids of turns sort by time, so that a page of a list costs the names of a folder and as many rows as it shows. Who writes a
transcript holds a lock on it, which ends with its process: a turn without an end whose lock is free broke off.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import re
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kdskills.errors import BadRequest, Diagnostic, FileRefused, KdskillsError, NotFound
from kdskills.projects.views import check_project
from kdskills.skills.private_files import private_folder, replace_file
from kdskills.skills.safe_open import open_file, read_file
from kdskills.solver.events import TokenUsage, Transcript, TurnResult, TurnStarted, TurnStatus, read_transcript
from kdskills.solver.history import TURN_PREFIX
from kdskills.storage.folder import state_folder

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.settings import TurnsSettings
    from kdskills.solver.turn import Turn

TURNS: Final = "turns"
MAX_REQUEST: Final = 400
"""Characters of a request that a row holds."""
MAX_ROW: Final = 256 * 1024
DAY_S: Final = 86_400.0
MIB: Final = 1024 * 1024
TURN_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

TurnState = Literal[TurnStatus, "running", "broken_off"]


class TurnRow(BaseModel):
    """A turn in a list: what was asked of whom, and what came of it.

    Attributes:
        status: That of the result; `running`, or `broken_off` for a turn whose process died before its end.
        agent: Who began it; empty where that was not written any more.
        request: The beginning of what was asked.
        skills: Full ids of the skills that took part.
        files: How many files it made.
    """

    model_config = ConfigDict(frozen=True, from_attributes=True)

    turn_id: str
    status: TurnState
    agent: str = ""
    tenant: str = "local"
    bundle: str = ""
    request: str = ""
    consumer: str = ""
    model: str = ""
    replayed: bool = False
    session_id: str = ""
    started_at: datetime
    ended_at: datetime | None = None
    stop_reason: str = ""
    steps: int = 0
    usage: TokenUsage = TokenUsage()
    duration_ms: int = 0
    skills: tuple[str, ...] = ()
    files: int = 0

    def with_result(self, result: TurnResult, ended_at: datetime) -> TurnRow:
        """Return the row of the turn that came to *result*."""
        facts = {name: getattr(result, name) for name in ("stop_reason", "usage", "duration_ms", "model", "replayed")}
        skills = tuple(dict.fromkeys(use.id for use in result.skills_used))
        counts = {"steps": len(result.steps), "files": len(result.files), "skills": skills}
        return self.model_copy(update={"status": result.status, "ended_at": ended_at, **facts, **counts})


def moment_of_id(turn_id: str) -> datetime:
    """Return when the turn of an id began, to the millisecond."""
    return datetime.fromtimestamp(int(turn_id.replace("-", "")[:12], 16) / 1000, UTC)


def row_of(turn: Turn, identity: Identity, bundle: str) -> TurnRow:
    """Return the row of a turn that begins."""
    model = turn.parts.model(turn.role)
    return TurnRow(
        turn_id=turn.id,
        status="running",
        agent=identity.agent,
        tenant=identity.tenant,
        bundle=bundle,
        request=turn.bus.redactor.text(turn.request)[:MAX_REQUEST],
        consumer=turn.consumer,
        model=model.name,
        replayed=model.replayed,
        session_id=turn.session_id,
        started_at=moment_of_id(turn.id),
    )


@dataclass(frozen=True)
class TurnArchive:
    """The turns that are kept below *state_dir*. Everything here blocks."""

    settings: TurnsSettings
    state_dir: Path

    @property
    def top(self) -> Path:
        """The folder of all projects' turns."""
        return self.state_dir / TURNS

    def folder(self, project: str) -> Path:
        """Make the folder of a project's turns and return it. Raises KdskillsError, also where the system refuses."""
        check_project(project)
        state_folder(self.state_dir)
        try:
            private_folder(self.top)
            return private_folder(self.top / project)
        except OSError as error:
            raise self._refused("made", error) from error

    def _refused(self, what: str, error: OSError) -> FileRefused:
        message = f"the folder of turns cannot be {what}: {error.strerror}"
        return FileRefused(message, code="unreadable", path=str(self.top))

    def write(self, project: str, row: TurnRow) -> None:
        """Write the row of a turn, in place of an older one. Raises OSError."""
        replace_file(self.top / project / f"{row.turn_id}.json", row.model_dump_json().encode())

    def end(self, project: str, row: TurnRow, result: TurnResult) -> None:
        """Write what came of a turn, and let go of turns that are too many, too old or too large. As `prune`."""
        self.write(project, row.with_result(result, datetime.now(UTC)))
        self.prune(project)

    def rows(self, project: str, before: str | None = None) -> Iterator[TurnRow]:
        """Give the turns of a project, the newest first, from the one after the id *before* on. Raises FileRefused."""
        for turn_id in self._ids(project):
            if before is None or turn_id < before:
                with suppress(NotFound):  # removed meanwhile, or no turn at all
                    yield self.row(project, turn_id)

    def row(self, project: str, turn_id: str) -> TurnRow:
        """Return the row of a turn as it is now. Raises NotFound, also for what is no id of a turn."""
        check_project(project)
        if not TURN_ID.fullmatch(turn_id):
            raise _missing(turn_id)
        row = self._written(project, turn_id)
        if row is None or row.status == "running":
            if self.running(project, turn_id):
                return row or TurnRow(turn_id=turn_id, status="running", started_at=moment_of_id(turn_id))
            latest = self._written(project, turn_id)  # it may have ended between the two looks
            row = latest if latest is not None and latest.status != "running" else self._settled(project, turn_id, row)
        return row

    def running(self, project: str, turn_id: str) -> bool:
        """Whether a process is writing the transcript of a turn. Raises NotFound."""
        with self.opened(project, turn_id) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    def opened_file(self, project: str, turn_id: str, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a file that a turn made, never through a link. Raises FileRefused."""
        check_project(project)
        return open_file(self.top / project / f"{TURN_PREFIX}{turn_id}", path)

    def read(self, project: str, turn_id: str) -> Transcript:
        """Read the transcript of a turn. Raises NotFound, and BadRequest for what is no transcript."""
        with self.lines(project, turn_id) as lines:
            return read_transcript(f"{turn_id}.jsonl", lines)

    def lines(self, project: str, turn_id: str) -> IO[str]:
        """Open the transcript of a turn. Raises NotFound."""
        return io.TextIOWrapper(self.opened(project, turn_id), encoding="utf-8", newline="\n")

    def opened(self, project: str, turn_id: str) -> io.BufferedReader:
        """Open the transcript of a turn for reading bytes. Raises NotFound."""
        check_project(project)
        if not TURN_ID.fullmatch(turn_id):
            raise _missing(turn_id)
        try:
            with open_file(self.top, f"{project}/{turn_id}.jsonl") as stream:
                return os.fdopen(os.dup(stream.fileno()), "rb")
        except FileRefused:
            raise _missing(turn_id) from None

    def prune(self, project: str) -> int:
        """Remove the oldest turns until the rest is within the settings; return how many. Those that run stay.

        Raises FileRefused when the folder cannot be read, and OSError for a turn that cannot be removed, after the others were.
        """
        settings, kept_bytes, removed = self.settings, 0, 0
        trouble: OSError | None = None
        oldest, ids = (
            time.time() - settings.days * DAY_S,
            [each for each in self._ids(project) if TURN_ID.fullmatch(each)],
        )
        folders = {path.name for path in (self.top / project).glob(f"{TURN_PREFIX}*")} if settings.mb else set()
        for number, turn_id in enumerate(ids, 1):
            kept_bytes += self._size(project, turn_id, folders) if settings.mb else 0
            too_many = bool(settings.most) and number > settings.most
            too_old = bool(settings.days) and moment_of_id(turn_id).timestamp() < oldest
            too_large = bool(settings.mb) and number > 1 and kept_bytes > settings.mb * MIB
            if too_many or too_old or too_large:
                try:
                    if not self.running(project, turn_id):
                        self.remove(project, turn_id)
                        removed += 1
                except NotFound:  # another process removed it first
                    continue
                except OSError as error:
                    trouble = error
        if trouble is not None:
            raise trouble
        return removed

    def remove(self, project: str, turn_id: str) -> None:
        """Remove everything of a turn. Raises OSError, and the turn is there still."""
        folder = self.top / project
        with suppress(FileNotFoundError):  # it made no files, or another process removes it as well
            shutil.rmtree(folder / f"{TURN_PREFIX}{turn_id}")
        for suffix in (".json", ".jsonl"):  # the transcript last: without it there is no turn
            (folder / f"{turn_id}{suffix}").unlink(missing_ok=True)

    def _ids(self, project: str) -> list[str]:
        """Return the ids of a project's turns, the newest first; names of other files may be among them. Raises FileRefused."""
        folder = self.top / check_project(project)
        try:
            names = os.listdir(folder) if stat.S_ISDIR(folder.lstat().st_mode) else []  # noqa: PTH208 - no paths
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._refused("read", error) from error
        return sorted((name[:-6] for name in names if name.endswith(".jsonl")), reverse=True)

    def _size(self, project: str, turn_id: str, folders: Collection[str]) -> int:
        size, folder = 0, self.top / project
        with suppress(OSError):  # what is gone takes no room
            size += os.lstat(f"{folder}/{turn_id}.jsonl").st_size
        if f"{TURN_PREFIX}{turn_id}" in folders:
            for top, _, files in os.walk(folder / f"{TURN_PREFIX}{turn_id}"):
                with suppress(OSError):  # likewise
                    size += sum(os.lstat(f"{top}/{name}").st_size for name in files)
        return size

    def _written(self, project: str, turn_id: str) -> TurnRow | None:
        """Return the row that stands beside a transcript, or None for none that can be read."""
        try:
            row = TurnRow.model_validate_json(read_file(self.top, f"{project}/{turn_id}.json", limit=MAX_ROW).data)
        except (FileRefused, ValidationError):
            return None
        return row if row.turn_id == turn_id else None

    def _settled(self, project: str, turn_id: str, row: TurnRow | None) -> TurnRow:
        """Return the row of a turn whose process died, by its transcript; the next look finds it written."""
        row = row or TurnRow(turn_id=turn_id, status="running", started_at=moment_of_id(turn_id))
        try:
            read = self.read(project, turn_id)
        except BadRequest:
            read = Transcript(None, (), None)
        if isinstance(read.started, TurnStarted):
            facts = {name: getattr(read.started, name) for name in ("consumer", "model", "replayed", "session_id")}
            row = row.model_copy(update={"request": read.started.request[:MAX_REQUEST], **facts})
        row = row.model_copy(update={"status": "broken_off"})
        if read.result is not None:
            row = row.with_result(read.result, row.started_at)
        with suppress(OSError):  # a folder that can only be read is read again
            self.write(project, row)
        return row


def _missing(turn_id: str) -> NotFound:
    return NotFound(f"there is no turn {turn_id[:64]!r}", turn_id=turn_id[:64])


@dataclass
class TurnKeeper:
    """Keeps one turn of *identity* on the bundle named *bundle*: its row is written when it begins and when it has ended.

    `folder` is where its transcript and files go, None where turns are not kept, or cannot be, which `findings` say.
    """

    archive: TurnArchive
    identity: Identity
    bundle: str
    folder: Path | None = None
    findings: tuple[Diagnostic, ...] = ()

    @classmethod
    async def of(cls, archive: TurnArchive, identity: Identity, bundle: str) -> TurnKeeper:
        """Return what keeps a turn, its folder made."""
        keeper = cls(archive, identity, bundle)
        if archive.settings.keep:
            try:
                keeper.folder = await asyncio.to_thread(archive.folder, identity.project)
            except KdskillsError as error:
                keeper._tell(error.message)
        return keeper

    @asynccontextmanager
    async def keeping(self, prepared: AbstractAsyncContextManager[Turn]) -> AsyncIterator[Turn]:
        """Give the turn of *prepared*, whose row is written before; when it has ended, however, what came of it is."""
        turn: Turn | None = None
        try:
            async with prepared as turn:
                if self.folder is not None:
                    await self._written(self.archive.write, row_of(turn, self.identity, self.bundle))
                yield turn
        finally:
            if turn is not None and turn.result is not None and self.folder is not None:
                await self._written(self.archive.end, row_of(turn, self.identity, self.bundle), turn.result)

    async def _written(self, write: Callable[..., None], *facts: object) -> None:
        try:
            await asyncio.to_thread(write, self.identity.project, *facts)
        except (OSError, FileRefused) as error:
            self._tell(error.message if isinstance(error, FileRefused) else error.strerror or str(error))

    def _tell(self, reason: str) -> None:
        message = f"the turn is not kept as it should be: {reason}; the setting turns.keep switches it off"
        self.findings = (*self.findings, Diagnostic("turn_not_kept", "warning", message))
