"""Where a runtime's skills come from: a live subsystem, a frozen view, or a mutable catalog.

All three answer through one gate, `resolve`; there is no second rule set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from kdskills.errors import PolicyUnavailable
from kdskills.skills.model import Skill, TokenCounter
from kdskills.skills.selection import By, Granted, Refused

Locations = Literal["host", "logical", "none"]


class CatalogText(Protocol):
    """A rendered catalog, as `SkillView.catalog` returns it."""

    @property
    def text(self) -> str:
        """The text."""
        ...

    @property
    def level(self) -> int:
        """0 full to 4 partial."""
        ...

    @property
    def shown(self) -> int:
        """Entries shown."""
        ...

    @property
    def total(self) -> int:
        """Entries there are."""
        ...


class Gate(Protocol):
    """What a session needs of a `SkillView`."""

    @property
    def consumer(self) -> str | None:
        """Whose view it is."""
        ...

    @property
    def skills(self) -> Mapping[str, Skill]:
        """Loadable skills by full id."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """`{name: full id}` of the listed skills."""
        ...

    @property
    def digest(self) -> str:
        """Changes whenever an answer may."""
        ...

    def resolve(self, ref: str, *, by: By = "model") -> Granted | Refused:
        """Grant or refuse *ref*."""
        ...

    def catalog(
        self,
        format: Literal["gallery", "xml", "json"] = "gallery",  # noqa: A002 - the name of the public argument
        *,
        budget: int | None = None,
        count: TokenCounter = ...,
        locations: Locations = "logical",
        pinned: Sequence[str] = (),
        search_hint: str | None = None,
    ) -> CatalogText:
        """Render the listed skills."""
        ...


class Subsystem(Protocol):
    """What a session needs of a `SkillsSubsystem`."""

    def view(self, consumer: str | None = None, tools: Any = None, *, include_internal: bool = False) -> Gate:
        """Return the view of *consumer* as things are now."""
        ...


class SkillSource(Protocol):
    """Gives the gate in force for a consumer."""

    def gate(self, consumer: str) -> Gate:
        """Return the gate as things are now."""
        ...


class LiveSource:
    """A subsystem: each call sees its policy and files as they are."""

    def __init__(self, subsystem: Subsystem) -> None:
        self._subsystem = subsystem

    def gate(self, consumer: str) -> Gate:
        """Return the current view of *consumer*."""
        return self._subsystem.view(consumer)


class FrozenSource:
    """One view: its consumer's, whatever changes."""

    def __init__(self, view: Gate, consumer: str) -> None:
        self._view = view
        self._consumer = consumer

    def gate(self, consumer: str) -> Gate:
        """Return the view.

        Raises:
            PolicyUnavailable: Another consumer's policy is not known here.
        """
        if consumer != self._consumer:
            raise PolicyUnavailable(f"this runtime holds the view of {self._consumer!r} only", consumer=consumer)
        return self._view


def names_by_id(gate: Gate) -> dict[str, str]:
    """Return `{full id: name}` of the listed skills."""
    return {full_id: name for name, full_id in gate.names.items()}
