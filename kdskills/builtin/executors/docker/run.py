"""One run in a container, from its place in the queue to its removal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import select
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kdskills.execution.check import RunPlan
from kdskills.execution.container import ContainerAnswer, Demux, container_options
from kdskills.execution.payload import apply_report
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel, Status
from kdskills.execution.rootfs import image_recipe_dir
from kdskills.execution.run import ProgramEnd, status_of
from kdskills.execution.streams import CHUNK, GRACE_S, output_buffers

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

PATH: Final = "/usr/local/bin:/usr/bin:/bin"
START_SLACK_S: Final = 0.9
LOCAL_DAEMON: Final = "http+docker://localhost"
"""What the SDK calls a daemon behind a socket of this host."""
COLLECT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Image:
    """The imported image, and where its interpreter and entry are."""

    id: str
    python: str
    entry: str


@dataclass(frozen=True, slots=True)
class ContainerJob:
    """Everything decided before a container is made."""

    plan: RunPlan
    image: Image
    order: bytes
    nonce: bytes
    mounts: dict[str, str]
    labels: dict[str, str]
    enforced: frozenset[str]
    engine: str
    level: IsolationLevel


class DockerRun:
    """A run in a container: queued, running or over. Made by `DockerExecutor.start`."""

    def __init__(self, client: DockerClient, job: ContainerJob) -> None:
        self._client = client
        self._job = job
        self._stdout, self._stderr = output_buffers(job.plan.request)
        self._container: Container | None = None
        self._future: Future[ExecResult] | None = None
        self._cancelled = threading.Event()
        self._overdue = False
        self._sent = 0

    def submit(self, threads: ThreadPoolExecutor) -> None:
        """Take a place in the queue."""
        self._future = threads.submit(self._run)

    async def wait(self) -> ExecResult:
        """Wait for the end; waiting may be cancelled without ending the run."""
        assert self._future is not None
        try:
            return await asyncio.shield(asyncio.wrap_future(self._future))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._future.cancelled() or (task is not None and task.cancelling()):
                raise
        return self._result(ContainerAnswer(self._job.plan, self._job.nonce, self._stdout), {}, None, 0.0)

    async def cancel(self) -> None:
        """End the container: TERM, grace, KILL."""
        self._cancelled.set()
        await asyncio.to_thread(self._end)

    def signal(self, number: int) -> None:
        """Send a signal to the program, by way of the container's init."""
        container = self._container
        if container is not None:
            self._sent = number
            self._kill(container, number)

    def network_namespace(self) -> int | None:
        """Return the host pid of a process whose network is the container's; None when there is none on this host."""
        container = self._container
        if container is None or self._client.api.base_url != LOCAL_DAEMON:
            return None
        container.reload()
        return int(container.attrs["State"]["Pid"]) or None

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        return self._stdout.tail(limit), self._stderr.tail(limit)

    def _end(self) -> None:
        """Leave the queue; or TERM, then KILL until the worker thread is through."""
        assert self._future is not None
        if self._future.cancel():
            return
        number: int = signal.SIGTERM
        # Repeated, because a signal sent before the program runs is lost; the second and later ones are KILL.
        while not self._future.done():
            container = self._container
            if container is not None:
                self._kill(container, number)
            number = signal.SIGKILL
            with contextlib.suppress(FutureTimeout):
                self._future.result(timeout=GRACE_S)

    @staticmethod
    def _kill(container: Container, number: int) -> None:
        from docker.errors import APIError

        with contextlib.suppress(APIError):  # not yet or no longer running: there is no process to signal
            container.kill(signal=number)

    def _run(self) -> ExecResult:
        """Make the container, talk to its init, remove it. Runs in one of the engine's threads."""
        from docker.errors import DockerException

        started = time.monotonic()
        answer = ContainerAnswer(self._job.plan, self._job.nonce, self._stdout)
        state: dict[str, Any] = {}
        fault: str | None = None
        try:
            if not self._cancelled.is_set():
                self._container = self._create()
                self._talk(self._container, answer)
                state = self._state(self._container)
        except (DockerException, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            if self._container is not None:
                with contextlib.suppress(DockerException):  # `reap` finds what could not be removed
                    self._container.remove(force=True, v=True)
        answer.close()
        return self._result(answer, state, fault, time.monotonic() - started)

    def _create(self) -> Container:
        job = self._job
        options = container_options(job.plan, job.image.id, job.mounts, _seccomp(), len(job.order))
        init = job.image.entry.rpartition("/")[0] + "/container_init.py"
        return self._client.containers.create(
            command=[job.image.python, "-I", init],
            name=f"kdskills-{secrets.token_hex(8)}",
            labels=job.labels,
            environment={"PATH": PATH},
            **options,
        )

    def _talk(self, container: Container, answer: ContainerAnswer) -> None:
        """Start the container, send the order, read to the end of its output or of its time."""
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        raw = self._client.api.attach_socket(str(container.id), params=params)
        try:
            wire: socket.socket = getattr(raw, "_sock", raw)
            container.start()
            self._converse(wire, answer)
        finally:
            getattr(raw, "_response", raw).close()  # the SDK hangs the response on the socket; it closes both
        if self._overdue:
            self._kill(container, signal.SIGKILL)

    def _converse(self, wire: socket.socket, answer: ContainerAnswer) -> None:
        """Send the order and read the output at once: an init that dies early must not block the send."""
        demux = Demux(answer.feed, self._stderr.feed)
        wire.setblocking(False)
        order = memoryview(self._job.order)
        wall = self._job.plan.request.limits.wall_s
        deadline = time.monotonic() + wall + GRACE_S + START_SLACK_S
        while True:
            if answer.answering and not answer.end:
                deadline = time.monotonic() + COLLECT_S
            time_left = deadline - time.monotonic()
            if time_left <= 0 or answer.broken:
                self._overdue = True
                return
            readable, writable, _ = select.select([wire], [wire] if order else [], [], time_left)
            if writable:
                try:
                    order = order[wire.send(order[:CHUNK]) :]
                except BlockingIOError:
                    pass
                except OSError:
                    order = order[len(order) :]  # the init is gone; its last words are still to be read
            if readable:
                data = wire.recv(CHUNK)
                if not data:
                    return
                demux.feed(data)

    def _state(self, container: Container) -> dict[str, Any]:
        """Return the container's state once it has stopped; OOM is read here, before removal."""
        for _ in range(50):
            container.reload()
            if not container.attrs["State"]["Running"]:
                break
            time.sleep(0.02)
        return dict(container.attrs["State"])

    def _result(self, answer: ContainerAnswer, state: dict[str, Any], fault: str | None, duration: float) -> ExecResult:
        """Return the result, from the init's answer, the container's state, and what was done to it from here."""
        end = answer.end if answer.done else None
        status, exit_code, number, error = self._outcome(end, answer.broken, state, fault)
        result = ExecResult(
            status=status,
            exit_code=exit_code,
            signal=number,
            stdout=self._stdout.stream(),
            stderr=self._stderr.stream(),
            duration_s=end.duration_s if end else duration,
            engine=self._job.engine,
            level=self._job.level,
            limits_enforced=self._job.enforced,
            artifacts=tuple(answer.collection.artifacts) if end else (),
            artifact_errors=tuple(answer.collection.errors) if end else (),
            error=error,
        )
        # The report of generated code comes with the init's answer; without an answer the result stays the engine's.
        if self._job.plan.request.code is not None and end is not None and end.trouble is None:
            return apply_report(result, answer.report or b"")
        return result

    def _outcome(
        self, end: ProgramEnd | None, broken: str | None, state: dict[str, Any], fault: str | None
    ) -> tuple[Status, int | None, int | None, ExecError | None]:
        """Return (status, exit code, signal, error)."""
        if self._cancelled.is_set():
            return "cancelled", None, None, None
        oom = bool(state.get("OOMKilled"))
        if end is not None:
            status, exit_code, number, error = status_of(end)
            return ("oom" if oom and status == "nonzero" else status), exit_code, number, error
        if oom:
            return "oom", None, None, None
        if fault is not None:
            return "infra_error", None, None, ExecError("container", "engine_failed", fault)
        if self._overdue and broken is None:
            return "timeout", None, None, None
        if self._sent == signal.SIGKILL:
            return "nonzero", 128 + self._sent, self._sent, None
        words = self._stderr.tail(500).decode("utf-8", "replace").strip()
        message = broken or f"the container ended without an answer (exit code {state.get('ExitCode')}) {words}"
        return "infra_error", None, None, ExecError("container", "init_lost", message.strip())


def _seccomp() -> str:
    """Return the seccomp profile shipped with the image recipe, as the daemon wants it: JSON text."""
    return json.dumps(json.loads((image_recipe_dir() / "seccomp.json").read_text(encoding="utf-8")))
