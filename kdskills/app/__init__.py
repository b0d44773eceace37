"""The composition root: settings, plugins, the Host and the table of operations.

Doors import only this room. `Host` wires plugins into the rooms below, which receive plain callables. Each name is
loaded when it is first used: the command line prints its help without a Host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.plugins import BUILTIN, plugin_manager
    from kdskills.app.settings import Settings, SettingsInvalid
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".host": "Host",
            ".plugins": "BUILTIN plugin_manager",
            ".settings": "Settings SettingsInvalid",
        },
    )

__all__ = ["BUILTIN", "Host", "Settings", "SettingsInvalid", "plugin_manager"]
