"""Processes, for what starts programs: system calls, identities, signals, and ending whole trees."""

from __future__ import annotations

import ctypes
import os
import signal
import time

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
LAST_CAPABILITY = 63
LEAST_UID = 1000
PATIENCE_S = 2.0
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
#: The handler of signals that arrive through the wakeup descriptor: a C function that does nothing. A handler in Python
#: could be interrupted by the next signal, and a flood would nest handlers until the stack is full.
NO_HANDLER = dict[int, object]().get


def call(name: str, *arguments: Any) -> int:
    """Make a call Python has no name for and return its result. Raises OSError."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, pointer: bytes | None = None) -> None:
    """Set a property of this process. Raises OSError."""
    call("prctl", option, ctypes.c_ulong(value), pointer, None, None)


def set_filter(program: bytes) -> None:
    """Put a system call filter in force. Raises OSError."""
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a length, and after padding a pointer
    prctl(PR_SET_SECCOMP, 2, (len(program) // 8).to_bytes(8, "little") + ctypes.addressof(code).to_bytes(8, "little"))


def encoded(text: str) -> bytes:
    """Return a text of an order as the bytes it stands for."""
    return text.encode("utf-8", "surrogateescape")


def memory_file(data: bytes | memoryview) -> int:
    """Return a descriptor of a file in memory holding *data*, at its beginning."""
    fd = os.memfd_create("input")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def wake_pipe() -> int:
    """Return a descriptor from which the numbers of signals that arrive can be read."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake


def become(
    order: dict[str, Any], stdin: int, payload: int | None, report: int, trouble: int, prepare: Callable[[], None]
) -> NoReturn:
    """In a child: put everything in place and become the program of *order*; never returns.

    Generated code reads *payload* and writes *report*, whose numbers take the places of `{payload_fd}` and `{report_fd}`
    in the arguments. *prepare* does what only this launcher does, limits among it. *trouble* gets `stage:errno` when no
    program was started.
    """
    stage = "limits"
    try:
        os.setsid()
        for restored in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(restored, signal.SIG_DFL)
        os.dup2(stdin, 0)
        argv = [encoded(word) for word in order["argv"]]
        if payload is not None:
            os.set_inheritable(payload, True)
            os.set_inheritable(report, True)
            numbers = {b"{payload_fd}": payload, b"{report_fd}": report}
            argv = [str(numbers[word]).encode() if word in numbers else word for word in argv]
        prepare()
        stage, cwd = "workdir", encoded(order["cwd"])
        if cwd.startswith(b"/work/"):
            os.makedirs(cwd, exist_ok=True)  # noqa: PTH103 - pathlib costs 3 ms to import
        os.chdir(cwd)
        stage = "exec"
        env = {encoded(name): encoded(value) for name, value in order["env"].items()}
        os.execvpe(argv[0], argv, env)  # noqa: S606 - argv by execve is the contract
    except (OSError, ValueError) as error:
        os.write(trouble, f"{stage}:{getattr(error, 'errno', 0) or 0}".encode())
    finally:
        os._exit(127)


def give_up(uid: int) -> None:
    """Become *uid* for good, without groups and capabilities. Raises OSError when any of them remains. From here on
    nothing can be imported: the interpreter's own files may be closed to *uid*.
    """
    if uid < LEAST_UID:
        raise OSError(0, f"{uid} is no uid of a run")
    for capability in range(LAST_CAPABILITY + 1):  # no program that is started from here may gain one
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the last this kernel knows; what it could not drop, the canary sees
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with open("/proc/self/status", "rb") as stream:  # noqa: PTH123 - pathlib costs 3 ms
        masks = (line.split()[1] for line in stream if line.startswith((b"CapEff", b"CapPrm", b"CapInh")))
        capabilities = [int(mask, 16) for mask in masks]
    if os.getresuid() != (uid, uid, uid) or len(capabilities) != 3 or any(capabilities):
        raise OSError(0, "privileges remain")


def send(pid: int, number: int) -> bool:
    """Send a signal; False when there is no process to receive it."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reaped() -> Iterator[tuple[int, int]]:
    """Reap every dead child, and give the pid and wait status of each."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def send_all(uid: int | None, number: int) -> None:
    """Send a signal to every process of *uid* at once, as that uid itself, which may signal nobody else.

    One call to `kill(-1)` cannot be outrun by forking. A helper that was killed by the others is followed by another.
    Without a uid of their own, they are the descendants of this process, which orphans are handed to as well.
    """
    if uid is None:
        for pid in descendants(os.getpid()):
            send(pid, number)
        return
    for _ in range(100):
        pid = os.fork()
        if pid == 0:
            try:
                give_up(uid)
                os.kill(-1, number)
            except OSError:
                os._exit(3)  # no process to signal, or not allowed to become that uid: `end_all` counts the survivors
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            return


def end_all(uid: int | None) -> int:
    """KILL every process of *uid*, or without one every descendant of this process; return how many survive for two seconds."""
    until = time.monotonic() + PATIENCE_S
    while True:
        send_all(uid, signal.SIGKILL)
        dict(reaped())
        survivors = len(descendants(os.getpid())) if uid is None else _alive(uid)
        if not survivors or time.monotonic() >= until:
            return survivors
        time.sleep(0.002)


def descendants(pid: int) -> list[int]:
    """Return every living descendant of *pid*."""
    pids, queue = [], [pid]
    while queue:
        for task in os.listdir(f"/proc/{queue[0]}/task") if os.path.isdir(f"/proc/{queue[0]}/task") else ():  # noqa: PTH112, PTH208
            try:
                with open(f"/proc/{queue[0]}/task/{task}/children", "rb") as stream:  # noqa: PTH123
                    queue += [int(word) for word in stream.read().split()]
            except OSError:
                continue
        pids.append(queue.pop(0))
    return pids[1:]


def _alive(uid: int) -> int:
    """Return how many processes have *uid*; zombies waiting for another parent do not count."""
    count = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs 3 ms to import
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status", "rb") as stream:  # noqa: PTH123 - pathlib costs 3 ms to import
                    fields = dict(line.split(b":", 1) for line in stream if b":" in line)
            except OSError:
                continue
            dead = fields.get(b"State", b"").split()[:1] in ([b"Z"], [b"X"])
            count += not dead and str(uid).encode() in fields.get(b"Uid", b"").split()[:3]
    return count
