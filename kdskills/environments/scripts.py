"""Which packages a program gets: what is locked for its skill, where that is built, or brought now if the operator wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import read_lock, stale_reason
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment, LockedPackage
from kdskills.environments.needs import NODE_SUFFIXES, needs_of, node_packages
from kdskills.environments.node import lock_missing
from kdskills.environments.store import EnvironmentStore
from kdskills.errors import KdskillsError
from kdskills.execution import EnvironmentMount
from kdskills.skills import Skill

Bring = Callable[[str, EnvironmentSpec, LockedEnvironment | None], EnvironmentMount]
COMMANDS = "`kdskills env lock` and `kdskills env build`"


class ScriptPackages:
    """Answers for the skills of one bundle. Safe from any thread.

    Args:
        lock: The bundle's lock file, which need not be there; None where there is no bundle.
        store: Gives the store of built environments.
        image: Gives the versions of the distributions that every sandbox has, by name.
        bring: Locks, where nothing is locked that holds, and builds what a key asks for; None where a program only gets
            what is built already.
    """

    def __init__(
        self,
        lock: Path | None,
        store: Callable[[], EnvironmentStore],
        image: Callable[[], Mapping[str, str]],
        bring: Bring | None = None,
    ) -> None:
        self._lock, self._store, self._image, self._bring = lock, store, image, bring
        self._read: tuple[tuple[int, ...], dict[str, LockedEnvironment]] = (), {}

    def of_script(self, skill: Skill, script: str, folder: Path) -> EnvironmentMount | None:
        """Return the packages of *script*, a path in *skill*, whose files are in *folder*; None where it needs none.

        What a skill only imports is not demanded, nor what cannot be understood: such a script starts as it is.

        Raises EnvironmentFailed: `environment_missing` for declared packages that the sandbox has not and that are not
        locked or not built, `environment_lock_stale`, `environment_invalid` for a script of Node whose packages have no
        package-lock.json, and as `read_lock`.
        """
        needs = needs_of(skill, script, folder=folder)
        understood = all(finding.severity != "error" for finding in needs.diagnostics)
        spec = needs.spec if understood else EnvironmentSpec()
        if spec.node is not None and spec.node.lock is None:
            if Path(script).suffix.lower() in NODE_SUFFIXES:
                raise lock_missing()
            spec = replace(spec, node=None)
        locked = self._locked()
        key = f"{skill.full_id}/{script}"
        environment = locked.get(key) or locked.get(skill.full_id)
        if environment is not None:
            reason = stale_reason(environment, spec, exact=False) if spec else ""
            if reason and self._bring is not None:
                return self._bring(key, spec, None)
            if reason:
                message = f"what is locked for {environment.key} is not what {script} asks for ({reason}): {COMMANDS}"
                raise EnvironmentFailed(message, code="environment_lock_stale", key=environment.key)
            return self._mount(environment, skill, folder)
        if spec and not image_has(spec, self._image()):
            if self._bring is not None:
                return self._bring(key, spec, None)
            names = ", ".join(spec.requirements[:5]) or "Node packages"
            message = f"{script} cannot run here: it needs {names} ({', '.join(spec.origins)}), not locked: {COMMANDS}"
            raise EnvironmentFailed(message, code="environment_missing", key=key)
        return None

    def standing(self, skill: Skill, script: str, folder: Path) -> tuple[str, frozenset[str]]:
        """Return how the packages of *script* stand, and the names of those it gets; arguments as `of_script`.

        `built`, the code that its run would be refused with, or empty where it starts without any.
        """
        try:
            mount = self.of_script(skill, script, folder)
        except KdskillsError as error:
            return error.code, frozenset()
        if mount is None:
            return "", frozenset()
        locked = self._locked()
        environment = locked.get(f"{skill.full_id}/{script}") or locked[skill.full_id]
        node = needs_of(skill, script, folder=folder).spec.node if environment.node else None
        names = [] if node is None else node_packages(node)
        return "built", frozenset((*names, *(package.name for package in environment.packages)))

    def of_skills(self, skills: Iterable[Skill]) -> EnvironmentMount | None:
        """Return all that is locked for *skills* and their scripts together, for a program that may use any of them.

        None where nothing is locked. Raises EnvironmentFailed: `environment_conflict` when two have different versions of
        one package, `environment_missing` for what is not built, and as `read_lock`.
        """
        locked = self._locked()
        parts = [
            (environment, skill)
            for skill in skills
            for key, environment in locked.items()
            if key == skill.full_id or key.startswith(f"{skill.full_id}/")
        ]
        if not parts:
            return None
        mounts = [self._mount(*part) for part in parts if self._bring is not None or len(parts) == 1]
        if len(parts) == 1:
            return mounts[0]
        return self._store().assembled(_together([environment for environment, _ in parts]))

    def _mount(self, environment: LockedEnvironment, skill: Skill, folder: Path | None = None) -> EnvironmentMount:
        """Return what is built for *environment*, brought now where that is wanted. Raises as `mount_of` or a build."""
        if self._bring is None:
            return self._store().mount_of(environment)
        script = environment.key.removeprefix(skill.full_id).lstrip("/") or None
        node = needs_of(skill, script, folder=folder).spec.node if environment.node else None
        return self._bring(environment.key, EnvironmentSpec(environment.requirements, node=node), environment)

    def _locked(self) -> dict[str, LockedEnvironment]:
        """Return what the lock file has, read again when it changed."""
        if self._lock is None:
            return {}
        try:
            status = self._lock.stat()
        except FileNotFoundError:
            return {}
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known, environments = self._read
        if known != stamp:
            environments = read_lock(self._lock)
            self._read = stamp, environments
        return environments


def image_has(spec: EnvironmentSpec, versions: Mapping[str, str]) -> bool:
    """Whether a sandbox whose image has distributions of these *versions*, by name, has all that *spec* asks for."""
    if spec.node is not None:
        return False
    image = {canonicalize_name(name): version for name, version in versions.items()}
    for requirement in map(Requirement, spec.requirements):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = image.get(canonicalize_name(requirement.name))
        if version is None or requirement.extras or not requirement.specifier.contains(version, prereleases=True):
            return False
    return True


def _together(parts: Sequence[LockedEnvironment]) -> LockedEnvironment:
    """Return one environment with the packages of all *parts*."""
    packages: dict[str, tuple[LockedPackage, str]] = {}
    keys, nodes = [part.key for part in parts], {part.node for part in parts if part.node}
    for part in parts:
        for package in part.packages:
            other, key = packages.setdefault(package.name, (package, part.key))
            if other.sha256 != package.sha256:
                message = (
                    f"{key} has {other.name} {other.version}, {part.key} has {package.version}: not in one program"
                )
                raise EnvironmentFailed(message, code="environment_conflict", keys=[key, part.key])
    if len(nodes) > 1:
        message = f"several of {', '.join(keys)} have Node packages, and those cannot be joined"
        raise EnvironmentFailed(message, code="environment_conflict", keys=keys)
    every = tuple(packages[name][0] for name in sorted(packages))
    return replace(parts[0], key=" + ".join(keys), requirements=(), packages=every, node=next(iter(nodes), ""))
