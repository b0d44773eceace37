"""The state of one session, shared by all its handles: registry, last reports, listeners, and the model's catalog.

The catalog is brought up to date with the registry with and without a backend.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdskills.errors import Diagnostic
from kdskills.remote.names import check_name, clean_name, qualify
from kdskills.remote.ports import (
    CatalogBackend,
    CatalogBusy,
    CatalogChange,
    CatalogError,
    CatalogNotApplied,
    JsonObject,
)
from kdskills.remote.registry import Layer, RemoteSkill, RemoteSkillRegistry, instruction_text, unchanged, wire_tools
from kdskills.remote.schemas import derive

if TYPE_CHECKING:
    from kdskills.remote.core import Driver
    from kdskills.remote.facade import FacadeCore
    from kdskills.remote.receipts import ReceiptSkillEntry


DRAFT = "draft"


class SessionCore:
    """The state behind every handle of one session.

    Args:
        owner: The facade's core.
        session_id: The server's thread id, or `draft`.
        draft: Whether this collects skills for a session that does not exist yet.
    """

    def __init__(self, owner: FacadeCore, session_id: str, *, draft: bool = False) -> None:
        self.owner = owner
        self.session_id = session_id
        self.draft = draft
        self.registry = RemoteSkillRegistry(owner.profile)
        self.last_catalog: JsonObject | None = None
        self.pushed: list[JsonObject] | None = None
        self.pushed_layers: list[Layer] = []
        self.active: tuple[str, str] | None = None  # the turn last started here, and on which connection
        self.published: tuple[ReceiptSkillEntry, ...] = ()
        self.published_tools: Mapping[str, RemoteSkill] = {}  # what `publish` registered, by qualified name
        self.view_digest: str | None = None  # of the view that is published here
        self.roots_digest: str | None = None  # the same, where it is published as roots
        self.roots_folder: str | None = None
        self._listeners: tuple[Callable[[Any], None], ...] = ()

    @property
    def driver(self) -> Driver:
        """How to wait and call: on an event loop, or blocking."""
        return self.owner.driver

    @property
    def backend(self) -> CatalogBackend | None:
        """The client's catalog backend, or None."""
        return self.owner.backend

    def live(self) -> None:
        """Refuse a draft.

        Raises:
            RuntimeError: There is no session yet.
        """
        if self.draft:
            raise RuntimeError("a draft session only collects skills; the session exists once create_session returned")

    def note(self, code: str, message: str, *, fix: str | None = None) -> None:
        """Add a warning about this session to the diagnostics."""
        self.registry.note(Diagnostic(code, "warning", message, ref=self.session_id, fix=fix))

    def tools(self) -> list[JsonObject]:
        """Return the wire tools of the visible skills."""
        return wire_tools(self.registry.skills())

    def text(self) -> str:
        """Return the instruction text of the visible skills."""
        return instruction_text(self.registry.skills())

    def register(self, name: str, handler: Callable[..., Any], options: Mapping[str, Any]) -> RemoteSkill:
        """Register the base skill of a name."""
        return self.registry.register(self.build_skill(name, handler, **options))

    def open_window(self, name: str, handler: Callable[..., Any], options: Mapping[str, Any]) -> Layer:
        """Open a window: its skill hides the base until the window is closed."""
        return self.registry.open(self.build_skill(name, handler, **options))

    def adopt(self, draft: SessionCore, skills: Sequence[RemoteSkill]) -> None:
        """Take over the skills of a draft, and the records of those that were published there."""
        for skill in skills:
            self.registry.register(skill)
        if draft.view_digest is not None:
            self.published, self.published_tools = draft.published, draft.published_tools
            self.view_digest = draft.view_digest

    @contextmanager
    def listening(self, hear: Callable[[Any], None]) -> Iterator[None]:
        """Call *hear* with every call that is answered in the body of the `with`."""
        self._listeners = (*self._listeners, hear)
        try:
            yield
        finally:
            self._listeners = tuple(listener for listener in self._listeners if listener is not hear)

    def listeners(self) -> tuple[Callable[[Any], None], ...]:
        """Return the present listeners."""
        return self._listeners

    @property
    def active_turn(self) -> str | None:
        """The running turn as far as this session knows; a turn of an earlier connection counts as ended."""
        return self.active[0] if self.active is not None and self.active[1] == self.owner.connection else None

    def unpublish(self) -> None:
        """Forget the published skills of bundles, whose tools were removed."""
        self.published, self.published_tools = (), {}
        self.view_digest = None

    def remember_pushed(self, tools: list[JsonObject], layers: Sequence[Layer]) -> None:
        """Remember the catalog that was pushed to the model."""
        self.pushed = copy.deepcopy(tools)
        self.pushed_layers = list(layers)

    def build_skill(
        self,
        name: str,
        handler: Callable[..., Any],
        *,
        description: str | None = None,
        input_schema: JsonObject | None = None,
        output_schema: JsonObject | None = None,
        namespace: str | None = None,
        deadline_seconds: float | None = 120.0,
        idempotent: bool = False,
        defer_loading: bool = False,
    ) -> RemoteSkill:
        """Return the skill these parameters of `register` describe, linted.

        Raises:
            ValueError: The name is blank, or the deadline is no positive number.
            CatalogError: The server would refuse, drop or shadow it, or a schema is invalid.
            TypeError: The handler cannot be called.
        """
        name = clean_name(name)
        if not callable(handler):
            raise TypeError(f"the handler of `{name}` cannot be called: it is a {type(handler).__name__}")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds of `{name}` must be positive or None, got {deadline_seconds!r}")
        namespace = namespace.strip() if namespace is not None else None
        check_name(namespace, name, self.registry.profile, defer_loading=defer_loading)
        derived = derive(name, handler, input_schema, output_schema)
        model_text = description if description is not None and description.strip() else derived.description
        return RemoteSkill(
            name,
            handler,
            _sendable(name, model_text or f"Remote skill {name}"),
            derived.input_schema,
            derived.output_schema,
            namespace,
            deadline_seconds,
            idempotent,
            defer_loading,
            derived.output_description,
            derived.coerce or unchanged,
            derived.call_parameter,
        )


