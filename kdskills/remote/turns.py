"""What the sessions of both facades do: answer calls, send requests with the catalog, and bring the catalog to the model."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from kdskills.remote.calls import (
    TOOL_CALL_EVENT,
    AnsweredCall,
    AppServerSignal,
    Receipt,
    RemoteSkillDispatch,
    address,
    request_text,
    rows_of,
    text_or_none,
)
from kdskills.remote.core import SessionCore
from kdskills.remote.dispatch import CallOutcome, outcomes_text
from kdskills.remote.dispatch.payloads import CONTEXT_NAME
from kdskills.remote.journal.calls import arguments_digest
from kdskills.remote.names import qualified_name, tools_digest
from kdskills.remote.ports import (
    CallIdentity,
    CatalogBusy,
    CatalogChange,
    CatalogNotApplied,
    JournalRow,
    JsonObject,
    WaitTimeoutError,
)
from kdskills.remote.registry import TOOLS_KEYWORDS, inject, wire_tools

Pause = Callable[..., Awaitable[None]]

RETRIED = frozenset({"error", "exception", "malformed"})
LOCAL_DUPLICATE = "local_duplicate"


class SubmitOptions(NamedTuple):
    """How often and how patiently an answer is submitted: at least one attempt, never a negative pause."""

    max_submit_attempts: int = 3
    retry_delay_seconds: float = 0.05  # the pause after the n-th attempt is n times this


class IncomingCall(NamedTuple):
    """A call of a tool as it reached a session, and what the model gave it."""

    identity: CallIdentity
    arguments: Any


def call_of(core: SessionCore, params: Mapping[str, Any], request_id: object, thread: str = "") -> IncomingCall | None:
    """Return the call of a pending row or a signal's params, of *thread* if it names none; None without a tool."""
    tool, arguments = text_or_none(params.get("tool")), params.get("arguments")
    if tool is None:
        return None
    identity = CallIdentity(
        core.session_id,
        tool,
        arguments_digest(arguments),
        thread_id=text_or_none(params.get("threadId")) or thread or core.session_id,
        turn_id=text_or_none(params.get("turnId")),
        call_id=text_or_none(params.get("callId")),
        namespace=text_or_none(params.get("namespace")),
        request_id=request_text(request_id),
        epoch=core.owner.epoch,
    )
    return IncomingCall(identity, arguments)


def call_of_signal(core: SessionCore, signal: AppServerSignal) -> IncomingCall | None:
    """Return the call a signal carries, or None when it carries none."""
    if signal.event_type != TOOL_CALL_EVENT or not isinstance(signal.params, Mapping):
        return None
    return call_of(core, signal.params, signal.request_id, address(signal) or "")


def call_of_row(core: SessionCore, row: Mapping[str, Any]) -> IncomingCall | None:
    """Return the call of a pending row; None when it is another thread's or names no tool."""
    is_own = text_or_none(row.get("threadId")) in {None, core.session_id}
    return call_of(core, row, row.get("requestId")) if is_own else None


async def respond(
    core: SessionCore, call: IncomingCall | None, options: SubmitOptions, *, knows_session: bool = True
) -> RemoteSkillDispatch | None:
    """Run one call, if there is one, and submit its answer."""
    if call is None:
        return None
    (dispatch,) = await _answer_all(core, [call], options, knows_session=knows_session)
    return dispatch


async def drain(core: SessionCore, options: SubmitOptions) -> list[RemoteSkillDispatch]:
    """Answer every pending call: handlers run in parallel, submissions and results keep the order of the rows."""
    rows = rows_of(await core.owner.call(core.owner.client.sessions.tool_calls, session_id=core.session_id))
    calls = [call for row in rows if (call := call_of_row(core, row)) is not None]
    return await _answer_all(core, calls, options, drained=True)


