"""Packages of skills: what is asked for, what `kdskills.lock` has of it, and what is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Final

from packaging.utils import canonicalize_name

from kdskills.bundle.lock_file import lock_of
from kdskills.environments.advisories import PackageVersion
from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import node_digest, read_lock, stale_reason
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment, LockedPackage, NodeSpec
from kdskills.environments.needs import NODE_SUFFIXES, spec_of
from kdskills.environments.node import fill_tree, lock_missing, locked_packages, named_packages
from kdskills.environments.resolve import PackageIndex, indexes_of, platform_name, resolve
from kdskills.environments.scripts import ScriptPackages, image_has
from kdskills.environments.sources import SourceBuilds, resolve_with_sources
from kdskills.environments.store import EnvironmentStore, Progress
from kdskills.errors import KdskillsError
from kdskills.execution.rootfs import image_versions
from kdskills.skills.safe_open import walk_tree

if TYPE_CHECKING:
    from kdskills.app.settings import Settings
    from kdskills.environments.script_report import SkillScripts
    from kdskills.execution import EnvironmentMount
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem

MIB: Final = 1024 * 1024
SCRIPTS: Final = "scripts/"
VERSIONS_FAIL: Final = frozenset({"environment_conflict", "environment_unavailable", "environment_source_only"})
"""Codes that other versions may help against."""


@dataclass(frozen=True, slots=True)
class EnvironmentState:
    """How the environment of one skill or script stands.

    Attributes:
        key: As in the lock file.
        spec: What is asked for today; None for an entry of the lock that nobody asks for.
        locked: What the lock has, or would have.
        problem: Why that is not what is asked for; empty when it is.
    """

    key: str
    spec: EnvironmentSpec | None
    locked: LockedEnvironment | None
    problem: str = ""


class Environments:
    """Environments by the operator's settings; nothing is looked for or opened before it is needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._resolving = Lock()
        self._brought: dict[object, LockedEnvironment] = {}

    @cached_property
    def store(self) -> EnvironmentStore:
        """What is built on this machine. Raises ExecRefused when the cache folder is not ours alone."""
        settings = self._settings
        return EnvironmentStore(settings.environment_cache_dir, limit=settings.environment_cache_mb * MIB)

    @cached_property
    def indexes(self) -> tuple[PackageIndex, ...]:
        """Where packages come from."""
        return indexes_of(self._settings.environment_index)

    @cached_property
    def image(self) -> Mapping[str, str]:
        """Distributions of the sandbox image by canonical name, with their versions. Raises ExecFailed."""
        versions = image_versions(**self._settings.execution_options().image)
        return {canonicalize_name(name): version for name, version in versions.items()}

    def standing_of(self, subsystem: SkillsSubsystem) -> ScriptPackages:
        """Return what tells how the packages of scripts stand; nothing is brought by it."""
        lock = None if subsystem.bundle_root is None else lock_of(subsystem.bundle_root)
        return ScriptPackages(lock, lambda: self.store, lambda: self.image)

    def unready(self, skills: Iterable[Skill], lock: Path) -> list[str]:
        """Return in words which entries of *skills* in the file *lock* are out of date or not built. Raises as `read_lock`."""
        every = tuple(skills)
        specs = {key: spec for skill in every for key, spec in declared(skill) if isinstance(spec, EnvironmentSpec)}
        return [
            f"{state.key}: {state.problem or 'not built'}"
            for state in self.states(every, lock, specs, exact=False)
            if state.locked is not None and (state.problem or self.store.built(state.locked) is None)
        ]

    def states(
        self, skills: Iterable[Skill], lock: Path, specs: Mapping[str, EnvironmentSpec], *, exact: bool
    ) -> list[EnvironmentState]:
        """Return how each of *specs* stands, and the entries of *skills* in the file *lock* that nobody asks for.

        Where it need not be *exact*, what was locked beyond *specs* for a script that is there is as good, as it is at a run.
        """
        locked, folders = read_lock(lock), {skill.full_id: skill.folder for skill in skills}
        states = []
        for key, entry in locked.items():
            skill_id, _, script = key.partition(f"/{SCRIPTS}")
            if key not in specs and skill_id in folders:
                folder = folders[skill_id]
                covers = not exact and script and folder is not None and (folder / SCRIPTS / script).is_file()
                states.append(EnvironmentState(key, None, entry, "" if covers else "nobody asks for it"))
        for key, spec in specs.items():
            own = locked.get(key)
            problem = "it is not locked" if own is None else stale_reason(own, spec, exact=exact)
            states.append(EnvironmentState(key, spec, own, problem))
        return sorted(states, key=lambda state: state.key)

    def lack_of(self, state: EnvironmentState) -> EnvironmentState | None:
        """Return *state* as programs see it, when they would be refused for what it lacks; else None.

        What is locked for more than is asked for, or for what was suggested, is good when it is built.
        """
        spec, locked = state.spec or EnvironmentSpec(), state.locked
        problem = stale_reason(locked, spec, exact=False) if locked and spec else ""
        if locked is None or problem:
            return None if image_has(spec, self.image) else state
        if self.store.built(locked) is not None:
            return None
        wanted = EnvironmentSpec(locked.requirements, locked.requires_python, node=spec.node)
        return EnvironmentState(state.key, wanted, locked)

    def resolve(
        self,
        key: str,
        spec: EnvironmentSpec,
        tell: Progress,
        *,
        companions: Iterable[LockedEnvironment] = (),
        builds: SourceBuilds | None = None,
    ) -> LockedEnvironment:
        """Return exact files for *spec*, in the versions that the image and *companions* have of them, so that all fit in one
        program; where those do not go together with it, in the image's, else in any. Source distributions are built by *builds*.

        Raises as `kdskills.environments.resolve.resolve`, `resolve_with_sources` and `locked_packages`.
        """
        if spec.node is not None:
            locked_packages(spec.node)
        image = tuple(f"{name}=={version}" for name, version in self.image.items())
        versions = {package.name: package.version for companion in companions for package in companion.packages}
        preferred = [f"{name}=={version}" for name, version in versions.items() if name not in self.image]
        tell("resolve", key, 0)

        def warn(words: str) -> None:
            tell("warning", words, 0)

        def mounted(name: str, packages: tuple[LockedPackage, ...]) -> EnvironmentMount:
            return self.build(LockedEnvironment(name, (), "", platform_name(), packages), tell)

        sourced = partial(resolve_with_sources, mounted=mounted, folder=self.store.top)
        find = partial(sourced, builds=builds) if builds else resolve
        for constraints in dict.fromkeys(((*image, *preferred), image)):
            try:
                return self._entry(key, spec, find(spec, self.indexes, constraints=constraints, tell=warn))
            except EnvironmentFailed as error:
                if error.code not in VERSIONS_FAIL:
                    raise
        return self._entry(key, spec, find(spec, self.indexes, tell=warn))

    @staticmethod
    def _entry(key: str, spec: EnvironmentSpec, packages: tuple[LockedPackage, ...]) -> LockedEnvironment:
        node = node_digest(spec.node)
        return LockedEnvironment(key, spec.requirements, spec.requires_python, platform_name(), packages, node)

    def build(
        self,
        environment: LockedEnvironment,
        tell: Progress = lambda *_: None,
        *,
        builds: SourceBuilds | None = None,
        node: NodeSpec | None = None,
    ) -> EnvironmentMount:
        """Build what is locked, or find it built; *node* is what it was locked for. Raises as `EnvironmentStore.build`, and `environment_off`."""
        if self._settings.environments == "off":
            raise EnvironmentFailed("the setting `environments` is `off`", code="environment_off")
        fill = None
        if node is not None and node_digest(node) == environment.node:
            fill = partial(fill_tree, node, self._settings.environment_registry)
        return self.store.build(environment, self.indexes, tell=tell, builds=builds, node=fill)

    def bring(self, key: str, spec: EnvironmentSpec, locked: LockedEnvironment | None) -> EnvironmentMount:
        """Build what is locked, or what *spec* comes to now. Raises as `resolve` and `build`."""

        def quiet(*_: object) -> None:
            pass

        if locked is None:
            with self._resolving:
                facts = spec_facts(spec)
                if facts not in self._brought:
                    self._brought[facts] = self.resolve(key, spec, quiet)
                locked = self._brought[facts]
        return self.build(locked, quiet, node=spec.node)


