"""Hooks are honest: each is documented with its exact signature, each has a test named after it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pluggy
import pytest

from kdskills import hookspecs
from kdskills.app.plugins import PluginManager, plugin_manager
from kdskills.errors import PluginInvalid
from kdskills.hooks import hookimpl

HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("kdskills_"))


def _signature(name: str) -> str:
    return f"{name}({', '.join(inspect.signature(getattr(hookspecs, name)).parameters)})"


def test_there_are_hooks() -> None:
    """The list the other tests run over is not empty."""
    assert len(HOOKS) >= 10


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_documented(name: str, repo: Path) -> None:
    """The reference page shows the hook with its exact signature."""
    assert f"`{_signature(name)}`" in (repo / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HOOKS)
def test_hook_has_a_docstring(name: str) -> None:
    """The hookspec says what an implementation returns and how answers are combined."""
    assert len(inspect.getdoc(getattr(hookspecs, name)) or "") > 40


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_tested(name: str, repo: Path) -> None:
    """A test named after the hook exists."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (repo / "tests").rglob("test_*.py"))
    assert re.search(rf"def test_{name}\b", text)


def test_async_hook_is_refused() -> None:
    """An `async def` implementation is refused when it is registered."""

    class Plugin:
        @hookimpl
        async def kdskills_turn_started(self, turn: object) -> None:
            """Never awaited."""

    with pytest.raises(PluginInvalid, match="async"):
        plugin_manager(Plugin(), entry_points=False)


def test_misspelt_hook_is_refused() -> None:
    """A hook name that does not exist is refused, not ignored."""

    class Plugin:
        @hookimpl
        def kdskills_turn_strated(self, turn: object) -> None:
            """A typo."""

    with pytest.raises(PluginInvalid, match="kdskills_turn_strated"):
        plugin_manager(Plugin(), entry_points=False)


def test_unknown_argument_is_refused() -> None:
    """An argument the hookspec does not have is refused."""

    class Plugin:
        @hookimpl
        def kdskills_turn_started(self, trun: object) -> None:
            """A typo in the argument."""

    with pytest.raises(PluginInvalid, match="trun"):
        plugin_manager(Plugin(), entry_points=False)


def test_managers_share_nothing() -> None:
    """Two managers are two worlds: what one registers, the other does not know."""

    class Plugin:
        @hookimpl
        def kdskills_turn_started(self, turn: object) -> None:
            """Told."""

    one, two = plugin_manager(Plugin(), entry_points=False), plugin_manager(entry_points=False)
    assert isinstance(one, PluginManager)
    assert isinstance(one, pluggy.PluginManager)
    assert (
        len(one.hook.kdskills_turn_started.get_hookimpls()) - len(two.hook.kdskills_turn_started.get_hookimpls())
    ) == 1
