"""What a solver works by, how far each turn may go, and what one turn keeps count of.

What a solver needs of a Host is a protocol here, so that no import points upwards: the Host's own wiring comes from
`kdskills.app`, by the entry point `default` of group `kdskills.wiring`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, SkipValidation
from pydantic.dataclasses import dataclass as checked_dataclass

from kdskills.errors import BadRequest, UnknownName
from kdskills.models import Message, ModelPrice, ModelProvider, OutputMode, Redactor, Usage
from kdskills.session.config import ScriptEnv
from kdskills.skills.selection import CatalogMode
from kdskills.solver.events import AgentRun, ContextCut, SkillUse, Step, TokenUsage, TurnStatus
from kdskills.solver.output import OutputType
from kdskills.solver.tools import whole_text

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.environments.scripts import ScriptPackages
    from kdskills.execution import Executor
    from kdskills.session.approval import AccessRequest, Denial
    from kdskills.solver.events import TurnResult
    from kdskills.solver.output import TypedAnswer
    from kdskills.solver.tools import SolverTool
    from kdskills.solver.turn import Turn
    from kdskills.sources import SourceResolver
    from kdskills.turn import SkillsSubsystem


T = TypeVar("T")

GROUP = "kdskills.wiring"


class Wiring(Protocol):
    """Turns names into objects, and hands on the answers of hooks, combined."""

    @property
    def interpreters(self) -> Mapping[str, Sequence[str]]:
        """Command lines by script suffix, beside the shipped ones."""

    @property
    def tools(self) -> Sequence[SolverTool]:
        """Tools every solver offers."""

    def model(self, name: str) -> ModelProvider:
        """Return the provider a model string names; raises UnknownName when no plugin registered its prefix."""

    async def executor(self, name: str) -> Executor:
        """Return the engine of that name, or for `auto` the first that works here; raises ExecRefused."""

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the skills of a bundle, with the roots, filters, checks and templates of plugins in force."""

    def packages(self, subsystem: SkillsSubsystem) -> ScriptPackages | None:
        """Return what says which built packages a script of *subsystem* gets; None: the sandbox's own alone."""

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first Denial of a plugin, or None."""

    @property
    def source_resolver(self) -> SourceResolver | None:
        """What completes rows of sources before they are merged, or None for rows as written."""
        return None

    def source_key(self, row: Mapping[str, Any]) -> str | None:
        """Return the key under which a source row is merged, or None for the usual one."""

    def turn_started(self, turn: Turn) -> None:
        """Tell plugins that a turn is active."""

    def turn_finished(self, turn: Turn, outcome: TurnResult) -> None:
        """Tell plugins that a turn has ended, whatever its outcome."""


def default_wiring() -> Wiring:
    """Return the wiring of the installed Host; raises UnknownName when no entry point of `kdskills.wiring` is there."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if not points:
        message = f"no entry point of group {GROUP} is installed: pass wiring= or reinstall kdskills"
        raise UnknownName(message, name="default", kind="wiring")
    chosen_point = points.get("default") or points[min(points)]
    return cast("Wiring", chosen_point.load()())


class PlainWiring(Wiring):
    """A wiring without plugins, whose hooks answer nothing: for applications and tests that bring their own objects.

    Models are given by model string, engines by name; of these `auto` takes the first.
    """

    interpreters: Mapping[str, Sequence[str]] = MappingProxyType({})
    tools: Sequence[SolverTool] = ()

    def __init__(
        self,
        *,
        models: Mapping[str, ModelProvider] | None = None,
        executors: Mapping[str, Executor] | None = None,
        tools: Sequence[SolverTool] = (),
    ) -> None:
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


