"""E2B: programs in remote virtual machines, one per owner, reused while they live.

Only the SDK's public calls are used. Inside a sandbox, `kdskills_runtime.remote_init` walls each run in once more, so
that runs of one owner do not meet and limits are held where they can be. Orders, outputs and answers are files.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from kdskills.builtin.executors.e2b.sandboxes import (
    HOME,
    Cloud,
    PreparedSandbox,
    SandboxLease,
    SandboxLeases,
    Trouble,
    code_archive,
    owner_key,
    prepare,
)
from kdskills.errors import ExecRefused
from kdskills.execution.check import RunPlan, require_limits
from kdskills.execution.container import NONCE_SIZE, Archive, ContainerAnswer, RemoteRun
from kdskills.execution.container import build_order as build_container_order
from kdskills.execution.dirs import private_dir
from kdskills.execution.owner import owner_labels
from kdskills.execution.payload import SKILLS_DIR, build_payload, entry_argv
from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory, ProbeCheck, ReapReport
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel, Stream
from kdskills.execution.run import ExecutionEngine, ExecutionRun, judge
from kdskills.execution.seccomp import program_bytes
from kdskills.execution.stage import read_inputs
from kdskills.execution.streams import GRACE_S, TailBuffer
from kdskills.hooks import Register, hookimpl

KEY_VARIABLE: Final = "E2B_API_KEY"
_NONCE = bytes(NONCE_SIZE)


def build_order(
    plan: RunPlan,
    box: PreparedSandbox,
    inputs: Sequence[tuple[str, bytes]],
    mounts: Mapping[str, str],
    payload: bytes | None,
) -> bytes:
    """Return the order file: a container's, and what else a machine without walls must be told. *mounts* are folders in
    the sandbox, by the path the program sees them at.
    """
    limits, argv = plan.request.limits, plan.argv
    if payload is not None:
        argv = entry_argv(box.facts.python, box.entry)
    sizes = {name: getattr(limits, name) for name in ("memory", "pids", "work_size", "tmp_size", "stdout", "stderr")}
    walls = {**sizes, "mounts": mounts, "seccomp": program_bytes(box.facts.arch).hex()}
    return build_container_order(plan, argv, inputs, payload=payload, **walls)


class AnswerFile(NamedTuple):
    """The content of an answer file: the init's answer, both streams, whether memory ran out, and whether it was bounded."""

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
    streams = Stream(stdout, out_total, out_total > len(stdout)), Stream(stderr, err_total, err_total > len(stderr))
    return AnswerFile(answer, *streams, oom, memory)


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
_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FORWARDED: Final = {**{int(number): f"{int(number)}" for number in _POLITE}, int(signal.SIGKILL): "RTMIN+2"}


