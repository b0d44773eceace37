"""One change of one thread's catalog: the strategy that is chosen, how it is carried out, and its report.

The strongest strategy is the guarded reload: a thread is closed, its file's first line replaced, and the thread resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from kdskills.remote.catalog import rollout
from kdskills.remote.names import DISPATCHER_TOOL, canonical, check_name, check_neighbours, flat_tools, wire_tools
from kdskills.remote.ports import AppServerError, JsonObject, ServerProfile

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer


Reason = Literal[
    "turn_active",
    "queued_turns",
    "held_open",
    "changed_underneath",
    "no_strategy",
    "ephemeral",
    "unknown_format",
    "not_local",
    "rejected",
    "client_refused",
]


class NotApplied(Exception):
    """The old catalog stays in force; callers get a report of *reason* and *error*. *goes_on*: still under way."""

    def __init__(self, reason: Reason, error: str = "", *, goes_on: bool = False) -> None:
        super().__init__(f"{reason}: {error}" if error else reason)
        self.reason = reason
        self.error = error
        self.goes_on = goes_on


_LOG = logging.getLogger("kdskills.remote")

T = TypeVar("T")
CLOSE_SECONDS = 5.0
_DEFAULT_NAME = "kdskills"
_NOTE = "Remote skills of this conversation are managed by kdskills."
_NO_FILE = "the thread has no rollout file on this machine"


class Reload:
    """One guarded reload of one thread, to the catalog *wire* as `thread/start` takes it."""

    def __init__(self, changes: Changes, session_id: str, wire: list[JsonObject]) -> None:
        self._changes = changes
        self._server = changes.server
        self._id = session_id
        self._thread = changes.server.threads.get(session_id)
        self._wire = wire
        self._home = Path(self._server.codex_home) if self._server.codex_home is not None else None
        self._has_pointers = False
        self.materialized_now = False

    async def run(self) -> bool:
        """Make the change; return False when the file had this catalog already. Raises NotApplied."""
        info = await self._reloadable()
        path = await self._rollout_file(info)
        self._has_pointers = info.get("historyMode") == "paginated" and bool(info.get("preview"))
        if await self._holds_already(path):
            await self._server.subscribed(self._id)
            return False
        await self._unload()
        try:
            await self._change()
        except NotApplied:
            await self._resume_old()
            raise
        return True

    async def _reloadable(self) -> JsonObject:
        """Return the thread as the server describes it; refuse one that cannot be reloaded, now or ever."""
        server = self._server
        try:
            info = await server.describe(self._id)
        except AppServerError as problem:
            if self._thread.path is not None and server.local:
                await self._on_disk(rollout.read_head, Path(self._thread.path), self._id)
            # A thread that is not loaded can be read after a resume; if that fails, the server tells the reason.
            with _rejecting(problem):
                await server.resume(self._id)
                info = await server.describe(self._id)
        if info.get("ephemeral"):
            raise NotApplied("ephemeral")
        if not server.local:
            raise NotApplied("not_local")
        if _status(info) == "active":
            raise NotApplied("turn_active")
        with contextlib.suppress(AppServerError):  # servers without a queue do not know the method
            queue = await server.request("thread/queue/list", threadId=self._id)
            if isinstance(queue, dict) and queue.get("data"):
                raise NotApplied("queued_turns")
        return info

    async def _rollout_file(self, info: JsonObject) -> Path:
        if (path := await self._existing_file(info)) is not None:
            return path
        note = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": _NOTE}]}
        for method in self._changes.profile.materialise or ("name_set", "inject_items", "bootstrap"):
            with contextlib.suppress(AppServerError):
                if method == "name_set":
                    name = info.get("name") or _DEFAULT_NAME
                    await self._server.request("thread/name/set", threadId=self._id, name=name)
                elif method == "inject_items":
                    await self._server.request("thread/inject_items", threadId=self._id, items=[note])
                else:
                    await self._changes.bootstrap(self._id)
            path = await self._existing_file(await self._server.describe(self._id))
            if path is not None:
                self.materialized_now = True
                return path
        raise NotApplied("not_local", _NO_FILE)

    async def _existing_file(self, info: JsonObject) -> Path | None:
        path = info.get("path")
        exists = isinstance(path, str) and path and await asyncio.to_thread(Path(path).exists)
        return Path(str(path)) if exists else None

    async def _holds_already(self, path: Path) -> bool:
        head = await self._on_disk(rollout.read_head, path, self._id)
        return canonical(head.tools) == canonical(self._wire)

    async def _unload(self) -> None:
        server = self._server
        if self._changes.profile.unsubscribe:
            with _rejecting():
                closed = await self._leave()
            if closed or await self._not_loaded():
                return
        if not (server.owned or server.options.unload == "archive"):
            await self._resume_old()
            raise NotApplied("held_open", "another connection keeps the thread open")
        with _rejecting():
            await server.request("thread/archive", threadId=self._id)
            self._thread.subscribed = False
            await server.request("thread/unarchive", threadId=self._id)

    async def _leave(self) -> bool:
        """Unsubscribe, and return whether the server closed the thread soon."""
        server, thread, closings = self._server, self._thread, self._thread.closings
        answer = await server.request("thread/unsubscribe", threadId=self._id)
        thread.subscribed = False
        if isinstance(answer, dict) and answer.get("status") == "notLoaded":
            return True
        await server.threads.until(lambda: thread.closings > closings or server.disconnected, CLOSE_SECONDS)
        return thread.closings > closings

    async def _not_loaded(self) -> bool:
        try:
            return _status(await self._server.describe(self._id)) == "notLoaded"
        except AppServerError as problem:
            return "not loaded" in str(problem)

    async def _change(self) -> None:
        with _rejecting():
            info = await self._server.describe(self._id)  # the path again: a revert or an archive moved the file
        path = Path(str(info.get("path") or ""))
        if not await asyncio.to_thread(path.is_file):
            raise NotApplied("not_local", _NO_FILE)
        lock = rollout.locked(path, CLOSE_SECONDS)
        await self._on_disk(lock.__enter__)
        try:
            await self._replace(path)
        finally:
            lock.__exit__(None, None, None)

    async def _replace(self, path: Path) -> None:
        head = await self._on_disk(rollout.read_head, path, self._id)
        line = head.with_tools(self._wire)
        # An existing backup is of an interrupted change: the server's pointers into the file cannot be trusted then.
        doubt = await asyncio.to_thread(rollout.backup_of(path).exists)
        moves = doubt or len(line) != len(head.line)
        await self._on_disk(rollout.back_up, head)
        try:
            staged = await self._on_disk(rollout.stage, head, line)
            await self._check_closed(staged)
            await self._on_disk(self._swap, head, staged, moves)
        except NotApplied:
            if not doubt:
                await asyncio.to_thread(rollout.drop_backup, path)
            raise
        try:
            if moves:  # again: the server may have rebuilt them from the old file just before the swap
                await self._on_disk(rollout.forget_file, self._home, path, self._id)
            await self._confirm(path)
        except (AppServerError, NotApplied) as problem:
            if self._thread.subscribed and self._changes.profile.unsubscribe:
                with contextlib.suppress(AppServerError):
                    await self._leave()
            await self._on_disk(self._restore, path)
            words = problem.error if isinstance(problem, NotApplied) else problem.details.get("server_message")
            raise NotApplied("rejected", str(words or problem)) from problem
        except BaseException:  # raised again: the server is gone, or this client closes
            try:
                self._restore(path)  # what was not confirmed does not stay
            except (OSError, rollout.UnknownFormat) as problem:
                _LOG.warning("%s: line 1 is not restored now; its backup stays for the next change: %s", path, problem)
            raise
        await asyncio.to_thread(rollout.drop_backup, path)

    def _swap(self, head: rollout.Head, staged: Path, moves: bool) -> None:
        """Put the file in its place; where its turns move, the server's pointers to them go first."""
        if moves:
            try:
                if self._has_pointers:
                    rollout.check_movable(self._home, head.path, self._id)
                rollout.forget_file(self._home, head.path, self._id)  # the server builds them again from the file
            except rollout.UnknownFormat:
                staged.unlink(missing_ok=True)
                raise
        rollout.swap(head, staged)

    async def _check_closed(self, staged: Path) -> None:
        if not await self._not_loaded():
            await asyncio.to_thread(staged.unlink, missing_ok=True)
            raise NotApplied("changed_underneath", "another client loaded the thread meanwhile")

    async def _confirm(self, path: Path) -> None:
        await self._server.resume(self._id)
        if not await self._holds_already(Path(self._thread.path or path)):
            raise NotApplied("rejected", "the server replaced this catalog by another one")

    def _restore(self, path: Path) -> None:
        if rollout.restore(path):
            rollout.settle(self._home, path, self._id)

    async def _resume_old(self) -> None:
        with contextlib.suppress(AppServerError):  # the report tells the reason; the next message resumes again
            await self._server.resume(self._id)

    async def _on_disk(self, work: Callable[..., T], *arguments: object) -> T:
        """Run file work in a thread; its exceptions become reasons of `NotApplied`."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except (rollout.UnknownFormat, rollout.ChangedUnderneath, rollout.LockBusy) as problem:
            raise NotApplied(problem.reason, str(problem)) from problem
        except OSError as problem:
            raise NotApplied("unknown_format", f"the rollout cannot be changed: {problem.strerror}") from problem


def _status(info: JsonObject) -> object:
    status = info.get("status")
    return status.get("type") if isinstance(status, dict) else None


@contextlib.contextmanager
def _rejecting(first: AppServerError | None = None) -> Iterator[None]:
    """Convert an error of the server to `NotApplied`, in the words of the *first* one if there is one."""
    try:
        yield
    except AppServerError as problem:
        words = (first or problem).details.get("server_message")
        raise NotApplied("rejected", str(words or problem)) from problem


_CONFIG = {"thread_unload_delay_secs": 0}
START_ALONE: JsonObject = {"approvalPolicy": "never", "sandbox": "read-only", "config": _CONFIG}
"""How a thread starts that nobody watches: it asks for nothing, changes nothing, and closes at once when it is left."""


def lint(tools: Sequence[JsonObject], profile: ServerProfile) -> None:
    """Raise `CatalogError`, with rule and suggestion, for an entry the server would refuse, drop or shadow."""
    checked_names: list[tuple[str | None, str]] = []
    for tool in tools:
        namespace, name = tool.get("namespace"), str(tool.get("name"))
        check_name(namespace, name, profile, defer_loading=bool(tool.get("deferLoading")))
        check_neighbours(namespace, name, checked_names)
        checked_names.append((namespace, name))


@dataclass(slots=True)
class Changes:
    """Carries out changes of catalogs, by what the probe proved of the server."""

    server: AppServer
    profile: ServerProfile
    bootstrap: Callable[[str], Awaitable[None]]
    """Makes the server write a thread's rollout file, by a turn that is rolled back, where nothing cheaper works."""

    async def make(self, strategy: str, session_id: str, tools: Sequence[JsonObject]) -> JsonObject:
        """Change the catalog; return `status`, `materialized_now`, any `new_session_id`. Raises NotApplied."""
        wire = wire_tools(tools, namespaces=self.profile.namespaces)
        if strategy == "reload":
            reload = Reload(self, session_id, wire)
            changed = await reload.run()
            return {"status": "ok" if changed else "noop", "materialized_now": reload.materialized_now}
        report: JsonObject = {"status": "ok", "materialized_now": False}
        with _rejecting():
            if strategy == "native":
                await self.server.resume(session_id, dynamicTools=wire)
            elif strategy == "successor":
                report["new_session_id"] = await self._successor(session_id, wire)
        return report  # the dispatcher's catalog is what the next message carries

    async def filed_tools(self, session_id: str) -> list[JsonObject] | None:
        """Return the wire tools in a thread's rollout file, perhaps none; None when the file cannot be read."""
        if not self.server.local:
            return None
        try:
            path = (await self.server.describe(session_id)).get("path")
            head = await asyncio.to_thread(rollout.read_head, Path(str(path or "")), session_id)
        except (AppServerError, rollout.UnknownFormat):
            return None
        tools = head.tools
        return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []

    async def _successor(self, session_id: str, wire: list[JsonObject]) -> str:
        """Start a thread with the tools and what the old one recorded; return its id."""
        old = await self.server.describe(session_id)
        if not self.server.local:
            raise NotApplied("not_local")
        items = await asyncio.to_thread(rollout.response_items, Path(str(old.get("path") or "")))
        params = {key: old[key] for key in ("cwd", "model", "modelProvider") if old.get(key)}
        answer = await self.server.request("thread/start", **params, dynamicTools=wire, **START_ALONE)
        thread = self.server.threads.learn(answer["thread"], subscribed=True)
        if items:
            await self.server.request("thread/inject_items", threadId=thread.id, items=items)
        return thread.id