def _entry_of(entries: Mapping[str, T], name: str, kind: str) -> T:
    if name not in entries:
        names = ", ".join(sorted(entries)) or "none"
        raise UnknownName(f"no {kind} is named {name!r}; known: {names}", name=name, kind=kind)
    return entries[name]


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class AgentBudget(BaseModel):
    """How far one turn of an agent may go; what is None is as for the turn that hands over, whose own bounds hold as well.

    Attributes:
        max_steps: Model calls for decisions.
        max_tool_calls: Tool calls.
        max_total_tokens: Tokens of its model calls, and of those of agents it hands over to.
        wall_s: Seconds it may take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_steps: Count | None = None
    max_tool_calls: Count | None = None
    max_total_tokens: Count | None = None
    wall_s: Seconds | None = None


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AgentSpec:
    """A consumer that is offered as a tool: a call of it is a turn of its own.

    Attributes:
        consumer: Whose rules and skills hold in that turn; its model is that of the role of this name.
        description: What it does, for the model that hands over.
        output_type: What its answers are: a type as for `ReactSolver.run`; None: text.
        budget: Its bounds.
        tools: Ids of the tools it has, of those that the agent handing over has; None: the same. Skills are loaded, searched
            and read by every agent.
    """

    consumer: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^*\s]+$")]
    description: Annotated[str, Field(pattern=r"\S")]
    output_type: SkipValidation[OutputType | None] = None
    _: KW_ONLY
    budget: AgentBudget = AgentBudget()
    tools: tuple[str, ...] | None = None

    def has(self, tool_id: str) -> bool:
        """Whether the agent has a tool of those it may have."""
        return self.tools is None or tool_id in self.tools


class SolverSettings(BaseModel):
    """Bounds and choices of a solver's turns; times in seconds.

    Attributes:
        max_steps: Model calls for decisions; then one last call without tools.
        max_tool_calls: Tool calls of a turn.
        max_parallel: Calls of one reply that run at once.
        max_total_tokens: Tokens of all model calls of a turn, input and output.
        wall_s: Time a turn may take.
        tool_timeout_s: Time one tool call may take.
        model_timeout_s: Time one model call may take.
        model_retries: Further tries after a failure that may pass.
        models: Provider or model string by role; other roles use the decision model.
        agents: Consumers offered as tools, by the tool's id, such as `tools.research`.
        agent_depth: How often an agent may be handed over to by an agent: 1, and agents hand over to none.
        max_agent_steps: Model calls for decisions of all agents of a turn together.
        skills_form: Which text of a skill generators get: `full` or `compact`.
        output_retries: How often an answer that is not of the type asked for is sent back.
        output_mode: How models are held to a type: `native`, `tool` or `text`; None: as their providers say.
        on_unknown_sid: What happens to a citation of no known source: `flag`, `retry` once, or `drop`.
        answer_role: The generator that writes the answer, or None: the decision model's own text is the answer.
        check_answers: Whether an answer that reports files which are not there, or a success of what failed, is sent back
            once, and then `unverified`.
        final_call: Whether a turn out of steps or calls is given one last call without tools.
        run_scripts: None: exactly when the executor isolates; True asks for scripts without isolation; False: never.
        shell: The shell and the file tools, likewise; they are off wherever scripts are.
        images: Whether tools show images to models; None: to those that say they take them.
        window: Tokens the decision model takes; None: as its provider says, 128,000 when that is unknown.
        brief: Whether rules and tools are told in few words: `auto` when the window is below 8,192 tokens.
        history_share: Share of the model's window that earlier turns may take before they are cut.
        catalog: What catalogs list where the descriptor's rules do not say: `auto`, `all`, `names` or `search-only`.
        catalog_tokens: Tokens a catalog may take; None: its share of the window.
        base_text: The bundle's or application's own text between rules and catalog.
        model_settings: Passed to the provider, such as `{"temperature": 0}`.
        prices: What models cost, by `provider:model`; beside them, shipped prices of OpenAI's and Anthropic's own servers hold.
        secrets: Values masked as `***` in events, transcripts and results.
        script_env: Gives the variables of a skill's scripts; their values are masked likewise.
        network: Hosts that programs may reach, by namespace or full id of the loaded skills they are run for.
        work_dir: Where turn folders are made; None: the system's folder for temporary files. They are kept.
        transcripts: Folder that gets a `<turn id>.jsonl` for each turn, or several, or None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    max_steps: Count = 24
    max_tool_calls: Count = 96
    max_parallel: Count = 8
    max_total_tokens: Count = 400_000
    wall_s: Seconds = 900.0
    tool_timeout_s: Seconds = 120.0
    model_timeout_s: Seconds = 120.0
    model_retries: Annotated[int, Field(ge=0)] = 4
    models: dict[str, str | ModelProvider] = Field(default_factory=dict)
    agents: dict[Annotated[str, Field(pattern=r"^tools\.[A-Za-z][A-Za-z0-9_-]*$", max_length=60)], AgentSpec] = Field(
        default_factory=dict
    )
    agent_depth: Annotated[int, Field(ge=1, le=8)] = 2
    max_agent_steps: Count = 64
    skills_form: Literal["full", "compact"] = "full"
    output_retries: Annotated[int, Field(ge=0)] = 2
    output_mode: OutputMode | None = None
    on_unknown_sid: Literal["flag", "retry", "drop"] = "flag"
    answer_role: str | None = None
    check_answers: bool = True
    final_call: bool = True
    run_scripts: bool | None = None
    shell: bool | None = None
    images: bool | None = None
    window: Annotated[int | None, Field(ge=1_024)] = None
    brief: Literal["auto", "always", "never"] = "auto"
    history_share: Annotated[float, Field(gt=0, le=0.6)] = 0.4
    catalog: CatalogMode = "auto"
    catalog_tokens: Annotated[int | None, Field(ge=0)] = None
    base_text: str = ""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    prices: dict[str, ModelPrice] = Field(default_factory=dict)
    secrets: tuple[SecretStr, ...] = ()
    script_env: ScriptEnv | None = None
    network: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    work_dir: Path | None = None
    transcripts: Path | tuple[Path, ...] | None = None

    @property
    def transcript_folders(self) -> tuple[Path, ...]:
        """The folders that get transcripts."""
        return (self.transcripts,) if isinstance(self.transcripts, Path) else self.transcripts or ()

    def secret_values(self) -> tuple[str, ...]:
        """Return what is masked from the start: the secrets, and the values of headers sent to providers."""
        headers = self.model_settings.get("extra_headers")
        sent = headers.values() if isinstance(headers, Mapping) else ()
        return (*(secret.get_secret_value() for secret in self.secrets), *map(str, sent))


