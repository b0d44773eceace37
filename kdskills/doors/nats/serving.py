"""Serving the command bus until told to stop (spec service §3)."""

from __future__ import annotations

import asyncio
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
START_S: Final = 30
"""Seconds a bus has to answer when the gateway starts; one that goes away later is waited for as long as it takes."""


class BusUnavailable(OperatorMustAct):
    """The command bus does not answer (spec service §3)."""

    code = "bus_unavailable"


async def serve(host: Host, url: str, *, start_s: float = START_S) -> None:
    """Answer commands and reads of the bus at *url* until cancelled.

    A bus that goes away is waited for; commands are kept there.

    Args:
        host: What operations run on.
        url: Where the bus is.
        start_s: Seconds it has to answer at the start.

    Raises:
        BusUnavailable: It cannot be reached at the start, or has no JetStream.
        StreamsDisagree: Its streams cannot be used.
    """
    connection = await _connected(url, start_s)
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


async def _connected(url: str, start_s: float) -> Client:
    """Connect; from then on the client comes back by itself, however often the bus goes away. Raises BusUnavailable."""
    said: list[Exception] = []

    async def troubled(error: Exception) -> None:
        said[:] = [error]
        _LOG.warning("the bus: %s", error)

    connection = Client()
    try:
        async with asyncio.timeout(start_s):
            await connection.connect(
                url, name="kdskills", error_cb=troubled, max_reconnect_attempts=-1, connect_timeout=5
            )
    except asyncio.CancelledError:
        await connection.close()
        raise
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        await connection.close()
        why = said[0] if said and isinstance(error, TimeoutError) else error
        raise BusUnavailable(f"the command bus at {without_secrets(url)} cannot be reached: {why}") from error
    return connection
