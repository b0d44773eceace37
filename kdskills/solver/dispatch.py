"""Runs the tool calls of one reply: checks, barriers, time limits, one answer each, cut to the room there is.

Which calls run together, and when a turn repeats itself and must be ended, are rules without I/O.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from kdskills.errors import Diagnostic, KdskillsError, ModelMustAct, PluginFailed, ReplayError, ToolCallRefused
from kdskills.models import Message, ModelImage, ToolCall, parse_object
from kdskills.session.advice import RefusedCall, advised
from kdskills.session.approval import UNDECIDED, arguments_digest, denial_of
from kdskills.session.codes import pathless
from kdskills.session.config import Budget
from kdskills.session.tools import INPUTS, check_call, dotted, parse, safe_name, schema
from kdskills.solver.allowed import check_restrictions
from kdskills.solver.events import CallRecord, SkillRefused, ToolCalled, ToolFinished
from kdskills.solver.finish import plugin_diagnostic
from kdskills.solver.output import map_texts
from kdskills.solver.spans import Span, tool_span
from kdskills.solver.tools import SolverTool, TookTooLong, ToolAnswer, ToolContext, ToolError, whole_text, within

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn


T = TypeVar("T")

RUNS = 2
"""How often an identical call runs without a change of state."""
STUCK = 5
"""The identical call that ends the turn."""
ROUND = 4
"""Most calls of a round whose repetition is recognised."""
READS = frozenset({"skills.read", "react.read", "files.read", "files.grep", "files.glob"})
"""Tools that only look: the same answer again is a repetition, whatever was called in between."""
INVALID = 3
"""Invalid calls in a row, of one tool, that end the turn."""
MAX_NAME = 200
"""Characters of a tool's name that is none, as an answer repeats it."""


def plan(calls: Sequence[T], barriers: Sequence[bool]) -> list[list[T]]:
    """Return groups of calls to run one after the other; the calls of a group run together.

    A barrier is a group of its own, so that calls before it are done and calls after it wait.
    """
    groups: list[list[T]] = []
    open_group = False
    for call, barrier in zip(calls, barriers, strict=True):
        if barrier or not open_group:
            groups.append([])
        groups[-1].append(call)
        open_group = not barrier
    return groups