async def dispatch_tool_call(core: SessionCore, call: IncomingCall) -> RemoteSkillDispatch:
    """Run a call for the program: nothing is submitted or recorded, so the same call made twice runs twice."""
    outcome = await core.owner.dispatcher.run(core.registry.find(call.identity.tool), *call)
    if outcome.reraise is not None:
        raise outcome.reraise
    return _dispatch(call, outcome)


async def _answer_all(
    core: SessionCore,
    calls: Sequence[IncomingCall],
    options: SubmitOptions,
    *,
    drained: bool = False,
    knows_session: bool = True,
) -> list[RemoteSkillDispatch]:
    """Run the calls in parallel and submit their answers in order, whether or not the caller is cancelled meanwhile.

    The `KeyboardInterrupt` of a handler is raised when all are answered.
    """

    async def answer() -> list[tuple[RemoteSkillDispatch, CallOutcome]]:
        connections = [_connection(core, call.identity.request_id or "") for call in calls]
        runs = [
            core.owner.dispatcher.call(
                core.registry.find(call.identity.tool, call.identity.namespace),
                *call,
                connection=connection,
                knows_session=knows_session,
            )
            for call, connection in zip(calls, connections, strict=True)
        ]
        if len(runs) == 1:  # on the caller's own task and thread
            outcomes = [await runs[0]]
        else:
            ended = await asyncio.gather(*runs, return_exceptions=True)
            for outcome in ended:
                if isinstance(outcome, BaseException):
                    raise outcome
            outcomes = [outcome for outcome in ended if not isinstance(outcome, BaseException)]
        answered = []
        for call, outcome, connection in zip(calls, outcomes, connections, strict=True):
            dispatch = await _deliver(core, call, outcome, options, connection)
            for hear in core.listeners:
                hear(AnsweredCall(call.identity.turn_id, dispatch, drained))
            answered.append((dispatch, outcome))
        return answered

    answered = await core.owner.unbroken(answer())
    for _, outcome in answered:
        if outcome.reraise is not None:
            raise outcome.reraise
    return [dispatch for dispatch, _ in answered]


def _connection(core: SessionCore, handle: str) -> str:
    """Return the connection a call came over.

    A handle names it. By the time the handler has ended the client may have another one, where the server has delivered the
    call again: an answer to the first delivery does not answer the second.
    """
    present = core.owner.connection
    if not present or handle.startswith(f"{present}:"):
        return present
    return handle.rpartition(":")[0] or present


async def _deliver(
    core: SessionCore, call: IncomingCall, outcome: CallOutcome, options: SubmitOptions, connection: str
) -> RemoteSkillDispatch:
    """Submit a call's answer, unless it was accepted on this connection before."""
    dispatch, dispatcher = _dispatch(call, outcome), core.owner.dispatcher
    if dispatch.request_id is None:
        return replace(dispatch, submission_status="no_request_id")
    if outcome.key is None:
        return await _submit(core, dispatch, options)
    async with core.owner.turnstile(outcome.key):
        # Two deliveries may both have read the answer before either submitted it: check again after waiting.
        if outcome.duplicate or dispatcher.was_accepted(outcome.key, connection):
            return replace(dispatch, submission_status=LOCAL_DUPLICATE, submission_idempotent=True)
        dispatch = await _submit(core, dispatch, options)
        if dispatch.submission_status == "ok" or dispatch.submission_idempotent:
            dispatcher.accepted(outcome, connection)
        return dispatch


async def _submit(core: SessionCore, dispatch: RemoteSkillDispatch, options: SubmitOptions) -> RemoteSkillDispatch:
    """Submit an answer, again after errors and unreadable answers; exceptions of the client become results."""
    give, attempt, payload = core.owner.client.tool_calls.respond, 0, dispatch.response_payload
    while True:
        attempt += 1
        try:
            answer = await core.owner.call(give, request_id=dispatch.request_id, response=copy.deepcopy(payload))
            submitted = replace(dispatch, submission_attempts=attempt, **judged(answer))
        except Exception as error:  # noqa: BLE001 - whatever a client raises is told in the dispatch
            facts = _refused("exception", f"tool call response submit failed: {error}")
            submitted = replace(dispatch, submission_attempts=attempt, **facts)
        if submitted.submission_status not in RETRIED or attempt >= int(options.max_submit_attempts):
            return submitted
        await asyncio.sleep(max(0.0, float(options.retry_delay_seconds)) * attempt)


