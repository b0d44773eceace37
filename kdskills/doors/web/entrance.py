"""What every request passes before a route sees it: its number, its caller, its limits.

These are plain ASGI, so that streams stay streams, and a caller without a token is answered before a byte of its body
is read.
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Header, Path, Query, Request, Security
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from kdskills.app.authentication import IDENTITY, Authenticate, RequestLimits, require_own_origin
from kdskills.app.connections import HEALTH
from kdskills.app.identity import LOCAL, OPEN_SCOPES, SCOPES, Identity
from kdskills.app.logs import REQUEST, note_request, number_of
from kdskills.app.telemetry import Telemetry
from kdskills.app.wire import as_text, headers_of, json_text, status_of
from kdskills.doors.web.events import Drain
from kdskills.errors import BadRequest, CallerMustAct, CallRefused, KdskillsError, NotFound, OperatorMustAct
from kdskills.errors.traces import TRACEPARENT

MEDIA_TYPE: Final = "application/problem+json"


class Problem(BaseModel):
    """A problem of RFC 9457; `code` and `who` are those of the error, the same at every door."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field("about:blank", description="Always `about:blank`: `code` tells problems apart.")
    title: str = Field(description="What the status means.")
    status: int
    detail: str = Field(description="One sentence for the person named by `who`.")
    code: str = Field(description="Stable code, listed in the reference of errors.")
    who: str = Field(description="Who must act: model, caller, author, operator or user.")
    details: dict[str, Any] = Field(default_factory=dict, description="Facts about the problem.")
    request_id: str = Field("", description="As in the header X-Request-Id and in the log.")


#: Answers any route may give instead of its own, as OpenAPI documents them.
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for status, words in {
        400: "Arguments out of shape, or an archive that breaks a rule.",
        401: "No token, or one that is not known.",
        403: "The caller may not do this.",
        404: "Nothing of that name in this project.",
        409: "The state of things does not allow it now.",
        413: "The body is larger than the token allows.",
        416: "The range begins behind the end; Content-Range tells where that is.",
        415: "The body is not of the kind the route takes.",
        422: "A skill or bundle is not in order.",
        421: "The service is not called by the name in the header Host.",
        429: "More than the token allows; see Retry-After.",
        500: "Something broke that nobody foresaw; the log has it under the request's id.",
        501: "An optional part is not installed.",
        502: "A service, or the host that alone has what was asked for, does not answer.",
        503: "The machine is not set up for it, or the service is being stopped; see Retry-After.",
        507: "There is no room left where the service keeps its files.",
    }.items()
}


def response_of(error: KdskillsError, request: Request) -> Response:
    """Answer with an error."""
    status = status_of(error)
    note_request(code=error.code)
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        code=error.code,
        who=error.who,
        details=cast("dict[str, Any]", as_text(error.details)),
        request_id=getattr(request.state, "request_id", ""),
    )
    return Response(json_text(problem), status, media_type=MEDIA_TYPE, headers=headers_of(error))


