"""Docker: one locked-down container per run, from an image made offline.

The engine talks to the daemon through its SDK, never through command lines. Blocking calls run in a few threads of the
engine's own, which also queue runs: docker does not get faster by more callers. Inputs and outputs pass through
`kdskills_runtime.container_init`, because nothing can be copied into or out of a container's tmpfs from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import ExecFailed, ExecRefused, RootChanged, RootMissing
from kdskills.execution.check import LIMIT_NAMES, RunPlan, check_request, require_limits
from kdskills.execution.container import NONCE_SIZE, ContainerAnswer, Demux, build_order, container_options
from kdskills.execution.dirs import cache_dir
from kdskills.execution.owner import RUN_LABEL, is_leftover, owner_labels
from kdskills.execution.payload import apply_report, build_payload
from kdskills.execution.probing import canary_argv, failed, judge
from kdskills.execution.protocol import ProbeReport, ReapReport
from kdskills.execution.request import ExecError, ExecRequest, ExecResult, IsolationLevel, Status
from kdskills.execution.rootfs import build_rootfs, image_recipe_dir, rootfs_for_image
from kdskills.execution.run import FinishedRun, ProgramEnd, skills_mismatch, status_of, to_the_end
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.execution.streams import CHUNK, GRACE_S, output_buffers
from kdskills.hooks import Register, hookimpl

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory


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


PARALLEL: Final = 2
"""Runs at one time; more wait their turn."""
REPOSITORY: Final = "kdskills/sandbox"
MIN_MEMORY: Final = 32 * 1024 * 1024
"""Below this the container's own first program does not fit."""


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `docker`."""
    register("docker", DockerExecutor)


class DockerExecutor:
    """Runs programs in containers of a local docker daemon.

    Args:
        options: The operator's settings.
    """

    name = "docker"
    level = IsolationLevel.CONTAINER

    def __init__(self, options: ExecutionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._client: DockerClient | None = None
        self._image: Image | None = None
        self._enforced: frozenset[str] | None = None
        self._report: ProbeReport | None = None
        self._threads = ThreadPoolExecutor(max_workers=PARALLEL, thread_name_prefix="kdskills-docker")

    async def probe(self) -> ProbeReport:
        """Run the canary in a container as any other program; the answer is kept."""
        if self._report is None:
            self._report = await self._probe()
        return self._report

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end."""
        return await to_the_end(self, request)

    async def start(self, request: ExecRequest) -> DockerRun | FinishedRun:
        """Check and prepare *request*, queue it, and return at once."""
        try:
            job = await asyncio.to_thread(self._prepare, request)
        except (RootChanged, RootMissing) as error:
            return skills_mismatch(error, self.name, self.level)
        run = DockerRun(self._connect(), job)
        run.submit(self._threads)
        return run

    async def reap(self) -> ReapReport:
        """Remove containers whose owner is dead."""
        return await asyncio.to_thread(self._reap)

    def _connect(self) -> DockerClient:
        import docker

        with self._lock:
            if self._client is None:
                _knock()
                self._client = docker.from_env(timeout=60)
            return self._client

    def _prepare(self, request: ExecRequest) -> ContainerJob:
        """Decide everything that can be decided without a container. Raises ExecRefused."""
        from docker.errors import DockerException

        plan = check_request(request)
        if request.network != "none":
            raise ExecRefused(
                "docker runs programs without network only", code="limit_not_enforceable", engine=self.name
            )
        if request.limits.memory < MIN_MEMORY:
            raise ExecRefused(
                f"docker needs a memory limit of at least {MIN_MEMORY} bytes",
                code="limit_not_enforceable",
                engine=self.name,
            )
        mounts = {mount.id: str(stage_skill(mount, self._options.cache_dir or cache_dir())) for mount in request.skills}
        inputs = read_inputs(request.inputs, request.limits)
        try:
            enforced = self._enforceable(self._connect())
            require_limits(enforced, self._options.best_effort, self.name)
            image = self._ensure_image(self._connect())
        except DockerException as error:
            raise ExecRefused(f"no docker engine answers: {error}", engine=self.name) from error
        nonce = secrets.token_bytes(NONCE_SIZE)
        argv, payload = plan.argv, None
        if request.code is not None:
            argv = (image.python, "-I", image.entry, "--payload-fd", "{payload_fd}", "--report-fd", "{report_fd}")
            payload = build_payload(request)
        env = {"PATH": PATH, "HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", **request.env}  # noqa: S108 - inside
        return ContainerJob(
            plan=plan,
            image=image,
            order=build_order(plan, argv, env, inputs, nonce=nonce, payload=payload),
            nonce=nonce,
            mounts=mounts,
            labels=owner_labels(request.owner, request.request_id or secrets.token_hex(8)),
            enforced=enforced,
            engine=self.name,
            level=self.level,
        )

    def _enforceable(self, client: DockerClient) -> frozenset[str]:
        """Return the limits this daemon's kernel can hold; asked once, for it takes longer than all other preparing."""
        if self._enforced is not None:
            return self._enforced
        facts = client.info()
        missing = {name for name, fact in (("memory", "MemoryLimit"), ("pids", "PidsLimit")) if not facts.get(fact)}
        self._enforced = LIMIT_NAMES - missing
        return self._enforced

    def _ensure_image(self, client: DockerClient) -> Image:
        """Import the prepared tree unless the daemon has it; nothing is ever pulled."""
        from docker.errors import ImageNotFound

        with self._lock:
            if self._image is not None:
                return self._image
            tree = build_rootfs(self._options.cache_dir, packages=self._options.image_packages)
            tar, digest = rootfs_for_image(self._options.cache_dir, packages=self._options.image_packages)
            name = f"{REPOSITORY}:{digest.removeprefix('sha256:')[:32]}"
            try:
                image = client.images.get(name)
            except ImageNotFound:
                client.api.import_image_from_file(str(tar), repository=REPOSITORY, tag=name.partition(":")[2])
                image = client.images.get(name)
            if image.id is None:
                raise ExecRefused("docker imported an image without an id", engine=self.name)
            self._image = Image(image.id, tree.python, tree.entry)
            return self._image

    async def _probe(self) -> ProbeReport:
        """Run the canary and judge it."""
        try:
            image = await asyncio.to_thread(self._image_for_probe)
            result = await self.run(ExecRequest(argv=canary_argv(image.python, image.entry)))
        except (ExecRefused, ExecFailed) as error:
            return ProbeReport(
                self.name, self.level, ok=False, cure=f"start a docker daemon this user may talk to: {error}"
            )
        checks = judge(result.stdout.data)
        ok = result.status == "ok" and all(check.ok for check in checks)
        words = result.error.message if result.error else failed(checks)
        return ProbeReport(
            engine=self.name,
            level=self.level,
            ok=ok,
            checks=checks,
            limits=result.limits_enforced,
            cure=None if ok else f"look into the daemon's set-up: {words}",
        )

    def _image_for_probe(self) -> Image:
        from docker.errors import DockerException

        try:
            return self._ensure_image(self._connect())
        except DockerException as error:
            raise ExecRefused(f"no docker engine answers: {error}", engine=self.name) from error

    def _reap(self) -> ReapReport:
        from docker.errors import APIError, DockerException, NotFound

        ended: list[str] = []
        lost: list[str] = []
        try:
            containers = self._connect().containers.list(all=True, filters={"label": RUN_LABEL}, ignore_removed=True)
        except DockerException as error:
            return ReapReport(failed=(f"docker: {error}",))
        for container in containers:
            if not is_leftover(container.labels):
                continue
            try:
                container.remove(force=True, v=True)
                ended.append(f"container {container.name}")
            except NotFound:
                continue  # another process that removes leftovers was quicker
            except APIError as error:
                if error.status_code != HTTPStatus.CONFLICT:  # a conflict: it is being removed at this moment
                    lost.append(f"container {container.name}: {error}")
            except DockerException as error:
                lost.append(f"container {container.name}: {error}")
        return ReapReport(tuple(ended), tuple(lost))


def _knock() -> None:
    """Raise DockerException when nothing listens on the daemon's socket; the SDK's own try would leave sockets open."""
    from docker.errors import DockerException

    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not host.startswith("unix://"):
        return
    with socket.socket(socket.AF_UNIX) as knock:
        try:
            knock.connect(host.removeprefix("unix://"))
        except OSError as error:
            raise DockerException(f"{host}: {error.strerror or error}") from error
