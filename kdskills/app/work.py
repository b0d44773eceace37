"""Background work of a Host: where a caller's command runs, submitting within the limits of its token, output, watches.

A watch is one task that looks at heads at intervals; what is watched never knows. Callers with the same key join it;
when the last of them leaves, it ends. Numbers of events are made from the state's revision, which grows with each
change and is the same in every process, so that they go on growing in whichever process a watch is taken up again.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.app.settings import Settings, settings_line
from kdskills.errors import (
    CallerMustAct,
    CallRefused,
    Conflict,
    ExecRefused,
    FileRefused,
    KdskillsError,
    NotFound,
    OperatorMustAct,
)
from kdskills.errors.traces import current_trace
from kdskills.execution.dirs import cache_dir
from kdskills.execution.egress import granted
from kdskills.execution.request import IsolationLevel, Limits, SkillMount
from kdskills.execution.stage import stage_skill
from kdskills.execution.streams import LogPiece
from kdskills.jobs.artifacts import ArtifactKeeper, open_artifacts
from kdskills.jobs.client import JobsClient, new_id
from kdskills.jobs.model import (
    TERMINAL,
    Command,
    FromArtifact,
    Inline,
    InputSpec,
    JobHead,
    JobSpec,
    Placement,
    Scope,
    StepHead,
    StepSpec,
    TaskHead,
    TaskSpec,
)
from kdskills.jobs.stream import HostPiece, StreamEnds
from kdskills.projects.views import UPLOADED, ProjectSkills
from kdskills.session.approval import AccessRequest, arguments_digest, denial_of
from kdskills.skills.folder import shown_digest
from kdskills.skills.private_files import open_private
from kdskills.storage.database import micros, utc_now
from kdskills.storage.folder import state_folder
from kdskills.turn import Refused

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.identity import Identity
    from kdskills.app.operations.table import Context
    from kdskills.app.wiring import HostWiring, Storage
    from kdskills.jobs.artifacts import ArtifactStore
    from kdskills.jobs.model import Kind
    from kdskills.jobs.records import WorkRecords
    from kdskills.jobs.settings import JobsSettings
    from kdskills.skills.model import Skill

EventKind = Literal["state", "output", "heartbeat"]
Stream = Literal["stdout", "stderr"]
STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr")
Spec = TaskSpec | JobSpec

WORKER_LOG: Final = "worker.log"
START_S: Final = 30.0
LARGE: Final = 64 * 1024
"""Characters of base64 beyond which an input leaves the record of its task, which is read many times a second while somebody
waits, for the store of artifacts."""
GONE_CODES: Final = frozenset({"not_found", "version_missing", "root_missing", "root_changed"})
"""Codes of versions of skills that cannot be had any more."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A skill a caller may run commands of, how strong the engine's wall is, and whether the skill has a folder."""

    placement: Placement
    level: IsolationLevel
    has_files: bool


def _mounts(skills: tuple[Skill, ...], *, shared: bool) -> tuple[SkillMount, ...]:
    """Return the skills' folders, pinned as they are now.

    On one host the copies are mounted from, so that later edits change nothing; a pool of hosts shares the originals
    only, and a command whose skill was edited meanwhile is refused there.
    """
    mounts = []
    for skill in skills:
        if skill.folder is None:
            continue
        mount = SkillMount(skill.full_id, skill.folder, _digest(skill, shown=True))
        mounts.append(mount if shared else SkillMount(mount.id, stage_skill(mount, cache_dir()), mount.tree))
    return tuple(mounts)


def _uploaded(skills: tuple[Skill, ...]) -> dict[str, str]:
    """Return the versions of the uploaded skills among *skills*, by name."""
    folders = [skill.folder for skill in skills if skill.layer == UPLOADED and skill.folder is not None]
    return {folder.name: f"sha256:{folder.parent.name}" for folder in folders}


def _digest(skill: Skill, *, shown: bool = False) -> str:
    try:
        return shown_digest(skill) if shown else skill.tree_digest()
    except FileRefused as error:
        message = f"the files of skill {skill.full_id} cannot be read: {error.message}"
        raise Conflict(message, code="skill_changed") from error