def judged(answer: object) -> JsonObject:
    """Return what a server's answer to a submission means, as fields of `RemoteSkillDispatch`."""
    status = answer.get("status") if isinstance(answer, Mapping) else None
    if not isinstance(answer, Mapping) or not isinstance(status, str) or not status.strip():
        fault = "no status" if isinstance(answer, Mapping) else f"{type(answer).__name__}, not an object"
        return _refused("malformed", f"tool call response submit failed: malformed answer: {fault}")
    code = answer.get("code")
    code = None if code is None else str(code)
    if status == "not_found" or (status == "conflict" and code == "in_flight"):
        return {"submission_status": status, "submission_code": code, "submission_idempotent": True}
    if status == "ok":
        return {"submission_status": status, "submission_code": code}
    return _refused(status, f"status={status}, code={code}, message={answer.get('message')}", submission_code=code)


def _refused(status: str, error: str, **facts: Any) -> JsonObject:
    return {"handled": False, "submission_status": status, "error": error, **facts}


def _dispatch(call: IncomingCall, outcome: CallOutcome) -> RemoteSkillDispatch:
    return RemoteSkillDispatch(
        handled=outcome.handled,
        tool=call.identity.label,
        arguments=call.arguments,
        request_id=call.identity.request_id,
        call_id=call.identity.call_id,
        response_payload=outcome.response_payload,
        result=outcome.result,
        error=outcome.error,
        replayed=outcome.replayed,
        late=outcome.late,
        call_key=outcome.key,
    )


TERMINAL = frozenset({"completed", "complete", "failed", "error", "interrupted", "canceled", "cancelled"})


async def send(core: SessionCore, text: str, *, inject_skills: bool, keywords: Mapping[str, Any]) -> Any:
    """Send one message with the catalog as it is; returns the client's answer, with `catalog` if there is a backend."""
    core.live()
    owner, context = core.owner, None
    told: Sequence[JournalRow] = ()  # earlier calls whose outcomes the message reports
    own_tools = {} if any(name in keywords for name in TOOLS_KEYWORDS) else {"dynamic_tools": core.tools()}
    sent: JsonObject = {**own_tools, **keywords}
    if owner.backend is not None:
        context = await owner.call(owner.backend.context_for, core.session_id, core.tools(), core.text())
    if inject_skills and (context is None or context.inject):
        text = inject(core.text(), text)
    if inject_skills and context is not None:
        if owner.profile.context:
            try:
                told = await owner.blocking(owner.dispatcher.journal.outcomes, core.session_id, core.active_turn)
            except Exception as error:  # noqa: BLE001 - the request itself does not depend on the journal
                what = "the model was not told of earlier calls, the journal does not answer"
                core.note("outcomes_unknown", f"{what}: {error}")
        added, passed = context.send.get("additional_context"), sent.get("additional_context")
        if outcomes := outcomes_text(told):
            value = {"kind": "application", "value": outcomes.replace("</", "<\\/")}
            added = {**(added or {}), CONTEXT_NAME: value}
        extra = {**context.send, "additional_context": added} if added is not None else context.send
        sent = {**extra, **sent}  # the caller's values win
        if isinstance(added, Mapping) and isinstance(passed, Mapping):
            sent["additional_context"] = {**added, **passed}
    answer = await owner.call(owner.client.sessions.send_message, session_id=core.session_id, text=text, **sent)
    await _note_sent(core, answer, [row.key for row in told])
    if context is not None and isinstance(answer, Mapping):
        return {**answer, "catalog": "current" if context.current else "stale"}
    return answer


