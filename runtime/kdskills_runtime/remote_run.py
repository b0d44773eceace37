"""One run in a remote machine, from its walls to its answer. Used by `remote_init`, as root; standard library only.

The machine is the wall towards us. The walls made here, of namespaces, fresh folders, a cgroup leaf and a program
without privileges, keep runs apart from each other and from what delivers them: code, skills and control files belong to
root, programs run as uid 10001 and see a machine that is read-only but for `/work`, `/tmp` and `/dev/shm`.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from pathlib import Path

from kdskills_runtime import processes
from kdskills_runtime.outbox import place_inputs, send_outputs
from kdskills_runtime.processes import FORWARDED, NO_HANDLER, call, memory_file, reaped, send
from kdskills_runtime.stage0 import LIMITS

TYPE_CHECKING = False  # the name type checkers know
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MAX_REPORT = 2 * 1024 * 1024
CHUNK = 1 << 16
LIVE = 8192
LIVE_FAST = 256 * 1024
"""After this many bytes the live view is renewed only once a second."""

UID = 10001
CGROUPS = "/sys/fs/cgroup"
PARENT = "kdskills"

NEW_NS = 0x00020000
NEW_MACHINE = 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces of host name, IPC, processes and network."""
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _RDONLY = 2, 4, 4096, 16384, 1 << 18, 1
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1

END, KILL = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
WATCHED = FORWARDED | {END, KILL, signal.SIGCHLD}


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount *source* at *target*."""
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data.encode())


def read_only(path: str, *, recursive: bool, off: bool = False) -> None:
    """Make the mount at *path* read-only and free of setuid programs; or *off*, writable again."""
    attributes = struct.pack("=QQQQ", 0 if off else _RDONLY | _NOSUID, _RDONLY if off else 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    call("syscall", _MOUNT_SETATTR, -100, path.encode(), flags, attributes, len(attributes))


def fresh_folders(work_size: int, tmp_size: int, mounts: dict[str, str]) -> None:
    """Take this process into mounts of its own, with empty folders for a program and its *mounts* only: paths below /skills
    or /env, and the folders to be seen there.
    """
    call("unshare", NEW_NS)
    mount("none", "/", None, _REC | _PRIVATE)
    inside = f"uid={UID},gid={UID},mode=0700,nr_inodes=16384,size="
    for mount_point, size in (("/work", work_size), ("/tmp", tmp_size), ("/dev/shm", tmp_size)):  # noqa: S108 - fresh here
        Path(mount_point).mkdir(parents=True, exist_ok=True)
        mount("tmpfs", mount_point, "tmpfs", _NOSUID | _NODEV, f"{inside}{size}")
    for top in ("/skills", "/env"):
        Path(top).mkdir(exist_ok=True)
        mount("tmpfs", top, "tmpfs", _NOSUID | _NODEV, "mode=0755,size=1m")
    for mount_point, folder in mounts.items():
        Path(mount_point).mkdir()
        mount(folder, mount_point, None, _BIND)


def close_machine() -> None:
    """As pid 1 of new namespaces: mount /proc, make everything but the fresh folders read-only, bring loopback up."""
    call("unshare", NEW_NS)
    read_only("/", recursive=True)
    mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    mount("/proc/sys", "/proc/sys", None, _BIND)
    read_only("/proc/sys", recursive=False)
    for mount_point in ("/work", "/tmp", "/dev/shm"):  # noqa: S108 - fresh here
        read_only(mount_point, recursive=False, off=True)
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, name))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


class RunLeaf:
    """A cgroup leaf of one run, in hierarchies of version 1 or 2."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def doors(self) -> list[int]:
        """Return descriptors; a process that writes `0` to each moves itself into the leaf."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self._folders]

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out."""
        count = 0
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                for line in _lines(folder / name):
                    count += int(line.split()[1]) if line.startswith("oom_kill ") else 0
        return count

    def remove(self) -> None:
        """KILL what is inside and remove the leaf; gives up after a second."""
        until = time.monotonic() + 1
        while any(folder.is_dir() for folder in self._folders) and time.monotonic() < until:
            for folder in self._folders:
                for pid in _lines(folder / "cgroup.procs"):
                    processes.send(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):  # still in use; tried again
                    folder.rmdir()
            time.sleep(0.002)


def make_leaf(name: str, memory: int, pids: int) -> RunLeaf | None:
    """Return a new leaf with these bounds, or None where cgroups cannot be made."""
    try:
        if Path(CGROUPS, "cgroup.controllers").exists():
            parent = Path(CGROUPS, PARENT)
            _write(Path(CGROUPS, "cgroup.subtree_control"), "+memory +pids")
            parent.mkdir(exist_ok=True)
            _write(parent / "cgroup.subtree_control", "+memory +pids")
            folders = [parent / name]
            bounds = [(0, "memory.max", memory), (0, "pids.max", pids)]
            swap = (0, "memory.swap.max", 0)
        else:
            folders = [Path(CGROUPS, "memory", PARENT, name), Path(CGROUPS, "pids", PARENT, name)]
            bounds = [(0, "memory.limit_in_bytes", memory), (1, "pids.max", pids)]
            swap = (0, "memory.memsw.limit_in_bytes", memory)
        for folder in folders:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
        for index, knob, bound in bounds:
            _write(folders[index] / knob, str(bound))
    except OSError:
        return None
    if (folders[0] / swap[1]).exists():
        with contextlib.suppress(OSError):  # a machine without swap accounting has no swap to use up either
            _write(folders[0] / swap[1], str(swap[2]))
    return RunLeaf(folders)


