"""Sends requests with the catalog, and answers their calls until the turn has ended.

Calls arrive by a signal, by a pending row, or from the program itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdskills.remote.core import LOCAL_DUPLICATE, NO_REQUEST_ID, Driver, Submission, SubmitOptions, submit
from kdskills.remote.core_session import SessionCore, digest, prepare_catalog, refuse_unapplied, wire_names
from kdskills.remote.dispatch import CallOutcome, outcomes_context
from kdskills.remote.dispatch.outcome import CONTEXT_NAME
from kdskills.remote.journal.calls import arguments_digest
from kdskills.remote.ports import CallIdentity, CatalogBackend, CatalogContext, JsonObject, WaitTimeoutError
from kdskills.remote.receipts import Receipt, RemoteSkillDispatch, RemoteSkillSendResult
from kdskills.remote.registry import TOOLS_KEYWORDS, inject
from kdskills.remote.signals import (
    AppServerSignal,
    IncomingCall,
    address,
    call_of_row,
    call_of_signal,
    request_text,
    rows_of,
    text_or_none,
)


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One answered call, as passed to the listeners of a session."""

    turn_id: str | None
    dispatch: RemoteSkillDispatch
    drained: bool


class Turnstile:
    """Serializes the submissions for repeated deliveries of one call.

    Args:
        driver: Makes the locks.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._open: dict[str, tuple[AbstractAsyncContextManager[None], int]] = {}

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait until no other delivery with this key is inside, then run the body of the `with`."""
        with self._lock:
            mutex, waiting = self._open.get(key) or (self._driver.mutex(), 0)
            self._open[key] = (mutex, waiting + 1)
        try:
            async with mutex:
                yield
        finally:
            with self._lock:
                mutex, waiting = self._open.pop(key)
                if waiting > 1:
                    self._open[key] = (mutex, waiting - 1)


async def dispatch_tool_call(
    core: SessionCore, *, tool: str, arguments: Any, request_id: object, call_id: str | None
) -> RemoteSkillDispatch:
    """Run a call for the program: nothing is submitted or recorded, so the same call made twice runs twice."""
    core.live()
    call = IncomingCall(tool.strip(), arguments, None, request_text(request_id), text_or_none(call_id))
    skill = core.registry.find(call.tool)
    outcome = await core.owner.dispatcher.run(skill, _identity(core, call), arguments, tool_label=call.label)
    _raise_again([outcome])
    return _dispatch(call, outcome)


async def respond_to_signal(
    core: SessionCore, signal: AppServerSignal, options: SubmitOptions, *, knows_session: bool = True
) -> RemoteSkillDispatch | None:
    """Answer the call a signal carries; None, with nothing run, when it is not of this session."""
    core.live()
    if address(signal) not in {None, core.session_id}:
        return None
    call = call_of_signal(signal)
    return None if call is None else await _respond(core, call, options, knows_session=knows_session)


async def respond_to_row(
    core: SessionCore, row: Mapping[str, Any], options: SubmitOptions
) -> RemoteSkillDispatch | None:
    """Answer the call of a pending row; None when it is another thread's or names no tool."""
    core.live()
    call = _own_call(core, row)
    return None if call is None else await _respond(core, call, options, knows_session=True)


async def drain(core: SessionCore, options: SubmitOptions) -> list[RemoteSkillDispatch]:
    """Answer every pending call: handlers run in parallel, submissions and results keep the order of the rows."""
    core.live()
    rows = rows_of(await core.driver.call(core.owner.client.sessions.tool_calls, session_id=core.session_id))
    calls = [call for row in rows if (call := _own_call(core, row)) is not None]
    answered = await core.driver.unbroken(lambda: _answer_all(core, calls, options, drained=True))
    _raise_again([outcome for _, outcome in answered])
    return [dispatch for dispatch, _ in answered]


