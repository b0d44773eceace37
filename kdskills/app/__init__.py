"""The composition root: settings, plugins, the Host and the table of operations.

Doors import only this room. `Host` wires plugins into the rooms below, which receive plain callables.
"""

from kdskills.app.host import Host
from kdskills.app.plugins import BUILTIN, plugin_manager
from kdskills.app.settings import Settings, SettingsInvalid

__all__ = ["BUILTIN", "Host", "Settings", "SettingsInvalid", "plugin_manager"]
