"""The loop: ask for a decision, run its calls, until there is an answer or a bound is met.

Files an answer says were written are read from its text and compared with the files there are. Only sentences that report
a deed in the past count ("I saved the table as out.csv"); plans, advice, questions and code do not. What is not recognised
is not checked: this finds the usual false report, it does not prove an answer.

A prompt that grows too long gets a shorter view of the messages that keeps what must not be lost.
"""

from __future__ import annotations

import asyncio
import mimetypes
import re
import time
from bisect import bisect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from kdskills.bundle.descriptor import DECISION
from kdskills.errors import FileRefused, ModelFailed
from kdskills.models import IMAGE_TOKENS, Message, ModelReply, ModelRequest, ToolCall, ToolSpec
from kdskills.skills.model import TokenCounter, estimate_tokens
from kdskills.solver.dispatch import CallAnswer, TurnDispatcher
from kdskills.solver.events import AnswerChecked, ContextCut, HistoryElided, PromptBuilt
from kdskills.solver.finish import unknown_sids
from kdskills.solver.history import files_note, fit_history

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn


REFUSED_IMAGES: Final = "[The image could not be shown: the provider refused it. Look at the file with a program.]"
FITS: Final = 3
"""How often a request that did not fit is made shorter."""
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


def _imageless(message: Message) -> Message:
    return replace(message, text=f"{message.text}\n{REFUSED_IMAGES}", images=()) if message.images else message


_DEEDS = (
    "wrote|written|saved|created|generated|produced|exported|stored|rendered|made|built|drew|drawn|plotted|compiled|"
    "recorded|placed|put|prepared|added|converted|updated|downloaded"
)
_FILE = r"(?<![\w/@:.-])(?:\.?/)?(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.[A-Za-z][A-Za-z0-9]{0,7}\b(?![/@(])"
_QUOTE = r"[`\"'*(\[<]*"

_REPORTS: Final = (
    # "I have written ...", "Saved ..." at the beginning, "... has been created ..."
    re.compile(rf"(?:\b(?:I|we)(?:'ve| have)?(?: \w+){{0,2}} |^\W*(?:\w+ly )?|\b(?:has|have) been (?:\w+ly )?)(?:{_DEEDS})\b", re.IGNORECASE),
    # "written to x", "saved as x", "available in x"
    re.compile(rf"\b(?:{_DEEDS}|available)(?: \w+)? (?:to|as|in|into|at|under) (?:the file |file )?{_QUOTE}{_FILE}", re.IGNORECASE),
    # "x was created"
    re.compile(rf"{_FILE}[`\"'*)\]>]* (?:has been|have been|was|were|is|are)(?: now| \w+ly)* (?:{_DEEDS})\b", re.IGNORECASE),
)  # fmt: skip
_NO_REPORT: Final = re.compile(
    r"\b(?:not|cannot|never|unable|failed|will|would|should|could|must|might|if|unless|please|you can|you could|let me)\b"
    r"|n't\b|\?\s*$",
    re.IGNORECASE,
)
_SOURCE: Final = re.compile(r"\b(?:from|using|with|on|of|per|via|reading|read|by|like|than|following)\s+(?:the |a )?(?:file )?[`\"'*(\[<]*$", re.IGNORECASE)  # fmt: skip
_BEFORE: Final = 100
"""Characters before a path that tell whether it is a source: with all of them, many paths in one sentence take for ever."""
_PATH: Final = re.compile(_FILE)
_CODE: Final = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_LIBRARY: Final = re.compile(r"[A-Z]\w*\.js")
_NO_FILES: Final = frozenset({"com", "org", "net", "io"})
_FURTHER: Final = frozenset({"md", "yaml", "yml", "toml", "parquet", "ipynb", "log", "ini", "cfg", "sql", "db", "sqlite", "dat"})  # fmt: skip


def claimed_files(text: str) -> tuple[str, ...]:
    """Return the paths that *text* reports as written, each once, in the order they are named."""
    paths: list[str] = []
    listing = False
    for line in _CODE.sub("", text).splitlines():
        bullet = re.match(r"\s*(?:[-*•]|\d+[.)])\s+", line)
        if listing and bullet:
            first = next(_files(line), None)
            paths += [first] if first else []
            continue
        listing = listing and not line.strip()
        for sentence in re.split(r"(?<=[.!?])\s+", line):
            if not _NO_REPORT.search(sentence) and any(pattern.search(sentence) for pattern in _REPORTS):
                paths += _files(sentence)
                listing = listing or sentence.rstrip(" *_").endswith(":")
    return tuple(dict.fromkeys(paths))


def missing_files(text: str, present: Collection[str]) -> tuple[str, ...]:
    """Return the claimed files that are not among *present*; a name alone stands for a file of any folder."""
    names = {path.rpartition("/")[2] for path in present}
    return tuple(
        path
        for path in claimed_files(text)
        if not any(file == path or file.endswith(f"/{path}") or path.endswith(f"/{file}") for file in present)
        and not ("/" not in path and path in names)
    )


