"""The skeleton of every engine and of its runs, start, tail, wait, cancel, end, result, and the choice of an engine.

An engine is a subclass of `ExecutionEngine` and one of `ExecutionRun`, or of `ProgramRun` where the program is a process of
this host (`docs/how-to/write-an-executor.md`). A probe runs a canary as any other program and judges what it saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from kdskills.errors import ExecFailed, ExecRefused, RootChanged, RootMissing
from kdskills.errors.traces import VARIABLE, current_trace
from kdskills.execution.check import RunPlan, check_request, require_limits
from kdskills.execution.dirs import PASSABLE, cache_dir, state_dir
from kdskills.execution.egress import TRUST_DIR, TRUST_ENV, TRUST_NAME, HostHeaders, host_rules, host_secrets
from kdskills.execution.egress_proxy import EgressProxy
from kdskills.execution.egress_secrets import RunSecrets
from kdskills.execution.owner import network_folder
from kdskills.execution.payload import ENVIRONMENTS_DIR, MAX_REPORT, SKILLS_DIR, apply_report
from kdskills.execution.processes import Pipes, require_calls, require_endings
from kdskills.execution.protocol import ExecutionOptions, Executor, ProbeCheck, ProbeReport, ReapReport
from kdskills.execution.request import ExecError, ExecRequest, ExecResult, IsolationLevel, Status
from kdskills.execution.stage import Collection, check_environment, stage_skill
from kdskills.execution.streams import Ending, HeadBuffer, Pump, output_buffers

T = TypeVar("T")


async def in_thread(make: Callable[[], T], undo: Callable[[T], Awaitable[object]]) -> T:
    """Run the blocking *make* in a thread of its own and return its result.

    A thread cannot be stopped halfway: when the caller is cancelled, its result is undone as soon as it is there, and
    only then is the cancellation raised. Raises what *make* raises.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))

    async def undone() -> None:
        await asyncio.wait([making])
        if making.exception() is None:  # a failed *make* left nothing to undo
            await undo(making.result())

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.shield(undone())
        raise


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """What an engine saw of a program's end."""

    reason: str  # `exited`, why we ended it (`timeout`, `cancelled`), or `refused` when it was never to start
    code: int | None
    signal: int | None
    duration_s: float
    trouble: ExecError | None = None  # why the program could not be started


def status_of(end: ProgramEnd) -> tuple[Status, int | None, int | None, ExecError | None]:
    """Return (status, exit code, signal, error) of an end, memory aside. Death by signal n has exit code 128 + n, as
    every shell says it. A program we ended, or that never started, has none.
    """
    if end.reason == "cancelled":
        return "cancelled", None, None, None
    if end.reason == "timeout":
        return "timeout", None, None, None
    if end.trouble is not None:
        return "refused" if end.reason == "refused" else "infra_error", None, None, end.trouble
    if end.signal is None:
        return "ok" if end.code == 0 else "nonzero", end.code, None, None
    code = 128 + end.signal
    if end.signal in {signal.SIGXCPU, signal.SIGXFSZ}:
        kind = "cpu" if end.signal == signal.SIGXCPU else "fsize"
        return "limit", code, end.signal, ExecError("program", kind, "the program hit its limit")
    return "nonzero", code, end.signal, None


def not_started(plan: RunPlan, stage: str, why: str) -> ExecError:
    """Return the error of a program that never ran, as *stage* failed: `exec`, `workdir`, or what should hold it."""
    match stage:
        case "exec":
            return ExecError(stage, "program_missing", f"{plan.argv[0] if plan.argv else 'python3'}: {why}")
        case "workdir":
            return ExecError(stage, "workdir_missing", f"{plan.cwd}: {why}")
    return ExecError(stage, "setup_failed", f"{stage}: {why}")


class SetupFailed(ExecFailed):
    """No program ran, as what should hold it did not come up: the result is `infra_error`, with `stage` of the details."""


@contextmanager
def preparing(engine: str) -> Iterator[None]:
    """Turn what fails before anything was started into a refusal. Raises ExecRefused."""
    try:
        yield
    except (ExecFailed, OSError) as error:
        raise ExecRefused(f"what a run needs cannot be prepared: {error}", engine=engine) from error