def _sendable(name: str, description: str) -> str:
    try:
        description.encode()
    except UnicodeEncodeError as error:
        raise CatalogError(
            f"the description of `{name}` cannot be sent: {error.reason} at character {error.start}",
            rule="description_text",
            suggestion="describe it in characters that exist",
        ) from error
    return description


BOOTSTRAP_TEXT = "Reply with the single word: ready"
NO_ROLLOUT = "no rollout found"
RESUME_TRIES = 3
RETRY_SECONDS = 0.05
BUSY = frozenset({"turn_active", "queued_turns"})
UNAPPLIED = frozenset({"deferred", "failed"})


async def sync_runtime(core: SessionCore, timeout_seconds: float) -> JsonObject:
    """Make the change now, or report why it was not made."""
    return await _change(core, timeout_seconds, wait=False)


async def prepare_catalog(core: SessionCore, timeout_seconds: float) -> JsonObject:
    """Make the change once the thread is idle; where no rollout file exists yet, bootstrap it."""
    return await _change(core, timeout_seconds, wait=True)


async def wait_catalog(core: SessionCore, timeout_seconds: float) -> JsonObject:
    """Wait until a deferred change is applied; without one, the same as `prepare_catalog` for what is not yet pushed."""
    core.live()
    settled = core.last_catalog is not None and core.last_catalog.get("status") in {"ok", "noop"}
    if core.backend is None and settled and core.pushed == core.tools():
        return copy.deepcopy(core.last_catalog or {})
    return await _change(core, timeout_seconds, wait=True)


def refuse_unapplied(report: JsonObject) -> None:
    """Raise for a report that leaves the old catalog in force.

    Raises:
        CatalogBusy: A turn is running.
        CatalogNotApplied: Any other `deferred` or `failed`.
    """
    if report.get("status") in UNAPPLIED:
        raise CatalogBusy(report) if report.get("reason") in BUSY else CatalogNotApplied(report)


async def leave_window(core: SessionCore, layer: Layer) -> None:
    """Remove a window's layer and update the catalog if it contained the layer; failures become diagnostics."""
    was_pushed = any(pushed is layer for pushed in core.pushed_layers)
    if not core.registry.close(layer) or not was_pushed or core.draft:
        return
    try:
        report = await sync_runtime(core, 10.0)
    except Exception as error:  # noqa: BLE001 - the body's own error must not be hidden by this one
        core.last_catalog = {
            "status": "failed",
            "sessionId": core.session_id,
            "reason": "rejected",
            "error": str(error) or type(error).__name__,
        }
        report = core.last_catalog
    if report.get("status") == "failed":
        core.note(
            "catalog_sync_failed",
            f"the catalog was not changed when `{layer.skill.qualified_name}` was left: "
            f"{report.get('error') or report.get('reason')}",
            fix="call prepare_catalog",
        )


async def _change(core: SessionCore, timeout_seconds: float, *, wait: bool) -> JsonObject:
    core.live()
    layers = core.registry.layers()
    tools = wire_tools(layer.skill for layer in layers)
    if not tools and core.pushed is None:
        report: JsonObject = {"status": "noop", "sessionId": core.session_id}
        core.last_catalog = dict(report)
        return report
    if core.backend is not None:
        report = await _by_backend(core, core.backend, tools, timeout_seconds, wait=wait)
    else:
        report = await _by_resume(core, tools, timeout_seconds, prepare=wait)
    if report.get("status") in {"ok", "noop"} or (report.get("status") == "deferred" and report.get("pending")):
        core.remember_pushed(tools, layers)
    core.last_catalog = copy.deepcopy(report)
    successor = report.get("new_session_id")
    if isinstance(successor, str) and core.backend is not None:
        core.owner.move(core, successor)
    return report


