"""Types shared by all parts of remote skills: errors, the server's profile, and the protocols of backend and journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Literal, Protocol, runtime_checkable

from kdskills.errors import CallerMustAct

JsonObject = dict[str, Any]  # a JSON object of the wire; only this room's edges pass it on

BUILT_IN_TOOLS = frozenset(
    {
        *("apply_patch", "create_goal", "exec", "exec_command", "get_goal", "request_user_input", "tool_search"),
        *("update_goal", "view_image", "wait", "web_search", "write_stdin"),
    }
)
"""Names the server accepts for a tool and then silently drops."""


class CatalogError(CallerMustAct, ValueError, code="catalog_invalid"):
    """A name, schema or catalog the server would refuse, drop or shadow; `details` has `rule` and `suggestion`."""


class CatalogNotApplied(CallerMustAct, code="catalog_not_applied"):
    """`send_prepared` found the catalog `deferred` or `failed`; nothing was sent. `report` says why."""

    def __init__(self, report: JsonObject) -> None:
        reason = report.get("reason")
        super().__init__(f"the catalog was not applied: {report.get('status')} ({reason})", report=report)
        self.report = report


class CatalogBusy(CatalogNotApplied, code="catalog_busy"):
    """As `CatalogNotApplied`, because a turn is running."""


class WaitTimeoutError(CallerMustAct, TimeoutError, code="wait_timeout"):
    """A turn did not end, or its reply did not come, within the given time."""


class AppServerError(CallerMustAct, code="app_server_error"):
    """The app-server answered a request with an error; `details` has `method`, `rpc_code`, `data`."""


class AppServerGone(CallerMustAct, code="app_server_gone"):
    """The connection to the app-server is closed, or it could not be opened."""


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """Facts about a server: lint rules, and what the probe proved."""

    name: str = "unknown"  # `0.169`, `0.105` or what the user agent says
    user_agent: str = ""  # the server's own words
    built_ins: frozenset[str] = BUILT_IN_TOOLS  # tool names it drops
    native: bool = False  # a resume with `dynamicTools` reaches the model
    reload: bool = False  # a guarded reload reaches the model and survives a restart
    namespaces: bool = True  # namespace tools are understood; without them names are flattened to `ns__name`
    materialise: tuple[str, ...] = ()  # ways that write the rollout file, best first: `name_set inject_items bootstrap`
    rewind: Literal["revert", "rollback"] | None = None
    context: bool = False  # `additionalContext` reaches the model
    extra_roots: bool = False  # `skills/extraRoots/set` works
    unsubscribe: bool = True  # `thread/unsubscribe` exists
    probed: bool = False  # whether these facts were proven by a probe

    @classmethod
    def codex(cls) -> ServerProfile:
        """Return the lint rules of Codex, with nothing proven."""
        return cls(name="codex")


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """The catalog a session wants in force."""

    session_id: str
    tools: Sequence[JsonObject]  # sorted, on the wire: `name description inputSchema`, perhaps `namespace deferLoading`
    instruction_text: str  # the catalog as text, for strategies that send it as context
    wait: bool  # for an idle thread, as `prepare_catalog` and `wait_catalog` do
    timeout_s: float  # of the whole change


@dataclass(frozen=True, slots=True)
class CatalogContext:
    """How the catalog travels with the next message."""

    send: JsonObject  # further keywords of `sessions.send_message`: `additional_context` with the catalog's text, or nothing
    inject: bool  # the server has no context channel: the text goes in front of the request (`inject_request`)
    current: bool  # whether the catalog in force at the server is the one wanted


@runtime_checkable
class CatalogBackend(Protocol):
    """Applies catalog changes, at `client.catalog`. The async facade's backend has `apply` and `forget` as coroutines."""

    def apply(self, change: CatalogChange) -> Any:
        """Apply the change; return its report (see `docs/reference/remote-skills.md`), also for `deferred` and `failed`."""

    def context_for(self, session_id: str, tools: Sequence[JsonObject], instruction_text: str) -> Any:
        """Return the `CatalogContext` of the next `send_message`."""

    def forget(self, session_id: str) -> Any:
        """Delete everything stored about a closed session."""


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """Identifies one call; strong when thread, turn and call are known."""

    session_id: str
    tool: str
    arguments_sha256: str
    thread_id: str | None = None
    turn_id: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    request_id: str | None = None
    epoch: str = ""  # of the facade, so that a request id of an earlier run is not taken for the same call

    @property
    def label(self) -> str:
        """The tool's name in messages: `namespace.tool`, or the tool alone."""
        return f"{self.namespace}.{self.tool}" if self.namespace else self.tool

    @property
    def strong(self) -> bool:
        """Whether this names one call for good."""
        return bool(self.thread_id and self.turn_id and self.call_id)


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """What a handler learns of its call through a parameter annotated `RemoteCall`; ids may be unknown."""

    key: str  # the call's identity; good as an idempotency key of effects elsewhere
    thread_id: str | None = None
    turn_id: str | None = None
    call_id: str | None = None  # the model's
    deadline: float | None = None  # when the answer is given up, in seconds of `time.time()`; None for never
    stop: Event = field(default_factory=Event, repr=False, compare=False)  # set when nobody needs the result any more

    @property
    def cancelled(self) -> bool:
        """Whether the result is not needed any more; long handlers should check it."""
        return self.stop.is_set()


