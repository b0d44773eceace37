"""Fakes and conformance suites for plugin and bundle authors."""

from kdskills.testing.models import ScriptedModel, call, say, together

__all__ = ["ScriptedModel", "call", "say", "together"]
