"""Docker: one locked-down container per run, from an image made offline.

The engine talks to the daemon through its SDK, never through command lines. Blocking calls run in a few threads of the
engine's own, which also queue runs: docker does not get faster by more callers. Inputs and outputs pass through
`kdskills_runtime.container_init`, because nothing can be copied into or out of a container's tmpfs from outside.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from kdskills.builtin.executors.docker.run import PATH, ContainerJob, DockerRun, Image
from kdskills.errors import ExecFailed, ExecRefused, RootChanged, RootMissing
from kdskills.execution.check import LIMIT_NAMES, check_request, require_limits
from kdskills.execution.container import NONCE_SIZE, build_order
from kdskills.execution.dirs import cache_dir
from kdskills.execution.owner import RUN_LABEL, is_leftover, owner_labels
from kdskills.execution.payload import build_payload
from kdskills.execution.probing import canary_argv, failed, judge
from kdskills.execution.protocol import ProbeReport, ReapReport
from kdskills.execution.request import ExecRequest, ExecResult, IsolationLevel
from kdskills.execution.rootfs import build_rootfs, rootfs_for_image
from kdskills.execution.run import FinishedRun, skills_mismatch, to_the_end
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.hooks import Register, hookimpl

if TYPE_CHECKING:
    from docker import DockerClient

    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory

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
