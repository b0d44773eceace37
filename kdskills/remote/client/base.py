"""The client without facade and probe, which the probe itself uses: its sessions, answers, waits and signals."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from kdskills.remote.calls import AppServerSignal, RemoteSkillDispatch
from kdskills.remote.catalog import rollout
from kdskills.remote.catalog.backend import CatalogStore, CodexCatalog, MemoryCatalogStore, SqlCatalogStore
from kdskills.remote.client.server import (
    ENDED,
    TOOL_CALL,
    UNLOAD_AT_ONCE,
    AppServer,
    ClientOptions,
    WatchedTurn,
    app_server_command,
    camel_keys,
    child_environment,
    turn_record,
)
from kdskills.remote.client.wire import (
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PendingCall,
    StdioTransport,
    Transport,
    WebsocketTransport,
)
from kdskills.remote.journal import MemoryJournal
from kdskills.remote.names import tools_digest, tools_text
from kdskills.remote.ports import (
    AppServerError,
    AppServerGone,
    CallJournal,
    CatalogChange,
    JsonObject,
    ServerProfile,
    WaitTimeoutError,
)
from kdskills.skills.private_files import make_folder

_BOOTSTRAP_SECONDS = 60.0
_START_DEFAULTS: JsonObject = {"approvalPolicy": "never", "sandbox": "read-only"}
_RESUME_SECONDS = 90.0
_PAGE = 100


class Sessions:
    """`client.sessions`: threads as sessions; the catalog decides what tools a new one starts with, and changes them."""

    def __init__(self, server: AppServer, catalog: CodexCatalog) -> None:
        self._server = server
        self._catalog = catalog

    async def create(self, /, **keywords: Any) -> JsonObject:
        """Start a thread; snake_case keywords become the server's params.

        Args:
            **keywords: Of `thread/start`. `dynamic_tools` as `dynamic_tools()` writes them, or as the wire does.

        Returns:
            `{"session": {"sessionId", "materialized", "status", "path"}, "thread", "strategy", "strategyAsked"}`: the strategy in
            use, and the one the client's options name.
        """
        params = {**_START_DEFAULTS, **camel_keys(keywords)}
        params["config"] = {**UNLOAD_AT_ONCE, **(params.get("config") or {})}
        tools = params.pop("dynamicTools", None)
        plan = self._catalog.plan_start(tools, ephemeral=bool(params.get("ephemeral")))
        if plan.wire is not None:
            params["dynamicTools"] = plan.wire
        answer = await self._server.request("thread/start", **params)
        thread = answer["thread"]
        self._server.threads.learn(thread, subscribed=True)
        await self._catalog.started(str(thread["id"]), plan)
        strategies = {"strategy": plan.strategy, "strategyAsked": self._server.options.strategy}
        return {"session": self._session(thread), "thread": thread, **strategies}

    async def get(self, session_id: str) -> JsonObject:
        """Return a session as `create` does, with its `transcript`, oldest message first."""
        thread = await self._server.describe(session_id)
        turns = await self.turns(session_id)
        transcript = [entry for turn in turns for entry in turn.transcript()]
        return {"session": self._session(thread), "thread": thread, "transcript": transcript}

    async def turns(self, session_id: str) -> list[WatchedTurn]:
        """Return a session's turns, oldest first: the server's list, completed by the turns watched on this connection."""
        watched = self._server.threads.get(session_id).turns
        merged: list[WatchedTurn] = []
        for turn in await self._list_turns(session_id):
            watched_turn = watched.get(turn.id)
            has_reply = any(message["role"] == "assistant" for message in turn.messages)
            merged.append(turn if watched_turn is None or (has_reply and turn.status != "inProgress") else watched_turn)
        listed_ids = {turn.id for turn in merged}
        return merged + [turn for turn in watched.values() if turn.id not in listed_ids]

    async def send_message(self, /, session_id: str, text: str, **keywords: Any) -> JsonObject:
        """Start a turn, or steer the running one.

        Args:
            session_id: The thread.
            text: The user's text.
            **keywords: Of `turn/start`; `dynamic_tools` is compared with the catalog in force and not sent, because the
                server would take and ignore it; `input` holds further items of the input.

        Returns:
            `{"status": "accepted" | "steered", "sessionId", "turnId"}`, and `catalog` if tools were given.
        """
        params = camel_keys(keywords)
        tools = params.pop("dynamicTools", None)
        items = [{"type": "text", "text": text}, *(params.pop("input", None) or [])]
        async with self._catalog.gate(session_id):
            thread = await self._server.subscribed(session_id)
            active = thread.active_turn
            answer = await self._server.request("turn/start", threadId=session_id, input=items, **params)
            turn = self._server.threads.begin_turn(session_id, answer["turn"])
        await self._catalog.context_sent(session_id, params.get("additionalContext"))
        status = "steered" if turn.id == active else "accepted"
        report: JsonObject = {"status": status, "sessionId": session_id, "turnId": turn.id}
        if tools is not None:
            current = await self._catalog.in_force(session_id, tools_digest(tools))
            report["catalog"] = "current" if current else "stale"
        return report

    async def resume(
        self, /, session_id: str, dynamic_tools: list[JsonObject] | None = None, **keywords: Any
    ) -> JsonObject:
        """Subscribe to a session; with `dynamic_tools`, change its catalog as `prepare_catalog` does."""
        if dynamic_tools is not None:
            change = CatalogChange(
                session_id, dynamic_tools, tools_text(dynamic_tools), wait=True, timeout_s=_RESUME_SECONDS
            )
            return await self._catalog.apply(change)
        answer = await self._server.resume(session_id, **camel_keys(keywords))
        thread = answer.get("thread") or await self._server.describe(session_id)
        return {"session": self._session(thread), "thread": thread}

    async def rollback(self, session_id: str, num_turns: int) -> JsonObject:
        """Roll back the newest turns. The rollout file may move, so its path is read again."""
        await self._server.subscribed(session_id)
        turns = await self._list_turns(session_id)
        if num_turns < 1 or num_turns > len(turns):
            words = f"num_turns is {num_turns}, which cannot be taken back: the session has {len(turns)} turn(s)"
            raise AppServerError(words, method="thread/revert", turns=len(turns))
        record = self._server.threads.get(session_id)
        reverted = record.info.get("historyMode") == "paginated"
        if reverted:
            try:
                await self._server.request("thread/revert", threadId=session_id, beforeTurnId=turns[-num_turns].id)
            except AppServerError as problem:
                if not unknown_method(problem):
                    raise
                reverted = False
        if not reverted:
            await self._server.request("thread/rollback", threadId=session_id, numTurns=num_turns)
        for turn in turns[-num_turns:]:
            record.turns.pop(turn.id, None)
        self._catalog.context_lost(session_id)
        thread = await self._server.describe(session_id)
        return {"status": "ok", "session": self._session(thread), "numTurns": num_turns}

    async def tool_calls(self, session_id: str) -> JsonObject:
        """Return `{"data": rows}` of the calls that wait for an answer."""
        return {"data": self._server.pending.rows(session_id)}

    async def delete(self, session_id: str) -> JsonObject:
        """Delete a session with its history."""
        try:
            await self._server.request("thread/delete", threadId=session_id)
        except AppServerError as problem:
            if not unknown_method(problem):
                raise
            await self._server.request("thread/archive", threadId=session_id)
            return {"status": "archived", "sessionId": session_id}
        self._server.pending.expire(thread_id=session_id)
        self._server.threads.drop(session_id)
        await self._catalog.forget(session_id)
        return {"status": "deleted", "sessionId": session_id}

    async def _list_turns(self, session_id: str) -> list[WatchedTurn]:
        try:
            try:
                pages = self._server.pages("thread/turns/list", threadId=session_id, limit=_PAGE)
                return [turn_record(turn) async for turn in pages if isinstance(turn, dict)][::-1]
            except AppServerError as problem:
                if without_history(problem) or not unknown_method(problem):
                    raise
            answer = await self._server.request("thread/read", threadId=session_id, includeTurns=True)
        except AppServerError as problem:
            if without_history(problem):
                return []
            raise
        return [turn_record(turn) for turn in (answer.get("thread") or {}).get("turns") or []]

    def _session(self, thread: JsonObject) -> JsonObject:
        path, status = thread.get("path"), thread.get("status")
        if self._server.local and isinstance(path, str) and path:
            materialized = Path(path).exists()
        else:  # on another machine: whether the thread ever had a turn
            materialized = bool(thread.get("preview") or thread.get("turns"))
        status = status.get("type") if isinstance(status, dict) else status
        return {"sessionId": thread.get("id"), "materialized": materialized, "status": status, "path": path}


def unknown_method(problem: AppServerError) -> bool:
    """Return whether the server does not have the method: it cannot parse the request's variant."""
    code, message = problem.details.get("rpc_code"), str(problem.details.get("server_message", ""))
    return code == METHOD_NOT_FOUND or (code == INVALID_REQUEST and "unknown variant" in message)


