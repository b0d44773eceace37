"""Between an attempt and its engine: order to request, result to verdict, services' companions, and a session's files.

A command gets copies of a session's files. When it is dead, what it changed becomes a new version: a folder of its own,
named by one small file that is replaced by rename, so a crash before that leaves the old version. Two commands that
overlapped all the same lose nothing of each other: only what a command itself changed is carried over.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from kdskills.errors import BadRequest, ExecFailed, ExecRefused, KdskillsError
from kdskills.errors.traces import VARIABLE
from kdskills.execution.check import compile_glob, output_problem
from kdskills.execution.dirs import locked
from kdskills.execution.egress import PROXY_PORT
from kdskills.execution.protocol import Handle, Reachable
from kdskills.execution.request import MAX_BACKGROUND_S, Artifact, ExecRequest, ExecResult, InputFile, LogFiles, Owner
from kdskills.execution.run import UNSAFE_PROFILE
from kdskills.execution.stage import MAX_ERRORS
from kdskills.jobs import shim
from kdskills.jobs.attempts import (
    AttemptFacts,
    AttemptOrder,
    OutFile,
    OutputBounds,
    ProcessIdentity,
    Verdict,
    VerdictStatus,
)
from kdskills.jobs.companion import line_pattern
from kdskills.jobs.model import Endpoint, Inline, OnHttp, OnPattern, OnPort, OutputError, ServiceSpec
from kdskills.skills.private_files import make_folder, open_private, private_folder

_LOG: Final = logging.getLogger("kdskills.jobs")
LOOK_S: Final = 0.02
MAX_PATTERN: Final = 1000
MAX_PORTS: Final = 32
_PATH: Final = re.compile(r"/[!-~]{0,2000}")
_SCRIPT: Final = Path(__file__).with_name("companion.py")


def needs_network(service: ServiceSpec) -> bool:
    """Whether the service's network must be entered from the host."""
    return bool(service.expose_ports) or (service.ready is not None and not isinstance(service.ready, OnPattern))


def _ports(service: ServiceSpec) -> set[int]:
    """Return the ports of the sandbox that somebody outside speaks to."""
    ready = service.ready
    ready_ports = (
        {ready.tcp_port} if isinstance(ready, OnPort) else {ready.port} if isinstance(ready, OnHttp) else set()
    )
    return {*service.expose_ports, *ready_ports}


def check_service(service: ServiceSpec) -> None:
    """Raise BadRequest for a pattern, a path of an HTTP check or a port that is none, before anything runs."""
    errors: list[str] = []
    ready = service.ready
    if isinstance(ready, OnPattern):
        try:
            line_pattern(ready.pattern)
        except ValueError as error:
            errors.append(f"ready.pattern: {error}")
        if len(ready.pattern) > MAX_PATTERN:
            errors.append(f"ready.pattern: longer than {MAX_PATTERN} characters")
    if isinstance(ready, OnHttp) and not _PATH.fullmatch(ready.path):
        errors.append("ready.http.path: not a path of visible ASCII characters that begins with '/'")
    errors += [f"expose_ports: {port} is no port" for port in service.expose_ports if not 0 < port < 65536]
    if len(set(service.expose_ports)) != len(service.expose_ports) or len(service.expose_ports) > MAX_PORTS:
        errors.append(f"expose_ports: a port twice, or more than {MAX_PORTS}")
    if errors:
        raise BadRequest(f"the service cannot be run: {'; '.join(errors)}", errors=errors)


async def network_of(handle: Handle, engine: str) -> int:
    """Return an open descriptor of the network *handle* runs in, waiting until there is one.

    Raises ExecRefused, `ports_not_supported`, when this engine's programs cannot be reached from here.
    """
    if not isinstance(handle, Reachable):
        raise ExecRefused(
            f"programs on {engine} cannot be reached from this host: expose no ports, and tell readiness by a pattern",
            code="ports_not_supported",
            engine=engine,
        )
    while True:
        pid = await asyncio.to_thread(_pid, handle)
        if pid is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                if await asyncio.to_thread(_pid, handle) == pid:  # it still was this process, not one of its number
                    return fd
                os.close(fd)
        await asyncio.sleep(LOOK_S)


