"""The application of the console: who looks, what every page has in common, and the two ways it is served.

`mount` brings it into the HTTP service at `/ui`; `command` serves one bundle's folder to the person who started it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import webbrowser
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.authentication import (
    Authenticate,
    RequestLimits,
    Unauthenticated,
    address,
    on_loopback,
    require_own_origin,
)
from kdskills.app.connections import BoundedServer, Crowd, serve, server_config
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.logs import REQUEST, note_request
from kdskills.app.operations import Context
from kdskills.app.wire import status_of
from kdskills.doors.ui import access, evals, home, projects, skills, turns, work
from kdskills.doors.ui.calls import HOME, ConsoleCall, ConsoleRoute, sent_form
from kdskills.doors.ui.rendering import PageRoom, page_environment, static_files
from kdskills.doors.ui.sessions import COOKIE, LIFE_S, ConsoleSession, ConsoleSessions
from kdskills.errors import BadRequest, CallRefused, KdskillsError, NotFound, OperatorMustAct

_LOG = logging.getLogger("kdskills.console")

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with `no-referrer` forms would send `Origin: null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer. Pages hold what strangers wrote; nothing of theirs can run or ask another server."""


class Console:
    """The console over one Host.

    Args:
        host: What is shown.
        authenticate: Who calls, by the Authorization header that a sign-in stands for.
        names: Names the service is called by, beside those of loopback.
        owner: Who looks, where the person who started it is the only one: a link with a key, printed at the start, opens it.
        folder: The bundle's folder that is shown then.
        trust: Whether code of that bundle may run.
    """

    def __init__(
        self,
        host: Host,
        authenticate: Authenticate,
        names: frozenset[str],
        *,
        owner: Identity | None = None,
        folder: Path | None = None,
        trust: bool = False,
    ) -> None:
        self.host = host
        self.folder = folder
        self.trust = trust
        self.environment = page_environment()
        self.key = secrets.token_urlsafe(32)
        self._authenticate = authenticate
        self._names = names
        self._owner = owner
        self._sessions = ConsoleSessions()
        self._limits = RequestLimits(host.settings.requests_per_minute)
        self._app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self._app.router.routes.extend(self._routes())
        self._app.add_exception_handler(404, self._not_found)
        self._app.add_exception_handler(405, self._not_found)
        self._app.add_exception_handler(Exception, self._broken)

    def _routes(self) -> list[Route]:
        entrances = (
            Route("/", self._to_home, methods=["GET"]),
            Route("/ui", self._to_home, methods=["GET"]),
            Route("/ui/static/{digest}/{name}", self._static, methods=["GET"]),
            Route("/ui/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/ui/enter/{key}", self._enter, methods=["GET"]),
            self._route(ConsoleRoute("/sign-out", self._sign_out, "POST")),
        )
        return [*entrances, *(self._route(route) for group in GROUPS for route in group)]

    def _route(self, route: ConsoleRoute) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                session, identity = await self._caller(request)
            except KdskillsError as error:
                return self._outside(request, error)
            call = ConsoleCall(self.host, self.environment, request, identity, session, self.folder, self.trust)
            try:
                self._limits.count(identity)
                if route.method != "GET":
                    await require_csrf(call)
                with self.host.telling_operator():
                    response = await route.answer(call)
            except KdskillsError as error:
                response = error_page(call, error)
            if self._sessions.get(session.key) is session:  # it may have signed out
                self._keep(response, session)
            return response

        return Route(f"/ui{route.path}", endpoint, methods=[route.method])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the life of the application."""
        if scope["type"] == "http":
            try:
                require_own_origin(scope, self._names)
            except KdskillsError as error:
                await self._outside(Request(scope), error)(scope, receive, send)
                return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                said = {name for name, _ in message.get("headers", ())}
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), *(h for h in headers if h[0] not in said)],
                }
            await send(message)

        await self._app(scope, receive, guarded)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while this is open."""
        yield

    async def _caller(self, request: Request) -> tuple[ConsoleSession, Identity]:
        """Return the session and who looks. Raises Unauthenticated: somebody has to sign in."""
        session = self._sessions.get(request.cookies.get(COOKIE))
        if self._owner is not None:
            if session is None:
                raise Unauthenticated("open the link that `kdskills ui` printed: it holds the key to this console")
            return session, self._owner
        if session is None or session.token is None:
            identity = await self._authenticate(None)  # raises unless callers without a token are let in here
            return session or self._sessions.open(None), replace(identity, door="console")
        try:
            identity = await self.host.tokens.client(session.token)
        except NotFound:
            self._sessions.close(session)
            raise Unauthenticated("the token of this session was revoked, or has expired") from None
        return session, replace(identity, door="console")

    @staticmethod
    def _keep(response: Response, session: ConsoleSession) -> None:
        response.set_cookie(COOKIE, session.key, max_age=LIFE_S, path="/ui", httponly=True, samesite="strict")

    def _outside(
        self, request: Request, error: KdskillsError, status: int | None = None, back: str | None = None
    ) -> Response:
        """Answer who is not signed in: with the form to sign in where that helps, else with what is wrong."""
        signs_in = isinstance(error, Unauthenticated) and self._owner is None
        if back is None:
            back = request.url.path if request.method == "GET" and request.url.path.startswith(HOME) else HOME
            back += f"?{request.url.query}" if request.url.query and back != HOME else ""
        template = "sign_in.html.j2" if signs_in else "outside.html.j2"
        text = self.environment.get_template(template).render(
            error=error, back=back, version=self.host.version, room=PageRoom()
        )
        headers = {"HX-Redirect": HOME} if "hx-request" in request.headers else {}
        return HTMLResponse(text, status or status_of(error), headers={**HEADERS, **headers})

    async def _to_home(self, request: Request) -> Response:
        return RedirectResponse(HOME, 307)

    async def _static(self, request: Request) -> Response:
        asset = static_files().get(request.path_params["name"])
        if asset is None or asset.digest != request.path_params["digest"]:
            return self._outside(request, NotFound("there is no such file"))
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return FileResponse(asset.path, media_type=asset.media_type, headers=headers)

    async def _sign_in(self, request: Request) -> Response:
        if request.method == "GET" or self._owner is not None:
            return self._outside(request, Unauthenticated("sign in with a token"), 200, back=HOME)
        back = HOME
        try:
            form = await sent_form(request, fields=4, part=4096)
            back = own_path(form.get("back"))
            identity = await self._authenticate(f"Bearer {str(form.get('token', '')).strip()}")
        except KdskillsError as error:
            return self._outside(request, error, back=back)
        response = RedirectResponse(back, 303)
        self._keep(response, self._sessions.open(identity.token))
        return response

    async def _enter(self, request: Request) -> Response:
        """Open a session for the person who started the console, who alone was shown the key."""
        if self._owner is None or not secrets.compare_digest(request.path_params["key"].encode(), self.key.encode()):
            return self._outside(request, Unauthenticated("this link is of another start of `kdskills ui`"))
        response = RedirectResponse(HOME, 303)
        self._keep(response, self._sessions.open(None))
        return response

    async def _sign_out(self, call: ConsoleCall) -> Response:
        self._sessions.close(call.session)
        response = self._outside(call.request, Unauthenticated("you have signed out"), 200)
        response.delete_cookie(COOKIE, path="/ui")
        return response

    async def _broken(self, request: Request, error: Exception) -> Response:
        """Answer that something broke that nobody foresaw; whoever serves this logs where."""
        number = request.scope.get("state", {}).get(REQUEST, "")
        words = "something broke here: whoever runs it finds where in its log"
        return self._outside(request, OperatorMustAct(words, code="internal_error", request_id=number))

    async def _not_found(self, request: Request, error: Exception) -> Response:
        return self._outside(request, NotFound(f"there is no page at {request.url.path}"))


