"""The loop: ask for a decision, run its calls, until there is an answer or a bound is met.

A prompt that grows too long gets a shorter view of the messages that keeps what must not be lost.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.errors import Diagnostic, FileRefused, ModelFailed
from kdskills.models import IMAGE_TOKENS, Message, ModelReply, ModelRequest, ToolCall, ToolSpec
from kdskills.session.config import UNKNOWN_WINDOW
from kdskills.session.receipts import text_digest
from kdskills.skills.model import TokenCounter, estimate_tokens
from kdskills.solver.claims import claimed_files, claimed_successes, missing_files
from kdskills.solver.dispatch import CallAnswer, TurnDispatcher, shorten
from kdskills.solver.events import AnswerChecked, ContextCut, HistoryElided, PromptBuilt
from kdskills.solver.finish import drop_unknown, unknown_sids
from kdskills.solver.history import files_note, fit_history
from kdskills.solver.output import OUTPUT_TOOL, OutputInvalid, again, map_texts, texts_of

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn


REFUSED_IMAGES: Final = "[The image could not be shown: the provider refused it. Look at the file with a program.]"
FITS: Final = 5
"""How often a request that did not fit is made shorter."""
MIN_HALVED: Final = 1_000
"""Characters of a result from which it is halved when a request does not fit and nothing else can be left out."""
KEEP_LAST: Final = 2
"""Assistant messages whose results stay whole, counted from the end."""


def compact(
    messages: Sequence[Message],
    pins: Collection[str],
    budget: int,
    *,
    count: TokenCounter = estimate_tokens,
    earlier: int = 0,
) -> tuple[Message, ...]:
    """Return *messages*, of which the first *earlier* are of earlier turns, within *budget* tokens where that can be had.

    Old results become one line naming tool, size and step, oldest first, until the rest fits; the list itself never changes.
    Messages with a pin in *pins* stay byte-equal, and so do user and assistant messages, so each call keeps its result.
    """
    view = list(messages)
    tokens = sum(_size(message, count) for message in view)
    active_pins = set(pins)
    steps = [position for position, message in enumerate(messages) if message.role == "assistant" and message.calls]
    border = steps[-KEEP_LAST] if len(steps) >= KEEP_LAST else 0
    for position, message in enumerate(messages[:border]):
        if tokens <= budget:
            break
        if message.role != "tool" or (message.pin is not None and active_pins & set(message.pin.split())):
            continue
        step = "in an earlier turn"
        if position >= earlier:
            step = f"at step {bisect(steps, position) - bisect(steps, earlier - 1)}"
        line = f"[result of {message.tool or 'tool'} {step} left out: {len(message.text)} characters]"
        shorter = replace(message, text=line, pin=None, images=())
        saved = _size(message, count) - _size(shorter, count)
        if saved > 0:
            view[position] = shorter
            tokens -= saved
    return tuple(view)


def _size(message: Message, count: TokenCounter) -> int:
    return (
        count(message.text) + sum(count(call.arguments) for call in message.calls) + IMAGE_TOKENS * len(message.images)
    )


def _half(message: Message) -> Message:
    """Return a long result in half its length; texts that are pinned stay whole."""
    if message.role != "tool" or message.pin is not None or len(message.text) < MIN_HALVED:
        return message
    return replace(message, text=shorten(message.text, len(message.text) // 2))


def _imageless(message: Message) -> Message:
    return replace(message, text=f"{message.text}\n{REFUSED_IMAGES}", images=()) if message.images else message


FINAL = "No more tools can be used. Answer now with what you have, and say what is missing."
UNWRITTEN = (
    "These files are not there, though the answer says they were written: {paths}. Write them with the tools now, or "
    "answer again without claiming them."
)
FAILED = (
    "The answer says that these succeeded, but their last call failed: {names}. Make them succeed with the tools now, or answer "
    "again and say that they failed."
)
UNKNOWN = "These citations name no known source: {sids}. Write the answer again; cite only sources you were given."


class Loop:
    """Works on the request of one turn; steps, texts and the outcome go into the turn's log."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._log = turn.log
        self._settings = turn.parts.settings
        self._dispatcher = TurnDispatcher(turn)
        self._decisions = 0
        self._call_ids = {call.id for message in turn.history for call in message.calls}
        self._sent_back = False
        self._cited_again = False
        self._output_retries = self._settings.output_retries
        self._elided = 0

    async def run(self) -> None:
        """Run to the end; the outcome stands in the log. Raises ModelFailed and ReplayError."""
        log, settings = self._log, self._settings
        await fit_history(self._turn, partial(_size, count=self._turn.count))
        log.messages += [*files_note(self._turn), Message("user", self._turn.request)]
        empty = False
        while True:
            spent = self._turn.spent()
            if spent is not None:
                return log.end("budget", spent)
            if self._decisions >= settings.max_steps or log.calls >= settings.max_tool_calls:
                reason = "max_steps" if self._decisions >= settings.max_steps else "max_tool_calls"
                if settings.final_call and not await self._last_answer():
                    return None
                return log.end("partial", reason)
            reply, answers = await self._step()
            if not answers:
                if reply.text.strip():
                    if await self._answer(reply.text):
                        return None
                    continue
                if empty:
                    return log.end("stuck", "empty_reply")
                empty = True
                continue
            empty = False
            stuck = next((answer.stuck for answer in answers if answer.stuck), None)
            if stuck is not None:
                log.text = reply.text
                return log.end("stuck", stuck)

    async def _step(self) -> tuple[ModelReply, list[CallAnswer]]:
        """Ask once, and run what the reply calls."""
        turn, log = self._turn, self._log
        started_at = time.monotonic()
        turn.bus.step = log.begin_step()
        self._decisions += 1
        turn.count_step()
        specs = turn.tool_specs()
        if turn.brief:  # a small model makes a call again as long as it is offered it
            repeated = {answer.tool for answer in self._dispatcher.answered if answer.error == "repeated_call"}
            specs = tuple(tool for tool in specs if tool.tool_id not in repeated)
        self._dispatcher.offered = frozenset(spec.tool_id for spec in specs)
        before = await turn.active_names()
        reply = self._own_answer(await self._decide(specs, before))
        reply = replace(reply, calls=unique_calls(reply.calls, self._call_ids))
        self._dispatcher.answered = []
        try:
            if reply.calls:
                room = self._settings.max_tool_calls - log.calls
                log.call_ids += [call.id for call in reply.calls]
                await self._dispatcher.run(reply.calls, step=turn.bus.step, room=room)
        finally:  # a cancelled step stands in the log, too: each of its calls has an answer
            answers = self._dispatcher.answered
            if reply.text.strip() or reply.calls:
                log.messages.append(Message("assistant", reply.text, calls=reply.calls))
            log.messages += [answer.message() for answer in answers]
            took = round((time.monotonic() - started_at) * 1000)  # of the model and of the tools
            facts: dict[str, object] = {"duration_ms": took, "calls": tuple(answer.record() for answer in answers)}
            log.steps[turn.bus.step] = log.steps[turn.bus.step].model_copy(update=facts)
        after = {"active_after": await turn.active_names()}
        log.steps[turn.bus.step] = log.steps[turn.bus.step].model_copy(update=after)
        return reply, answers

    async def _decide(self, specs: tuple[ToolSpec, ...], active: tuple[str, ...]) -> ModelReply:
        """Ask the decision model; again with less of what was said while it does not fit, without images that are refused."""
        turn = self._turn
        prompt = await turn.session.instructions()
        form, mode = turn.output, turn.output_mode
        rule = "" if form is None else form.rule(mode)
        instructions = f"{prompt.text}\n\n{rule}" if rule else prompt.text
        digest = text_digest(instructions)
        last = next((message.text for message in reversed(self._log.messages) if message.role == "user"), "")
        room = turn.window * 6 // 10
        messages = await self._fitted(room)
        turn.bus.emit(
            PromptBuilt,
            role=turn.role,
            digest=digest,
            tokens=prompt.tokens + turn.count(rule) + turn.extra_tokens(specs, messages),
            available=prompt.listed,
            total=prompt.total,
            active=active,
            text=instructions if self._log.first_time(digest) else "",
            asked="" if last == turn.request else last,
        )
        request = ModelRequest(turn.role, instructions, messages, specs, active, steady=prompt.steady)
        if form is not None and mode == "native":
            request = replace(request, answer_schema=form.schema)
        for _ in range(FITS):
            try:
                return await turn.ask(turn.bus.step, request)
            except ModelFailed as error:
                shorter = request.messages
                if error.code == "context_full":
                    half = sum(turn.count(message.text) for message in shorter) // 2
                    await fit_history(turn, partial(_size, count=turn.count), half)
                    shorter = await self._fitted(half)
                    if shorter == request.messages:
                        shorter = self._halved(shorter)
                elif error.details.get("status") == HTTPStatus.BAD_REQUEST:
                    shorter = tuple(map(_imageless, shorter))
                    self._log.messages[:] = map(_imageless, self._log.messages)
                if shorter == request.messages:
                    raise
                request = replace(request, messages=shorter)
        return await turn.ask(turn.bus.step, request)

    async def _fitted(self, budget: int) -> tuple[Message, ...]:
        pins, messages = await self._turn.pins(), (*self._turn.history, *self._log.messages)
        view = compact(messages, pins, budget, count=self._turn.count, earlier=len(self._turn.history))
        elided = sum(shown_message != message for shown_message, message in zip(view, messages, strict=True))
        if elided:
            self._turn.bus.emit(HistoryElided, messages=elided)
        if elided > self._elided:
            self._note_cut(messages, view)
            # what was read before may no longer stand in the history: it may be read again
            self._dispatcher.guard.history_cut()
        self._elided = elided
        return view

    def _own_answer(self, reply: ModelReply) -> ModelReply:
        """Return *reply* with the arguments of a call that gives the answer as its text.

        Beside other calls it is not taken: the answer was written before their results were read.
        """
        if not self._turn.output_tool():
            return reply
        others = tuple(call for call in reply.calls if call.tool != OUTPUT_TOOL)
        if others or not reply.calls:
            return replace(reply, calls=others)
        return replace(reply, text=reply.calls[0].arguments or "{}", calls=())

    async def _last_answer(self) -> bool:
        """Ask once without tools, for a typed answer as often as it may be sent back; False when that has ended the turn."""
        turn, log = self._turn, self._log
        rule = "" if turn.output is None else turn.output.rule(turn.output_mode)
        log.messages.append(Message("user", f"{FINAL} {rule}".strip()))
        text = await self._plain()
        if turn.output is None:
            log.text = text
            return True
        while not self._typed(text):
            if log.status == "failed":
                return False
            text = await self._plain()
        return True

    def _typed(self, text: str) -> bool:
        """Take the object in *text* as the answer; False when the model must correct it, or the turn has ended so."""
        turn, log = self._turn, self._log
        redactor, drop = turn.bus.redactor, self._settings.on_unknown_sid == "drop"

        def cleaned(found: Any) -> Any:
            masked = redactor.value(found, keys=False)
            return map_texts(masked, lambda words: drop_unknown(words, turn.pool)) if drop else masked

        assert turn.output is not None
        try:
            log.typed = turn.output.read(text, cleaned)
        except OutputInvalid as error:
            message = f"the answer was not of the type asked for: {error.message}"
            turn.bus.diagnose(Diagnostic(error.code, "warning", message))
            self._output_retries -= 1
            if self._output_retries < 0:
                log.end("failed", error.code)
            else:
                log.messages.append(Message("user", again(turn.output_mode, error)))
            return False
        log.text = log.typed.text
        return True

    def _halved(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return *messages* with long results in half their length, for good, and tell of it."""
        view = tuple(map(_half, messages))
        halved = sum(new != message for new, message in zip(view, messages, strict=True))
        if halved:
            self._log.messages[:] = map(_half, self._log.messages)
            self._turn.bus.emit(HistoryElided, messages=halved)
            self._note_cut(messages, view)
        return view

    def _note_cut(self, messages: Sequence[Message], view: Sequence[Message]) -> None:
        before, after = (sum(_size(each, self._turn.count) for each in group) for group in (messages, view))
        cut = ContextCut(kind="results", turns=(self._turn.id,), tokens_before=before, tokens_after=after)
        self._log.context.append(cut)

    async def _plain(self) -> str:
        """Ask for text, without tools but that for a typed answer; the step is logged."""
        turn, log = self._turn, self._log
        turn.bus.step = log.begin_step()
        reply = self._own_answer(await self._decide(turn.output_tool(), await turn.active_names()))
        if reply.text.strip():
            log.messages.append(Message("assistant", reply.text))
        return reply.text

    async def _answer(self, text: str) -> bool:
        """Take *text* as the answer, or have the answer's generator write it; False when the model must correct it."""
        log = self._log
        if self._turn.output is None:
            await self._written(text)
        elif not self._typed(text):
            return log.status == "failed"
        elif self._settings.on_unknown_sid == "retry" and not self._cited_again:
            unknown = unknown_sids(log.text, self._turn.pool)
            if unknown:
                self._cited_again = True
                return self._send_back(UNKNOWN.format(sids=", ".join(map(str, unknown))))
        missing, failed = await self._disproved() if self._settings.check_answers else ((), ())
        if (missing or failed) and not self._sent_back:
            self._sent_back = True
            corrections = [UNWRITTEN.format(paths=", ".join(missing))] if missing else []
            corrections += [FAILED.format(names=", ".join(failed))] if failed else []
            return self._send_back("\n".join(corrections))
        reason = "files_missing" if missing else "tool_failed"
        log.end(*(("unverified", reason) if missing or failed else ("final", "answer")))
        return True

    def _send_back(self, correction: str) -> Literal[False]:
        """Have the model correct its answer; a typed one counts for nothing until it has."""
        self._log.messages.append(Message("user", correction))
        if self._log.typed is not None:
            self._log.typed, self._log.text = None, ""
        return False

    async def _written(self, text: str) -> None:
        """Take *text*, or what the answer's generator makes of it, as the answer; unknown citations are asked about once."""
        turn, settings = self._turn, self._settings
        self._log.text = text
        if settings.answer_role is not None:
            generated = await turn.generate(settings.answer_role, self._brief(text))
            self._log.text = generated.text
        unknown = unknown_sids(self._log.text, turn.pool)
        if unknown and settings.on_unknown_sid == "retry":
            correction = UNKNOWN.format(sids=", ".join(map(str, unknown)))
            if settings.answer_role is None:
                self._log.messages.append(Message("user", correction))
                answer = await self._plain()
            else:
                prompt = f"{self._brief(self._log.text)}\n\n{correction}"
                answer = (await turn.generate(settings.answer_role, prompt)).text
            self._log.text = answer if answer.strip() else self._log.text

    async def _disproved(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the files the answer reports as written that are not there, and the successes it reports that failed."""
        log = self._log
        text = log.text if log.typed is None else "\n".join(texts_of(log.typed.json))
        claimed = claimed_files(text)
        failed = claimed_successes(text, (call for _, step in sorted(log.steps.items()) for call in step.calls))
        missing: tuple[str, ...] = ()
        if claimed:
            try:
                missing = missing_files(text, await asyncio.to_thread(self._turn.file_names))
            except FileRefused:  # the end of the turn reports a folder that cannot be listed
                claimed = ()
        if claimed or failed:
            sent_back = bool(missing or failed) and not self._sent_back
            checked = {"claimed": claimed, "missing": missing, "failed": failed, "sent_back": sent_back}
            self._turn.bus.emit(AnswerChecked, **checked)
        return missing, failed

    def _brief(self, draft: str) -> str:
        """Return the prompt of the answer's generator: the request, the results of tools, the draft, the sources."""
        window = self._turn.parts.window(self._settings.answer_role or self._turn.role) or UNKNOWN_WINDOW
        budget = window * 3  # characters: three quarters of the window at four to a token
        view = compact(self._log.messages, (), window // 2, count=self._turn.count)
        findings = "\n\n".join(f"[{m.tool}]\n{m.text}" for m in view if m.role == "tool")[-budget:]
        rows = self._turn.pool.rows
        sources = "\n".join(f"[[S:{sid}]] {row.title}" for sid, row in rows.items())
        parts = [f"[REQUEST]\n{self._turn.request}", f"[FINDINGS]\n{findings}" if findings else "", f"[DRAFT]\n{draft}"]
        parts.append(f"[SOURCES]\nCite as [[S:n]].\n{sources}" if sources else "")
        parts.append("Write the answer to the request.")
        return "\n\n".join(part for part in parts if part)


def unique_calls(calls: Sequence[ToolCall], used_ids: set[str]) -> tuple[ToolCall, ...]:
    """Return *calls* with unique ids, and add those to *used_ids*: some servers leave ids out or use them twice."""
    renamed_calls = []
    numbers: dict[str, int] = {}  # where to go on counting: ten thousand calls may share one id
    for call in calls:
        call_id, number = call.id, numbers.get(call.id, 1)
        while not call_id or call_id in used_ids:
            number += 1
            call_id = f"{call.id or 'call'}_{number}"
        used_ids.add(call_id)
        numbers[call.id] = number
        renamed_calls.append(replace(call, id=call_id))
    return tuple(renamed_calls)
