"""Fakes and conformance suites for plugin and bundle authors; each name is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.remote.labmodel import FakeResponses
    from kdskills.testing.app_server import AppServerEmulator
    from kdskills.testing.models import ScriptedModel, call, say, together
else:  # the plugin of pytest lies here, and is imported by every run of pytest
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "kdskills.remote.labmodel": "FakeResponses",
            ".app_server": "AppServerEmulator",
            ".models": "ScriptedModel call say together",
        },
    )

__all__ = ["AppServerEmulator", "FakeResponses", "ScriptedModel", "call", "say", "together"]