class ExecutionRun(ABC):
    """A started run, the `Handle` of every engine. A thread of its own prepares, starts and watches the program.

    `stack` undoes, at the run's end and before its result is told, whatever was made for it. `bounds` are limits of
    memory and pids as the kernel holds them for this run; empty without a cgroup. *probing* says that it is the canary.
    """

    def __init__(self, engine: ExecutionEngine, request: ExecRequest, *, probing: bool = False) -> None:
        self.engine, self.request, self.probing = engine, request, probing
        self.stdout, self.stderr = output_buffers(request)
        self.report = HeadBuffer(MAX_REPORT)
        self.enforced: frozenset[str] = frozenset()
        self.bounds: dict[str, int] = {}
        self.egress: EgressProxy | None = None
        self.secrets: RunSecrets | None = None
        self.stack = ExitStack()
        self.lock = threading.Lock()
        self.cancelled = threading.Event()
        self._started: Future[None] = Future()
        self._result: Future[ExecResult] = Future()

    @abstractmethod
    def prepare(self) -> None:
        """Check and stage everything that needs no program. Raises ExecRefused, RootChanged, RootMissing."""

    @abstractmethod
    def perform(self) -> ExecResult:
        """Start the program, call `tell_started` once it runs, and return its result. Raises SetupFailed."""

    @abstractmethod
    def stop(self) -> None:
        """Begin to end the whole tree, TERM, grace, KILL, and return at once; `cancelled` is set."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the program; nothing happens when it has ended."""

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self._result.done()

    def go(self) -> None:
        """Start the run's thread."""
        threading.Thread(target=self._main, name=f"kdskills-{self.engine.name}", daemon=True).start()

    async def begun(self) -> None:
        """Wait until the program runs, or the run is already over. Raises what preparing raises."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
        except asyncio.CancelledError:
            await asyncio.shield(self.cancel())
            raise

    async def wait(self) -> ExecResult:
        """Wait for the end and return the result; cancelling the wait does not end the run. Raises as `begun`."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    async def cancel(self) -> None:
        """End the whole tree and return when it is gone; `wait` then gives `cancelled`."""
        self.cancelled.set()
        self.stop()
        result = asyncio.wrap_future(self._result)
        await asyncio.wait({result})
        result.exception()  # marks it as retrieved; `wait` raises it

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        return self.stdout.tail(limit), self.stderr.tail(limit)

    def last_words(self, size: int) -> str:
        """Return the last *size* bytes of stderr as text."""
        return self.stderr.tail(size).decode("utf-8", "replace").strip()

    def forward(self, channel: socket.socket) -> None:
        """Serve the connections that come through *channel* from inside, by the rules of the request, until the run ends."""
        rules = host_rules(() if self.request.network == "none" else self.request.network)
        self.egress = EgressProxy(channel, rules, self.engine.options.egress, secrets=self.secrets)
        self.stack.callback(self.egress.close)

    def prepare_secrets(self) -> dict[str, Path]:
        """Make ready what the proxy puts into requests, and return what programs need to see for that, by path inside.

        Raises ExecRefused.
        """
        headers = self.engine.secrets_of(self.request)
        if not headers:
            return {}
        self.secrets = RunSecrets(headers, self.request.limits.wall_s)
        if not self.secrets.hosts:
            return {}
        folder = network_folder(self.stack)
        folder.parent.chmod(PASSABLE)  # the sandbox's uid looks it up there; certificates are nobody's secret
        (folder / TRUST_NAME).write_bytes(self.secrets.trust())
        (folder / TRUST_NAME).chmod(0o644)
        return {TRUST_DIR: folder}

    def tell_started(self) -> None:
        """Let `start` return."""
        if not self._started.done():
            self._started.set_result(None)

    def result(
        self,
        end: ProgramEnd,
        outputs: Collection | None = None,
        *,
        report: bytes | None = None,
        verdict: tuple[Status, ExecError | None] | None = None,
    ) -> ExecResult:
        """Return the result; *verdict* is from what the engine saw beyond the *end*, such as memory that ran out."""
        status, exit_code, number, error = status_of(end)
        status, error = (status, error) if verdict is None else verdict
        result = ExecResult(
            status=status,
            exit_code=exit_code,
            signal=number,
            stdout=self.stdout.stream(),
            stderr=self.stderr.stream(),
            duration_s=end.duration_s,
            engine=self.engine.name,
            level=self.engine.level,
            limits_enforced=self.enforced,
            artifacts=() if outputs is None else tuple(outputs.artifacts),
            artifact_errors=() if outputs is None else tuple(outputs.errors),
            error=error,
            connections=() if self.egress is None else self.egress.close(),
        )
        if self.request.code is None or report is None or end.trouble is not None:
            return result
        return apply_report(result, report)

    def _main(self) -> None:
        began = time.monotonic()
        try:
            with self.stack:
                with preparing(self.engine.name):
                    self.prepare()
                if self.cancelled.is_set():
                    result = self.result(ProgramEnd("cancelled", None, None, 0.0))
                else:
                    result = self.perform()
        except (RootChanged, RootMissing) as error:
            trouble = ExecError("skills", "skills_mismatch", error.message)
            result = self.result(ProgramEnd("refused", None, None, 0.0, trouble))
        except SetupFailed as error:
            reason = "cancelled" if self.cancelled.is_set() else "exited"
            trouble = ExecError(str(error.details.get("stage", "setup")), error.code, error.message)
            result = self.result(ProgramEnd(reason, None, None, time.monotonic() - began, trouble))
        except BaseException as error:  # noqa: BLE001 - raised again by `wait` and `begun`
            self._result.set_exception(error)
            if not self._started.done():
                self._started.set_exception(error)
            return
        self._result.set_result(result)
        self.tell_started()