def scope_of(identity: Identity) -> Scope:
    """Return whose work it is that *identity* starts and sees."""
    return Scope(tenant=identity.tenant, project=identity.project, agent=identity.agent, alias=identity.alias)


class TooMuchWork(CallerMustAct, code="too_much_work"):
    """The caller has as many tasks and jobs as its token allows; `details["limit"]` tells how many."""


def require_room(records: WorkRecords, link: sa.Connection, scope: Scope, limit: int, *, additional: int) -> None:
    """Refuse an agent that has too much work; in the transaction that adds to it, the count is exact in every process.

    Work belongs to an agent: tokens of one agent share what they have. *limit* is 0 for any number, and *additional*
    how many are to come: none in the transaction that has added one.
    """
    if not limit:
        return
    if link.dialect.name == "postgresql":  # SQLite has one writer anyway
        whose = "\n".join(("room", scope.tenant, scope.project, scope.agent))
        link.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (whose,))
    if records.open_work(link, scope, limit + 1) + additional > limit:
        message = f"this token may have {limit} tasks and jobs at one time: wait until one is over"
        raise TooMuchWork(message, limit=limit, retry_after=1)


class WorkerNotStarted(OperatorMustAct, code="worker_not_started"):
    """A worker of background work could not be started on this host."""


def spawn(settings: Settings) -> None:
    """Start a worker nobody waits for; it outlives its starter and logs into the state folder.

    Settings travel over a pipe, as they may hold secrets. Plugins given to a Host in code do not travel: a worker loads
    the installed ones.
    """
    state_folder(settings.state_dir)
    command, line = ["setsid", "--fork", sys.executable, "-m", "kdskills.app.worker.main"], settings_line(settings)
    try:
        with open_private(settings.state_dir / WORKER_LOG, "ab") as log:
            subprocess.run(command, input=line + b"\n", stdout=log, stderr=log, check=True, timeout=START_S, cwd="/")
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkerNotStarted(f"no worker could be started: {error}") from None


