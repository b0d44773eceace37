"""Skills whose files are elsewhere: listed without being read, fetched and checked when used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class SetChange:
    """A skill whose files are others than those the operator accepted.

    Attributes:
        uri: Where the other side has it.
        full_id: What the policy knows it as.
        digest: Of the set that would be accepted.
        files_known: Whether the files that were accepted are known one by one; what follows is empty otherwise.
        added: Paths that are new.
        removed: Paths that are gone.
        changed: Paths with other bytes.
    """

    uri: str
    full_id: str
    digest: str
    files_known: bool
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@runtime_checkable
class ApprovedListing(Listing, Protocol):
    """A listing whose skills are used only with the sets of files that the operator accepted."""

    @property
    def label(self) -> str:
        """Name the operator gave the other side."""
        ...

    def changes(self) -> tuple[SetChange, ...]:
        """Look now, and return the skills that wait for approval, sorted by full id. Raises OperatorMustAct."""
        ...

    def accept(self, changes: Sequence[SetChange]) -> None:
        """Accept exactly these sets, if they are still what is listed. Raises Conflict."""
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
