"""What a solver needs of a Host, as a protocol: no import points upwards.

The Host's own wiring comes from `kdskills.app`; without one the entry point `default` of group `kdskills.wiring` is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from kdskills.errors import UnknownName

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.models import ModelProvider
    from kdskills.session.approval import AccessRequest, Denial
    from kdskills.solver.result import TurnResult
    from kdskills.solver.tools import SolverTool
    from kdskills.solver.turn import Turn
    from kdskills.turn import SkillsSubsystem

T = TypeVar("T")

GROUP = "kdskills.wiring"


class Wiring(Protocol):
    """Turns names into objects, and hands on the answers of hooks, combined."""

    @property
    def interpreters(self) -> Mapping[str, Sequence[str]]:
        """Command lines by script suffix, beside the shipped ones."""
        ...

    @property
    def tools(self) -> Sequence[SolverTool]:
        """Tools every solver offers."""
        ...

    def model(self, name: str) -> ModelProvider:
        """Return the provider a model string names.

        Raises:
            UnknownName: No plugin registered its prefix.
        """
        ...

    async def executor(self, name: str) -> Executor:
        """Return the engine of that name, or for `auto` the first that works here.

        Raises:
            ExecRefused: None works, or the named one does not.
        """
        ...

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the skills of a bundle, with the roots, filters, checks and templates of plugins in force."""
        ...

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first Denial of a plugin, or None."""
        ...

    def source_key(self, row: Mapping[str, Any]) -> str | None:
        """Return the key under which a source row is merged, or None for the usual one."""
        ...

    def turn_started(self, turn: Turn) -> None:
        """Tell plugins that a turn is active."""
        ...

    def turn_finished(self, turn: Turn, outcome: TurnResult) -> None:
        """Tell plugins that a turn has ended, whatever its outcome."""
        ...


def default_wiring() -> Wiring:
    """Return the wiring of the installed Host.

    Raises:
        UnknownName: No entry point of group `kdskills.wiring` is installed.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if not points:
        message = f"no entry point of group {GROUP} is installed: pass wiring= or reinstall kdskills"
        raise UnknownName(message, name="default", kind="wiring")
    chosen_point = points.get("default") or points[min(points)]
    return cast("Wiring", chosen_point.load()())


class PlainWiring:
    """A wiring without plugins: for applications and tests that bring their own objects.

    Args:
        models: Providers by model string.
        executors: Engines by name; `auto` takes the first.
        tools: Tools every solver offers.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, ModelProvider] | None = None,
        executors: Mapping[str, Executor] | None = None,
        tools: Sequence[SolverTool] = (),
    ) -> None:
        self.interpreters: Mapping[str, Sequence[str]] = {}
        self.tools = tuple(tools)
        self._models = dict(models or {})
        self._executors = dict(executors or {})

    def model(self, name: str) -> ModelProvider:
        """Return the provider given under *name*. Raises UnknownName."""
        return _entry_of(self._models, name, "model")

    async def executor(self, name: str) -> Executor:
        """Return the engine given under *name*, for `auto` the first one. Raises UnknownName."""
        return _entry_of(self._executors, next(iter(self._executors), name) if name == "auto" else name, "executor")

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the skills of a bundle and nothing else."""
        from kdskills.turn import SkillsSubsystem

        return SkillsSubsystem(bundle.descriptor, bundle_root=bundle.root, roots=(), index_dir=None)

    def deny(self, request: AccessRequest) -> Denial | None:
        """Deny nothing."""
        return None

    def source_key(self, row: Mapping[str, Any]) -> str | None:
        """Leave the usual key."""
        return None

    def turn_started(self, turn: Turn) -> None:
        """Do nothing."""

    def turn_finished(self, turn: Turn, outcome: TurnResult) -> None:
        """Do nothing."""


def _entry_of(entries: Mapping[str, T], name: str, kind: str) -> T:
    if name not in entries:
        names = ", ".join(sorted(entries)) or "none"
        raise UnknownName(f"no {kind} is named {name!r}; known: {names}", name=name, kind=kind)
    return entries[name]