def pauses(core: SessionCore, turn_id: str, timeout_seconds: float, interval_seconds: float) -> Pause:
    """Return a pause between two looks at a turn; out of time, it raises `WaitTimeoutError` with the given text."""
    until = time.monotonic() + timeout_seconds

    async def pause(late: str, **facts: Any) -> None:
        seconds_left = until - time.monotonic()
        if seconds_left <= 0:
            raise WaitTimeoutError(late, session_id=core.session_id, turn_id=turn_id, **facts)
        await asyncio.sleep(min(interval_seconds, seconds_left))

    return pause


async def settled(
    core: SessionCore, turn_id: str, terminal: frozenset[str], options: SubmitOptions, pause: Pause
) -> str:
    """Answer calls until the turn's status is terminal, and return it."""
    ask = core.owner.client.wait.turn_status
    while True:
        await drain(core, options)
        status = status_of(await core.owner.call(ask, session_id=core.session_id, turn_id=turn_id))
        if status is not None and status.lower() in terminal:
            break
        await pause(f"the turn did not end in time; its last status is {status}", status=status)
    try:  # for clients that do not report the end of turns
        await core.owner.turn_ended(core.session_id, turn_id, status.lower())
    except Exception as error:  # noqa: BLE001 - the turn's result does not depend on the journal
        what = "the turn's answers could not be noted as seen, the journal does not answer"
        core.note("outcomes_unknown", f"{what}: {error}")
    return status


async def reply(
    core: SessionCore, turn_id: str, pause: Pause, *, required: bool
) -> tuple[JsonObject | None, JsonObject | None]:
    """Return the session and the turn's reply; waits for the reply only if it is required."""
    while True:
        try:
            detail = await session_detail(core)
        except Exception as error:
            if required:
                raise
            core.note("session_unreadable", f"sessions.get failed after the turn: {error}")
            detail = None
        found = reply_of(detail, turn_id)
        if found is not None or not required:
            return detail, found
        await pause("the turn ended without a complete assistant reply")


async def session_detail(core: SessionCore) -> JsonObject | None:
    """Return the `sessions.get` answer; None when the client has no such method, or answers with no object."""
    get = getattr(core.owner.client.sessions, "get", None)
    answer = await core.owner.call(get, session_id=core.session_id) if callable(get) else None
    return dict(answer) if isinstance(answer, Mapping) else None


def status_of(answer: object) -> str | None:
    """Return the status a `wait.turn_status` answer tells: text, or under `status`, there or in `turn`."""
    if isinstance(answer, str):
        return text_or_none(answer)
    if not isinstance(answer, Mapping):
        return None
    status = answer.get("status")
    return text_or_none(status) if isinstance(status, str) else status_of(answer.get("turn"))


def reply_of(detail: JsonObject | None, turn_id: str) -> JsonObject | None:
    """Return the last transcript entry of the turn that is a complete one of the assistant."""
    transcript = (detail or {}).get("transcript")
    expected = {"turnId": turn_id, "role": "assistant", "status": "complete"}
    for entry in reversed(transcript if isinstance(transcript, list) else []):
        if isinstance(entry, Mapping) and all(entry.get(key) == value for key, value in expected.items()):
            return dict(entry)
    return None


def of_turn(answered_calls: list[AnsweredCall], turn_id: str) -> tuple[RemoteSkillDispatch, ...]:
    """Return the drained calls and the turn's calls answered otherwise; a call that arrived both ways counts once."""
    dispatches = [call.dispatch for call in answered_calls if call.drained or call.turn_id == turn_id]
    answered = {item.call_key for item in dispatches if item.submission_status != LOCAL_DUPLICATE}
    return tuple(
        item for item in dispatches if item.submission_status != LOCAL_DUPLICATE or item.call_key not in answered
    )


