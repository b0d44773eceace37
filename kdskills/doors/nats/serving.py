"""Serving the command bus until told to stop."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.errors import Error as NatsError

from kdskills.app import Host
from kdskills.app.logs import without_secrets
from kdskills.doors.nats.gateway import Gateway
from kdskills.doors.nats.reads import serve_reads
from kdskills.errors import OperatorMustAct

_LOG = logging.getLogger("kdskills.nats")

FLUSH_S: Final = 5


class BusUnavailable(OperatorMustAct):
    """The command bus does not answer."""

    code = "bus_unavailable"


async def serve(host: Host, url: str) -> None:
    """Answer commands and reads of the bus at *url* until cancelled.

    A bus that is not there yet, or goes away, is waited for, which the log tells; commands are kept there.

    Raises:
        BusUnavailable: The address is none, or the bus has no JetStream.
        StreamsDisagree: Its streams cannot be used.
    """
    connection = await _connected(url)
    try:
        reads = await serve_reads(host, connection)
        try:
            await Gateway(host, connection).serve()
        except NatsError as error:
            raise BusUnavailable(f"JetStream does not answer at {without_secrets(url)}: {error}") from error
        finally:
            with suppress(NatsError, TimeoutError):
                await reads.stop()
    finally:
        with suppress(NatsError, TimeoutError):
            await connection.flush(timeout=FLUSH_S)  # acknowledgements are on their way when the connection closes
        await connection.close()


async def _connected(url: str) -> Client:
    """Connect, however long it takes, and come back however often the bus goes away. Raises BusUnavailable."""

    async def troubled(error: Exception) -> None:
        _LOG.warning("the bus: %s", error)

    connection = Client()
    try:
        await connection.connect(url, name="kdskills", error_cb=troubled, max_reconnect_attempts=-1, connect_timeout=5)
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        raise BusUnavailable(f"the command bus at {without_secrets(url)} cannot be reached: {error}") from error
    return connection