SHIFT: Final = 20
MAX_EVENTS: Final = 1024
"""Events a watch keeps for those who join it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one look found: `revision` grows with every change of state, `output` counts bytes, events tell `facts`."""

    revision: int
    output: int
    over: bool
    facts: object


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Something a watch tells; `facts` are those of the look it was found by."""

    seq: int
    kind: EventKind
    time: datetime
    facts: object


@dataclass(frozen=True, slots=True)
class WatchEnd:
    """How a watch ended for one caller: `timed_out` when the state was not final yet."""

    facts: object
    timed_out: bool


Look = Callable[[], Awaitable[Snapshot]]
Tell = Callable[[ProgressEvent], None]


@dataclass(eq=False)
class _Listener:
    tell: Tell | None
    heartbeat_s: float
    last: int
    last_event_s: float
    failure: BaseException | None = None


@dataclass(eq=False)
class Watch:
    """One running watch of what has the id `about`; `interval_s` are seconds between two looks."""

    about: str
    look: Look
    interval_s: float
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: list[ProgressEvent] = field(default_factory=list)
    listeners: list[_Listener] = field(default_factory=list)
    latest: Snapshot | None = None
    last: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def listen(self, tell: Tell | None, *, heartbeat_s: float, timeout_s: float, after: int) -> WatchEnd:
        """Hear events until the end or the timeout; the answer is given once, here and nowhere else."""
        self.last = max(self.last, after)
        mine = _Listener(tell, heartbeat_s, after, self.loop.time())
        self.listeners.append(mine)
        try:
            for event in list(self.events):
                self._give(mine, event)
            if self.task is None:
                self.task = self.loop.create_task(self._run())
            elif self.latest is not None and mine.last < self.latest.revision << SHIFT:
                self._give(mine, ProgressEvent(self.last, "state", utc_now(), self.latest.facts))
            return await self._until_over(mine, timeout_s)
        finally:
            self.listeners.remove(mine)
            if not self.listeners and self.task is not None:
                self.task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(self.task, return_exceptions=True)

    async def _until_over(self, mine: _Listener, timeout_s: float) -> WatchEnd:
        assert self.task is not None
        end = self.loop.time() + timeout_s
        while True:
            snapshot = self.latest
            if mine.failure is not None:
                raise mine.failure
            if snapshot is not None and snapshot.over:
                return WatchEnd(snapshot.facts, timed_out=False)
            if self.task.done():
                self.task.result()
            now = self.loop.time()
            if snapshot is not None and now >= end:
                return WatchEnd(snapshot.facts, timed_out=True)
            quiet = mine.last_event_s + mine.heartbeat_s - now
            if snapshot is not None and quiet <= 0:
                self._give(mine, ProgressEvent(mine.last, "heartbeat", utc_now(), snapshot.facts))
                continue
            waiting = self.loop.create_task(self.changed.wait())
            patience = None if snapshot is None else min(quiet, end - now)
            try:
                await asyncio.wait({waiting, self.task}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            finally:  # also when the listener leaves: nobody would end it then
                waiting.cancel()

    async def _run(self) -> None:
        self._take_snapshot(await self.look())
        while self.latest is not None and not self.latest.over:
            await asyncio.sleep(self.interval_s)
            self._take_snapshot(await self.look())

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        before, self.latest = self.latest, snapshot
        kind: EventKind | None = None
        if before is None:
            # Whoever comes back with the number of this very state knows it already.
            kind = "state" if snapshot.revision > self.last >> SHIFT else None
        elif snapshot.revision > before.revision:
            kind = "state"
        elif snapshot.output > before.output:
            kind = "output"
        if kind is not None:
            self.last = max(self.last + 1, snapshot.revision << SHIFT)
            event = ProgressEvent(self.last, kind, utc_now(), snapshot.facts)
            self.events = [*self.events[1 - MAX_EVENTS :], event]
            for listener in list(self.listeners):
                self._give(listener, event)
        signal, self.changed = self.changed, asyncio.Event()
        signal.set()

    def _give(self, listener: _Listener, event: ProgressEvent) -> None:
        if event.kind != "heartbeat" and event.seq <= listener.last:
            return
        listener.last = max(listener.last, event.seq)
        listener.last_event_s = self.loop.time()
        try:
            if listener.tell is not None:
                listener.tell(event)
        except Exception as error:  # noqa: BLE001 - one listener's failure is its own: the others and the watch go on
            listener.failure = error


class Watches:
    """The running watches of a Host, by key."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], Watch] = {}

    def join(self, key: tuple[str, ...] | None, about: str, look: Look, interval_s: float) -> Watch:
        """Return the running watch of *key*, or a new one; without a key always a new one.

        Raises Conflict, `watch_key_taken`, when the key's running watch is of something else.
        """
        watch = Watch(about, look, interval_s)
        if key is not None:
            running = self._running.get(key)
            if running is not None and running.listeners and running.loop is watch.loop:
                if running.about != about:
                    raise Conflict(f"this dedupe_key is of a watch of {running.about}", code="watch_key_taken")
                return running
            self._running = {other_key: each for other_key, each in self._running.items() if each.listeners} | {
                key: watch
            }
        return watch


FOLLOW_S: Final = 0.1
TOLD_S: Final = 0.01
"""Seconds between two looks at a log that is followed, and how many more for each of its followers: each look is a piece to
read and to send for every one of them."""


