"""Names that a room exports and that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def tell_homes(room: str) -> None:
    """Let a wrong import from a room that has its names loaded say where the name is, as `lazy_exports` does; its last line."""
    vars(sys.modules[room])["__getattr__"], _ = lazy_exports(room, {})


def lazy_exports(room: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a room; both know names that are not imported yet.

    Type checkers see the same names by imports under `TYPE_CHECKING`. A name that another room exports raises ImportError,
    which says where it is: of an AttributeError an import statement would leave nothing.

    Args:
        room: `__name__` of the room.
        modules: `{module: its names with blanks between them}`; a module with a leading dot lies in the room.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    members = vars(sys.modules[room])

    def load(name: str) -> object:
        if name not in homes:
            home = _home(room, name) if name.isidentifier() and not name.startswith("_") else None
            if home is not None:
                raise ImportError(f"{room} does not export {name}: write `from {home} import {name}`", name=room)
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value: object = getattr(import_module(homes[name], room), name)
        members[name] = value
        return value

    return load, lambda: sorted({*members, *homes})


def _home(room: str, name: str) -> str | None:
    """Return the room nearest the top that exports *name*, as the texts of rooms say it: nothing is imported for it.

    None for a module of *room* itself, which the import system is about to look for.
    """
    from importlib.util import find_spec
    from pathlib import Path

    package = Path(__file__).parent
    if find_spec(f"{room}.{name}") is None:
        for path in sorted(package.rglob("__init__.py"), key=lambda path: (len(path.parts), path)):
            _, _, listed = path.read_text(encoding="utf-8").partition("\n__all__ = ")
            if f'"{name}"' in listed:
                return ".".join((package.name, *path.relative_to(package).parts[:-1]))
    return None
