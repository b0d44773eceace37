"""Runs whose program is out of our hands, and the host's half of the exchange with its init: write an order, read an answer.

The answer comes out of a container that ran an untrusted program. Bytes before the nonce are the program's own output;
what follows it is authentic, and is checked all the same: paths, globs, sizes, counts.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kdskills.execution.check import RunPlan
from kdskills.execution.payload import MAX_REPORT, framed, program_variables
from kdskills.execution.processes import rlimits
from kdskills.execution.request import ExecError, ExecResult
from kdskills.execution.run import ExecutionRun, ProgramEnd, not_started, status_of
from kdskills.execution.stage import Collection, finish
from kdskills.execution.streams import GRACE_S, TailBuffer

NONCE_SIZE: Final = 32
MAX_LINE: Final = 64 * 1024


def build_order(
    plan: RunPlan,
    argv: Sequence[str],
    inputs: Sequence[tuple[str, bytes]],
    *,
    payload: bytes | None,
    **further: object,
) -> bytes:
    """Return the order for the far side's init: its length, itself, and the bytes it announces; *further* stands in it."""
    request, limits = plan.request, plan.request.limits
    order = {
        "argv": argv,
        "env": program_variables(request),
        "cwd": plan.cwd,
        "wall": limits.wall_s,
        "grace": GRACE_S,
        "limits": rlimits(limits),
        "inputs": [(path, len(data)) for path, data in inputs],
        "executable": request.executable,
        "stdin": len(request.stdin),
        "payload": None if payload is None else len(payload),
        "outputs": request.outputs,
        "max_files": limits.output_files,
        "max_bytes": limits.output_size,
        **further,
    }
    return framed(order, *(data for _, data in inputs), request.stdin, payload or b"")


class Archive(NamedTuple):
    """A tar that is the same for the same files, and its digest."""

    data: bytes
    digest: str

    @classmethod
    def from_files(cls, files: list[tuple[str, Path]]) -> Archive:
        """Return the archive of (path inside, file, folder or link of this host)."""
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in sorted(files):
                info = tar.gettarinfo(str(path), arcname=name)
                mode = 0o755 if info.isdir() or info.mode & 0o111 else 0o644
                info.uid = info.gid = info.mtime = 0
                info.uname, info.gname, info.mode = "", "", mode
                if info.islnk():  # another name of a file that came before: files of packages are shared that way
                    info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
                with path.open("rb") if info.isreg() else nullcontext() as stream:
                    tar.addfile(info, stream)
        data = sink.getvalue()
        return cls(data, hashlib.sha256(data).hexdigest())


def tree_files(folder: Path, inside: str = "") -> list[tuple[str, Path]]:
    """Return everything below *folder* by its path inside an archive, below *inside*."""
    return [(f"{inside}{path.relative_to(folder)}", path) for path in folder.rglob("*")]