CatalogStrategy = Literal["native", "reload", "dispatcher", "successor"]

DISPATCHER: JsonObject = {
    "type": "function",
    "name": DISPATCHER_TOOL,
    "description": (
        "Call one remote skill of this conversation's catalog. `skill` is its name as the newest catalog writes it, "
        "`arguments` an object of its input_schema."
    ),
    "inputSchema": {
        "type": "object",
        "properties": {"skill": {"type": "string"}, "arguments": {"type": "object"}},
        "required": ["skill", "arguments"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The tools and strategy of a new thread."""

    wire: list[JsonObject] | None  # the value of `dynamicTools`
    strategy: CatalogStrategy | Literal[""]  # how its catalog reaches the model; empty for the caller's own wire tools
    tools: list[JsonObject]  # the catalog, flat


def _proven(profile: ServerProfile, preference: str, *, has_file: bool) -> CatalogStrategy | None:
    if profile.native and preference in ("auto", "native"):
        return "native"
    return "reload" if profile.reload and preference in ("auto", "reload") and has_file else None


def strategy_of_old(profile: ServerProfile, preference: str, *, local: bool, successor: bool) -> CatalogStrategy | None:
    """Return the strategy for a thread that another client started, or None when none is proven for it."""
    replaceable = successor and preference in ("auto", "successor")
    return _proven(profile, preference, has_file=local) or ("successor" if replaceable else None)


def start_plan(
    tools: Sequence[JsonObject] | None,
    profile: ServerProfile,
    preference: str,
    *,
    local: bool,
    ephemeral: bool,
) -> StartPlan:
    """Decide what a new thread starts with: the first proven strategy; *preference* is the client's `strategy`."""
    strategy = _proven(profile, preference, has_file=local and not ephemeral)
    strategy = strategy or ("successor" if preference == "successor" else "dispatcher")
    start_tools = list(tools or [])
    flat = flat_tools(start_tools)
    if start_tools and all("type" in tool for tool in start_tools):
        return StartPlan(start_tools, "" if strategy == "dispatcher" else strategy, flat)
    offered = [DISPATCHER] if strategy == "dispatcher" else flat
    return StartPlan(wire_tools(offered, namespaces=profile.namespaces) if offered else None, strategy, flat)
