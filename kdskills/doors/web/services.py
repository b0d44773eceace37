"""`/services/ID/PORT/…`: a port of a running service, of this host or another, for callers with a token.

A service is code of strangers. It gets neither the caller's token nor any cookie, and its answers, which have our origin,
set none: they may neither act as pages of ours nor say anything of the origin as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import h11
from starlette.routing import BaseRoute, Route, WebSocketRoute

from kdskills.app.authentication import IDENTITY, Authenticate, RateLimited
from kdskills.app.logs import REQUEST
from kdskills.app.operations.calling import require_allowed
from kdskills.doors.web.entrance import REQUEST_ID, refuse
from kdskills.doors.web.events import CHECK_S, Drain
from kdskills.errors import KdskillsError, NotFound, OperatorMustAct, ServiceDown
from kdskills.errors.traces import TRACEPARENT, current_trace

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from kdskills.app import Host
    from kdskills.app.identity import Identity
    from kdskills.jobs.stream import StreamEnds

PATH: Final = re.compile(rb"/services/([A-Za-z0-9_-]{1,128})/(\d{1,5})(/.*)?", re.DOTALL)
SERVICES: Final = "/services/{rest:path}"
RUNS: Final = "skills.run_service"
"""Who may start services may reach those they see."""
CHUNK: Final = 65536
MOST: Final = 64
MOST_OF_ALL: Final = 200
"""Requests and WebSockets that one agent, and all together, have open to services at a time; each takes four descriptors."""
MESSAGE: Final = 1024 * 1024
"""Bytes a message of a WebSocket has at most, either way."""
HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
PRIVATE: Final = frozenset(
    (
        *(b"authorization", b"proxy-authorization", b"cookie", b"host", b"origin", b"referer", b"expect", b"forwarded"),
        *(b"traceparent", b"tracestate", REQUEST_ID),
    )
)
"""Headers of a request that are not the service's to know, or that we say ourselves."""
ORIGINS: Final = frozenset(
    (
        *(b"set-cookie", b"clear-site-data", b"service-worker-allowed", b"strict-transport-security", b"alt-svc"),
        *(b"nel", b"report-to", b"reporting-endpoints", b"www-authenticate", b"proxy-authenticate", b"server", b"date"),
        *(REQUEST_ID, b"traceresponse", b"x-content-type-options", b"referrer-policy", b"cross-origin-resource-policy"),
    )
)
"""Headers of an answer that speak for its whole origin, which is ours, or that we say ourselves."""
OURS: Final = (
    (b"content-security-policy", b"sandbox"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
Headers = Iterable[tuple[bytes, bytes]]


def without_hops(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers that are for whoever is at the other end, and not for the next on the way, names in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lower if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in lower if name not in HOP and name not in named]


def asked_headers(headers: Headers, mount: bytes, port: int) -> list[tuple[bytes, bytes]]:
    """Return what a service is told of a request: nothing of who asks, and where it is mounted."""
    passed = [
        (name, value)
        for name, value in without_hops(headers)
        if name not in PRIVATE and not name.startswith((b"x-forwarded-", b"sec-websocket-"))
    ]
    return [(b"host", b"localhost:%d" % port), (b"x-forwarded-prefix", mount), *passed]


def answered_headers(headers: Headers, mount: bytes) -> list[tuple[bytes, bytes]]:
    """Return what a caller is told of a service's answer; a redirect within the service stays below its path."""
    passed = []
    for name, value in without_hops(headers):
        if name == b"location" and value.startswith(b"/") and not value.startswith((b"//", b"/\\")):
            value = mount + value
        if name not in ORIGINS and not name.startswith(b"access-control-"):
            passed.append((name, value))
    return [*passed, *OURS]


@dataclass(eq=False)
class ServiceProxy:
    """Carries requests and WebSockets to services, as far as `Entrance` let their callers in."""

    host: Host
    authenticate: Authenticate
    drain: Drain
    _open: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many requests and WebSockets are open or being dialed, by project and agent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        match = PATH.fullmatch(scope["raw_path"].partition(b"?")[0])
        with contextlib.ExitStack() as stack:
            try:
                if match is None:
                    raise NotFound("services are at /services/ID/PORT/…")
                item, port, tail = match[1], int(match[2]), match[3] or b""
                require_allowed(self.host.operations[RUNS], scope[IDENTITY])
                stack.enter_context(self._place(scope[IDENTITY]))
                opened = await self.host.work.service(scope[IDENTITY], item.decode(), port)
            except KdskillsError as error:
                await refuse(error, scope, receive, send)
                return
            stack.callback(opened.writer.transport.abort)  # a close would wait for a service that reads nothing
            mount, query = b"/services/%s/%d" % (item, port), scope["query_string"]
            target = (tail or b"/") + (b"?" + query if query else b"")
            serve = self._http if scope["type"] == "http" else self._socket
            await serve(Crossing(scope, receive, send, mount, port, target), opened)

    @contextlib.contextmanager
    def _place(self, identity: Identity) -> Iterator[None]:
        """Count one connection of a caller, from before it is dialed until the block ends. Raises RateLimited."""
        caller = (identity.project, identity.agent)
        if self._open[caller] >= MOST:
            raise RateLimited(f"your {MOST} connections to services are open: close one", retry_after=1)
        if self._open.total() >= MOST_OF_ALL:
            raise RateLimited(f"all {MOST_OF_ALL} connections to services are in use: ask again", retry_after=1)
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open -= Counter((caller,))

    async def _http(self, crossing: Crossing, opened: StreamEnds) -> None:
        silence_s = self.host.settings.fleet.service_silence_s
        exchange = Exchange(crossing, opened, silence_s)
        try:
            await self._until_first(crossing.scope, (exchange.answer(), exchange.ask()))
        except (OSError, TimeoutError, h11.ProtocolError):
            if exchange.begun:  # the caller sees that the answer was cut: nothing ends it
                return
            error = ServiceDown("the service does not answer, or not in HTTP")
            await refuse(error, crossing.scope, crossing.receive, crossing.send)

    async def _socket(self, crossing: Crossing, opened: StreamEnds) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        scope, bridge = crossing.scope, None
        headers = [(b.decode("latin-1"), v.decode("latin-1")) for b, v in crossing.asked if b != b"host"]
        options: dict[str, Any] = {"additional_headers": headers, "subprotocols": scope["subprotocols"] or None}
        options |= {"max_size": MESSAGE, "compression": None, "proxy": None, "user_agent_header": None}
        address = f"ws://localhost:{crossing.port}{crossing.target.decode('latin-1')}"
        try:
            ours, bridge = await opened.bridged()
            async with connect(address, sock=ours, **options) as client:
                await crossing.receive()  # the wish to connect
                await crossing.send({"type": "websocket.accept", "subprotocol": client.subprotocol})
                await self._until_first(
                    scope, (_up(crossing.receive, client), _down(client, crossing.send)), until_drained=True
                )
        except (OSError, TimeoutError, ValueError, WebSocketException):  # a redirect is a ValueError
            error = ServiceDown("the service does not take this WebSocket")
            await refuse(error, scope, crossing.receive, crossing.send)
        finally:
            if bridge is not None:
                bridge.cancel()
                await asyncio.gather(bridge, return_exceptions=True)

    async def _until_first(
        self, scope: Scope, doings: Sequence[Awaitable[object]], *, until_drained: bool = False
    ) -> None:
        """Do all of it until the first is done, the token opens nothing any more or, if so asked, the service is stopped."""
        with self.drain.stop_event() as stopping:
            ends = (self._while_allowed(scope), *((stopping.wait(),) if until_drained else ()))
            tasks = [asyncio.ensure_future(each) for each in (*doings, *ends)]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

    async def _while_allowed(self, scope: Scope) -> None:
        """Return once a token that was good is not any more."""
        header = dict(scope["headers"]).get(b"authorization")
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if header is not None:
                    require_allowed(self.host.operations[RUNS], await self.authenticate(header.decode("latin-1")))
            except OperatorMustAct:  # a database that is away ends nothing that was allowed
                continue
            except KdskillsError:
                return


def service_routes(proxy: ServiceProxy) -> list[BaseRoute]:
    """Return the routes of *proxy*, for HTTP and WebSockets."""
    return [Route(SERVICES, proxy, include_in_schema=False), WebSocketRoute(SERVICES, proxy)]


@dataclass(eq=False)
class Crossing:
    """One request on its way to a port of a service mounted at `mount`, where it asks for `target`."""

    scope: Scope
    receive: Receive
    send: Send
    mount: bytes
    port: int
    target: bytes

    @property
    def asked(self) -> list[tuple[bytes, bytes]]:
        """The headers the service is told: those of the caller's, and which request, and step of a trace, this is."""
        tracking = {REQUEST_ID: self.scope["state"][REQUEST], TRACEPARENT.encode(): current_trace()}
        headers = asked_headers(self.scope["headers"], self.mount, self.port)
        return [*headers, *((name, str(word).encode()) for name, word in tracking.items())]


class Exchange:
    """One request over HTTP and its answer, both carried as they come; `begun` once the caller has some of the answer.

    Neither the service nor the caller may stand still for longer than *silence_s* seconds while the other waits for it.
    """

    def __init__(self, crossing: Crossing, opened: StreamEnds, silence_s: float) -> None:
        self.begun = False
        self._crossing = crossing
        self._reader, self._writer = opened
        self._silence_s = silence_s
        self._wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=CHUNK)
        self._bodies = dict(crossing.scope["headers"])
        self._asked_all = False
        self._moved_at = time.monotonic()

    async def ask(self) -> None:
        """Send the request; return when the caller is gone."""
        crossing, headers = self._crossing, self._crossing.asked
        if b"transfer-encoding" in self._bodies:
            headers.append((b"transfer-encoding", b"chunked"))
        await self._write(h11.Request(method=crossing.scope["method"], target=crossing.target, headers=headers))
        while True:
            message = await crossing.receive()
            if message["type"] == "http.disconnect":
                return
            if message.get("body"):
                await self._write(h11.Data(message["body"]))
            if not message.get("more_body") and not self._asked_all:
                self._asked_all = True
                await self._write(h11.EndOfMessage())

    async def answer(self) -> None:
        """Carry the answer back."""
        while True:
            event = self._wire.next_event()
            if event is h11.NEED_DATA:
                self._wire.receive_data(await self._next_bytes())
            elif isinstance(event, h11.Response):
                headers = answered_headers(event.headers, self._crossing.mount)
                await self._tell({"type": "http.response.start", "status": event.status_code, "headers": headers})
                self.begun = True
            elif isinstance(event, h11.Data):
                await self._tell({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await self._tell({"type": "http.response.body", "body": b""})
                return
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the service ended its answer before its end")

    async def _next_bytes(self) -> bytes:
        """Return more of the answer; a service may be silent for as long as the request still moves. Raises TimeoutError."""
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    return await self._reader.read(CHUNK)
            except TimeoutError:
                if self._asked_all or time.monotonic() - self._moved_at >= self._silence_s:
                    raise

    async def _write(self, event: h11.Event) -> None:
        """Send a part of the request; a service that takes no more of it may have answered already."""
        if data := self._wire.send(event):
            self._moved_at = time.monotonic()
            self._writer.write(data)
            async with asyncio.timeout(self._silence_s):
                with contextlib.suppress(ConnectionError):
                    await self._writer.drain()

    async def _tell(self, message: Message) -> None:
        async with asyncio.timeout(self._silence_s):
            await self._crossing.send(message)


async def _up(receive: Receive, client: Any) -> None:
    """Carry messages of a caller to the service until the caller is gone."""
    while (message := await receive())["type"] != "websocket.disconnect":
        await client.send(message["bytes"] if message.get("bytes") is not None else message["text"])
    await client.close()


async def _down(client: Any, send: Callable[[Message], Awaitable[None]]) -> None:
    """Carry messages of the service to the caller until the service ends."""
    from websockets.exceptions import ConnectionClosedError

    with contextlib.suppress(ConnectionClosedError):  # by a code of its own, or broken
        async for message in client:
            await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
    code = client.close_code or 1006
    await send({"type": "websocket.close", "code": {1005: 1000, 1006: 1011}.get(code, code)})
