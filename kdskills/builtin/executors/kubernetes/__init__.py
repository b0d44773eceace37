"""Kubernetes: a pod per run, made through the cluster's API and gone after it.

A pod's first container takes what the program may read, code, skills and packages, as one archive through a command, and
ends; the second one sees it read-only. There, `kdskills_runtime.container_init` is the first process, and once more, as a
command of its own, takes the order and answers, as in a container of docker.

No socket but of the machine's own kind can be made inside, by a system call filter; that the cluster's network plugin heeds
the `NetworkPolicy` is a second wall. What happened to a pod is asked of the API, never read from a program's output.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from http import HTTPStatus
from typing import ClassVar, Final

from kdskills.builtin.executors.kubernetes.cluster import (
    ARCHIVE,
    COLLECT_S,
    DELIVERY,
    HOME,
    INIT,
    PROGRAM,
    REQUEST_S,
    ClusterApi,
    ClusterTrouble,
    Manifest,
    PodCommand,
    brief,
    container_runs,
    is_abandoned,
    lateness,
    pod_end,
    pod_manifest,
    start_problem,
)
from kdskills.errors import ExecRefused
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.container import NONCE_SIZE, Archive, ContainerAnswer, RemoteRun, build_order, tree_files
from kdskills.execution.owner import owner_labels
from kdskills.execution.payload import build_payload, entry_argv
from kdskills.execution.processes import rlimits
from kdskills.execution.protocol import ExecutorFactory, KubernetesOptions, ProbeCheck, ReapReport
from kdskills.execution.request import MIB, ExecError, ExecResult, IsolationLevel
from kdskills.execution.rootfs import ground_floor_files
from kdskills.execution.run import ExecutionEngine, ExecutionRun, ProgramEnd, judge
from kdskills.execution.seccomp import ARCHES, LOCAL_SOCKETS, program_bytes
from kdskills.execution.stage import read_inputs
from kdskills.execution.streams import GRACE_S
from kdskills.hooks import Register, hookimpl

UIDS: Final = range(1_000_000_000, 2_000_000_000)
"""Each pod has a uid of its own, so that its processes can be counted by it."""
OWN_PROCESSES: Final = 2
CONFLICTS: Final = 3
START_SLACK_S: Final = 0.9
SETTLE_S: Final = 3.0
"""How long the API may take to tell of an end that the stream has shown."""
GONE_S: Final = 30.0
UNTRIED: Final = "not run against a cluster before it was shipped, only against a stand-in of the API"
"""What `doctor` says of this engine, whether it works here or not."""
_DIGEST: Final = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")


class KubernetesRun(RemoteRun):
    """A run in a pod: waiting for it, running or over."""

    engine: KubernetesExecutor
    _pod: str | None = None
    _sent = 0
    _overdue = False
    _conflicts = 0
    _fault: str | None = None

    def prepare(self) -> None:
        """Decide everything that can be decided without a pod."""
        engine, request = self.engine, self.request
        self._plan = engine.checked(request)
        self.enforced = engine.require(LIMIT_NAMES)
        self._options = engine.usable_options()
        self._cluster = engine.cluster
        files = [(f"code/{inside}", source) for inside, source in ground_floor_files()]
        for inside, folder in engine.mounts(request).items():
            files += [(inside[1:], folder), *tree_files(folder, f"{inside[1:]}/")]
        inputs = read_inputs(request.inputs, request.limits)
        self._archive = Archive.from_files(files)
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        argv, payload = self._plan.argv, None
        if request.code is not None:
            argv, payload = entry_argv(*engine.interpreter()), build_payload(request)
        processes = request.limits.pids + OWN_PROCESSES
        self._order = build_order(
            self._plan,
            argv,
            inputs,
            payload=payload,
            nonce=self._nonce.hex(),
            network=None,
            limits=rlimits(request.limits) | {"nproc": (processes, processes)},
            seccomp={arch: program_bytes(arch, LOCAL_SOCKETS).hex() for arch in sorted(set(ARCHES.values()))},
        )

    def perform(self) -> ExecResult:
        """Make the pod, run in it, delete it. Raises ExecRefused: no program was started, and why."""
        try:
            command = self._begin(time.monotonic() + self._options.start_s)
            return self.unanswered("cancelled", 0.0) if command is None else self._follow(command)
        except ClusterTrouble as trouble:
            if self.cancelled.is_set():
                return self.unanswered("cancelled", 0.0)
            words = f"no pod is available: {trouble} ({trouble.reason})"
            raise ExecRefused(words, engine=self.engine.name, reason=trouble.reason) from None
        finally:
            self._remove()

    def kill(self, attempt: int) -> bool:
        """Delete the pod: its first process gets TERM, and after a second everything in it KILL."""
        if self._pod is None:
            return False
        with contextlib.suppress(ClusterTrouble):  # out of reach: tried again, and the run's thread finds out, too
            self._cluster.delete(self._pod)
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the program; KILL ends everything in its pod."""
        if self._pod is not None and not self.done:
            self._sent = number
            threading.Thread(
                target=self._signal, args=(number,), name="kdskills-kubernetes-signal", daemon=True
            ).start()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ClusterTrouble):  # the pod is gone, and the program with it
            if self._pod is not None:
                command = self._cluster.command(self._pod, PROGRAM, [*INIT, "signal", f"{number}"])
                with contextlib.closing(command):
                    command.finish(REQUEST_S)

    def _begin(self, until: float) -> PodCommand | None:
        """Make the pod, deliver its files, start the init with its order; None when the run was cancelled first.

        Raises ClusterTrouble, also when the program does not begin *until* then.
        """
        self._cluster.close_network()
        name = self._create()
        if not self._await(name, DELIVERY, until):
            return None
        script = 'head -c "$0" > "$1.new" && mv "$1.new" "$1"'
        words = ["sh", "-c", script, str(len(self._archive.data)), ARCHIVE]
        with contextlib.closing(self._cluster.command(name, DELIVERY, words)) as delivery:
            delivery.send(self._archive.data)
            delivery.finish(max(until - time.monotonic(), 1.0))
        if not self._await(name, PROGRAM, until):
            return None
        command = self._cluster.command(name, PROGRAM, INIT)
        self.stack.callback(command.close)
        command.send(self._order)
        self._order, self._archive = b"", self._archive._replace(data=b"")  # a service would hold them for long
        return command

    def _create(self) -> str:
        labels = owner_labels(self.request.owner, self.request.request_id or secrets.token_hex(8))
        while True:
            pod = pod_manifest(self._plan, self._options, self._archive, labels, secrets.choice(UIDS))
            self._pod = name = str(pod["metadata"]["name"])
            try:
                self._cluster.create(pod)
            except ClusterTrouble as trouble:
                # Nobody has that name: it is the count of a quota that two changed at once.
                self._conflicts += trouble.reason == "conflict"
                if trouble.reason != "conflict" or self._conflicts == CONFLICTS:
                    raise
            else:
                return name

    def _await(self, name: str, container: str, until: float) -> bool:
        """Wait until the container runs; False when the run is cancelled. Raises ClusterTrouble."""
        pause = 0.04
        while not self.cancelled.is_set():
            trouble: ClusterTrouble | None = None
            pod: Manifest | None = {}
            try:
                pod = self._cluster.look(name)
            except ClusterTrouble as error:
                if error.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
                    raise
                trouble = error  # busy or restarting: asked again
            if pod is None:
                raise ClusterTrouble("pod_ended", "the pod was deleted before its program began")
            if container_runs(pod, container):
                return True
            if problem := start_problem(pod):
                raise ClusterTrouble(*problem)
            if time.monotonic() >= until:
                raise trouble or ClusterTrouble(*lateness(pod))
            self.cancelled.wait(pause)
            pause = min(pause * 1.3, 1.0)
        return False

    def _follow(self, command: PodCommand) -> ExecResult:
        """Read output and answer to their end, or to the run's time, and say what came of it."""
        self.tell_started()
        started = time.monotonic()
        answer = ContainerAnswer(self._plan, self._nonce, self.stdout)
        feeds: dict[int, Callable[[bytes], object]] = {0: len, 1: answer.feed, 2: self.stderr.feed}
        deadline = started + self.request.limits.wall_s + GRACE_S + START_SLACK_S
        try:
            # To the end of the stream, not only of the answer: what was written to stderr may come after it.
            while answer.broken is None and (piece := command.read(0.5)) is not None:
                feeds[piece[0]](piece[1])
                if answer.answering and not answer.end:
                    deadline = time.monotonic() + COLLECT_S
                if self.cancelled.is_set():
                    deadline = min(deadline, time.monotonic() + GONE_S)
                self._overdue = time.monotonic() >= deadline
                if self._overdue:
                    break
            if not (command.status or answer.broken or self._overdue):
                self._fault = "it ended without a status"
        except ClusterTrouble as trouble:
            self._fault = str(trouble)
        answer.close()
        return self._result_of(answer, command.status, time.monotonic() - started)

    def _result_of(self, answer: ContainerAnswer, status: str, duration: float) -> ExecResult:
        """Return the result, from the init's answer or else from what the API says of the pod."""
        if answer.done and answer.end is not None and not self.cancelled.is_set():
            return self.answered(answer, answer.end, oom=answer.oom)
        if self.cancelled.is_set():
            return self.unanswered("cancelled", duration)
        if answer.broken is not None:
            return self.unanswered(ExecError("pod", "answer_broken", answer.broken), duration)
        if self._overdue:
            return self.unanswered("timeout", duration)
        if self._sent == signal.SIGKILL:
            return self.result(ProgramEnd("exited", None, self._sent, duration))
        try:
            kind, words = self._settled() or ("", "")
        except ClusterTrouble as trouble:
            kind, words = "engine_failed", str(trouble)
        if kind == "oom":
            return self.result(ProgramEnd("exited", None, None, duration), verdict=("oom", None))
        if kind == "timeout":
            return self.unanswered("timeout", duration)
        if not kind and self._fault is not None:
            kind, words = "engine_failed", f"the stream of the command broke off: {self._fault}"
        words = words or f"the pod ended the run without an answer {brief(status)} {self.last_words(500)}"
        return self.unanswered(ExecError("pod", kind or "init_lost", words.strip()), duration)

    def _settled(self) -> tuple[str, str] | None:
        """Return what ended the pod; None when it still runs. The API tells of an end later than the stream. Raises ClusterTrouble."""
        until = time.monotonic() + SETTLE_S
        while True:
            assert self._pod is not None
            end = pod_end(self._cluster.look(self._pod))
            if end is not None or time.monotonic() >= until or self.cancelled.wait(0.1):
                return end

    def _remove(self) -> None:
        """Delete the pod, and after a cancellation wait until its node says that it is gone."""
        if self._pod is None:
            return
        until = time.monotonic() + GONE_S
        # `reap` finds what could not be removed, and the cluster ends it by itself when its time is over.
        with contextlib.suppress(ClusterTrouble):
            self._cluster.delete(self._pod)
            while self.cancelled.is_set() and time.monotonic() < until and self._cluster.look(self._pod) is not None:
                time.sleep(0.05)


