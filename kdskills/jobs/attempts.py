"""Attempts: one run of one task, watched by a shim, `shim.py`, that outlives everybody; runners know the engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from kdskills.errors import BadRequest, ExecFailed
from kdskills.execution.dirs import private_dir
from kdskills.execution.request import NetworkConnection, Status
from kdskills.execution.streams import LogPiece, read_log
from kdskills.jobs import shim
from kdskills.jobs.model import MIB, Endpoint, OutputError, TaskSpec, Value
from kdskills.skills.private_files import private_folder

VerdictStatus = Status | Literal["startup_timeout", "lost"]
AttemptState = Literal["starting", "running", "ended", "lost"]
LogStream = Literal["stdout", "stderr"]

BACKSTOP_S: Final = 300.0
"""How long after its own timeout an attempt is ended by its shim, should the engine have failed to do it."""
_TASK_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class OrderInput(Value):
    """An input that lies on this host, such as an artifact: an absolute path that nobody else writes to."""

    path: str
    file: Path


class OutputBounds(Value):
    """How much of what a program leaves is kept; sizes in bytes."""

    files: int = 256
    each: int = 20 * MIB
    total: int = 50 * MIB


class AttemptOrder(Value):
    """Everything an attempt needs; written once into its folder.

    `session_dir` keeps the session's files between commands, None keeps nothing. `inputs` are those of the spec that
    are artifacts; `log_limit` is in bytes of each stream; `host_ports` are those an earlier attempt had, by exposed
    port. In `lease_file` this host's worker writes until when work is ours that another may take over; None is for ever.
    """

    task_id: str
    attempt: int = Field(ge=1)
    spec: TaskSpec
    session_dir: Path | None = None
    inputs: tuple[OrderInput, ...] = ()
    log_limit: int = Field(64 * MIB, ge=MIB)
    outputs: OutputBounds = OutputBounds()
    session_files: int = Field(4000, ge=1, le=4000)
    host_ports: dict[int, int] = Field(default_factory=dict)
    lease_file: Path | None = None

    def to_json(self) -> dict[str, object]:
        """Return what `order.json` holds: the order, and what the shim reads of it; no service is ended by time."""
        order, timeout = self.model_dump(mode="json"), self.spec.command.timeout_s
        backstop_s = None if timeout is None else timeout + BACKSTOP_S
        facts = {"backstop_s": backstop_s, "lease_file": order["lease_file"], "order": order}
        return facts | {"traceparent": order["spec"].pop("traceparent")}  # a field that workers before do not know

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> AttemptOrder:
        """Return the order that `to_json` told. Raises ValidationError, also for one of a later version."""
        order = cls.model_validate(facts["order"])
        spec = order.spec.model_copy(update={"traceparent": facts.get("traceparent", "")})
        return order.model_copy(update={"spec": spec})


class ProcessIdentity(Value):
    """A process told from every other that ever had its number."""

    pid: int = 0
    started: str = ""
    boot: str = ""


class AttemptFacts(Value):
    """What a running attempt says of itself; times are seconds since the epoch, batch work is ready when it is started.

    `forwarder` is the process that carries connections to its endpoints, `runner` the one that runs the engine.
    """

    started_at: float
    engine: str
    ready_at: float | None = None
    endpoints: tuple[Endpoint, ...] = ()
    forwarder: ProcessIdentity | None = None
    runner: ProcessIdentity = ProcessIdentity()


class OutFile(Value):
    """A declared output: `file` is its name below the attempt's folder, where its bytes are."""

    path: str
    size: int
    sha256: str
    mode: int
    file: str


class Verdict(Value):
    """How an attempt ended; final once written. It is `lost` when it died without telling.

    `cpu_ms` is processor time of all that ran below the attempt's shim; there is none of a shim that was killed.
    `error_code` is one word for machines when it did not end by itself with code 0 or another.
    """

    status: VerdictStatus
    exit_code: int | None = None
    signal: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    started_at: float | None = None
    finished_at: float = 0.0
    duration_ms: int = 0
    cpu_ms: int | None = None
    stdout_total: int = 0
    stderr_total: int = 0
    artifacts: tuple[OutFile, ...] = ()
    output_errors: tuple[OutputError, ...] = ()
    enforced: tuple[str, ...] = ()
    connections: tuple[NetworkConnection, ...] = ()


def require_task_id(task_id: str) -> str:
    """Return *task_id* when it is a safe folder name. Raises BadRequest."""
    if not _TASK_ID.fullmatch(task_id):
        raise BadRequest(f"{task_id[:80]!r} is no task id", errors=["task_id: not letters, digits, '-' and '_'"])
    return task_id