def canonical(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a key that is equal for calls that mean the same."""
    text = json.dumps([tool, arguments], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_DURATION = re.compile(r'"duration_ms": ?\d+')

Verdict = Literal["run", "repeated", "stuck"]


def _verdict(count: int) -> Verdict:
    """Return what to do with a call that came *count* times before."""
    return "stuck" if count + 1 >= STUCK else "run" if count < RUNS else "repeated"


@dataclass
class _PastCall:
    key: str
    step: int
    answer: str | None = None


@dataclass
class CallGuard:
    """Counts identical calls, invalid calls, reads with unchanged answers, and repeated rounds of calls of a turn."""

    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _invalid: dict[str, int] = field(default_factory=dict)
    _reads: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    _history: list[_PastCall] = field(default_factory=list)

    def state_changed(self) -> None:
        """Forget identical calls: they may answer differently now. Rounds and reads are judged by their answers."""
        self._counts.clear()

    def history_cut(self) -> None:
        """Forget what was read: the answers may no longer stand in the history."""
        self._reads.clear()

    def admit(self, key: str, step: int) -> tuple[Verdict, int]:
        """Count a call; return what to do with it and the step of its first answer."""
        rounds, before = self._rounds(key)
        called = _PastCall(key, step)
        self._history.append(called)
        if before is not None and rounds >= RUNS:
            called.answer = before.answer  # it is not run: its answer would be the same
            return _verdict(rounds), before.step
        count, first = self._counts.get(key, (0, step))
        self._counts[key] = (count + 1, first)
        return _verdict(count), first

    def answered(self, key: str, text: str, *, reads: bool) -> tuple[Verdict, int]:
        """Note the answer of a call that was run; return what to do with it and the step of the first such answer."""
        # how long a run took does not make it another answer
        answer = hashlib.sha256(_DURATION.sub("", text).encode("utf-8", "surrogatepass")).hexdigest()
        called = next((earlier for earlier in reversed(self._history) if earlier.key == key), None)
        step = 0 if called is None else called.step
        if called is not None:
            called.answer = answer
        if not reads:
            return "run", step
        last_answer, count, first = self._reads.get(key, (answer, 0, step))
        if last_answer != answer:
            count, first = 0, step
        self._reads[key] = (answer, count + 1, first)
        return _verdict(count), first

    def _rounds(self, key: str) -> tuple[int, _PastCall | None]:
        """Return how often the last calls repeated one round with the same answers, and its first call, or (0, None).

        A round is 2 to `ROUND` calls of which *key*, the call to come, would be the first again.
        """
        history = self._history
        for length in range(2, ROUND + 1):
            if (
                len(history) < 2 * length
                or history[-length].key != key
                or len({call.key for call in history[-length:]}) < 2
            ):
                continue
            last = [(call.key, call.answer) for call in history[-length:]]
            rounds, end = 1, len(history) - length
            while end >= length and [(call.key, call.answer) for call in history[end - length : end]] == last:
                rounds, end = rounds + 1, end - length
            if rounds >= RUNS:
                return rounds, history[-length]
        return 0, None

    def valid(self, tool: str) -> None:
        """Note a call with arguments in shape."""
        self._invalid.pop(tool, None)

    def invalid(self, tool: str) -> bool:
        """Note an invalid call; True when it is the one that ends the turn."""
        self._invalid[tool] = self._invalid.get(tool, 0) + 1
        return self._invalid[tool] >= INVALID


MIN_CUT_CHARS = 80
"""Characters of a cut text that are kept at least."""


def shorten(text: str, room: int) -> str:
    """Return *text* in about *room* characters.

    A JSON object stays one: its longest texts are cut, all to the same length, and the rest is left alone. Any other
    text is cut in the middle.
    """
    if len(text) <= room:
        return text
    value = parse_object(text)
    if value is None:
        return cut_middle(text, room)
    lengths: list[int] = []

    def measured(leaf: str) -> str:
        lengths.append(len(json.dumps(leaf, ensure_ascii=False)))
        return leaf

    map_texts(value, measured)
    most = fair_share(sorted(lengths), room - len(text) + sum(lengths))
    if most < MIN_CUT_CHARS:
        return cut_middle(text, room)
    return json.dumps(map_texts(value, lambda leaf: cut_middle(leaf, most)), ensure_ascii=False)


def cut_middle(text: str, room: int) -> str:
    """Return *text* with its middle left out when it is longer than *room*: one third of the head stays, two of the tail."""
    if len(text) <= room:
        return text
    head, tail = text[: room // 3], text[len(text) - room * 2 // 3 :]
    return f"{head}\n[… {len(text) - len(head) - len(tail)} characters left out …]\n{tail}"


def fair_share(lengths: list[int], room: int) -> int:
    """Return the length to which the longest must come down for all together to fit *room*."""
    room_left = room
    for index, length in enumerate(lengths):
        share = room_left // (len(lengths) - index)
        if length > share:
            return share
        room_left -= length
    return lengths[-1] if lengths else 0


SLOW_TOOLS_S = 630.0
"""Longest a script call may take: its own limit of 600 s and what ending it takes."""
TOOL_GRACE_S = 2.0
"""How long a tool that is ended is waited for."""
ENGINE_GRACE_S = 30.0
"""How long a call that may have a sandbox to end is waited for."""


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What the model is answered to a call, and what the turn keeps of it."""

    call: ToolCall
    tool: str
    ok: bool
    text: str
    error: str | None = None
    duration_ms: int = 0
    artifacts: tuple[str, ...] = ()
    pin: str | None = None
    changed: bool = False
    stuck: str | None = None
    images: tuple[ModelImage, ...] = ()
    later: Callable[[], Awaitable[ToolAnswer]] | None = None

    def message(self) -> Message:
        """Return the result message the model reads."""
        call = self.call
        return Message("tool", self.text, (), call.id, call.tool, self.ok, self.pin, self.images)

    def record(self) -> CallRecord:
        """Return what the result keeps of the call."""
        facts = {"id": self.call.id, "arguments": self.call.arguments, "result": self.text if self.ok else None}
        names = ("tool", "ok", "error", "duration_ms", "artifacts")
        return CallRecord.model_validate(facts | {name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that passed the checks that need no running."""

    call: ToolCall
    tool_id: str
    raw: dict[str, Any]
    tool: SolverTool | None
    arguments: BaseModel

    @property
    def barrier(self) -> bool:
        """Whether it runs alone."""
        if self.tool is None:
            return self.tool_id in {"skills.load", "skills.unload"}
        return self.tool.barrier(self.arguments)


class TurnDispatcher:
    """Dispatches the calls of a turn; keeps count of repeated and invalid ones."""

    def __init__(self, turn: Turn, offered: Sequence[str] = ()) -> None:
        self._turn = turn
        self.guard = CallGuard()
        self._diverged: ReplayError | None = None
        self.offered = frozenset(offered)
        self.answered: list[CallAnswer] = []

    async def run(self, calls: Sequence[ToolCall], *, step: int, room: int) -> list[CallAnswer]:
        """Return one answer per call, in call order; beyond *room* calls they are answered `budget_exceeded`.

        When cancelled, or for a ReplayError, `answered` holds an answer for every call before it is raised.
        """
        answers: dict[str, CallAnswer] = {}
        checked_calls: list[CheckedCall] = []
        for index, call in enumerate(calls):
            outcome = self._check(call, in_budget=index < room)
            if isinstance(outcome, CheckedCall):
                checked_calls.append(outcome)
            else:
                answers[call.id] = self._not_run(outcome)
        try:
            for group in plan(checked_calls, [checked.barrier for checked in checked_calls]):
                running = [checked for checked in group if self._admitted(checked, step, answers)]
                await self._group(running, answers)
                if any(answers[checked.call.id].changed for checked in group):
                    self.guard.state_changed()
        except BaseException:  # raised again: every call of the reply has an answer
            for call in calls:
                if call.id not in answers:
                    answers[call.id] = self._refused(call, self._name(call), "cancelled", "the turn was cancelled")
                    self._emit_finished(answers[call.id])
            self.answered = [answers[call.id] for call in calls]
            raise
        self.answered = [answers[call.id] for call in calls]
        if self._diverged is not None:
            raise self._diverged
        return self.answered

    async def _group(self, group: list[CheckedCall], answers: dict[str, CallAnswer]) -> None:
        gate = asyncio.Semaphore(self._turn.parts.settings.max_parallel)
        waiting: dict[str, CallAnswer] = {}

        def answered(ready: CheckedCall, answer: CallAnswer) -> None:
            answers[ready.call.id] = self._new(ready, answer)
            self._emit_finished(answers[ready.call.id])

        async def execute(ready: CheckedCall) -> None:
            async with gate:
                answer = await self._execute(ready)
                if answer.later is None:
                    answered(ready, answer)
                else:
                    waiting[ready.call.id] = answer

        async with asyncio.TaskGroup() as tasks:
            for ready in group:
                tasks.create_task(execute(ready))
        for ready in group:
            answer = waiting.get(ready.call.id)
            if answer is not None and answer.later is not None:
                final = self._worded(ready, await answer.later())
                answered(ready, replace(final, duration_ms=answer.duration_ms))

    # ---- before running ----

    def _not_run(self, answer: CallAnswer) -> CallAnswer:
        """Emit the answer to a call that is not run, and return it."""
        with tool_span(
            answer.tool if answer.tool in self.offered else "unknown", answer.call.id, self._turn.user_id
        ) as span:
            span.failed(answer.error or "")
        self._emit_finished(answer)
        return answer

    def _admitted(self, ready: CheckedCall, step: int, answers: dict[str, CallAnswer]) -> bool:
        """Whether a call goes ahead; one that only repeats another without a change of state is answered."""
        verdict, first = self.guard.admit(canonical(ready.tool_id, ready.raw), step)
        if verdict == "run":
            return True
        words = f"this very call was made before and nothing has changed; its answer stands in step {first}"
        answers[ready.call.id] = self._not_run(self._repeated(ready, verdict, words, first))
        return False

    def _new(self, ready: CheckedCall, answer: CallAnswer) -> CallAnswer:
        """Return *answer*, or a refusal when a read gave the same text as an earlier step."""
        reads = ready.tool_id in READS and answer.ok and not answer.changed
        verdict, first = self.guard.answered(canonical(ready.tool_id, ready.raw), answer.text, reads=reads)
        if verdict == "run":
            return answer
        words = f"this was read before and has not changed; its text stands in step {first}"
        return self._repeated(ready, verdict, words, first)

    def _repeated(self, ready: CheckedCall, verdict: Verdict, words: str, step: int) -> CallAnswer:
        refusal = self._refused(ready.call, ready.tool_id, "repeated_call", words, step=step)
        return replace(refusal, stuck="repeated_call" if verdict == "stuck" else None)

    def _check(self, call: ToolCall, *, in_budget: bool) -> CheckedCall | CallAnswer:
        """Return the checked call, or the refusal that answers it."""
        redactor = self._turn.bus.redactor
        name = self._name(call)
        self._turn.bus.emit(ToolCalled, call_id=call.id, tool=name, arguments=redactor.arguments(call.arguments))
        if not in_budget:
            words = "no more tool calls are allowed in this turn; answer now"
            return self._refused(call, name, "budget_exceeded", words)
        tool = self._turn.parts.tools.get(call.tool)
        if name not in self.offered:
            words = f"there is no tool {call.tool[:MAX_NAME]!r}; there are: {', '.join(sorted(self.offered))}"
            refusal = self._refused(call, name, "tool_not_found", words)
        else:
            text = call.arguments or "{}"
            raw, problems = parse_object(text), [{"path": "", "problem": "is no JSON object"}]
            error = ToolCallRefused("the arguments are no JSON object", code="invalid_argument", errors=problems)
            if raw is not None:
                try:
                    arguments = parse(INPUTS[name], text) if tool is None else tool.parse(text)
                except ToolCallRefused as mistake:
                    error = mistake
                else:
                    self.guard.valid(name)
                    return CheckedCall(call, name, raw, tool, arguments)
            form = schema(name) if tool is None else dict(tool.spec().input_schema)
            refusal = self._failed(call, name, error, **({} if self._turn.brief else {"schema": form}))
        return replace(refusal, stuck="invalid_argument") if self.guard.invalid(name) else refusal

    def _name(self, call: ToolCall) -> str:
        tool = self._turn.parts.tools.get(call.tool)
        return tool.id if tool is not None else dotted(call.tool) or call.tool

    # ---- running ----

    async def _execute(self, ready: CheckedCall) -> CallAnswer:
        started_at = time.monotonic()
        with tool_span(ready.tool_id, ready.call.id, self._turn.user_id) as span:
            try:
                self._ask(ready)
                await check_restrictions(self._turn, ready.tool_id, ready.raw)
                if ready.tool is None:
                    answer = await within(self._skill_tool(ready, span), SLOW_TOOLS_S, ENGINE_GRACE_S)
                else:
                    limit, grace = self._turn.parts.settings.tool_timeout_s, TOOL_GRACE_S
                    if ready.tool.timeout_s:
                        limit, grace = ready.tool.timeout_s, ENGINE_GRACE_S
                    answer = await within(self._own_tool(ready, ready.tool), limit, grace)
            except TookTooLong:
                words = "the tool took too long and was ended"
                answer = self._refused(ready.call, ready.tool_id, "tool_timeout", words)
            except KdskillsError as error:
                if isinstance(error, PluginFailed):
                    self._turn.bus.diagnose(plugin_diagnostic(error, ready.tool_id))
                if isinstance(error, ReplayError):  # ends the turn in `run`: the model cannot mend a recording
                    self._diverged = self._diverged or error
                answer = self._failed(ready.call, ready.tool_id, error)
            except BaseException as error:
                # A tool may raise anything, also a CancelledError though nobody cancelled this task.
                task = asyncio.current_task()
                cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
                if cancelled or isinstance(error, KeyboardInterrupt):
                    raise
                words = f"the tool failed: {type(error).__name__}"
                answer = self._refused(ready.call, ready.tool_id, "tool_failed", words)
            if answer.error:
                span.failed(answer.error)
        return replace(answer, duration_ms=round((time.monotonic() - started_at) * 1000))

    def _ask(self, ready: CheckedCall) -> None:
        """Ask the policy plugins. Raises ToolError with the Denial's public text."""
        turn = self._turn
        digest = arguments_digest(ready.raw)
        request = turn.access("tool", tool=ready.tool_id, arguments_digest=digest)
        try:
            denial = denial_of(turn.parts.deny, request)
        except PluginFailed as error:
            turn.bus.diagnose(plugin_diagnostic(error, ready.tool_id))
            turn.bus.emit(SkillRefused, ref=ready.tool_id, code=error.code, reason=error.message)
            raise ToolError(UNDECIDED, code="tool_failed", who="operator") from error
        if denial is not None:
            turn.bus.emit(SkillRefused, ref=ready.tool_id, code="tool_denied", reason=denial.reason)
            raise ToolError(denial.public, code="tool_denied", who="operator")

    async def _own_tool(self, ready: CheckedCall, tool: SolverTool) -> CallAnswer:
        try:
            returned = await tool.body(ready.arguments, ToolContext(self._turn, ready.call.id))
        except SystemExit as error:  # would end the loop: a tool may not end the process
            raise ToolExited from error
        return self._worded(ready, returned if isinstance(returned, ToolAnswer) else ToolAnswer(returned))

    def _worded(self, ready: CheckedCall, answer: ToolAnswer) -> CallAnswer:
        if answer.later is not None:
            return CallAnswer(ready.call, ready.tool_id, True, "", later=answer.later)
        if isinstance(answer.value, str):
            return self._answer(ready, answer, "nothing_read")
        # models and dataclasses by their fields, what has no JSON form by `str`
        text = json.dumps(to_jsonable_python(answer.value, fallback=str), ensure_ascii=False)
        return self._answer(ready, replace(answer, value=text), "nothing_read")

    async def _skill_tool(self, ready: CheckedCall, span: Span) -> CallAnswer:
        reply = await self._turn.session.call(ready.call.tool, ready.raw)  # as spelt: so is a corrected call
        if not reply.ok:
            return self._answer(
                ready, ToolAnswer(reply.text, ok=False), str(reply.error.get("code", "invalid_argument"))
            )
        active = await self._turn.session.active()
        self._turn.note_active(active)
        span.skill_result(reply.result, () if ready.tool_id == "skills.unload" else active)
        artifacts = tuple(str(item["path"]) for item in reply.result.get("artifacts", ()))
        changed = reply.result.get("changed") if ready.tool_id == "skills.load" else ready.barrier or artifacts
        return self._answer(ready, ToolAnswer(reply.text, artifacts, bool(changed), reply.pin))

    def _answer(self, ready: CheckedCall, answer: ToolAnswer, error: str | None = None) -> CallAnswer:
        """Return what a tool answered in text, whole where it is pinned; *error* counts only when it is not ok."""
        text = whole_text(answer.value) if answer.pin else self._bounded(answer.value, ready.tool_id)
        code = None if answer.ok else error
        call_answer = CallAnswer(
            ready.call, ready.tool_id, answer.ok, text, code, 0, answer.artifacts, answer.pin, answer.changed
        )
        return replace(call_answer, images=answer.images)

    def _bounded(self, text: str, tool: str) -> str:
        """Cut a result to its share of the model's window, and say so."""
        text = whole_text(text)
        budget = Budget.of(self._turn.window).result
        if self._turn.count(text) <= budget:
            return text
        shorter = shorten(text, max(200, budget * 3))
        if len(shorter) < len(text):
            message = f"a result of {tool} had {len(text)} characters; {len(shorter)} were kept"
            self._turn.bus.diagnose(Diagnostic("result_cut", "info", message, ref=tool))
        return shorter

    # ---- answers ----

    def _failed(self, call: ToolCall, name: str, error: KdskillsError, **details: Any) -> CallAnswer:
        wire = error.to_json()["error"]
        if not isinstance(error, ModelMustAct):  # not written for the model: it may name paths of this host
            words = UNDECIDED if isinstance(error, PluginFailed) else pathless(wire["message"])
            wire = {**wire, "message": words, "details": {}}
        wire["details"] = {**wire["details"], **details}
        if self._turn.brief:
            wire["details"].pop("schema", None)
        text = json.dumps({"error": advised(wire, self._refused_call(call, name))}, ensure_ascii=False, default=str)
        return CallAnswer(call, name, False, self._bounded(text, name), error.code)

    def _refused_call(self, call: ToolCall, name: str) -> RefusedCall:
        """Return a refused call as a correction needs it."""
        table, raw = self._turn.parts.tools, parse_object(call.arguments or "{}")
        tools = {safe_name(tool_id) for tool_id in self.offered}

        def check(spelling: str, mended: Mapping[str, Any]) -> None:
            tool = table.get(spelling)
            if tool is None:
                check_call(view, spelling, mended)
            else:
                tool.parse(json.dumps(mended))

        tool, view = table.get(call.tool), self._turn.view
        form = schema(name) if name in INPUTS else {} if tool is None else tool.spec().input_schema
        return RefusedCall(call.tool, call.arguments if raw is None else raw, form, check, tools, view.names)

    def _refused(self, call: ToolCall, name: str, code: str, message: str, **details: Any) -> CallAnswer:
        return self._failed(call, name, ToolError(message, code=code, **details))

    def _emit_finished(self, answer: CallAnswer) -> None:
        facts = {name: getattr(answer, name) for name in ("tool", "ok", "error", "text", "duration_ms", "artifacts")}
        self._turn.bus.emit(ToolFinished, call_id=answer.call.id, **facts)


class ToolExited(Exception):
    """A tool tried to end the process."""
