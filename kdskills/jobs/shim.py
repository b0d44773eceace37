"""The shim."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import secrets
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ORDER: Final = "order.json"
LOCK: Final = "lock"
FACTS: Final = "facts.json"
CANCEL: Final = "cancel"
FENCED: Final = "fenced"
RESULT: Final = "result.json"
EXIT: Final = "exit.json"
LOG: Final = "shim.log"
STDOUT: Final = "stdout.log"
STDERR: Final = "stderr.log"
OUT: Final = "out"
ROOM: Final = ".room"
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
DISK_FULL: Final = 74  # exit code of a runner that found the disk full after its program had begun
NO_ROOM: Final = 73  # that of one whose program did not begin
ROOM_BYTES: Final = 128 * 1024  # kept free for the verdict of each attempt, so that a full disk does not take it
ROOM_S: Final = 30.0  # how long a verdict waits for room on a disk that is full all the same
PATIENCE_S: Final = 15.0
"""Seconds a runner has to end its sandbox once it was asked to; then it is killed and leftovers are reaped."""
FENCE_S: Final = 2.0
"""Seconds for the same once the host's lease is over: another host may begin a few seconds later."""
REAP_S: Final = 60.0
_TREE_S: Final = 30.0
_CANNOT_KEEP: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
"""Errors of a file system on which no room can be kept."""
_NO_ROOM: Final = "the disk was full when this was written"
_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})
_END_SIGNALS: Final = _SIGNALS - {signal.SIGCHLD}


def write_json(path: Path, facts: object, *, durable: bool = False) -> None:
    """Replace *path* with *facts* at once: a reader sees the old text or the new, never a part."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as sink:
            json.dump(facts, sink)
            sink.flush()
            if durable:
                os.fsync(sink.fileno())
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_in_room(path: Path, facts: dict[str, Any], *, durable: bool = False, words: str | None = None) -> None:
    """Write *facts* of an attempt as `write_json`: on a full disk with the room kept for the verdict, or once there is some.

    With *words*, facts that had no room at first say so by them in their `error_message`. Raises OSError when there was no room
    within `ROOM_S`, or the disk is broken.
    """
    end, pause = time.monotonic() + ROOM_S, 0.01
    while True:
        try:
            write_json(path, facts, durable=durable)
        except OSError as error:
            if error.errno not in FULL or time.monotonic() >= end:
                raise
            (path.parent / ROOM).unlink(missing_ok=True)
        else:
            return
        message = facts.get("error_message") or ""
        if words is not None and words not in message:
            facts = facts | {"error_message": f"{message}; {words}" if message else words}
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def write_verdict(folder: Path, verdict: dict[str, Any]) -> None:
    """Write the verdict on the attempt in *folder*; one that had no room at first says so. Raises OSError as `write_in_room`."""
    write_in_room(folder / EXIT, verdict, durable=True, words=_NO_ROOM)
    (folder / ROOM).unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the facts in *path*, or None when it is not there."""
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return facts if isinstance(facts, dict) else {}


def take_lock(folder: Path, patience_s: float = 2.0, name: str = LOCK) -> int | None:
    """Return a lock, the attempt's unless named, held by us; None when it is held for longer than a look at it takes."""
    import fcntl

    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(fd)
                return None
            time.sleep(0.002)
        except BaseException:  # raised again: the descriptor is nobody's then
            os.close(fd)
            raise
        else:
            return fd


def lock_taken(path: Path) -> bool:
    """Whether somebody holds the lock *path*; nobody does when it is not there. A look at it holds it for a moment."""
    import fcntl

    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def identity(pid: int) -> dict[str, str | int]:
    """Return what tells process *pid* from any other that ever has the same number."""
    return {"pid": pid, "started": _started(pid), "boot": _text(Path("/proc/sys/kernel/random/boot_id"))}


def lives(process: dict[str, Any]) -> bool:
    """Whether the process of this identity still runs."""
    pid = process.get("pid")
    return (
        isinstance(pid, int)
        and process.get("boot") == _text(Path("/proc/sys/kernel/random/boot_id"))
        and process.get("started") not in {"", None}
        and process.get("started") == _started(pid)
    )


