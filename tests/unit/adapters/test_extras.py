"""Each adapter asks for its extra."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import kdskills.builtin.adapters as room
from kdskills.errors import MissingExtra

ADAPTERS = {
    "langchain": ("langchain", "langchain.agents.middleware"),
    "openai_agents": ("openai-agents", "agents"),
    "google_adk": ("google-adk", "google.adk.tools.base_tool"),
}
"""The extra of each adapter, and a module of its package."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_without_the_framework_one_sentence_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing is the extra's own error."""
    extra, module = ADAPTERS[name]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{room.__name__}.{name}", raising=False)
    with pytest.raises(MissingExtra) as missing:
        import_module(f"{room.__name__}.{name}")
    assert f"kdskills[{extra}]" in str(missing.value)
