"""Brings the model's catalog up to date with the registry, with and without a backend."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdskills.remote.core_session import SessionCore
from kdskills.remote.names import qualify
from kdskills.remote.ports import CatalogBackend, CatalogBusy, CatalogChange, CatalogNotApplied, JsonObject
from kdskills.remote.registry import Layer
from kdskills.remote.text import wire_tools

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
