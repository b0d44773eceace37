"""What every request passes before a route sees it: its number, its caller, its limits.

These are plain ASGI, so that streams stay streams, and a caller without a token is answered before a byte of its body
is read.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.authentication import RequestLimits, of_header, require_own_origin
from kdskills.app.connections import HEALTH
from kdskills.app.identity import OPEN_SCOPES, Identity
from kdskills.app.logs import REQUEST, in_request, number_of
from kdskills.doors.web.draining import Drain
from kdskills.doors.web.problems import response_of
from kdskills.errors import KdskillsError, NotFound, OperatorMustAct

IDENTITY: Final = "kdskills.identity"
_LOG = logging.getLogger("kdskills.http")


class Draining(OperatorMustAct):
    """The service is being stopped and takes no new requests."""

    code = "draining"


class Accounted:
    """Gives a request its id, counts it while it runs, and logs what came of it.

    Queries, headers and bodies are never logged.

    Args:
        app: The application inside.
        drain: Knows what runs, and whether anything new may begin.
        mounted: Paths of other doors; a GET there is a stream that waits for messages, and nothing waits for it.
    """

    def __init__(self, app: ASGIApp, drain: Drain, mounted: frozenset[str]) -> None:
        self._app = app
        self._drain = drain
        self._mounted = mounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        number = number_of(request_id)
        scope.setdefault("state", {})[REQUEST] = number
        path, began, status = str(scope["path"]), time.monotonic(), 0

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", number.encode())]}
            await send(message)

        with in_request(number):
            try:
                if self._drain.started and path not in HEALTH:
                    refused = response_of(Draining("the service is being stopped: ask again"), Request(scope))
                    refused.headers["Connection"] = "close"
                    await refused(scope, receive, marked)
                elif path in HEALTH or (scope["method"] == "GET" and path in self._mounted):
                    await self._app(scope, receive, marked)
                else:
                    with self._drain.running():
                        await self._app(scope, receive, marked)
            finally:
                duration_ms = round((time.monotonic() - began) * 1000, 1)
                facts = {"method": scope["method"], "path": path, "status": status, "ms": duration_ms}
                _LOG.log(
                    logging.DEBUG if path in HEALTH else logging.INFO,
                    "%s %s %d",
                    scope["method"],
                    path,
                    status,
                    extra={"facts": facts},
                )


class OwnOrigin:
    """Refuses requests for other hosts and of other sites' pages, whatever path they are for.

    Args:
        app: The application inside.
        names: Names the service is called by.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            require_own_origin(scope, self._names)
        except KdskillsError as error:
            if scope["type"] == "http":
                await response_of(error, Request(scope))(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)


class Entrance:
    """Tells who calls, refuses who may not, and counts: all before the body is read.

    Args:
        app: The application inside.
        host: Knows the tokens.
        limits: Counts requests.
        open_on_loopback: Whether requests without a token have every scope but `admin`.
    """

    def __init__(self, app: ASGIApp, host: Host, limits: RequestLimits, *, open_on_loopback: bool) -> None:
        self._app = app
        self._host = host
        self._limits = limits
        self._open = open_on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and _guarded(str(scope["path"])):
            try:
                scope[IDENTITY] = await self._caller(scope)
            except KdskillsError as error:
                await response_of(error, Request(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Identity:
        header = dict(scope["headers"]).get(b"authorization")
        text = None if header is None else header.decode("latin-1")
        project = project_of(str(scope["path"]))
        if text is None and self._open:
            return Identity(project=project or "local", scopes=OPEN_SCOPES, door="http")
        identity = await of_header(self._host.storage, text, open_on_loopback=False)
        if project is not None and identity.project != project:
            raise NotFound(f"there is no project {project!r}")
        self._limits.count(identity)
        return replace(identity, door="http")


def _guarded(path: str) -> bool:
    return path == "/openapi.json" or path.startswith("/projects/")


def project_of(path: str) -> str | None:
    """Return the project a path is about, if it is about one."""
    parts = path.split("/")
    return parts[2] if len(parts) > 2 and parts[1] == "projects" else None
