"""Network on purpose: the proxy of one run, on this host. It listens nowhere.

A helper inside the sandbox accepts connections on the sandbox's own loopback and hands each, as a descriptor, through one
socket to us (`kdskills_runtime.egress`). What comes through is the program's word: a descriptor is looked at before it is
used, and no call on it may wait, as the other side can change how it behaves.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from os import close as close_fd
from os import fstat
from typing import Final

from kdskills.execution.egress import (
    MAX_HEAD,
    NO_ADDRESS,
    BadAnswer,
    BadHead,
    HostRule,
    RequestBody,
    RequestHead,
    ResponseHead,
    address_problem,
    authority,
    parse_head,
)
from kdskills.execution.egress_secrets import RunSecrets, SecretMask, TlsEnd
from kdskills.execution.request import EgressBounds, NetworkConnection

_LOG = logging.getLogger("kdskills.execution.egress")

HEAD_S: Final = 10.0
"""Seconds a program has for the head of a request."""
CONNECT_S: Final = 10.0
"""Seconds a server has to take a connection, all of its addresses together."""
CLOSE_S: Final = 1.0
"""Seconds the end of a run waits for connections to be closed; one that asks a name server may take longer, and then does nothing."""
MAX_ROWS: Final = 256
"""Connections of a run that its result lists."""
MAX_LINES: Final = 10_000
"""Connections of a run that have a line in the log: a program fills no disk of this host."""
PACE_MS: Final = 1
"""Pause after each connection beyond `MAX_ROWS`: a program that begins them without end takes no processor of this host."""
_CHUNK: Final = 64 * 1024
_ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
_NOWAIT: Final = socket.MSG_DONTWAIT
_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_STATUS: Final = {
    "bad_request": "400 Bad Request",
    "not_granted": "403 Forbidden",
    "address_refused": "403 Forbidden",
    "bytes_exceeded": "403 Forbidden",
    "name_unknown": "502 Bad Gateway",
    "unreachable": "502 Bad Gateway",
    "bad_answer": "502 Bad Gateway",
    "broken": "502 Bad Gateway",
    "server_untrusted": "502 Bad Gateway",
    "tls_failed": "502 Bad Gateway",
    "too_many": "503 Service Unavailable",
    "too_slow": "504 Gateway Timeout",
}

Resolver = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of *host*, a full name without its last dot, or an address. Raises OSError."""
    # The dot keeps the resolver from trying the name below this host's own domains.
    name = host if address_problem(host) != NO_ADDRESS else f"{host}."
    rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