class ProgramRun(ExecutionRun):
    """A run whose program is a process of this host, its pipes and its clock driven by a `Pump`."""

    pipes: Pipes
    _pump: Pump | None = None

    @abstractmethod
    def spawn(self) -> Pump:
        """Start the program and return the pump that ends it, made by `pump`. Raises SetupFailed."""

    @abstractmethod
    def conclude(self, ending: Ending) -> ExecResult:
        """Return the result; the pump has come to its end, and what `stack` undoes is still there."""

    def perform(self) -> ExecResult:
        """Start the program and drive its pump to the end."""
        pump = self.spawn()
        started = time.monotonic()
        with self.lock:
            self._pump = pump
            if self.cancelled.is_set():
                pump.cancel()
        self.tell_started()
        return self.conclude(pump.drive(started))

    def stop(self) -> None:
        """Have the pump end the tree."""
        with self.lock:
            if self._pump is not None:
                self._pump.cancel()

    def open_pipes(self, read: Sequence[str], write: Sequence[str]) -> Pipes:
        """Make the run's pipes, which its end closes: we read some and write the others."""
        self.pipes = Pipes.make(read, write)
        self.stack.callback(self.pipes.close)
        return self.pipes

    def pump(
        self,
        pidfd: int,
        inputs: Mapping[str, bytes],
        terminate: Callable[[], None],
        kill: Callable[[], None],
        **feeds: Callable[[bytes], None],
    ) -> Pump:
        """Return the `Pump` of the run's pipes, *inputs* by their names; *feeds* read others than stdout, stderr and report."""
        feeds = {"stdout": self.stdout.feed, "stderr": self.stderr.feed, "report": self.report.feed, **feeds}
        return Pump(
            pidfd=pidfd,
            outputs=[(self.pipes.take(name), feed) for name, feed in feeds.items() if name in self.pipes.ours],
            inputs=[(self.pipes.take(name), data) for name, data in inputs.items()],
            wall_s=self.request.limits.wall_s,
            terminate=terminate,
            kill=kill,
        )


CANARY_FILES: Final = ("/etc/shadow", "/etc/machine-id")
"""Host files a sandbox must not be able to read, beside the engine's own sources."""


def canary_argv(python: str, entry: str) -> tuple[str, ...]:
    """Return the argument list of the canary, which lies beside the entry file *entry*."""
    return (python, "-I", entry.rpartition("/")[0] + "/canary.py", *CANARY_FILES, str(Path(__file__).resolve()))