@dataclass(frozen=True)
class Pacing:
    """How retries wait; tests bring a clock of their own. `jitter` gives a number from 0 to 1."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = random.random


def redactor_of(provider: ModelProvider) -> Redactor | None:
    """Return the redactor of a provider that writes or reads recordings, or None of any other."""
    redactor = getattr(provider, "redactor", None)
    return redactor if isinstance(redactor, Redactor) else None


class TurnLog:
    """What a turn has done so far."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.messages: list[Message] = []
        self.steps: dict[int, Step] = {}
        self.usage, self.estimate = Usage(), Usage()
        self._costs: list[float | None] = []
        self.agent_steps = 0
        self.agents: dict[int, AgentRun] = {}
        self.call_ids: list[str] = []
        self.text = ""
        self.typed: TypedAnswer[Any] | None = None
        self.status: TurnStatus = "partial"
        self.stop_reason = "not_run"
        self.skills: dict[tuple[str, str], SkillUse] = {}
        self.context: list[ContextCut] = []
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
    def calls(self) -> int:
        """How many tools were called."""
        return len(self.call_ids)

    @property
    def duration_ms(self) -> int:
        """Milliseconds since the turn began."""
        return round((time.monotonic() - self.started) * 1000)

    @property
    def cost(self) -> float | None:
        """US dollars of all model calls; None while there is none, or where the price of one is not known."""
        costs = [each for each in self._costs if each is not None]
        return round(sum(costs), 10) if costs and len(costs) == len(self._costs) else None

    @property
    def spent(self) -> int:
        """Tokens in and out of all model calls, those that nobody counted as estimated."""
        return self.usage.total + self.estimate.total

    @property
    def tokens(self) -> TokenUsage:
        """Tokens of all model calls, those that nobody counted estimated."""
        return TokenUsage.of(self.usage + self.estimate, estimated=self.estimate.total > 0, cost=self.cost)

    def spend(self, tokens: TokenUsage) -> None:
        """Add what a model call took."""
        usage = Usage(**tokens.model_dump(exclude={"estimated", "cost"}))
        if tokens.estimated:
            self.estimate += usage
        else:
            self.usage += usage
        self._costs.append(tokens.cost)

    def end(self, status: TurnStatus, reason: str) -> None:
        """Say how the turn ended."""
        self.status, self.stop_reason = status, reason

    def used(self, use: SkillUse) -> None:
        """Note a skill that took part, once for each way it came in."""
        self.skills.setdefault((use.id, use.how), use)


def check_request(request: str) -> None:
    """Raise BadRequest when the request is blank, or holds what no model can be sent."""
    if not request.strip():
        raise BadRequest("the request is blank", errors=[{"path": "/request", "problem": "must not be blank"}])
    if whole_text(request) != request:
        problem = "holds halves of characters: it was read in the wrong encoding"
        raise BadRequest(f"the request {problem}", errors=[{"path": "/request", "problem": problem}])