async def _note_sent(core: SessionCore, answer: object, told_keys: Sequence[str]) -> None:
    """Record what was sent, with its receipt; failures become diagnostics, because the message is on its way."""
    owner = core.owner
    turn_id = text_or_none(answer.get("turnId")) if isinstance(answer, Mapping) else None
    if turn_id is not None:
        core.active = (turn_id, owner.connection)
    try:
        if told_keys:
            await owner.blocking(owner.dispatcher.journal.tell, told_keys)
        if turn_id is None:
            return
        facts: JsonObject = {}
        if (tell_facts := getattr(owner.backend, "facts", None)) is not None:
            facts = await owner.call(tell_facts, core.session_id)
        elif core.pushed is not None:
            names = [qualified_name(tool) for tool in core.pushed]
            facts = {"digest": tools_digest(core.pushed), "strategy": "resume", "tools": names}
        receipt = Receipt(
            core.session_id,
            turn_id,
            facts.get("digest"),
            facts.get("context_digest"),
            facts.get("strategy"),
            tuple(sorted(facts.get("tools") or ())),
            core.published,
            strategy_asked=facts.get("strategy_asked"),
        )
        await owner.blocking(owner.receipts.note, receipt)
    except Exception as error:  # noqa: BLE001 - the caller must not take a message that was sent for one that was not
        core.note("receipt_not_kept", f"the message was sent, but not written down: {error}")


BOOTSTRAP_TEXT = "Reply with the single word: ready"
NO_ROLLOUT = "no rollout found"
RESUME_TRIES = 3
RETRY_SECONDS = 0.05


def refuse_unapplied(report: JsonObject) -> None:
    """Raise CatalogBusy, or CatalogNotApplied, for a report that leaves the old catalog in force."""
    if report.get("status") in {"deferred", "failed"}:
        busy = report.get("reason") in {"turn_active", "queued_turns"}
        raise CatalogBusy(report) if busy else CatalogNotApplied(report)


@asynccontextmanager
async def window(
    core: SessionCore, name: str, handler: Callable[..., Any], **register_options: Any
) -> AsyncIterator[None]:
    """Have a skill for the body; then the catalog is updated if it held the skill; failures become diagnostics."""
    skill = core.registry.open(core.registry.build(name, handler, **register_options))
    try:
        yield
    finally:
        report: JsonObject = {}
        was_pushed = any(pushed is skill for pushed in core.pushed_skills)
        if core.registry.close(skill) and was_pushed and not core.draft:
            try:
                report = await change_catalog(core, 10.0, wait=False)
            except Exception as error:  # noqa: BLE001 - the body's own error must not be hidden by this one
                words = str(error) or type(error).__name__
                report = {"status": "failed", "sessionId": core.session_id, "reason": "rejected", "error": words}
                core.last_catalog = report
        if report.get("status") == "failed":
            core.note(
                "catalog_sync_failed",
                f"the catalog was not changed when `{skill.qualified_name}` was left: "
                f"{report.get('error') or report.get('reason')}",
                fix="call prepare_catalog",
            )


async def change_catalog(core: SessionCore, timeout_seconds: float, *, wait: bool) -> JsonObject:
    """Bring the registry's catalog to the model and return the report.

    With *wait* the change is made once the thread is idle, and where no rollout file exists yet, it is bootstrapped.
    """
    core.live()
    skills, backend = core.registry.skills(), core.owner.backend
    tools = wire_tools(skills)
    if not tools and core.pushed is None:
        core.last_catalog = {"status": "noop", "sessionId": core.session_id}
        return dict(core.last_catalog)
    if backend is not None:
        change = CatalogChange(core.session_id, tools, core.text(), wait=wait, timeout_s=timeout_seconds)
        report: JsonObject = dict(await core.owner.call(backend.apply, change))
    else:
        report = await _by_resume(core, tools, timeout_seconds, prepare=wait)
    if report.get("status") in {"ok", "noop"} or (report.get("status") == "deferred" and report.get("pending")):
        core.remember_pushed(tools, skills)
    core.last_catalog = copy.deepcopy(report)
    successor = report.get("new_session_id")
    if isinstance(successor, str) and backend is not None:
        core.owner.move(core, successor)
    return report


