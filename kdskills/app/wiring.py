"""How a solver reaches what its Host holds: `solver.wiring.Wiring` over registers and hook answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdskills.app.plugins import make_part
from kdskills.execution.probing import choose
from kdskills.models import ModelProvider, split_name

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.session.approval import AccessRequest, Denial
    from kdskills.solver import SolverTool
    from kdskills.turn import SkillsSubsystem


class HostWiring:
    """What a solver needs of *host*, and nothing more."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.interpreters: Mapping[str, Sequence[str]] = dict(host.registers.interpreters.items())
        self.tools: Sequence[SolverTool] = tuple(tool for _, tool in host.registers.tools.items())

    def model(self, name: str) -> ModelProvider:
        """Return the provider a model string names. Raises UnknownName, PluginFailed."""
        prefix, model_name = split_name(name)
        return make_part(self._host.registers.models, prefix, ModelProvider, model_name)

    async def executor(self, name: str) -> Executor:
        """Return the engine of that name, or for `auto` the first that works here. Raises ExecRefused."""
        engine = await choose(
            self._host.engines(),
            name,
            min_isolation=self._host.settings.isolation,
            allow_unisolated=self._host.settings.allow_unisolated,
        )
        await self._host.reap_once(engine)
        return engine

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the skills of *bundle* with plugins' roots, filters, checks and templates in force."""
        return self._host.subsystem(bundle)

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first Denial of a plugin, or None."""
        return self._host.answers.deny(request)

    def source_key(self, row: Mapping[str, Any]) -> str | None:
        """Return the key under which a source row is merged."""
        return self._host.answers.source_key(row)

    def turn_started(self, turn: Any) -> None:
        """Tell plugins that a turn is active."""
        self._host.answers.turn_started(turn)

    def turn_finished(self, turn: Any, outcome: Any) -> None:
        """Tell plugins that a turn has ended."""
        self._host.answers.turn_finished(turn, outcome)