class Companion:
    """A running companion; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, ports: Mapping[int, int]) -> None:
        self.process = process
        self.endpoints = tuple(
            Endpoint(port=port, host_port=host, url=f"http://127.0.0.1:{host}") for port, host in ports.items()
        )
        self.identity = ProcessIdentity.model_validate(shim.identity(process.pid))

    @classmethod
    async def start(
        cls,
        service: ServiceSpec,
        logs: Sequence[Path],
        *,
        network: int | None,
        preferred_ports: Mapping[int, int],
        exact: bool = False,
    ) -> Companion:
        """Start the companion of *service*, whose *network* stays open here.

        It listens on the *preferred_ports* of the host, by the service's port, or on any free one unless *exact*.
        Raises ExecFailed when it cannot, or cannot enter the network; its own words are in the shim's log.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-s", "-P", str(_SCRIPT)),  # not -I: RE2 may be on this process's own PYTHONPATH
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=() if network is None else (network,),
            )
        except OSError as error:  # no process, descriptor or memory is to be had now
            _LOG.warning("what stands beside the service cannot be started: %s", error)
            raise ExecFailed("what stands beside the service cannot be started", code="forwarder_failed") from error
        order = {
            "network": network,
            "ports": {str(port): preferred_ports.get(port, 0) for port in service.expose_ports},
            "exact": exact,
            "ready": {} if service.ready is None else service.ready.model_dump(),
            "logs": [str(path) for path in logs],
        }
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            answer = json.loads(await process.stdout.readline() or b"{}")
            ports = {int(port): int(host) for port, host in answer["ports"].items()}
        except (OSError, KeyError, ValueError) as error:
            await _end(process)
            raise ExecFailed("the service's ports cannot be reached from this host", code="forwarder_failed") from error
        except BaseException:  # raised again: a cancelled start leaves no process
            await _end(process)
            raise
        return cls(process, ports)

    async def ready(self) -> None:
        """Wait until the service is ready. Raises ExecFailed when the companion dies over it."""
        assert self.process.stdout is not None
        if not await self.process.stdout.readline():
            raise ExecFailed("what watched the service's readiness died", code="forwarder_failed")


def _pid(handle: Reachable) -> int | None:
    with contextlib.suppress(OSError):  # the engine may not know it any more; a run that is over is found out elsewhere
        return handle.network_namespace()
    return None


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


AGAIN_S: Final = 0.5
"""Pause before a forwarder that died is replaced, on the same host ports."""


class StartupTimeout(KdskillsError, code="startup_timeout"):
    """A service was not ready in its time; its program is ended."""


async def supervise(
    service: ServiceSpec,
    handle: Handle,
    logs: Sequence[Path],
    preferred_ports: Mapping[int, int],
    facts: AttemptFacts,
    tell: Callable[[AttemptFacts], None],
) -> None:
    """Bring a service to readiness and keep its ports reachable while its program runs, until cancelled.

    It listens on the *preferred_ports* of the host when they are free, by the service's port, and hands the facts it adds
    to those of the attempt to *tell*. Raises BadRequest for a spec that cannot be met, StartupTimeout, ExecRefused when
    its engine's programs cannot be reached, and ExecFailed when what it needs beside it broke while it started.
    """
    check_service(service)
    start = partial(Companion.start, service, logs)
    network: int | None = None
    companion: Companion | None = None

    def note(**changes: object) -> None:
        nonlocal facts
        if companion is not None and companion.endpoints:
            changes |= {"endpoints": companion.endpoints, "forwarder": companion.identity}
        facts = facts.model_copy(update=changes)
        tell(facts)

    try:
        try:
            async with asyncio.timeout(service.startup_timeout_s):
                if needs_network(service):
                    network = await network_of(handle, facts.engine)
                if network is not None or service.ready is not None:
                    companion = await start(network=network, preferred_ports=preferred_ports)
                    if service.ready is not None:
                        await companion.ready()
        except TimeoutError:
            raise StartupTimeout(f"the service was not ready within {service.startup_timeout_s:g} s") from None
        note(ready_at=time.time())
        ports = {item.port: item.host_port for item in facts.endpoints}
        while companion is not None and service.expose_ports:
            await companion.process.wait()
            while companion.process.returncode is not None:  # until one has the same host ports again
                await asyncio.sleep(AGAIN_S)
                with contextlib.suppress(ExecFailed):  # its words are in the shim's log; endpoints are down meanwhile
                    companion = await start(network=network, preferred_ports=ports, exact=True)
            note()
        await asyncio.Event().wait()
    finally:
        if companion is not None:
            await _end(companion.process)
        if network is not None:
            os.close(network)


EVERYTHING: Final = "**"
MARKER: Final = ".kdskills-looked"
"""An output no program is told of: that it is named missing shows that the workdir was looked at."""
_SPARE_FILES: Final = 128