class E2bRun(RemoteRun):
    """A run in a sandbox: waiting, running or over."""

    engine: E2bExecutor
    patience_s = 2 * GRACE_S
    _box: PreparedSandbox | None = None
    _pid: int | None = None

    def prepare(self) -> None:
        """Decide everything that can be decided here."""
        engine, request, settings = self.engine, self.request, self.engine.options.e2b
        self._plan = engine.checked(request)
        _ = engine.cloud  # refused without a key or the SDK: here, not once the run has begun
        self.key = owner_key(request.owner, settings.api_url or "", settings.template)
        self.labels = owner_labels(request.owner, request.request_id or secrets.token_hex(8))
        folders = engine.mounts(request)
        names = {f"{SKILLS_DIR}/{mount.id}": f"skills/{mount.tree.removeprefix('sha256:')}" for mount in request.skills}
        self._deliveries = {inside: (names.get(inside, inside[1:]), path) for inside, path in folders.items()}
        self._inputs = read_inputs(request.inputs, request.limits)
        self._payload = build_payload(request) if request.code is not None else None

    def perform(self) -> ExecResult:
        """Wait for the owner's sandbox and run in it. Raises ExecRefused: none is to be had, or none that can hold this."""
        self.tell_started()
        hold_s = self.request.limits.wall_s + HOLD_S
        lease = self.engine.leases.acquire(self.key, self.labels, hold_s, self.cancelled)
        if lease is None:
            return self.unanswered("cancelled", 0.0)
        self._lease = lease
        try:
            self._box, folder = self._ready(lease)
            self.enforced = self._box.facts.limits
            if self.cancelled.is_set():
                return self.unanswered("cancelled", 0.0)
            return self._drive(self._box, folder)
        except Trouble as trouble:
            raise ExecRefused(f"no E2B sandbox is available: {trouble}", engine="e2b", reason=trouble.code) from None
        finally:
            self.engine.release(lease, self)

    def kill(self, attempt: int) -> bool:
        """Ask the init to end the run by its process id; then KILL it, which ends everything it started."""
        if self._pid is None:
            return False
        if attempt == 0:
            self._send("RTMIN+1")
        elif self._box is not None:
            with contextlib.suppress(Trouble):  # gone already, or out of reach: the thread finds out, too
                self._box.machine.end(self._pid)
        return True

    def signal(self, number: int) -> None:
        """Send one of the polite signals, or KILL, to the program."""
        word = _FORWARDED.get(number)
        if word is not None:
            threading.Thread(target=self._send, args=(word,), name="kdskills-e2b-signal", daemon=True).start()

    def _send(self, word: str) -> None:
        box, pid = self._box, self._pid
        if box is not None and pid is not None and not self.done:
            with contextlib.suppress(Trouble):  # the sandbox is gone, and the program with it
                box.machine.run(f"kill -{word} {pid}" if word.isdigit() else f"kill -s {word} {pid}")

    def _ready(self, lease: SandboxLease) -> tuple[PreparedSandbox, str]:
        """Return the sandbox with skills and order in it, and the run's folder; a lost sandbox is replaced once."""
        for last in (False, True):
            try:
                box = self.engine.sandbox(lease, self)
                require_limits(box.facts.limits, self.engine.best_effort, "e2b")
                mounts = {inside: box.deliver(name, path) for inside, (name, path) in self._deliveries.items()}
                folder = f"{HOME}/runs/{lease.token}-{secrets.token_hex(8)}"
                order = build_order(self._plan, box, self._inputs, mounts, self._payload)
                box.machine.write(f"{folder}/order", order)
            except Trouble as trouble:
                if trouble.code != "gone" or last:
                    raise
                self.engine.lost(lease, self)
            else:
                return box, folder
        raise AssertionError("unreachable")

    def _drive(self, box: PreparedSandbox, folder: str) -> ExecResult:
        """Run it and read the answer; the machine may go away at any moment."""
        self._began = time.monotonic()
        patience, talk = self.request.limits.wall_s + COLLECT_S, Talk(self.stdout.feed, self.stderr.feed)
        trouble: Trouble | None = None
        words = ""
        try:
            command = box.command("run", folder, str(self._lease.token))
            code, err = box.machine.follow(command, patience, self._note_pid, talk.feed)
            words = f"exit code {code}: {err.strip()[-300:]}"
        except Trouble as error:
            trouble = error
        self._pid = None
        if self.cancelled.is_set():
            return self.unanswered("cancelled", time.monotonic() - self._began)
        if trouble is not None and trouble.code == "gone":
            self.engine.lost(self._lease, self)
            return self._failed("sandbox_lost", str(trouble))
        if trouble is None and talk.last.get("kind") != "done":
            return self._not_done(box, talk, words)
        # A broken connection does not end the program: its answer may still come.
        until = self._began + (0.0 if trouble is None else patience)
        try:
            read = read_answer(self._plan, self._fetch(box, f"{folder}/answer", until))
        except Trouble as error:
            return self._failed("sandbox_lost" if error.code == "gone" else "engine_failed", str(error))
        if read is None:
            return self._failed("answer_broken", "the sandbox left an answer that cannot be understood")
        return self._answered(read)

    def _note_pid(self, pid: int) -> None:
        self._pid = pid
        if self.cancelled.is_set():
            self._send("RTMIN+1")

    def _fetch(self, box: PreparedSandbox, path: str, until: float) -> bytes:
        """Read the answer, waiting for it *until* then. Raises Trouble."""
        while True:
            try:
                return box.machine.read(path)
            except Trouble as trouble:
                if trouble.code == "gone" or time.monotonic() >= until or self.cancelled.is_set():
                    raise
            self.cancelled.wait(0.5)

    def _not_done(self, box: PreparedSandbox, talk: Talk, words: str) -> ExecResult:
        """Return the result of a run our init did not finish; the API says whether the sandbox went away with it."""
        match talk.last.get("kind"):
            case "fenced":
                return self._failed("lease_lost", "another process took the sandbox over")
            case "failed":
                return self._failed("setup_failed", str(talk.last.get("message"))[:300])
        with contextlib.suppress(Trouble):  # an API that does not answer says nothing about the sandbox
            if not self.engine.cloud.living(box.machine.id):
                self.engine.lost(self._lease, self)
                return self._failed("sandbox_lost", f"the sandbox {box.machine.id} is gone")
        return self._failed("init_lost", f"the sandbox ended the run without an answer ({words})")

    def _failed(self, code: str, message: str) -> ExecResult:
        return self.unanswered(ExecError("sandbox", code, message), time.monotonic() - self._began)

    def _answered(self, read: AnswerFile) -> ExecResult:
        answer = read.answer
        if answer.end is None or not answer.done:
            return self.unanswered(ExecError("sandbox", "answer_broken", answer.broken or "the answer broke off"), 0.0)
        for buffer, stream in ((self.stdout, read.stdout), (self.stderr, read.stderr)):
            buffer.catch_up(stream)
        if not read.memory:
            self.enforced -= {"memory"}
        result = self.answered(answer, answer.end, oom=read.oom)
        return replace(result, stdout=read.stdout, stderr=read.stderr)


