"""The app-server as a client sees it across connections: how it is started, asked and reached again.

`WatchedThreads` is the state of its threads and turns, as the notifications of a connection report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from kdskills.errors import BadRequest
from kdskills.remote.client.wire import METHOD_NOT_FOUND, Peer, PendingCall, PendingCalls, RawId, Transport
from kdskills.remote.names import DISPATCHER_TOOL
from kdskills.remote.ports import AppServerError, AppServerGone, CallJournal, JsonObject, ServerProfile

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
LEAST_ATTEMPT_S: Final = 1.0
"""The least time an attempt gets, even when the budget is nearly used up."""

CLOSING_S: Final = 5.0
"""How long a server may take to close a thread after it has told that it is closed."""
CLOSING_PAUSE_S: Final = 0.02


class ReconnectBudget:
    """The pauses between attempts: doubled each time, within one budget of seconds.

    A connection that lasted as long as the whole budget starts a new budget. One that is lost earlier continues the old budget,
    so that a server that dies at every start is not restarted for ever. With a budget of 0 seconds there are no attempts.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._opened = float("-inf")
        self._end: float | None = None
        self._pause = FIRST_PAUSE_S

    def opened(self, now: float) -> None:
        """Record that a connection was opened."""
        self._opened = now

    def lost(self, now: float) -> None:
        """Record that a connection was lost."""
        if self._end is None or now - self._opened >= self._seconds:
            self._end, self._pause = now + self._seconds, FIRST_PAUSE_S

    def seconds_left(self, now: float) -> float:
        """Return the seconds that remain for attempts, 0 when the budget is used up."""
        return 0.0 if self._end is None else max(0.0, self._end - now)

    def pause(self, now: float) -> float:
        """Return how long to wait before the next attempt; each pause is twice the last one."""
        pause = min(self._pause, self.seconds_left(now))
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
        return pause


Strategy = Literal["auto", "native", "reload", "dispatcher", "successor"]
Dispatch = Literal["auto", "manual"]
Unload = Literal["unsubscribe", "archive"]

UNLOAD_AT_ONCE: dict[str, int] = {"thread_unload_delay_secs": 0}
"""Sent with every start and resume: an idle thread must unload at once, because a loaded thread cannot be changed."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of `spawn` and `connect`."""

    journal: CallJournal | None = None  # None: the state folder's for `CodexClient` and `AsyncCodexClient`, else memory
    strategy: Strategy = "auto"  # how catalogs reach the model; `auto` takes the first proven one
    dispatch: Dispatch = "auto"  # `auto` answers calls by the sessions' registries, `manual` leaves them to the caller
    unload: Unload = "unsubscribe"  # `archive` also unloads a thread that another client may have open
    allow_successor: bool = False  # whether a new thread may replace an old one
    profile: ServerProfile | None = None  # what is known of the server; None means unprobed
    spool: Any = None  # a `Spool`, which stores the full text of answers that were cut
    request_timeout_s: float = 120.0  # longest wait for one answer of the server
    reconnect_s: float = (
        0.0  # how long a client tries to reconnect by itself after a loss; with 0 only `reconnect` does
    )

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", Strategy), ("dispatch", Dispatch), ("unload", Unload)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise BadRequest(f"{name} is one of {', '.join(get_args(allowed))}, not {value!r}", option=name)
        if not 0 <= self.reconnect_s < float("inf"):
            words = f"reconnect_s is a number of seconds, 0 or more, not {self.reconnect_s!r}"
            raise BadRequest(words, option="reconnect_s")