def to_request(order: AttemptOrder, folder: Path, session: Mapping[str, tuple[Path, int]]) -> ExecRequest:
    """Return what the engine is asked to run for the attempt in *folder*.

    *session* are the session's files and their modes, by path; an input of the same path takes a file's place. Raises
    BadRequest for an input whose content is no base64, or that has neither content nor a file on this host, and for a
    service with a network on the port of its proxy.
    """
    spec, keeps = order.spec, order.session_dir is not None
    command, placement, scope = spec.command, spec.placement, spec.scope
    if placement.network and spec.service is not None and PROXY_PORT in _ports(spec.service):
        words = f"port {PROXY_PORT} is that of the proxy of a program with a network: use another"
        raise BadRequest(words, errors=[f"expose_ports: {PROXY_PORT}"])
    inputs = {path: InputFile(path, file, bool(mode & 0o100)) for path, (file, mode) in session.items()}
    inputs |= {item.path: item for item in _inputs(order)}
    limits = placement.limits
    bounds = replace(
        limits,
        wall_s=MAX_BACKGROUND_S if command.timeout_s is None else command.timeout_s,
        nofile=max(limits.nofile, len(inputs) + _SPARE_FILES if len(inputs) > _SPARE_FILES else 0),
        output_files=max(order.session_files if keeps else 0, limits.output_files),
        output_size=max(limits.work_size if keeps else 0, limits.output_size),
    )
    return ExecRequest(
        argv=command.argv,
        env=({VARIABLE: spec.traceparent} if spec.traceparent else {}) | command.env,
        skills=placement.skills,
        environment=placement.environment,
        inputs=tuple(inputs.values()),
        outputs=(*command.outputs, *((EVERYTHING, MARKER) if keeps else ())),  # all that the session keeps
        workdir=command.cwd,
        limits=bounds,
        network=placement.network or "none",
        network_skills=(placement.skill_name,) if placement.network else (),
        profile=UNSAFE_PROFILE if placement.unsafe_local else None,
        request_id=f"{order.task_id}.{order.attempt}",
        owner=Owner(scope.tenant, scope.project, scope.agent, spec.session_id or order.task_id),
        logs=LogFiles(folder / shim.STDOUT, folder / shim.STDERR, order.log_limit),
        background=True,
    )


def shows(order: AttemptOrder, path: str) -> bool:
    """Whether *path* was declared an output, rather than only kept by the session or looked for by us."""
    if path == MARKER:
        return False
    parts = tuple(path.split("/"))
    return any(compile_glob(pattern).matches(parts) or pattern == path for pattern in order.spec.command.outputs)


def _inputs(order: AttemptOrder) -> list[InputFile]:
    artifact_files = {item.path: item.file for item in order.inputs}
    result: list[InputFile] = []
    for item in order.spec.command.inputs:
        if isinstance(item, Inline):
            try:
                result.append(InputFile(item.path, base64.b64decode(item.content_base64, validate=True)))
            except ValueError as error:
                raise BadRequest(f"input {item.path!r} is no base64: {error}", errors=[item.path]) from error
        elif item.path in artifact_files:
            result.append(InputFile(item.path, artifact_files[item.path]))
        else:
            raise BadRequest(f"input {item.path!r} was not found on this host", errors=[item.path])
    return result


_CODES: Final = {"cancelled": "canceled", "nonzero": None, "ok": None}


def to_verdict(
    order: AttemptOrder,
    folder: Path,
    result: ExecResult,
    *,
    started_at: float,
    session_errors: Sequence[OutputError] = (),
    override: KdskillsError | None = None,
) -> Verdict:
    """Write the declared outputs below the attempt's *folder* and return the verdict on *result*.

    *started_at* is in seconds since the epoch, *session_errors* are of files the session could not store, and
    *override* is why we ended it, in the place of what the engine says.
    """
    declared = [item for item in result.artifacts if shows(order, item.path)]
    outputs, refused = keep_outputs(folder, declared, order.outputs)
    missing = [
        OutputError(path=item.path, code=item.code, message=item.message)
        for item in result.artifact_errors
        if item.path != EVERYTHING and shows(order, item.path)
    ]
    status: VerdictStatus = result.status
    code, error = _CODES.get(status, status), result.error
    if status in {"refused", "infra_error", "limit"} and error is not None:
        code = error.code
    words = None if error is None else error.message
    if override is not None:
        status, code, words = status_of_error(override), override.code, override.message
    return Verdict(
        status=status,
        exit_code=result.exit_code,
        signal=result.signal,
        error_code=code,
        error_message=None if words is None else words[:4000],
        started_at=started_at,
        finished_at=time.time(),
        duration_ms=round(result.duration_s * 1000),
        stdout_total=result.stdout.total,
        stderr_total=result.stderr.total,
        artifacts=tuple(outputs),
        output_errors=(*missing, *refused, *session_errors),
        enforced=tuple(sorted(result.limits_enforced)),
        connections=result.connections,
    )


