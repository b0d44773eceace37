"""Quick reads as a micro service: a `request()` answered by the tool, never by a stream (spec service §3)."""

from __future__ import annotations

import logging

from nats.aio.client import Client
from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service

from kdskills.app import Host
from kdskills.app.operations import OPERATIONS, Context
from kdskills.doors.nats.callers import identity_of
from kdskills.doors.nats.messages import Answer, Unreadable, read_command
from kdskills.doors.nats.subjects import filters, parse
from kdskills.errors import BadRequest, KdskillsError

_LOG = logging.getLogger("kdskills.nats")


async def serve_reads(host: Host, connection: Client) -> Service:
    """Answer requests for operations that change nothing; the caller stops the service."""
    service = await add_service(connection, name="kdskills", version="1.0.0", description="Reads of kdskills.")

    async def handle(request: Request) -> None:
        answer = await _answer(host, request.subject, request.data)
        await request.respond(answer.to_bytes())

    for number, subject in enumerate(filters(host.settings.bus.version, "req")):
        await service.add_endpoint(name=f"read-{number}", subject=subject, handler=handle)
    return service


async def _answer(host: Host, subject: str, data: bytes) -> Answer:
    address = parse(subject)
    operation = "" if address is None else address.operation
    call = ""
    try:
        if address is None:
            raise Unreadable(f"{subject!r} is no subject of a read")
        command = read_command(address, data)
        call = command.tool_call_id
        identity = identity_of(address, host.settings.bus)
        found = OPERATIONS.get(operation)
        if found is not None and not found.reads:
            raise BadRequest(f"{operation} is no quick read: send it as a command", code="not_a_read")
        output = await host.invoke(operation, command.arguments, Context(identity=identity, request_id=call[:64]))
    except KdskillsError as error:
        return Answer(call, operation, error=error)
    return Answer(call, operation, output=output)