def read_identity(folder: Path) -> dict[str, Any] | None:
    """Return who the shim of the attempt in *folder* is or was; None when there was none."""
    try:
        facts = json.loads(_text(folder / LOCK))
    except ValueError:
        return None
    return facts if isinstance(facts, dict) else None


def settle(folder: Path, trouble: str = "") -> None:
    """Write the verdict on an attempt whose shim died without one; its lock is held by the caller.

    A result the runner still wrote counts, but for one that only says that the runner was ended with its shim.
    *trouble* is what could not be ended of it.
    """
    cancel_requested = (folder / CANCEL).exists()
    result = read_json(folder / RESULT)
    if result is None or (result.get("status") == "cancelled" and not cancel_requested):
        result = _without_result(folder, None, cancel_requested=cancel_requested, overdue=False, started=time.time())
        result["error_message"] = f"{result['error_message']}; {trouble}" if trouble else result["error_message"]
    write_verdict(folder, result)


def open_living(process: dict[str, Any] | None) -> int | None:
    """Open the process of this identity as a descriptor that means no other; None when it is gone."""
    if process is None:
        return None
    try:
        fd = os.pidfd_open(int(process["pid"]))
    except (OSError, ValueError, KeyError):
        return None
    if lives(process):
        return fd
    os.close(fd)
    return None


def watch(folder: Path, lock: int, run: Callable[[], int], reap: Callable[[], int]) -> None:
    """Be the shim of the attempt in *folder* until its verdict is written; the runner shares the *lock* that is held.

    *run* is called in the runner: it runs the order and returns its exit code. *reap* is called in a further process
    when the runner died without a result: it ends what its engine left.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by the launcher, which would take our children's codes away
    _prctl(_SET_CHILD_SUBREAPER, 1)
    order = read_json(folder / ORDER) or {}
    limit, lease = order.get("backstop_s"), order.get("lease_file")
    lease_path = None if lease is None else Path(lease)
    if not _has_room(folder, lock, lease_path):
        os.ftruncate(lock, 0)
        return
    started, cancel_requested, overdue = time.time(), (folder / CANCEL).exists(), False
    status: int | None = None
    if not cancel_requested:
        backstop_s = None if limit is None else float(limit)
        status, cancel_requested, overdue = _attend(_child(run), folder, backstop_s, lease_path)
    _end_tree()
    result = read_json(folder / RESULT)
    if result is None and status is not None:
        # what the engine of a killed runner left: containers, remote runs, cgroups
        pid, end = _child(reap), time.monotonic() + REAP_S
        while _reaped(pid) is None and time.monotonic() < end:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)
        _end_tree()
    if result is None:
        result = _without_result(folder, status, cancel_requested=cancel_requested, overdue=overdue, started=started)
    elif overdue and result.get("status") == "cancelled":
        result["status"] = "timeout"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # whatever ran below us was waited for by now
    result |= {"cpu_ms": round(1000 * (used.ru_utime + used.ru_stime))}
    if (folder / FENCED).exists():
        result |= {"status": "lost", "error_code": "lost", "error_message": "the lease of its host was over"}
    write_verdict(folder, result)


def _has_room(folder: Path, lock: int, lease: Path | None) -> bool:
    """Say in the *lock* who we are and keep room on the disk for the verdict, waiting for it; False when nothing may begin.

    Until there is room, a lock that names nobody means that nothing began, which needs none.
    """
    end = time.monotonic() + ROOM_S
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps(identity(os.getpid())).encode(), 0)
            with os.fdopen(os.open(folder / ROOM, flags, 0o600), "wb") as room:
                os.posix_fallocate(room.fileno(), 0, ROOM_BYTES)
        except OSError as error:
            if error.errno in _CANNOT_KEEP:
                return True
            if error.errno not in FULL:
                raise
        else:
            return True
        over = time.monotonic() >= end or (lease is not None and _lease_over(lease))
        if over or signal.sigtimedwait(_END_SIGNALS, 0.2) is not None or (folder / CANCEL).exists():
            (folder / ROOM).unlink(missing_ok=True)
            return False


def full_disk_of(error: BaseException) -> OSError | None:
    """Return the error of a full disk that *error* came of; None when it came of something else."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def children(pid: int) -> list[int]:
    """Return the direct children of *pid*."""
    child_pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            child_pids += [int(word) for word in _text(Path(task.path, "children")).split()]
    return child_pids


