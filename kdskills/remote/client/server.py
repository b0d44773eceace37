"""The app-server as a client sees it across connections: requests, watched threads, pending calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kdskills.remote.client.options import UNLOAD_AT_ONCE, ClientOptions
from kdskills.remote.client.reconnection import Reconnector
from kdskills.remote.client.threads import WatchedThread, WatchedThreads
from kdskills.remote.lint import DISPATCHER_TOOL
from kdskills.remote.ports import AppServerError, AppServerGone, JsonObject
from kdskills.remote.wire.framing import Notification, Request
from kdskills.remote.wire.peer import METHOD_NOT_FOUND, Peer, Transport
from kdskills.remote.wire.pending import PendingCall, PendingCalls, new_epoch

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
        self.user_agent = ""
        self.codex_home: str | None = None
        self.on_call: Callable[[PendingCall], None] | None = None
        self.on_event: Callable[[str, JsonObject], None] | None = None
        self._transport: Transport | None = None
        self._peer: Peer | None = None
        self._pending = PendingCalls(new_epoch())
        self._tasks: set[asyncio.Task[Any]] = set()
        self._connecting = asyncio.Lock()
        self._reconnector = Reconnector(
            options.reconnect_s, lambda: self.disconnected, lambda: self._connect_again(drop=False)
        )
        self._roots: JsonObject | None = None
        self._closed = False

    @property
    def pending(self) -> PendingCalls:
        """The calls of the present connection."""
        return self._pending

    @property
    def transport(self) -> Transport | None:
        """The transport of the present connection."""
        return self._transport

    @property
    def disconnected(self) -> bool:
        """Whether there is no connection."""
        return self._peer is None or self._peer.closed

    async def open(self) -> None:
        """Connect and initialize the connection; requests may be sent afterwards.

        Raises:
            AppServerGone: The server cannot be reached, it ended, or this client is closed.
            AppServerError: The server refused to initialize the connection.
        """
        transport = await self._connector()
        pending = PendingCalls(new_epoch())
        peer = Peer(
            transport,
            on_request=lambda request: self._take_request(request, pending),
            on_notification=lambda notification: self._take_notification(notification, pending),
            on_closed=lambda: self._note_loss(peer, pending),
        )
        peer.start()
        try:
            hello = await self._initialize(peer)
        except BaseException:  # raised again: a failed connection leaves no process
            await peer.close()
            raise
        self._transport, self._pending, self._peer = transport, pending, peer
        self._reconnector.opened()
        if isinstance(hello, dict):
            self.user_agent = str(hello.get("userAgent") or "")
            home = hello.get("codexHome")
            self.codex_home = home if isinstance(home, str) else None

    async def _initialize(self, peer: Peer) -> Any:
        timeout_s = self.options.request_timeout_s
        capabilities = {"experimentalApi": True}
        params = {"clientInfo": CLIENT_INFO, "capabilities": capabilities}
        hello = await peer.request("initialize", params, timeout_s=timeout_s)
        await peer.notify("initialized")
        if self._closed:
            raise AppServerGone("the client was closed meanwhile")
        if peer.closed:
            raise peer.gone_error("initialized")
        return hello

    async def reconnect(self) -> None:
        """Open a new connection in place of the present one and subscribe to the same threads again.

        Handles of the old connection's calls expire; the server sends unanswered calls of running turns anew.
        """
        self._reconnector.forget()
        await self._connect_again(drop=True)

    async def close(self) -> None:
        """Close the connection for good; an owned server is stopped."""
        self._closed = True
        await self._reconnector.stop()
        await self._drop()
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def request(self, method: str, **params: Any) -> Any:
        """Send one request and return its result.

        Raises:
            AppServerError: The server answered with an error.
            AppServerGone: There is no connection; while the client tries to come back, `details` has `reconnecting`.
            WaitTimeoutError: No answer in time.
        """
        if self._peer is None or self._peer.closed:
            raise self._offline_error(method)
        answer = await self._peer.request(method, params, timeout_s=self.options.request_timeout_s)
        if method == EXTRA_ROOTS and self.owned:
            self._roots = params  # remembered, because a restarted server does not know them
        return answer

    async def resume(self, thread_id: str, **params: Any) -> JsonObject:
        """Subscribe to a thread, loading it where needed; returns the server's answer.

        Every resume carries the unload delay, because the server takes the delay from the resume that loads the thread.
        """
        config = {**UNLOAD_AT_ONCE, **(params.pop("config", None) or {})}
        answer = await self.request("thread/resume", threadId=thread_id, excludeTurns=True, config=config, **params)
        info = answer.get("thread") if isinstance(answer, dict) else None
        if isinstance(info, dict):
            self.threads.learn(info, subscribed=True)
        else:
            self.threads.get(thread_id).subscribed = True
        return answer if isinstance(answer, dict) else {}

    async def subscribed(self, thread_id: str) -> WatchedThread:
        """Return a thread this connection is subscribed to, resuming it where needed."""
        thread = self.threads.get(thread_id)
        if not thread.subscribed:
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

    async def loaded(self) -> set[str]:
        """Return the ids of the threads that are loaded at the server, by any client."""
        thread_ids: set[str] = set()
        page: JsonObject = {}
        while True:
            answer = await self.request("thread/loaded/list", **page)
            thread_ids.update(thread_id for thread_id in answer.get("data") or [] if isinstance(thread_id, str))
            if not isinstance(answer.get("nextCursor"), str):
                return thread_ids
            page = {"cursor": answer["nextCursor"]}

    async def answer_call(self, call: PendingCall, response: JsonObject) -> None:
        """Send the answer of a call under its raw id."""
        if self._peer is None:
            raise AppServerGone("no app-server is connected: the answer was not sent")
        await self._peer.answer(call.raw_id, response)

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
            for thread_id in self.threads.to_resume():
                with contextlib.suppress(AppServerError):  # a thread without any turn does not survive its server
                    await self.resume(thread_id)
                self.threads.resumed(thread_id)

    def _offline_error(self, method: str) -> AppServerGone:
        """Return the error of a request that is made while there is no connection."""
        why = "no app-server is connected" if self._peer is None else f"the app-server is gone ({self._peer.why()})"
        message = f"{why}: {method} was not sent{self._reconnector.words()}"
        return AppServerGone(message, method=method, reconnecting=self._reconnector.active)

    async def _drop(self) -> None:
        peer, self._peer = self._peer, None
        if peer is None:
            return
        was_closed = peer.closed
        try:
            await peer.close()
        finally:
            if not was_closed:
                self._end(self._pending)

    def _note_loss(self, peer: Peer, pending: PendingCalls) -> None:
        if peer is not self._peer:  # dropped by this client, or never initialized
            return
        self._end(pending)
        if not self._closed:
            self._reconnector.lost()

    def _end(self, pending: PendingCalls) -> None:
        pending.expire_all()
        self.threads.connection_lost()
        if self.on_event is not None:
            self.on_event("connection/closed", {})

    def _take_request(self, request: Request, pending: PendingCalls) -> None:
        if request.method != TOOL_CALL:
            message = f"{request.method} is not served by this client"
            self.spawn_task(self._refuse(request, message), "kdskills-refusal")
            return
        call = pending.add(request.id, unwrapped(request.params))
        if call is not None and self.on_call is not None:
            self.on_call(call)

    async def _refuse(self, request: Request, message: str) -> None:
        if self._peer is not None:
            with contextlib.suppress(AppServerGone):  # the connection ended, so no refusal is needed
                await self._peer.refuse(request.id, METHOD_NOT_FOUND, message)

    def _take_notification(self, notification: Notification, pending: PendingCalls) -> None:
        method, params = notification.method, notification.params
        self.threads.note(method, params)
        thread_id = params.get("threadId")
        if isinstance(thread_id, str):
            if method == "turn/completed":
                turn = params.get("turn")
                pending.expire(thread_id=thread_id, turn_id=str(turn.get("id")) if isinstance(turn, dict) else "")
            elif method in ("thread/deleted", "thread/closed"):
                pending.expire(thread_id=thread_id)
        if self.on_event is not None:
            self.on_event(method, params)


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