def container_options(
    plan: RunPlan, image: str, mounts: Mapping[str, Path], seccomp: str, largest: int
) -> dict[str, Any]:
    """Return the SDK's keyword arguments of a locked-down container.

    *image* is an id, never a name that could be pulled, and *mounts* are folders of this host, by path inside. *largest* is
    how many bytes `container_init` itself must be able to write, which the file size limit may not stop.
    """
    limits = plan.request.limits
    bounds = rlimits(limits) | {"fsize": (max(limits.fsize, largest),) * 2}
    tmpfs = "rw,exec,nosuid,nodev,uid=10001,gid=10001,mode=0700,nr_inodes=16384,size="
    return {
        "image": image,
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true", f"seccomp={seccomp}"],
        "pids_limit": limits.pids + 2 + (plan.request.network != "none"),  # docker-init, container_init, the helper
        "mem_limit": limits.memory,
        "memswap_limit": limits.memory,
        "nano_cpus": 1_000_000_000,
        "user": "10001:10001",
        "ipc_mode": "private",
        "tmpfs": {"/work": f"{tmpfs}{limits.work_size}", "/tmp": f"{tmpfs}{limits.tmp_size}"},  # noqa: S108 - inside
        "shm_size": limits.tmp_size,
        "ulimits": [{"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in bounds.items()],
        "oom_score_adj": 500,
        "log_config": {"Type": "none"},
        "init": True,
        "hostname": "sandbox",
        "stdin_open": True,
        "working_dir": "/work",
        "mounts": [
            {"Type": "bind", "Source": str(folder), "Target": inside, "ReadOnly": True}
            for inside, folder in sorted(mounts.items())
        ],
    }


class RemoteRun(ExecutionRun):
    """A run whose program an init of ours ends for us: asked to, and made to when it does not answer."""

    patience_s: float = GRACE_S
    """Seconds the init has to end the program politely."""

    @abstractmethod
    def kill(self, attempt: int) -> bool:
        """Ask the init to end the program at attempt 0, force it later; False when there is none to ask yet."""

    def stop(self) -> None:
        """End the program in a thread: a signal sent before it runs is lost, so this goes on until the run is over."""
        threading.Thread(target=self._end, name=f"kdskills-{self.engine.name}-end", daemon=True).start()

    def answered(self, answer: ContainerAnswer, end: ProgramEnd, *, oom: bool) -> ExecResult:
        """Return the result an answer describes that came to its end."""
        oom = oom and status_of(end)[0] == "nonzero"
        return self.result(end, answer.collection, report=answer.report or b"", verdict=("oom", None) if oom else None)

    def unanswered(self, status: Literal["timeout", "cancelled"] | ExecError, duration: float) -> ExecResult:
        """Return the result of a run without an answer: what was seen of its output is all there is."""
        reason, trouble = ("exited", status) if isinstance(status, ExecError) else (status, None)
        return self.result(ProgramEnd(reason, None, None, duration, trouble))

    def _end(self) -> None:
        attempts = 0
        while not self.done:
            attempts += self.kill(attempts)
            patience = (0.05, self.patience_s, GRACE_S)[min(attempts, 2)]
            with suppress(FutureTimeout):
                self._result.exception(timeout=patience)


class Demux:
    """Takes docker's attach stream apart: 8-byte heads, then bytes of stdout (1) or stderr (2)."""

    def __init__(self, stdout: Callable[[bytes], None], stderr: Callable[[bytes], None]) -> None:
        self._sinks = {1: stdout, 2: stderr}
        self._head, self._bytes_left = b"", 0
        self._sink: Callable[[bytes], None] = stdout

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        view = memoryview(data)
        while view:
            if self._bytes_left == 0:
                take = 8 - len(self._head)
                self._head += bytes(view[:take])
                view = view[take:]
                if len(self._head) == 8:
                    self._bytes_left = int.from_bytes(self._head[4:], "big")
                    self._sink = self._sinks.get(self._head[0], lambda _unknown: None)
                    self._head = b""
                continue
            piece = view[: self._bytes_left]
            view = view[len(piece) :]
            self._bytes_left -= len(piece)
            self._sink(bytes(piece))


@dataclass(slots=True)
class ContainerAnswer:
    """Reads standard output: the program's own up to the nonce, then the answer. `broken` says why reading stopped;
    `done` that the answer came to its end.
    """

    plan: RunPlan
    nonce: bytes
    stdout: TailBuffer
    end: ProgramEnd | None = None
    report: bytes | None = None
    done: bool = False
    broken: str | None = None
    answering: bool = False
    oom: bool = False
    collection: Collection = field(init=False)
    _buffer: bytearray = field(default_factory=bytearray)
    _reading: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        limits = self.plan.request.limits
        self.collection = Collection(self.plan.globs, limits.output_files, limits.output_size)
        self._reading = self._read()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of standard output."""
        if not self.done and self.broken is None:
            self._buffer += data
            next(self._reading, None)

    def close(self) -> None:
        """Finish reading: standard output has ended."""
        if not self.answering:
            self.stdout.feed(bytes(self._buffer))
        elif not self.done and self.broken is None:
            self.broken = "the answer ended too early"
        self._buffer.clear()
        finish(self.collection)

    def _read(self) -> Iterator[None]:
        """Read everything; gives way whenever it needs more bytes."""
        while not self._find_nonce():
            yield
        try:
            while not self.done:
                while (end := self._buffer.find(b"\n")) < 0:
                    if len(self._buffer) > MAX_LINE:
                        self.broken = "a line of the answer is too long"
                    yield
                event = self._event(json.loads(self._take(end + 1)))
                yield from event
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.broken = f"a line of the answer cannot be understood: {error!r}"

    def _find_nonce(self) -> bool:
        """Pass on the program's own output, and return whether the nonce was read."""
        at = self._buffer.find(self.nonce)
        # What may be the nonce's first bytes is held back; usually nothing, so output is shown at once.
        sizes = range(min(NONCE_SIZE - 1, len(self._buffer)), 0, -1)
        held_back = next((size for size in sizes if self._buffer.endswith(self.nonce[:size])), 0)
        self.stdout.feed(self._take(at if at >= 0 else len(self._buffer) - held_back))
        self._take(NONCE_SIZE if at >= 0 else 0)
        self.answering = at >= 0
        return self.answering

    def _event(self, line: dict[str, Any]) -> Iterator[None]:
        """Act on one line of the answer and the bytes it announces; raises when it is not of the protocol."""
        match line["kind"]:
            case "end":
                trouble = None
                if "stage" in line:
                    trouble = not_started(self.plan, str(line["stage"]), os.strerror(int(line["errno"])))
                self.oom = line.get("oom") is True
                self.end = ProgramEnd(
                    reason="timeout" if line["reason"] == "timeout" else "exited",
                    code=int(line["code"]) if "code" in line else None,
                    signal=int(line["signal"]) if "signal" in line else None,
                    duration_s=float(line["duration"]),
                    trouble=trouble,
                )
            case "report" if 0 <= int(line["size"]) <= MAX_REPORT:
                while len(self._buffer) < int(line["size"]):
                    yield
                self.report = self._take(int(line["size"]))
            case "file" if 0 <= int(line["size"]) <= self.plan.request.limits.output_size:
                path, mode, size = str(line["path"]) or "/", int(line["mode"]), int(line["size"])
                while len(self._buffer) < size:
                    yield
                data = self._take(size)
                if any(glob.matches(tuple(path.split("/"))) for glob in self.plan.globs):
                    self.collection.accept(path, data, mode)
                else:
                    self.collection.refuse(path, "not_declared", "no declared output names it")
            case "problem":
                self.collection.refuse(str(line["path"])[:1024], str(line["code"])[:64], str(line["message"])[:512])
            case "done":
                self.done = True
            case _:
                raise ValueError(line["kind"])

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