def leaves(prefix: str) -> Iterator[RunLeaf]:
    """Return the leaves whose names begin with *prefix*."""
    if Path(CGROUPS, "cgroup.controllers").exists():
        tops = [Path(CGROUPS, PARENT)]
    else:
        tops = [Path(CGROUPS, "memory", PARENT), Path(CGROUPS, "pids", PARENT)]
    for top in tops:
        for folder in sorted(top.glob(f"{prefix}*")) if top.is_dir() else ():
            yield RunLeaf([folder])


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def try_walls() -> str | None:
    """Build the walls without a program, in processes of their own; return why that failed, or None."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        first = -1
        try:
            fresh_folders(1 << 20, 1 << 20, {})
            call("unshare", NEW_MACHINE)
            first = os.fork()
            if first == 0:
                close_machine()
            else:
                os.waitpid(first, 0)
        except BaseException as error:  # noqa: BLE001 - whatever it was, these are no walls
            reason = os.strerror(getattr(error, "errno", None) or 1)
            problem = f"the machine cannot be closed: {reason}" if first == 0 else str(error)
            os.write(write, problem.encode("utf-8", "replace"))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:  # noqa: PTH123 - a descriptor, not a path
        words = pipe.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return words or None


class Tail:
    """Keeps the last bytes of a stream, counts all, and shows what was added since the last look."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._data, self._fresh = bytearray(), bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes."""
        self.total += len(data)
        self._data += data
        if len(self._data) > 2 * self.limit:
            del self._data[: len(self._data) - self.limit]
        self._fresh = (self._fresh + data)[-LIVE:]

    def tail(self) -> bytes:
        """Return the last bytes."""
        return bytes(self._data[-self.limit :]) if self.limit else b""

    def look(self) -> str:
        """Return what came since the last look, at most its end, as base64."""
        text = base64.b64encode(self._fresh).decode("ascii")
        self._fresh.clear()
        return text


