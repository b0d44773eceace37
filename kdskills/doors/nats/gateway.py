"""A gateway: takes commands from the bus, runs operations, publishes results, acknowledges.

The order makes a call's effect happen once, whatever dies in between: the operation keeps the call's id with its record,
the result is published under an id of its own, and only then is the command acknowledged. A command that is delivered
again finds the first one's record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import APIError
from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service

from kdskills.app import Host
from kdskills.app.logs import RequestRecord, note_request, number_of, without_secrets
from kdskills.app.operations import Context
from kdskills.app.operations.table import Emit
from kdskills.app.settings import BusSettings
from kdskills.doors.nats.messages import (
    HEADER_ROOM,
    RETRY_S,
    AnswerBucket,
    CallAddress,
    CallAnswer,
    CallCommand,
    Commands,
    Unreadable,
    body_of,
    ensure_streams,
    filters,
    identity_of,
    message_id,
    parse,
    progress,
    read_command,
    sent_trace,
    trace_headers,
)
from kdskills.errors import BadRequest, KdskillsError, OperatorMustAct
from kdskills.errors.traces import current_trace

_LOG = logging.getLogger("kdskills.nats")

KEEPS: Final = 5
"""Times that keeping an answer is tried."""
BEAT: Final = 3
"""A command somebody works on says so this many times within the time after which it would be delivered again."""


PASSING: Final = frozenset(
    (
        *("database_unavailable", "store_unavailable", "artifact_store_unavailable", "journal_unavailable"),
        "worker_not_started",
    )
)
"""What may be well in a moment: such a command is delivered again instead of being answered with the error."""


class CallFailed(OperatorMustAct, code="internal_error"):
    """An operation failed in a way nobody foresaw; the log of the gateway has the cause."""


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have something done for the length of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Gateway:
    """Serves commands of one version of the protocol; any number of gateways share them."""

    def __init__(self, host: Host, connection: Client) -> None:
        self._host = host
        self._settings: BusSettings = host.settings.bus
        self._nc = connection
        self._js: JetStreamContext = connection.jetstream()
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(self._settings.concurrency)
        self._answers = AnswerBucket(self._js, self._settings.version)

    async def serve(self) -> None:
        """Take and run commands until cancelled; commands that run then get the drain time."""
        commands = Commands(self._js, self._settings)
        await commands.open()
        try:
            task = asyncio.current_task()
            # Before Python 3.12 a wait of the bus's client loses a cancellation that comes in the moment of an answer.
            while task is None or not task.cancelling():
                await self._room.acquire()
                message: Msg | None = None
                try:
                    message = await commands.next()
                finally:
                    if message is None:
                        self._room.release()
                if message is not None:
                    taken = asyncio.create_task(self._take(message))
                    self._running.add(taken)
                    taken.add_done_callback(self._over)
            raise asyncio.CancelledError
        finally:
            await commands.close()  # nothing may be delivered here any more, least of all what is given back now
            await self._drain()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a command was not answered and will be delivered again", exc_info=task.exception())

    async def _drain(self) -> None:
        """Let running commands finish for a while; what is cut off is delivered again to another gateway."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self._host.settings.drain_s)
            for task in late:
                task.cancel()
            if late:
                _LOG.warning("%d commands are cut off and will be delivered again", len(late))
                await asyncio.wait(late)

    async def _take(self, message: Msg) -> None:
        try:
            address = parse(message.subject)
            command = None if address is None else read_command(address, message.data)
            why = f"{message.subject!r} is no subject of a command"
        except Unreadable as error:
            address, command, why = None, None, error.message
        if address is None or command is None:  # no gateway could ever read it
            _LOG.warning("%s: ended and not delivered again: %s", message.subject, why)
            await message.term()
            return
        async with _beside(self._beat(message)):
            try:
                answer = await self._answered(message, address, command)
            except asyncio.CancelledError:
                with suppress(NatsError):
                    await message.nak(delay=RETRY_S)
                raise
            if answer is None:
                await message.nak(delay=RETRY_S)
                return
            await self._publish(address, answer)
        await message.ack()

    async def _answered(self, message: Msg, address: CallAddress, command: CallCommand) -> CallAnswer | None:
        """Return what is told to the caller; None when the command should come again.

        What nobody foresaw is logged, comes again, and at the last delivery is told to the caller: no call stays
        without an answer.
        """
        retries = message.metadata.num_delivered < self._settings.max_deliver
        try:
            with self._request_of(command.tool_call_id[:64], message.headers) as record:
                answer = replace(await self._run(address, command), trace=record.trace)
                note_request(code=answer.error and answer.error.code)
        except NatsError as error:
            _LOG.warning("the bus does not answer: %s", error)
            self._answers.forget()
            failed = CallFailed("the bus does not give what it keeps of this call")
            return None if retries else CallAnswer(command.tool_call_id, address.operation, error=failed)
        except Exception as error:  # noqa: BLE001  logged, delivered again, and told to the caller at the last delivery
            _LOG.exception("%s: the operation failed", address.operation)
            answer = CallAnswer(command.tool_call_id, address.operation, error=CallFailed(type(error).__name__))
            return None if retries else answer
        passing = answer.error is not None and answer.error.code in PASSING
        return None if passing and retries else answer

    def _request_of(self, number: str, headers: Mapping[str, str] | None) -> AbstractContextManager[RequestRecord]:
        """Serve a message in the block: as a step of the trace in its headers, and with a line of the log."""
        return self._host.telemetry.request("nats", number, sent_trace(headers))

    async def _run(self, address: CallAddress, command: CallCommand) -> CallAnswer:
        """Run the operation for the caller the subject names, or return the answer its first run had."""
        call = command.tool_call_id
        keeps = self._answers.keeps(self._host.operations.get(address.operation), command.arguments)
        try:
            earlier = await self._answers.answer_of(address, call, body_of(command)) if keeps else None
            if earlier is not None:
                return earlier
            identity, key = identity_of(address, self._settings), f"nats:{address.channel}:{call}"
            async with self._progress(address, call) as emit:
                context = Context(identity=identity, emit=emit, idempotency_key=key, request_id=call[:64])
                output = await self._host.invoke(address.operation, command.arguments, context)
        except KdskillsError as error:
            return CallAnswer(call, address.operation, error=error)
        answer = CallAnswer(call, address.operation, output=output)
        if keeps:
            answer, _ = answer.within(self._nc.max_payload - HEADER_ROOM)
            await self._keep(address, answer, body_of(command))
        return answer

    async def _keep(self, address: CallAddress, answer: CallAnswer, body: str) -> None:
        """Keep an answer, so that the call, should it come again, does not run again: it has run, and must be answered."""
        for _ in range(KEEPS):
            try:
                await self._answers.keep(address, answer, body)
            except NatsError as error:
                _LOG.warning("an answer cannot be kept yet: %s", error)
                self._answers.forget()
                await asyncio.sleep(RETRY_S)
            else:
                return
        _LOG.error("%s: call %s would run again if it came again", address.operation, answer.tool_call_id)

    @asynccontextmanager
    async def _progress(self, address: CallAddress, call: str) -> AsyncIterator[Emit]:
        """Publish what an operation tells on the way, in order, on a subject beside the result's.

        Progress never holds up or breaks what it tells of: what the bus cannot take is left out.
        """
        queue: asyncio.Queue[object] = asyncio.Queue(maxsize=10_000)
        subject = address.subject("evt", "progress")

        def emit(event: object) -> None:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                _LOG.warning("%s: an event of call %s is left out: the bus is too slow", address.operation, call)

        async def tell() -> None:
            while True:
                data = progress(address, call, await queue.get())
                try:
                    if data is not None:
                        await self._nc.publish(subject, data, headers=trace_headers(current_trace()))
                except NatsError as error:
                    _LOG.warning("%s: an event of call %s is left out: %s", address.operation, call, error)
                finally:
                    queue.task_done()

        async with _beside(tell()):
            yield emit
            try:
                await asyncio.wait_for(queue.join(), RETRY_S)
            except TimeoutError:
                words = "%s: %d events of call %s are left out: the bus is too slow"
                _LOG.warning(words, address.operation, queue.qsize(), call)

    async def _beat(self, message: Msg) -> None:
        """Tell the bus that the command is worked on, for as long as it is."""
        while True:
            await asyncio.sleep(self._settings.ack_wait_s / BEAT)
            try:
                await message.in_progress()
            except NatsError as error:
                _LOG.warning("the bus is not told that a command is worked on: %s", error)

    async def _publish(self, address: CallAddress, answer: CallAnswer) -> None:
        """Publish a result; the same result again is one result. Retried while the bus is away."""
        answer, data = answer.within(self._nc.max_payload - HEADER_ROOM)
        headers = {"Nats-Msg-Id": message_id(address, answer, data), **trace_headers(answer.trace)}
        while True:
            try:
                await self._js.publish(address.subject("evt"), data, headers=headers)
            except (NatsError, TimeoutError) as error:
                if isinstance(error, APIError):
                    raise
                _LOG.warning("a result cannot be published yet: %s", error)
                await asyncio.sleep(RETRY_S)
                with suppress(NatsError):  # a stream of results that is gone is made again
                    await ensure_streams(self._js, self._settings.version)
            else:
                return

    async def serve_reads(self) -> Service:
        """Answer requests for quick reads, which change nothing and no stream keeps. The caller stops the service."""
        running: set[asyncio.Task[None]] = set()
        service = await add_service(self._nc, name="kdskills", version="1.0.0", description="Reads of kdskills.")
        room = asyncio.Semaphore(self._settings.concurrency)

        async def respond(request: Request) -> None:
            async with room:
                with self._request_of(number_of(""), request.headers) as record:
                    answer = await self._read(request.subject, request.data)
                    note_request(code=answer.error and answer.error.code)
                headers = trace_headers(record.trace)
                try:
                    await request.respond(answer.within(self._nc.max_payload - HEADER_ROOM)[1], headers=headers)
                except NatsError as error:
                    _LOG.warning("a read is not answered: %s", error)

        async def handle(request: Request) -> None:
            # The service hands over requests one by one: none waits for another.
            task = asyncio.create_task(respond(request))
            running.add(task)
            task.add_done_callback(running.discard)

        for number, subject in enumerate(filters(self._settings.version, "req")):
            await service.add_endpoint(name=f"read-{number}", subject=subject, handler=handle)
        return service

    async def _read(self, subject: str, data: bytes) -> CallAnswer:
        """Return what is told to the caller of a read: every request is answered."""
        address = parse(subject)
        if address is None:
            return CallAnswer("", "", error=Unreadable(f"{subject!r} is no subject of a read"))
        call = ""
        try:
            command = read_command(address, data)
            call = command.tool_call_id
            context = Context(identity=identity_of(address, self._settings), request_id=call[:64])
            operation = self._host.operations.get(address.operation)
            if operation is None or operation.only_reads(command.arguments):
                output = await self._host.invoke(address.operation, command.arguments, context)
                return CallAnswer(call, address.operation, output=output)
            words = f"{address.operation} is no quick read: send it as a command"
            return CallAnswer(call, address.operation, error=BadRequest(words, code="not_a_read"))
        except KdskillsError as error:
            return CallAnswer(call, address.operation, error=error)
        except Exception as error:  # noqa: BLE001  what nobody foresaw is logged, and the caller is told so in the one form
            _LOG.exception("%s: the operation failed", address.operation)
            return CallAnswer(call, address.operation, error=CallFailed(type(error).__name__))


