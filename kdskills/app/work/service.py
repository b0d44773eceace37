"""Background work of a Host: where a caller's command runs, submitting within the limits of its token, output and artifacts.

Large inputs leave the record of their task, which is read many times a second while somebody waits, for the store of
artifacts.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard

from kdskills.app.work.watching import Watches
from kdskills.errors import CallerMustAct, CallRefused, Conflict, ExecRefused, FileRefused, NotFound
from kdskills.execution.dirs import cache_dir
from kdskills.execution.request import IsolationLevel, Limits, SkillMount
from kdskills.execution.stage import stage_skill
from kdskills.execution.streams import LogPiece
from kdskills.jobs.artifacts import ArtifactKeeper, artifacts_url, open_artifacts
from kdskills.jobs.client import JobsClient, new_id
from kdskills.jobs.model import Command, FromArtifact, Inline, InputSpec, JobSpec, Placement, Scope, TaskSpec
from kdskills.projects.folders import VersionFolders
from kdskills.projects.views import UPLOADED
from kdskills.session.approval import AccessRequest, arguments_digest, denial_of
from kdskills.turn import Refused

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.host import Host
    from kdskills.app.identity import Identity
    from kdskills.jobs.artifacts import ArtifactStore
    from kdskills.jobs.client import Kind, SubmissionHook
    from kdskills.jobs.model import JobHead, TaskHead
    from kdskills.jobs.records import WorkRecords
    from kdskills.jobs.settings import JobsSettings
    from kdskills.skills.model import Skill


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A skill a caller may run commands of, and where they run.

    Attributes:
        placement: What travels with the work.
        level: How strong the engine's wall is.
        has_files: Whether the skill has a folder to start in.
    """

    placement: Placement
    level: IsolationLevel
    has_files: bool


@dataclass(frozen=True, slots=True)
class SkillCall:
    """What is about to be done with a skill, as policy plugins see it."""

    tool: str
    session_id: str | None
    arguments: Mapping[str, Any]


def _mounts(skills: tuple[Skill, ...], *, shared: bool) -> tuple[SkillMount, ...]:
    """Return the skills' folders, pinned as they are now.

    On one host the copies are mounted from, so that later edits change nothing; a pool of hosts shares the originals only,
    and a command whose skill was edited meanwhile is refused there.
    """
    mounts = []
    for skill in skills:
        if skill.folder is None:
            continue
        mount = SkillMount(skill.full_id, skill.folder, _digest(skill))
        mounts.append(mount if shared else SkillMount(mount.id, stage_skill(mount, cache_dir()), mount.tree))
    return tuple(mounts)


def _pinned(skill: Skill, closure: tuple[Skill, ...], *, shared: bool) -> tuple[tuple[SkillMount, ...], str]:
    """Return the mounts of a skill with what it imports, and the digest of its own files."""
    mounts = _mounts(closure, shared=shared)
    return mounts, next((mount.tree for mount in mounts if mount.id == skill.full_id), None) or _digest(skill)


def _uploaded(skills: tuple[Skill, ...]) -> dict[str, str]:
    """Return the versions of the uploaded skills among *skills*, by name."""
    folders = [skill.folder for skill in skills if skill.layer == UPLOADED and skill.folder is not None]
    return {folder.name: VersionFolders.version_in(folder) for folder in folders}


def _digest(skill: Skill) -> str:
    try:
        return skill.tree_digest()
    except FileRefused as error:
        raise Conflict(
            f"the files of skill {skill.full_id} cannot be read: {error.message}", code="skill_changed"
        ) from error


def scope_of(identity: Identity) -> Scope:
    """Return whose work it is that *identity* starts and sees."""
    return Scope(tenant=identity.tenant, project=identity.project, agent=identity.agent, alias=identity.alias)


class TooMuchWork(CallerMustAct):
    """The caller has as many tasks and jobs as its token allows; `details["limit"]` tells how many."""

    code = "too_much_work"