async def _answer_all(
    core: SessionCore,
    calls: Sequence[IncomingCall],
    options: SubmitOptions,
    *,
    drained: bool,
    knows_session: bool = True,
) -> list[tuple[RemoteSkillDispatch, CallOutcome]]:
    """Run the calls in parallel, then submit their answers in order."""
    connections = [_connection(core, call) for call in calls]
    outcomes = await core.driver.gather(
        [partial(_run, core, call, origin, knows_session) for call, origin in zip(calls, connections, strict=True)]
    )
    return [
        (await _deliver(core, call, outcome, options, connection, drained=drained), outcome)
        for call, outcome, connection in zip(calls, outcomes, connections, strict=True)
    ]


def _connection(core: SessionCore, call: IncomingCall) -> str:
    """Return the connection a call came over.

    A handle names it. By the time the handler has ended the client may have another one, where the server has delivered the
    call again: an answer to the first delivery does not answer the second.
    """
    present = core.owner.connection
    handle = call.request_id or ""
    if not present or handle.startswith(f"{present}:"):
        return present
    return handle.rpartition(":")[0] or present


def _own_call(core: SessionCore, row: Mapping[str, Any]) -> IncomingCall | None:
    call = call_of_row(row)
    return None if call is None or call.thread_id not in {None, core.session_id} else call


async def _run(core: SessionCore, call: IncomingCall, connection: str, knows_session: bool) -> CallOutcome:
    return await core.owner.dispatcher.call(
        core.registry.find(call.tool, call.namespace),
        _identity(core, call),
        call.arguments,
        tool_label=call.label,
        connection=connection,
        knows_session=knows_session,
    )


async def _respond(
    core: SessionCore, call: IncomingCall, options: SubmitOptions, *, knows_session: bool
) -> RemoteSkillDispatch:
    work = partial(_answer_all, core, [call], options, drained=False, knows_session=knows_session)
    answered = await core.driver.unbroken(work)
    ((dispatch, outcome),) = answered
    _raise_again([outcome])
    return dispatch


async def _deliver(
    core: SessionCore,
    call: IncomingCall,
    outcome: CallOutcome,
    options: SubmitOptions,
    connection: str,
    *,
    drained: bool,
) -> RemoteSkillDispatch:
    if call.request_id is None:
        submission = NO_REQUEST_ID
    elif outcome.key is None:
        submission = await _submit(core, call.request_id, outcome, options, connection)
    else:
        async with core.owner.turnstile.turn(outcome.key):
            submission = await _submit(core, call.request_id, outcome, options, connection)
    dispatch = _dispatch(call, outcome, submission)
    for hear in core.listeners():
        hear(AnsweredCall(call.turn_id, dispatch, drained))
    return dispatch


async def _submit(
    core: SessionCore, request_id: str, outcome: CallOutcome, options: SubmitOptions, connection: str
) -> Submission:
    dispatcher = core.owner.dispatcher
    # Two deliveries may both have read the answer before either submitted it: check again after waiting for the turnstile.
    if outcome.key is not None and (outcome.duplicate or dispatcher.was_accepted(outcome.key, connection)):
        return LOCAL_DUPLICATE
    respond = core.owner.client.tool_calls.respond
    submission = await submit(core.driver, respond, request_id, outcome.response_payload, options)
    if submission.accepted:
        dispatcher.accepted(outcome, connection)
    return submission


def _dispatch(call: IncomingCall, outcome: CallOutcome, submission: Submission | None = None) -> RemoteSkillDispatch:
    refused = submission is not None and not submission.accepted and submission is not NO_REQUEST_ID
    return RemoteSkillDispatch(
        handled=outcome.handled and not refused,
        tool=call.label,
        arguments=call.arguments,
        request_id=call.request_id,
        call_id=call.call_id,
        response_payload=outcome.response_payload,
        result=outcome.result,
        error=submission.error if submission is not None and refused else outcome.error,
        submission_status=None if submission is None else submission.status,
        submission_code=None if submission is None else submission.code,
        submission_attempts=0 if submission is None else submission.attempts,
        submission_idempotent=submission is not None and submission.idempotent,
        replayed=outcome.replayed,
        late=outcome.late,
        call_key=outcome.key,
    )


