"""Where a runtime's skills come from: a live subsystem, a frozen view or a mutable catalog, all behind one gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from kdskills.bundle import SkillsDescriptor
from kdskills.errors import CallerMustAct, Diagnostic, StrPath, path_argument
from kdskills.session.codes import not_found
from kdskills.skills.model import Skill
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot, Snapshot
from kdskills.skills.selection import Refused, Rules
from kdskills.turn.export import SubsystemState, index_maker
from kdskills.turn.view import SkillView, build_view

Locations = Literal["host", "logical", "none"]

Gate = SkillView
"""What a session asks before each use of a skill: a view, live or frozen."""


class Subsystem(Protocol):
    """What a session needs of a `SkillsSubsystem`."""

    def view(self, consumer: str | None = None, tools: Any = None, *, include_internal: bool = False) -> Gate:
        """Return the view of *consumer* as things are now."""


GateOf = Callable[[str], Gate]
"""Gives the gate in force for a consumer, as things are now."""


class SkillCatalog:
    """Skills to choose from, without rules: `SkillRuntime(catalog=…)`.

    Safe from any thread. A change makes a new view; the runtime prunes what was removed from every session.
    """

    def __init__(self, skills: Iterable[Skill] = (), diagnostics: Iterable[Diagnostic] = ()) -> None:
        self._lock = threading.Lock()
        self._skills = {skill.full_id: skill for skill in skills}
        self._views: dict[str, SkillView] = {}
        self._generation = 0
        self._search_index = index_maker(None)
        self.diagnostics = tuple(diagnostics)

    @classmethod
    def from_directory(cls, path: StrPath) -> SkillCatalog:
        """Return a catalog of every skill of a folder; `diagnostics` tells what was left out. Raises `path_missing`."""
        folder = path_argument(path, "path")
        if not folder.is_dir():
            raise CallerMustAct(f"there is no folder {str(path)!r}", code="path_missing")
        root = SkillRoot(uri="catalog://", path=folder.absolute(), label="catalog", kind="bundle")
        snapshot = SkillRegistry([root], index_dir=None).snapshot()
        return cls(snapshot.skills.values(), snapshot.diagnostics)

    def add(self, skill: Skill) -> None:
        """Add a skill; raises CallerMustAct `skill_already_exists`."""
        with self._lock:
            if skill.full_id in self._skills:
                raise CallerMustAct(f"the catalog has {skill.full_id}", code="skill_already_exists", id=skill.full_id)
            self._skills = {**self._skills, skill.full_id: skill}
            self._changed()

    def remove(self, name: str) -> str:
        """Remove a skill by name or id and return its full id; raises `skill_not_found`."""
        gate = self.gate("")
        grant = gate.resolve(name, by="code")
        with self._lock:
            if isinstance(grant, Refused) or grant.full_id not in self._skills:
                raise not_found([name], gate.names)
            self._skills = {full_id: skill for full_id, skill in self._skills.items() if full_id != grant.full_id}
            self._changed()
        return grant.full_id

    def gate(self, consumer: str) -> Gate:
        """Return the view of *consumer* as the catalog is now."""
        with self._lock:
            view = self._views.get(consumer)
            if view is None:
                view = self._views[consumer] = build_view(self._state(), Rules(consumer=consumer))
            return view

    def _changed(self) -> None:
        self._generation += 1
        self._views = {}

    def _state(self) -> SubsystemState:
        root = SkillRoot(uri="catalog://", path=Path("/"), label="catalog", kind="bundle")
        skills = dict(sorted(self._skills.items()))
        snapshot = Snapshot(
            skills=MappingProxyType(skills),
            invalid=MappingProxyType({}),
            diagnostics=(),
            roots=(),
            origins=MappingProxyType(dict.fromkeys(skills, root)),
            generation=self._generation,
            built_at=0,
        )
        return SubsystemState(SkillsDescriptor(), snapshot, search_index=self._search_index)
