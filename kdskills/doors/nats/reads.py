"""Quick reads as a micro service: a `request()` answered by the tool, never by a stream."""

from __future__ import annotations

import asyncio
import logging

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service
from pydantic import BaseModel

from kdskills.app import Host
from kdskills.app.operations import Context
from kdskills.doors.nats.callers import identity_of
from kdskills.doors.nats.gateway import CallFailed
from kdskills.doors.nats.messages import HEADER_ROOM, CallAnswer, CallCommand, Unreadable, read_command
from kdskills.doors.nats.subjects import CallAddress, filters, parse
from kdskills.errors import BadRequest, KdskillsError

_LOG = logging.getLogger("kdskills.nats")


async def serve_reads(host: Host, connection: Client) -> Service:
    """Answer requests for operations that change nothing; the caller stops the service."""
    running: set[asyncio.Task[None]] = set()
    service = await add_service(connection, name="kdskills", version="1.0.0", description="Reads of kdskills.")

    room = asyncio.Semaphore(host.settings.bus.concurrency)

    async def respond(request: Request) -> None:
        async with room:
            answer = await _answer(host, request.subject, request.data)
            try:
                await request.respond(answer.within(connection.max_payload - HEADER_ROOM)[1])
            except NatsError as error:
                _LOG.warning("a read is not answered: %s", error)

    async def handle(request: Request) -> None:
        task = asyncio.create_task(
            respond(request)
        )  # the service hands over requests one by one: none waits for another
        running.add(task)
        task.add_done_callback(running.discard)

    for number, subject in enumerate(filters(host.settings.bus.version, "req")):
        await service.add_endpoint(name=f"read-{number}", subject=subject, handler=handle)
    return service


async def _answer(host: Host, subject: str, data: bytes) -> CallAnswer:
    """Return what is told to the caller: every request is answered."""
    address = parse(subject)
    if address is None:
        return CallAnswer("", "", error=Unreadable(f"{subject!r} is no subject of a read"))
    call = ""
    try:
        command = read_command(address, data)
        call = command.tool_call_id
        return CallAnswer(call, address.operation, output=await _read(host, address, command))
    except KdskillsError as error:
        return CallAnswer(call, address.operation, error=error)
    except Exception as error:  # noqa: BLE001  what nobody foresaw is logged, and the caller is told so in the one form
        _LOG.exception("%s: the operation failed", address.operation)
        return CallAnswer(call, address.operation, error=CallFailed(type(error).__name__))


async def _read(host: Host, address: CallAddress, command: CallCommand) -> BaseModel:
    context = Context(identity=identity_of(address, host.settings.bus), request_id=command.tool_call_id[:64])
    operation = host.operations.get(address.operation)
    if operation is not None and not operation.only_reads(command.arguments):
        raise BadRequest(f"{address.operation} is no quick read: send it as a command", code="not_a_read")
    return await host.invoke(address.operation, command.arguments, context)