@dataclass(eq=False)
class LogFollow:
    """Those who wait for one task to print more; `head` is the task as it was seen last."""

    client: JobsClient
    head: TaskHead
    waiting: int = 0
    totals: dict[Stream, int] = field(default_factory=dict)
    looked: asyncio.Event = field(default_factory=asyncio.Event)
    looker: asyncio.Task[None] | None = None

    async def wait(self, stream: Stream, beyond: int) -> TaskHead:
        """Return the task once there is more of *stream*, or it is over."""
        self.waiting += 1
        try:
            while True:
                if self.looker is None or self.looker.done():
                    self.looker = asyncio.get_running_loop().create_task(self._look())
                looked, looker = self.looked, self.looker
                signal = asyncio.ensure_future(looked.wait())
                try:
                    await asyncio.wait({signal, looker}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    signal.cancel()
                if looker.done():
                    looker.result()
                if self.head.terminal or self.totals.get(stream, 0) != beyond:
                    return self.head
        finally:
            self.waiting -= 1
            if not self.waiting and self.looker is not None:
                self.looker.cancel()
                self.looker = None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S + TOLD_S * self.waiting)
            self.head = await self.client.head(TaskHead, self.head.scope, self.head.id)
            for stream in STREAMS:
                self.totals[stream] = (await self.client.piece(self.head, stream, 0, 0)).log.total
            signal, self.looked = self.looked, asyncio.Event()
            signal.set()


