"""Fakes and conformance suites for plugin and bundle authors."""

from kdskills.remote.labmodel import FakeResponses
from kdskills.testing.app_server import AppServerEmulator
from kdskills.testing.models import ScriptedModel, call, say, together

__all__ = ["AppServerEmulator", "FakeResponses", "ScriptedModel", "call", "say", "together"]
