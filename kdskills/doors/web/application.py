"""The service as an ASGI application: identity, limits, problems, health, and the routes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, NoMatchFound, Route
from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.authentication import (
    Authenticate,
    ListenRefused,
    RequestLimits,
    address,
    answered_names,
    of_header,
    on_loopback,
)
from kdskills.app.connections import BoundedServer, Crowd, server_config
from kdskills.app.connections import serve as serve_connections
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.logs import be_called, json_logs
from kdskills.app.wire import RETRY_S
from kdskills.doors.web.entrance import (
    METRICS,
    Accounted,
    BodyLimit,
    Entrance,
    OwnOrigin,
    Problem,
    response_of,
)
from kdskills.doors.web.events import Drain
from kdskills.doors.web.resources import metrics, shape_error, site_routes, skill_routes, tools_router, work_routes
from kdskills.doors.web.services import MESSAGE, ServiceProxy, service_routes
from kdskills.errors import BadRequest, KdskillsError, NotFound, OperatorMustAct

if TYPE_CHECKING:
    from kdskills.app.tokens import Tokens


_LOG = logging.getLogger("kdskills.http")

GROUP = "kdskills.mounts"
"""Entry points `path = "module:function"`; `function(host, authenticate, names)` returns a `Mounted`."""


CONSOLE: Final = "ui"
"""The path of the console, which the setting `console` keeps away."""


class Mounted(Protocol):
    """An ASGI application with a life of its own."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Serve while this is open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""


def mounts(host: Host, listen: str = "") -> dict[str, Mount]:
    """Return what makes the applications of installed doors, by path.

    One whose extra is not installed is left out, and the console where the setting or the host that is listened on says so.
    """
    makers: dict[str, Mount] = {}
    setting = host.settings.console
    for point in entry_points(group=GROUP):
        if point.name == CONSOLE and (setting == "off" or (setting == "auto" and not on_loopback(listen))):
            continue
        try:
            makers[point.name] = point.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "kdskills":
                raise
            _LOG.info("/%s is not served: %s is not installed", point.name, error.name)
    return makers


Mount = Callable[[Host, Authenticate, frozenset[str]], Mounted]
PREFIX = "/projects/{project}/"


class RoutesByPath(BaseRoute):
    """Stands before *routes* and finds those with no parameter but the project, such as the tools, by their path.

    It decides nothing: a route that was looked up still says itself whether it takes the request, and a path that is not
    known here is left to the routes behind.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: defaultdict[str, list[Route]] = defaultdict(list)
        for route in routes:
            if isinstance(route, Route) and route.path.startswith(PREFIX):
                tail = route.path.removeprefix(PREFIX)
                if "{" not in tail:
                    self._routes[tail].append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return what the first route of this path says that takes the request, or else would with another method."""
        best: tuple[Match, Scope] = Match.NONE, {}
        if scope["type"] != "http":
            return best
        parts = str(scope["path"]).split("/", 3)
        for route in self._routes.get(parts[-1], ()) if len(parts) == 4 else ():
            match, child_scope = route.matches(scope)
            if match.value > best[0].value:
                best = match, {**child_scope, "route": route}
        return best

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the route answer that was looked up."""
        await scope["route"].handle(scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: object) -> NoMatchFound:  # type: ignore[override]  # it never returns
        """Leave names to the routes behind. Raises NoMatchFound."""
        raise NoMatchFound(name, path_params)


class InternalError(OperatorMustAct, code="internal_error"):
    """Something broke that nobody foresaw; the log has it under the request's id."""