@dataclass(eq=False)
class WorkService:
    """Background work; nothing is opened before it is used. `skills_of` gives the skills of a project."""

    settings: Settings
    storage: Storage
    wiring: HostWiring
    skills_of: Callable[[str], Awaitable[ProjectSkills]]
    watches: Watches = field(default_factory=Watches)
    follows: dict[str, LogFollow] = field(default_factory=dict)
    _keeper: ArtifactKeeper | None = None
    _artifacts: ArtifactStore | None = None

    @property
    def limits(self) -> JobsSettings:
        """Bounds of work."""
        return self.settings.jobs

    @cached_property
    def client(self) -> JobsClient:
        """The client of this Host's database; its first submission starts a worker where none runs."""
        settings = self.settings
        location = (settings.work_database, settings.state_dir, settings.jobs)
        return JobsClient(*location, fleet=settings.fleet, spawn=lambda: spawn(settings))

    async def keeper(self) -> ArtifactKeeper:
        """Return what keeps artifacts, over the client's own database. Raises ArtifactStoreUnavailable."""
        if self._keeper is None:
            work = await self.client.work()
            if self._keeper is None:  # nobody else was quicker
                inputs = self.settings.state_dir / "inputs"
                self._keeper = ArtifactKeeper(self.artifacts(), work.database, work.tables, inputs)
        return self._keeper

    def artifacts(self) -> ArtifactStore:
        """Return the one store of artifacts. Raises ArtifactStoreUnavailable: the setting `artifacts` cannot be used."""
        if self._artifacts is None:
            self._artifacts = open_artifacts(self.settings.artifacts or str(self.settings.state_dir))
        return self._artifacts

    async def artifact_bytes(self, record: sa.Row[Any], begin: int, end: int) -> AsyncIterator[bytes]:
        """Stream bytes of an artifact, as `stored_bytes`; without the setting `artifacts` each host has its own."""
        store = self.artifacts()
        async for chunk in (await self.client.far_hosts()).stored_bytes(
            store, record, begin, end, shared=self.settings.artifacts is not None
        ):
            yield chunk

    async def service(self, identity: Identity, item: str, port: int) -> StreamEnds:
        """Return a connection to a port of a caller's service, as `FarHosts.service`. Raises NotFound as `task`."""
        head = await self.task(identity, item)
        return await (await self.client.far_hosts()).service(head, port)

    async def run_place(
        self, identity: Identity, skill_name: str, tool: str, session_id: str | None, arguments: Mapping[str, Any]
    ) -> RunPlace:
        """Return where commands of a skill run for this caller; *tool* and *arguments* are told to policy plugins.

        Raises NotFound, `unknown_skill`, for what the caller may not have, too; CallRefused, `skill_denied`, and
        PluginFailed of policy plugins; ExecRefused without an engine; EnvironmentFailed, `environment_missing`, for packages
        that are locked for the skill or one it imports and not built; Conflict, `skill_changed`, for files that cannot be read.
        """
        skills = await self.skills_of(identity.project)
        view = skills.subsystem.view(identity.consumer, identity.held_tools)
        answer = view.resolve(skill_name, by="code" if identity.local else identity.starter)
        if isinstance(answer, Refused):
            raise NotFound(answer.public().reason, code="unknown_skill", skill_name=skill_name)
        skill, digest = answer.skill, arguments_digest(arguments)
        request = AccessRequest("run", identity.consumer, session_id or "", answer.full_id, None, tool, digest)
        denial = denial_of(self.wiring.deny, request)
        if denial is not None:
            raise CallRefused(denial.public, code="skill_denied", skill_name=skill_name)
        engine = await self.wiring.executor()
        if engine.level == IsolationLevel.NONE:
            message = f"background work needs an engine that isolates; {engine.name} does not"
            raise ExecRefused(message, code="isolation_too_weak", engine=engine.name)
        shared = not self.settings.work_database.startswith("sqlite")
        mounts = await asyncio.to_thread(_mounts, answer.closure, shared=shared)
        packages = self.wiring.packages(skills.subsystem)
        environment = None if packages is None else await asyncio.to_thread(packages.of_skills, answer.closure)
        tree = await asyncio.to_thread(_digest, skill)
        output_bytes = self.limits.result_bytes
        network = granted(self.settings.network, (answer.full_id,))
        placement = Placement(
            engine=engine.name,
            skill_name=answer.full_id,
            version_hash=next(iter(_uploaded((skill,)).values()), tree),
            tree_digest=tree,
            uploaded=_uploaded(answer.closure),
            skills=mounts,
            environment=environment,
            network=() if network == "none" else network,
            limits=Limits(stdout=output_bytes, stderr=output_bytes),
        )
        return RunPlace(placement=placement, level=engine.level, has_files=skill.folder is not None)

    async def same_version(self, run_place: RunPlace, project: str, before: Placement) -> RunPlace:
        """Return *run_place* with the files a skill had in *before*, and so with those of the skills it imported.

        What the caller is granted decides *run_place*; of that, an uploaded skill is taken in the version it was, also when
        another one is active. Raises Conflict, `version_gone`.
        """
        placement = run_place.placement
        if placement.version_hash == before.version_hash:
            return run_place
        granted_mounts = {mount.id: mount for mount in placement.skills}
        mounts = [
            await self._same_mount(granted_mounts.get(mount.id), project, mount, before) for mount in before.skills
        ]
        versions = before.model_dump(include={"version_hash", "tree_digest", "uploaded"})
        return replace(run_place, placement=placement.model_copy(update={"skills": tuple(mounts), **versions}))

    async def _same_mount(
        self, current: SkillMount | None, project: str, mount: SkillMount, before: Placement
    ) -> SkillMount:
        if current is not None and current.tree == mount.tree:
            return current
        name = mount.id.rpartition(".")[2]
        words = f"version {before.version_hash} of {before.skill_name} is not there any more"
        if current is None or name not in before.uploaded:
            raise Conflict(f"{words}: {mount.id} has other files now", code="version_gone", skill_name=mount.id)
        try:
            folder = await self.storage.projects.folder(project, name, before.uploaded[name])
            mount = SkillMount(mount.id, folder, mount.tree)
            if self.settings.work_database.startswith("sqlite"):
                mount = SkillMount(mount.id, await asyncio.to_thread(stage_skill, mount, cache_dir()), mount.tree)
        except KdskillsError as error:
            if error.code not in GONE_CODES:
                raise
            raise Conflict(f"{words}: {error.message}", code="version_gone", skill_name=mount.id) from error
        return mount

    async def task(self, identity: Identity, item: str) -> TaskHead:
        """Return a task of the caller; administrators see those of every agent of their project. Raises NotFound."""
        return await self.client.head(TaskHead, scope_of(identity), item, any_agent=identity.may("admin"))

    async def job(self, identity: Identity, item: str) -> JobHead:
        """Return a job, as `task`. Raises NotFound."""
        return await self.client.head(JobHead, scope_of(identity), item, any_agent=identity.may("admin"))

    async def submit(
        self, context: Context, spec: Spec, key: str | None, body: str, *, repeat_of: str | None = None
    ) -> Any:
        """Submit a task or job of a caller, which may be a repeat of another, and hold the versions it uses until it is over; return its head.

        Raises NotFound for an artifact it takes that is not there for this caller, and TooMuchWork.
        """
        identity = context.identity
        token_limit = identity.limits.concurrent_work
        usual = self.settings.concurrent_work if token_limit is None else token_limit
        limit = 0 if identity.token is None else usual
        parts: Sequence[TaskSpec | StepSpec] = spec.steps if isinstance(spec, JobSpec) else (spec,)
        kind: Kind = "job" if isinstance(spec, JobSpec) else "task"
        await self._require_possible(kind, spec.scope, key, [part.command for part in parts], limit)
        spooled = [await self._spooled(spec.scope, part) for part in parts]
        spec = spec.model_copy(update={"steps": tuple(spooled)}) if isinstance(spec, JobSpec) else spooled[0]
        spec = spec.model_copy(update={"traceparent": str(current_trace() or "")})
        work, scope, placement = await self.client.work(), spec.scope, spec.placement
        projects = self.storage.projects
        facts = {"skill": placement.skill_name, "version": placement.version_hash, "engine": placement.engine}
        await self.storage.database.ready()

        def count_and_hold(link: sa.Connection, item: str) -> None:
            require_room(work.records, link, scope, limit, additional=0)
            if placement.uploaded:
                projects.hold(link, scope.project, item, placement.uploaded)
            projects.note(link, scope.project, context.author, f"{kind}.start", item, **facts)

        return await self.client.submit(spec, key=key, body_hash=body, hook=count_and_hold, repeat_of=repeat_of)

    async def cancel(self, context: Context, kind: type[TaskHead | JobHead], item: str, reason: str) -> bool:
        """Ask for the end of a task or job of a caller, as `JobsClient.cancel`. Raises NotFound."""
        identity, projects = context.identity, self.storage.projects
        scope, any_agent = scope_of(identity), identity.may("admin")
        skill = (await self.client.head(kind, scope, item, any_agent=any_agent)).spec.placement.skill_name
        await self.storage.database.ready()

        def note(link: sa.Connection, item: str) -> None:
            projects.note(link, scope.project, context.author, f"{kind.KIND}.cancel", item, skill=skill)

        return await self.client.cancel(kind, scope, item, reason, any_agent=any_agent, hook=note)

    async def _spooled(self, scope: Scope, part: Any) -> Any:
        """Return a task or step with its large inputs in the store of artifacts, unless another host that may run it has none."""
        inputs, work, shared = list[InputSpec](), await self.client.work(), self.settings.artifacts is not None
        for item in part.command.inputs:
            if isinstance(item, Inline) and len(item.content_base64) > LARGE and (shared or await work.alone()):
                artifact_id = await (await self.keeper()).keep_input(scope, base64.b64decode(item.content_base64))
                item = FromArtifact(path=item.path, artifact_id=artifact_id)
            inputs.append(item)
        return part.model_copy(update={"command": part.command.model_copy(update={"inputs": tuple(inputs)})})

    async def _require_possible(
        self, kind: Kind, scope: Scope, key: str | None, commands: Sequence[Command], limit: int
    ) -> None:
        """Refuse work that cannot be, before anything of it is kept; a call that is repeated has its answer already."""
        files = [file for command in commands for file in command.inputs]
        items = [file.artifact_id for file in files if isinstance(file, FromArtifact)]
        bulky = any(isinstance(file, Inline) and len(file.content_base64) > LARGE for file in files)
        if not items and not bulky:
            return
        work = await self.client.work()
        if key is not None:
            item = new_id(kind, scope, key)
            if await work.database.read(lambda link: work.records.body_hash(link, kind, item)) is not None:
                return
        if items:
            await (await self.keeper()).require(scope, items)
        if bulky:
            await work.database.read(lambda link: require_room(work.records, link, scope, limit, additional=1))
            size = sum(len(file.content_base64) * 3 // 4 for file in files if isinstance(file, Inline))
            now = micros(utc_now())
            await work.database.read(lambda link: work.quotas.require_room(link, scope, size, now))

    async def run(self, context: Context, spec: TaskSpec, key: str | None, body: str) -> TaskHead:
        """Run a task to its end; a caller who goes away takes it along, unless it may come back with its key."""
        submitting = asyncio.ensure_future(self.submit(context, spec, key, body))

        async def abandon() -> None:  # it may still be submitted; with a key the caller may come back
            await asyncio.wait([submitting])
            if submitting.exception() is None and key is None:
                await self.client.cancel(TaskHead, spec.scope, submitting.result().id, "the caller went away")

        try:
            head = await asyncio.shield(submitting)
            return await self.client.wait(TaskHead, spec.scope, head.id)
        except asyncio.CancelledError:
            await asyncio.shield(abandon())
            raise

    async def tails(self, head: TaskHead, size: int) -> tuple[LogPiece, LogPiece]:
        """Return the last *size* bytes of a task's stdout and stderr."""
        pieces = await self.ends(head, size)
        return pieces[0].log, pieces[1].log

    async def ends(self, head: TaskHead, size: int) -> tuple[HostPiece, HostPiece]:
        """As `tails`, with the host that has them when it cannot be asked."""

        async def tail(stream: Stream) -> HostPiece:
            if head.attempt == 0:
                return HostPiece(LogPiece(0, b"", 0, truncated=False))
            piece = await self.client.piece(head, stream, -max(1, size), size)
            total = piece.log.total
            return piece if size else piece._replace(log=LogPiece(total, b"", total, truncated=False))

        return await tail("stdout"), await tail("stderr")

    async def printed(self, head: TaskHead) -> int:
        """Return how many bytes a task has printed so far."""
        return sum(piece.total for piece in await self.tails(head, 0))

    async def news(self, head: TaskHead, stream: Stream, beyond: int, timeout_s: float) -> TaskHead:
        """Wait until a task has printed more than *beyond* bytes, or is another one than *head*; return it as it is then.

        However many wait for one task, one looks for all of them, the more seldom the more there are.
        """
        follows = self.follows.setdefault(head.id, LogFollow(self.client, head))
        try:
            async with asyncio.timeout(timeout_s):
                return await follows.wait(stream, beyond)
        except TimeoutError:
            return follows.head
        finally:
            if not follows.waiting and self.follows.get(head.id) is follows:
                del self.follows[head.id]

    async def endpoints_active(self, head: TaskHead) -> bool:
        """Whether a service's addresses can be reached from this host now."""
        if head.status != "running" or not head.endpoints:
            return False
        work = await self.client.work()
        if head.host != work.host:
            return False
        attempt = await asyncio.to_thread(work.attempts.find, head.id, head.attempt)
        return attempt is not None and await asyncio.to_thread(attempt.endpoints_active)

    async def aclose(self) -> None:
        """Close the connections; running work goes on."""
        self._keeper = None
        if self._artifacts is not None:
            await self._artifacts.aclose()
            self._artifacts = None
        if "client" in self.__dict__:
            await self.client.aclose()
            del self.__dict__["client"]


_RANKS: Final = {"queued": 1, "starting": 2, "running": 3}
_OVER: Final = 9
_ATTEMPT: Final = 20
_TRY: Final = 10_000


def _rank(status: str) -> int:
    return _OVER if status in TERMINAL else _RANKS[status]


def task_revision(head: TaskHead) -> int:
    """Return the number of a task's state: attempts count most, then the state, then whether a cancel was asked for."""
    return head.attempt * _ATTEMPT + 2 * _rank(head.status) + (head.cancel_at is not None)


def job_revision(head: JobHead) -> int:
    """Return the number of a job's state: what its steps have been through, and its own."""
    return sum(map(_step_revision, head.steps)) + 2 * _rank(head.status) + (head.cancel_at is not None)


def _step_revision(step: StepHead) -> int:
    if step.task is None:
        return _TRY - 1 if step.status in TERMINAL else 0
    return step.tries * _TRY + min(task_revision(step.task), _TRY - 1)
