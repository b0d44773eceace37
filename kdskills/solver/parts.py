"""What the turns of one system share, and what one turn keeps count of."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdskills.bundle.terms import DECISION
from kdskills.errors import BadRequest
from kdskills.models import Message, Redactor, Usage
from kdskills.session.inputs import INPUTS
from kdskills.solver.result import SkillUse, Step, TokenUsage, TurnStatus
from kdskills.solver.running import whole_text

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.models import ModelProvider
    from kdskills.session import SkillRuntime
    from kdskills.session.approval import Approver
    from kdskills.solver.bus import Sink
    from kdskills.solver.settings import SolverSettings
    from kdskills.solver.tools import ToolTable
    from kdskills.solver.wiring import Wiring
    from kdskills.turn import SkillsSubsystem


@dataclass(frozen=True)
class Pacing:
    """How retries wait; tests bring a clock of their own.

    Attributes:
        sleep: Waits for seconds.
        jitter: Gives a number from 0 to 1.
    """

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = random.random


@dataclass(frozen=True)
class SolverParts:
    """The objects behind a `SolverSystem`; `executor` is None when scripts and generated code are off."""

    bundle: Bundle
    subsystem: SkillsSubsystem
    runtime: SkillRuntime
    settings: SolverSettings
    wiring: Wiring
    tools: ToolTable
    models: Mapping[str, ModelProvider]
    executor: Executor | None = None
    profile: str | None = None
    sinks: Sequence[Sink] = ()
    approve: Approver | None = None
    pacing: Pacing = field(default_factory=Pacing)

    @property
    def tool_ids(self) -> tuple[str, ...]:
        """Ids of every tool of a turn; skills that require a tool not among them are refused."""
        skill_tools = tuple(tool for tool in INPUTS if tool != "skills.run_script" or self.executor is not None)
        return (*skill_tools, *self.tools.ids)

    def model(self, role: str) -> ModelProvider:
        """Return the provider of a role; roles without one of their own use the decision model."""
        return self.models.get(role) or self.models[DECISION]

    def learn(self, redactor: Redactor, secrets: Iterable[str]) -> None:
        """Mask *secrets* from now on: in a turn's events by its *redactor*, and in the recordings of providers."""
        secret_values = tuple(secrets)
        for masker in (redactor, *map(redactor_of, self.models.values())):
            if masker is not None:
                masker.add(*secret_values)


def redactor_of(provider: ModelProvider) -> Redactor | None:
    """Return the redactor of a provider that writes or reads recordings, or None of any other."""
    redactor = getattr(provider, "redactor", None)
    return redactor if isinstance(redactor, Redactor) else None


class TurnLog:
    """What a turn has done so far."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.messages: list[Message] = []
        self.steps: list[Step] = []
        self.usage = Usage()
        self.calls = 0
        self.text = ""
        self.status: TurnStatus = "partial"
        self.stop_reason = "not_run"
        self.skills: dict[tuple[str, str], SkillUse] = {}
        self._steps_begun = 0
        self._emitted_prompts: set[str] = set()

    def first_time(self, digest: str) -> bool:
        """Whether no event has held the prompt of this digest yet; from now on one has."""
        new = digest not in self._emitted_prompts
        self._emitted_prompts.add(digest)
        return new

    def begin_step(self) -> int:
        """Return the index of a step that begins now; generators asked within a step have steps of their own."""
        self._steps_begun += 1
        return self._steps_begun

    @property
    def duration_ms(self) -> int:
        """Milliseconds since the turn began."""
        return round((time.monotonic() - self.started) * 1000)

    @property
    def tokens(self) -> TokenUsage:
        """Tokens of all model calls."""
        return TokenUsage(input=self.usage.input, output=self.usage.output)

    def end(self, status: TurnStatus, reason: str) -> None:
        """Say how the turn ended."""
        self.status, self.stop_reason = status, reason

    def used(self, use: SkillUse) -> None:
        """Note a skill that took part, once for each way it came in."""
        self.skills.setdefault((use.id, use.how), use)


def check_request(request: str) -> str:
    """Return the request. Raises BadRequest when it is blank, or holds what no model can be sent."""
    if not request.strip():
        raise BadRequest("the request is blank", errors=[{"path": "/request", "problem": "must not be blank"}])
    if whole_text(request) != request:
        problem = "holds halves of characters: it was read in the wrong encoding"
        raise BadRequest(f"the request {problem}", errors=[{"path": "/request", "problem": problem}])
    return request
