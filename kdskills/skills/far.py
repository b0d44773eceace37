"""Skills whose files are elsewhere: listed without being read, fetched and checked when used (spec runtime §5)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kdskills.skills.model import Skill

if TYPE_CHECKING:
    from kdskills.skills.marks import RootScan


class Listing(Protocol):
    """What a root that is no folder lists. Called often and from any thread: it must answer from memory when it can."""

    def scan(self) -> RootScan:
        """Return what is listed now; the same object as before when nothing changed. Never raises."""
        ...


@runtime_checkable
class FarContent(Protocol):
    """The files of a skill that lies elsewhere. Nothing is returned that was not checked on this very read."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Every listed file, relative to the skill; empty when the other side does not say."""
        ...

    def check(self, path: str) -> None:
        """Return when *path* is listed, without fetching it. Raises FileRefused."""
        ...

    def fetch(self, path: str, limit: int) -> bytes:
        """Return the bytes of a listed file, checked. Raises FileRefused."""
        ...

    def materialized(self) -> AbstractContextManager[Path]:
        """Return a folder with every listed file, checked, for as long as the context is open. Raises FileRefused."""
        ...


def far_content(skill: Skill) -> FarContent | None:
    """Return where the files of *skill* come from when they are elsewhere, or None for a skill on this host."""
    if skill.file is not None:
        return None
    return skill.content if isinstance(skill.content, FarContent) else None
