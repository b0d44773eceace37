"""Calls as they reach a session, their results, and receipts of turns: the catalog a turn was run with, and its calls."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from kdskills.remote.names import qualify
from kdskills.remote.ports import CallJournal, CallState, JournalRow, JsonObject

TOOL_CALL_EVENT = "app_server.request.item.tool.call"


@dataclass(frozen=True, slots=True)
class AppServerSignal:
    """One event of the app-server's stream.

    Attributes:
        event_type: `app_server.request.item.tool.call` for a call of a tool.
        method: The wire's method.
        signal_type: `request`, `notification` or what the client says.
        received_at: When it came, as the client writes times.
        context: What the client knows around it: perhaps `threadId`, `turnId`.
        params: The message's own parameters.
        session: The session it belongs to, with `id`, or None.
        request_id: The handle an answer needs, when it is a request.
    """

    event_type: str
    method: str = ""
    signal_type: str = ""
    received_at: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] | None = None
    request_id: str | int | None = None


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A call of a tool, however it came; the texts are stripped."""

    tool: str
    arguments: Any = None
    namespace: str | None = None
    request_id: str | None = None  # the handle for the answer, as text; None when there is none to answer under
    call_id: str | None = None
    thread_id: str | None = None
    turn_id: str | None = None

    @property
    def label(self) -> str:
        """The tool's name in messages: `namespace.tool`, or the tool alone."""
        return qualify(self.namespace, self.tool)


def text_or_none(value: object) -> str | None:
    """Return non-blank text stripped; None for anything else."""
    return (value.strip() or None) if isinstance(value, str) else None


def request_text(request_id: object) -> str | None:
    """Return a request id as the text an answer is sent under: integers in decimal, 0 included; None when there is none.

    A bool is no id, though Python counts it as an integer.
    """
    if isinstance(request_id, int) and not isinstance(request_id, bool):
        return str(request_id)
    return text_or_none(request_id)


def address(signal: AppServerSignal) -> str | None:
    """Return the session a signal is for, or None when it names none."""
    sources: tuple[tuple[object, str], ...] = (
        (signal.session, "id"),
        (signal.context, "threadId"),
        (signal.params, "threadId"),
    )
    for source, key in sources:
        session_id = text_or_none(source.get(key)) if isinstance(source, Mapping) else None
        if session_id is not None:
            return session_id
    return None


def call_of_signal(signal: AppServerSignal) -> IncomingCall | None:
    """Return the call a signal carries, or None when it carries none."""
    if signal.event_type != TOOL_CALL_EVENT or not isinstance(signal.params, Mapping):
        return None
    return call_of(signal.params, signal.request_id, address(signal))


def rows_of(answer: object) -> list[JsonObject]:
    """Return the rows of a `sessions.tool_calls` answer; empty for deleted and system sessions.

    Raises:
        ValueError: The answer has no list of data.
    """
    if isinstance(answer, Mapping):
        if answer.get("status") == "deleted":
            return []
        if answer.get("status") == "error" and answer.get("code") == "system_session":
            return []
        data = answer.get("data")
        if isinstance(data, list):
            return [dict(row) for row in data if isinstance(row, Mapping)]
    raise ValueError("sessions.tool_calls response missing data list")


def call_of(params: Mapping[str, Any], request_id: object, thread: str | None = None) -> IncomingCall | None:
    """Return the call of a pending row or of the params of a signal, or None when it names no tool."""
    tool = text_or_none(params.get("tool"))
    if tool is None:
        return None
    return IncomingCall(
        tool,
        params.get("arguments"),
        text_or_none(params.get("namespace")),
        request_text(request_id),
        text_or_none(params.get("callId")),
        text_or_none(params.get("threadId")) or thread,
        text_or_none(params.get("turnId")),
    )


