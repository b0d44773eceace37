"""A service from its start to readiness, and its ports for as long as it runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kdskills.errors import ExecFailed, KdskillsError
from kdskills.execution.protocol import Handle
from kdskills.jobs.attempts.order import AttemptFacts
from kdskills.jobs.model import ServiceSpec
from kdskills.jobs.services.beside import Companion, check_service, needs_network, network_of

AGAIN_S: Final = 0.5
"""Pause before a forwarder that died is replaced, on the same host ports."""


class StartupTimeout(KdskillsError):
    """A service was not ready in its time; its program is ended."""

    code = "startup_timeout"


class ServiceSupervisor:
    """Brings one service to readiness and keeps its ports reachable while its program runs.

    Args:
        service: What the service wants.
        handle: Its run.
        logs: Its output on this host.
        wanted: Host ports to listen on when they are free, by the service's port.
        facts: What is known of the attempt so far.
        tell: Writes facts for everybody to read.
    """

    def __init__(
        self,
        service: ServiceSpec,
        handle: Handle,
        logs: Sequence[Path],
        preferred_ports: Mapping[int, int],
        facts: AttemptFacts,
        tell: Callable[[AttemptFacts], None],
    ) -> None:
        self._service = service
        self._handle = handle
        self._logs = logs
        self._preferred_ports = dict(preferred_ports)
        self._facts = facts
        self._tell = tell

    async def supervise(self) -> None:
        """Make it ready, then carry its connections until cancelled.

        Raises:
            BadRequest: Its spec cannot be met.
            StartupTimeout: It was not ready in time.
            ExecRefused: Its engine's programs cannot be reached.
            ExecFailed: What it needs beside it broke while it started.
        """
        check_service(self._service)
        network: int | None = None
        companion: Companion | None = None
        try:
            try:
                async with asyncio.timeout(self._service.startup_timeout_s):
                    if needs_network(self._service):
                        network = await network_of(self._handle, self._facts.engine)
                    if network is not None or self._service.ready is not None:
                        companion = await self._companion(network)
                        if self._service.ready is not None:
                            await companion.ready()
            except TimeoutError:
                limit = f"{self._service.startup_timeout_s:g} s"
                raise StartupTimeout(f"the service was not ready within {limit}") from None
            self._note(companion, ready_at=time.time())
            if companion is not None and self._service.expose_ports:
                while True:
                    await companion.wait_dead()
                    companion = await self._replaced(network)
                    self._note(companion)
            await asyncio.Event().wait()
        finally:
            if companion is not None:
                await companion.close()
            if network is not None:
                os.close(network)

    async def _companion(self, network: int | None, *, exact: bool = False) -> Companion:
        return await Companion.start(
            self._service, self._logs, network=network, preferred_ports=self._preferred_ports, exact=exact
        )

    async def _replaced(self, network: int | None) -> Companion:
        """Start forwarders until one has the same host ports again."""
        self._preferred_ports = {item.port: item.host_port for item in self._facts.endpoints}
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                return await self._companion(network, exact=True)
            except ExecFailed:
                continue  # its words are in the shim's log; the endpoints are told to be down meanwhile

    def _note(self, companion: Companion | None, *, ready_at: float | None = None) -> None:
        changes: dict[str, object] = {"ready_at": self._facts.ready_at if ready_at is None else ready_at}
        if companion is not None and companion.endpoints:
            changes |= {"endpoints": companion.endpoints, "forwarder": companion.identity}
        self._facts = self._facts.model_copy(update=changes)
        self._tell(self._facts)


def restart_delay_s(restarts: int, first_s: float = 0.5, longest_s: float = 30.0) -> float:
    """Return how long to wait before a service's next attempt, after *restarts* restarts: doubled each time."""
    return min(longest_s, first_s * 2.0 ** min(restarts, 60))