def package_versions(locked: LockedEnvironment, node: NodeSpec | None) -> Iterator[PackageVersion]:
    """Yield what *locked*, and the lock of *node*, have of each ecosystem, as advisories name it."""
    for package in locked.packages:
        yield PackageVersion("PyPI", package.name, package.version)
    for name, version in [] if node is None else named_packages(node):
        yield PackageVersion("npm", name, version)


def declared(skill: Skill, report: SkillScripts | None = None) -> Iterator[tuple[str, EnvironmentSpec | KdskillsError]]:
    """Yield what *skill* declares: for all its scripts, and for each that says something else, by the lock's keys.

    With a *report* scripts also ask for what they import. A declaration that cannot be honoured is yielded as its error. Raises FileRefused for a folder that cannot be read.
    """
    common = _spec_or_error(skill, None)
    if isinstance(common, EnvironmentSpec) and common.node is not None and common.node.lock is None:
        yield f"{skill.full_id}/package.json", lock_missing()
        common = replace(common, node=None)
    if common:
        yield skill.full_id, common
    has_scripts = skill.folder is not None and (skill.folder / SCRIPTS).is_dir()
    for entry in walk_tree(skill.folder, SCRIPTS.rstrip("/")) if skill.folder and has_scripts else ():
        suffix = PurePosixPath(entry.path).suffix.lower()
        if entry.kind == "file" and suffix in {".py", *NODE_SUFFIXES}:
            spec = _spec_or_error(skill, f"{SCRIPTS}{entry.path}")
            if report is not None and suffix == ".py" and isinstance(spec, EnvironmentSpec):
                names = report.suggested_requirements(f"{SCRIPTS}{entry.path}") | {*spec.requirements}
                spec = replace(spec, requirements=tuple(sorted(names)))
            if spec and spec_facts(spec) != spec_facts(_part_for(suffix, common)):
                yield f"{skill.full_id}/{SCRIPTS}{entry.path}", spec


def _part_for(suffix: str, spec: EnvironmentSpec | KdskillsError) -> EnvironmentSpec | KdskillsError:
    """Return what a script of this kind takes of *spec*: packages of Python, or of Node."""
    if isinstance(spec, KdskillsError):
        return spec
    return replace(spec, node=None) if suffix == ".py" else EnvironmentSpec(node=spec.node)


def _spec_or_error(skill: Skill, script: str | None) -> EnvironmentSpec | KdskillsError:
    try:
        spec = spec_of(skill, script)
    except KdskillsError as error:
        return error
    unlocked = script is not None and spec.node is not None and spec.node.lock is None
    return replace(spec, node=None) if unlocked else spec


def spec_facts(spec: EnvironmentSpec | KdskillsError) -> tuple[object, ...]:
    """Return what makes two declarations one."""
    if isinstance(spec, KdskillsError):
        return (spec.message,)
    return spec.requirements, spec.requires_python, tuple(sorted(spec.hashes.items())), node_digest(spec.node)