class RemoteRun:
    """A program behind its walls: its *order*, see `remote_init`, and the bytes that announces."""

    def __init__(self, order: dict[str, Any], bodies: memoryview, name: str) -> None:
        self._order, self._bodies = order, bodies
        self._leaf = make_leaf(name, order["memory"], order["pids"])
        self._streams = (Tail(order["stdout"]), Tail(order["stderr"]))
        self._report = bytearray()
        self._reason = "exited"
        self._live_sent, self._live_next = 0, 0.0
        self._status = b""

    def serve(self, answer: Path, say: Callable[[dict[str, Any]], None]) -> None:
        """Run the program and write the answer. Raises OSError when the walls cannot be built."""
        order = self._order
        fresh_folders(order["work_size"], order["tmp_size"], order["mounts"])
        place_inputs(self._take, order["inputs"], order.get("executable", []))
        for top, folders, files in os.walk("/work"):
            for name in (*folders, *files):
                os.chown(Path(top, name), UID, UID)
        stdin = memory_file(self._take(order["stdin"]))
        payload = None if order["payload"] is None else memory_file(self._take(order["payload"]))
        doors = [] if self._leaf is None else self._leaf.doors()
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "report", "status")}
        call("unshare", NEW_MACHINE)
        started = time.monotonic()
        first = os.fork()
        if first == 0:
            _first_process(order, doors, {name: theirs for name, (_, theirs) in pipes.items()}, stdin, payload)
        for _, theirs in pipes.values():
            os.close(theirs)
        for number in (*FORWARDED, KILL, END):
            signal.signal(number, NO_HANDLER)
        wake_read = processes.wake_pipe()
        end = self._watch(first, {name: ours for name, (ours, _) in pipes.items()}, wake_read, started, say)
        oom = self._leaf is not None and self._leaf.oom_kills() > 0
        if self._leaf is not None:
            self._leaf.remove()
        self._write(answer, end, oom=oom)

    def _take(self, size: int) -> memoryview:
        piece, self._bodies = self._bodies[:size], self._bodies[size:]
        return piece

    def _watch(
        self, first: int, pipes: dict[str, int], wake: int, started: float, say: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Read every pipe to its end, which comes when the last process behind the walls is gone."""
        deadline = started + self._order["wall"]
        ending = False
        names = {fd: name for name, fd in pipes.items()}
        while names:
            if self._reason == "cancelled" and not ending:
                deadline = min(deadline, time.monotonic())
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                if self._reason == "exited":
                    self._reason = "timeout"
                send(first, signal.SIGKILL if ending else END)
                deadline = time.monotonic() + self._order["grace"]
                ending = True
                continue
            ready, _, _ = select.select([*names, wake], [], [], min(seconds_left, 0.25))
            for fd in ready:
                if fd == wake:
                    numbers = set(os.read(fd, 4096))
                    if END in numbers and self._reason == "exited":
                        self._reason = "cancelled"
                    for number in numbers & (FORWARDED | {KILL}):
                        send(first, number)
                    continue
                data = os.read(fd, CHUNK)
                if data:
                    self._feed(names[fd], data)
                else:
                    del names[fd]
            self._live(say)
        os.waitpid(first, 0)
        return self._end_line(time.monotonic() - started)

    def _feed(self, name: str, data: bytes) -> None:
        if name == "status":
            self._status += data
        elif name == "report":
            self._report += data[: MAX_REPORT - len(self._report)]
        else:
            self._streams[name == "stderr"].feed(data)

    def _live(self, say: Callable[[dict[str, Any]], None]) -> None:
        """Send new output to the live view, often at first and rarely in a flood."""
        now = time.monotonic()
        if now < self._live_next:
            return
        out, err = (stream.look() for stream in self._streams)
        if out or err:
            say({"kind": "live", "out": out, "err": err})
            self._live_sent += len(out) + len(err)
            self._live_next = now + (0.02 if self._live_sent < LIVE_FAST else 1.0)

    def _end_line(self, duration: float) -> dict[str, Any]:
        """Return how the program ended, as far as its first process could tell."""
        end: dict[str, Any] = {"kind": "end", "reason": self._reason, "duration": duration}
        kind, _, number = self._status.decode("ascii").partition(":")
        if kind in {"code", "signal"}:
            end[kind] = int(number)
        elif kind:
            end.update(stage=kind, errno=int(number))
        elif self._reason == "exited":
            end["signal"] = int(signal.SIGKILL)  # the first process was killed, and everything with it
        return end

    def _write(self, answer: Path, end: dict[str, Any], *, oom: bool) -> None:
        tails = [stream.tail() for stream in self._streams]
        head = json.dumps(
            {
                "streams": [[len(data), stream.total] for data, stream in zip(tails, self._streams, strict=True)],
                "oom": oom,
                "limits": ["memory"] if self._leaf is not None else [],
            }
        ).encode("ascii")
        out = io.BytesIO()
        out.write(b"".join([len(head).to_bytes(8, "big"), head, *tails]))
        out.write(json.dumps(end).encode("ascii") + b"\n")
        if self._order["payload"] is not None:
            out.write(json.dumps({"kind": "report", "size": len(self._report)}).encode("ascii") + b"\n" + self._report)
        send_outputs(out, "/work", self._order["outputs"], self._order["max_files"], self._order["max_bytes"])
        out.write(b'{"kind": "done"}\n')
        fd = os.open(answer.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(out.getbuffer())
        answer.with_suffix(".new").rename(answer)


def _first_process(
    order: dict[str, Any], doors: list[int], pipes: dict[str, int], stdin: int, payload: int | None
) -> None:
    """As pid 1 of the new namespaces: start the program, reap, and take everything with it. Never returns."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        for door in doors:
            os.write(door, b"0")
        for fd, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(pipes[name], fd)
        limits = dict(order["limits"])
        if not doors:
            limits["nproc"] = (order["pids"],) * 2  # one run at a time: all of this uid is this run
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
        for name, bound in limits.items():
            resource.setrlimit(LIMITS[name], tuple(bound))
        processes.give_up(UID)
        processes.prctl(processes.PR_SET_NO_NEW_PRIVS, 1)
        processes.set_filter(bytes.fromhex(order["seccomp"]))

    try:
        processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
        close_machine()
        trouble_read, trouble_write = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        pid = os.fork()
        if pid == 0:
            processes.become(order, stdin, payload, pipes["report"], trouble_write, prepare)
        os.close(trouble_write)
        for name in ("stdout", "stderr", "report"):
            os.close(pipes[name])
        words = os.read(trouble_read, 4096)
        code = os.waitstatus_to_exitcode(_wait(pid))
        os.write(pipes["status"], words or (f"code:{code}" if code >= 0 else f"signal:{-code}").encode("ascii"))
    except OSError as error:
        os.write(pipes["status"], f"walls:{error.errno or 0}".encode("ascii"))
    finally:
        os._exit(0)


def _wait(pid: int) -> int:
    """Reap until *pid* ends and act on signals meanwhile; return its status."""
    while True:
        statuses = dict(reaped())
        if pid in statuses:
            return statuses[pid]
        number = signal.sigwaitinfo(WATCHED).si_signo  # taken one by one: handlers could nest in a flood
        if number == END:
            send(-1, signal.SIGTERM)
        elif number == KILL:
            send(pid, signal.SIGKILL)
        elif number != signal.SIGCHLD:
            send(pid, number)
