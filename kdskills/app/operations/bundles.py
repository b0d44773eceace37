"""Bundles that callers name by their folder: whose code may run, and what their recordings tell."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.app.operations.table import Context
from kdskills.app.resources import shipped_folders
from kdskills.bundle.load import untrusted
from kdskills.errors import ReplayError
from kdskills.models.cassette import Cassette, read_cassette
from kdskills.projects.views import ProjectSkills
from kdskills.skills.selection import refuse_by

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.settings import Settings
    from kdskills.bundle import Bundle
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem, SkillView


@dataclass(frozen=True)
class BundleLoader:
    """Loads bundles that callers name by their folder, and skills as callers see them.

    `load` loads a bundle, whose code runs as the keyword `python` says; `subsystem` puts its skills under its policy,
    and `project_skills` returns those of a project.
    """

    settings: Settings
    load: Callable[..., Bundle]
    subsystem: Callable[[Bundle | None], SkillsSubsystem]
    project_skills: Callable[[str], Awaitable[ProjectSkills]]

    def open(self, path: Path, context: Context, *, tools: bool = False) -> Bundle:
        """Load a bundle by its folder; its code runs where the caller trusts it, and in folders that are the caller's own.

        Own are shipped bundles, the bundle of the settings and, to who calls from the command line or a program, the
        working folder and what lies below it. Elsewhere a descriptor of literals is read as data. With *tools* its
        `tools.py` is going to run. Raises BundleError; `bundle_untrusted` where that takes running code nobody trusted.
        """
        bundle = self.load(path, python="execute" if context.trust or self._runs_anyway(path, context) else "read")
        if tools and bundle.tools_path is not None and not bundle.trusted:
            raise untrusted(bundle.tools_path, 1, "it holds tools of the bundle")
        return bundle

    async def skills(self, path: Path | None, context: Context) -> ProjectSkills:
        """Return the skills of the bundle at *path*, or those of the caller's project. Raises as `open`."""
        if path is None:
            return await self.project_skills(context.identity.project)
        bundle = self.open(path, context)
        return ProjectSkills(bundle.name, self.subsystem(bundle), bundle.diagnostics)

    def _runs_anyway(self, path: Path, context: Context) -> bool:
        """Whether *path* leads to a folder whose code the caller runs anyway; links and `..` are followed first."""
        try:
            here = Path.cwd() if context.identity.door in {"library", "cli"} else None
            folders = (*shipped_folders(), here, self.settings.bundle)
            target = path.resolve()
            return any(target.is_relative_to(folder.resolve()) for folder in folders if folder is not None)
        except (OSError, ValueError, RuntimeError):
            return False  # a working folder that is gone, a path that is none


def visible_skills(view: SkillView, identity: Identity) -> dict[str, Skill]:
    """Return the skills a caller elsewhere is told of: those it may start, without hidden ones; all others do not exist."""
    return {
        full_id: skill
        for full_id, skill in view.skills.items()
        if not skill.hidden and refuse_by(skill, identity.starter) is None
    }


MAX_DEMO: Final = 4 * 1024 * 1024


def demo_of(folder: Path | None) -> Cassette | None:
    """Return the recording of the bundle in *folder*; None without one that can be read, which a replay will say."""
    if folder is None:
        return None
    path = folder / "demo.yaml"
    try:
        status = path.lstat()
        return read_cassette(path) if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_DEMO else None
    except (ReplayError, OSError, ValueError):
        return None


def demo_consumers(demo: Cassette | None) -> tuple[str, ...]:
    """Return the consumers that a recording was made with."""
    if demo is None:
        return ()
    role = demo.expect.get("answer_role")
    return tuple(dict.fromkeys((*(reply.role for reply in demo.replies), *((role,) if isinstance(role, str) else ()))))


def recorded_consumers(folder: Path | None) -> tuple[str, ...]:
    """Return the consumers that the recording of the bundle in *folder* was made with; read again when it changes."""
    if folder is None:
        return ()
    try:
        status = (folder / "demo.yaml").lstat()
    except (OSError, ValueError):
        return ()
    return _recorded_consumers(folder, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=64)
def _recorded_consumers(folder: Path, *_stamp: int) -> tuple[str, ...]:
    return demo_consumers(demo_of(folder))
