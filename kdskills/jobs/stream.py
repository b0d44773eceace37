"""What one host has and the doors of others ask for: pieces of logs, bytes of artifacts, ports of services, all by id alone.

A worker listens where the setting `fleet.listen` says; its address and a key, new with each process, stand in the roster. One
connection is one question. The listener begins with a line of chance; the asker answers with an HMAC of it and of the question
by the key, which itself never travels, and the question, a line of JSON; then come a line of JSON and bytes. What is given
away is looked up by its id in the database: only what that says this host ran. The bytes are readable on the way unless
`fleet.certificate` makes them TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from kdskills.errors import KdskillsError, NotFound, OperatorMustAct, ServiceDown
from kdskills.execution.streams import LogPiece
from kdskills.jobs.artifacts import ArtifactCorrupt
from kdskills.jobs.companion import copy_bytes
from kdskills.jobs.model import MIB, TaskHead, Value
from kdskills.jobs.records import WorkUnreadable
from kdskills.storage.database import LazyModule

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.artifacts import ArtifactStore
    from kdskills.jobs.queue import Work
    from kdskills.jobs.settings import FleetSettings
else:
    sa = LazyModule("sqlalchemy")

MOST: Final = MIB
"""Bytes one answer has at most, but for a service's port."""
LINE: Final = 4096
PLACES: Final = 256
"""Connections one worker serves at a time; more are closed unanswered."""
PORTS: Final = 192
"""How many of them may be to services."""
_PROBES: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), number) for name, number in _PROBES if hasattr(socket, name)),
)
"""Whoever vanished without a word keeps no place for longer than two minutes, where the system has such probes."""
DIAL_S: Final = 2.0
ASK_S: Final = 5.0
SEND_S: Final = 30.0
KNOWN_S: Final = 2.0
"""Seconds that what the roster says of a host holds, and that one which did not answer is not asked again."""
OK: Final = "ok"
NOT_HERE: Final = "it does not have it any more"
NO_TLS: Final = "its stream is not TLS, and fleet.authority asks for that"
_LOG: Final = logging.getLogger("kdskills.jobs")


class StreamEnds(NamedTuple):
    """Both ends of an open connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def bridged(self) -> tuple[socket.socket, asyncio.Future[None]]:
        """Return a socket that is as good as the connection, and what carries its bytes, to be cancelled at the end."""
        ours, theirs = socket.socketpair()
        inner = StreamEnds(*await asyncio.open_connection(sock=theirs))
        return ours, asyncio.ensure_future(carry(self, inner))


ItemId = Annotated[str, Field(min_length=1, max_length=128)]


class StreamRefused(OperatorMustAct, code="stream_refused"):
    """This host cannot serve its files to the doors of others as the table `fleet` of the settings says."""


class HostUnreachable(OperatorMustAct, code="host_unreachable"):
    """The host that has it cannot be asked; `details["host"]` is its id."""


class LogQuestion(Value):
    """A piece of a stream of a task's latest attempt; a negative offset counts from the end."""

    ask: Literal["log"] = "log"
    id: ItemId
    stream: Literal["stdout", "stderr"]
    offset: int = Field(ge=-(2**62), le=2**62)
    limit: int = Field(ge=0, le=MOST)


class ArtifactQuestion(Value):
    """Bytes of an artifact."""

    ask: Literal["artifact"] = "artifact"
    id: ItemId
    begin: int = Field(ge=0, le=2**62)
    end: int = Field(ge=0, le=2**62)


class PortQuestion(Value):
    """A connection to a port that a running service declares."""

    ask: Literal["port"] = "port"
    id: ItemId
    port: int = Field(ge=1, le=65535)


Question = LogQuestion | ArtifactQuestion | PortQuestion
_QUESTION: Final = TypeAdapter[Question](Annotated[Question, Field(discriminator="ask")])


class StreamFacts(Value):
    """The line before the bytes; what is not `ok` has none."""

    code: str = OK
    size: int = Field(0, ge=0, le=MOST)
    offset: int = 0
    total: int = 0
    truncated: bool = False


class HostPiece(NamedTuple):
    """A piece of a log and, when it lies on a host that could not be asked, that host and why."""

    log: LogPiece
    elsewhere: str | None = None
    reason: str | None = None


def _signature(key: str, chance: bytes, question: bytes) -> bytes:
    return hmac.new(key.encode(), chance + b"\n" + question, hashlib.sha256).hexdigest().encode()