def limit_of(host: Host, identity: Identity) -> int:
    """Return how many tasks and jobs a caller may have at one time; 0 for any number."""
    if identity.token is None:
        return 0
    token_limit = identity.limits.concurrent_work
    return host.settings.concurrent_work if token_limit is None else token_limit


def require_room(records: WorkRecords, link: sa.Connection, scope: Scope, limit: int, *, additional: int) -> None:
    """Refuse an agent that has too much work; in the transaction that adds to it, the count is exact in every process.

    Work belongs to an agent: tokens of one agent share what they have.

    Args:
        records: Rows of tasks and jobs.
        link: The connection.
        scope: Whose work.
        limit: The most; 0 for any number.
        additional: How many are to come: none in the transaction that has added one.

    Raises:
        TooMuchWork: There would be more than *limit*.
    """
    if not limit:
        return
    if link.dialect.name == "postgresql":  # SQLite has one writer anyway
        whose = "\n".join(("room", scope.tenant, scope.project, scope.agent))
        link.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (whose,))
    if records.open_work(link, scope, limit + 1) + additional > limit:
        raise TooMuchWork(
            f"this token may have {limit} tasks and jobs at one time: wait until one is over",
            limit=limit,
            retry_after=1,
        )


MOST: Final = 64 * 1024
"""Characters of base64 that stay in the record."""

Keeper = Callable[[], Awaitable[ArtifactKeeper]]


def large(item: InputSpec) -> TypeGuard[Inline]:
    """Whether an input is too large for the record of its task."""
    return isinstance(item, Inline) and len(item.content_base64) > MOST


async def spooled_task(keeper: Keeper, spec: TaskSpec) -> TaskSpec:
    """Return *spec* with its large inputs in the store of artifacts, which is opened only for those."""
    return spec.model_copy(update={"command": await _command(keeper, spec.scope, spec.command)})


async def spooled_job(keeper: Keeper, spec: JobSpec) -> JobSpec:
    """Return *spec* with the large inputs of its steps in the store of artifacts."""
    steps = [
        step.model_copy(update={"command": await _command(keeper, spec.scope, step.command)}) for step in spec.steps
    ]
    return spec.model_copy(update={"steps": tuple(steps)})


async def _command(keeper: Keeper, scope: Scope, command: Command) -> Command:
    inputs: list[InputSpec] = []
    for item in command.inputs:
        if large(item):
            artifact_id = await (await keeper()).keep_input(scope, base64.b64decode(item.content_base64))
            inputs.append(FromArtifact(path=item.path, artifact_id=artifact_id))
        else:
            inputs.append(item)
    return command.model_copy(update={"inputs": tuple(inputs)})


Stream = Literal["stdout", "stderr"]


