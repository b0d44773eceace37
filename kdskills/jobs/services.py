"""Services: their readiness, and their ports, which are reached from the host.

The runner of a service keeps a companion process beside it, `companion.py`, which watches for readiness and carries connections
into the sandbox's network. A restart is a new attempt, which the worker starts after `restart_delay_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kdskills.errors import BadRequest, ExecFailed, ExecRefused, KdskillsError
from kdskills.execution.protocol import Handle, Reachable
from kdskills.jobs import shim
from kdskills.jobs.attempts import AttemptFacts, ProcessIdentity
from kdskills.jobs.companion import line_pattern
from kdskills.jobs.model import Endpoint, OnHttp, OnPattern, ServiceSpec

LOOK_S: Final = 0.02
MAX_PATTERN: Final = 1000
MAX_PORTS: Final = 32
_PATH: Final = re.compile(r"/[!-~]{0,2000}")
_SCRIPT: Final = Path(__file__).with_name("companion.py")


def needs_network(service: ServiceSpec) -> bool:
    """Whether the service's network must be entered from the host."""
    return bool(service.expose_ports) or (service.ready is not None and not isinstance(service.ready, OnPattern))


def check_service(service: ServiceSpec) -> None:
    """Raise BadRequest for a pattern, a path of an HTTP check or a port that is none, before anything runs."""
    errors: list[str] = []
    ready = service.ready
    if isinstance(ready, OnPattern):
        try:
            line_pattern(ready.pattern)
        except ValueError as error:
            errors.append(f"ready.pattern: {error}")
        if len(ready.pattern) > MAX_PATTERN:
            errors.append(f"ready.pattern: longer than {MAX_PATTERN} characters")
    if isinstance(ready, OnHttp) and not _PATH.fullmatch(ready.path):
        errors.append("ready.http.path: not a path of visible ASCII characters that begins with '/'")
    errors += [f"expose_ports: {port} is no port" for port in service.expose_ports if not 0 < port < 65536]
    if len(set(service.expose_ports)) != len(service.expose_ports) or len(service.expose_ports) > MAX_PORTS:
        errors.append(f"expose_ports: a port twice, or more than {MAX_PORTS}")
    if errors:
        raise BadRequest(f"the service cannot be run: {'; '.join(errors)}", errors=errors)


async def network_of(handle: Handle, engine: str) -> int:
    """Return an open descriptor of the network *handle* runs in, waiting until there is one.

    Raises ExecRefused, `ports_not_supported`, when this engine's programs cannot be reached from here.
    """
    if not isinstance(handle, Reachable):
        raise ExecRefused(
            f"programs on {engine} cannot be reached from this host: expose no ports, and tell readiness by a pattern",
            code="ports_not_supported",
            engine=engine,
        )
    while True:
        pid = await asyncio.to_thread(_pid, handle)
        if pid is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                if await asyncio.to_thread(_pid, handle) == pid:  # it still was this process, not one of its number
                    return fd
                os.close(fd)
        await asyncio.sleep(LOOK_S)


class Companion:
    """A running companion; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, ports: Mapping[int, int]) -> None:
        self.process = process
        self.endpoints = tuple(
            Endpoint(port=port, host_port=host, url=f"http://127.0.0.1:{host}") for port, host in ports.items()
        )
        self.identity = ProcessIdentity.model_validate(shim.identity(process.pid))

    @classmethod
    async def start(
        cls,
        service: ServiceSpec,
        logs: Sequence[Path],
        *,
        network: int | None,
        preferred_ports: Mapping[int, int],
        exact: bool = False,
    ) -> Companion:
        """Start the companion of *service*, whose *network* stays open here.

        It listens on the *preferred_ports* of the host, by the service's port, or on any free one unless *exact*.
        Raises ExecFailed when it cannot, or cannot enter the network; its own words are in the shim's log.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-s", "-P", str(_SCRIPT)),  # not -I: RE2 may be on this process's own PYTHONPATH
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=() if network is None else (network,),
        )
        order = {
            "network": network,
            "ports": {str(port): preferred_ports.get(port, 0) for port in service.expose_ports},
            "exact": exact,
            "ready": {} if service.ready is None else service.ready.model_dump(),
            "logs": [str(path) for path in logs],
        }
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            answer = json.loads(await process.stdout.readline() or b"{}")
            ports = {int(port): int(host) for port, host in answer["ports"].items()}
        except (OSError, KeyError, ValueError) as error:
            await _end(process)
            raise ExecFailed("the service's ports cannot be reached from this host", code="forwarder_failed") from error
        except BaseException:  # raised again: a cancelled start leaves no process
            await _end(process)
            raise
        return cls(process, ports)

    async def ready(self) -> None:
        """Wait until the service is ready. Raises ExecFailed when the companion dies over it."""
        assert self.process.stdout is not None
        if not await self.process.stdout.readline():
            raise ExecFailed("what watched the service's readiness died", code="forwarder_failed")

    async def close(self) -> None:
        """End its process."""
        await _end(self.process)


def _pid(handle: Reachable) -> int | None:
    with contextlib.suppress(OSError):  # the engine may not know it any more; a run that is over is found out elsewhere
        return handle.network_namespace()
    return None


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


AGAIN_S: Final = 0.5
"""Pause before a forwarder that died is replaced, on the same host ports."""


class StartupTimeout(KdskillsError, code="startup_timeout"):
    """A service was not ready in its time; its program is ended."""


async def supervise(
    service: ServiceSpec,
    handle: Handle,
    logs: Sequence[Path],
    preferred_ports: Mapping[int, int],
    facts: AttemptFacts,
    tell: Callable[[AttemptFacts], None],
) -> None:
    """Bring a service to readiness and keep its ports reachable while its program runs, until cancelled.

    It listens on the *preferred_ports* of the host when they are free, by the service's port, and hands the facts it adds
    to those of the attempt to *tell*.

    Raises:
        BadRequest: Its spec cannot be met.
        StartupTimeout: It was not ready in time.
        ExecRefused: Its engine's programs cannot be reached.
        ExecFailed: What it needs beside it broke while it started.
    """
    check_service(service)
    start = partial(Companion.start, service, logs)
    network: int | None = None
    companion: Companion | None = None

    def note(**changes: object) -> None:
        nonlocal facts
        if companion is not None and companion.endpoints:
            changes |= {"endpoints": companion.endpoints, "forwarder": companion.identity}
        facts = facts.model_copy(update=changes)
        tell(facts)

    try:
        try:
            async with asyncio.timeout(service.startup_timeout_s):
                if needs_network(service):
                    network = await network_of(handle, facts.engine)
                if network is not None or service.ready is not None:
                    companion = await start(network=network, preferred_ports=preferred_ports)
                    if service.ready is not None:
                        await companion.ready()
        except TimeoutError:
            raise StartupTimeout(f"the service was not ready within {service.startup_timeout_s:g} s") from None
        note(ready_at=time.time())
        ports = {item.port: item.host_port for item in facts.endpoints}
        while companion is not None and service.expose_ports:
            await companion.process.wait()
            while companion.process.returncode is not None:  # until one has the same host ports again
                await asyncio.sleep(AGAIN_S)
                with contextlib.suppress(
                    ExecFailed
                ):  # its words are in the shim's log; the endpoints are down meanwhile
                    companion = await start(network=network, preferred_ports=ports, exact=True)
            note()
        await asyncio.Event().wait()
    finally:
        if companion is not None:
            await companion.close()
        if network is not None:
            os.close(network)
