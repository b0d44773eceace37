"""Build the plugin manager, and combine the answers of hooks in one place. One manager per Host, never a global."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from kdskills import hookspecs
from kdskills.app.operations.registering import OperationRegister
from kdskills.errors import PluginInvalid
from kdskills.hooks import NAME, Register

if TYPE_CHECKING:
    import jinja2

    from kdskills.app.operations.table import Operation
    from kdskills.bundle import SkillsDescriptor
    from kdskills.errors import Diagnostic
    from kdskills.execution import ExecutorFactory
    from kdskills.models import ModelFactory
    from kdskills.session import SessionStore
    from kdskills.session.wiring import AccessRequest, Denial
    from kdskills.skills import Skill, SkillRoot
    from kdskills.solver import SolverTool

#: Shipped plugins by dotted name, so that this module imports none of them.
BUILTIN = (
    "kdskills.builtin.executors.bubblewrap",
    "kdskills.builtin.executors.docker",
    "kdskills.builtin.executors.e2b",
    "kdskills.builtin.executors.landlock",
    "kdskills.builtin.executors.srt",
    "kdskills.builtin.executors.subprocess",
    "kdskills.builtin.roots.mcp",
    "kdskills.builtin.stores.memory",
    "kdskills.builtin.stores.sql",
    "kdskills.builtin.models.replay",
    "kdskills.builtin.models.pydantic_ai",
    "kdskills.builtin.models.record",
    "kdskills.builtin.models.decisions",
)


class PluginManager(pluggy.PluginManager):
    """A pluggy manager that refuses async and misspelt hooks when a plugin is registered."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.add_hookspecs(hookspecs)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register *plugin*.

        Raises:
            PluginInvalid: A hook of it is async, unknown, or takes an argument the hook does not have.
        """
        try:
            given = super().register(plugin, name)
            self.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginInvalid(str(error), plugin=name or repr(plugin)) from error
        return given

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Return pluggy's options of an implementation; async ones are refused here."""
        opts = super().parse_hookimpl_opts(plugin, name)
        method = getattr(plugin, name)
        if opts is not None and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
            raise pluggy.PluginValidationError(plugin, f"{name} is async, but hooks are called, not awaited")
        return opts


def plugin_manager(*extra: object, entry_points: bool = True, blocked: Sequence[str] = ()) -> PluginManager:
    """Return a manager holding the shipped plugins, installed ones, then *extra*.

    Raises:
        PluginInvalid: A plugin cannot be imported or one of its hooks cannot be called.
    """
    pm = PluginManager()
    for name in blocked:
        pm.set_blocked(name)
    for name in BUILTIN:
        if not pm.is_blocked(name):
            pm.register(importlib.import_module(name), name)
    if entry_points:
        try:
            pm.load_setuptools_entrypoints(NAME)
        except ImportError as error:
            raise PluginInvalid(f"an installed plugin cannot be imported: {error}") from error
    for plugin in extra:
        pm.register(plugin)
    return pm


@dataclass(frozen=True)
class Registers:
    """What plugins registered while the Host was built."""

    executors: Register[ExecutorFactory]
    models: Register[ModelFactory]
    stores: Register[Callable[[str], SessionStore]]
    tools: Register[SolverTool]
    interpreters: Register[Sequence[str]]
    operations: Register[Operation]


def collect(pm: PluginManager) -> Registers:
    """Let every plugin register what it brings.

    Raises:
        NameTaken: Two plugins claim one name.
    """
    registers = Registers(
        Register("executor"),
        Register("model"),
        Register("store"),
        Register("tool"),
        Register("interpreter"),
        OperationRegister(),
    )
    pm.hook.kdskills_register_executors(register=registers.executors)
    pm.hook.kdskills_register_models(register=registers.models)
    pm.hook.kdskills_register_stores(register=registers.stores)
    pm.hook.kdskills_register_tools(register=registers.tools)
    pm.hook.kdskills_register_interpreters(register=registers.interpreters)
    pm.hook.kdskills_register_operations(register=registers.operations)
    return registers


class Answers:
    """Asks hooks and combines what plugins answer, by the rule in each hook's docstring.

    Filters are monotone: hidden is the union of all answers, one denial denies, so the order of plugins cannot open
    a hole (DESIGN §2).
    """

    def __init__(self, pm: PluginManager) -> None:
        self._hook = pm.hook

    def prepare_templates(self, env: jinja2.Environment) -> None:
        """Let plugins add filters and tests to the template environment."""
        self._hook.kdskills_prepare_templates(env=env)

    def skill_roots(self, descriptor: SkillsDescriptor) -> tuple[SkillRoot, ...]:
        """Return the plugins' roots in plugin order (pluggy answers last registered first)."""
        answers: list[Iterable[SkillRoot]] = self._hook.kdskills_skill_roots(descriptor=descriptor)
        return tuple(root for roots in reversed(answers) for root in roots)

    def open_skill_root(self, uri: str, base: Path) -> SkillRoot | None:
        """Return the first plugin's answer for *uri*."""
        root: SkillRoot | None = self._hook.kdskills_open_skill_root(uri=uri, base=base)
        return root

    def check_skill(self, skill: Skill) -> tuple[Diagnostic, ...]:
        """Join the problems all plugins find in *skill*."""
        return tuple(d for found in self._hook.kdskills_check_skill(skill=skill) for d in found)

    def hide_skills(self, consumer: str | None, skills: Sequence[Skill]) -> Mapping[str, str]:
        """Return the union of what plugins hide from *consumer*, with the first reason of each."""
        hidden: dict[str, str] = {}
        for answer in reversed(self._hook.kdskills_hide_skills(agent=consumer or "", skills=skills)):
            hidden = dict(answer) | hidden
        return hidden

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first denial, or None when no plugin denies."""
        denials: list[Denial] = self._hook.kdskills_deny(request=request)
        return denials[-1] if denials else None

    def source_key(self, source: Mapping[str, Any]) -> str | None:
        """Return the first plugin's merge key for a source row."""
        key: str | None = self._hook.kdskills_source_key(source=source)
        return key

    def turn_started(self, turn: Any) -> None:
        """Tell plugins that *turn* became active."""
        self._hook.kdskills_turn_started(turn=turn)

    def turn_finished(self, turn: Any, outcome: Any) -> None:
        """Tell plugins that *turn* ended."""
        self._hook.kdskills_turn_finished(turn=turn, outcome=outcome)


Filter = Callable[[str | None, Sequence["Skill"]], Mapping[str, str]]