def without_history(problem: AppServerError) -> bool:
    """Return whether the server says the thread has no history yet."""
    message = str(problem.details.get("server_message", ""))
    phrases = ("no rollout found", "not supported yet", "not materialized yet", "unavailable before", "ephemeral")
    return any(part in message for part in phrases)


class ToolCalls:
    """`client.tool_calls`: answers the server's calls."""

    def __init__(self, server: AppServer) -> None:
        self._server = server

    async def respond(self, request_id: str, response: JsonObject) -> JsonObject:
        """Answer a call under its handle.

        Args:
            request_id: The handle of a signal or row.
            response: `{"contentItems": [..], "success": bool}`.

        Returns:
            `{"status": "ok"}`; `conflict` with code `in_flight` while another answer is on its way; `not_found` when the
            call is answered, its turn ended, or its connection is gone; `error` when the answer cannot be written.
        """
        pending = self._server.pending
        call = pending.begin(request_id)
        if isinstance(call, dict):
            return call
        sent = False
        try:
            await self._server.reply(call.raw_id, result=response)
            sent = True
        except AppServerGone as problem:
            return {"status": "error", "code": problem.code, "message": problem.message, "requestId": request_id}
        except (TypeError, ValueError) as problem:
            return {"status": "error", "code": "not_json", "message": str(problem), "requestId": request_id}
        finally:
            pending.end(call, sent=sent)
        return {"status": "ok", "requestId": request_id}


