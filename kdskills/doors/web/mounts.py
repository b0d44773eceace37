"""Other doors served under a path of this one. Doors do not know each other: entry points bring them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points
from typing import Protocol

from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.identity import Identity

_LOG = logging.getLogger("kdskills.http")

GROUP = "kdskills.mounts"
"""Entry points `path = "module:function"`; `function(host, authenticate, names)` returns a `Mounted`."""

Authenticate = Callable[[str | None], Awaitable[Identity]]


class Mounted(Protocol):
    """An ASGI application with a life of its own."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Serve while this is open."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        ...


def mounts(host: Host, authenticate: Authenticate, names: frozenset[str]) -> dict[str, Mounted]:
    """Return what installed doors serve, by path. One whose extra is not installed is left out.

    Args:
        host: What they serve.
        authenticate: Tells who calls.
        names: Names the service is called by.
    """
    applications: dict[str, Mounted] = {}
    for point in entry_points(group=GROUP):
        try:
            make = point.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "kdskills":
                raise
            _LOG.info("/%s is not served: %s is not installed", point.name, error.name)
            continue
        applications[point.name] = make(host, authenticate, names)
    return applications