class KubernetesExecutor(ExecutionEngine):
    """Runs programs in pods; `options.kubernetes` holds the engine's own settings."""

    name = "kubernetes"
    level = IsolationLevel.CONTAINER
    run_type = KubernetesRun
    environments = True
    least: ClassVar[Mapping[str, int]] = {"memory": 32 * MIB}
    """Below this the container's own two processes do not fit."""
    children = False
    own_files = frozenset({"/etc/machine-id"})
    refusal_cure = f"{UNTRIED}: "
    cure = "look into the cluster's set-up (docs/how-to/run-on-kubernetes.md): "

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry in every pod."""
        return "python3", f"{HOME}/kdskills_runtime/py_code_exec_entry.py"

    def judged(self, run: ExecutionRun, result: ExecResult) -> tuple[ProbeCheck, ...]:
        """Return the canary's checks, and what this engine was tried with before it was shipped."""
        checks = judge(result.stdout.data, sockets=False, families=("AF_UNIX",)) if result.status == "ok" else ()
        return (*checks, ProbeCheck("tried", ok=True, found=UNTRIED))

    def usable_options(self) -> KubernetesOptions:
        """Return the engine's settings. Raises ExecRefused without an image that is named by its digest."""
        options = self.options.kubernetes
        if _DIGEST.fullmatch(options.image or "") is None:
            words = "the engine kubernetes needs an image by digest: set kubernetes_image to registry/name@sha256:…"
            raise ExecRefused(words, engine=self.name)
        return options

    @cached_property
    def cluster(self) -> ClusterApi:
        """The API. Raises ExecRefused without the client or its configuration."""
        return ClusterApi(self.options.kubernetes)

    def end_leftovers(self) -> ReapReport:
        """Delete pods whose owner is dead, or whose lease is over."""
        ended: list[str] = []
        lost: list[str] = []
        if self.options.kubernetes.image is None:
            return ReapReport()  # never used here
        try:
            pods = self.cluster.pods()
        except (ClusterTrouble, ExecRefused) as error:
            return ReapReport(failed=(f"kubernetes: {error}",))
        for pod in pods:
            name = pod["metadata"]["name"]
            try:
                if is_abandoned(pod, datetime.now(UTC)) and self.cluster.delete(name):
                    ended.append(f"pod {name}")
            except ClusterTrouble as trouble:
                lost.append(f"pod {name}: {trouble}")
        return ReapReport(tuple(ended), tuple(lost))


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `kubernetes`."""
    register("kubernetes", KubernetesExecutor)
