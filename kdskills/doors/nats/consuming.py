"""Reading commands through the durable consumer, whatever happens to it meanwhile."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from kdskills.app.settings import BusSettings
from kdskills.doors.nats.streams import command_consumer, ensure_streams

_LOG = logging.getLogger("kdskills.nats")

FETCH_S: Final = 1.0
RETRY_S: Final = 2.0
LOOK: Final = 5
"""After so many fetches without a command somebody looks whether the consumer is there: a bus that has none is silent."""


class Commands:
    """The commands of one version of the protocol.

    Args:
        js: The bus.
        settings: Names the version.
    """

    def __init__(self, js: JetStreamContext, settings: BusSettings) -> None:
        self._js = js
        self._settings = settings
        self._subscription: JetStreamContext.PullSubscription | None = None
        self._quiet = 0

    async def open(self) -> None:
        """Make what is missing of streams and consumer, and read from there.

        Raises:
            NatsError: The bus does not answer.
            StreamsDisagree: Its streams cannot be used.
        """
        before = self._subscription
        served = await ensure_streams(self._js, self._settings.version)
        self._subscription = await command_consumer(self._js, self._settings, served)
        if before is not None:
            with suppress(NatsError):
                await before.unsubscribe()

    async def next(self) -> Msg | None:
        """Return the next command, or None when there is none for a while.

        Raises:
            StreamsDisagree: The streams were changed, so that they cannot be used any more.
        """
        assert self._subscription is not None
        try:
            messages = await self._subscription.fetch(1, timeout=FETCH_S)
        except TimeoutError:
            self._quiet += 1
            if self._quiet % LOOK == 0:
                await self._look(self._subscription)
            return None
        except NatsError as error:
            _LOG.warning("the bus does not answer: %s", error)
            await asyncio.sleep(RETRY_S)
            await self._reopen()
            return None
        self._quiet = 0
        return messages[0]

    async def close(self) -> None:
        """Let nothing more be delivered here."""
        if self._subscription is not None:
            with suppress(NatsError):
                await self._subscription.unsubscribe()

    async def _look(self, subscription: JetStreamContext.PullSubscription) -> None:
        try:
            await subscription.consumer_info()
        except NotFoundError:
            _LOG.warning("the consumer of commands is gone: it is made again, and commands that are kept come again")
            await self._reopen()
        except NatsError as error:
            _LOG.warning("the bus does not answer: %s", error)

    async def _reopen(self) -> None:
        try:
            await self.open()
        except NatsError as error:  # told, and tried again after the next fetch
            _LOG.warning("commands cannot be read now: %s", error)