@dataclass(frozen=True, slots=True)
class RemoteSkillDispatch:
    """The result of one call.

    Attributes:
        handled: Whether the call found its skill, the handler answered, and the answer was accepted.
        tool: The tool's name, `namespace.name` when the call came with a namespace.
        arguments: What the model gave.
        request_id: The handle of the answer, as text; None when there is none.
        call_id: The model's id of the call.
        response_payload: `{"contentItems": [...], "success": bool}`.
        result: What the handler returned; None for replays and failures.
        error: What went wrong, or None.
        submission_status: The server's word for the answer, or `error`, `exception`, `malformed`, `no_request_id`,
            `local_duplicate`; None when nothing was to be submitted.
        submission_code: The server's code beside it.
        submission_attempts: How often the answer was sent.
        submission_idempotent: Whether the answer had been given before.
        replayed: The answer was stored; the handler did not run for this delivery.
        late: A result came after the model had got another answer.
        call_key: The call's identity in the journal, or None.
    """

    handled: bool
    tool: str
    arguments: Any = None
    request_id: str | None = None
    call_id: str | None = None
    response_payload: JsonObject = field(default_factory=dict)
    result: Any = None
    error: str | None = None
    submission_status: str | None = None
    submission_code: str | None = None
    submission_attempts: int = 0
    submission_idempotent: bool = False
    replayed: bool = False
    late: bool = False
    call_key: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteSkillSendResult:
    """The result of `send_and_handle`.

    Attributes:
        session_id: The session.
        turn_id: The turn the request started or steered.
        accepted: The answer to the message, as the client gave it.
        detail: The last `sessions.get` answer, or None when the client has none.
        status: The terminal status, as the client gave it.
        assistant_reply: The turn's last complete assistant entry of the transcript, or None.
        dispatches: The result of each call, in order.
    """

    session_id: str
    turn_id: str
    accepted: JsonObject
    detail: JsonObject | None
    status: str
    assistant_reply: JsonObject | None = None
    dispatches: tuple[RemoteSkillDispatch, ...] = ()


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One answered call, as passed to the listeners of a session."""

    turn_id: str | None
    dispatch: RemoteSkillDispatch
    drained: bool


KEPT_PER_SESSION: Final = 1024
"""Receipts kept in memory per session; the oldest go first."""


@dataclass(frozen=True, slots=True)
class ReceiptSkillEntry:
    """A skill of a bundle that was published: its ref, and SHA-256 of the text the model could read."""

    ref: str
    body_digest: str


@dataclass(frozen=True, slots=True)
class ReceiptCallEntry:
    """One call of the turn, as the journal has it; `response_digest` is None while there is no answer."""

    key: str
    tool: str
    state: CallState
    response_digest: str | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The catalog and skills of one turn, and its calls.

    Attributes:
        session_id: The thread.
        turn_id: The turn.
        catalog_digest: Digest of the wire tools in force.
        context_digest: Digest of the catalog's text as the model had it, when it travels as context.
        strategy: How the catalog reached the model: `native`, `reload`, `dispatcher`, `successor`, `resume`.
        visible_tools: Qualified names the model could call, sorted.
        skills: Published skills, sorted by ref.
        calls: The turn's calls, oldest first.
        strategy_asked: The client's option `strategy` when the turn began. It differs from `strategy` when it is `auto`, or
            when it is not proven of the server and therefore not used.
    """

    session_id: str
    turn_id: str
    catalog_digest: str | None = None
    context_digest: str | None = None
    strategy: str | None = None
    visible_tools: tuple[str, ...] = ()
    skills: tuple[ReceiptSkillEntry, ...] = ()
    calls: tuple[ReceiptCallEntry, ...] = ()
    strategy_asked: str | None = None

    def to_json(self) -> JsonObject:
        """Return the receipt as JSON, with lists for its tuples."""
        document: JsonObject = json.loads(json.dumps(asdict(self)))
        return document