def _child(work: Callable[[], int]) -> int:
    """Fork a process that does *work* and dies with us."""
    ours = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        _prctl(_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == ours:
            code = work()
    except BaseException:  # noqa: BLE001 - the end of this process: what went wrong is in the shim's log
        traceback.print_exc()
    finally:
        os._exit(code)


def _lease_over(path: Path) -> bool:
    """Whether the time this host's work was ours until is over, by a clock that counts sleep; without a word it is over."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME) > float(_text(path))
    except ValueError:
        return True


def _attend(
    runner: int, folder: Path, backstop_s: float | None, lease: Path | None = None
) -> tuple[int | None, bool, bool]:
    """Wait for the runner's end; ask it to end when we are asked to, when it is overdue or fenced, and then insist.

    Returns its wait status, whether an end was asked for, and whether it was overdue.
    """
    cancel_requested = overdue = False
    overdue_at = None if backstop_s is None else time.monotonic() + backstop_s
    kill_at: float | None = None
    while True:
        status = _reaped(runner)
        if status is not None:
            return status, cancel_requested, overdue
        now = time.monotonic()
        if kill_at is None and overdue_at is not None and now >= overdue_at:
            overdue = True
        fenced = kill_at is None and lease is not None and _lease_over(lease)
        if fenced:
            (folder / FENCED).touch(mode=0o600)
            cancel_requested = True
        if kill_at is None and (cancel_requested or overdue):
            os.kill(runner, signal.SIGTERM)
            kill_at = now + (FENCE_S if fenced else PATIENCE_S)
        elif kill_at is not None and now >= kill_at:
            os.kill(runner, signal.SIGKILL)
        bounds = [moment - now for moment in (overdue_at if kill_at is None else kill_at,) if moment is not None]
        longest = 3600.0 if lease is None else 0.5
        received = signal.sigtimedwait(_SIGNALS, max(0.05, min([*bounds, longest])))
        cancel_requested = cancel_requested or (received is not None and received.si_signo in _END_SIGNALS)


def _reaped(child_pid: int) -> int | None:
    """Collect every dead child; return the status of *child_pid* when it is among them."""
    child_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return child_status
        if pid == 0:
            return child_status
        if pid == child_pid:
            child_status = status


def _end_tree() -> None:
    """KILL until nothing is left below us: orphans become our children, so children are all there is to look at."""
    end = time.monotonic() + _TREE_S
    pause = 0.0005
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _without_result(
    folder: Path, status: int | None, *, cancel_requested: bool, overdue: bool, started: float
) -> dict[str, object]:
    """Return the verdict on an attempt whose runner left no result."""
    if overdue:
        verdict, code, message = "timeout", "timeout", "it ran out of time, and its runner did not end it"
    elif cancel_requested:
        verdict, code, message = "cancelled", "canceled", "it was cancelled"
    elif status is not None and os.waitstatus_to_exitcode(status) == NO_ROOM:
        verdict, code, message = "refused", "disk_full", "the disk of the state folder was full: nothing began"
    elif status is not None and os.waitstatus_to_exitcode(status) == DISK_FULL:
        verdict, code = "infra_error", "disk_full"
        message = "the disk of the state folder was full: nothing could be kept"
    elif status is not None and os.WIFEXITED(status):
        verdict, code = "infra_error", "runner_failed"
        message = f"the process that ran the program gave up with code {os.WEXITSTATUS(status)}; its words are in {LOG}"
    else:
        how = "everything that watched the program" if status is None else "the process that ran the program"
        verdict, code, message = "lost", "lost", f"{how} was killed before the program ended"
    facts = read_json(folder / FACTS) or {}
    begun, now = float(facts.get("started_at") or started), time.time()
    if verdict == "refused":
        return {"status": verdict, "error_code": code, "error_message": message, "finished_at": now}
    return {
        "status": verdict,
        "error_code": code,
        "error_message": message,
        "started_at": begun,
        "finished_at": now,
        "duration_ms": max(0, round((now - begun) * 1000)),
        "stdout_total": _size(folder / STDOUT),
        "stderr_total": _size(folder / STDERR),
    }


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _started(pid: int) -> str:
    """Return when *pid* started in ticks since boot; empty when there is no such process, or only a zombie."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return "" if not fields or fields[0] == "Z" else fields[19]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
