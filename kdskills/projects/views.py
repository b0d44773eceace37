"""A project's skills under its policy: built-in, plugins', its bundle's and uploaded ones."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kdskills.bundle import Bundle
from kdskills.bundle.load import NAMES as DESCRIPTORS
from kdskills.errors import BadRequest, Diagnostic
from kdskills.skills.model import Skill
from kdskills.skills.roots import KIND_ORDER, SkillRoot
from kdskills.turn import SkillsSubsystem

UPLOADED: Final = "project"
"""Layer of uploaded skills: stronger than what the machine brings, weaker than the project's own bundle, and always in
namespace `public`, so that no upload takes a place in `internal` or replaces a bundle's skill."""
WEAKER: Final = frozenset(KIND_ORDER[: KIND_ORDER.index(UPLOADED)])
MAX_CACHED: Final = 64
PROJECT: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

Build = Callable[..., SkillsSubsystem]
"""Makes the subsystem of a bundle, or of none, with the Host's plugins in force; takes further `roots` and `filters`."""


def check_project(project: str) -> str:
    """Return *project* when it is a project's name. Raises BadRequest: `project_invalid`."""
    if not PROJECT.fullmatch(project):
        message = f"{project!r} is no project: lower-case letters, digits, - and _, at most 64 of them"
        raise BadRequest(message, code="project_invalid", project=project[:100])
    return project


@dataclass(frozen=True, slots=True)
class ProjectSkills:
    """A named set of skills with its policy: of a bundle or a project, and what was found while it was loaded."""

    name: str
    subsystem: SkillsSubsystem
    diagnostics: tuple[Diagnostic, ...] = ()


class Uploaded(NamedTuple):
    """An uploaded skill in use: `root` holds nothing but the folder of its active version."""

    name: str
    full_id: str
    root: Path


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a project's subsystem is made of at one generation, which grows with each change.

    Attributes:
        bundle: Folder of the project's bundle, or None.
        descriptor: When the bundle's descriptor was last changed: a bundle is loaded again when it was.
        uploaded: Active versions of uploaded skills.
        disabled: Full ids nobody may have.
        missing: Full ids of uploaded skills whose files are not here: no weaker skill may take their place.
    """

    generation: int
    bundle: Path | None
    descriptor: tuple[int, ...]
    uploaded: tuple[Uploaded, ...]
    disabled: frozenset[str]
    missing: frozenset[str] = frozenset()


def descriptor_mark(bundle: Path | None) -> tuple[int, ...]:
    """Return what changes when the descriptor of a bundle does."""
    if bundle is None:
        return ()
    return tuple(path.stat().st_mtime_ns for name in DESCRIPTORS if (path := bundle / name).exists())


def ingredients_of(rows: Sequence[Any], bundle: Path | None, root: Callable[[str, str], Path]) -> Ingredients:
    """Return what a project's skills are made of, from `ProjectRows.in_use`; *root* gives a version's folder."""
    return Ingredients(
        generation=rows[0].generation if rows else 0,
        bundle=bundle,
        descriptor=descriptor_mark(bundle),
        uploaded=tuple(Uploaded(row.name, row.full_id, root(row.name, row.active)) for row in rows if row.active),
        disabled=frozenset(row.full_id for row in rows if row.name is not None and not row.enabled),
    )


class ProjectViews:
    """Subsystems by project, each built again when its project's generation has changed. Safe from any thread; `load` loads a bundle."""

    def __init__(self, build: Build, load: Callable[[Path], Bundle]) -> None:
        self._build = build
        self.load = load
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Ingredients, ProjectSkills]] = OrderedDict()

    def skills(self, project: str, ingredients: Ingredients) -> ProjectSkills:
        """Return the project's skills as they are made now; blocks on a generation's first call. Raises BundleError."""
        with self._lock:
            entry = self._kept.get(project)
            if entry is not None and entry[0] == ingredients:
                self._kept.move_to_end(project)
                return entry[1]
        skills = self._build_skills(project, ingredients)
        with self._lock:
            entry = self._kept.get(project)
            if entry is None or entry[0].generation <= ingredients.generation:
                self._kept[project] = (ingredients, skills)
                self._kept.move_to_end(project)
            while len(self._kept) > MAX_CACHED:
                self._kept.popitem(last=False)
        return skills

    def _build_skills(self, project: str, ingredients: Ingredients) -> ProjectSkills:
        bundle = None if ingredients.bundle is None else self.load(ingredients.bundle)
        roots = [
            SkillRoot(f"uploaded://{project}/{each.name}", each.root, f"uploaded:{each.name}", UPLOADED)
            for each in ingredients.uploaded
        ]

        def denied(consumer: str | None, skills: Sequence[Skill]) -> Mapping[str, str]:
            reasons: dict[str, str] = {}
            for skill in skills:
                if skill.layer == UPLOADED and skill.full_id in ingredients.disabled:
                    reasons[skill.full_id] = f"it is disabled in project {project}"
                elif skill.layer in WEAKER and skill.full_id in ingredients.missing:
                    reasons[skill.full_id] = f"the files of project {project}'s own version are missing"
            return reasons

        subsystem = self._build(bundle, roots=roots, filters=(denied,))
        name = project if bundle is None else bundle.name
        return ProjectSkills(name, subsystem, () if bundle is None else bundle.diagnostics)
