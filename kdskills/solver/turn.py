"""A turn: what is active while a request is worked on, and what can be done within it.

A model call within it has a timeout and tries, and events tell of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdskills.bundle.descriptor import DECISION
from kdskills.errors import Diagnostic, KdskillsError, ModelFailed
from kdskills.models import (
    IMAGE_TOKENS,
    Message,
    ModelProvider,
    ModelReply,
    ModelRequest,
    OutputMode,
    TextDelta,
    ToolSpec,
)
from kdskills.session.approval import AccessKind, AccessRequest
from kdskills.session.config import UNKNOWN_WINDOW
from kdskills.session.receipts import text_digest
from kdskills.skills.model import estimate_tokens
from kdskills.skills.safe_open import walk_shown
from kdskills.solver.events import (
    ModelDelta,
    ModelReplied,
    ModelRequested,
    ModelRetry,
    PromptBuilt,
    SkillUse,
    Step,
    TokenUsage,
    TurnResult,
)
from kdskills.solver.parts import TurnLog
from kdskills.solver.spans import chat_span, company_and_model
from kdskills.solver.tools import whole_text
from kdskills.turn.facade import build_skills_instruction_block
from kdskills.turn.subsystem import activated

if TYPE_CHECKING:
    from kdskills.session import Session
    from kdskills.session.conversations import Conversation
    from kdskills.session.receipts import ActiveSkill
    from kdskills.session.scope import TurnSources
    from kdskills.session.workspace import FolderWorkspace
    from kdskills.skills.selection import By
    from kdskills.solver.bus import EventBus
    from kdskills.solver.output import OutputForm
    from kdskills.solver.react import ReactSolver
    from kdskills.solver.shell import BackgroundCommand
    from kdskills.solver.system import SolverSystem
    from kdskills.sources import SourcesPool
    from kdskills.turn import SkillsSubsystem, SkillView


RETRY_BASE_S, RETRY_CAP_S = 0.5, 30.0


def _encodable(reply: ModelReply) -> ModelReply:
    """Return *reply* with texts every transport can encode: as part of the history they are sent with each request."""
    calls = tuple(
        replace(call, id=whole_text(call.id), tool=whole_text(call.tool), arguments=whole_text(call.arguments))
        for call in reply.calls
    )
    return replace(reply, text=whole_text(reply.text), calls=calls)


@dataclass(frozen=True)
class Generated:
    """What a generator wrote, citations in the turn's numbers.

    `skills` are full ids of the skills in its system text, `skipped` `(ref, code)` of those the role may not see.
    """

    text: str
    role: str
    skills: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    model: str = ""
    usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True)
class Handover:
    """The call that began the turn of an agent: in which turn, by which tool, and which of the turn's calls it is.

    `pool` holds the sources that task and files cite, which are all the agent knows of those of the turn above.
    """

    turn: Turn
    call_id: str
    tool: str
    number: int
    pool: SourcesPool


@dataclass
class Turn:
    """One request being worked on.

    `consumer` is the deciding agent, `parts` the system, `session` the session's API bound to this turn; `view` is
    frozen for the turn, and catalogs, loads and generators share its `SK` numbers. `streaming` tells that somebody
    reads the pieces of replies, `log` holds what was done so far, `result` what came of it, once it has ended. `image_bytes`
    counts what images were shown. `commands` run in the background by handle, `closing` is left when the turn ends, before
    its files are listed. `history` was said before the request; the turn is added to `conversation`, or to none; `unsaved` is
    what kept it from being added. `output` is the type asked for. `handover` is the call that began the turn of an
    agent, None of a turn that a caller began; `solver` is what works on it.
    """

    id: str
    request: str
    consumer: str
    parts: SolverSystem
    session: Session
    view: SkillView
    sources: TurnSources
    workspace: FolderWorkspace
    bus: EventBus
    conversation: Conversation | None = None
    handover: Handover | None = None
    solver: ReactSolver | None = None
    history: tuple[Message, ...] = ()
    unsaved: KdskillsError | None = None
    streaming: bool = False
    output: OutputForm[Any] | None = None
    log: TurnLog = field(default_factory=TurnLog)
    shell_outputs: int = 0
    image_bytes: int = 0
    commands: dict[str, BackgroundCommand] = field(default_factory=dict)
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    result: TurnResult | None = None

    @property
    def session_id(self) -> str:
        """Id of the session."""
        return self.session.id

    @property
    def user_id(self) -> str | None:
        """Id of whom the turn is for, the only part of a user that is written anywhere."""
        return self.session.scope.user_id

    @property
    def subsystem(self) -> SkillsSubsystem:
        """The subsystem that is active: the system's, or one laid over it for the user."""
        return self.session.scope.subsystem or self.parts.subsystem

    @property
    def lineage(self) -> tuple[Turn, ...]:
        """This turn, the one it was handed over by, and so on up to the one that a caller began."""
        return (self,) if self.handover is None else (self, *self.handover.turn.lineage)

    @property
    def lane(self) -> str:
        """The numbers of the calls that handed over, from the first turn down; empty for that turn itself."""
        return ".".join(str(turn.handover.number) for turn in reversed(self.lineage) if turn.handover is not None)

    @property
    def role(self) -> str:
        """The role whose model decides: an agent's is its consumer."""
        return DECISION if self.handover is None else self.consumer

    def count_step(self) -> None:
        """Count a decision of an agent for the turn that a caller began."""
        if self.handover is not None:
            self.lineage[-1].log.agent_steps += 1

    def spent(self) -> str | None:
        """Return the name of a bound that this turn, or one it was handed over by, has met, or None."""
        first = self.lineage[-1]
        if self.handover is not None and first.log.agent_steps >= first.parts.settings.max_agent_steps:
            return "max_agent_steps"
        met = any(turn.log.spent >= turn.parts.settings.max_total_tokens for turn in self.lineage)
        return "max_total_tokens" if met else None

    def role_view(self, role: str) -> SkillView:
        """Return what another role may use in this turn: never what the turn that handed over may not."""
        wall = None if self.handover is None else self.handover.turn.view
        return self.subsystem.view(role, tools=self.parts.tool_ids, parent=wall)

    @property
    def pool(self) -> SourcesPool:
        """The turn's sources."""
        return self.sources.pool

    def access(self, kind: AccessKind, **facts: Any) -> AccessRequest:
        """Return what policy plugins are asked before something happens in this turn."""
        scope = self.session.scope
        return AccessRequest(kind, self.consumer, self.session_id, user=scope.user, deps=scope.deps, **facts)

    async def ask(self, step: int, request: ModelRequest) -> ModelReply:
        """Ask the model of a role, as a step of this turn, and log it; a call that failed retryably is tried again.

        Raises ModelFailed for good (`context_full` when the request does not fit), and ReplayError.
        """
        settings, pacing, redactor = self.parts.settings, self.parts.pacing, self.bus.redactor
        provider, emit = self.parts.model(request.role), partial(self.bus.emit, step=step, role=request.role)
        request = replace(request, timeout_s=settings.model_timeout_s, settings=settings.model_settings, lane=self.lane)
        if not self.takes_images(request.role):
            request = replace(request, messages=tuple(replace(message, images=()) for message in request.messages))
        tools = tuple(tool.tool_id for tool in request.tools)
        emit(ModelRequested, model=provider.name, messages=len(request.messages), tools=tools)
        started_at = time.monotonic()
        with chat_span(provider, request, self.session_id, self.user_id) as span:
            attempt = 0
            while True:
                try:
                    reply = _encodable(await self._ask_once(provider, request, emit))
                    break
                except ModelFailed as error:
                    if not error.retryable or attempt >= settings.model_retries:
                        raise self._masked(error) from None
                    attempt += 1
                    backoff = min(RETRY_CAP_S, RETRY_BASE_S * 2 ** (attempt - 1)) * pacing.jitter()
                    delay = backoff if error.retry_after is None else max(0.0, error.retry_after)
                    facts = {"code": error.code, "message": error.message, "delay_s": round(delay, 3)}
                    emit(ModelRetry, attempt=attempt, **facts)
                    await pacing.sleep(delay)
            # Before any event about the reply: its text may repeat what its calls give away.
            for call in reply.calls:
                redactor.arguments(call.arguments)
            usage = self._tokens(provider, request, reply)
            span.replied(replace(reply, text=redactor.text(reply.text), cost=usage.cost))
        facts = {"model": reply.model or provider.name, "finish_reason": reply.finish_reason}
        emit(ModelReplied, text=reply.text, calls=tuple(call.tool for call in reply.calls), usage=usage, **facts)
        for turn in self.lineage:
            turn.log.spend(usage)
        self.log.steps[step] = Step(
            index=step,
            role=request.role,
            duration_ms=round((time.monotonic() - started_at) * 1000),
            text=reply.text,
            usage=usage,
            retries=attempt,
            active_before=request.active,
            active_after=request.active,
            prompt_digest=text_digest(request.instructions),
        )
        return reply

    def _tokens(self, provider: ModelProvider, request: ModelRequest, reply: ModelReply) -> TokenUsage:
        """Return what a call took; estimates, and no cost, where the provider did not count."""
        if not reply.usage.total:
            answer = reply.text + "".join(call.arguments for call in reply.calls)
            prompt = self.count(request.instructions) + self.extra_tokens(request.tools, request.messages)
            return TokenUsage(input=prompt, output=self.count(answer), estimated=True)
        prices = self.parts.settings.prices
        price = prices.get(provider.name) or prices.get(":".join(company_and_model(provider.name)))
        return TokenUsage.of(reply.usage, cost=reply.cost if price is None else price.cost(reply.usage))

    async def _ask_once(self, provider: ModelProvider, request: ModelRequest, emit: Callable[..., None]) -> ModelReply:
        try:
            async with asyncio.timeout(request.timeout_s):
                # The text of a typed answer is JSON, which nobody is shown as an answer while it is written.
                if not self.streaming or (self.output is not None and request.role == self.role):
                    return await provider.reply(request)
                answer: ModelReply | None = None
                unsent = ""  # the end of the text so far, while it may be the beginning of a secret
                async for item in provider.stream(request):
                    end = len(unsent)
                    if isinstance(item, TextDelta):
                        unsent += whole_text(item.text)
                        end = self.bus.redactor.safe_length(unsent)
                    if end:
                        emit(ModelDelta, text=unsent[:end])
                        unsent = unsent[end:]
                    if not isinstance(item, TextDelta):
                        answer = item
                if answer is None:
                    raise ModelFailed(f"{provider.name} broke off its answer", retryable=True, model=provider.name)
                return answer
        except TimeoutError:
            message = f"{provider.name} gave no answer within {request.timeout_s:g} s"
            raise ModelFailed(message, code="model_timeout", retryable=True, model=provider.name) from None

    def _masked(self, error: ModelFailed) -> ModelFailed:
        """Return a failure with its secrets masked: servers repeat in errors what they were sent."""
        message, details = self.bus.redactor.text(error.message), self.bus.redactor.value(error.details)
        retry: dict[str, Any] = {"retryable": error.retryable, "retry_after": error.retry_after}
        return ModelFailed(message, code=error.code, **retry, **details)

    @property
    def window(self) -> int:
        """Tokens the decision model takes; 128,000 when unknown."""
        return self.parts.window(self.role) or UNKNOWN_WINDOW

    @property
    def brief(self) -> bool:
        """Whether the decision model is told rules and tools in few words."""
        return self.parts.brief(self.role)

    def takes_images(self, role: str | None = None) -> bool:
        """Whether the model of a role, by default the one that decides, is shown images: as the settings say, else as its
        provider does.
        """
        setting = self.parts.settings.images
        provider = self.parts.model(role or self.role)
        return getattr(provider, "takes_images", False) is True if setting is None else setting

    @property
    def output_mode(self) -> OutputMode:
        """How the decision model is held to a type: as the settings say, else as its provider does, else by a tool."""
        declared: OutputMode = getattr(self.parts.model(self.role), "output_mode", "tool")
        return self.parts.settings.output_mode or declared

    def count(self, text: str) -> int:
        """Estimate the tokens of *text*."""
        return estimate_tokens(text)

    def extra_tokens(self, specs: Sequence[ToolSpec], messages: Sequence[Message]) -> int:
        """Estimate the tokens that a request takes beside its top-level text: tools, as servers write them, and history."""
        tools = [[spec.name, spec.description, spec.input_schema] for spec in specs]
        words = [message.text + "".join(call.arguments for call in message.calls) for message in messages]
        sent = json.dumps(tools, ensure_ascii=False, default=dict) if tools else ""
        images = sum(len(message.images) for message in messages)
        return self.count(sent) + sum(map(self.count, words)) + IMAGE_TOKENS * images

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """Return the tools offered now: those of skills, then the solver's own, then what gives a typed answer."""
        brief = self.brief
        own_tools = (tool for tool in self.parts.tools.all if not (brief and tool.brief is None))
        return (*self.session.tool_specs(), *(tool.spec(brief=brief) for tool in own_tools), *self.output_tool())

    def output_tool(self) -> tuple[ToolSpec, ...]:
        """Return the tool that gives the answer, where the model is held to a type by one."""
        return (self.output.tool(),) if self.output is not None and self.output_mode == "tool" else ()

    async def active_names(self) -> tuple[str, ...]:
        """Return the names of the active skills, in load order."""
        return tuple(skill.name for skill in await self.session.active())

    async def pins(self) -> frozenset[str]:
        """Return the pins a compactor must keep now."""
        active = await self.session.active()
        return frozenset(f"skill:{skill.receipt.id}@{skill.receipt.digest}" for skill in active)

    def file_names(self) -> frozenset[str]:
        """Return the paths of every file a report may name: the turn's, those handed in, and those of the skills used."""
        paths = set(self.workspace.names())
        for full_id, _ in self.log.skills:
            folder = self.skill_folder(full_id)
            if folder is not None:
                paths |= {entry.path for entry in walk_shown(folder) if entry.kind == "file"}
        return frozenset(paths)

    def skill_folder(self, full_id: str) -> Path | None:
        """Return the folder of a skill of the registry, or None."""
        skill = self.subsystem.registry.get(full_id)
        return None if skill is None else skill.folder

    def rewritten(self, active: ActiveSkill) -> str:
        """Return the text of an active skill with citations in the pool's numbers."""
        skill = self.subsystem.registry.get(active.full_id)
        return active.body if skill is None else self.sources.adopt(skill, active.body, digest=active.receipt.digest)

    def note_active(self, active: list[ActiveSkill]) -> None:
        """Note the active skills and what they brought along as used."""
        for skill in active:
            receipt = skill.receipt
            self.log.used(SkillUse(id=receipt.id, name=skill.name, digest=receipt.digest, how=skill.loaded_by))
            for name in receipt.imports:
                full_id = self.view.names.get(name, name)
                imported = self.subsystem.registry.get(full_id)
                digest = "" if imported is None else imported.digest
                self.log.used(SkillUse(id=full_id, name=name, digest=digest, how="import"))

    async def generate(
        self, role: str, prompt: str, *, skills: list[str] | tuple[str, ...] | None = None, by: By = "code"
    ) -> Generated:
        """Have a generator write a text, with the skills **its** role may see in its system text.

        Args:
            role: The consumer, such as `answer.generator.strong`.
            prompt: What to write.
            skills: Refs of the skills, the turn's `SK` numbers among them; None: the active ones.
            by: Who chose them; a model may not start what only people and code start.

        Raises:
            ModelFailed: The provider failed for good.
        """
        refs = [skill.full_id for skill in await self.session.active()] if skills is None else list(skills)
        skill_ids = [self.view.short_ids.get(ref.removeprefix("sk:"), ref) for ref in refs]
        with activated(self.subsystem, self.role_view(role)) as view:
            # Each skill's sources join the turn's pool in one step: concurrent calls adopt theirs meanwhile, and a
            # pool handed to the block and taken back afterwards would lose them.
            order = view.closure(skill_ids, by=by).order
            await self.sources.resolve(order)
            for closure_skill in order:
                self.sources.adopt(closure_skill, "", digest=closure_skill.digest)
            block = build_skills_instruction_block(
                skill_ids, variant=self.parts.settings.skills_form, pool=self.pool, by=by
            )
        for finding in block.diagnostics:
            self.bus.diagnose(finding)
        skipped = tuple((item.ref, item.code) for item in block.refused)
        for ref, code in skipped:
            message = f"the skill {ref} was left out of the text for {role}"
            self.bus.diagnose(Diagnostic("generator_skipped", "info", message, ref=code))
        for granted in block.granted:
            skill = granted.skill
            self.log.used(SkillUse(id=skill.full_id, name=skill.name, digest=skill.digest, how="generator"))
        instructions = "\n\n".join(part for part in (self.parts.settings.base_text.strip(), str(block)) if part)
        reply = await self.write(role, instructions, prompt)
        usage = TokenUsage.of(reply.usage)
        used = tuple(granted.full_id for granted in block.granted)
        return Generated(reply.text, role, used, skipped, reply.model or self.parts.model(role).name, usage)

    async def write(self, role: str, instructions: str, prompt: str) -> ModelReply:
        """Have the model of a role write a text, as a step of its own. Raises ModelFailed, ReplayError."""
        index = self.log.begin_step()
        active = await self.active_names()
        digest = text_digest(instructions)
        self.bus.emit(
            PromptBuilt,
            step=index,
            role=role,
            digest=digest,
            tokens=self.count(instructions) + self.count(prompt),
            active=active,
            text=instructions if self.log.first_time(digest) else "",
            asked=prompt,
        )
        return await self.ask(index, ModelRequest(role, instructions, (Message("user", prompt),), (), active))
