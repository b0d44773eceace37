"""Operations on packages of skills: plan, lock, build, show and clean environments of a bundle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from packaging.utils import canonicalize_name
from pydantic import Field

from kdskills.app.environments import declared, package_versions, spec_facts
from kdskills.app.operations.models import Input, Output
from kdskills.bundle.lock_file import lock_of
from kdskills.environments.advisories import SEVERITIES, PackageVersion, audit
from kdskills.environments.lock import read_lock, write_lock
from kdskills.environments.script_report import ImageContent, SkillScripts
from kdskills.environments.sources import SourceBuilds
from kdskills.environments.suggest import CALLED_PROGRAMS
from kdskills.errors import BadRequest, ExecRefused, KdskillsError
from kdskills.execution import ExecRequest, ExecResult, IsolationLevel
from kdskills.execution.rootfs import image_profiles
from kdskills.session.config import INTERPRETERS

if TYPE_CHECKING:
    from kdskills.app.environments import Environments, EnvironmentState
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.app.wiring import HostWiring
    from kdskills.environments.model import EnvironmentSpec, LockedEnvironment
    from kdskills.skills import Skill


class EnvironmentsInput(Input):
    """Which skills of which bundle."""

    bundle: Path = Field(description="The bundle's folder.")
    skills: tuple[str, ...] = Field((), description="Skills by id; all when none is given.")
    suggested: bool = Field(default=False, description="Ask for what scripts import and nothing declares, too.")
    lacking: bool = Field(default=False, description="Only what programs would be refused for now; other entries stay.")


class AuditedInput(EnvironmentsInput):
    """Which skills, and against what their packages are audited."""

    advisories: Path | None = Field(
        None, description="File of advisories, OSV format, that packages are compared with."
    )


class SourcesInput(AuditedInput):
    """Whether source distributions are taken, too."""

    allow_source: bool = Field(
        default=False, description="Take source distributions of what has no wheel, and build them behind the wall."
    )


class LockInput(SourcesInput):
    """How to lock."""

    check: bool = Field(default=False, description="Change nothing; say whether the lock is what is asked for.")
    upgrade: bool = Field(default=False, description="Look for newer versions of what is locked, too.")
    fail_on: Literal["low", "medium", "high", "critical"] = Field(
        "low", description="With a check: the least severity of an advisory that fails it; an unknown one always does."
    )


class EnvironmentEvent(Output):
    """What is done now: `resolve`, `find`, `download`, `built` or `warning`, with what, and its bytes."""

    kind: str
    subject: str
    size: int


class AdvisoryRow(Output):
    """A known fault of a locked package: how severe it is, and the version that mends it, empty when none is known."""

    id: str
    package: str
    version: str
    severity: str
    fixed: str
    summary: str
    aliases: tuple[str, ...]


class EnvironmentRow(Output):
    """How one environment stands: `built`, `locked`, `planned`, `stale`, `unlocked`, `unneeded` or `failed`.

    `size` are the bytes on disk, `download` those that its files have as the index tells; `reason` and `code` say what is
    wrong. `indexes` are the names of those that files come from.
    """

    key: str
    state: str
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    download: int = 0
    size: int = 0
    digest: str = ""
    reason: str = ""
    code: str = ""
    who: str = ""
    advisories: tuple[AdvisoryRow, ...] = ()


class EnvironmentsOutput(Output):
    """Environments by key; `ok` means that nothing is wrong. `changed` tells whether the lock file was written."""

    YES: ClassVar[str] = "ok"
    ok: bool
    bundle: str
    rows: tuple[EnvironmentRow, ...]
    changed: bool = False
    freed: int = 0


async def plan(
    bundles: BundleLoader, environments: Environments, wiring: HostWiring, arguments: SourcesInput, context: Context
) -> EnvironmentsOutput:
    """Find exact files for what is not locked, and change nothing."""
    return await _worked(_Work.plan, bundles, environments, wiring, arguments, context)


async def lock(
    bundles: BundleLoader, environments: Environments, wiring: HostWiring, arguments: LockInput, context: Context
) -> EnvironmentsOutput:
    """Lock what is asked for; entries that still are what is asked for stay, unless newer versions are wanted."""
    return await _worked(partial(_Work.lock, arguments=arguments), bundles, environments, wiring, arguments, context)


async def build(
    bundles: BundleLoader, environments: Environments, wiring: HostWiring, arguments: SourcesInput, context: Context
) -> EnvironmentsOutput:
    """Build what is locked, what scripts import and nothing declares too where that was locked."""
    return await _worked(_Work.build, bundles, environments, wiring, arguments, context, exact=False)


def show(
    bundles: BundleLoader, environments: Environments, arguments: AuditedInput, context: Context
) -> EnvironmentsOutput:
    """Tell how environments stand; nothing is asked of an index."""
    return _Work(bundles, environments, arguments, context, exact=False).show()


def clean(
    bundles: BundleLoader, environments: Environments, arguments: EnvironmentsInput, context: Context
) -> EnvironmentsOutput:
    """Remove what is built, but for what programs use now."""
    return _Work(bundles, environments, arguments, context).clean()


class SuggestInput(Input):
    """Which skills of which bundle."""

    bundle: Path = Field(description="The bundle's folder.")
    skills: tuple[str, ...] = Field((), description="Skills by id; all when none is given.")


class ProfileRow(Output):
    """What a profile of the image would bring of what is missing; `absent` of that is not on this machine."""

    profile: str
    programs: tuple[str, ...]
    packages: tuple[str, ...]
    absent: tuple[str, ...]


class SuggestOutput(Output):
    """Profiles, the most useful first, and what none of them has; `ok` means that the image misses nothing."""

    YES: ClassVar[str] = "ok"
    ok: bool
    bundle: str
    profiles: tuple[ProfileRow, ...]
    programs: tuple[str, ...]
    packages: tuple[str, ...]


def suggest(bundles: BundleLoader, settings: Settings, arguments: SuggestInput, context: Context) -> SuggestOutput:
    """Tell which profile of the image has what skills declare, import and call and the image does not have."""
    bundle = bundles.open(arguments.bundle, context)
    image = ImageContent.collect(settings.execution_options().image, INTERPRETERS)
    profiles = image_profiles()
    callable_programs = {name for profile in profiles.values() for name in profile.programs} - image.programs
    programs: set[str] = set()
    packages: set[str] = set()
    for skill in chosen_skills(dict(bundles.subsystem(bundle).registry), arguments.skills):
        scripts = SkillScripts(skill, image)
        rows = scripts.rows()
        calls = {*scripts.needs[""].spec.programs, *(name for row in rows for name in row.programs)} - image.programs
        programs |= calls | (scripts.first_words & callable_programs)
        packages |= {name for row in rows for name in row.missing} - calls
        packages |= {each.name for each in scripts.installs if not each.node} - image.packages
    programs |= {CALLED_PROGRAMS[name] for name in packages if name in CALLED_PROGRAMS} - image.programs
    covers = []
    for name, profile in profiles.items():
        offered = programs & set(profile.programs), packages & set(map(canonicalize_name, profile.packages))
        if any(offered):
            absent = {each for part in profile.absent() for each in part} & (offered[0] | offered[1])
            facts = {"programs": tuple(sorted(offered[0])), "packages": tuple(sorted(offered[1]))}
            covers.append(ProfileRow(profile=name, **facts, absent=tuple(sorted(absent))))
    covers.sort(key=lambda row: -len(row.programs + row.packages))
    return SuggestOutput(
        ok=not (programs or packages),
        bundle=bundle.name,
        profiles=tuple(covers),
        programs=tuple(sorted(programs.difference(*(row.programs for row in covers)))),
        packages=tuple(sorted(packages.difference(*(row.packages for row in covers)))),
    )


async def _worked(
    do: Callable[[_Work], EnvironmentsOutput],
    bundles: BundleLoader,
    environments: Environments,
    wiring: HostWiring,
    arguments: SourcesInput,
    context: Context,
    *,
    exact: bool = True,
) -> EnvironmentsOutput:
    """Do something in a thread, with an engine of this loop for source distributions where those are allowed."""
    builds = None
    if arguments.allow_source:
        engine, loop = await wiring.executor(), asyncio.get_running_loop()
        if engine.level < IsolationLevel.NAMESPACE:
            message = f"source distributions are built by engines with a wall of their own; {engine.name} has none"
            raise ExecRefused(message, code="isolation_too_weak", engine=engine.name)

        def run(request: ExecRequest) -> ExecResult:
            return asyncio.run_coroutine_threadsafe(engine.run(request), loop).result()

        builds = SourceBuilds(run)
    return await asyncio.to_thread(lambda: do(_Work(bundles, environments, arguments, context, builds, exact=exact)))


class _Work:
    """One call: the skills it is about, how their environments stand, and what becomes of them."""

    def __init__(
        self,
        bundles: BundleLoader,
        environments: Environments,
        arguments: EnvironmentsInput,
        context: Context,
        builds: SourceBuilds | None = None,
        *,
        exact: bool = True,
    ) -> None:
        bundle = bundles.open(arguments.bundle, context)
        self._environments, self._emit, self._builds = environments, context.emit, builds
        self._bundle, self._lock = bundle.name, lock_of(bundle.root)
        self._skills = list(chosen_skills(dict(bundles.subsystem(bundle).registry), arguments.skills))
        self._failed: list[EnvironmentRow] = []
        self._advisories = getattr(arguments, "advisories", None)
        self._packages: dict[str, tuple[PackageVersion, ...]] = {}
        self._resolved: dict[object, LockedEnvironment] = {}
        specs: dict[str, EnvironmentSpec] = {}
        image = ImageContent(frozenset(environments.image), frozenset(), {".py": "python3"})
        for skill in self._skills:
            report = SkillScripts(skill, image) if arguments.suggested else None
            for key, spec in declared(skill, report):
                if isinstance(spec, KdskillsError):
                    self._failed.append(_failed_row(key, spec))
                else:
                    specs[key] = spec
        self._states = environments.states(self._skills, self._lock, specs, exact=exact or arguments.suggested)
        if arguments.lacking:
            self._failed.clear()  # their programs start as they are
            self._states = [lack for state in self._states if (lack := environments.lack_of(state)) is not None]
        self._fixed = [state.locked for state in self._states if state.locked is not None and not state.problem]

    def plan(self) -> EnvironmentsOutput:
        return self._answer(self._each(lambda state: self._row(state, self._locked(state, upgrade=False), "planned")))

    def lock(self, arguments: LockInput) -> EnvironmentsOutput:
        upgrade = arguments.upgrade
        if upgrade:
            self._fixed.clear()
        if arguments.check:
            answer = self._answer([self._row(state, state.locked) for state in self._states])
            least = SEVERITIES.index(arguments.fail_on)
            faults = (fault.severity for row in answer.rows for fault in row.advisories)
            failing = any(SEVERITIES.index(severity) >= least for severity in faults)
            return answer.model_copy(update={"ok": answer.ok and not failing})
        entries = dict(read_lock(self._lock))

        def locked_row(state: EnvironmentState) -> EnvironmentRow | None:
            if state.spec is None:
                del entries[state.key]
                return None
            entries[state.key] = self._locked(state, upgrade=upgrade)
            return self._row(state, entries[state.key])

        rows = self._each(locked_row)
        return self._answer(rows, changed=write_lock(self._lock, entries))

    def build(self) -> EnvironmentsOutput:
        def built_row(state: EnvironmentState) -> EnvironmentRow:
            if state.locked is not None and not state.problem:
                node = None if state.spec is None else state.spec.node
                self._environments.build(state.locked, self._tell, builds=self._builds, node=node)
            return self._row(state, state.locked)

        return self._answer(self._each(built_row), good=("built",))

    def show(self) -> EnvironmentsOutput:
        return self._answer([self._row(state, state.locked) for state in self._states], good=("built",))

    def clean(self) -> EnvironmentsOutput:
        locked = [state.locked for state in self._states if state.locked is not None]
        freed, staying = self._environments.store.remove(locked)
        rows = [self._row(state, state.locked) for state in self._states]
        return EnvironmentsOutput(ok=not staying, bundle=self._bundle, rows=tuple(rows), freed=freed)

    def _locked(self, state: EnvironmentState, *, upgrade: bool) -> LockedEnvironment:
        if state.locked is not None and (state.spec is None or not (state.problem or upgrade)):
            return state.locked
        assert state.spec is not None
        facts = spec_facts(state.spec)
        if facts in self._resolved:
            return replace(self._resolved[facts], key=state.key)
        locked = self._environments.resolve(
            state.key, state.spec, self._tell, companions=self._fixed, builds=self._builds
        )
        self._resolved[facts] = locked
        self._fixed.append(locked)
        return locked

    def _each(self, do: Callable[[EnvironmentState], EnvironmentRow | None]) -> list[EnvironmentRow]:
        """Do something with every environment; one that fails does not keep the others from it."""
        rows = []
        for state in self._states:
            try:
                row = do(state)
            except KdskillsError as error:
                row = _failed_row(state.key, error)
            rows += [] if row is None else [row]
        return rows

    def _row(self, state: EnvironmentState, locked: LockedEnvironment | None, new: str = "locked") -> EnvironmentRow:
        """Return how an environment stands; *new* is what one is called that the lock file has not got."""
        requested = state.spec is not None or not state.problem
        fresh = locked is not None and requested and (locked is not state.locked or not state.problem)
        facts: dict[str, Any] = {
            "key": state.key,
            "requirements": () if state.spec is None else state.spec.requirements,
        }
        if locked is not None:
            versions = package_versions(locked, None if state.spec is None else state.spec.node)
            packages = self._packages[state.key] = tuple(versions)
            facts["packages"] = tuple(f"{package.name} {package.version}" for package in packages)
            facts["indexes"] = tuple(sorted({package.index for package in locked.packages}))
            facts["download"] = sum(package.size for package in locked.packages)
        mount = self._environments.store.built(locked) if locked is not None and fresh else None
        if mount is not None and locked is not None:
            size = self._environments.store.size_of(locked)
            return EnvironmentRow(**facts, state="built", digest=mount.digest, size=size)
        if fresh:
            return EnvironmentRow(**facts, state="locked" if locked is state.locked else new)
        word = "unneeded" if state.spec is None else "unlocked" if state.locked is None else "stale"
        codes = {"unlocked": "environment_lock_missing", "stale": "environment_lock_stale"}
        return EnvironmentRow(**facts, state=word, reason=state.problem, code=codes.get(word, ""), who="operator")

    def _answer(
        self,
        rows: list[EnvironmentRow],
        *,
        changed: bool = False,
        good: tuple[str, ...] = ("built", "locked", "planned"),
    ) -> EnvironmentsOutput:
        every = sorted([*self._failed, *self._audited(rows)], key=lambda row: row.key)
        ok = all(row.state in good for row in every)
        return EnvironmentsOutput(ok=ok, bundle=self._bundle, rows=tuple(every), changed=changed)

    def _audited(self, rows: list[EnvironmentRow]) -> list[EnvironmentRow]:
        """Return *rows* with what is known of their packages, where a file of advisories was given."""
        if self._advisories is None:
            return rows
        every = dict.fromkeys(package for packages in self._packages.values() for package in packages)
        known = audit(self._advisories, every)
        rows_of = {package: [AdvisoryRow(**asdict(fault)) for fault in known.get(package, ())] for package in every}
        return [
            row.model_copy(
                update={
                    "advisories": tuple(chain.from_iterable(map(rows_of.__getitem__, self._packages.get(row.key, ()))))
                }
            )
            for row in rows
        ]

    def _tell(self, kind: str, subject: str, size: int) -> None:
        if self._emit is not None:
            self._emit(EnvironmentEvent(kind=kind, subject=subject, size=size))


def chosen_skills(skills: dict[str, Skill], refs: tuple[str, ...]) -> Iterator[Skill]:
    """Yield the skills of *refs*, by full id or id. Raises BadRequest, `unknown_skill`."""
    if not refs:
        yield from skills.values()
    for ref in refs:
        matches = [skill for skill in skills.values() if ref in {skill.full_id, skill.id}]
        if len(matches) != 1:
            words = f"{len(matches)} skills have the id" if matches else "there is no skill"
            raise BadRequest(f"{words} {ref!r} in the bundle", code="unknown_skill", ref=ref)
        yield matches[0]


def _failed_row(key: str, error: KdskillsError) -> EnvironmentRow:
    return EnvironmentRow(key=key, state="failed", reason=error.message, code=error.code, who=error.who)