async def _by_resume(
    core: SessionCore, tools: list[JsonObject], timeout_seconds: float, *, prepare: bool
) -> JsonObject:
    """Resume with the tools; to *prepare* them, a thread without a rollout file is bootstrapped before, once."""
    began, bootstrapped = time.monotonic(), prepare and await _unmaterialized(core)
    if bootstrapped:
        await _bootstrap(core, timeout_seconds)
    resume, attempt = core.owner.client.sessions.resume, 0
    while True:
        attempt += 1
        try:
            answer = await core.owner.call(resume, session_id=core.session_id, dynamic_tools=copy.deepcopy(tools))
            break
        except Exception as error:
            if not prepare or attempt == RESUME_TRIES or not says_no_rollout(error):
                raise
            if bootstrapped:
                await asyncio.sleep(RETRY_SECONDS * attempt)
            else:
                bootstrapped = True
                await _bootstrap(core, timeout_seconds)
    before, after = ({qualified_name(tool): tool for tool in side} for side in (core.pushed or (), tools))
    report = {
        **(dict(answer) if isinstance(answer, Mapping) else {}),
        "status": "ok",
        "sessionId": core.session_id,
        "strategy": "resume",
        "digest": tools_digest(tools),
        "verified": False,
        "added": sorted(name for name, tool in after.items() if before.get(name) != tool),
        "removed": sorted(before.keys() - after.keys()),
        "duration_ms": round((time.monotonic() - began) * 1000, 3),
        "materialized_now": bootstrapped,
    }
    status = answer.get("status") if isinstance(answer, Mapping) else None
    if status not in {None, "ok"}:
        words = answer.get("message") or answer.get("error")
        fault = f"{status}: {words}" if words else str(status)
        report |= {"status": "failed", "reason": "client_refused", "error": fault}
    return report


async def _unmaterialized(core: SessionCore) -> bool:
    try:
        session = (await session_detail(core) or {}).get("session")
    except Exception as error:  # noqa: BLE001 - the resume that follows meets the same error and tells of it
        core.note("session_unreadable", f"sessions.get failed before the catalog was prepared: {error}")
        return False
    return isinstance(session, Mapping) and session.get("materialized") is False


def says_no_rollout(error: BaseException) -> bool:
    """Return whether an error says that the thread has no rollout file yet."""
    texts = [str(error)]
    details = getattr(error, "details", None)
    body = details.get("response_body") if isinstance(details, Mapping) else getattr(details, "response_body", None)
    if isinstance(body, Mapping):
        texts += [str(body.get(key, "")) for key in ("message", "error", "details")]
    elif isinstance(body, bytes):
        texts.append(body.decode("utf-8", "replace"))
    elif body is not None:
        texts.append(str(body))
    return any(NO_ROLLOUT in text.lower() for text in texts)


async def _bootstrap(core: SessionCore, timeout_seconds: float) -> None:
    """Make the server write the rollout file, by a one-line turn that is rolled back."""
    client, call, session_id = core.owner.client, core.owner.call, core.session_id
    answer = await call(client.sessions.send_message, session_id=session_id, text=BOOTSTRAP_TEXT)
    turn_id = answer.get("turnId") if isinstance(answer, Mapping) else None
    try:
        if turn_id:
            times = {"timeout_seconds": timeout_seconds, "interval_seconds": 0.25}
            await call(client.wait.assistant_reply, session_id=session_id, turn_id=turn_id, **times)
    finally:
        try:
            await call(client.sessions.rollback, session_id=session_id, num_turns=1)
        except Exception as error:  # noqa: BLE001 - a turn that stays in the history harms nothing
            core.note("bootstrap_not_taken_back", f"the bootstrap message stays in the history: {error}")