def _files(sentence: str) -> Iterator[str]:
    """Give the paths in a sentence, without those it names as a source, as in "made from data.csv"."""
    for match in _PATH.finditer(sentence):
        path = match.group().removeprefix("./")
        suffix = path.rpartition(".")[2].lower()
        if (
            suffix in _NO_FILES
            or _LIBRARY.fullmatch(path)
            or _SOURCE.search(sentence[max(0, match.start() - _BEFORE) : match.start()])
        ):
            continue
        if suffix in _FURTHER or mimetypes.guess_type(path, strict=False)[0] is not None:
            yield path


FINAL = "No more tools can be used. Answer now with what you have, and say what is missing."
UNWRITTEN = (
    "These files are not there, though the answer says they were written: {paths}. Write them with the tools now, or "
    "answer again without claiming them."
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
        self._elided = 0

    async def run(self) -> None:
        """Run to the end; the outcome stands in the log. Raises ModelFailed and ReplayError."""
        log, settings = self._log, self._settings
        await fit_history(self._turn, partial(_size, count=self._turn.count))
        log.messages += [*files_note(self._turn), Message("user", self._turn.request)]
        empty = False
        while True:
            if log.usage.total >= settings.max_total_tokens:
                return log.end("budget", "max_total_tokens")
            if self._decisions >= settings.max_steps or log.calls >= settings.max_tool_calls:
                reason = "max_steps" if self._decisions >= settings.max_steps else "max_tool_calls"
                if settings.final_call:  # one call without tools
                    log.messages.append(Message("user", FINAL))
                    log.text = await self._plain()
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
        specs = turn.tool_specs()
        self._dispatcher.offered = frozenset(spec.tool_id for spec in specs)
        before = await turn.active_names()
        reply = await self._decide(specs, before)
        reply = replace(reply, calls=unique_calls(reply.calls, self._call_ids))
        self._dispatcher.answered = []
        try:
            if reply.calls:
                room = self._settings.max_tool_calls - log.calls
                log.calls += len(reply.calls)
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
        last = next((message.text for message in reversed(self._log.messages) if message.role == "user"), "")
        room = turn.window * 6 // 10
        messages = await self._fitted(room)
        turn.bus.emit(
            PromptBuilt,
            role=DECISION,
            digest=prompt.digest,
            tokens=prompt.tokens + turn.extra_tokens(specs, messages),
            available=prompt.listed,
            total=prompt.total,
            active=active,
            text=prompt.text if self._log.first_time(prompt.digest) else "",
            asked="" if last == turn.request else last,
        )
        request = ModelRequest(DECISION, prompt.text, messages, specs, active)
        for _ in range(FITS):
            try:
                return await turn.ask(turn.bus.step, request)
            except ModelFailed as error:
                shorter = request.messages
                if error.code == "context_full":
                    half = sum(turn.count(message.text) for message in shorter) // 2
                    await fit_history(turn, partial(_size, count=turn.count), half)
                    shorter = await self._fitted(half)
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
            before, after = (sum(_size(each, self._turn.count) for each in group) for group in (messages, view))
            cut = ContextCut(kind="results", turns=(self._turn.id,), tokens_before=before, tokens_after=after)
            self._log.context.append(cut)
            # what was read before may no longer stand in the history: it may be read again
            self._dispatcher.guard.history_cut()
        self._elided = elided
        return view

    async def _plain(self) -> str:
        """Ask for text, without tools; the step is logged."""
        turn, log = self._turn, self._log
        turn.bus.step = log.begin_step()
        reply = await self._decide((), await turn.active_names())
        if reply.text.strip():
            log.messages.append(Message("assistant", reply.text))
        return reply.text

    async def _answer(self, text: str) -> bool:
        """Take *text* as the answer, or have the answer's generator write it; False when the model must correct it."""
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
        missing = await self._unwritten() if settings.check_answers else ()
        if missing and not self._sent_back:
            self._sent_back = True
            self._log.messages.append(Message("user", UNWRITTEN.format(paths=", ".join(missing))))
            return False
        self._log.end(*(("unverified", "files_missing") if missing else ("final", "answer")))
        return True

    async def _unwritten(self) -> tuple[str, ...]:
        """Return the files that the answer reports as written and that are not there."""
        claimed = claimed_files(self._log.text)
        if not claimed:
            return ()
        try:
            present = await asyncio.to_thread(self._turn.file_names)
        except FileRefused:  # the end of the turn reports a folder that cannot be listed
            return ()
        missing = missing_files(self._log.text, present)
        sent_back = bool(missing) and not self._sent_back
        self._turn.bus.emit(AnswerChecked, claimed=claimed, missing=missing, sent_back=sent_back)
        return missing

    def _brief(self, draft: str) -> str:
        """Return the prompt of the answer's generator: the request, the results of tools, the draft, the sources."""
        budget = self._turn.window * 3  # characters: three quarters of the window at four to a token
        view = compact(self._log.messages, (), self._turn.window // 2, count=self._turn.count)
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