async def require_csrf(call: ConsoleCall) -> None:
    """Refuse a change that no form of this session asked for. Raises CallRefused."""
    header = call.request.headers.get("x-csrf-token")
    proof = header if header is not None else (await call.form(files=1)).get("csrf")
    if not call.session.proves(proof):
        words = "this form is of another session: load the page again, and send it from there"
        raise CallRefused(words, code="form_outdated")


def own_path(text: object) -> str:
    """Return a path of the console that a form says to go back to; the first page for anything else."""
    try:
        parts = urlsplit(text if isinstance(text, str) else "")
    except ValueError:
        return HOME
    steps = unquote(parts.path).replace("\\", "/").split("/")
    ours = not parts.scheme and not parts.netloc and parts.path.startswith(HOME) and "\\" not in parts.path
    ours = ours and not {".", ".."} & set(steps)
    return f"{parts.path}{'?' if parts.query else ''}{parts.query}" if ours else HOME


def error_page(call: ConsoleCall, error: KdskillsError) -> Response:
    """Answer with what went wrong, who must act, and what to do."""
    note_request(code=error.code)
    response = call.page("error.html.j2", f"Error: {error.code}", status_of(error), error=error)
    if "hx-request" in call.request.headers:  # a piece was asked for: the page that asked is loaded again, and says it
        response.headers["HX-Refresh"] = "true"
    return response