ANSWER_S: Final = 60.0
"""Seconds a launcher may take for an answer; its first one waits for every import."""
REAP_S: Final = 120.0
_LINE: Final = 65536


class WarmStarter:
    """Starts shims through one launcher process, made when it is first needed and again when it died.

    Any thread and any event loop may use it; orders go through one at a time, as a fork takes milliseconds. The
    launcher's first line is the *greeting*: the settings, which may hold secrets and so are no arguments.
    """

    def __init__(self, command: Sequence[str], greeting: bytes) -> None:
        self._command = tuple(command)
        self._greeting = greeting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, folder: Path) -> None:
        """Start the shim of the attempt in *folder*; one that is alive already is left alone.

        Raises ExecFailed, and OSError when the disk is full: then nothing began.
        """
        order = {"start": str(folder)}

        def ask_twice() -> dict[str, object] | None:
            with self._lock:  # if a launcher died, the second one finds the order begun if the first did
                return self._ask(order) or self._ask(order)

        answer = await asyncio.to_thread(ask_twice)
        if answer is not None and answer.get("errno") in shim.FULL:
            raise OSError(answer["errno"], str(answer["error"]), str(folder))
        if answer is None or "error" in answer:
            cause = "it died" if answer is None else answer["error"]
            raise ExecFailed(f"the launcher could not start an attempt: {cause}", code="launcher_failed")

    async def reap(self, engine: str) -> None:
        """End what dead runners left on *engine*. Raises ExecFailed."""
        if words := await self._apart("--reap", engine):
            raise ExecFailed(f"reaping {engine} failed: {words}", code="reap_failed")

    async def probe(self, engine: str) -> str:
        """Return why *engine* starts no programs here, in words for the operator; none when it does.

        The launcher goes when it does not, with what it prepared when it may have been otherwise.
        """
        words = await self._apart("--probe", engine)
        if words:
            await asyncio.to_thread(self.close)
        return words

    async def _apart(self, *words: str) -> str:
        """Do what *words* say in a process of its own, and return what it says when it fails; nothing when it does not."""

        def run() -> subprocess.CompletedProcess[bytes]:
            command, greeting = [*self._command, *words], self._greeting + b"\n"
            return subprocess.run(command, input=greeting, capture_output=True, timeout=REAP_S, check=False)

        try:
            done = await asyncio.to_thread(run)
        except subprocess.TimeoutExpired:
            return f"it took longer than {REAP_S:.0f} s"
        return (done.stderr.decode("utf-8", "replace").strip()[-500:] or "it failed") if done.returncode else ""

    def warm(self) -> None:
        """Start the launcher ahead of the first order."""
        with self._lock:
            self._launcher()

    def close(self) -> None:
        """Let the launcher go; shims stay."""
        with self._lock:
            self._end()

    def _ask(self, order: dict[str, str]) -> dict[str, object] | None:
        """Send an order and read the answer; None when the launcher is dead or mute, and gone by now."""
        process = self._launcher()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], ANSWER_S)[0] and (line := process.stdout.readline(_LINE)):
                answer = json.loads(line)
                return answer if isinstance(answer, dict) else None
        except (OSError, ValueError):
            pass  # a launcher that went away, or is none
        self._end()
        return None

    def _launcher(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # found out by whoever asks it something
            process.stdin.write(self._greeting + b"\n")
            process.stdin.flush()
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_LOG = logging.getLogger("kdskills.jobs")
QUICK_S: Final = 0.005
SLOW_S: Final = 0.1
_LOGS: Final = {"stdout": shim.STDOUT, "stderr": shim.STDERR}


@dataclass(eq=False)
class Attempt:
    """An attempt, found or started; made by `Attempts`. Any process of this host may hold one, and many may at once.

    The *starter* reaps what an engine left when the attempt turns out to be lost.
    """

    folder: Path
    order: AttemptOrder
    starter: WarmStarter | None = None

    def state(self) -> AttemptState:
        """Return where it stands; `lost` is one that died without a verdict."""
        if self.verdict() is not None:
            return "ended"
        if not attempt_alive(self.folder):
            return "ended" if self.verdict() is not None else "lost"
        facts = self.facts()
        return "running" if facts is not None and facts.ready_at is not None else "starting"

    def facts(self) -> AttemptFacts | None:
        """Return the facts its runner wrote; None before its program was started."""
        document = shim.read_json(self.folder / shim.FACTS)
        return None if document is None else AttemptFacts.model_validate(document)

    def verdict(self) -> Verdict | None:
        """Return how it ended; None while it has not."""
        document = shim.read_json(self.folder / shim.EXIT)
        if document is None:
            return None
        try:
            return Verdict.model_validate(document)
        except ValidationError as error:
            return Verdict(status="lost", error_code="lost", error_message=f"its verdict is unreadable: {error}")

    def endpoints_active(self) -> bool:
        """Whether its exposed ports can be reached now."""
        facts = self.facts() if self.verdict() is None else None
        return bool(facts and facts.forwarder and facts.endpoints and shim.lives(facts.forwarder.model_dump()))

    async def until_running(self) -> AttemptFacts | None:
        """Wait until it runs, and is ready if it is a service; None when it ended before."""
        pause = QUICK_S
        while True:
            state = self.state()
            if state in {"ended", "lost"}:
                return None
            if state == "running":
                return self.facts()
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, SLOW_S / 2)

    async def wait(self) -> Verdict:
        """Wait for the end and return the verdict; waiting may be cancelled without ending the attempt.

        One that died without a verdict is given the verdict `lost` here, once and for good, after what its engine left
        was ended: when this returns, nothing of the attempt runs any more.
        """
        pause, alone_since = QUICK_S, None
        while (verdict := self.verdict()) is None:
            if not attempt_alive(self.folder):
                return await self._settle()
            if not await self._shim_died(1.0):
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()  # the shim is dead; its runner still ends what it started
            if time.monotonic() - alone_since > shim.PATIENCE_S:
                facts = self.facts()
                if facts is not None:  # its runner did not end with it: end it, as the shim would have done
                    _send(shim.open_living(facts.runner.model_dump()), signal.SIGKILL)
            await asyncio.sleep(pause)
            pause = min(2 * pause, SLOW_S)
        return verdict

    def cancel(self, reason: str = "") -> bool:
        """Ask it to end; False when it has ended already. `wait` tells when it is over. Works from any process."""
        return cancel_attempt(self.folder, reason)

    def logs(self, stream: LogStream, offset: int = 0, limit: int = 65536) -> LogPiece:
        """Return up to *limit* bytes of *stream* from *offset*; a negative offset counts from the end."""
        return read_log(self.folder / _LOGS[stream], offset, limit, self.order.log_limit)

    def tail(self, stream: LogStream, size: int = 8192) -> LogPiece:
        """Return the last *size* bytes of *stream*."""
        if size <= 0:
            total = self.logs(stream, 0, 0).total
            return LogPiece(total, b"", total, truncated=total > 0)
        return self.logs(stream, -size, size)

    async def _shim_died(self, patience_s: float) -> bool:
        """Wait for the death of the shim; whether it is dead."""
        fd = _shim_of(self.folder)
        if fd is None:
            return True
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(fd, over.set)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await over.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return over.is_set()

    async def _settle(self) -> Verdict:
        """Give an attempt that died its verdict; the lock makes sure that nobody else still could."""
        lock = await asyncio.to_thread(shim.take_lock, self.folder, 0.5)
        if lock is None:
            return await self.wait()
        try:
            early_verdict = self.verdict()
            if early_verdict is not None:
                return early_verdict
            if not os.pread(lock, 1, 0) and not any(
                (self.folder / name).exists() for name in (shim.FACTS, shim.RESULT)
            ):
                return NOT_BEGUN
            trouble = ""  # what could not be ended of what the engine left of dead runners, in words for the verdict
            try:
                if self.starter is not None:
                    await self.starter.reap(self.order.spec.placement.engine)
            except ExecFailed as error:
                trouble = error.message
                _LOG.warning("%s attempt %d: %s", self.order.task_id, self.order.attempt, trouble)
            await asyncio.to_thread(shim.settle, self.folder, trouble)
        finally:
            os.close(lock)
        verdict = self.verdict()
        assert verdict is not None
        return verdict


