"""The words plugins use: the project name of its hooks, the `hookimpl` marker, and `Register`.

Nothing here needs pluggy to be *used* by the rooms below `hookspecs`; this is the one module beside
`hookspecs` and `app.plugins` that imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import pluggy

from kdskills.errors import NameTaken, UnknownName

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "kdskills"
"""Project name of the hooks, and of the entry-point group plugins are found under."""

hookimpl = pluggy.HookimplMarker(NAME)
"""Marks a function of a plugin as the implementation of a hook named in `kdskills.hookspecs`."""

T = TypeVar("T")


class Register(Generic[T]):
    """Named factories added by plugins while a Host is built.

    A name is given once: a second plugin claiming it raises `NameTaken`, whoever came first.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def __call__(self, name: str, entry: T) -> None:
        """Add *entry* under *name*.

        Raises:
            NameTaken: *name* already has an entry (DESIGN §2: never a silent override).
        """
        if name in self._entries:
            raise NameTaken(f"two plugins register the {self.kind} {name!r}", name=name, kind=self.kind)
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries)) or "none"
            raise UnknownName(f"no {self.kind} is named {name!r}; known: {known}", name=name, kind=self.kind) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def items(self) -> list[tuple[str, T]]:
        """Return (name, entry) pairs sorted by name."""
        return sorted(self._entries.items())
