"""One run whose tree `kdskills_runtime.landlock_init` starts, watches and ends, driven by a thread of its own.

It serves every engine without a pid namespace that it made itself: the landlock engine's
programs, and launchers that bring walls of their own.

Landlock does not stop a program from changing modes and times of files its uid owns, nor, on older kernels, from
signalling processes of its uid. So a run gets a uid nobody else has: no account, no process, no file but its own. That
is also what makes two promises exact: RLIMIT_NPROC counts per uid, and `kill(-1)` under that uid ends the whole tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kdskills.errors import ExecRefused
from kdskills.execution.cgroup import CgroupLeaf, CgroupParent
from kdskills.execution.check import RunPlan
from kdskills.execution.collect import Collection, collect, new_collection
from kdskills.execution.dirs import private_dir, write_note
from kdskills.execution.landlock.order import KILL_ALL, TERM_ALL
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.owner import is_leftover, leaf_name
from kdskills.execution.payload import MAX_REPORT, apply_report, host_entry
from kdskills.execution.protocol import ReapReport
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel
from kdskills.execution.run import ProgramEnd, status_of
from kdskills.execution.streams import Ending, HeadBuffer, Pump, output_buffers

OFFSET: Final = 1000
COUNT: Final = 64
LEAST: Final = 1000


@dataclass(frozen=True, slots=True)
class UidLease:
    """A uid that is ours alone until `close`."""

    uid: int
    fd: int

    def close(self) -> None:
        """Give the uid back; the caller has seen that no process has it any more."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Uids:
    """The uids of one machine: `OFFSET` above the operator's `sandbox_uid`, `COUNT` of them.

    `sandbox_uid` itself is what other engines' programs have on the host, so it is not among them.
    """

    base: int
    top: Path

    @property
    def all(self) -> range:
        """Every uid of the range."""
        return range(self.base + OFFSET, self.base + OFFSET + COUNT)

    def lease(self) -> UidLease:
        """Return a uid that no account, no process and no other run has.

        Raises:
            ExecRefused: `running_as_root` when the range could hold a real account's uid; else every uid is taken.
        """
        if self.base <= 0 or self.all.start < LEAST or self.all.stop > 0xFFFF:
            raise ExecRefused(
                f"sandbox_uid = {self.base} leaves no uids for programs; use a number between 1 and {0xFFFF - OFFSET - COUNT}",
                code="running_as_root",
                engine="landlock",
            )
        busy = running_uids()
        for uid in self.all:
            if uid not in busy and not _has_account(uid) and (lease := self.take(uid)) is not None:
                if uid not in running_uids():  # somebody may have started under it before we held the lock
                    return lease
                lease.close()
        raise ExecRefused(f"all of the {COUNT} uids for programs are in use; run fewer at a time", engine="landlock")

    def take(self, uid: int) -> UidLease | None:
        """Return *uid* when no other run holds it."""
        fd = os.open(private_dir(self.top) / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return UidLease(uid, fd)


def running_uids() -> set[int]:
    """Return the real, effective and saved uids of every process."""
    all_uids: set[int] = set()
    for _, uids in _processes():
        all_uids.update(uids)
    return all_uids


def processes_of(uid: int) -> list[int]:
    """Return the processes that have *uid* in any way, zombies aside."""
    return [pid for pid, uids in _processes() if uid in uids]


def _processes() -> Iterator[tuple[int, set[int]]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdigit():
            with contextlib.suppress(OSError):
                status = Path("/proc", name, "status").read_text(encoding="utf-8", errors="replace")
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                if fields.get("State", "").split()[:1] != ["Z"]:
                    yield int(name), {int(word) for word in fields.get("Uid", "").split()[:3]}


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


_STATUS_SIZE: Final = 64 * 1024


Order = Callable[[int, int, Sequence[str]], bytes]
"""Builds the order from the payload's descriptor, the report's, and the `cgroup.procs` files of the run's leaf."""


@dataclass(frozen=True, slots=True)
class TreeJob:
    """One checked and staged run.

    Attributes:
        engine: Name of the engine.
        level: Its level.
        plan: The checked request.
        folder: The run's own folders.
        lease: The run's own uid; None when it has ours.
        order: Builds the launcher's order.
        payload: Work order of generated code that travels by descriptors; None for everything else.
        stdin: What the program finds on standard input.
        cgroups: Where a leaf can be made.
        reserve: (memory, processes) the leaf holds beyond the program's limits, for a launcher inside it.
        enforced: Limits that hold.
    """

    engine: str
    level: IsolationLevel
    plan: RunPlan
    folder: RunFolder
    lease: UidLease | None
    order: Order
    payload: bytes | None
    stdin: bytes
    cgroups: CgroupParent | None
    reserve: tuple[int, int]
    enforced: frozenset[str]


class TreeRun:
    """A started run: a `Handle`."""

    def __init__(self, job: TreeJob) -> None:
        self._job = job
        self._stdout, self._stderr = output_buffers(job.plan.request)
        self._report, self._status = HeadBuffer(MAX_REPORT), HeadBuffer(_STATUS_SIZE)
        self._result: Future[ExecResult] = Future()
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._control = -1
        self._leaf: CgroupLeaf | None = None
        self._pump: Pump | None = None
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def bounds(self) -> dict[str, int]:
        """Memory and pids limits as the kernel holds them for this run; empty without a cgroup."""
        return {} if self._leaf is None else self._leaf.bounds()

    @property
    def launcher_pid(self) -> int | None:
        """The watcher's pid, whose descendants are the run; None before it started and after its end."""
        return self._launcher.pid if self._launcher is not None and not self._result.done() else None

    async def wait(self) -> ExecResult:
        """Wait for the end and return the result; cancelling the wait does not end the run."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    async def cancel(self) -> None:
        """End the whole tree and return when it is gone; `wait` then gives `cancelled`."""
        if self._pump is not None:
            self._pump.cancel()
        await asyncio.wait([asyncio.wrap_future(self._result)])

    def signal(self, number: int) -> None:
        """Send a signal to the program; nothing happens when it has ended."""
        if 0 < number < KILL_ALL[0]:
            self._say(bytes([number]))

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        return self._stdout.tail(limit), self._stderr.tail(limit)

    def spawn(self) -> None:
        """Start the launcher and the thread that watches it. Raises OSError when it cannot be started."""
        with ExitStack() as stack:
            pipes = _Pipes(stack)
            if self._job.cgroups is not None:
                limits = self._job.plan.request.limits
                memory, pids = self._job.reserve
                self._leaf = self._job.cgroups.leaf(leaf_name(), limits.memory + memory, limits.pids + pids)
                stack.callback(self._leaf.remove)
            stdin, stdout, stderr = pipes.to_program(), pipes.from_program(), pipes.from_program()
            order, status, control = pipes.to_program(), pipes.from_program(), pipes.to_program()
            code = self._job.payload is not None
            payload = pipes.to_program() if code else (-1, -1)
            report = pipes.from_program() if code else (-1, -1)
            keep = [payload[1], report[1]] if code else []
            procs_files = [] if self._leaf is None else [str(path / "cgroup.procs") for path in self._leaf.folders]
            words = self._job.order(payload[1], report[1], procs_files)
            started = time.monotonic()
            self._launcher = subprocess.Popen(
                [sys.executable, "-I", str(host_entry().with_name("landlock_init.py")), *(str(p[1]) for p in (order, status, control))],
                stdin=stdin[1], stdout=stdout[1], stderr=stderr[1], cwd="/", env={"PATH": "/usr/bin:/bin"},
                pass_fds=[order[1], status[1], control[1], *keep], start_new_session=True, umask=0o022,
            )  # fmt: skip
            pipes.close_theirs()
            self._control = control[0]
            os.set_blocking(self._control, False)
            self._pump = self._made_pump(stdin, stdout, stderr, (order[0], words), status, payload, report)
            self._stack = stack.pop_all()
        threading.Thread(
            target=self._watch, args=(self._pump, started), name=f"kdskills-{self._job.engine}", daemon=True
        ).start()

    def _made_pump(self, stdin: Pipe, stdout: Pipe, stderr: Pipe, order: tuple[int, bytes], status: Pipe, payload: Pipe, report: Pipe) -> Pump:  # fmt: skip
        assert self._launcher is not None
        request = self._job.plan.request
        outputs: list[tuple[int, Callable[[bytes], None]]] = [
            (stdout[0], self._stdout.feed),
            (stderr[0], self._stderr.feed),
            (status[0], self._status.feed),
        ]
        inputs = [order, (stdin[0], self._job.stdin)]
        if self._job.payload is not None:
            outputs.append((report[0], self._report.feed))
            inputs.append((payload[0], self._job.payload))
        fd = os.pidfd_open(self._launcher.pid)
        return Pump(
            fd, outputs, inputs, request.limits.wall_s, lambda: self._say(TERM_ALL), lambda: self._say(KILL_ALL)
        )

    def _say(self, word: bytes) -> None:
        """Send the launcher a command; a launcher that is gone has already ended the tree."""
        with self._lock:
            if self._control >= 0:
                try:
                    os.write(self._control, word)
                except (BrokenPipeError, BlockingIOError):
                    return

    def _watch(self, pump: Pump, started: float) -> None:
        """Drive the pump to the end, collect, and hand over the result. Runs in a thread of its own."""
        assert self._launcher is not None
        try:
            ending = pump.drive(started)
            self._launcher.wait()
            facts = _facts(self._status.value())
            if "left" not in facts:
                facts = {**facts, "left": 0 if self._job.lease is None else end_uid(self._job.lease.uid)}
            result = self.result_of(ending, facts)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._clean_up(pump)
            self._result.set_exception(error)
            return
        self._clean_up(pump)
        self._result.set_result(result)

    def _clean_up(self, pump: Pump) -> None:
        os.close(pump.pidfd)
        with self._lock:
            fd, self._control = self._control, -1
        os.close(fd)
        self._stack.close()
        self._job.folder.remove()
        if self._job.lease is not None:
            self._job.lease.close()

    def result_of(self, ending: Ending, facts: Mapping[str, Any]) -> ExecResult:
        """Return the result of a run whose end the launcher reported; the run's folders still exist."""
        trouble = self._trouble(facts) if ending.reason == "exited" else None
        program_end = ProgramEnd(ending.reason, facts.get("code"), facts.get("signal"), ending.duration_s, trouble)
        status, exit_code, number, error = status_of(program_end)
        if facts["left"]:
            status, exit_code, number = "infra_error", None, None
            error = ExecError("end", "survived", f"{facts['left']} processes could not be ended")
        oom = self._leaf.oom_kills() if self._leaf is not None else 0
        if oom and ending.reason == "exited" and exit_code != 0 and trouble is None:
            status, error = "oom", None
        if facts.get("over") and ending.reason == "exited":
            name = "work" if facts["over"] == str(self._job.folder.work) else "tmp"
            status, error = "limit", ExecError("program", name, f"{name} outgrew its bound and the run was ended")
        result = ExecResult(
            status=status,
            exit_code=exit_code,
            signal=number,
            stdout=self._stdout.stream(),
            stderr=self._stderr.stream(),
            duration_s=program_end.duration_s,
            engine=self._job.engine,
            level=self._job.level,
            limits_enforced=self._job.enforced,
            error=error,
        )
        if trouble is not None or facts["left"]:
            return result
        outputs = self._collected()
        result = replace(result, artifacts=tuple(outputs.artifacts), artifact_errors=tuple(outputs.errors))
        return apply_report(result, self._report.value()) if self._job.payload is not None else result

    def _collected(self) -> Collection:
        limits = self._job.plan.request.limits
        if not self._job.plan.globs:
            return new_collection((), limits)
        with self._job.folder.opened() as work:
            return collect(work, self._job.plan.globs, limits)

    def _trouble(self, facts: Mapping[str, Any]) -> ExecError | None:
        """Return why no program ran or why its end was not seen, or None."""
        if facts.get("event") == "ended":
            return None
        if facts.get("event") == "failed":
            stage, number = str(facts["stage"]), int(facts["errno"])
            program = self._job.plan.argv[0] if self._job.plan.argv else "python3"
            subject = {"exec": program, "workdir": self._job.plan.cwd}.get(stage, stage)
            code = {"exec": "program_missing", "workdir": "workdir_missing"}.get(stage, "setup_failed")
            return ExecError(stage, code, f"{subject}: {os.strerror(number) if number else facts.get('found', '')}")
        words = self._stderr.tail(2000).decode("utf-8", "replace").strip()
        if facts.get("event") == "started":
            return ExecError("end", "init_lost", "the launcher ended before the program")
        return ExecError("setup", "setup_failed", words or "the launcher ended before the program began")


Pipe = tuple[int, int]
"""Our end and the program's."""


class _Pipes:
    """Pipes of a run that is being started: ours stay with whoever takes them, all are closed when that fails."""

    def __init__(self, stack: ExitStack) -> None:
        self._ours: list[int] = []
        self._theirs: list[int] = []
        self._done = False
        stack.callback(self._close)

    def to_program(self) -> Pipe:
        """Make a pipe that we write."""
        reading, writing = os.pipe()
        self._ours.append(writing)
        self._theirs.append(reading)
        return writing, reading

    def from_program(self) -> Pipe:
        """Make a pipe that we read."""
        reading, writing = os.pipe()
        self._ours.append(reading)
        self._theirs.append(writing)
        return reading, writing

    def close_theirs(self) -> None:
        """Close what the launcher has now; ours belong to the pump from here on."""
        while self._theirs:
            os.close(self._theirs.pop())
        self._ours.clear()

    def _close(self) -> None:
        for fd in (*self._theirs, *self._ours):
            os.close(fd)


def end_uid(uid: int) -> int:
    """End every process of a leased uid, and return how many could not be ended."""
    command = [sys.executable, "-I", str(host_entry().with_name("landlock_init.py")), "--end", str(uid)]
    return subprocess.run(
        command, env={"PATH": "/usr/bin:/bin"}, cwd="/", stdin=subprocess.DEVNULL, check=False
    ).returncode


def _facts(data: bytes) -> dict[str, Any]:
    """Return the launcher's last line."""
    lines = data.splitlines()
    facts: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if facts.get("event") == "failed":
        facts["left"] = 0
    return facts


def note_uid(folder: RunFolder, uid: int) -> None:
    """Write down which uid a run has, beside its owner."""
    write_note(folder.path / "uid", str(uid))


def leftovers(top: Path, uids: Uids) -> ReapReport:
    """End what dead owners left below *top*; a uid that another run holds by now is left alone."""
    ended: list[str] = []
    failed: list[str] = []
    for path in sorted(top.iterdir()):
        try:
            labels = json.loads((path / "owner.json").read_text(encoding="utf-8"))
            note = path / "uid"
            uid = int(note.read_text(encoding="ascii")) if note.is_file() else None
        except FileNotFoundError:
            continue  # being made, or being removed
        except (OSError, ValueError) as error:
            failed.append(f"run {path.name}: {error}")
            continue
        if not is_leftover(labels):
            continue
        survivors = _end(uids, uid, ended) if uid in uids.all else 0
        if survivors:
            failed.append(f"run {path.name}: {survivors} processes of uid {uid} could not be ended")
            continue
        RunFolder(path, path.name).remove()
        ended.append(f"run {path.name}")
    return ReapReport(tuple(ended), tuple(failed))


def _end(uids: Uids, uid: int | None, ended: list[str]) -> int:
    """End the processes of *uid* unless another run holds it; return how many are left."""
    lease = None if uid is None else uids.take(uid)
    if lease is None:
        return 0
    try:
        ended += [f"process {pid}" for pid in processes_of(lease.uid)]
        return end_uid(lease.uid)
    finally:
        lease.close()