def child_environment(home: str | os.PathLike[str], env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the whole environment of the child: `PATH`, `LANG`, the caller's variables, and `home` as both homes.

    No other variable of this process is passed, so none of the user's logins and keys is.
    """
    passed = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    home_path = str(Path(home).absolute())
    return {**passed, **(env or {}), "HOME": home_path, "CODEX_HOME": home_path}


def app_server_command(binary: str, config: Mapping[str, Any] | None, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line: `binary app-server -c key=value …`, with the configuration's values written as TOML."""
    overrides = [part for key, value in (config or {}).items() for part in ("-c", f"{key}={toml(value)}")]
    return [binary, "app-server", *overrides, *arguments]


def toml(value: Any) -> str:
    """Return a value as TOML on one line; raises `BadRequest` for a value TOML has no word for."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        keys = (str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else toml(str(key)) for key in value)
        return "{" + ",".join(f"{key}={toml(item)}" for key, item in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(toml(item) for item in value) + "]"
    kind = type(value).__name__
    raise BadRequest(f"a configuration value is text, a number, a bool, a list or a mapping, not {kind}")


def camel_keys(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return snake_case keywords as the server's camelCase params; other names stay."""
    names = (key if key.startswith("_") else re.sub("_+(.?)", lambda part: part[1].upper(), key) for key in keywords)
    return dict(zip(names, keywords.values(), strict=True))


MAX_TURNS = 512
"""Turns remembered per thread; older ones are requested from the server."""

ENDED = frozenset({"completed", "failed", "interrupted"})


@dataclass(slots=True)
class WatchedTurn:
    """One turn, as this connection watched it."""

    id: str
    status: str = "inProgress"  # then `completed`, `failed` or `interrupted`
    error: Any = None  # the server's own words for a failed one
    messages: list[JsonObject] = field(default_factory=list)  # so far, oldest first

    def transcript(self) -> list[JsonObject]:
        """Return its messages as transcript entries."""
        status = "complete" if self.status == "completed" else self.status
        return [{"turnId": self.id, "role": m["role"], "status": status, "text": m["text"]} for m in self.messages]


@dataclass(slots=True)
class WatchedThread:
    """One thread, as this connection watched it."""

    id: str
    subscribed: bool = False  # whether this connection receives its notifications
    active_turn: str | None = None
    turns: dict[str, WatchedTurn] = field(default_factory=dict)  # oldest first
    path: str | None = None  # its rollout file, once known
    info: JsonObject = field(default_factory=dict)  # the server's newest description
    closings: int = 0  # how often it was closed (unloaded)
    compactions: int = 0  # how often its history was compacted

    def turn(self, turn_id: str) -> WatchedTurn:
        """Return a turn's record, creating it where needed."""
        if turn_id not in self.turns:
            self.turns[turn_id] = WatchedTurn(turn_id)
            while len(self.turns) > MAX_TURNS:
                del self.turns[next(iter(self.turns))]
        return self.turns[turn_id]


class WatchedThreads:
    """The threads of a client, and the tasks that wait for changes of them. Used on one event loop only."""

    def __init__(self) -> None:
        self._threads: dict[str, WatchedThread] = {}
        self.to_resume: dict[str, None] = {}  # subscribed when a connection was lost, not resumed since
        self._change = asyncio.Event()

    def get(self, thread_id: str) -> WatchedThread:
        """Return a thread's record, creating it where needed."""
        return self._threads.setdefault(thread_id, WatchedThread(thread_id))

    def drop(self, thread_id: str) -> None:
        """Forget a deleted thread."""
        self._threads.pop(thread_id, None)
        self.to_resume.pop(thread_id, None)
        self.changed()

    def all(self) -> list[WatchedThread]:
        """Return every known thread."""
        return list(self._threads.values())

    def learn(self, info: JsonObject, *, subscribed: bool | None = None) -> WatchedThread:
        """Update a thread from the server's description (`thread` of an answer)."""
        thread = self.get(str(info.get("id")))
        thread.info = {key: value for key, value in info.items() if key != "turns"}
        thread.path = info.get("path") or thread.path
        if subscribed is not None:
            thread.subscribed = subscribed
        self.note("thread/status/changed", {"threadId": thread.id, "status": info.get("status")})
        return thread

    def connection_lost(self) -> None:
        """Record that no notification will arrive any more; the state of running turns is unknown from now on."""
        for thread in self._threads.values():
            if thread.subscribed:
                self.to_resume[thread.id] = None
            thread.subscribed, thread.active_turn = False, None
            for turn_id in [turn.id for turn in thread.turns.values() if turn.status not in ENDED]:
                del thread.turns[turn_id]
        self.changed()

    def note(self, method: str, params: JsonObject) -> None:
        """Update the state from a notification; parts of another shape than expected change nothing."""
        thread_id = params.get("threadId")
        if not isinstance(thread_id, str):
            return
        thread = self.get(thread_id)
        match {**params, "method": method}:
            case {"method": "turn/started", "turn": {"id": str()} as turn}:
                self.begin_turn(thread_id, turn)
            case {"method": "turn/completed", "turn": {"id": str(ended_id)} as turn}:
                record = thread.turn(ended_id)
                record.status = str(turn["status"]) if turn.get("status") in ENDED else "completed"
                record.error = turn.get("error")
                if thread.active_turn == record.id:
                    thread.active_turn = None
            case {"method": "item/completed", "item": {"type": kind} as item}:
                message, turn_id = item_message(item), params.get("turnId")
                if message is not None and isinstance(turn_id, str):
                    thread.turn(turn_id).messages.append(message)
                thread.compactions += kind == "contextCompaction"
            case {"method": "thread/status/changed", "status": {"type": "idle" | "notLoaded" | "systemError" as kind}}:
                thread.active_turn = None
                thread.subscribed &= kind != "notLoaded"
            case {"method": "thread/closed"}:
                thread.closings += 1
                thread.subscribed, thread.active_turn = False, None
            case {"method": "thread/compacted"}:
                thread.compactions += 1
            case _:
                return
        self.changed()

    def begin_turn(self, thread_id: str, turn: JsonObject) -> WatchedTurn:
        """Record the answer of `turn/start`; the turn may have ended before the answer was read."""
        thread = self.get(thread_id)
        record = thread.turn(str(turn.get("id")))
        if record.status not in ENDED:
            thread.active_turn = record.id
        self.changed()
        return record

    def changed(self) -> None:
        """Wake all tasks that wait for a change."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition is true; return False on a timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._change.wait()
        return condition()


def item_message(item: JsonObject) -> JsonObject | None:
    """Return `role` and `text` of an item that is a message, else None."""
    if item.get("type") == "agentMessage":
        return {"role": "assistant", "text": str(item.get("text") or "")}
    if item.get("type") == "userMessage":
        content = item.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        return {"role": "user", "text": "\n".join(str(p.get("text") or "") for p in parts if p.get("type") == "text")}
    return None


def turn_record(turn: JsonObject) -> WatchedTurn:
    """Return a turn as the server lists it."""
    items = turn["items"] if isinstance(turn.get("items"), list) else []
    messages = [item_message(item) for item in items if isinstance(item, dict)]
    status = str(turn.get("status") or "inProgress")
    return WatchedTurn(str(turn.get("id")), status, turn.get("error"), [m for m in messages if m is not None])


TOOL_CALL = "item/tool/call"
EXTRA_ROOTS = "skills/extraRoots/set"
CLIENT_INFO = {"name": "kdskills", "title": "kdskills", "version": "1"}

T = TypeVar("T")
Connector = Callable[[], Awaitable[Transport]]


class AppServer:
    """One app-server and the connection to it.

    Args:
        connector: Opens a connection; called again for each reconnection.
        options: The client's options.
        local: Whether the server's files are on this machine.
        owned: Whether this client started it and is its only user.
    """

    def __init__(self, connector: Connector, options: ClientOptions, *, local: bool, owned: bool) -> None:
        self._connector = connector
        self.options = options
        self.local = local
        self.owned = owned
        self.threads = WatchedThreads()
        self.user_agent = ""  # what the server calls itself
        self.codex_home: str | None = None  # its home, as it says
        self.on_call: Callable[[PendingCall], None] | None = None
        self.on_event: Callable[[str, JsonObject], None] | None = None
        self.transport: Transport | None = None  # of the present connection, as are the next two
        self._peer: Peer | None = None
        self.pending = PendingCalls()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._connecting = asyncio.Lock()
        self._budget = ReconnectBudget(options.reconnect_s)
        self._reconnecting: asyncio.Task[None] | None = None
        self._failure = ""  # why reconnecting was given up
        self._roots: JsonObject | None = None
        self._closed = False

    @property
    def disconnected(self) -> bool:
        """Whether there is no connection."""
        return self._peer is None or self._peer.closed

    @property
    def reconnecting(self) -> bool:
        """Whether the client is trying to connect again by itself."""
        return self._reconnecting is not None and not self._reconnecting.done()

    async def open(self) -> None:
        """Connect and initialize the connection; raises `AppServerGone`, also when this client is closed, or `AppServerError`."""
        transport, pending = await self._connector(), PendingCalls()
        peer = Peer(
            transport,
            on_message=lambda message: self._take(message, pending),
            on_closed=lambda: self._note_loss(peer, pending),
        )
        async with contextlib.AsyncExitStack() as failing:
            failing.push_async_callback(peer.close)  # a failed connection leaves no process
            params = {"clientInfo": CLIENT_INFO, "capabilities": {"experimentalApi": True}}
            hello = await peer.request("initialize", params, timeout_s=self.options.request_timeout_s)
            await peer.send({"method": "initialized"})
            if self._closed:
                raise AppServerGone("the client was closed meanwhile")
            if peer.closed:
                raise peer.gone_error("initialized")
            failing.pop_all()
        self.transport, self.pending, self._peer = transport, pending, peer
        self._budget.opened(asyncio.get_running_loop().time())
        self._failure = ""
        if isinstance(hello, dict):
            self.user_agent = str(hello.get("userAgent") or "")
            home = hello.get("codexHome")
            self.codex_home = home if isinstance(home, str) else None

    async def reconnect(self) -> None:
        """Open a new connection in place of the present one and subscribe to the same threads again.

        Handles of the old connection's calls expire; the server sends unanswered calls of running turns anew.
        """
        self._budget, self._failure = ReconnectBudget(self.options.reconnect_s), ""
        await self._connect_again(drop=True)

    async def close(self) -> None:
        """Close the connection for good; an owned server is stopped."""
        self._closed = True
        await self._drop()
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def request(self, method: str, **params: Any) -> Any:
        """As `Peer.request`; while the client tries to come back, `details` of `AppServerGone` has `reconnecting`."""
        if self._peer is None or self._peer.closed:
            why = "no app-server is connected"
            if self._peer is not None and self.transport is not None:
                why = f"the app-server is gone ({self.transport.why_closed()})"
            later = "; the client is reconnecting, try again in a moment" if self.reconnecting else self._failure
            message = f"{why}: {method} was not sent{later}"
            raise AppServerGone(message, method=method, reconnecting=self.reconnecting)
        answer = await self._peer.request(method, params, timeout_s=self.options.request_timeout_s)
        if method == EXTRA_ROOTS and self.owned:
            self._roots = params  # remembered, because a restarted server does not know them
        return answer

    async def resume(self, thread_id: str, **params: Any) -> JsonObject:
        """Subscribe to a thread, loading it where needed; returns the server's answer."""
        # Every resume carries the unload delay, because the server takes the delay from the resume that loads the thread.
        config = {**UNLOAD_AT_ONCE, **(params.pop("config", None) or {})}
        end = asyncio.get_running_loop().time() + CLOSING_S
        while True:
            try:
                answer = await self.request(
                    "thread/resume", threadId=thread_id, excludeTurns=True, config=config, **params
                )
                break
            except AppServerError as error:
                # the server may still be closing the thread that it said was closed
                closing = "is closing; retry" in str(error.details.get("server_message"))
                if not closing or asyncio.get_running_loop().time() >= end:
                    raise
            await asyncio.sleep(CLOSING_PAUSE_S)
        self.threads.get(thread_id).subscribed = True
        match answer:
            case {"thread": {} as info}:
                self.threads.learn(info, subscribed=True)
        return answer if isinstance(answer, dict) else {}

    async def subscribed(self, thread_id: str) -> WatchedThread:
        """Return a thread this connection is subscribed to, resuming it where needed."""
        if not self.threads.get(thread_id).subscribed:
            await self.resume(thread_id)
        return self.threads.get(thread_id)

    async def describe(self, thread_id: str) -> JsonObject:
        """Return the server's description of a thread (`thread/read`)."""
        answer = await self.request("thread/read", threadId=thread_id)
        info = answer.get("thread") if isinstance(answer, dict) else None
        if not isinstance(info, dict):
            raise AppServerError("the app-server answered thread/read without a thread", method="thread/read")
        self.threads.learn(info)
        return info

    async def pages(self, method: str, **params: Any) -> AsyncIterator[Any]:
        """Give the entries of a list that the server answers in pages."""
        while True:
            answer = await self.request(method, **params)
            for entry in answer.get("data") or []:
                yield entry
            if answer.get("nextCursor") is None:
                return
            params["cursor"] = answer["nextCursor"]

    async def reply(self, raw_id: RawId, **outcome: JsonObject) -> None:
        """Reply to a request of the server under its raw id, by a `result` or an `error`."""
        if self._peer is None:
            raise AppServerGone("no app-server is connected: the answer was not sent")
        await self._peer.send({"id": raw_id, **outcome})

    def spawn_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine as a background task; it is cancelled when the client closes."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect_again(self, *, drop: bool) -> None:
        """Open a new connection and restore roots and subscriptions; without *drop* only when the old one is lost."""
        async with self._connecting:
            if self._closed:
                raise AppServerGone("the client is closed")
            if not drop and not self.disconnected:
                return
            await self._drop()
            await self.open()
            if self._roots is not None:
                await self.request(EXTRA_ROOTS, **self._roots)
            for thread_id in list(self.threads.to_resume):
                with contextlib.suppress(AppServerError):  # a thread without any turn does not survive its server
                    await self.resume(thread_id)
                self.threads.to_resume.pop(thread_id, None)

    async def _drop(self) -> None:
        peer, self._peer = self._peer, None
        if peer is None:
            return
        was_closed = peer.closed
        try:
            await peer.close()
        finally:
            if not was_closed:
                self._end(self.pending)

    def _note_loss(self, peer: Peer, pending: PendingCalls) -> None:
        """Take note of a connection's end, and try to connect again while there is a budget."""
        if peer is not self._peer:  # dropped by this client, or never initialized
            return
        self._end(pending)
        now = asyncio.get_running_loop().time()
        self._budget.lost(now)
        if not self._closed and not self.reconnecting and self._budget.seconds_left(now) > 0:
            self._reconnecting = self.spawn_task(self._reconnect(), "kdskills-app-server-return")

    async def _reconnect(self) -> None:
        now = asyncio.get_running_loop().time
        while self.disconnected:
            try:
                async with asyncio.timeout(max(LEAST_ATTEMPT_S, self._budget.seconds_left(now()))):
                    await self._connect_again(drop=False)
            except (AppServerError, AppServerGone, TimeoutError) as problem:
                if self._budget.seconds_left(now()) <= 0:
                    seconds, last = self.options.reconnect_s, str(problem) or "no answer in time"
                    self._failure = f"; reconnecting was given up after {seconds:g} s: {last}"
                    return
                await asyncio.sleep(self._budget.pause(now()))

    def _end(self, pending: PendingCalls) -> None:
        pending.expire()
        self.threads.connection_lost()
        if self.on_event is not None:
            self.on_event("connection/closed", {})

    def _take(self, message: JsonObject, pending: PendingCalls) -> None:
        """Take a request or notification of the server."""
        method, params = message["method"], message["params"]
        if method == TOOL_CALL and "id" in message:
            call = pending.add(message["id"], unwrapped(params))
            if call is not None and self.on_call is not None:
                self.on_call(call)
        elif "id" in message:
            error = {"code": METHOD_NOT_FOUND, "message": f"{method} is not served by this client"}
            self.spawn_task(self._refuse(message["id"], error), "kdskills-refusal")
        else:
            self.threads.note(method, params)
            thread_id, turn = params.get("threadId"), params.get("turn")
            if isinstance(thread_id, str) and method == "turn/completed":
                pending.expire(thread_id, str(turn.get("id")) if isinstance(turn, dict) else "")
            elif isinstance(thread_id, str) and method in ("thread/deleted", "thread/closed"):
                pending.expire(thread_id)
            if self.on_event is not None:
                self.on_event(method, params)

    async def _refuse(self, raw_id: RawId, error: JsonObject) -> None:
        with contextlib.suppress(AppServerGone):  # the connection ended, so no refusal is needed
            await self.reply(raw_id, error=error)


def unwrapped(params: JsonObject) -> JsonObject:
    """Return a call's params with a dispatcher call's own tool, namespace and arguments in their places."""
    arguments = params.get("arguments")
    if params.get("tool") != DISPATCHER_TOOL or params.get("namespace") or not isinstance(arguments, dict):
        return params
    skill = arguments.get("skill")
    if not isinstance(skill, str) or not skill.strip():
        return params
    namespace, _, tool = skill.strip().rpartition(".")
    return {**params, "tool": tool, "namespace": namespace or None, "arguments": arguments.get("arguments")}