FLUSH_S: Final = 5


class BusUnavailable(OperatorMustAct, code="bus_unavailable"):
    """The command bus does not answer."""


async def serve(host: Host, url: str) -> None:
    """Answer commands and reads of the bus at *url* until cancelled.

    A bus that is not there yet, or goes away, is waited for, which the log tells; commands are kept there. Raises
    BusUnavailable for an address that is none or a bus without JetStream, and StreamsDisagree.
    """

    async def troubled(error: Exception) -> None:
        _LOG.warning("the bus: %s", error)

    connection = Client()

    async def require_bus() -> None:
        if not connection.is_connected:
            raise BusUnavailable("the command bus is not connected")

    host.upkeep.notes["bus"] = require_bus
    try:  # however long it takes, and however often the bus goes away
        await connection.connect(url, name="kdskills", error_cb=troubled, max_reconnect_attempts=-1, connect_timeout=5)
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        raise BusUnavailable(f"the command bus at {without_secrets(url)} cannot be reached: {error}") from error
    try:
        gateway = Gateway(host, connection)
        reads = await gateway.serve_reads()
        try:
            await gateway.serve()
        except NatsError as error:
            raise BusUnavailable(f"JetStream does not answer at {without_secrets(url)}: {error}") from error
        finally:
            with suppress(NatsError, TimeoutError):
                await reads.stop()
    finally:
        with suppress(NatsError, TimeoutError):
            await connection.flush(timeout=FLUSH_S)  # acknowledgements are on their way when the connection closes
        await connection.close()