async def _by_backend(
    core: SessionCore, backend: CatalogBackend, tools: list[JsonObject], timeout_seconds: float, *, wait: bool
) -> JsonObject:
    change = CatalogChange(core.session_id, tools, core.text(), wait=wait, timeout_s=timeout_seconds)
    report = await core.driver.call(backend.apply, change)
    return dict(report)


async def _by_resume(
    core: SessionCore, tools: list[JsonObject], timeout_seconds: float, *, prepare: bool
) -> JsonObject:
    began = time.monotonic()
    first = _Bootstrap(core, timeout_seconds)
    if prepare:
        answer = await _resume_prepared(core, tools, first)
    else:
        answer = await _resume(core, tools)
    before, after = _tools_by_name(core.pushed or ()), _tools_by_name(tools)
    report = {
        **(dict(answer) if isinstance(answer, Mapping) else {}),
        "status": "ok",
        "sessionId": core.session_id,
        "strategy": "resume",
        "digest": digest(tools),
        "verified": False,
        "added": sorted(name for name, tool in after.items() if before.get(name) != tool),
        "removed": sorted(before.keys() - after.keys()),
        "duration_ms": round((time.monotonic() - began) * 1000, 3),
        "materialized_now": first.done,
    }
    status = answer.get("status") if isinstance(answer, Mapping) else None
    if status not in {None, "ok"}:
        words = answer.get("message") or answer.get("error")
        fault = f"{status}: {words}" if words else str(status)
        report |= {"status": "failed", "reason": "client_refused", "error": fault}
    return report


def digest(tools: Sequence[JsonObject]) -> str:
    """Return 16 hex digits of SHA-256 over the sorted wire tools as canonical JSON."""
    text = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def wire_names(tools: Sequence[JsonObject]) -> list[str]:
    """Return the qualified names of wire tools, sorted."""
    return sorted(_tools_by_name(tools))


def _tools_by_name(tools: Sequence[JsonObject]) -> dict[str, JsonObject]:
    return {qualify(tool.get("namespace"), str(tool.get("name"))): tool for tool in tools}


async def _resume(core: SessionCore, tools: list[JsonObject]) -> Any:
    sessions = core.owner.client.sessions
    return await core.driver.call(sessions.resume, session_id=core.session_id, dynamic_tools=copy.deepcopy(tools))


async def _resume_prepared(core: SessionCore, tools: list[JsonObject], first: _Bootstrap) -> Any:
    if await _unmaterialized(core):
        await first.run()
    for attempt in range(1, RESUME_TRIES + 1):
        try:
            return await _resume(core, tools)
        except Exception as error:
            if attempt == RESUME_TRIES or not says_no_rollout(error):
                raise
            if first.done:
                await core.driver.sleep(RETRY_SECONDS * attempt)
            await first.run()
    raise AssertionError("the last try returns or raises")


async def _unmaterialized(core: SessionCore) -> bool:
    get = getattr(core.owner.client.sessions, "get", None)
    if not callable(get):
        return False
    try:
        answer = await core.driver.call(get, session_id=core.session_id)
    except Exception as error:  # noqa: BLE001 - the resume that follows meets the same error and tells of it
        core.note("session_unreadable", f"sessions.get failed before the catalog was prepared: {error}")
        return False
    session = answer.get("session") if isinstance(answer, Mapping) else None
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


@dataclass(slots=True)
class _Bootstrap:
    """A one-line turn that makes the server write the rollout file and is rolled back; once per `prepare_catalog`."""

    core: SessionCore
    timeout_seconds: float
    done: bool = False

    async def run(self) -> None:
        """Run the turn unless it ran before."""
        if self.done:
            return
        self.done = True
        client, driver, session_id = self.core.owner.client, self.core.driver, self.core.session_id
        answer = await driver.call(client.sessions.send_message, session_id=session_id, text=BOOTSTRAP_TEXT)
        turn_id = answer.get("turnId") if isinstance(answer, Mapping) else None
        try:
            if turn_id:
                await driver.call(
                    client.wait.assistant_reply,
                    session_id=session_id,
                    turn_id=turn_id,
                    timeout_seconds=self.timeout_seconds,
                    interval_seconds=0.25,
                )
        finally:
            await self._take_back()

    async def _take_back(self) -> None:
        sessions = self.core.owner.client.sessions
        try:
            await self.core.driver.call(sessions.rollback, session_id=self.core.session_id, num_turns=1)
        except Exception as error:  # noqa: BLE001 - a turn that stays in the history harms nothing
            self.core.note("bootstrap_not_taken_back", f"the bootstrap message stays in the history: {error}")