def judge(output: bytes, *, sockets: bool = True, families: Sequence[str] = ()) -> tuple[ProbeCheck, ...]:
    """Return one check per promise of the probe, from the canary's own words; garbage fails as `canary`. With *sockets*
    the only interface must be `lo`; else none may be made but of *families*, as engines without such a namespace promise.
    """
    try:
        report = json.loads(output)
        network = "interfaces" if sockets else "sockets"
        rows = {
            "host_files": (not report["readable"], f"readable: {report['readable']}"),
            "core_pattern": (not report["core_pattern_writable"], f"writable: {report['core_pattern_writable']}"),
            "uid": (report["uid"] != 0, f"uid {report['uid']}"),
            "capabilities": (report["cap_bounding"] == 0, f"bounding set {report['cap_bounding']:#x}"),
            "seccomp": (report["seccomp"] == 2, f"mode {report['seccomp']}"),
            "no_new_privs": (report["no_new_privs"] == 1, str(report["no_new_privs"])),
            "network": (report[network] == (["lo"] if sockets else [*families]), f"{network} {report[network]}"),
            "root_read_only": (not report["root_writable"], f"writable: {report['root_writable']}"),
        }
        return tuple(ProbeCheck(name, ok, words) for name, (ok, words) in rows.items())
    except (ValueError, KeyError, TypeError) as error:
        return (ProbeCheck("canary", ok=False, found=f"the canary did not answer: {error!r}"),)


def failed(checks: Sequence[ProbeCheck]) -> str:
    """Return the failed checks as one line."""
    return "; ".join(f"{check.name}: {check.found}" for check in checks if not check.ok)


