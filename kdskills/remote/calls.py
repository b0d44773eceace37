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
    """One event of the app-server's stream; `app_server.request.item.tool.call` is a call of a tool."""

    event_type: str
    method: str = ""  # of the wire
    signal_type: str = ""  # `request`, `notification` or what the client says
    received_at: Any = None  # as the client writes times
    context: Mapping[str, Any] = field(default_factory=dict)  # what the client knows: perhaps `threadId`, `turnId`
    params: Mapping[str, Any] = field(default_factory=dict)  # the message's own
    session: Mapping[str, Any] | None = None  # the session it belongs to, with `id`
    request_id: str | int | None = None  # the handle an answer needs


def text_or_none(value: object) -> str | None:
    """Return non-blank text stripped; None for anything else."""
    return (value.strip() or None) if isinstance(value, str) else None


def request_text(request_id: object) -> str | None:
    """Return a request id as the text an answer is sent under: 0 is one, a bool is none. None when there is none."""
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
    ids = (text_or_none(source.get(key)) for source, key in sources if isinstance(source, Mapping))
    return next(filter(None, ids), None)


def rows_of(answer: object) -> list[JsonObject]:
    """Return the rows of a `sessions.tool_calls` answer; none for deleted and system sessions. Raises ValueError."""
    if isinstance(answer, Mapping):
        status, data = answer.get("status"), answer.get("data")
        if status == "deleted" or (status == "error" and answer.get("code") == "system_session"):
            return []
        if isinstance(data, list):
            return [dict(row) for row in data if isinstance(row, Mapping)]
    raise ValueError("sessions.tool_calls response missing data list")


@dataclass(frozen=True, slots=True)
class RemoteSkillDispatch:
    """The result of one call; what `submission_status` says is told in `docs/reference/remote-skills.md`."""

    handled: bool  # the call found its skill, the handler answered, and the answer was accepted
    tool: str  # `namespace.name` when the call came with a namespace
    arguments: Any = None  # what the model gave
    request_id: str | None = None  # the handle of the answer, as text
    call_id: str | None = None  # the model's id of the call
    response_payload: JsonObject = field(default_factory=dict)  # `{"contentItems": [...], "success": bool}`
    result: Any = None  # what the handler returned; None for replays and failures
    error: str | None = None
    submission_status: str | None = None
    submission_code: str | None = None  # the server's code beside its word
    submission_attempts: int = 0
    submission_idempotent: bool = False  # the answer had been given before
    replayed: bool = False  # the answer was stored; the handler did not run for this delivery
    late: bool = False  # a result came after the model had got another answer
    call_key: str | None = None  # the call's identity in the journal


@dataclass(frozen=True, slots=True)
class RemoteSkillSendResult:
    """The result of `send_and_handle`."""

    session_id: str
    turn_id: str  # the turn the request started or steered
    accepted: JsonObject  # the answer to the message, as the client gave it
    detail: JsonObject | None  # the last `sessions.get` answer, or None when the client has none
    status: str  # the terminal one, as the client gave it
    assistant_reply: JsonObject | None = None  # the turn's last complete assistant entry of the transcript
    dispatches: tuple[RemoteSkillDispatch, ...] = ()  # in order


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One answered call, as passed to the listeners of a session."""

    turn_id: str | None
    dispatch: RemoteSkillDispatch
    drained: bool


KEPT_PER_SESSION: Final = 1024  # receipts kept in memory per session; the oldest go first


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
    """The catalog and skills of one turn, and its calls."""

    session_id: str
    turn_id: str
    catalog_digest: str | None = None  # of the wire tools in force
    context_digest: str | None = None  # of the catalog's text as the model had it, when it travels as context
    strategy: str | None = None  # `native`, `reload`, `dispatcher`, `successor` or `resume`
    visible_tools: tuple[str, ...] = ()  # qualified names the model could call, sorted
    skills: tuple[ReceiptSkillEntry, ...] = ()  # published ones, sorted by ref
    calls: tuple[ReceiptCallEntry, ...] = ()  # oldest first
    strategy_asked: str | None = None  # the client's option then; not used where it is not proven of the server

    def to_json(self) -> JsonObject:
        """Return the receipt as JSON, with lists for its tuples."""
        document: JsonObject = json.loads(json.dumps(asdict(self)))
        return document


@runtime_checkable
class ReceiptJournal(Protocol):
    """A journal that keeps receipts beside the calls, as `SqlJournal` does."""

    def keep_receipt(self, session_id: str, turn_id: str, body: str) -> None:
        """Keep the receipt of a turn; keeping another replaces it."""

    def receipts(self, session_id: str, turn_id: str | None = None) -> Sequence[str]:
        """Return the receipts kept of a session, or of one turn, oldest first."""


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
    """The receipts of the sessions that share a journal, in it, or in memory where it keeps none; blocks as it does.

    A receipt is written when its turn starts. Its calls are read from the journal when it is, so that a late answer shows.
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


def _receipt(body: Mapping[str, Any], session_id: str, turn_id: str, rows: Sequence[JournalRow]) -> Receipt:
    calls = []
    for row in rows:
        answer = None if row.answer is None else json.dumps(row.answer.payload, sort_keys=True, separators=(",", ":"))
        digest = None if answer is None else hashlib.sha256(answer.encode()).hexdigest()
        calls.append(ReceiptCallEntry(row.key, qualify(row.namespace, row.tool), row.state, digest))
    return Receipt(
        session_id,
        turn_id,
        body.get("catalog_digest"),
        body.get("context_digest"),
        body.get("strategy"),
        visible_tools=tuple(body.get("visible_tools", ())),
        skills=tuple(ReceiptSkillEntry(skill["ref"], skill["body_digest"]) for skill in body.get("skills", ())),
        calls=tuple(calls),
        strategy_asked=body.get("strategy_asked"),
    )