def refusal(error: KdskillsError) -> Verdict:
    """Return the verdict on an attempt whose program was never started."""
    status, words = status_of_error(error), error.message[:4000]
    return Verdict(status=status, error_code=error.code, error_message=words, finished_at=time.time())


def status_of_error(error: KdskillsError) -> VerdictStatus:
    """Return the status of an attempt that ended for *error*."""
    if error.code == "startup_timeout":
        return "startup_timeout"
    return "infra_error" if isinstance(error, ExecFailed) else "refused"


def keep_outputs(
    folder: Path, artifacts: Iterable[Artifact], bounds: OutputBounds
) -> tuple[list[OutFile], list[OutputError]]:
    """Write *artifacts* as files below *folder* within *bounds*; what does not fit is named."""
    outputs: list[OutFile] = []
    refused: list[OutputError] = []
    room = bounds.total
    for item in artifacts:
        if len(outputs) >= bounds.files:
            refused.append(OutputError(path=item.path, code="too_many", message=f"more than {bounds.files} outputs"))
            continue
        if item.size > min(bounds.each, room):
            message = f"{item.size} bytes; an output may have {bounds.each}, all together {bounds.total}"
            refused.append(OutputError(path=item.path, code="too_large", message=message))
            continue
        name = f"{shim.OUT}/{len(outputs):04d}"
        (folder / shim.OUT).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as sink:
            sink.write(item.content)
        room -= item.size
        outputs.append(OutFile(path=item.path, size=item.size, sha256=item.sha256, mode=item.mode, file=name))
    return outputs, refused


_CURRENT: Final = "current"
_LOCK: Final = ".lock"
_NEW: Final = ".new-"
_KEPT_OUT: Final = frozenset({"link", "not_regular", "bad_name"})
_UNREAD: Final = frozenset({"too_large", "too_many", "too_deep", "unreadable"})


class SessionFile(NamedTuple):
    """One file of a version."""

    mode: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SessionVersion:
    """One version: its folder, and its files by path."""

    folder: Path
    entries: Mapping[str, SessionFile]

    @property
    def files(self) -> dict[str, tuple[Path, int]]:
        """Where each file lies, and its mode, by path."""
        return {path: (self.folder / path, file.mode) for path, file in self.entries.items()}

    def contains(self, item: Artifact) -> bool:
        """Whether *item* is what the version has at its path."""
        return self.entries.get(item.path) == _entry(item)


@dataclass(frozen=True, slots=True)
class WorkdirFiles:
    """What a command left in its workdir; unless it is *complete*, what is missing is not taken for removed."""

    files: Sequence[Artifact]
    complete: bool
    errors: Sequence[OutputError] = ()


def workdir_files(result: ExecResult) -> WorkdirFiles | None:
    """Return what the program of *result* left behind; None when nobody could look."""
    errors = result.artifact_errors
    files = [item for item in result.artifacts if item.path != MARKER]
    flood = len(errors) >= MAX_ERRORS
    if not flood and len(files) == len(result.artifacts) and all(error.path != MARKER for error in errors):
        return None
    reportable = [error for error in errors if error.code in _KEPT_OUT or error.code in _UNREAD]
    return WorkdirFiles(
        files=files,
        complete=not flood and all(error.code not in _UNREAD for error in errors),
        errors=[
            OutputError(path=e.path, code=e.code, message=f"not kept in the session: {e.message}") for e in reportable
        ],
    )


