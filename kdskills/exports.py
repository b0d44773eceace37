"""Names that a room exports and that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(room: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a room; both know names that are not imported yet.

    Type checkers see the same names by imports under `TYPE_CHECKING`.

    Args:
        room: `__name__` of the room.
        modules: `{module: its names with blanks between them}`; a module with a leading dot lies in the room.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    members = vars(sys.modules[room])

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value: object = getattr(import_module(homes[name], room), name)
        members[name] = value
        return value

    return load, lambda: sorted({*members, *homes})