class E2bExecutor(ExecutionEngine):
    """Runs programs in sandboxes of E2B; `options.e2b` holds the engine's own settings."""

    name = "e2b"
    level = IsolationLevel.VM
    run_type = E2bRun
    environments = True
    children = False
    own_files = frozenset({"/etc/machine-id"})
    cure = "use a template made from runtime/images/e2b.Dockerfile: "

    def __init__(self, options: ExecutionOptions) -> None:
        super().__init__(options)
        self._boxes: dict[str, PreparedSandbox] = {}

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry inside."""
        return "python3", f"{HOME}/code/{self._code.digest}/kdskills_runtime/entry"

    def judged(self, run: ExecutionRun, result: ExecResult) -> tuple[ProbeCheck, ...]:
        """Return the canary's checks, and whether every package for skills is there."""
        missing = sorted({name for box in [*self._boxes.values()] for name in box.facts.missing})
        checks = judge(result.stdout.data) if result.status == "ok" else ()
        return (*checks, ProbeCheck("packages", not missing, f"missing for skills: {missing}"))

    @cached_property
    def cloud(self) -> Cloud:
        """The SDK. Raises ExecRefused without a key or the SDK."""
        secret = self.options.e2b.api_key
        key = secret.get_secret_value() if secret is not None else os.environ.get(KEY_VARIABLE, "")
        if not key.strip():
            raise ExecRefused(f"the engine e2b needs an API key: set {KEY_VARIABLE}", engine=self.name)
        return Cloud(self.options.e2b, key)

    @cached_property
    def leases(self) -> SandboxLeases:
        """Which run has which owner's sandbox."""
        return SandboxLeases(private_dir(self.state()) / "e2b")

    @cached_property
    def _code(self) -> Archive:
        return code_archive()

    def sandbox(self, lease: SandboxLease, run: E2bRun) -> PreparedSandbox:
        """Return the owner's sandbox: the one it has while that is within its times, else a new one. Raises Trouble."""
        settings, record, now = self.options.e2b, lease.record, time.time()
        needed = run.request.limits.wall_s + HOLD_S
        if record.sandbox is None:
            return self._new(lease, run, needed)
        life_left = record.created + settings.hard_ttl_s - now
        if now - record.used > settings.idle_ttl_s or life_left < needed:
            self.cloud.kill(record.sandbox)
            self.lost(lease, run)
            return self._new(lease, run, needed)
        lifetime = min(settings.idle_ttl_s + needed, life_left)
        box = self._boxes.get(run.key)
        if box is not None and box.machine.id == record.sandbox:
            box.machine.live_for(lifetime)
        else:
            box = prepare(self.cloud.connect(record.sandbox, lifetime), self._code)
            self._boxes[run.key] = box
        return box

    def lost(self, lease: SandboxLease, run: E2bRun) -> None:
        """Forget the owner's sandbox, here and in the record."""
        self._boxes.pop(run.key, None)
        self.leases.note(lease, None, 0.0)

    def release(self, lease: SandboxLease, run: E2bRun) -> None:
        """Release the lease; when another run has it by now, forget the sandbox, which that run may have replaced."""
        if not self.leases.release(lease):
            self._boxes.pop(run.key, None)

    def _new(self, lease: SandboxLease, run: E2bRun, needed: float) -> PreparedSandbox:
        """Make a sandbox that lives as long as its times allow, but at least through this run. Raises Trouble."""
        settings = self.options.e2b
        lifetime = max(needed, min(settings.idle_ttl_s + needed, settings.hard_ttl_s))
        machine = self.cloud.create(lifetime, run.labels)
        # Making it may have taken longer than the lease: then the owner has another sandbox, and nobody knows of this one.
        if not self.leases.note(lease, machine.id, time.time()):
            self.cloud.kill(machine.id)
            raise Trouble("gone", "the lease was lost while the sandbox was made")
        try:
            box = self._boxes[run.key] = prepare(machine, self._code)
        except ExecRefused:
            self.cloud.kill(machine.id)
            self.lost(lease, run)
            raise
        return box

    def end_leftovers(self) -> ReapReport:
        """End sandboxes of dead owners and those over their time."""
        settings = self.options.e2b
        ended: list[str] = []
        lost: list[str] = []
        for key, record, why in self.leases.leftovers(settings.idle_ttl_s, settings.hard_ttl_s):
            try:
                if record.sandbox is not None and self.cloud.kill(record.sandbox):
                    ended.append(f"sandbox {record.sandbox}: {why}")
            except (Trouble, ExecRefused) as error:
                lost.append(f"sandbox {record.sandbox}: {error}")
                continue
            self.leases.forget(key, record)
        return ReapReport(tuple(ended), tuple(lost))


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `e2b`."""
    register("e2b", E2bExecutor)