async def service_port(work: Work, head: TaskHead | None, port: int) -> StreamEnds | None:
    """Return a connection to a declared port of a service that runs on this host; None when it is not reached."""
    if head is None or head.status != "running" or head.host != work.host:
        return None
    host_port = next((item.host_port for item in head.endpoints if item.port == port), None)
    attempt = None if host_port is None else await asyncio.to_thread(work.attempts.find, head.id, head.attempt)
    if attempt is None or not await asyncio.to_thread(attempt.endpoints_active):
        return None
    try:
        async with asyncio.timeout(DIAL_S):
            return StreamEnds(*await asyncio.open_connection("127.0.0.1", host_port))
    except (OSError, TimeoutError):
        return None


@dataclass(eq=False)
class HostStream:
    """Serves what this host has; `address` is empty until it listens, and the key is never shown."""

    work: Work
    store: ArtifactStore
    settings: FleetSettings
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    address: str | None = None
    _open: set[asyncio.Task[Any]] = field(default_factory=set)
    _ports: int = 0

    @property
    def entry(self) -> tuple[str, str] | None:
        """Address and key for the roster; None while it does not listen."""
        return None if self.address is None else (self.address, self.key)

    async def listen(self, slot: int) -> asyncio.Server | None:
        """Listen as the settings say, the worker of *slot* that many ports further; None when they say nothing.

        Raises StreamRefused.
        """
        if self.settings.listen is None:
            return None
        name, port = self.settings.listening
        try:
            context = None
            if self.settings.certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.settings.certificate, self.settings.key)
            number = port + slot if port else 0
            patience = {} if context is None else {"ssl_handshake_timeout": ASK_S}
            server = await asyncio.start_server(self._serve, name, number, limit=LINE, ssl=context, **patience)
        except (OSError, ssl.SSLError, OverflowError) as error:
            raise StreamRefused(f"cannot serve this host's files on {name}:{port}: {error}") from None
        bound = server.sockets[0].getsockname()[1]
        told_name, told_port = self.settings.dialed or (name or socket.gethostname(), 0)
        told_name = f"[{told_name}]" if ":" in told_name else told_name
        self.address = f"{'tls' if context else 'tcp'}://{told_name}:{told_port + slot if told_port else bound}"
        _LOG.info("files of this host are served at %s", self.address)
        return server

    async def close(self, server: asyncio.Server | None) -> None:
        """Stop listening, and cut what is open."""
        if server is not None:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) < PLACES:
                self._open.add(task)
                peer = writer.get_extra_info("socket")
                for level, option, number in ALIVE:
                    peer.setsockopt(level, option, number)
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked went away, or said nothing in time
        except KdskillsError as error:
            await _refuse(writer, error.code, error.message)
        except ValidationError:  # of what lies here: a question is read in `_answer`
            await _refuse(writer, WorkUnreadable.code, "what it is about was written by a later version")
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chance = secrets.token_hex(16).encode()
        async with asyncio.timeout(ASK_S):
            writer.write(chance + b"\n")
            await writer.drain()
            signature, _, text = (await reader.readuntil(b"\n"))[:-1].partition(b" ")
        if not hmac.compare_digest(signature, _signature(self.key, chance, text)):
            _LOG.warning("a question with another key than this worker's is refused")
            await _send(writer, StreamFacts(code="key_refused"))
            return
        try:
            question = _QUESTION.validate_json(text)
        except ValidationError:
            return  # no question: nothing is said to whoever sent it
        if isinstance(question, LogQuestion):
            await self._give_log(question, writer)
        elif isinstance(question, ArtifactQuestion):
            await self._give_artifact(question, writer)
        else:
            await self._give_port(question, StreamEnds(reader, writer))

    async def _give_port(self, question: PortQuestion, asker: StreamEnds) -> None:
        if self._ports >= PORTS:  # logs and artifacts have places of their own
            await _send(asker.writer, StreamFacts(code="busy"))
            return
        self._ports += 1
        try:
            opened = await service_port(self.work, await self._head(question.id), question.port)
            await _send(asker.writer, StreamFacts(code="not_here" if opened is None else OK))
            if opened is not None:
                await carry(asker, opened)
        finally:
            self._ports -= 1

    async def _head(self, item: str) -> TaskHead | None:
        """Return a task that the database says is this host's; None for any other id."""
        head = await self.work.database.read(lambda link: self.work.records.head(link, TaskHead, item))
        return head if head is not None and head.attempt and head.host == self.work.host else None

    async def _give_log(self, question: LogQuestion, writer: asyncio.StreamWriter) -> None:
        head, piece = await self._head(question.id), None
        if head is not None:
            words = (question.stream, question.offset, question.limit)
            piece = await asyncio.to_thread(self.work.attempts.log, head.id, head.attempt, *words)
        if piece is None:
            await _send(writer, StreamFacts(code="not_here"))
            return
        facts = {name: getattr(piece, name) for name in ("offset", "total", "truncated")}
        await _send(writer, StreamFacts(size=len(piece.data), **facts), piece.data)

    async def _give_artifact(self, question: ArtifactQuestion, writer: asyncio.StreamWriter) -> None:
        table, code, data = self.work.tables.artifacts, "not_here", b""
        if question.id.isascii() and "\0" not in question.id:
            query = table.select().where(table.c.id == question.id)
            row = await self.work.database.read(lambda link: link.execute(query).first())
            if row is not None and row.task_id is not None and await self._head(row.task_id) is not None:
                end = min(question.end, question.begin + MOST, row.size)
                code, data = OK, await self.store.piece(row.project, row.sha256, question.begin, end)
        await _send(writer, StreamFacts(code=code, size=len(data)), data)


