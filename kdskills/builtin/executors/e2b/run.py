"""One run in a sandbox, from the wait for its lease to the answer.

`kdskills_runtime.remote_init` gets the order as a file, and its answer is read as one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from kdskills.builtin.executors.e2b.sandboxes import HOME, PreparedSandbox, Trouble
from kdskills.errors import ExecRefused
from kdskills.execution.check import RunPlan, require_limits
from kdskills.execution.container import NONCE_SIZE, ContainerAnswer, rlimits
from kdskills.execution.payload import apply_report
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel, Status, Stream
from kdskills.execution.run import status_of
from kdskills.execution.seccomp import program_bytes
from kdskills.execution.streams import GRACE_S, TailBuffer, output_buffers

if TYPE_CHECKING:
    from pathlib import Path

    from kdskills.builtin.executors.e2b.sandboxes import SandboxLease
    from kdskills.execution.check import RunPlan


PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_NONCE = bytes(NONCE_SIZE)


def build_order(
    plan: RunPlan,
    argv: Sequence[str],
    inputs: Sequence[tuple[str, bytes]],
    skills: Mapping[str, str],
    *,
    seccomp: bytes,
    payload: bytes | None,
) -> bytes:
    """Return the order file: length, JSON, and the bytes it announces.

    Args:
        plan: The checked request.
        argv: Program and arguments, `{payload_fd}` and `{report_fd}` standing for descriptors.
        inputs: Path and content of each input.
        skills: Folder of each skill in the sandbox, by full id.
        seccomp: The filter for the sandbox's architecture.
        payload: Payload of generated code.
    """
    request, limits = plan.request, plan.request.limits
    env = {"PATH": PATH, "HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", **request.env}  # noqa: S108 - inside
    order = {
        "argv": list(argv),
        "env": env,
        "cwd": plan.cwd,
        "wall": limits.wall_s,
        "grace": GRACE_S,
        "limits": rlimits(limits),
        "memory": limits.memory,
        "pids": limits.pids,
        "work_size": limits.work_size,
        "tmp_size": limits.tmp_size,
        "stdout": limits.stdout,
        "stderr": limits.stderr,
        "skills": dict(skills),
        "seccomp": seccomp.hex(),
        "inputs": [(path, len(data)) for path, data in inputs],
        "executable": list(request.executable),
        "stdin": len(request.stdin),
        "payload": None if payload is None else len(payload),
        "outputs": list(request.outputs),
        "max_files": limits.output_files,
        "max_bytes": limits.output_size,
    }
    head = json.dumps(order).encode("ascii")
    return b"".join([len(head).to_bytes(8, "big"), head, *(data for _, data in inputs), request.stdin, payload or b""])


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """The content of an answer file: the init's answer, both streams, whether memory was bounded and ran out."""

    answer: ContainerAnswer
    stdout: Stream
    stderr: Stream
    oom: bool
    memory: bool


def read_answer(plan: RunPlan, data: bytes) -> AnswerFile | None:
    """Read an answer file; None when it is not one."""
    limits = plan.request.limits
    try:
        size = 8 + int.from_bytes(data[:8], "big")
        head = json.loads(data[8:size])
        (out, out_total), (err, err_total) = head["streams"]
        if not (0 <= out <= limits.stdout and 0 <= err <= limits.stderr and out <= out_total and err <= err_total):
            return None
        stdout, stderr = data[size : size + out], data[size + out : size + out + err]
        oom, memory = bool(head["oom"]), "memory" in head["limits"]
    except (ValueError, KeyError, TypeError):
        return None
    answer = ContainerAnswer(plan, _NONCE, TailBuffer(0))
    answer.feed(_NONCE + data[size + out + err :])
    answer.close()
    return AnswerFile(
        answer,
        Stream(stdout, out_total, out_total > len(stdout)),
        Stream(stderr, err_total, err_total > len(stderr)),
        oom,
        memory,
    )


@dataclass(slots=True)
class Talk:
    """Reads the JSON lines of our init: a live view of the program's output, and its last word."""

    stdout: Callable[[bytes], None]
    stderr: Callable[[bytes], None]
    last: dict[str, Any] = field(default_factory=dict)
    _partial_line: str = ""

    def feed(self, text: str) -> None:
        """Take the next piece of text."""
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        for raw in lines:
            try:
                line = json.loads(raw)
                if line["kind"] == "live":
                    self.stdout(base64.b64decode(line["out"]))
                    self.stderr(base64.b64decode(line["err"]))
                else:
                    self.last = line
            except (ValueError, KeyError, TypeError):
                continue  # no line of the init's: the login shell's profile wrote something


COLLECT_S: Final = 20.0
HOLD_S: Final = 180.0
"""What a lease allows for beyond the run's own time: making a sandbox, deliveries, collecting."""
_FORWARDED: Final = {
    int(number): f"{int(number)}"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
} | {int(signal.SIGKILL): "RTMIN+2"}