@runtime_checkable
class ReceiptJournal(Protocol):
    """A journal that keeps receipts beside the calls, as `SqlJournal` does."""

    def keep_receipt(self, session_id: str, turn_id: str, body: str) -> None:
        """Keep the receipt of a turn; keeping another replaces it."""
        ...

    def receipts(self, session_id: str, turn_id: str | None = None) -> Sequence[str]:
        """Return the receipts kept of a session, or of one turn, oldest first."""
        ...


class MemoryReceipts:
    """Keeps the receipts of this process, newest `KEPT_PER_SESSION` per session; safe from any thread."""

    def __init__(self) -> None:
        self._bodies: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def keep_receipt(self, session_id: str, turn_id: str, body: str) -> None:
        """As `ReceiptJournal.keep_receipt`."""
        with self._lock:
            bodies = self._bodies.setdefault(session_id, {})
            bodies[turn_id] = body
            if len(bodies) > KEPT_PER_SESSION:
                del bodies[next(iter(bodies))]

    def receipts(self, session_id: str, turn_id: str | None = None) -> Sequence[str]:
        """As `ReceiptJournal.receipts`."""
        with self._lock:
            bodies = dict(self._bodies.get(session_id, {}))
        return [body for turn, body in bodies.items() if turn_id in (None, turn)]


class Receipts:
    """The receipts of the sessions that share a journal; blocks as the journal does.

    A receipt is written when its turn starts. The calls are not in it: they are read from the journal when the receipt
    is, so that a late answer shows. Receipts outlive the process if the journal does.

    Args:
        journal: Where the calls are; when it cannot keep receipts, they stay in memory.
    """

    def __init__(self, journal: CallJournal) -> None:
        self._journal = journal
        self._store: ReceiptJournal = journal if isinstance(journal, ReceiptJournal) else MemoryReceipts()

    def note(self, receipt: Receipt) -> None:
        """Store the receipt of a turn, replacing an earlier one. Its calls are ignored."""
        body = receipt.to_json()
        del body["calls"]
        self._store.keep_receipt(receipt.session_id, receipt.turn_id, json.dumps(body, sort_keys=True))

    def receipt(self, session_id: str, turn_id: str) -> Receipt | None:
        """Return the receipt of a turn with its calls; None when neither the turn nor a call of it is known."""
        bodies = self._store.receipts(session_id, turn_id)
        calls = self._journal.calls(session_id, turn_id)
        if not bodies and not calls:
            return None
        return _receipt(json.loads(bodies[-1]) if bodies else {}, session_id, turn_id, calls)

    def receipts(self, session_id: str) -> list[Receipt]:
        """Return the receipts of a session, oldest first; turns known by their calls alone come after them."""
        bodies = [json.loads(body) for body in self._store.receipts(session_id)]
        calls: dict[str, list[JournalRow]] = {}
        for row in self._journal.calls(session_id):
            if row.turn_id is not None:
                calls.setdefault(row.turn_id, []).append(row)
        with_bodies = [_receipt(body, session_id, body["turn_id"], calls.pop(body["turn_id"], ())) for body in bodies]
        return [*with_bodies, *(_receipt({}, session_id, turn, rows) for turn, rows in calls.items())]


def response_digest(row: JournalRow) -> str | None:
    """Return SHA-256, in hex, of the payload a call was answered with; None while it has no answer."""
    if row.answer is None:
        return None
    text = json.dumps(row.answer.payload, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _receipt(body: Mapping[str, Any], session_id: str, turn_id: str, calls: Sequence[JournalRow]) -> Receipt:
    return Receipt(
        session_id,
        turn_id,
        body.get("catalog_digest"),
        body.get("context_digest"),
        body.get("strategy"),
        tuple(body.get("visible_tools", ())),
        tuple(ReceiptSkillEntry(skill["ref"], skill["body_digest"]) for skill in body.get("skills", ())),
        tuple(
            ReceiptCallEntry(row.key, qualify(row.namespace, row.tool), row.state, response_digest(row))
            for row in calls
        ),
        body.get("strategy_asked"),
    )