def cancel_attempt(folder: Path, reason: str = "") -> bool:
    """Ask the attempt in *folder* to end, of which nothing else is read; False when it has ended already.

    On a full disk it may wait a while for somebody to hear it: a shim that has no room to say who it is.
    """
    if (folder / shim.EXIT).exists():
        return False
    while True:
        noted = True
        try:
            shim.write_json(folder / shim.CANCEL, {"reason": reason[:1000]})
        except FileNotFoundError:  # it ended, and its folder was removed
            return False
        except OSError as error:
            if error.errno not in shim.FULL:
                raise
            noted = False
        fd = _shim_of(folder)
        _send(fd, signal.SIGTERM)
        if noted or fd is not None or not attempt_alive(folder):
            return True
        time.sleep(SLOW_S)


def _shim_of(folder: Path) -> int | None:
    """Open the shim that named itself in the lock, if it is still that process; None when it is gone."""
    return shim.open_living(shim.read_identity(folder))


NOT_BEGUN: Final = Verdict(
    status="refused",
    error_code="disk_full",
    error_message="nothing began: there was no room on the disk, or what should have watched it was killed",
)
"""The verdict on an attempt whose shim ended before it began anything; it is written nowhere."""


def _send(fd: int | None, number: int) -> None:
    """Send a signal to the process open as *fd*, and close it."""
    if fd is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def attempt_alive(folder: Path) -> bool:
    """Whether something of the attempt in *folder* still lives: liveness is the lock, never a process number."""
    return shim.lock_taken(folder / shim.LOCK)