def _identity(core: SessionCore, call: IncomingCall) -> CallIdentity:
    return CallIdentity(
        session_id=core.session_id,
        tool=call.tool,
        arguments_sha256=arguments_digest(call.arguments),
        thread_id=call.thread_id or core.session_id,
        turn_id=call.turn_id,
        call_id=call.call_id,
        namespace=call.namespace,
        request_id=call.request_id,
        epoch=core.owner.epoch,
    )


def _raise_again(outcomes: Sequence[CallOutcome]) -> None:
    """Raise the `KeyboardInterrupt` of a handler, now that its call is answered."""
    for outcome in outcomes:
        if outcome.reraise is not None:
            raise outcome.reraise


TERMINAL = frozenset({"completed", "complete", "failed", "error", "interrupted", "canceled", "cancelled"})


async def send(core: SessionCore, text: str, *, inject_skills: bool, keywords: Mapping[str, Any]) -> Any:
    """Send one message with the catalog as it is; returns the client's answer, with `catalog` if there is a backend."""
    core.live()
    message = core.owner.client.sessions.send_message
    own_tools = {} if any(name in keywords for name in TOOLS_KEYWORDS) else {"dynamic_tools": core.tools()}
    sent: JsonObject = {**own_tools, **keywords}
    if core.backend is None:
        catalog = core.text() if inject_skills else ""
        answer = await core.driver.call(message, session_id=core.session_id, text=inject(catalog, text), **sent)
        await _note_sent(core, answer)
        return answer
    context = await _context(core, core.backend)
    told_keys: tuple[str, ...] = ()
    if inject_skills:
        if context.inject:
            text = inject(core.text(), text)
        extra, told_keys = await _outcomes(core, context)
        sent = _merged(sent, extra)
    answer = await core.driver.call(message, session_id=core.session_id, text=text, **sent)
    await _note_sent(core, answer, told_keys)
    if isinstance(answer, Mapping):
        return {**answer, "catalog": "current" if context.current else "stale"}
    return answer


async def send_prepared(
    core: SessionCore, text: str, *, inject_skills: bool, prepare_timeout_seconds: float, keywords: Mapping[str, Any]
) -> Any:
    """Prepare the catalog and send.

    Raises:
        CatalogNotApplied: The old catalog is still in force; nothing was sent.
    """
    refuse_unapplied(await prepare_catalog(core, prepare_timeout_seconds))
    return await send(core, text, inject_skills=inject_skills, keywords=keywords)


async def send_and_handle(
    core: SessionCore,
    text: str,
    *,
    inject_skills: bool,
    timeout_seconds: float,
    interval_seconds: float,
    terminal_statuses: str | Iterable[str] | None,
    require_assistant_reply: bool,
    options: SubmitOptions,
    keywords: Mapping[str, Any],
    prepare_timeout_seconds: float = 90.0,
) -> RemoteSkillSendResult:
    """Send one message and answer its calls until its turn has ended.

    Raises:
        ValueError: A time is not positive, or the answer has no `turnId`.
        WaitTimeoutError: The turn did not end, or its reply did not come, in time.
        CatalogNotApplied: A backend could not change the catalog; nothing was sent.
    """
    core.live()
    if not timeout_seconds > 0 or not interval_seconds > 0:
        raise ValueError(
            f"timeout_seconds and interval_seconds must be positive, got {timeout_seconds!r} and {interval_seconds!r}"
        )
    terminal = _terminal(terminal_statuses)
    answered_calls: list[AnsweredCall] = []
    with core.listening(answered_calls.append):
        if core.backend is not None:
            refuse_unapplied(await prepare_catalog(core, prepare_timeout_seconds))
        accepted = await send(core, text, inject_skills=inject_skills, keywords=keywords)
        turn_id = text_or_none(accepted.get("turnId")) if isinstance(accepted, Mapping) else None
        if turn_id is None:
            raise ValueError("sessions.send_message response missing turnId")
        until = time.monotonic() + timeout_seconds
        wait = _SentTurn(core, turn_id, until, interval_seconds)
        status = await wait.ended(terminal, options)
        await _note_ended(core, turn_id, status)
        detail, reply = await wait.reply(required=require_assistant_reply)
    return RemoteSkillSendResult(
        core.session_id, turn_id, dict(accepted), detail, status, reply, _of_turn(answered_calls, turn_id)
    )