async def _send(writer: asyncio.StreamWriter, facts: StreamFacts, data: bytes = b"") -> None:
    async with asyncio.timeout(SEND_S):
        writer.write(facts.model_dump_json().encode() + b"\n" + data)
        await writer.drain()


async def _refuse(writer: asyncio.StreamWriter, code: str, words: str) -> None:
    _LOG.warning("a question of another host is not answered: %s", words)
    with contextlib.suppress(OSError, TimeoutError):
        await _send(writer, StreamFacts(code=code))


async def carry(first: StreamEnds, second: StreamEnds) -> None:
    """Carry bytes both ways between two connections until both ended, and close them."""
    writers = (first.writer, second.writer)
    try:
        async with asyncio.TaskGroup() as copies:
            copies.create_task(copy_bytes(first.reader, second.writer, first.writer))
            copies.create_task(copy_bytes(second.reader, first.writer, second.writer))
    except BaseException:  # a close would wait for a peer that reads nothing
        for writer in writers:
            writer.transport.abort()
        raise
    for writer in writers:
        writer.close()


@dataclass(eq=False)
class FarHosts:
    """Asks other hosts of the database for what they have; every method raises HostUnreachable."""

    work: Work
    settings: FleetSettings
    _workers: dict[str, tuple[float, Any, str]] = field(default_factory=dict)
    """Until when what holds of a host: the row of a worker that serves its files, or why there is none."""
    _trust: ssl.SSLContext | None = None
    """Certificates that those of hosts are checked against: reading the system's takes long."""

    async def log(self, head: TaskHead, stream: Literal["stdout", "stderr"], offset: int, limit: int) -> LogPiece:
        """Return a piece of the log of a task that ran on another host."""
        question = LogQuestion(id=head.id, stream=stream, offset=offset, limit=min(max(0, limit), MOST))
        facts, data = await self._ask(head.host or "", question, _read_bytes)
        return LogPiece(facts.offset, data, facts.total, facts.truncated)

    async def pieces(self, host: str, item: str, begin: int, end: int) -> AsyncIterator[bytes]:
        """Stream bytes of an artifact that lies on another host."""
        while begin < end:
            _, data = await self._ask(host, ArtifactQuestion(id=item, begin=begin, end=end), _read_bytes)
            if not data:
                raise HostUnreachable(f"host {host} has less of the artifact than was stored", host=host)
            begin += len(data)
            yield data

    async def stored_bytes(
        self, store: ArtifactStore, record: Any, begin: int, end: int, *, shared: bool
    ) -> AsyncIterator[bytes]:
        """Stream bytes of an artifact from *store*; unless hosts have *shared* it, from the host that alone has them.

        Raises NotFound, `artifact_missing`, and ArtifactCorrupt after all of it, when that is not what was stored.
        """
        whole, head = (begin, end) == (0, record.size), None
        if not (shared or record.task_id is None or await store.has(record.project, record.sha256)):
            records = self.work.records
            head = await self.work.database.read(lambda link: records.head(link, TaskHead, record.task_id))
        if head is None or head.host in {None, self.work.host}:
            pieces = store.pieces(record.project, record.sha256, begin, end)
            async for chunk in store.read(record.project, record.sha256) if whole else pieces:
                yield chunk
            return
        hasher = hashlib.sha256()
        async for chunk in self.pieces(head.host or "", record.id, begin, end):
            hasher.update(chunk)
            yield chunk
        if whole and hasher.hexdigest() != record.sha256:
            raise ArtifactCorrupt(f"the artifact {record.id} is not what was stored", sha256=record.sha256)

    async def service(self, head: TaskHead, port: int) -> StreamEnds:
        """Return a connection to a port of a service, which runs on this host or another.

        Raises NotFound for a port it does not declare, and ServiceDown.
        """
        if head.spec.service is None or port not in head.spec.service.expose_ports:
            raise NotFound(f"{head.id} has no service at port {port}", id=head.id, port=port)
        opened: StreamEnds | None = None
        if head.status == "running" and head.host not in {None, self.work.host}:
            try:
                opened = await self._ask(head.host or "", PortQuestion(id=head.id, port=port), _opened)
            except HostUnreachable as error:
                if error.details["reason"] != NOT_HERE:
                    raise
        else:
            opened = await service_port(self.work, head, port)
        if opened is None:
            raise ServiceDown(f"nothing answers at port {port} of {head.id}", id=head.id, port=port, status=head.status)
        return opened

    async def _ask(
        self, host: str, question: Question, read: Callable[[StreamFacts, StreamEnds], Awaitable[Any]]
    ) -> Any:
        worker = await self._worker(host)
        try:
            async with asyncio.timeout(DIAL_S):
                connection = await self._dial(worker.address)
        except (OSError, TimeoutError, ValueError) as error:  # nobody else need wait for it now
            if isinstance(error, ssl.SSLCertVerificationError):
                self._trust = None  # the file may have been renewed
            reason = _reason(error)
            self._workers[host] = (time.monotonic() + KNOWN_S, None, reason)
            raise _unreachable(host, reason) from None
        try:
            return await self._answer(worker, connection, question, read)
        except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            raise _unreachable(host, _reason(error)) from None

    async def _answer(
        self,
        worker: Any,
        connection: StreamEnds,
        question: Question,
        read: Callable[[StreamFacts, StreamEnds], Awaitable[Any]],
    ) -> Any:
        reader, writer = connection
        handed_on = False
        try:
            async with asyncio.timeout(ASK_S):
                chance, text = (await reader.readuntil(b"\n"))[:-1], question.model_dump_json().encode()
                writer.write(_signature(worker.stream_key, chance, text) + b" " + text + b"\n")
                facts = StreamFacts.model_validate(json.loads(await reader.readuntil(b"\n")))
                if facts.code != OK:
                    raise _unreachable(
                        worker.host, NOT_HERE if facts.code == "not_here" else f"it answers {facts.code[:40]}"
                    )
            async with asyncio.timeout(SEND_S):
                answer = await read(facts, connection)
            handed_on = answer is connection
            return answer
        finally:
            if not handed_on:
                writer.close()

    async def _dial(self, address: str) -> StreamEnds:
        scheme, _, target = address.partition("://")
        name, _, port = target.rpartition(":")
        if scheme != "tls" and self.settings.authority is not None:
            raise ValueError(NO_TLS)
        if scheme == "tls" and self._trust is None:
            self._trust = await asyncio.to_thread(ssl.create_default_context, cafile=self.settings.authority)
        context = self._trust if scheme == "tls" else None
        return StreamEnds(*await asyncio.open_connection(name.strip("[]"), int(port), limit=MOST, ssl=context))

    async def _worker(self, host: str) -> Any:
        until, worker, reason = self._workers.get(host, (0.0, None, ""))
        if until < time.monotonic():
            table = self.work.tables.workers
            query = table.select().where(table.c.host == host, table.c.state == "live").order_by(table.c.beat_at.desc())
            rows = await self.work.database.read(lambda link: link.execute(query).all())
            worker = next((row for row in rows if row.address and row.stream_key), None)
            reason = "it does not serve its files: see fleet.listen" if rows else "none of its workers is alive"
            self._workers[host] = (time.monotonic() + KNOWN_S, worker, reason)
        if worker is None:
            raise _unreachable(host, reason)
        return worker


def _reason(error: Exception) -> str:
    """Return why a host was not asked, in words that tell nobody its address."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not trusted: see fleet.authority"
    if isinstance(error, OSError):
        return (error.strerror or "the connection broke").lower()
    if isinstance(error, EOFError):
        return "it closed the connection"
    return NO_TLS if error.args == (NO_TLS,) else "its answer is not understood"


def _unreachable(host: str, reason: str) -> HostUnreachable:
    return HostUnreachable(f"host {host} cannot be asked: {reason}", host=host, reason=reason)


async def _read_bytes(facts: StreamFacts, connection: StreamEnds) -> tuple[StreamFacts, bytes]:
    return facts, await connection[0].readexactly(facts.size)


async def _opened(facts: StreamFacts, connection: StreamEnds) -> StreamEnds:
    return connection
