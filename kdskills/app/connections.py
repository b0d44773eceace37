"""Connections of a server over HTTP: a bounded number, each with deadlines, and room kept for questions about health.

A peer that sends no request costs a connection and nothing else, so connections without one are the first to go when
all are taken: the one that has waited longest makes room for the newest. Those with a request are never cut for others;
when all have one, a few more are let in that are answered about health only. See docs/how-to/run-the-service.md.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kdskills.app.authentication import ListenRefused
from kdskills.app.logs import Sparingly
from kdskills.app.wire import json_facts
from kdskills.errors import OperatorMustAct

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_LOG = logging.getLogger("kdskills.http")

HEALTH: Final = frozenset({"/healthz", "/readyz"})
#: Connections beyond the bound that are let in for questions about health.
ROOM: Final = 16
#: Connections taken from the system at a time: between two of its turns the loop has to see them, to let others go.
ACCEPTED_AT_ONCE: Final = 16
#: Connections the system keeps waiting for us.
BACKLOG: Final = 1024
MAX_CONNECTIONS: Final = 10_000
#: Bytes of a body in a second below which a sender is taken to waste time, once its first `body_s` are over.
SLOWEST: Final = 1024
UNENDED: Final = "ASGI callable returned without completing response"
"""What it says of an answer that a service, or another host, did not bring to its end."""
NOISE: Final = (
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library",
    UNENDED,
)
LATE: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class TooManyConnections(OperatorMustAct, code="too_many_connections"):
    """Every connection this process may have is taken by a request; only questions about health are answered."""


def most_connections() -> int:
    """Return how many connections the open files of this process allow, with files left for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(8, files - max(96, files // 4) - ROOM))


class Crowd:
    """The connections of one server: at most `most`, without it as many as open files allow.

    A connection has `header_s` for the head of a request, from its first byte or its opening on; a body may stand still
    for `body_s`.
    """

    def __init__(self, *, most: int | None = None, header_s: float = 10.0, body_s: float = 30.0) -> None:
        bound = most_connections()
        self.most = bound if most is None else min(most, bound)
        self.header_s = header_s
        self.body_s = body_s
        self.say = Sparingly()
        self._all: set[Guarded] = set()
        self._waiting: dict[Guarded, None] = {}

    def enter(self, connection: Guarded) -> bool:
        """Take a connection in; another one goes for it where need be. Whether it may send requests of every kind."""
        self._all.add(connection)
        self._waiting[connection] = None
        if len(self._all) <= self.most:
            return True
        oldest = next(iter(self._waiting))
        if oldest is not connection:
            idle = "those that send no request are closed, the oldest first"
            self.say.warn(_LOG, f"more than {self.most} connections at one time: {idle}")
            self.leave(oldest)
            oldest.transport.abort()
            return True
        self.say.warn(_LOG, f"{self.most} connections with a request at one time: others are asked to come again")
        if len(self._all) > self.most + ROOM:
            self.leave(connection)
            connection.transport.abort()
        return False

    def leave(self, connection: Guarded) -> None:
        """Forget a connection."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)

    def waits(self, connection: Guarded, *, still: bool) -> None:
        """Note whether a connection waits for a request, so that it may go for another."""
        if not still:
            self._waiting.pop(connection, None)
        elif connection in self._all:
            self._waiting.setdefault(connection)


class Guarded(H11Protocol):
    """One connection: its peer has so long for a head, and for a body that does not move."""

    crowd: Crowd

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._body_of: object = None
        self._began = self._heard = 0.0
        self._bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base has it
        """Take the connection in."""
        super().connection_made(transport)
        if not self.crowd.enter(self):
            self.app, self.ws_protocol_class = _crowded(self.app), None
        self._wait_for(self.crowd.header_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_for(None)
        self.crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes that came."""
        self._heard = self.loop.time()
        self._bytes += len(data)
        super().data_received(data)
        if self.transport.get_protocol() is self:
            self._look()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._look()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Give the connection to a WebSocket, which has a place in the crowd for as long as it is open."""
        self._wait_for(None)
        self.crowd.waits(self, still=False)
        super().handle_websocket_upgrade(event)
        protocol: Any = self.transport.get_protocol()
        lost = protocol.connection_lost

        def connection_lost(exc: Exception | None) -> None:
            self.crowd.leave(self)
            lost(exc)

        protocol.connection_lost = connection_lost

    def _look(self) -> None:
        """Set the deadline that fits what the peer owes: a head, the rest of a body, or nothing."""
        cycle: Any = self.cycle  # none before the first request, whatever its type says
        idle = cycle is None or cycle.response_complete
        self.crowd.waits(self, still=idle)
        if idle:
            self._body_of = None
            owes_nothing = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
            if owes_nothing and cycle is not None:
                self._wait_for(None)  # between two requests the server's own patience counts
            elif self._deadline is None:
                self._wait_for(self.crowd.header_s, self._head_is_late)
        elif not cycle.more_body:
            self._wait_for(None)
        elif self._body_of is not cycle:
            self._body_of, self._began, self._bytes = cycle, self.loop.time(), 0
            self._wait_for(self.crowd.body_s, self._body_is_late)

    def _wait_for(self, seconds: float | None, late: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None or late is None else self.loop.call_later(seconds, late)

    def _head_is_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        self.crowd.say.warn(_LOG, "connections are closed that send no whole request in time")
        cycle: Any = self.cycle
        if cycle is None and self.conn.trailing_data[0]:
            self.transport.write(LATE)
        self.transport.close()

    def _body_is_late(self) -> None:
        """Close, unless bytes came fast enough or it is we who do not take them."""
        self._deadline = None
        now, patience = self.loop.time(), self.crowd.body_s
        until = min(self._heard + patience, self._began + patience + self._bytes / SLOWEST)
        if self.flow.read_paused:
            until = now + patience
        if now < until:
            self._wait_for(until - now, self._body_is_late)
            return
        self.crowd.say.warn(_LOG, "connections are closed whose bodies do not come in time")
        if not self.cycle.response_started:
            self.transport.write(LATE)
        self.transport.abort() if self.cycle.response_started else self.transport.close()


def _crowded(app: Any) -> ASGIApp:
    """Return an application that answers about health, and else that there is no room."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH:
            await app(scope, receive, send)
            return
        error = TooManyConnections("every connection is taken by a request: come again")
        facts = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": error.message}
        body = json_facts({**facts, "code": error.code, "who": error.who, "details": {}, "request_id": ""}).encode()
        headers = [(b"content-type", b"application/problem+json"), (b"retry-after", b"1"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer


class BoundedServer(uvicorn.Server):
    """A server on sockets that are bound already, which says where it is."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the system then keeps more connections waiting than the loop, which has one number for both, takes."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
            name, port = listener.getsockname()[:2]
            address = f"[{name}]" if ":" in name else name
            words = "Uvicorn running on http://%s:%d (Press CTRL+C to quit)"
            logging.getLogger("uvicorn.error").info(words, address, port)


def server_config(app: ASGIApp, name: str, port: int, crowd: Crowd, **options: Any) -> uvicorn.Config:
    """Return the configuration of a server whose connections are *crowd*."""
    protocol = type("Guarded", (Guarded,), {"crowd": crowd})
    usual: dict[str, Any] = {"ws": "none", "log_config": None, "access_log": False, "server_header": False}
    place: dict[str, Any] = {"host": name, "port": port, "http": protocol, "backlog": ACCEPTED_AT_ONCE}
    return uvicorn.Config(app, lifespan="on", **place, **(usual | options))


async def serve(server: BoundedServer, crowd: Crowd) -> None:
    """Serve until the server is told to stop. Raises ListenRefused: the address is taken, or not of this machine."""
    config = server.config
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def log_exhaustion(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" in str(context.get("message")):
            crowd.say.warn(_LOG, f"no connection can be taken: {context.get('exception')}")
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    log, noise = logging.getLogger("uvicorn.error"), Sparingly()

    def quiet(record: logging.LogRecord) -> bool:  # what any peer can make the server say is said once in a while
        if '"WebSocket %s"' in str(record.msg):  # with its query, which is nobody's
            return False
        return not str(record.msg).startswith(NOISE) or noise.due("noise")

    try:
        sockets = _sockets(config.host, config.port)
    except OSError as error:
        message = f"cannot listen on {config.host}:{config.port}: the address is taken or not of this machine"
        raise ListenRefused(message) from error
    log.addFilter(quiet)
    loop.set_exception_handler(log_exhaustion)
    try:
        await server.serve(sockets=sockets)
    finally:
        loop.set_exception_handler(before)
        log.removeFilter(quiet)
        for listener in sockets:
            listener.close()


def _sockets(name: str, port: int) -> list[socket.socket]:
    """Return a bound socket for each address of *name*. Raises OSError."""
    bound: list[socket.socket] = []
    addresses = set(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    with ExitStack() as unless_all_are_bound:
        for family, kind, number, _, address in sorted(addresses):
            listener = unless_all_are_bound.enter_context(socket.socket(family, kind, number))
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setblocking(False)
            listener.bind(address)
        unless_all_are_bound.pop_all()
    return bound