class EgressRefused(Exception):
    """A connection that is not made, or ends; `code` is its outcome, and the message is for the program."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Flow:
    """One direction of a connection: what was read from `source` waits in `buffer` until `sink` takes it."""

    source: socket.socket
    sink: socket.socket
    transform: Callable[[bytes], bytes]
    count: Callable[[int], None]
    buffer: bytes = b""
    reading: bool = True
    finished: bool = False

    def read(self) -> None:
        """Take what the source has. Raises OSError, BadHead, EgressRefused."""
        with suppress(BlockingIOError):
            data = self.source.recv(_CHUNK, _NOWAIT)
            self.reading = bool(data)
            self.count(len(data))
            self.buffer += self.transform(data)

    def write(self) -> None:
        """Give the sink what it takes, and the end once there is no more. Raises OSError."""
        with suppress(BlockingIOError):
            while self.buffer:
                self.buffer = self.buffer[self.sink.send(self.buffer, _SEND) :]
        if not (self.reading or self.buffer or self.finished):
            self.finished = True
            self.sink.shutdown(socket.SHUT_WR)


class EgressConnection:
    """One connection of the program, from its first byte to its row in the result."""

    def __init__(self, proxy: EgressProxy, client: socket.socket) -> None:
        self._proxy, self._client = proxy, client
        self._started = time.monotonic()
        self._end = self._started + proxy.bounds.seconds
        self._row = NetworkConnection("", 0, "ok")
        self._sent = self._received = 0
        self._answered = False
        self._inner: TlsEnd | None = None  # with the program, in whose requests we put secrets

    def serve(self) -> NetworkConnection:
        """Serve it to its end and return what came of it."""
        outcome, words = "ok", ""
        try:
            data = self._read_head()
            end = data.index(b"\r\n\r\n") + 4
            head = parse_head(data[:end])
            self._row = replace(self._row, host=head.host, port=head.port)
            secrets = self._proxy.secrets.headers(head.host, head.port, tls=head.method == "CONNECT")
            with self._connect(head.host, head.port) as upstream:
                if secrets and head.method == "CONNECT":
                    self._relay_opened(upstream, head, data[end:], secrets)
                else:
                    self._relay(upstream, head, data[end:], secrets)
        except BadHead as error:
            outcome, words = "bad_request", str(error)
        except BadAnswer as error:
            outcome, words = "bad_answer", str(error)
        except EgressRefused as error:
            outcome, words = error.code, str(error)
        except OSError as error:
            outcome, words = "broken", error.strerror or "the connection broke"
        except Exception:  # noqa: BLE001 - whatever it is, the connection has its row
            _LOG.exception("a connection to %s broke", self._row.host)
            outcome, words = "broken", "the connection broke"
        if not self._answered:
            self._refuse(outcome, words)
        duration = time.monotonic() - self._started
        return replace(self._row, outcome=outcome, sent=self._sent, received=self._received, duration_s=duration)

    def _read_head(self) -> bytes:
        """Read until the head's empty line. Raises BadHead, EgressRefused, OSError."""
        data, end = b"" if self._inner is None else self._inner.open(b""), min(self._end, time.monotonic() + HEAD_S)
        while True:
            lines, complete, _ = data.partition(b"\r\n\r\n")
            if lines.count(b"\n") != lines.count(b"\r\n") or len(lines) > MAX_HEAD:
                raise BadHead("the head is too long, or its lines do not end in CR and LF")
            if complete:
                return data
            self._await([(self._client, select.POLLIN)], end)
            with suppress(BlockingIOError):
                piece = self._client.recv(_CHUNK, _NOWAIT)
                if not piece:
                    raise BadHead("the request ended within its head")
                data += piece if self._inner is None else self._inner.open(piece)

    def _connect(self, host: str, port: int) -> socket.socket:
        """Return a connection to an address of *host* that was checked. Raises EgressRefused."""
        proxy, target = self._proxy, authority(host, port)
        proxy.require_bytes()
        if not any(rule.matches(host, port) for rule in proxy.rules):
            raise EgressRefused(
                "not_granted", f"{target} is not granted; the operator grants hosts by the setting network"
            )
        try:
            addresses = proxy.resolver(host, port)
        except (OSError, UnicodeError):
            raise EgressRefused("name_unknown", f"the name {host} cannot be resolved") from None
        problems = {address: address_problem(address) for address in addresses}
        checked = [address for address, problem in problems.items() if problem is None and not _is_ours(address)]
        if not checked:
            words = next((problem for problem in problems.values() if problem), "this host's")
            raise EgressRefused("address_refused", f"the address of {target} may not be reached: it is {words}")
        end = min(self._end, time.monotonic() + CONNECT_S)
        proxy.require_run()  # which may be over by now: name servers take their time
        for address in checked[:4]:
            with suppress(OSError):
                upstream = self._connected(address, port, end)
                self._row = replace(self._row, address=address)
                return upstream
        raise EgressRefused("unreachable", f"{target} takes no connection")

    def _connected(self, address: str, port: int, end: float) -> socket.socket:
        """Connect to exactly this address. Raises OSError, EgressRefused."""
        upstream = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        with ExitStack() as stack:
            stack.enter_context(upstream)
            upstream.setblocking(False)
            with suppress(BlockingIOError):
                upstream.connect((address, port))
            self._await([(upstream, select.POLLOUT)], end)
            upstream.getpeername()  # raises unless it is connected
            stack.pop_all()
            return upstream

    def _relay_opened(
        self, upstream: socket.socket, tunnel: RequestHead, data: bytes, secrets: Mapping[str, str]
    ) -> None:
        """Be the server to the program, read one request within the *tunnel*, and pass it on with *secrets*.

        Raises as `_Flow.read`.
        """
        self._answered = True  # what we have to say now goes into the tunnel, once it stands
        end = min(self._end, time.monotonic() + HEAD_S)
        inner = TlsEnd(self._proxy.secrets.context_as(tunnel.host))
        self._send(self._client, _ESTABLISHED, end)
        self._shake(inner, self._client, data, end)
        self._inner, self._answered = inner, False
        data = self._read_head()
        size = data.index(b"\r\n\r\n") + 4
        head = parse_head(data[:size], (tunnel.host, tunnel.port))
        outer = TlsEnd(self._proxy.secrets.context_to, tunnel.host)
        self._shake(outer, upstream, None, min(self._end, time.monotonic() + CONNECT_S))
        self._relay(upstream, head, data[size:], secrets, outer)

    def _shake(self, tls: TlsEnd, link: socket.socket, data: bytes | None, end: float) -> None:
        """Agree with the other end of *link*, whose first bytes are *data*, None when we begin. Raises EgressRefused, OSError."""
        done = False
        while not done:
            try:
                done = (data is None or bool(data)) and tls.shake(data or b"")
            except ssl.SSLError as error:
                with suppress(OSError):
                    link.send(tls.outgoing(), _SEND)
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise EgressRefused(
                        "server_untrusted", f"the server is not trusted: {error.verify_message}"
                    ) from None
                raise EgressRefused("tls_failed", "there is no TLS with the other end") from None
            self._send(link, tls.outgoing(), end)
            data = b""
            if not done:
                self._await([(link, select.POLLIN)], end)
                with suppress(BlockingIOError):
                    data = link.recv(_CHUNK, _NOWAIT)
                    self._proxy.take_bytes(len(data))
                    if not data:
                        raise EgressRefused("tls_failed", "the other end broke off TLS")

    def _send(self, link: socket.socket, data: bytes, end: float) -> None:
        """Send all of *data*. Raises EgressRefused, OSError."""
        self._proxy.take_bytes(len(data))
        while data:
            self._await([(link, select.POLLOUT)], end)
            with suppress(BlockingIOError):
                data = data[link.send(data, _SEND) :]

    def _relay(
        self,
        upstream: socket.socket,
        head: RequestHead,
        data: bytes,
        secrets: Mapping[str, str],
        outer: TlsEnd | None = None,
    ) -> None:
        """Pass on one request with *secrets* and its answer, or all bytes of a tunnel; *outer* is TLS with the server.

        Raises as `_Flow.read`.
        """
        tunnel, inner, mask = head.method == "CONNECT", self._inner, SecretMask(secrets.values())
        body, answer = RequestBody(head.size), ResponseHead()
        # An answer that was packed would hide what it repeats from the mask.
        further = {**secrets, "Accept-Encoding": "identity"} if secrets else {}

        def sent(text: bytes) -> bytes:
            return text if outer is None else outer.seal(text)

        def passed_on(data: bytes) -> bytes:
            return sent(body.feed(data if inner is None else inner.open(data)))

        def passed_back(data: bytes) -> bytes:
            text = mask.feed(answer.feed(data if outer is None else outer.open(data)), last=not data)
            self._answered = self._answered or bool(text)  # until then a refusal still reaches the program
            return text if inner is None else inner.seal(text, last=not data and outer is not None and outer.closed)

        there = _Flow(self._client, upstream, _same if tunnel else passed_on, self._count_sent)
        back = _Flow(upstream, self._client, _same if tunnel else passed_back, self._count_received)
        there.buffer = data if tunnel else sent(head.forwarded(further) + body.feed(data))
        if secrets:
            self._row = replace(self._row, secret_headers=tuple(sorted(secrets)))
        if tunnel:
            self._answered = True
            back.buffer = _ESTABLISHED
        elif head.waits and not body.complete:
            words = b"HTTP/1.1 100 Continue\r\n\r\n"
            back.buffer = words if inner is None else inner.seal(words)
        self._count_sent(len(there.buffer))
        # A program that has sent its request may already have closed its half; the server learns nothing of that.
        there.finished = not tunnel
        while not back.finished and self._await_flows(there, back, wanted=tunnel or not body.complete):
            if not (tunnel or body.complete or there.reading):
                raise BadHead("the request ended within its body")
            if not (self._answered or back.reading):
                raise BadAnswer("the server ended the connection without an answer")
            for flow in (there, back):
                flow.write()

    def _await_flows(self, there: _Flow, back: _Flow, *, wanted: bool) -> bool:
        """Wait until something can be moved and read it; *wanted* says whether more of the program's bytes are. False when
        the program has gone away.
        """
        events = {there.source: 0, back.source: 0}
        for flow in (there, back):
            if flow.reading and len(flow.buffer) < _CHUNK and (wanted or flow is back):
                events[flow.source] |= select.POLLIN
            if flow.buffer:
                events[flow.sink] |= select.POLLOUT
        links = [(link, mask) for link, mask in events.items() if mask or link is self._client]
        ready = self._await(links, self._end)
        for flow in (there, back):
            if ready.get(flow.source, 0) & ~select.POLLOUT and events[flow.source] & select.POLLIN:
                flow.read()
        return not ready.get(self._client, 0) & (select.POLLHUP | select.POLLERR)

    def _await(self, links: Sequence[tuple[socket.socket, int]], end: float) -> dict[socket.socket, int]:
        """Wait for events. Raises EgressRefused: `too_slow` at *end*, `run_over` when the run ends."""
        poll = select.poll()
        poll.register(self._proxy.over, select.POLLIN)
        for link, mask in links:
            poll.register(link, mask)
        by_fd = {link.fileno(): link for link, _ in links}
        ready = dict(poll.poll(max(0.0, end - time.monotonic()) * 1000))
        if self._proxy.over.fileno() in ready:
            raise EgressRefused("run_over", "the run is over")
        if not ready:
            raise EgressRefused("too_slow", "this took too long")
        return {by_fd[fd]: mask for fd, mask in ready.items()}

    def _count_sent(self, size: int) -> None:
        self._sent += size
        self._proxy.take_bytes(size)

    def _count_received(self, size: int) -> None:
        self._received += size
        self._proxy.take_bytes(size)

    def _refuse(self, outcome: str, words: str) -> None:
        """Tell the program why nothing was done, and let it read that before the connection is closed."""
        if outcome not in _STATUS:
            return
        answer = _refusal(outcome, words)
        with suppress(OSError, EgressRefused):
            self._client.send(answer if self._inner is None else self._inner.seal(answer, last=True), _SEND)
            self._client.shutdown(socket.SHUT_WR)
            end = time.monotonic() + 0.5  # bytes nobody read would make the kernel throw the answer away
            while self._await([(self._client, select.POLLIN)], end) and self._client.recv(_CHUNK, _NOWAIT):
                pass