class Waits:
    """`client.wait`: waits for turns; the sessions list those that this connection did not watch."""

    def __init__(self, server: AppServer, sessions: Sessions) -> None:
        self._server = server
        self._sessions = sessions

    async def turn_status(self, session_id: str, turn_id: str) -> JsonObject:
        """Return `{"status", "turnId", "error"}` of a turn; `unknown` for a turn the server does not list."""
        turn = await self._turn(session_id, turn_id) or WatchedTurn(turn_id, "unknown")
        return {"status": turn.status, "turnId": turn_id, "error": turn.error}

    async def assistant_reply(
        self, session_id: str, turn_id: str, timeout_seconds: float = 60.0, interval_seconds: float = 0.25
    ) -> JsonObject:
        """Wait for a turn's end and return its last message.

        Args:
            session_id: The thread.
            turn_id: The turn.
            timeout_seconds: Longest wait.
            interval_seconds: Pause between two queries about a turn that this connection does not watch.

        Returns:
            `{"status": "complete" | "failed" | "interrupted", "turnId", "text", "error"}`; `text` is None without a message.

        Raises:
            WaitTimeoutError: The turn did not end in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        while True:
            turn = await self._turn(session_id, turn_id)
            if turn is not None and turn.status in ENDED:
                replies = [entry["text"] for entry in turn.transcript() if entry["role"] == "assistant"]
                status = "complete" if turn.status == "completed" else turn.status
                text = replies[-1] if replies else None
                return {"status": status, "turnId": turn_id, "text": text, "error": turn.error}
            seconds_left = end - loop.time()
            if seconds_left <= 0:
                raise WaitTimeoutError(f"the turn did not end within {timeout_seconds:g} s", turn_id=turn_id)
            seconds = min(seconds_left, max(interval_seconds, 0.01))
            await self._server.threads.until(partial(self._settled, turn), seconds)

    async def _turn(self, session_id: str, turn_id: str) -> WatchedTurn | None:
        watched = self._server.threads.get(session_id).turns.get(turn_id)
        if watched is not None:
            if watched.status not in ENDED and self._server.disconnected:
                raise AppServerGone("the app-server is gone: the turn's end cannot be seen", turn_id=turn_id)
            return watched
        turns = await self._sessions.turns(session_id)
        return next((turn for turn in turns if turn.id == turn_id), None)

    def _settled(self, turn: WatchedTurn | None) -> bool:
        return self._server.disconnected or (turn is not None and turn.status in ENDED)


MAX_WAITING = 10_000
"""Signals a slow reader may fall behind; the oldest notifications are dropped then, calls stay in the pending store."""


def signal_of(method: str, params: JsonObject, request_id: str | None = None) -> AppServerSignal:
    """Return the signal of a tool call, which has a request id, or of a notification."""
    kind = "notification" if request_id is None else "request"
    thread_id = params.get("threadId")
    context = {key: params[key] for key in ("threadId", "turnId") if isinstance(params.get(key), str)}
    return AppServerSignal(
        event_type=f"app_server.{kind}.{method.replace('/', '.')}",
        method=method,
        signal_type=kind,
        received_at=time.time(),
        context=context,
        params=params,
        session={"id": thread_id} if isinstance(thread_id, str) else None,
        request_id=request_id,
    )


class Signals:
    """An async iterator over the signals of one session, from its creation on; ends with the connection."""

    def __init__(self, readers: set[Signals], session_id: str | None) -> None:
        self._readers, self._session_id = readers, session_id
        self._queue: asyncio.Queue[AppServerSignal | None] = asyncio.Queue()
        self.dropped = 0
        readers.add(self)

    def __aiter__(self) -> AsyncIterator[AppServerSignal]:
        return self

    async def __anext__(self) -> AppServerSignal:
        signal = await self._queue.get()
        if signal is None:
            self.close()
            raise StopAsyncIteration
        return signal

    async def next(self, timeout_seconds: float | None = None) -> AppServerSignal | None:
        """Return the next signal, or None when there is none in time or none will come."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await anext(self, None)
        except TimeoutError:
            return None

    def close(self) -> None:
        """Stop listening."""
        self._readers.discard(self)
        self._queue.put_nowait(None)

    def offer(self, signal: AppServerSignal | None) -> None:
        """Take a signal if it is of this session; None is the end."""
        if signal is not None:
            if self._session_id not in (None, (signal.session or {}).get("id")):
                return
            if self._queue.qsize() >= MAX_WAITING:
                self._queue.get_nowait()
                self.dropped += 1
        self._queue.put_nowait(signal)