class WorkService:
    """Background work of *host*; nothing is opened before it is used."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.watches = Watches()
        self._keeper: ArtifactKeeper | None = None
        self._artifacts: ArtifactStore | None = None

    @property
    def limits(self) -> JobsSettings:
        """Intervals and limits."""
        return self._host.settings.jobs

    @cached_property
    def client(self) -> JobsClient:
        """The client of this Host's database; its first submission starts a worker where none runs."""
        from kdskills.app.spawning import spawner

        settings = self._host.settings
        return JobsClient(settings.work_database, settings.state_dir, settings.jobs, spawn=spawner(settings))

    async def keeper(self) -> ArtifactKeeper:
        """Return what keeps artifacts, over the client's own database.

        Raises:
            ArtifactStoreUnavailable: The setting `artifacts` cannot be used.
        """
        if self._keeper is None:
            settings = self._host.settings
            work = await self.client.work()
            if self._keeper is None:  # nobody else was quicker
                inputs = settings.state_dir / "inputs"
                self._keeper = ArtifactKeeper(self.artifacts(), work.database, work.tables, inputs)
        return self._keeper

    def artifacts(self) -> ArtifactStore:
        """Return the one store of artifacts. Raises as `keeper`."""
        if self._artifacts is None:
            settings = self._host.settings
            self._artifacts = open_artifacts(artifacts_url(settings.artifacts, settings.state_dir))
        return self._artifacts

    async def run_place(self, identity: Identity, skill_name: str, call: SkillCall) -> RunPlace:
        """Return where commands of a skill run for this caller.

        Raises:
            NotFound: `unknown_skill`; there is none, or the caller may not have it.
            CallRefused: `skill_denied`; a policy plugin said no.
            PluginFailed: A policy plugin could not say.
            ExecRefused: No engine may be used.
            Conflict: `skill_changed`; its files cannot be read as they are.
        """
        host = self._host
        skills = await host.project_skills(identity.project)
        view = skills.subsystem.view(identity.consumer, identity.held_tools)
        answer = view.resolve(skill_name, by="code" if identity.local else identity.starter)
        if isinstance(answer, Refused):
            raise NotFound(answer.public().reason, code="unknown_skill", skill_name=skill_name)
        request = AccessRequest(
            "run",
            identity.consumer,
            call.session_id or "",
            answer.full_id,
            None,
            call.tool,
            arguments_digest(call.arguments),
        )
        denial = denial_of(host.answers.deny, request)
        if denial is not None:
            raise CallRefused(denial.public, code="skill_denied", skill_name=skill_name)
        engine = await host.wiring.executor(host.settings.executor)
        if engine.level == IsolationLevel.NONE:
            raise ExecRefused(
                f"background work needs an engine that isolates; {engine.name} does not",
                code="isolation_too_weak",
                engine=engine.name,
            )
        shared = not host.settings.work_database.startswith("sqlite")
        mounts, tree = await asyncio.to_thread(_pinned, answer.skill, answer.closure, shared=shared)
        uploaded = _uploaded(answer.closure)
        output_bytes = host.settings.jobs.result_bytes
        return RunPlace(
            placement=Placement(
                engine=engine.name,
                skill_name=answer.full_id,
                version_hash=next(iter(_uploaded((answer.skill,)).values()), tree),
                tree_digest=tree,
                uploaded=uploaded,
                skills=mounts,
                limits=Limits(stdout=output_bytes, stderr=output_bytes),
            ),
            level=engine.level,
            has_files=answer.skill.folder is not None,
        )

    async def task(self, identity: Identity, item: str) -> TaskHead:
        """Return a task of the caller; administrators see those of every agent of their project. Raises NotFound."""
        return await self.client.task(scope_of(identity), item, any_agent=identity.may("admin"))

    async def job(self, identity: Identity, item: str) -> JobHead:
        """Return a job, as `task`. Raises NotFound."""
        return await self.client.job(scope_of(identity), item, any_agent=identity.may("admin"))

    async def submit_task(self, identity: Identity, spec: TaskSpec, key: str | None, body: str) -> TaskHead:
        """Submit a task, and hold the versions it uses until it is over.

        Raises:
            NotFound: An artifact it takes as input is not there for this caller.
            TooMuchWork: The caller has as much as its token allows.
        """
        limit = limit_of(self._host, identity)
        await self._require_possible("task", spec.scope, key, (spec.command,), limit)
        spec = await spooled_task(self.keeper, spec)
        hook = await self._submission_hook(spec, limit)
        return await self.client.submit_task(spec, key=key, body_hash=body, hook=hook)

    async def submit_job(self, identity: Identity, spec: JobSpec, key: str | None, body: str) -> JobHead:
        """Submit a job; as `submit_task`."""
        limit = limit_of(self._host, identity)
        await self._require_possible("job", spec.scope, key, [step.command for step in spec.steps], limit)
        spec = await spooled_job(self.keeper, spec)
        hook = await self._submission_hook(spec, limit)
        return await self.client.submit_job(spec, key=key, body_hash=body, hook=hook)

    async def _submission_hook(self, spec: TaskSpec | JobSpec, limit: int) -> SubmissionHook:
        """Return what is done in the transaction of a submission: count against the limit, and hold the versions it uses."""
        work, uploaded = await self.client.work(), spec.placement.uploaded

        def count_and_hold(link: sa.Connection, item: str) -> None:
            require_room(work.records, link, spec.scope, limit, additional=0)
            if uploaded:
                self._host.projects.hold(link, spec.scope.project, item, uploaded)

        return count_and_hold

    async def _require_possible(
        self, kind: Kind, scope: Scope, key: str | None, commands: Sequence[Command], limit: int
    ) -> None:
        """Refuse work that cannot be, before anything of it is kept; a call that is repeated has its answer already.

        Raises:
            NotFound: An input artifact is unknown, or another project's.
            TooMuchWork: There is no room, and large inputs would be kept for nothing.
        """
        items = [file.artifact_id for command in commands for file in command.inputs if isinstance(file, FromArtifact)]
        bulky = any(large(file) for command in commands for file in command.inputs)
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

    async def run(self, identity: Identity, spec: TaskSpec, key: str | None, body: str) -> TaskHead:
        """Run a task to its end; a caller who goes away takes it along, unless it may come back with its key.

        Raises:
            TooMuchWork: The caller has as much as its token allows.
        """
        submitting = asyncio.ensure_future(self.submit_task(identity, spec, key, body))
        try:
            head = await asyncio.shield(submitting)
            return await self.client.wait_task(spec.scope, head.id)
        except asyncio.CancelledError:
            await asyncio.shield(self._abandoned(spec, submitting, key))
            raise

    async def _abandoned(self, spec: TaskSpec, submitting: asyncio.Future[TaskHead], key: str | None) -> None:
        """End a task whose caller went away, be it while it was submitted; with a key the caller may come back."""
        await asyncio.wait([submitting])
        if submitting.exception() is None and key is None:
            await self.client.cancel_task(spec.scope, submitting.result().id, "the caller went away")

    async def logs(self, head: TaskHead, stream: Stream, offset: int, limit: int) -> LogPiece:
        """Return a piece of a task's output."""
        return await self.client.logs(head.scope, head.id, stream, offset, limit)

    async def tails(self, head: TaskHead, size: int) -> tuple[LogPiece, LogPiece]:
        """Return the last *size* bytes of a task's stdout and stderr."""
        return await self._tail(head, "stdout", size), await self._tail(head, "stderr", size)

    async def _tail(self, head: TaskHead, stream: Stream, size: int) -> LogPiece:
        if head.attempt == 0:
            return LogPiece(0, b"", 0, truncated=False)
        piece = await self.logs(head, stream, -max(1, size), size)
        return piece if size else LogPiece(piece.total, b"", piece.total, truncated=False)

    async def printed(self, head: TaskHead) -> int:
        """Return how many bytes a task has printed so far."""
        return sum(piece.total for piece in await self.tails(head, 0))

    async def endpoints_active(self, head: TaskHead) -> bool:
        """Whether a service's addresses can be reached from this host now."""
        if head.status != "running" or not head.endpoints:
            return False
        work = await self.client.work()
        if head.host != work.host:
            return False
        attempt = await asyncio.to_thread(work.attempts.find, head.id, head.attempt)
        return attempt is not None and await asyncio.to_thread(attempt.endpoints_active)

    async def cancel_task(self, identity: Identity, item: str, reason: str) -> bool:
        """Ask for the end of a task; False when it is over. Raises NotFound."""
        return await self.client.cancel_task(scope_of(identity), item, reason, any_agent=identity.may("admin"))

    async def cancel_job(self, identity: Identity, item: str, reason: str) -> bool:
        """Ask for the end of a job; False when it is over. Raises NotFound."""
        return await self.client.cancel_job(scope_of(identity), item, reason, any_agent=identity.may("admin"))

    async def aclose(self) -> None:
        """Close the connections; running work goes on."""
        self._keeper = None
        if self._artifacts is not None:
            await self._artifacts.aclose()
            self._artifacts = None
        if "client" in self.__dict__:
            await self.client.aclose()
            del self.__dict__["client"]
