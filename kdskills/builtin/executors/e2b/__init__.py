"""E2B: programs in remote virtual machines, one per owner, reused while they live.

Only the SDK's public calls are used. Inside a sandbox, `kdskills_runtime.remote_init` walls each run in once more, so
that runs of one owner do not meet and limits are held where they can be. Orders, outputs and answers are files.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kdskills.builtin.executors.e2b.run import HOLD_S, E2bJob, E2bRun
from kdskills.builtin.executors.e2b.sandboxes import (
    HOME,
    Archive,
    Cloud,
    PreparedSandbox,
    SandboxLease,
    SandboxLeases,
    Trouble,
    code_archive,
    owner_key,
    prepare,
)
from kdskills.errors import ExecRefused, RootChanged, RootMissing
from kdskills.execution.check import check_request
from kdskills.execution.dirs import cache_dir, private_dir, state_dir
from kdskills.execution.owner import owner_labels
from kdskills.execution.payload import build_payload
from kdskills.execution.probing import canary_argv, failed, judge
from kdskills.execution.protocol import ProbeCheck, ProbeReport, ReapReport
from kdskills.execution.request import ExecRequest, ExecResult, IsolationLevel
from kdskills.execution.run import FinishedRun, skills_mismatch, to_the_end
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.hooks import Register, hookimpl

if TYPE_CHECKING:
    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory

KEY_VARIABLE: Final = "E2B_API_KEY"


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `e2b`."""
    register("e2b", E2bExecutor)