class ExecutionEngine(ABC):
    """What every engine has: the `Executor` protocol but for its runs."""

    name: str
    level: IsolationLevel
    run_type: ClassVar[type[ExecutionRun]]
    least: ClassVar[Mapping[str, int]] = {}
    """What the engine itself needs within the program's limits."""
    networks: ClassVar[bool] = False
    """Whether it can restrict a program to some hosts."""
    environments: ClassVar[bool] = False
    """Whether its programs find the packages of a request's environment."""
    terminals: ClassVar[bool] = False
    """Whether its programs can have a terminal for their standard streams."""
    network_env: ClassVar[Mapping[str, str]] = {}
    """Variables of a program that may reach some hosts."""
    children: ClassVar[bool] = True
    """Whether it starts processes of this host, so that their ends must be seen here."""
    own_files: ClassVar[frozenset[str]] = frozenset()
    """Files the canary may read, as those it sees are none of this host's."""
    cure: ClassVar[str] = "look into the sandbox's set-up: "
    """What an operator does about a canary that saw too much."""
    refusal_cure: ClassVar[str] = ""
    """What an operator does about a canary that was refused."""

    def __init__(self, options: ExecutionOptions) -> None:
        self.options = options
        self.best_effort = options.best_effort
        self.lock = threading.Lock()
        self._probed: tuple[object, ProbeReport] | None = None

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end; the whole tree is gone when CancelledError is raised. Raises ExecRefused: nothing was run."""
        run = self.run_type(self, traced(request))
        run.go()
        try:
            return await run.wait()
        except asyncio.CancelledError:
            await asyncio.shield(run.cancel())
            raise

    async def start(self, request: ExecRequest, *, probing: bool = False) -> ExecutionRun:
        """Start and return the run once its program runs; *probing* says that it is the canary. Raises as `run`."""
        run = self.run_type(self, request if probing else traced(request), probing=probing)
        run.go()
        await run.begun()
        return run

    async def probe(self) -> ProbeReport:
        """Run the canary as any other program; the report is kept as long as `probe_key` stays.

        A bad report on what is no process of this host is not kept: the other side may be mended without a word to us.
        """
        key = self.probe_key()
        if self._probed is None or self._probed[0] != key:
            report = await self._probe()
            self._probed = (key, report) if self.children or report.ok else None
            return report
        return self._probed[1]

    async def reap(self) -> ReapReport:
        """End what dead owners left."""
        return await asyncio.to_thread(self.end_leftovers)

    def end_leftovers(self) -> ReapReport:
        """End what dead owners left; blocks."""
        return ReapReport()

    def probe_key(self) -> tuple[object, ...]:
        """Return what a report of the probe holds for: the kernel and our uid, where programs are processes of this host."""
        return (platform.release(), os.geteuid()) if self.children else ()

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry as programs see them; blocks, and raises when there are none."""
        raise NotImplementedError  # an engine without an interpreter has a `probe` of its own instead

    def judged(self, run: ExecutionRun, result: ExecResult) -> tuple[ProbeCheck, ...]:
        """Return the checks of the canary's *run*."""
        return judge(result.stdout.data)

    def cure_of(self, words: str) -> str:
        """Return one sentence for the operator about a sandbox that does not hold."""
        return f"{self.cure}{words}"

    def checked(self, request: ExecRequest) -> RunPlan:
        """Check *request* for this engine and return its plan. Raises ExecRefused."""
        require_consent(self, request, allow_unisolated=self.options.allow_unisolated)
        if self.children:
            require_calls(self.name)
            require_endings(self.name)
        own = request.env
        if request.network != "none":
            request = replace(request, env={**self.network_env, **request.env})
        plan = check_request(request)
        if request.network != "none" and not self.networks:
            words = f"{self.name} cannot restrict a program to some hosts; use bubblewrap or docker, or grant none"
            raise ExecRefused(words, code="limit_not_enforceable", engine=self.name)
        if request.environment is not None and not self.environments:
            words = f"{self.name} cannot give a program an environment"
            raise ExecRefused(words, code="environment_not_supported", engine=self.name)
        if request.terminal is not None and not self.terminals:
            words = f"{self.name} cannot give a program a terminal; use bubblewrap"
            raise ExecRefused(words, code="terminal_not_supported", engine=self.name)
        if any(origin.tls for origin in self.secrets_of(request)):  # variables that only an engine may set
            plan = replace(plan, request=replace(request, env={**request.env, **TRUST_ENV, **own}))
        for name, least in self.least.items():
            if getattr(request.limits, name) < least:
                words = f"{self.name} itself needs a limit of at least {least} for {name}"
                raise ExecRefused(words, code="limit_not_enforceable", limits=[name], engine=self.name)
        return plan

    def secrets_of(self, request: ExecRequest) -> HostHeaders:
        """Return the headers that the proxy puts into requests of the program, by origin. Raises ExecRefused."""
        if request.network == "none":
            return {}
        headers = host_secrets(self.options.network_secrets, request.network_skills)
        if headers and not self.network_env:
            words = f"{self.name} has a proxy of its own, which cannot put in secrets; use bubblewrap or docker"
            raise ExecRefused(words, code="limit_not_enforceable", engine=self.name)
        return headers

    def require(self, enforced: frozenset[str]) -> frozenset[str]:
        """Return the limits that hold. Raises ExecRefused for others, unless they are listed as best effort."""
        require_limits(enforced, self.best_effort, self.name)
        return enforced

    def stage(self, request: ExecRequest, *, passable: bool = False) -> dict[str, Path]:
        """Return a checked copy of each mounted skill, by full id. Raises RootChanged, RootMissing."""
        cache = self.options.cache_dir or cache_dir()
        return {mount.id: stage_skill(mount, cache, passable=passable) for mount in request.skills}

    def environment(self, request: ExecRequest, *, passable: bool = False) -> Path | None:
        """Return the checked folder of the request's environment, None without one. Raises ExecRefused."""
        return None if request.environment is None else check_environment(request.environment, passable=passable)

    def mounts(self, request: ExecRequest, *, passable: bool = False) -> dict[str, Path]:
        """Return all that a program sees read-only, its skills and its environment, by the path inside. Raises as both do."""
        folders = {f"{SKILLS_DIR}/{name}": path for name, path in self.stage(request, passable=passable).items()}
        root = self.environment(request, passable=passable)
        if request.environment is not None and root is not None:
            folders[f"{ENVIRONMENTS_DIR}/{request.environment.digest}"] = root
        return folders

    def state(self) -> Path:
        """Return the folder of run records."""
        return self.options.state_dir or state_dir()

    async def _probe(self) -> ProbeReport:
        try:
            if self.children:
                require_calls(self.name)
            python, entry = await asyncio.to_thread(self.interpreter)
            argv = tuple(word for word in canary_argv(python, entry) if word not in self.own_files)
            run = await self.start(ExecRequest(argv=argv), probing=True)
            result = await run.wait()
        except (ExecRefused, ExecFailed) as error:
            return ProbeReport(self.name, self.level, ok=False, cure=f"{self.refusal_cure}{error.message}")
        except OSError as error:
            return ProbeReport(self.name, self.level, ok=False, cure=f"make what a run needs accessible: {error}")
        checks = self.judged(run, result)
        ok = result.status == "ok" and all(check.ok for check in checks)
        words = result.error.message if result.error else failed(checks)
        cure = None if ok else self.cure_of(words)
        return ProbeReport(self.name, self.level, ok, checks, result.limits_enforced, cure)


