"""Packages of skills at work: what is asked for, what `kdskills.lock` has of it, what is built, and which a script gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import read_lock, stale_reason
from kdskills.environments.model import LOCK_NAME, EnvironmentSpec, LockedEnvironment, LockedPackage
from kdskills.environments.needs import spec_of
from kdskills.environments.resolve import PackageIndex, indexes_of, platform_name, resolve
from kdskills.environments.store import EnvironmentStore, Progress
from kdskills.errors import KdskillsError
from kdskills.execution.rootfs import image_versions
from kdskills.skills.safe_open import walk_tree

if TYPE_CHECKING:
    from kdskills.app.settings import Settings
    from kdskills.execution import EnvironmentMount
    from kdskills.skills import Skill

MIB: Final = 1024 * 1024
SCRIPTS: Final = "scripts/"
BUILD: Final = "kdskills env build"


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
        self._resolved: dict[tuple[object, ...], tuple[LockedPackage, ...]] = {}

    @cached_property
    def store(self) -> EnvironmentStore:
        """What is built on this machine. Raises ExecRefused when the cache folder is not ours alone."""
        cache = self._settings.execution_options().cache_dir
        return EnvironmentStore(cache, limit=self._settings.environment_cache_mb * MIB)

    @cached_property
    def indexes(self) -> tuple[PackageIndex, ...]:
        """Where packages come from."""
        return indexes_of(self._settings.environment_index)

    @cached_property
    def image(self) -> Mapping[str, str]:
        """Distributions of the sandbox image by canonical name, with their versions. Raises ExecFailed."""
        versions = image_versions(self._settings.image_packages)
        return {canonicalize_name(name): version for name, version in versions.items()}

    def states(
        self, skills: Iterable[Skill], lock: Path, specs: Mapping[str, EnvironmentSpec]
    ) -> list[EnvironmentState]:
        """Return how each of *specs* stands, and the entries of *skills* in the file *lock* that nobody asks for."""
        locked = read_lock(lock)
        ids = {skill.full_id for skill in skills}
        extra = [key for key in locked if key not in specs and key.partition(f"/{SCRIPTS}")[0] in ids]
        states = [EnvironmentState(key, None, locked[key], "nobody asks for it") for key in extra]
        for key, spec in specs.items():
            entry = locked.get(key)
            problem = "it is not locked" if entry is None else stale_reason(entry, spec)
            states.append(EnvironmentState(key, spec, entry, problem))
        return sorted(states, key=lambda state: state.key)

    def resolve(self, key: str, spec: EnvironmentSpec, tell: Progress) -> LockedEnvironment:
        """Return exact files for *spec*: with the image's versions of what it has, too, and without them where those do
        not go together with it. Raises as `kdskills.environments.resolve.resolve`.
        """
        facts = (spec.requirements, spec.requires_python, tuple(sorted(spec.hashes.items())))
        if facts not in self._resolved:
            constraints = [f"{name}=={version}" for name, version in self.image.items()]
            tell("resolve", key, 0)

            def warn(words: str) -> None:
                tell("warning", words, 0)

            try:
                packages = resolve(spec, self.indexes, constraints=constraints, tell=warn)
            except EnvironmentFailed as error:
                if error.code not in {"environment_conflict", "environment_unavailable", "environment_source_only"}:
                    raise
                packages = resolve(spec, self.indexes, tell=warn)
            self._resolved[facts] = packages
        return LockedEnvironment(key, spec.requirements, spec.requires_python, platform_name(), self._resolved[facts])

    def build(self, environment: LockedEnvironment, tell: Progress = lambda *_: None) -> EnvironmentMount:
        """Build what is locked, or find it built. Raises as `EnvironmentStore.build`, and `environment_off`."""
        if self._settings.environments == "off":
            raise EnvironmentFailed("the setting `environments` is `off`", code="environment_off")
        return self.store.build(environment, self.indexes, tell=tell)

    def mount_for(
        self, skill: Skill, script: str | None, lock: Path, *, ask: Callable[[LockedEnvironment], bool] | None = None
    ) -> EnvironmentMount | None:
        """Return the packages that a script of *skill* gets, or the skill as a whole; None when it needs none.

        Args:
            skill: Whose declarations count.
            script: Its path in the skill; None for what the skill declares for all.
            lock: The lock file beside the bundle's descriptor.
            ask: Asks a person whether to build what is locked; used with the setting `ask` alone.

        Raises:
            EnvironmentFailed: `environment_missing` when packages are declared that the image has not, and nothing is
                built for them; `environment_lock_stale` when what is locked lacks some; what a build raises.
            AuthorMustAct: A declaration cannot be honoured.
        """
        policy = self._settings.environments
        if policy == "off":
            return None
        spec = python_spec(skill, script)
        entries = read_lock(lock)
        keys = (skill.full_id,) if script is None else (f"{skill.full_id}/{script}", skill.full_id)
        locked = next((entries[key] for key in keys if key in entries), None)
        if locked is None and all(self.in_image(requirement) for requirement in spec.requirements):
            return None
        if locked is not None and not set(spec.requirements) <= set(locked.requirements):
            if policy != "auto":
                message = f"what is locked for {locked.key} is not what it declares now: {stale_reason(locked, spec)}"
                raise EnvironmentFailed(
                    message, code="environment_lock_stale", key=locked.key, command="kdskills env lock"
                )
            locked = None
        if policy == "auto":
            return self.build(locked or self.resolve(keys[0], spec, lambda *_: None))
        if locked is not None and (mount := self.store.built(locked)) is not None:
            return mount
        if locked is not None and policy == "ask" and ask is not None and ask(locked):
            return self.build(locked)
        names = ", ".join(spec.requirements[:20])
        message = f"{keys[0]} needs packages that are not built here ({names}): {BUILD} {lock.parent}"
        command = f"{BUILD} {lock.parent}"
        raise EnvironmentFailed(message, code="environment_missing", key=keys[0], command=command)

    def in_image(self, requirement: str) -> bool:
        """Whether the image has what a requirement asks for, or it asks for nothing on this platform."""
        asked = Requirement(requirement)
        if asked.marker is not None and not asked.marker.evaluate():
            return True
        version = self.image.get(canonicalize_name(asked.name))
        return version is not None and not asked.extras and asked.specifier.contains(version, prereleases=True)


def lock_of(root: Path) -> Path:
    """Return the lock file of the bundle in *root*."""
    return root / LOCK_NAME


def python_spec(skill: Skill, script: str | None) -> EnvironmentSpec:
    """Return what a script, or the skill for all of them, declares of Python packages. Raises AuthorMustAct."""
    return replace(spec_of(skill, script), node=None)


def declared(skill: Skill) -> Iterator[tuple[str, EnvironmentSpec | KdskillsError]]:
    """Yield what *skill* declares: for all its scripts, and for each that says something else, by the lock's keys.

    A declaration that cannot be honoured is yielded as its error. Raises FileRefused for a folder that cannot be read.
    """
    common = _spec_or_error(skill, None)
    if common:
        yield skill.full_id, common
    has_scripts = skill.folder is not None and (skill.folder / SCRIPTS).is_dir()
    for entry in walk_tree(skill.folder, SCRIPTS.rstrip("/")) if skill.folder and has_scripts else ():
        if entry.kind == "file" and entry.path.endswith(".py"):
            spec = _spec_or_error(skill, f"{SCRIPTS}{entry.path}")
            if spec and _facts(spec) != _facts(common):
                yield f"{skill.full_id}/{SCRIPTS}{entry.path}", spec


def _spec_or_error(skill: Skill, script: str | None) -> EnvironmentSpec | KdskillsError:
    try:
        return python_spec(skill, script)
    except KdskillsError as error:
        return error


def _facts(spec: EnvironmentSpec | KdskillsError) -> tuple[object, ...]:
    """Return what makes two declarations one."""
    return (
        (spec.message,) if isinstance(spec, KdskillsError) else (spec.requirements, spec.requires_python, spec.hashes)
    )
