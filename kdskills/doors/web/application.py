"""The service as an ASGI application: identity, limits, problems, health, and the routes (spec service §2, §3, §5)."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from kdskills.app import Host
from kdskills.app.authentication import of_header
from kdskills.doors.web.bodies import BodyLimit
from kdskills.doors.web.limits import Limits
from kdskills.doors.web.mounts import mounts
from kdskills.doors.web.problems import response_of
from kdskills.doors.web.tools import shape_error, tools_router
from kdskills.errors import BadRequest, KdskillsError, NotFound

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_LOG = logging.getLogger("kdskills.http")


def build_app(host: Host, *, open_on_loopback: bool = False) -> FastAPI:
    """Return the service over *host*.

    Args:
        host: What operations run on.
        open_on_loopback: Whether requests without a token have every scope; the caller binds to loopback only then.
    """
    mounted = mounts(host, partial(of_header, host, open_on_loopback=open_on_loopback))

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for mount in mounted.values():
                await stack.enter_async_context(mount.running())
            yield
            app.state.draining = True

    app = FastAPI(
        title="kdskills",
        summary="Agent Skills that can be trusted in production.",
        version=host.version,
        lifespan=living,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.host = host
    app.state.open_on_loopback = open_on_loopback
    app.state.limits = Limits(host.settings.requests_per_minute)
    app.state.draining = False
    app.add_middleware(BodyLimit, limit=host.settings.body_limit)
    app.middleware("http")(_accounted)
    app.add_exception_handler(KdskillsError, _refused)
    app.add_exception_handler(RequestValidationError, _misshapen)
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_api_route("/healthz", _healthz, include_in_schema=False)
    app.add_api_route("/readyz", _readyz, include_in_schema=False)
    app.include_router(tools_router())
    for path, mount in mounted.items():
        app.router.routes.append(Route(f"/{path}", mount, include_in_schema=False))
    return app


async def _accounted(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
    """Give a request its id, and log what came of it; queries and headers are never logged."""
    given = request.headers.get("x-request-id", "")
    request.state.request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    began = time.monotonic()
    response = await proceed(request)
    response.headers["X-Request-Id"] = request.state.request_id
    _LOG.info(
        "%s %s %d",
        request.method,
        request.url.path,
        response.status_code,
        extra={"request_id": request.state.request_id, "ms": round((time.monotonic() - began) * 1000, 1)},
    )
    return response


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, KdskillsError)
    return response_of(error, request)


async def _misshapen(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    route = request.scope.get("route")
    return response_of(shape_error(error, getattr(route, "name", request.url.path)), request)


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answer what no route took, or a body no parser understood, as a problem like every other."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return response_of(NotFound(f"there is nothing at {request.url.path}"), request)
    if error.status_code == 405:
        response = response_of(
            BadRequest(f"{request.method} is not for {request.url.path}", code="method_not_allowed"), request
        )
        response.status_code = 405
        response.headers["Allow"] = (error.headers or {}).get("Allow", "")
        return response
    return response_of(BadRequest(str(error.detail)), request)


async def _healthz() -> Response:
    """The process lives."""
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> Response:
    """Whether new work is taken: the database answers, an engine works, and the service is not being stopped."""
    host: Host = request.app.state.host
    report = await host.ready()
    ok = report.ok and not request.app.state.draining
    body = {"status": "ok" if ok else "unavailable", "draining": request.app.state.draining, "checks": report.checks}
    return JSONResponse(body, 200 if ok else 503)