class _SentTurn:
    """Waits for one turn."""

    def __init__(self, core: SessionCore, turn_id: str, until: float, interval_seconds: float) -> None:
        self._core = core
        self._turn_id = turn_id
        self._until = until
        self._interval = interval_seconds

    async def ended(self, terminal: frozenset[str], options: SubmitOptions) -> str:
        """Answer calls until the status is terminal, and return it."""
        wait = self._core.owner.client.wait
        while True:
            await drain(self._core, options)
            answer = await self._core.driver.call(
                wait.turn_status, session_id=self._core.session_id, turn_id=self._turn_id
            )
            status = status_of(answer)
            if status is not None and status.lower() in terminal:
                return status
            await self._pause(f"the turn did not end in time; its last status is {status}", status=status)

    async def reply(self, *, required: bool) -> tuple[JsonObject | None, JsonObject | None]:
        """Return the session and the turn's reply; waits for the reply only if it is required."""
        while True:
            detail = await self._detail(required=required)
            reply = reply_of(detail, self._turn_id)
            if reply is not None or not required:
                return detail, reply
            await self._pause("the turn ended without a complete assistant reply")

    async def _detail(self, *, required: bool) -> JsonObject | None:
        get = getattr(self._core.owner.client.sessions, "get", None)
        if not callable(get):
            return None
        try:
            answer = await self._core.driver.call(get, session_id=self._core.session_id)
        except Exception as error:
            if required:
                raise
            self._core.note("session_unreadable", f"sessions.get failed after the turn: {error}")
            return None
        return dict(answer) if isinstance(answer, Mapping) else None

    async def _pause(self, late: str, **facts: Any) -> None:
        seconds_left = self._until - time.monotonic()
        if seconds_left <= 0:
            raise WaitTimeoutError(late, session_id=self._core.session_id, turn_id=self._turn_id, **facts)
        await self._core.driver.sleep(min(self._interval, seconds_left))


def status_of(answer: object) -> str | None:
    """Return the status a `wait.turn_status` answer tells: text, or under `status`, there or in `turn`."""
    if isinstance(answer, str):
        return text_or_none(answer)
    if not isinstance(answer, Mapping):
        return None
    status = answer.get("status")
    if isinstance(status, str):
        return text_or_none(status)
    return status_of(answer.get("turn"))


def reply_of(detail: JsonObject | None, turn_id: str) -> JsonObject | None:
    """Return the last transcript entry of the turn that is a complete one of the assistant."""
    transcript = (detail or {}).get("transcript")
    expected = {"turnId": turn_id, "role": "assistant", "status": "complete"}
    entries = [
        entry
        for entry in (transcript if isinstance(transcript, list) else [])
        if isinstance(entry, Mapping) and all(entry.get(key) == value for key, value in expected.items())
    ]
    return dict(entries[-1]) if entries else None


def _terminal(statuses: str | Iterable[str] | None) -> frozenset[str]:
    if statuses is None:
        return TERMINAL
    return frozenset(word.strip().lower() for word in ([statuses] if isinstance(statuses, str) else statuses))