def _refusal(outcome: str, words: str) -> bytes:
    """Return an answer of ours."""
    text = f"kdskills: {words}\n".encode()
    head = f"HTTP/1.1 {_STATUS[outcome]}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + text


def _same(data: bytes) -> bytes:
    return data


def _is_ours(address: str) -> bool:
    """Whether this host itself has the address: its services may be closed to the world and open to itself."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as link:
        with suppress(OSError):
            link.connect((address, 9))  # of a datagram socket: looks up the route and sends nothing
            return bool(link.getsockname()[0] == address)
        return False


class EgressProxy:
    """Serves the connections that come through *channel*, our end of the socket, until `close`."""

    def __init__(
        self,
        channel: socket.socket,
        rules: Sequence[HostRule],
        bounds: EgressBounds,
        resolver: Resolver = resolve,
        secrets: RunSecrets | None = None,
    ) -> None:
        self.secrets = RunSecrets({}) if secrets is None else secrets
        self.rules, self.bounds, self.resolver = tuple(rules), bounds, resolver
        self.over, self._over_write = socket.socketpair()
        self._channel = channel
        self._lock = threading.Lock()
        self._bytes_left = bounds.size
        self._rows: list[NetworkConnection] = []
        self._count = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="kdskills-egress", daemon=True)
        self._thread.start()

    def close(self) -> tuple[NetworkConnection, ...]:
        """End every connection and return what became of each, of the first `MAX_ROWS`, in the order of their ends."""
        self._over_write.close()
        end = time.monotonic() + CLOSE_S
        self._thread.join(CLOSE_S)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            self._closed = True
            if not self._threads:
                self.over.close()
            return tuple(self._rows)

    def require_run(self) -> None:
        """Raise EgressRefused when the run is over."""
        if self._over_write.fileno() < 0:
            raise EgressRefused("run_over", "the run is over")

    def require_bytes(self) -> None:
        """Raise EgressRefused when the run has used up its bytes."""
        if self._bytes_left < 0:
            raise EgressRefused("bytes_exceeded", f"a run may move {self.bounds.size} bytes over the network")

    def take_bytes(self, size: int) -> None:
        """Count bytes of any connection. Raises EgressRefused when they are more than the run may move."""
        with self._lock:
            self._bytes_left -= size
        self.require_bytes()

    def _accept(self) -> None:
        """Take descriptors until the run is over or the helper is gone."""
        with self._channel:
            poll, pause = select.poll(), select.poll()
            for link in (self.over, self._channel):
                poll.register(link, select.POLLIN)
            pause.register(self.over, select.POLLIN)
            while self.over.fileno() not in dict(poll.poll()):
                try:
                    data, fds, _, _ = socket.recv_fds(self._channel, 1, 1, _NOWAIT | socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                for fd in fds:
                    self._take(fd)
                if not data:
                    return
                if self._count > MAX_ROWS:
                    pause.poll(PACE_MS)

    def _take(self, fd: int) -> None:
        """Serve a descriptor that is a TCP connection of the sandbox; anything else is closed."""
        client = _connection_of(fd)
        if client is None:
            self._note(NetworkConnection("", 0, "bad_request"))
            return
        thread = threading.Thread(target=self._serve, args=(client,), name="kdskills-egress-connection", daemon=True)
        with self._lock:
            admitted = len(self._threads) < self.bounds.connections
            if admitted:
                self._threads.add(thread)
        with suppress(RuntimeError):  # this process can have no more threads
            if admitted:
                thread.start()
                return
        with client, suppress(OSError):
            client.send(_refusal("too_many", "too many connections at one time"), _SEND)
            client.shutdown(socket.SHUT_WR)
            client.recv(_CHUNK, _NOWAIT)  # bytes nobody read would make the kernel throw the answer away
        with self._lock:
            self._threads.discard(thread)
        self._note(NetworkConnection("", 0, "too_many"))

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                self._note(EgressConnection(self, client).serve())
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._closed and not self._threads:
                    self.over.close()

    def _note(self, row: NetworkConnection) -> None:
        with self._lock:
            self._count += 1
            if self._count <= MAX_ROWS:
                self._rows.append(row)
        if self._count <= MAX_LINES:
            _LOG.info(
                "connection to %s:%d (%s): %s, %d bytes there, %d back",
                row.host, row.port, row.address or "no address", row.outcome, row.sent, row.received,
            )  # fmt: skip


def _connection_of(fd: int) -> socket.socket | None:
    """Return the connected TCP socket that *fd* is; None, with the descriptor closed, when it is anything else."""
    link = None
    try:
        if stat.S_ISSOCK(fstat(fd).st_mode):
            link = socket.socket(fileno=fd)
            if (link.family, link.type, link.proto) == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP):
                link.getpeername()
                return link
    except OSError:
        pass
    if link is None:
        close_fd(fd)
    else:
        link.close()
    return None