async def refuse(error: KdskillsError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, also where a WebSocket was asked for; one that was accepted already is left as it is."""
    response = response_of(error, Request({**scope, "type": "http"}))
    if scope["type"] == "http":
        await response(scope, receive, send)
        return
    with contextlib.suppress(RuntimeError):
        await WebSocket(scope, receive, send).send_denial_response(response)


_LOG = logging.getLogger("kdskills.http")


class Draining(OperatorMustAct, code="draining"):
    """The service is being stopped and takes no new requests."""


METRICS: Final = "/metrics"
"""Where Prometheus asks."""
REQUEST_ID: Final = b"x-request-id"


def size_of(message: Message) -> int:
    """Return the bytes of a piece of a body, or of a message of a WebSocket."""
    return len(message.get("body") or message.get("bytes") or (message.get("text") or "").encode())


@dataclass(eq=False)
class Accounted:
    """Gives a request or WebSocket its id and its trace, counts it, and logs what came of it, but no query, header or body.

    Attributes:
        mounted: Paths of other doors; a GET there is a stream that waits for messages, and nothing waits for it.
    """

    app: ASGIApp
    drain: Drain
    telemetry: Telemetry
    mounted: frozenset[str]

    def __post_init__(self) -> None:
        _ = self.telemetry.scraped  # Prometheus is told from now on

    def _is_mounted(self, path: str) -> bool:
        return path in self.mounted or any(path.startswith(f"{top}/") for top in self.mounted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        numbers, traces = (
            [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
            for wanted in (REQUEST_ID, TRACEPARENT.encode())
        )
        number, path = number_of(numbers[-1] if numbers else ""), str(scope["path"])
        method = scope.get("method", "GET")  # with which every WebSocket is asked for
        scope.setdefault("state", {})[REQUEST] = number
        status = received = sent = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += size_of(message)
            return message

        async def marked(message: Message) -> None:
            nonlocal status, sent
            kind = message["type"].removeprefix("websocket.")
            if kind in {"http.response.start", "accept"}:
                status = message.get("status", 101)
                tracking = (REQUEST_ID, number.encode()), (b"traceresponse", str(record.trace).encode())
                message = {**message, "headers": [*message.get("headers", ()), *tracking]}
            elif kind == "close":
                status = status or 403  # as the server answers then
            sent += size_of(message)
            await send(message)

        with self.telemetry.request("http", number, traces[0] if len(traces) == 1 else None) as record:
            record.level = logging.DEBUG if path in HEALTH else logging.INFO
            try:
                await self._pass_on(scope, counted, marked)
            finally:
                record.words = f"{method} {path} {status}"
                record.facts |= {"method": method, "path": path, "status": status}
                if status >= HTTPStatus.BAD_REQUEST:  # of what was answered by others than us
                    record.facts.setdefault("code", f"http_{status}")
                self.telemetry.answered(method, status, received, sent)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"])
        if scope["type"] == "websocket":  # which ends by itself when the service is stopped
            await self.app(scope, receive, send)
        elif self.drain.started and path not in HEALTH:
            refused = response_of(Draining("the service is being stopped: ask again"), Request(scope))
            refused.headers["Connection"] = "close"
            await refused(scope, receive, send)
        elif path in HEALTH or (scope["method"] == "GET" and self._is_mounted(path)):
            await self.app(scope, receive, send)
        else:
            with self.drain.running():
                await self.app(scope, receive, send)


SITE: Final = re.compile(r"(?:/p/[^/]+)?/\.well-known/agent-skills/[^/]+")
"""Paths of what anybody may fetch."""


def asks_site(scope: Scope) -> bool:
    """Whether a request is for what anybody may fetch: published skills, without a token, from the page of any site."""
    return scope["type"] == "http" and scope["method"] in {"GET", "HEAD"} and SITE.fullmatch(scope["path"]) is not None


@dataclass(eq=False)
class OwnOrigin:
    """Refuses requests for hosts not among *names* and, but for published skills, of other sites' pages."""

    app: ASGIApp
    names: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            own = [header for header in scope["headers"] if header[0] not in {b"origin", b"sec-fetch-site"}]
            require_own_origin({**scope, "headers": own} if asks_site(scope) else scope, self.names)
        except KdskillsError as error:
            if scope["type"] == "http":
                await response_of(error, Request(scope))(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self.app(scope, receive, send)


@dataclass(eq=False)
class Entrance:
    """Tells who calls, refuses who may not, and counts: all before the body is read.

    Attributes:
        open_on_loopback: Whether requests without a token have every scope but `admin`.
    """

    app: ASGIApp
    authenticate: Authenticate
    limits: RequestLimits
    open_on_loopback: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path = str(scope["path"]) if scope["type"] != "lifespan" else ""
        if path in {"/openapi.json", METRICS} or path.startswith(("/projects/", "/services/")):
            try:
                scope[IDENTITY] = await self._caller(scope)
            except KdskillsError as error:
                await refuse(error, scope, receive, send)
                return
        elif asks_site(scope):
            address = (scope.get("client") or ("",))[0]
            try:
                self.limits.count(Identity(project="", agent=str(address)))
            except KdskillsError as error:
                await response_of(error, Request(scope))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Identity:
        header = dict(scope["headers"]).get(b"authorization")
        text = None if header is None else header.decode("latin-1")
        project = project_of(str(scope["path"]))
        if text is None and self.open_on_loopback:  # whoever reads metrics there has no token either
            scopes = SCOPES if scope["path"] == METRICS else OPEN_SCOPES
            return Identity(project=project or LOCAL.project, scopes=scopes, door="http")
        identity = await self.authenticate(text)
        note_request(project=identity.project, agent=identity.agent, token=identity.token)
        if project is not None and identity.project != project:
            raise NotFound(f"there is no project {project!r}")
        self.limits.count(identity)
        return replace(identity, door="http")


def project_of(path: str) -> str | None:
    """Return the project a path is about, if it is about one."""
    parts = path.split("/")
    return parts[2] if len(parts) > 2 and parts[1] == "projects" else None


class BodyTooLarge(CallerMustAct, code="body_too_large"):
    """The body has more bytes than are taken."""


@dataclass(eq=False)
class BodyLimit:
    """Counts a request's bytes as they come and answers 413 instead of reading on; a token may have a lower limit."""

    app: ASGIApp
    limit: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identity, limit = scope.get(IDENTITY), self.limit
        if isinstance(identity, Identity) and identity.limits.body_bytes is not None:
            limit = min(identity.limits.body_bytes, limit)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            await _refuse(scope, receive, send, limit)
            return
        read, begun = 0, False

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise BodyTooLarge(f"a body has at most {limit} bytes", limit=limit)
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            if begun or read <= limit:  # whoever parses bodies may answer the error in other words: ours are right
                begun = True
                await send(message)

        try:
            await self.app(scope, counted, noted)
        except BodyTooLarge:
            if begun:
                raise
        if read > limit and not begun:
            await _refuse(scope, receive, send, limit)


async def _refuse(scope: Scope, receive: Receive, send: Send, limit: int) -> None:
    error = BodyTooLarge(f"a body has at most {limit} bytes", limit=limit)
    await response_of(error, Request(scope))(scope, receive, send)


LABEL: Final = re.compile(r"[A-Za-z0-9._:-]{0,128}")
BEARER: Final = HTTPBearer(auto_error=False, description="A token made by `kdskills token create`.")

Project = Annotated[str, Path(description="The token's project.", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]

Limit = Annotated[int, Query(ge=1, le=500, description="How many at most.")]
Cursor = Annotated[str | None, Query(max_length=2048, description="`next_cursor` of the page before.")]


async def caller(
    request: Request,
    project: Project,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)] = None,
    agent: Annotated[str | None, Header(alias="X-Agent-Id", max_length=128, description="Agent that calls.")] = None,
    alias: Annotated[
        str | None, Header(alias="X-Session-Alias", max_length=128, description="Tells an agent's conversations apart.")
    ] = None,
) -> Identity:
    """Return who calls, as `Entrance` found out, narrowed by the headers.

    Raises NotFound for another project's token; BadRequest and CallRefused, as `narrowed`.
    """
    identity = request.scope[IDENTITY]
    assert isinstance(identity, Identity)
    if identity.project != project:
        raise NotFound(f"there is no project {project!r}")
    return narrowed(identity, agent, alias)


def narrowed(identity: Identity, agent: str | None, alias: str | None) -> Identity:
    """Return *identity* with what the headers say, which must fit what the token says."""
    for name, value in (("X-Agent-Id", agent), ("X-Session-Alias", alias)):
        if value is not None and not LABEL.fullmatch(value):
            words = f"{name} may hold letters, digits and ._:- only"
            raise BadRequest(words, errors=[{"path": name, "problem": "shape"}])
    if agent and agent != identity.agent:
        if identity.token is not None and not identity.may("admin"):
            words = f"X-Agent-Id is not for this caller to say: the token is for the agent {identity.agent!r}"
            raise CallRefused(words, code="not_yours_to_say", argument="X-Agent-Id")
        identity = replace(identity, agent=agent)
    return replace(identity, alias=alias or "")


Caller = Annotated[Identity, Depends(caller)]
"""Who calls, as an argument of a route."""