RUNS: Final = "runs"
SESSIONS: Final = "sessions"
MAX_LIMITS: Final = 1024
"""Attempts whose logs are read without a look at their orders."""


class Attempts:
    """The attempts below one state folder: its `runs/` and `sessions/`, closed to everybody else.

    Without a *starter*, attempts can only be found.
    """

    def __init__(self, state_dir: Path, starter: WarmStarter | None = None) -> None:
        self._state = state_dir
        self._starter = starter
        self._log_limits: dict[Path, int] = {}

    def session_dir(self, session_key: str) -> Path:
        """Return the folder of a session's files; it need not be there yet."""
        return self._state / SESSIONS / require_task_id(session_key)

    async def start(self, order: AttemptOrder) -> Attempt:
        """Start an attempt and return once its shim holds the lock. Raises ExecFailed, and OSError for a full disk.

        The same attempt may be started again: one that began, whether it lives or not, is only found. So a worker that
        was killed between its decision and the start repeats the call without ever running a program twice.
        """
        assert self._starter is not None
        folder = self._folder(order.task_id, order.attempt)
        await asyncio.to_thread(self._write, folder, order)
        attempt = self.find(order.task_id, order.attempt)
        if attempt is None:
            await self._starter.start(folder)
            attempt = Attempt(folder, order, self._starter)
        return attempt

    async def probe(self, engine: str) -> str:
        """Return why *engine* starts no programs here, in words for the operator; none when it does."""
        assert self._starter is not None
        return await self._starter.probe(engine)

    def find(self, task_id: str, attempt: int) -> Attempt | None:
        """Return an attempt that has begun; None for one that never did, which may still be started."""
        folder = self._folder(task_id, attempt)
        facts = shim.read_json(folder / shim.ORDER)
        if facts is None:
            return None
        if not attempt_alive(folder) and shim.read_identity(folder) is None and not (folder / shim.EXIT).exists():
            return None
        return Attempt(folder, AttemptOrder.from_json(facts), self._starter)

    def log(self, task_id: str, attempt: int, stream: LogStream, offset: int, limit: int) -> LogPiece | None:
        """Return a piece of what an attempt printed, as `Attempt.logs`; None when nothing of it is here.

        Many read one log many times: of its order nothing is read twice.
        """
        folder = self._folder(task_id, attempt)
        kept_bytes = self._log_limits.get(folder)
        if kept_bytes is None or not folder.is_dir():
            begun = self.find(task_id, attempt)
            if begun is None:
                return None
            if len(self._log_limits) >= MAX_LIMITS:
                self._log_limits.clear()
            kept_bytes = self._log_limits[folder] = begun.order.log_limit
        return read_log(folder / _LOGS[stream], offset, limit, kept_bytes)

    def latest(self, task_id: str) -> Attempt | None:
        """Return the task's last attempt that has begun."""
        top = self._state / RUNS / require_task_id(task_id)
        names = [path.name for path in top.iterdir()] if top.is_dir() else []
        numbers = sorted((int(name) for name in names if name.isdigit()), reverse=True)
        return next((attempt for number in numbers if (attempt := self.find(task_id, number)) is not None), None)

    def remove(self, task_id: str) -> bool:
        """Remove everything of a task's attempts; False when one lives and was left."""
        top = self._state / RUNS / require_task_id(task_id)
        if not top.is_dir():
            return True
        if self.living(task_id):
            return False
        shutil.rmtree(top)
        return True

    def living(self, name: str) -> list[Path]:
        """Return the folders of attempts that live, of what `tasks` told; others remove folders meanwhile, or left a file."""
        folders: list[Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in list((self._state / RUNS / name).iterdir()):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if attempt_alive(path):
                        folders.append(path)
        return folders

    def silent(self, task_id: str) -> bool:
        """Whether a task has one attempt, which printed nothing and of which our own side had nothing to say."""
        top = self._state / RUNS / require_task_id(task_id)
        names = [path.name for path in top.iterdir()] if top.is_dir() else []
        logs = [top / name / log for name in names for log in (shim.STDOUT, shim.STDERR, shim.LOG)]
        return len(names) == 1 and not any(log.exists() and log.stat().st_size for log in logs)

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
