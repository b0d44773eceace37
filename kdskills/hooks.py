"""The words plugins use: the project name of its hooks, the `hookimpl` marker, and `Register`.

Nothing here needs pluggy to be *used* by the rooms below `hookspecs`; this is the one module beside
`hookspecs` and `app.plugins` that imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import pluggy

from kdskills.errors import NameTaken, PluginInvalid, UnknownName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "kdskills"
"""Project name of the hooks, and of the entry-point group plugins are found under."""

hookimpl = pluggy.HookimplMarker(NAME)
"""Marks a function of a plugin as the implementation of a hook named in `kdskills.hookspecs`."""

T = TypeVar("T")


def not_text(name: object) -> bool:
    """Whether *name* cannot name anything: plugins may hand over any object."""
    return not isinstance(name, str) or not name


class Register(Generic[T]):
    """Named factories added by plugins while a Host is built.

    A name is given once: a second plugin claiming it raises `NameTaken`, whoever came first.

    Args:
        kind: What is registered, for messages.
        problem: Says why `(name, entry)` cannot be used, or None; what cannot be used is refused here, not when it is
            first needed.
    """

    def __init__(self, kind: str, problem: Callable[[str, object], str | None] | None = None) -> None:
        self.kind = kind
        self.plugin: str | None = None
        """Name of the plugin that is registering now."""
        self._problem = problem
        self._entries: dict[str, T] = {}
        self._plugins: dict[str, str | None] = {}

    def __call__(self, name: str, entry: T) -> None:
        """Add *entry* under *name*.

        Raises:
            PluginInvalid: *name* is no text, or *entry* cannot be used.
            NameTaken: *name* already has an entry; it is never overridden.
        """
        problem = "its name must be text" if not_text(name) else None
        if problem is None and self._problem is not None:
            problem = self._problem(name, entry)
        if problem is not None:
            raise PluginInvalid(
                f"the {self.kind} {name!r} of plugin {self.plugin or 'unknown'} cannot be used: {problem}",
                plugin=self.plugin,
                kind=self.kind,
                name=str(name),
            )
        if name in self._entries:
            both = [plugin or "unknown" for plugin in (self._plugins[name], self.plugin)]
            raise NameTaken(
                f"two plugins register the {self.kind} {name!r}: {' and '.join(both)}",
                name=name,
                kind=self.kind,
                plugins=both,
            )
        self._entries[name] = entry
        self._plugins[name] = self.plugin

    def plugin_of(self, name: str) -> str | None:
        """Return the name of the plugin that registered *name*, where it is known."""
        return self._plugins.get(name)

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