class SessionFolder:
    """One session's files; the folder is made when something is kept, or read under the lock."""

    def __init__(self, top: Path) -> None:
        self._top = top

    @contextlib.contextmanager
    def reading(self) -> Iterator[SessionVersion]:
        """Hold the session still and give its files; they stay where they are until the end of the block."""
        with self._locked():
            yield self._version()

    def version_name(self) -> str:
        """Return which version the files are, another whenever they changed."""
        with self.reading() as version:
            return version.folder.name

    def commit(self, base: SessionVersion, workdir: WorkdirFiles, bounds: OutputBounds) -> list[OutputError]:
        """Carry what a command changed since *base*, the version it was given, into a new one; return what cannot be kept."""
        files = {item.path: item for item in workdir.files}
        errors = list(workdir.errors)
        with self._locked():
            current = self._version()
            changed = {
                path: item for path, item in files.items() if not base.contains(item) and not current.contains(item)
            }
            for path in sorted(changed):
                problem = output_problem(path)
                if problem is not None:
                    errors.append(OutputError(path=path, code="bad_name", message=f"the path {problem}"))
                    del changed[path]
            # a file another command changed meanwhile is not removed by this one
            removed = {
                path
                for path, file in base.entries.items()
                if workdir.complete and path not in files and current.entries.get(path) == file
            }
            remaining = {path: file for path, file in current.entries.items() if path not in removed}
            errors += _bound(changed, remaining, bounds)
            folders = {str(parent) for path in changed for parent in PurePosixPath(path).parents}
            stays = {  # no other content of what changed, no file where a folder must be, or below what is a file now
                path: file
                for path, file in remaining.items()
                if path not in changed
                and path not in folders
                and not any(str(parent) in changed for parent in PurePosixPath(path).parents)
            }
            if changed or removed:
                self._exchange(current.folder, stays, changed)
        return errors

    def _version(self) -> SessionVersion:
        try:
            facts = json.loads((self._top / _CURRENT).read_bytes())
        except FileNotFoundError:
            return SessionVersion(self._top, {})
        files = {path: SessionFile(*values) for path, values in facts["files"].items()}
        return SessionVersion(self._top / Path(facts["version"]).name, files)

    def _exchange(self, old: Path, stays: Mapping[str, SessionFile], changed: Mapping[str, Artifact]) -> None:
        """Build the new version, make it the current one, and remove every other."""
        name = f"v-{secrets.token_hex(8)}"
        new = self._top / name
        new.mkdir(mode=0o700)
        for path in (*stays, *changed):
            make_folder((new / path).parent)
        for path in stays:
            os.link(old / path, new / path, follow_symlinks=False)  # versions never change, so they may share files
        for path, item in changed.items():
            fd = os.open(new / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as sink:
                sink.write(item.content)
                os.fchmod(fd, _mode(item.mode))
                sink.flush()
                os.fsync(fd)
        self._make_current(name, {**stays, **{path: _entry(item) for path, item in changed.items()}})

    def replace(self, entries: Mapping[str, SessionFile], build: Callable[[SessionVersion, Path], None]) -> str:
        """Make *entries* the session's files and return the name of their version.

        *build* brings them to the disk, into a new folder beside the version there is by then; what it raises leaves that version.
        """
        with self._locked():
            name = f"v-{secrets.token_hex(8)}"
            new = self._top / name
            new.mkdir(mode=0o700)
            try:
                build(self._version(), new)
            except BaseException:  # raised again: nothing half-written stays
                shutil.rmtree(new)
                raise
            self._make_current(name, entries)
        return name

    def _make_current(self, name: str, files: Mapping[str, SessionFile]) -> None:
        """Let the version *name*, which is on the disk, be the one there is, and remove every other."""
        part = self._top / f"{_NEW}{name}"
        with open_private(part, "w", encoding="utf-8") as sink:
            json.dump({"version": name, "files": dict(sorted(files.items()))}, sink)
            sink.flush()
            os.fsync(sink.fileno())
        part.rename(self._top / _CURRENT)
        for path_left in self._top.iterdir():
            if path_left.name.startswith(("v-", _NEW)) and path_left.name != name:
                shutil.rmtree(path_left) if path_left.is_dir() else path_left.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        private_folder(self._top.parent)
        private_folder(self._top)
        with locked(self._top / _LOCK):
            yield


def _mode(mode: int) -> int:
    """Return the mode a file is kept with: readable by us, executable or not."""
    return 0o700 if mode & 0o100 else 0o600


def _entry(item: Artifact) -> SessionFile:
    return SessionFile(_mode(item.mode), item.size, item.sha256)


def _bound(
    changed: dict[str, Artifact], unchanged: Mapping[str, SessionFile], bounds: OutputBounds
) -> Iterator[OutputError]:
    """Take from *changed* what would not fit, so that its old version in *unchanged* stays, and name it."""
    sizes = {path: file.size for path, file in unchanged.items()}
    files, room = bounds.files - len(sizes), bounds.total - sum(sizes.values())
    for path in sorted(changed):
        added_files, size = int(path not in sizes), changed[path].size - sizes.get(path, 0)
        if added_files > files or size > max(room, 0):
            del changed[path]
            message = f"a session keeps {bounds.files} files of {bounds.total} bytes in all"
            yield OutputError(path=path, code="session_full", message=message)
        else:
            files, room = files - added_files, room - size
