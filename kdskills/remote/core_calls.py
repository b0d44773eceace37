"""Answers calls that arrive by a signal, by a pending row, or from the program itself."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdskills.remote.core import Driver
from kdskills.remote.core_session import SessionCore
from kdskills.remote.dispatch import CallOutcome
from kdskills.remote.journal.identity import arguments_digest
from kdskills.remote.ports import CallIdentity
from kdskills.remote.results import RemoteSkillDispatch
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
from kdskills.remote.submitting import LOCAL_DUPLICATE, NO_REQUEST_ID, Submission, SubmitOptions, submit


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