class E2bExecutor:
    """Runs programs in sandboxes of E2B.

    Args:
        options: The operator's settings; `options.e2b` holds this engine's own.
    """

    name = "e2b"
    level = IsolationLevel.VM

    def __init__(self, options: ExecutionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._boxes: dict[str, PreparedSandbox] = {}
        self._report: ProbeReport | None = None

    async def probe(self) -> ProbeReport:
        """Run the canary in a sandbox as any other program; a good answer is kept."""
        if self._report is None:
            report = await self._probe()
            if not report.ok:
                return report
            self._report = report
        return self._report

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end."""
        return await to_the_end(self, request)

    async def start(self, request: ExecRequest) -> E2bRun | FinishedRun:
        """Check and stage *request* and return at once; the run waits for its owner's sandbox by itself."""
        try:
            job = await asyncio.to_thread(self._prepare, request)
        except (RootChanged, RootMissing) as error:
            return skills_mismatch(error, self.name, self.level)
        run = E2bRun(self, job)
        run.begin()
        return run

    async def reap(self) -> ReapReport:
        """End sandboxes of dead owners and those over their time."""
        return await asyncio.to_thread(self._reap)

    @cached_property
    def _cloud(self) -> Cloud:
        secret = self._options.e2b.api_key
        key = secret.get_secret_value() if secret is not None else os.environ.get(KEY_VARIABLE, "")
        if not key.strip():
            raise ExecRefused(f"the engine e2b needs an API key: set {KEY_VARIABLE}", engine=self.name)
        return Cloud(self._options.e2b, key)

    @cached_property
    def _leases(self) -> SandboxLeases:
        return SandboxLeases(private_dir(self._options.state_dir or state_dir()) / "e2b")

    @cached_property
    def _code(self) -> Archive:
        return code_archive()

    def _prepare(self, request: ExecRequest) -> E2bJob:
        """Decide everything that can be decided here. Raises ExecRefused."""
        plan = check_request(request)
        if request.network != "none":
            raise ExecRefused("e2b runs programs without network only", code="limit_not_enforceable", engine=self.name)
        _ = self._cloud  # a missing key or SDK is refused here, not in the run's thread
        cache = self._options.cache_dir or cache_dir()
        settings = self._options.e2b
        return E2bJob(
            plan=plan,
            key=owner_key(request.owner, settings.api_url or "", settings.template),
            labels=owner_labels(request.owner, request.request_id or secrets.token_hex(8)),
            staged={mount.id: (mount.tree, stage_skill(mount, cache)) for mount in request.skills},
            inputs=read_inputs(request.inputs, request.limits),
            payload=build_payload(request) if request.code is not None else None,
            best_effort=self._options.best_effort,
            engine=self.name,
            level=self.level,
        )

    def lease(self, job: E2bJob, given_up: threading.Event) -> SandboxLease | None:
        """Wait for the lease of *job*'s owner; None when *given_up* was set first."""
        return self._leases.acquire(job.key, job.labels, job.plan.request.limits.wall_s + HOLD_S, given_up)

    def sandbox(self, lease: SandboxLease, job: E2bJob) -> PreparedSandbox:
        """Return the owner's sandbox: the one it has while that is within its times, else a new one. Raises Trouble."""
        settings, record, now = self._options.e2b, lease.record, time.time()
        needed = job.plan.request.limits.wall_s + HOLD_S
        if record.sandbox is None:
            return self._new(lease, job, needed)
        life_left = record.created + settings.hard_ttl_s - now
        if now - record.used > settings.idle_ttl_s or life_left < needed:
            self._cloud.kill(record.sandbox)
            self.lost(lease, job)
            return self._new(lease, job, needed)
        lifetime = min(settings.idle_ttl_s + needed, life_left)
        with self._lock:
            cached_sandbox = self._boxes.get(job.key)
        if cached_sandbox is not None and cached_sandbox.machine.id == record.sandbox:
            cached_sandbox.machine.live_for(lifetime)
            return cached_sandbox
        return self._keep(job, prepare(self._cloud.connect(record.sandbox, lifetime), self._code))

    def lost(self, lease: SandboxLease, job: E2bJob) -> None:
        """Forget the owner's sandbox, here and in the record."""
        with self._lock:
            self._boxes.pop(job.key, None)
        self._leases.note(lease, None, 0.0)

    def release(self, lease: SandboxLease, job: E2bJob) -> None:
        """Release the lease; when another run has it by now, forget the sandbox, which that run may have replaced."""
        if not self._leases.release(lease):
            with self._lock:
                self._boxes.pop(job.key, None)

    def _new(self, lease: SandboxLease, job: E2bJob, needed: float) -> PreparedSandbox:
        """Make a sandbox that lives as long as its times allow, but at least through this run. Raises Trouble."""
        settings = self._options.e2b
        lifetime = max(needed, min(settings.idle_ttl_s + needed, settings.hard_ttl_s))
        machine = self._cloud.create(lifetime, job.labels)
        # Making it may have taken longer than the lease: then the owner has another sandbox, and nobody knows of this one.
        if not self._leases.note(lease, machine.id, time.time()):
            self._cloud.kill(machine.id)
            raise Trouble("gone", "the lease was lost while the sandbox was made")
        try:
            return self._keep(job, prepare(machine, self._code))
        except ExecRefused:
            self._cloud.kill(machine.id)
            self.lost(lease, job)
            raise

    def _keep(self, job: E2bJob, box: PreparedSandbox) -> PreparedSandbox:
        with self._lock:
            self._boxes[job.key] = box
        return box

    async def _probe(self) -> ProbeReport:
        """Run the canary and judge it."""
        try:
            entry = f"{HOME}/code/{(await asyncio.to_thread(lambda: self._code)).digest}/kdskills_runtime/entry"
            # The machine's own machine-id is no file of this host.
            argv = tuple(word for word in canary_argv("python3", entry) if word != "/etc/machine-id")
            result = await self.run(ExecRequest(argv=argv))
        except ExecRefused as error:
            return ProbeReport(self.name, self.level, ok=False, cure=error.message)
        checks = judge(result.stdout.data) if result.status == "ok" else ()
        with self._lock:
            missing = sorted({name for box in self._boxes.values() for name in box.facts.missing})
        checks += (ProbeCheck("packages", not missing, f"missing for skills: {missing}"),)
        ok = result.status == "ok" and all(check.ok for check in checks)
        words = result.error.message if result.error else failed(checks)
        return ProbeReport(
            engine=self.name,
            level=self.level,
            ok=ok,
            checks=checks,
            limits=result.limits_enforced,
            cure=None if ok else f"use a template made from runtime/images/e2b.Dockerfile: {words}",
        )

    def _reap(self) -> ReapReport:
        settings = self._options.e2b
        ended: list[str] = []
        lost: list[str] = []
        for key, record, why in self._leases.leftovers(settings.idle_ttl_s, settings.hard_ttl_s):
            try:
                if record.sandbox is not None and self._cloud.kill(record.sandbox):
                    ended.append(f"sandbox {record.sandbox}: {why}")
            except (Trouble, ExecRefused) as error:
                lost.append(f"sandbox {record.sandbox}: {error}")
                continue
            self._leases.forget(key, record)
        return ReapReport(tuple(ended), tuple(lost))