def traced(request: ExecRequest) -> ExecRequest:
    """Return the request of a program that is told which trace it belongs to, if it belongs to any.

    Generated code is not: without variables of its own it runs in a process that is prepared ahead.
    """
    trace = current_trace()
    if trace is None or request.code is not None or VARIABLE in request.env:
        return request
    return replace(request, env={**request.env, VARIABLE: str(trace)})


AUTO_ORDER = ("bubblewrap", "docker", "landlock")
"""Engines `auto` may take, in this order; every other engine must be asked for by name."""

UNSAFE_PROFILE = "unsafe-local"


async def choose(
    engines: Sequence[Executor],
    name: str = "auto",
    *,
    min_isolation: IsolationLevel = IsolationLevel.NAMESPACE,
    allow_unisolated: bool = False,
) -> Executor:
    """Return the engine to use; nothing is ever degraded silently.

    Args:
        engines: The engines there are.
        name: `auto`, or the name of one engine.
        min_isolation: Weakest level to accept. `landlock` is accepted below NAMESPACE under `auto` only when no
            stronger engine is there, as it is meant for the inside of ordinary containers.
        allow_unisolated: The operator's own consent to engines of level NONE. Every call must also say
            `profile="unsafe-local"`, which `require_consent` checks.

    Raises:
        ExecRefused: `engine_unavailable` with every probe and its cure, `isolation_too_weak`, or `policy_denied`.
    """
    if name != "auto":
        return await _engine_by_name(engines, name, min_isolation, allow_unisolated=allow_unisolated)
    engines_by_name = {engine.name: engine for engine in engines}
    reports: list[ProbeReport] = []
    for candidate in AUTO_ORDER:
        if (engine := engines_by_name.get(candidate)) is None:
            continue
        lowest = min(min_isolation, IsolationLevel.LANDLOCK) if candidate == "landlock" else min_isolation
        if min_isolation > IsolationLevel.NAMESPACE:
            lowest = min_isolation
        if engine.level < lowest:
            reports.append(ProbeReport(candidate, engine.level, ok=False, cure=f"its level is below {lowest.name}"))
            continue
        report = await engine.probe()
        if report.ok:
            return engine
        reports.append(report)
    raise unavailable(reports)


def require_consent(engine: Executor, request: ExecRequest, *, allow_unisolated: bool) -> None:
    """Refuse a run without a wall unless operator and call both asked for it. Raises ExecRefused: `policy_denied`."""
    if engine.level == IsolationLevel.NONE and not (allow_unisolated and request.profile == UNSAFE_PROFILE):
        raise _without_consent(engine, f" and the call profile={UNSAFE_PROFILE!r}")


def _without_consent(engine: Executor, further: str = "") -> ExecRefused:
    words = f"{engine.name} runs programs without isolation: the operator's settings must say allow_unisolated = true"
    return ExecRefused(words + further, code="policy_denied", engine=engine.name)


def unavailable(reports: Sequence[ProbeReport]) -> ExecRefused:
    """Return the refusal that lists every probe and what would cure it."""
    lines = "; ".join(f"{report.engine}: {report.cure or 'its probe failed'}" for report in reports)
    words = "no isolation engine works here" + (f" ({lines})" if lines else ": none is installed")
    probes = [
        {"engine": one.engine, "cure": one.cure, "failed": [f"{c.name}: {c.found}" for c in one.checks if not c.ok]}
        for one in reports
    ]
    return ExecRefused(words, code="engine_unavailable", probes=probes)


async def _engine_by_name(
    engines: Sequence[Executor], name: str, min_isolation: IsolationLevel, *, allow_unisolated: bool
) -> Executor:
    engine = next((engine for engine in engines if engine.name == name), None)
    if engine is None:
        names = ", ".join(sorted(engine.name for engine in engines)) or "none"
        raise ExecRefused(f"no engine is named {name!r}; there are: {names}", engine=name)
    if engine.level == IsolationLevel.NONE:
        if not allow_unisolated:
            raise _without_consent(engine)
        return engine
    if engine.level < min_isolation:
        words = f"{name} isolates at level {engine.level.name}, below {min_isolation.name}"
        raise ExecRefused(words, code="isolation_too_weak", engine=name)
    report = await engine.probe()
    if not report.ok:
        raise unavailable([report])
    return engine
