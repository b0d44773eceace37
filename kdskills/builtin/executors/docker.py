"""Docker: one locked-down container per run, from an image made offline.

The engine talks to the daemon through its SDK, never through command lines. Blocking calls run in a few threads of the
engine's own, which also queue runs: docker does not get faster by more callers. Inputs and outputs pass through
`kdskills_runtime.container_init`, because nothing can be copied into or out of a container's tmpfs from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kdskills.errors import ExecRefused
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.container import NONCE_SIZE, ContainerAnswer, Demux, RemoteRun, build_order, container_options
from kdskills.execution.egress import PROXY_ENV, PROXY_PORT
from kdskills.execution.owner import RUN_LABEL, is_leftover, network_folder, owner_labels, reap_network_folders
from kdskills.execution.payload import BASE_ENV, build_payload, entry_argv
from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory, ReapReport
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel
from kdskills.execution.rootfs import Rootfs, build_rootfs, image_recipe_dir, rootfs_for_image
from kdskills.execution.run import ExecutionEngine, ProgramEnd
from kdskills.execution.stage import read_inputs
from kdskills.execution.streams import CHUNK, GRACE_S
from kdskills.hooks import Register, hookimpl
from kdskills.storage.database import LazyModule

if TYPE_CHECKING:
    import docker.errors
    from docker.models.containers import Container
else:
    docker = LazyModule("docker")

START_SLACK_S: Final = 0.9
LOCAL_DAEMON: Final = "http+docker://localhost"
"""What the SDK calls a daemon behind a socket of this host."""
COLLECT_S: Final = 20.0
PARALLEL: Final = 2
"""Runs at one time; more wait their turn."""
REPOSITORY: Final = "kdskills/sandbox"
NETWORK_DIR: Final = "/run/network"
"""Where a container sees the socket of its helper, until the helper has it."""


class DockerRun(RemoteRun):
    """A run in a container: queued, running or over."""

    engine: DockerExecutor

    _container: Container | None = None
    _turn: Future[ExecResult] | None = None
    _overdue = False
    _sent = 0
    _listener: socket.socket | None = None

    def prepare(self) -> None:
        """Decide everything that can be decided without a container."""
        engine, request = self.engine, self.request
        self._plan = plan = engine.checked(request)
        self._mounts = engine.mounts(request) | self.prepare_secrets()
        inputs = read_inputs(request.inputs, request.limits)
        with engine.answering():
            enforced = engine.require(engine.enforceable())
            self._image, self._rootfs = engine.image()
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        argv, payload = plan.argv, None
        if request.code is not None:
            argv, payload = entry_argv(self._rootfs.python, self._rootfs.entry), build_payload(request)
        network = None if request.network == "none" else (self._listen(), PROXY_PORT)
        self._order = build_order(plan, argv, inputs, payload=payload, nonce=self._nonce.hex(), network=network)
        self.enforced = enforced

    def _listen(self) -> str:
        """Listen for the helper at a path that is this run's alone, mount it, and return where it is inside."""
        if self.engine.connect().api.base_url != LOCAL_DAEMON:
            words = "the docker daemon is not on this host, so that its containers can have no network but none"
            raise ExecRefused(words, code="limit_not_enforceable", engine=self.engine.name)
        folder = network_folder(self.stack)  # others of this host cannot pass the one around it
        self._listener = listener = self.stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o666)
        listener.listen(1)
        self._mounts[NETWORK_DIR] = folder
        return f"{NETWORK_DIR}/socket"

    def _admit(self, listener: socket.socket) -> None:
        """Take the helper's connection, which is made before the program starts, and listen no more."""
        channel, _ = listener.accept()
        Path(listener.getsockname()).unlink()
        listener.close()
        self._listener = None
        self.forward(channel)

    def perform(self) -> ExecResult:
        """Take a place in the queue."""
        self._turn = self.engine.threads.submit(self._contain)
        self.tell_started()
        try:
            return self._turn.result()
        except CancelledError:
            return self.result(ProgramEnd("cancelled", None, None, 0.0))

    def kill(self, attempt: int) -> bool:
        """Leave the queue; or TERM, then KILL."""
        container = self._container
        if (self._turn is not None and self._turn.cancel()) or container is None:
            return False
        self._kill(container, signal.SIGKILL if attempt else signal.SIGTERM)
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the program, by way of the container's init."""
        container = self._container
        if container is not None:
            self._sent = number
            self._kill(container, number)

    def network_namespace(self) -> int | None:
        """Return the host pid of a process whose network is the container's; None when there is none on this host."""
        container = self._container
        if container is None or self.engine.connect().api.base_url != LOCAL_DAEMON:
            return None
        container.reload()
        return int(container.attrs["State"]["Pid"]) or None

    @staticmethod
    def _kill(container: Container, number: int) -> None:
        with contextlib.suppress(docker.errors.APIError):  # not yet or no longer running: there is no process to signal
            container.kill(signal=number)

    def _contain(self) -> ExecResult:
        """Make the container, talk to its init to the end or to the run's time, remove it; in a thread of the engine's."""
        started = time.monotonic()
        answer = ContainerAnswer(self._plan, self._nonce, self.stdout)
        state: dict[str, Any] = {}
        fault: str | None = None
        try:
            if not self.cancelled.is_set():
                self._container = container = self._create()
                params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
                raw = self.engine.connect().api.attach_socket(str(container.id), params=params)
                try:
                    container.start()
                    self._converse(getattr(raw, "_sock", raw), answer)
                finally:
                    getattr(raw, "_response", raw).close()  # the SDK hangs the response on the socket; it closes both
                if self._overdue:
                    self._kill(container, signal.SIGKILL)
                state = self._state(container)
        except (docker.errors.DockerException, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            if self._container is not None:
                with contextlib.suppress(docker.errors.DockerException):  # `reap` finds what could not be removed
                    self._container.remove(force=True, v=True)
        answer.close()
        return self._result_of(answer, state, fault, time.monotonic() - started)

    def _create(self) -> Container:
        # The profile is shipped with the image recipe; the daemon wants it as JSON text.
        seccomp = json.dumps(json.loads((image_recipe_dir() / "seccomp.json").read_text(encoding="utf-8")))
        options = container_options(self._plan, self._image, self._mounts, seccomp, len(self._order))
        return self.engine.connect().containers.create(
            command=[self._rootfs.python, "-I", self._rootfs.beside_entry("container_init.py")],
            name=f"kdskills-{secrets.token_hex(8)}",
            labels=owner_labels(self.request.owner, self.request.request_id or secrets.token_hex(8)),
            environment={"PATH": BASE_ENV["PATH"]},
            **options,
        )

    def _converse(self, wire: socket.socket, answer: ContainerAnswer) -> None:
        """Send the order and read the output at once: an init that dies early must not block the send."""
        demux = Demux(answer.feed, self.stderr.feed)
        wire.setblocking(False)
        order = memoryview(self._order)
        wall = self.request.limits.wall_s
        deadline = time.monotonic() + wall + GRACE_S + START_SLACK_S
        while True:
            if answer.answering and not answer.end:
                deadline = time.monotonic() + COLLECT_S
            time_left = deadline - time.monotonic()
            if time_left <= 0 or answer.broken:
                self._overdue = True
                return
            helper = [] if self._listener is None else [self._listener]
            readable, writable, _ = select.select([wire, *helper], [wire] if order else [], [], time_left)
            if writable:
                try:
                    order = order[wire.send(order[:CHUNK]) :]
                except BlockingIOError:
                    pass
                except OSError:
                    order = order[len(order) :]  # the init is gone; its last words are still to be read
            if self._listener in readable:
                self._admit(self._listener)
            if wire in readable:
                data = wire.recv(CHUNK)
                if not data:
                    return
                demux.feed(data)

    def _state(self, container: Container) -> dict[str, Any]:
        """Return the container's state once it has stopped; OOM is read here, before removal.

        When the kernel ended the init itself, the daemon may learn why only after it learned that.
        """
        state: dict[str, Any] = {}
        for _ in range(50):
            container.reload()
            state = dict(container.attrs["State"])
            killed = state["ExitCode"] == 128 + signal.SIGKILL and not self._sent and not self._overdue
            if not state["Running"] and (state["OOMKilled"] or not killed):
                break
            time.sleep(0.02)
        return state

    def _result_of(
        self, answer: ContainerAnswer, state: dict[str, Any], fault: str | None, duration: float
    ) -> ExecResult:
        """Return the result, from the init's answer, the container's state, and what was done to it from here."""
        oom = bool(state.get("OOMKilled"))
        if answer.done and answer.end is not None:
            if self.cancelled.is_set():
                end = ProgramEnd("cancelled", None, None, answer.end.duration_s, answer.end.trouble)
                return self.answered(answer, end, oom=False)
            return self.answered(answer, answer.end, oom=oom)
        if self.cancelled.is_set():
            return self.unanswered("cancelled", duration)
        if oom:
            return self.result(ProgramEnd("exited", None, None, duration), verdict=("oom", None))
        if fault is not None:
            return self.unanswered(ExecError("container", "engine_failed", fault), duration)
        if self._overdue and answer.broken is None:
            return self.unanswered("timeout", duration)
        if self._sent == signal.SIGKILL:
            return self.result(ProgramEnd("exited", None, self._sent, duration))
        ended = f"the container ended without an answer (exit code {state.get('ExitCode')})"
        message = answer.broken or f"{ended} {self.last_words(500)}"
        return self.unanswered(ExecError("container", "init_lost", message.strip()), duration)


class DockerExecutor(ExecutionEngine):
    """Runs programs in containers of a local docker daemon."""

    name = "docker"
    level = IsolationLevel.CONTAINER
    run_type = DockerRun
    environments = True
    least: ClassVar[Mapping[str, int]] = {"memory": 32 * 1024 * 1024}
    """Below this the container's own first program does not fit."""
    networks: ClassVar[bool] = True
    network_env: ClassVar[Mapping[str, str]] = PROXY_ENV
    children = False
    cure = "look into the daemon's set-up: "
    refusal_cure = "start a docker daemon this user may talk to: "

    def __init__(self, options: ExecutionOptions) -> None:
        super().__init__(options)
        self.threads = ThreadPoolExecutor(max_workers=PARALLEL, thread_name_prefix="kdskills-docker")
        self._image_lock = threading.Lock()
        self._client: docker.DockerClient | None = None
        self._image: tuple[str, Rootfs] | None = None
        self._enforced: frozenset[str] | None = None

    def connect(self) -> docker.DockerClient:
        """Return the client. Raises DockerException."""
        with self.lock:
            if self._client is None:
                _knock()
                self._client = docker.from_env(timeout=60)
            return self._client

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Turn what the SDK raises into a refusal."""
        try:
            yield
        except docker.errors.DockerException as error:
            raise ExecRefused(f"no docker engine answers: {error}", engine=self.name) from error

    def enforceable(self) -> frozenset[str]:
        """Return the limits this daemon's kernel can hold; asked once, for it takes longer than all other preparing."""
        if self._enforced is None:
            facts = self.connect().info()
            missing = {name for name, fact in (("memory", "MemoryLimit"), ("pids", "PidsLimit")) if not facts.get(fact)}
            self._enforced = LIMIT_NAMES - missing
        return self._enforced

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry in the image."""
        with self.answering():
            _, rootfs = self.image()
        return rootfs.python, rootfs.entry

    def end_leftovers(self) -> ReapReport:
        """Remove containers whose owner is dead."""
        ended: list[str] = []
        lost: list[str] = []
        try:
            containers = self.connect().containers.list(all=True, filters={"label": RUN_LABEL}, ignore_removed=True)
        except docker.errors.DockerException as error:
            return ReapReport(failed=(f"docker: {error}",))
        for container in containers:
            if not is_leftover(container.labels):
                continue
            try:
                container.remove(force=True, v=True)
                ended.append(f"container {container.name}")
            except docker.errors.DockerException as error:
                # Another process that removes leftovers was quicker, or is removing it at this moment.
                if getattr(error, "status_code", None) not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                    lost.append(f"container {container.name}: {error}")
        ended += reap_network_folders()  # what mounted them is gone by now
        return ReapReport(tuple(ended), tuple(lost))

    def image(self) -> tuple[str, Rootfs]:
        """Return the image's id and the tree it is made of; it is imported unless the daemon has it, and never pulled."""
        client = self.connect()
        with self._image_lock:
            if self._image is not None:
                return self._image
            tree = build_rootfs(self.options.cache_dir, **self.options.image)
            tar, digest = rootfs_for_image(self.options.cache_dir, **self.options.image)
            name = f"{REPOSITORY}:{digest.removeprefix('sha256:')[:32]}"
            try:
                image = client.images.get(name)
            except docker.errors.ImageNotFound:
                client.api.import_image_from_file(str(tar), repository=REPOSITORY, tag=name.partition(":")[2])
                image = client.images.get(name)
            if image.id is None:
                raise ExecRefused("docker imported an image without an id", engine=self.name)
            self._image = image.id, tree
            return self._image


def _knock() -> None:
    """Raise DockerException when nothing listens on the daemon's socket; the SDK's own try would leave sockets open."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not host.startswith("unix://"):
        return
    with socket.socket(socket.AF_UNIX) as knock:
        try:
            knock.connect(host.removeprefix("unix://"))
        except OSError as error:
            raise docker.errors.DockerException(f"{host}: {error.strerror or error}") from error


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `docker`."""
    register("docker", DockerExecutor)