def _of_turn(answered_calls: list[AnsweredCall], turn_id: str) -> tuple[RemoteSkillDispatch, ...]:
    """Return the drained calls and the turn's calls answered otherwise; a call that arrived both ways counts once."""
    dispatches = [call.dispatch for call in answered_calls if call.drained or call.turn_id == turn_id]
    answered = {item.call_key for item in dispatches if item.submission_status != LOCAL_DUPLICATE.status}
    return tuple(
        item for item in dispatches if item.submission_status != LOCAL_DUPLICATE.status or item.call_key not in answered
    )


async def _note_sent(core: SessionCore, answer: object, told_keys: Sequence[str] = ()) -> None:
    """Record what was sent; failures become diagnostics, because the message is on its way."""
    turn_id = text_or_none(answer.get("turnId")) if isinstance(answer, Mapping) else None
    if turn_id is not None:
        core.active = (turn_id, core.owner.connection)
    try:
        if told_keys:
            await core.driver.blocking(core.owner.dispatcher.journal.tell, told_keys)
        if turn_id is not None:
            await _note_receipt(core, turn_id)
    except Exception as error:  # noqa: BLE001 - the caller must not take a message that was sent for one that was not
        core.note("receipt_not_kept", f"the message was sent, but not written down: {error}")


async def _note_ended(core: SessionCore, turn_id: str, status: str) -> None:
    """Record that a turn has ended, for clients that do not report it; failures become diagnostics."""
    try:
        await core.owner.turn_ended(core.session_id, turn_id, status.lower())
    except Exception as error:  # noqa: BLE001 - the turn's result does not depend on the journal
        core.note(
            "outcomes_unknown", f"the turn's answers could not be noted as seen, the journal does not answer: {error}"
        )


async def _note_receipt(core: SessionCore, turn_id: str) -> None:
    """Store the receipt of the turn."""
    facts = getattr(core.backend, "facts", None)
    if facts is not None:
        catalog_facts = await core.driver.call(facts, core.session_id)
    elif core.pushed is not None:
        catalog_facts = {"digest": digest(core.pushed), "strategy": "resume", "tools": wire_names(core.pushed)}
    else:
        catalog_facts = {}
    receipt = Receipt(
        core.session_id,
        turn_id,
        catalog_facts.get("digest"),
        catalog_facts.get("context_digest"),
        catalog_facts.get("strategy"),
        tuple(sorted(catalog_facts.get("tools") or ())),
        core.published,
        strategy_asked=catalog_facts.get("strategy_asked"),
    )
    await core.driver.blocking(core.owner.receipts.note, receipt)


async def _context(core: SessionCore, backend: CatalogBackend) -> CatalogContext:
    context: CatalogContext = await core.driver.call(backend.context_for, core.session_id, core.tools(), core.text())
    return context


async def _outcomes(core: SessionCore, context: CatalogContext) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the further keywords of the message, and the keys of the calls whose outcomes it reports."""
    extra = dict(context.send)
    if not core.owner.profile.context:
        return extra, ()
    journal = core.owner.dispatcher.journal
    try:
        rows = await core.driver.blocking(journal.outcomes, core.session_id, core.active_turn)
    except Exception as error:  # noqa: BLE001 - the request itself does not depend on the journal
        core.note("outcomes_unknown", f"the model was not told of earlier calls, the journal does not answer: {error}")
        return extra, ()
    outcomes = outcomes_context(rows)
    if outcomes is None:
        return extra, ()
    value = {"kind": "application", "value": outcomes.text.replace("</", "<\\/")}
    extra["additional_context"] = {**(extra.get("additional_context") or {}), CONTEXT_NAME: value}
    return extra, outcomes.keys


def _merged(sent: JsonObject, extra: JsonObject) -> JsonObject:
    """Return the keywords of the caller with further ones added; the caller's values win."""
    added, passed = extra.get("additional_context"), sent.get("additional_context")
    joined = {**extra, **sent}
    if isinstance(added, Mapping) and isinstance(passed, Mapping):
        joined["additional_context"] = {**added, **passed}
    return joined