GROUPS: Final[Sequence[Sequence[ConsoleRoute]]] = (
    home.ROUTES,
    skills.ROUTES,
    turns.ROUTES,
    work.ROUTES,
    evals.ROUTES,
    projects.ROUTES,
    access.ROUTES,
)
"""The pages, by module."""


def mount(host: Host, authenticate: Authenticate, names: frozenset[str]) -> Console:
    """Return what the HTTP service serves at `/ui`; entry point `ui` of the group `kdskills.mounts`."""
    return Console(host, authenticate, names)


async def _nobody(header: str | None) -> Identity:
    raise Unauthenticated("nobody signs in here")


def command(
    host: Host, folder: Path, *, listen: str = "127.0.0.1:0", browser: bool = True, trust: bool = False
) -> None:
    """Show a bundle's folder to the person who started this, live, until Ctrl-C.

    Args:
        host: Whose settings hold.
        folder: The bundle's folder.
        listen: `HOST:PORT` on loopback; port 0 takes any that is free.
        browser: Whether to open the page.
        trust: Whether code of the bundle may run though it is not this person's.

    Raises ListenRefused; BadRequest, `console_not_loopback`; BundleError, `bundle_untrusted` among others.
    """
    name, port = address(listen)
    if not on_loopback(name):
        raise BadRequest(f"kdskills ui listens on loopback only, not on {name}", code="console_not_loopback")
    folder = folder.resolve()
    bundle = host.bundles.open(folder, Context(identity=replace(LOCAL, door="cli"), trust=trust))
    shown_host = Host(host.settings, folder=folder, python="execute" if bundle.trusted else "read")
    owner = replace(LOCAL, door="console")
    console = Console(shown_host, _nobody, frozenset(), owner=owner, folder=folder, trust=bundle.trusted)
    asyncio.run(_serve(console, name, port, browser=browser))


class _Announcing(BoundedServer):
    """A server that tells the person where the page is, once it can be loaded."""

    console: Console
    browser: bool

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if not sockets:
            raise OperatorMustAct("the console could not be started")
        name, port = sockets[0].getsockname()[:2]
        shown_name = f"[{name}]" if ":" in name else name
        url = f"http://{shown_name}:{port}/ui/enter/{self.console.key}"
        _LOG.debug("serving %s", self.console.folder)
        print(f"kdskills console: {url}\nCtrl-C ends it.", flush=True)  # noqa: T201 - what the command is run for
        if self.browser:
            await asyncio.to_thread(webbrowser.open, url)


async def _serve(console: Console, name: str, port: int, *, browser: bool) -> None:
    settings = console.host.settings
    crowd = Crowd(most=settings.connections, header_s=settings.header_timeout_s, body_s=settings.body_timeout_s)
    server = _Announcing(server_config(console, name, port, crowd, timeout_graceful_shutdown=10))
    server.console, server.browser = console, browser
    try:
        await serve(server, crowd)
    finally:
        await console.host.work.aclose()
        await console.host.storage.aclose()
