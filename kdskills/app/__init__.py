"""The composition root: settings, plugins, the Host and the table of operations.

Doors import only this room. `Host` wires plugins into the rooms below, which receive plain callables. Each name is
loaded when it is first used: the command line prints its help without a Host.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.plugins import BUILTIN, plugin_manager
    from kdskills.app.settings import Settings, SettingsInvalid

__all__ = ["BUILTIN", "Host", "Settings", "SettingsInvalid", "plugin_manager"]

_HOMES = MappingProxyType(
    {
        "BUILTIN": "kdskills.app.plugins",
        "Host": "kdskills.app.host",
        "Settings": "kdskills.app.settings",
        "SettingsInvalid": "kdskills.app.settings",
        "plugin_manager": "kdskills.app.plugins",
    }
)


def __getattr__(name: str) -> object:
    """Import the home of a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