class Sandboxes(Protocol):
    """What gives a run its owner's lease and sandbox."""

    def lease(self, job: E2bJob, given_up: threading.Event) -> SandboxLease | None:
        """Wait for the owner's lease; None when *given_up* was set first."""
        ...

    def sandbox(self, lease: SandboxLease, job: E2bJob) -> PreparedSandbox:
        """Return the owner's sandbox, a new one or the one it has."""
        ...

    def lost(self, lease: SandboxLease, job: E2bJob) -> None:
        """Forget a sandbox that is gone."""
        ...

    def release(self, lease: SandboxLease, job: E2bJob) -> None:
        """Release the lease."""
        ...


@dataclass(frozen=True, slots=True)
class E2bJob:
    """Everything decided before a sandbox is asked for."""

    plan: RunPlan
    key: str
    labels: dict[str, str]
    staged: dict[str, tuple[str, Path]]
    inputs: list[tuple[str, bytes]]
    payload: bytes | None
    best_effort: frozenset[str]
    engine: str
    level: IsolationLevel


class E2bRun:
    """A run in a sandbox: waiting, running or over. Made by `E2bExecutor.start`."""

    def __init__(self, sandboxes: Sandboxes, job: E2bJob) -> None:
        self._sandboxes = sandboxes
        self._job = job
        self._stdout, self._stderr = output_buffers(job.plan.request)
        self._future: Future[ExecResult] = Future()
        self._cancelled = threading.Event()
        self._box: PreparedSandbox | None = None
        self._pid: int | None = None

    def begin(self) -> None:
        """Start the run's thread, in which it waits for its owner's lease first."""
        threading.Thread(target=self._thread, name="kdskills-e2b", daemon=True).start()

    async def wait(self) -> ExecResult:
        """Wait for the end; waiting may be cancelled without ending the run.

        Raises:
            ExecRefused: Nothing was run: E2B refused, or its sandboxes cannot hold what was asked.
        """
        return await asyncio.shield(asyncio.wrap_future(self._future))

    async def cancel(self) -> None:
        """End the run by its process id: TERM, grace, KILL of everything it started."""
        self._cancelled.set()
        await asyncio.to_thread(self._end)

    def signal(self, number: int) -> None:
        """Send one of the polite signals, or KILL, to the program."""
        word = _FORWARDED.get(number)
        if word is not None:
            threading.Thread(target=self._send, args=(word,), name="kdskills-e2b-signal", daemon=True).start()

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far; in a flood, what was seen of them."""
        return self._stdout.tail(limit), self._stderr.tail(limit)

    def _end(self) -> None:
        """Ask the init in the sandbox to end the run; when it does not, KILL it, which ends everything it started."""
        attempts = 0
        while not self._future.done():
            if self._pid is not None:
                if attempts == 0:
                    self._send("RTMIN+1")
                elif self._box is not None:
                    with contextlib.suppress(Trouble):  # gone already, or out of reach: the thread finds out, too
                        self._box.machine.end(self._pid)
                attempts += 1
            with contextlib.suppress(FutureTimeout):
                self._future.exception(timeout=(2 * GRACE_S if attempts == 1 else GRACE_S) if attempts else 0.05)

    def _send(self, word: str) -> None:
        box, pid = self._box, self._pid
        if box is not None and pid is not None and not self._future.done():
            with contextlib.suppress(Trouble):  # the sandbox is gone, and the program with it
                box.machine.run(f"kill -{word} {pid}" if word.isdigit() else f"kill -s {word} {pid}")

    def _thread(self) -> None:
        """Run to the end and set the result or the error. Runs in a thread of its own."""
        try:
            result = self._run()
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it was
            self._future.set_exception(error)
            return
        self._future.set_result(result)

    def _run(self) -> ExecResult:
        lease = self._sandboxes.lease(self._job, self._cancelled)
        if lease is None:
            return self._result("cancelled", None, 0.0)
        try:
            try:
                folder = self._ready(lease)
            except Trouble as trouble:
                raise ExecRefused(
                    f"no E2B sandbox is available: {trouble}", engine="e2b", reason=trouble.code
                ) from None
            assert self._box is not None
            if self._cancelled.is_set():
                return self._result("cancelled", None, 0.0)
            return self._drive(self._box, folder, lease)
        finally:
            self._sandboxes.release(lease, self._job)

    def _ready(self, lease: SandboxLease) -> str:
        """Get the sandbox, deliver skills and order, and return the run's folder; a lost sandbox is replaced once."""
        for last in (False, True):
            try:
                box = self._sandboxes.sandbox(lease, self._job)
                require_limits(box.facts.limits, self._job.best_effort, "e2b")
                skills = {name: box.deliver(tree, path) for name, (tree, path) in self._job.staged.items()}
                folder = f"{HOME}/runs/{lease.token}-{secrets.token_hex(8)}"
                box.machine.write(f"{folder}/order", self._order(box, skills))
                self._box = box
            except Trouble as trouble:
                if trouble.code != "gone" or last:
                    raise
                self._sandboxes.lost(lease, self._job)
            else:
                return folder
        raise AssertionError("unreachable")

    def _order(self, box: PreparedSandbox, skills: dict[str, str]) -> bytes:
        job = self._job
        argv = job.plan.argv
        if job.payload is not None:
            argv = (box.facts.python, "-I", box.entry, "--payload-fd", "{payload_fd}", "--report-fd", "{report_fd}")
        return build_order(
            job.plan, argv, job.inputs, skills, seccomp=program_bytes(box.facts.arch), payload=job.payload
        )

    def _drive(self, box: PreparedSandbox, folder: str, lease: SandboxLease) -> ExecResult:
        """Run it and read the answer; the machine may go away at any moment."""
        started = time.monotonic()
        wall = self._job.plan.request.limits.wall_s
        talk = Talk(self._stdout.feed, self._stderr.feed)
        trouble: Trouble | None = None
        words = ""
        try:
            code, err = box.machine.follow(
                box.command("run", folder, str(lease.token)), wall + COLLECT_S, self._started, talk.feed
            )
            words = f"exit code {code}: {err.strip()[-300:]}"
        except Trouble as error:
            trouble = error
        self._pid = None
        if self._cancelled.is_set():
            return self._result("cancelled", None, time.monotonic() - started)
        if trouble is not None and trouble.code == "gone":
            self._sandboxes.lost(lease, self._job)
            return self._failed("sandbox_lost", str(trouble), started)
        if trouble is None and talk.last.get("kind") != "done":
            return self._not_done(box, lease, talk, words, started)
        # A broken connection does not end the program: its answer may still come.
        patience = 0.0 if trouble is None else max(0.0, started + wall + COLLECT_S - time.monotonic())
        try:
            read = read_answer(self._job.plan, self._fetch(box, f"{folder}/answer", patience))
        except Trouble as error:
            return self._failed("sandbox_lost" if error.code == "gone" else "engine_failed", str(error), started)
        if read is None:
            return self._failed("answer_broken", "the sandbox left an answer that cannot be understood", started)
        return self._answered(read, box)

    def _started(self, pid: int) -> None:
        self._pid = pid
        if self._cancelled.is_set():
            self._send("RTMIN+1")

    def _fetch(self, box: PreparedSandbox, path: str, patience: float) -> bytes:
        """Read the answer, waiting for it for *patience* seconds. Raises Trouble."""
        until = time.monotonic() + patience
        while True:
            try:
                return box.machine.read(path)
            except Trouble as trouble:
                if trouble.code == "gone" or time.monotonic() >= until or self._cancelled.is_set():
                    raise
            self._cancelled.wait(0.5)

    def _not_done(
        self, box: PreparedSandbox, lease: SandboxLease, talk: Talk, words: str, started: float
    ) -> ExecResult:
        """Return the result of a run our init did not finish; the API says whether the sandbox went away with it."""
        match talk.last.get("kind"):
            case "fenced":
                return self._failed("lease_lost", "another process took the sandbox over", started)
            case "failed":
                return self._failed("setup_failed", str(talk.last.get("message"))[:300], started)
        with contextlib.suppress(Trouble):  # an API that does not answer says nothing about the sandbox
            if not box.machine.living():
                self._sandboxes.lost(lease, self._job)
                return self._failed("sandbox_lost", f"the sandbox {box.machine.id} is gone", started)
        return self._failed("init_lost", f"the sandbox ended the run without an answer ({words})", started)

    def _failed(self, code: str, message: str, started: float) -> ExecResult:
        return self._result("infra_error", ExecError("sandbox", code, message), time.monotonic() - started)

    def _result(self, status: Status, error: ExecError | None, duration: float) -> ExecResult:
        """Return the result of a run without an answer: what was seen of its output is all there is."""
        return ExecResult(
            status=status,
            exit_code=None,
            signal=None,
            stdout=self._stdout.stream(),
            stderr=self._stderr.stream(),
            duration_s=duration,
            engine=self._job.engine,
            level=self._job.level,
            limits_enforced=frozenset() if self._box is None else self._box.facts.limits,
            error=error,
        )

    def _answered(self, read: AnswerFile, box: PreparedSandbox) -> ExecResult:
        """Return the result that an answer file describes."""
        end = read.answer.end
        if end is None or not read.answer.done:
            message = read.answer.broken or "the answer broke off"
            return self._result("infra_error", ExecError("sandbox", "answer_broken", message), 0.0)
        for buffer, stream in ((self._stdout, read.stdout), (self._stderr, read.stderr)):
            buffer.catch_up(stream)
        status, exit_code, number, error = status_of(end)
        result = ExecResult(
            status="oom" if read.oom and status == "nonzero" else status,
            exit_code=exit_code,
            signal=number,
            stdout=read.stdout,
            stderr=read.stderr,
            duration_s=end.duration_s,
            engine=self._job.engine,
            level=self._job.level,
            limits_enforced=box.facts.limits - (frozenset() if read.memory else {"memory"}),
            artifacts=tuple(read.answer.collection.artifacts),
            artifact_errors=tuple(read.answer.collection.errors),
            error=error,
        )
        if self._job.payload is not None and end.trouble is None:
            return apply_report(result, read.answer.report or b"")
        return result