def build_app(host: Host, *, open_on_loopback: bool = False, listen: str = "") -> FastAPI:
    """Return the service over *host*, which listens on the host *listen*, a name it is called by.

    Where it is *open_on_loopback*, which binds to loopback, requests without a token have every scope but `admin`.
    """
    limits = RequestLimits(host.settings.requests_per_minute)

    async def of_token(header: str | None) -> Identity:
        return await of_header(host.storage, header, open_on_loopback=False)

    async def authenticate(header: str | None) -> Identity:
        identity = await of_header(host.storage, header, open_on_loopback=open_on_loopback)
        limits.count(identity)
        return identity

    names = answered_names(listen, host.settings.host_names)
    mounted = {path: make(host, authenticate, names) for path, make in mounts(host, listen).items()}

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for mount in mounted.values():
                await stack.enter_async_context(mount.running())
            yield
            app.state.drain.start()
            if "turn_runs" in vars(host):
                await host.turn_runs.aclose()

    app = FastAPI(
        title="kdskills",
        summary="Agent Skills that can be trusted in production.",
        version=host.version,
        lifespan=living,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.host = host
    app.state.drain = Drain()
    app.state.site_turn = asyncio.Lock()
    app.add_middleware(BodyLimit, limit=host.settings.body_limit)
    app.add_middleware(Entrance, authenticate=of_token, limits=limits, open_on_loopback=open_on_loopback)
    app.add_middleware(OwnOrigin, names=names)
    prefixes = frozenset(f"/{path}" for path in mounted)
    app.add_middleware(Accounted, drain=app.state.drain, telemetry=host.telemetry, mounted=prefixes)
    for kind in (KdskillsError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    for path, answer in (("/healthz", _healthz), ("/readyz", _readyz), (METRICS, metrics)):
        app.add_api_route(path, answer, include_in_schema=False)
    for router in (skill_routes, work_routes, tools_router(host.operations.values())):
        app.router.routes.extend(router.routes)  # as routes of its own: a router that is included is walked twice
    app.router.routes.extend(site_routes())
    app.router.routes.insert(0, RoutesByPath(app.router.routes))
    app.openapi = partial(_openapi, app, app.openapi)  # type: ignore[method-assign]  # FastAPI's own way to change it
    app.router.routes.extend(service_routes(ServiceProxy(host, of_token, app.state.drain)))
    app.router.routes.extend(_mounted_routes(mounted))
    return app


def _mounted_routes(mounted: Mapping[str, Mounted]) -> Iterator[Route]:
    for path, mount in mounted.items():
        yield Route(f"/{path}", mount, include_in_schema=False)
        if path == CONSOLE:  # which has pages below its path
            yield Route(f"/{path}/{{page:path}}", mount, include_in_schema=False)


def _openapi(app: FastAPI, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the description of the service, with the problem every route may answer with."""
    if app.openapi_schema is None:
        described = describe()
        problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        described.setdefault("components", {}).setdefault("schemas", {})["Problem"] = problem
        app.openapi_schema = described
    return app.openapi_schema


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer any error as a problem: ours, arguments out of shape, what no route took, a body no parser understood.

    The server logs where anything else was raised.
    """
    path, headers = request.url.path, {}
    problem: KdskillsError = InternalError("something broke here; the service's log has it under this request's id")
    if isinstance(error, KdskillsError):
        problem = error
    elif isinstance(error, RequestValidationError):
        name = getattr(request.scope.get("route"), "name", path)
        problem = shape_error(error, request.app.state.host.operations.get(name), name)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        problem = NotFound(f"there is nothing at {path}")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        problem = BadRequest(f"{request.method} is not for {path}", code="method_not_allowed")
        headers = {"Allow": (error.headers or {}).get("Allow", "")}
    elif isinstance(error, HTTPException):
        problem = BadRequest(str(error.detail))
    response = response_of(problem, request)
    response.headers.update(headers)
    return response


async def _healthz() -> Response:
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> Response:
    """Whether new work is taken: the database answers, an engine works, and the service is not being stopped."""
    report, draining = await request.app.state.host.ready(), bool(request.app.state.drain.started)
    ok, checks = report.ok and not draining, {**report.checks, **report.notices}
    body = {"status": "ok" if ok else "unavailable", "draining": draining, "checks": checks}
    retry = {} if ok else {"Retry-After": str(RETRY_S)}
    return JSONResponse(body, 200 if ok else 503, headers={"Cache-Control": "no-store", **retry})


FIRST_TOKEN: Final = "first-token"  # noqa: S105 - the name of a file in the state folder
CUT_OFF_S: Final = 2
"""Seconds the server gives connections that are left after the drain."""

Bus = tuple[Callable[[Host, str], Coroutine[Any, Any, None]], str]
"""What serves the command bus until it is cancelled, and where the bus is."""


def run(host: Host, *, listen: str | None = None, no_auth: bool = False, nats: Bus | None = None) -> None:
    """Serve until TERM or INT; requests that run then get `drain_s` seconds.

    It listens on *listen*, `HOST:PORT`, or else the setting, on loopback only where there is *no_auth*, and serves the
    command bus *nats*, too. Raises ListenRefused, also for an address that is taken.
    """
    name, port = address(listen or host.settings.listen)
    if no_auth and not on_loopback(name):
        raise ListenRefused(f"without tokens the service listens on loopback only, not on {name}")
    be_called(f"serve {name}:{port}")
    with json_logs():
        try:
            asyncio.run(_serve(host, name, port, nats, open_on_loopback=no_auth))
        except BaseExceptionGroup as several:
            raise _first(several) from several


class DrainingServer(BoundedServer):
    """A server that drains before it stops: nothing new is begun, what runs gets its time, health says so."""

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s
        self._until = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take nothing new; the second signal ends what still runs."""
        if self._drain.started:
            super().handle_exit(sig, frame)
            return
        self._drain.start()
        self._until = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Tell whether it is time to stop."""
        if self._drain.started and (self._drain.idle or time.monotonic() >= self._until):
            return True
        return await super().on_tick(counter)


async def _serve(host: Host, name: str, port: int, nats: Bus | None, *, open_on_loopback: bool) -> None:
    app = build_app(host, open_on_loopback=open_on_loopback, listen=name)
    if not open_on_loopback:
        await _first_token(host.tokens, host.settings.state_dir / FIRST_TOKEN)
    settings = host.settings
    crowd = Crowd(most=settings.connections, header_s=settings.header_timeout_s, body_s=settings.body_timeout_s)
    config = server_config(
        app, name, port, crowd, ws="websockets-sansio", ws_max_size=MESSAGE, timeout_graceful_shutdown=CUT_OFF_S
    )
    server = DrainingServer(config, app.state.drain, settings.drain_s)
    try:
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(host.upkeep.run())]
            if nats is not None:
                serve_bus, url = nats
                background.append(group.create_task(serve_bus(host, url)))
            await serve_connections(server, crowd)
            for task in background:
                task.cancel()
    finally:
        await host.work.aclose()
        await host.storage.aclose()


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that tells the operator what to do, if that is all that went wrong; else everything."""
    ours, foreign = several.split(KdskillsError)
    if ours is None or foreign is not None:
        return several
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _first_token(tokens: Tokens, path: Path) -> None:
    """Make a token when there is none yet: shown to a terminal, else written where only this account reads it.

    What is written to standard error of a service is kept in a journal that others read.
    """
    if await tokens.list():
        return
    on_terminal = sys.stderr.isatty()
    file = -1 if on_terminal else _private_file(path)
    try:
        _, text = await tokens.create(LOCAL.project, LOCAL.agent, LOCAL.scopes, who="serve")
        if on_terminal:
            sys.stderr.write(f"kdskills: this token is shown once; it opens project {LOCAL.project!r}: {text}\n")
            return
        os.write(file, f"{text}\n".encode())
        where = f"is in {path}: read it once and delete the file"
        sys.stderr.write(f"kdskills: a token for project {LOCAL.project!r} {where}\n")
    finally:
        if file >= 0:
            os.close(file)


def _private_file(path: Path) -> int:
    """Return a new file that this account alone reads and writes, in place of one of that name. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