CallState = Literal["claimed", "running", "overdue", "unknown", "done"]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as a journal stores it, so that a replay is identical."""

    payload: JsonObject  # `{"contentItems": [...], "success": bool}`, fit for the wire
    handled: bool  # whether it comes from a handler
    error: str | None = None  # its text if it reports a failure


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One call in a journal; times are seconds since 1970 by the journal's own clock."""

    key: str  # the call's identity
    state: CallState
    owner: str  # the attempt that may move it on
    idempotent: bool  # whether it may run again when its owner died while it ran
    lease_until: float  # when its owner counts as dead unless it renews
    alive: bool  # whether that moment was still to come when the row was read
    session_id: str = ""
    thread_id: str | None = None
    turn_id: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    tool: str = ""
    answer: StoredAnswer | None = None  # for the model
    late: StoredAnswer | None = None  # a result that came after the model had got another answer
    told: bool = False  # whether the model is known to have seen `answer`
    created_at: float = 0.0  # when the call was first claimed


@dataclass(frozen=True, slots=True)
class CallClaim:
    """The result of claiming a call; with *mine* the caller must now run or refuse it."""

    row: JournalRow
    mine: bool


class CallJournal(Protocol):
    """Stores the state and answer of each call, so that effects happen once. Every method is one transaction, and blocks.

    Implementations: `SqlJournal` (SQLite or PostgreSQL) and `MemoryJournal`. An *owner* is one attempt of one worker: a
    second attempt has another name, so that a late result of the first one changes nothing.
    """

    shared: bool
    """Whether other processes see the same rows: only then are calls that this worker cannot run left to them for a while."""

    def claim(self, key: str, identity: CallIdentity, owner: str, lease_s: float, *, idempotent: bool) -> CallClaim:
        """Insert a `claimed` row, or take over a dead owner's by compare-and-swap, or return the row unchanged.

        A dead owner's `running` row may be taken only when the row and this caller are *idempotent*.
        """

    def start(self, key: str, owner: str) -> bool:
        """`claimed` to `running`; return False when another owner has the row."""

    def finish(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """Commit the answer: `claimed` or `running` to `done`; after `overdue` or `unknown` it becomes the late one.

        Returns the row afterwards, even if another owner changed it; None when it was purged.
        """

    def overdue(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """Commit the answer given when a deadline passed: `claimed` or `running` to `overdue`."""

    def lose(self, key: str, owner: str, answer: StoredAnswer, *, dead: bool = True) -> JournalRow | None:
        """Commit an unknown outcome: `running` to `unknown`, if *owner*'s lease expired, or by *owner* itself if not *dead*."""

    def get(self, key: str) -> JournalRow | None:
        """Return the row, or None."""

    def renew(self, keys: Mapping[str, str], lease_s: float) -> None:
        """Renew the leases of these rows, by key and owner."""

    def running(self, session_id: str) -> Sequence[JournalRow]:
        """Return the rows of this session that are claimed or running under a live lease."""

    def calls(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """Return the rows of this session, or of one turn, oldest first."""

    def outcomes(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """Return the rows of other turns with an answer, a late answer or a loss that the model was not told about."""

    def tell(self, keys: Sequence[str]) -> None:
        """Record that the model was told about these rows of `outcomes`."""

    def settle(self, session_id: str, turn_id: str) -> None:
        """Record that a turn completed, so the model has seen every answer in it."""

    def close(self) -> None:
        """Close the connections."""