class SignalStream:
    """`client.stream`: distributes signals to all readers."""

    def __init__(self) -> None:
        self._readers: set[Signals] = set()

    def signals(self, session_id: str | None = None) -> Signals:
        """Listen to one session, or to all; iterate over what is returned, and close it."""
        return Signals(self._readers, session_id)

    def publish(self, signal: AppServerSignal | None) -> None:
        """Offer a signal to every reader; None tells that the connection ended."""
        for reader in list(self._readers):
            reader.offer(signal)


OnCall = Callable[[AppServerSignal], Awaitable[object] | object]
OnTurnEnded = Callable[[str, str, str], Awaitable[None]]

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class AsyncAppServerClient:
    """A client of one app-server; make it with `spawn` or `connect`, leave it with `close` or `async with`."""

    def __init__(self, server: AppServer, options: ClientOptions, store: CatalogStore) -> None:
        self.server = server  # what the parts below share, for code that needs its other methods
        self.options = options
        self.journal: CallJournal = options.journal if options.journal is not None else MemoryJournal()
        self.spool: Any = options.spool  # stores the full text of answers that were cut, or None
        self.profile = options.profile or ServerProfile.codex()
        self.stream = SignalStream()  # the server's messages
        self.catalog = CodexCatalog(
            server,
            self.profile,
            store,
            calls_running=lambda session_id: bool(self.journal.running(session_id)),
            bootstrap=self._bootstrap,
        )
        self._store = store
        self.sessions = Sessions(server, self.catalog)
        self.tool_calls = ToolCalls(server)
        self.wait = Waits(server, self.sessions)
        self.on_call: OnCall | None = None  # with `dispatch="auto"`, called for each tool call; may return an awaitable
        self.on_turn_ended: OnTurnEnded | None = None
        self._watcher: asyncio.Task[None] | None = None
        server.on_call = self._take_call
        server.on_event = self._take_event

    @classmethod
    async def spawn(
        cls,
        *,
        home: str | os.PathLike[str],
        binary: str = "codex",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        **opts: Any,
    ) -> Self:
        """As `AsyncCodexClient.spawn`, without probe and state folder."""
        options = ClientOptions(**opts)
        environment = child_environment(home, env)
        home_path = Path(environment["HOME"])
        command = app_server_command(shutil.which(binary, path=environment.get("PATH")) or binary, config)

        async def connector() -> Transport:
            try:
                await asyncio.to_thread(make_folder, home_path)
                await asyncio.to_thread(rollout.mend_home, home_path)  # undoes changes that a crash interrupted there
            except OSError as problem:
                words = f"{home_path} cannot be a home: {problem.strerror or problem}"
                raise AppServerGone(words, home=str(home_path)) from problem
            return await StdioTransport.spawn(command, env=environment, cwd=cwd)

        return await cls._open(AppServer(connector, options, local=True, owned=True), options)

    @classmethod
    async def connect(cls, url: str, *, token: str | None = None, **opts: Any) -> Self:
        """Talk to an app-server that listens on a websocket; see `AsyncCodexClient.connect`.

        Raises:
            AppServerGone: The server cannot be reached.
        """
        options = ClientOptions(**opts)
        connector = partial(WebsocketTransport.connect, url, token=token)
        local = urlsplit(url).hostname in _LOOPBACK
        return await cls._open(AppServer(connector, options, local=local, owned=False), options)

    async def _mend(self) -> None:
        """Restore first lines that a crash left unreadable, if the running server's files are on this machine."""
        if not self.server.local or self.server.codex_home is None:
            return
        home = Path(self.server.codex_home)
        broken = [path for path in await asyncio.to_thread(rollout.interrupted, home) if rollout.needs_mending(path)]
        if not broken:
            return
        try:
            loaded = [thread_id async for thread_id in self.server.pages("thread/loaded/list")]
        except AppServerError:
            return  # without that list, any of these threads may be open
        for path in broken:
            # What the server has open is left alone: it would go on writing to the file that was replaced.
            if rollout.backup_owner(path) not in loaded:
                await asyncio.to_thread(rollout.mend, home, path)

    @classmethod
    async def _open(cls, server: AppServer, options: ClientOptions) -> Self:
        engine = getattr(options.journal, "engine", None)
        client = cls(server, options, MemoryCatalogStore() if engine is None else SqlCatalogStore(engine))
        await server.open()
        try:
            if not server.owned:
                await client._mend()
        except BaseException:  # raised again: a client that did not open leaves no process
            await client.close()
            raise
        client._watch()
        return client

    def trust(self, profile: ServerProfile) -> None:
        """Use the profile of a newer probe from now on."""
        self.profile = profile
        self.catalog.trust(profile)

    @property
    def connection(self) -> str:
        """The name of the present connection; an answer is accepted only on the connection of its call."""
        return self.server.pending.epoch

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return not self.server.disconnected

    @property
    def user_agent(self) -> str:
        """The server's name and version in its own words."""
        return self.server.user_agent

    @property
    def owned(self) -> bool:
        """Whether this client started the server and is its only user."""
        return self.server.owned

    @property
    def codex_home(self) -> str | None:
        """The home folder that the server reports."""
        return self.server.codex_home

    async def request(self, /, method: str, **params: Any) -> Any:
        """Send any request of the protocol; params as the server spells them.

        Raises:
            AppServerError: The server answered with an error.
            AppServerGone: There is no connection.
        """
        return await self.server.request(method, **params)

    async def reconnect(self) -> None:
        """Replace the connection (and an owned server) by a new one; handles of calls expire.

        With `reconnect_s` the client does so by itself when the connection is lost.
        """
        await self.server.reconnect()
        self._watch()

    async def close(self) -> None:
        """Close the connection; an owned server is stopped. May be called twice."""
        await self.server.close()
        self.stream.publish(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def _watch(self) -> None:
        if self._store.shared and (self._watcher is None or self._watcher.done()):
            self._watcher = self.server.spawn_task(self.catalog.sharing.watch(), "kdskills-catalog-watch")

    async def _bootstrap(self, session_id: str) -> None:
        """Make the server write a thread's rollout file, by one short turn that is rolled back."""
        server, item = self.server, {"type": "text", "text": "Reply with OK."}
        answer = await server.request("turn/start", threadId=session_id, input=[item])
        turn = server.threads.begin_turn(session_id, answer["turn"])
        await server.threads.until(lambda: turn.status in ENDED or server.disconnected, _BOOTSTRAP_SECONDS)
        await self.sessions.rollback(session_id, 1)

    def _take_event(self, method: str, params: JsonObject) -> None:
        self.stream.publish(signal_of(method, params))
        if method == "connection/closed":
            self.stream.publish(None)
        turn, thread_id = params.get("turn"), params.get("threadId")
        if method == "turn/completed" and isinstance(turn, dict) and isinstance(thread_id, str):
            work = self._turn_ended(thread_id, str(turn.get("id")), str(turn.get("status")))
            self.catalog.settling(thread_id, self.server.spawn_task(work, f"kdskills-turn-{thread_id}"))

    def _take_call(self, call: PendingCall) -> None:
        signal = signal_of(TOOL_CALL, call.params, call.handle)
        call.claimed = self.options.dispatch == "auto"
        self.stream.publish(signal)
        if call.claimed:
            self.server.spawn_task(self._dispatch(call, signal), f"kdskills-call-{call.handle}")

    async def _turn_ended(self, thread_id: str, turn_id: str, status: str) -> None:
        """Run the work that follows the end of a turn."""
        if self.on_turn_ended is not None:
            await self.on_turn_ended(thread_id, turn_id, status)

    def _handler(self) -> OnCall | None:
        """Return the function that answers calls; a client with a facade uses the facade."""
        return self.on_call

    async def _dispatch(self, call: PendingCall, signal: AppServerSignal) -> None:
        """Answer a call; the model gets an answer whatever happens, because the server waits without a time limit."""
        tool = str(call.params.get("tool") or "")
        handler = self._handler()
        text = f"no remote skill registered for {tool}"
        payload: JsonObject | None = None
        try:
            if handler is not None:
                outcome = handler(signal)
                if inspect.isawaitable(outcome):
                    outcome = await outcome
                # the call is still open, so its answer went out under another id or did not get through
                if isinstance(outcome, RemoteSkillDispatch):
                    payload = outcome.response_payload
                    text = f"remote skill {tool} failed: the answer could not be sent"
        except Exception as problem:  # raised again: the model is told first
            text = f"remote skill {tool} failed: {type(problem).__name__}"
            raise
        finally:
            if call.state == "pending" and not self.server.disconnected:
                plain: JsonObject = {"contentItems": [{"type": "inputText", "text": text}], "success": False}
                for response in (plain,) if payload is None else (payload, plain):
                    if (await self.tool_calls.respond(call.handle, response))["status"] != "error":
                        break
