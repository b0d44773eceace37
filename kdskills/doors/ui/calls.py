"""One request to the console: who sent it, what it may ask of the Host, and how it is answered."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect

from kdskills.app import Host
from kdskills.app.identity import Identity
from kdskills.app.logs import REQUEST, number_of
from kdskills.app.operations import Context
from kdskills.app.operations.calling import require_allowed
from kdskills.doors.ui.rendering import ROOM, PageLinks, PageRoom
from kdskills.doors.ui.sessions import ConsoleSession
from kdskills.errors import BadRequest, CallRefused

HOME: Final = "/ui/"
PIECE: Final = 512 * 1024
"""Bytes of a file that are read at a time."""

Answer = Callable[["ConsoleCall"], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ConsoleRoute:
    """What answers at one path below `/ui`; POST changes something and is answered only with the session's CSRF token."""

    path: str
    answer: Answer
    method: str = "GET"


@dataclass(frozen=True, slots=True)
class NavigationItem:
    """A page every page leads to, for callers who may run its *operation*."""

    title: str
    path: str
    operation: str


NAVIGATION: Final = (
    NavigationItem("Home", HOME, ""),
    NavigationItem("Skills", "/ui/skills", "skills.matrix"),
    NavigationItem("Prompt", "/ui/prompt", "skills.render"),
    NavigationItem("Try", "/ui/try", "turns.start"),
    NavigationItem("Turns", "/ui/turns", "turns.list"),
    NavigationItem("Work", "/ui/work", "tasks.list"),
    NavigationItem("Evals", "/ui/evals", "evals.list"),
    NavigationItem("Projects", "/ui/projects", "project_skills.list"),
    NavigationItem("Access", "/ui/access", "tokens.list"),
)


@dataclass(frozen=True)
class ConsoleCall:
    """One request to the console.

    Attributes:
        host: What operations run on.
        environment: What pages are rendered with.
        identity: Who sent it.
        session: The browser it came from.
        folder: The bundle's folder, where the console shows one without a service.
        trust: Whether code of that bundle may run.
    """

    host: Host
    environment: jinja2.Environment
    request: Request
    identity: Identity
    session: ConsoleSession
    folder: Path | None = None
    trust: bool = False

    @property
    def query(self) -> Mapping[str, str]:
        """What stands behind the `?`, the last of each name; what is empty is left out."""
        return {name: value for name, value in self.request.query_params.items() if value}

    @property
    def context(self) -> Context:
        """The call as operations see it."""
        request_id = self.request.scope.get("state", {}).get(REQUEST) or number_of("")
        return Context(identity=self.identity, request_id=request_id, trust=self.trust)

    def may(self, name: str) -> bool:
        """Whether the caller may run the operation *name* at all."""
        try:
            self.require(name)
        except CallRefused:
            return False
        return name in self.host.operations

    def require(self, name: str) -> None:
        """Refuse a page about the operation *name* to a caller who may not run it. Raises CallRefused."""
        operation = self.host.operations.get(name)
        if operation is not None:
            require_allowed(operation, self.identity)

    async def ask(self, name: str, **arguments: Any) -> Any:
        """Run an operation and return its output; arguments that are None are left out. Raises KdskillsError."""
        given_arguments = {key: value for key, value in arguments.items() if value is not None}
        return await self.host.invoke(name, given_arguments, self.context)

    def segment(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])

    def number(self, name: str) -> int | None:
        """Return a number behind the `?`, None where there is none. Raises BadRequest."""
        text = self.query.get(name)
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 15:
            raise BadRequest(f"{name} is a number", errors=[{"path": f"/{name}", "problem": "no number"}])
        return int(text)

    async def form(self, *, files: int = 0) -> FormData:
        """Return the form that was sent, with at most so many files; they go to disk as they come. Raises BadRequest."""
        return await sent_form(self.request, files=files)

    def page(self, template: str, title: str, status: int = 200, *, room: int = ROOM, **values: Any) -> Response:
        """Answer with a page. *title* tells it apart from every other one; its texts take *room* bytes at most."""
        text = self.environment.get_template(template).render(
            title=title,
            path=self.request.url.path,
            query=defaultdict(str, self.query),
            links=PageLinks(str(self.request.url.path), self.query),
            navigation=[item for item in NAVIGATION if not item.operation or self.may(item.operation)],
            call=self,
            csrf=self.session.csrf,
            notice=self.session.take_notice(),
            folder=self.folder,
            version=self.host.version,
            room=PageRoom(room),
            **values,
        )
        return HTMLResponse(text, status)

    def fragment(self, template: str, **values: Any) -> Response:
        """Answer with a piece of a page, which stands for itself."""
        words = {"call": self, "csrf": self.session.csrf, "room": PageRoom(), **values}
        return HTMLResponse(self.environment.get_template(template).render(words))

    def unchanged(self) -> Response:
        """Answer a question for news with none."""
        return Response(status_code=204)

    def reload(self) -> Response:
        """Have the page loaded again that asked."""
        return Response(status_code=204, headers={"HX-Refresh": "true"})

    def redirect(self, path: str, notice: str = "") -> Response:
        """Lead to another page of the console, which tells the *notice* once; what every POST ends with."""
        self.session.notice = notice
        if (
            "hx-request" in self.request.headers
        ):  # a script followed a 303 itself, and its page would stay at the old one
            return Response(status_code=204, headers={"HX-Redirect": path})
        return RedirectResponse(path, 303)


async def sent_form(request: Request, *, files: int = 0, fields: int = 200, part: int = 1024 * 1024) -> FormData:
    """Return the form of a request, with at most so many files and fields of so many bytes. Raises BadRequest."""
    said = request.headers.get("content-type", "").lower()
    if "charset" in said and "utf-8" not in said:  # other codecs give text that nothing can keep, such as halves
        raise BadRequest("the form cannot be read: it has to be in UTF-8")
    try:
        return await request.form(max_files=files, max_fields=fields, max_part_size=part)
    except ClientDisconnect:
        raise BadRequest("the request ended before its form did") from None
    except HTTPException as error:
        raise BadRequest(f"the form cannot be read: {error.detail}") from None
    except (MultiPartException, UnicodeError, KeyError, ValueError) as error:
        raise BadRequest(f"the form cannot be read: {getattr(error, 'message', 'it is broken')}") from None


def form_text(form: FormData, name: str) -> str:
    """Return a text of a form, its lines ended as a shell ends them; empty where it has none of that name."""
    value = form.get(name)
    return value.replace("\r\n", "\n") if isinstance(value, str) else ""


async def download(call: ConsoleCall, operation: str, **words: str) -> Response:
    """Answer with a file that an operation gives in pieces, as bytes to keep: nothing of it is shown as a page."""
    first = await call.ask(operation, **words, offset=0, limit=PIECE)

    async def pieces() -> AsyncIterator[bytes]:
        piece = first
        while True:
            yield base64.b64decode(piece.data_base64)
            if not piece.data_base64 or piece.next_offset is None or piece.next_offset >= piece.size:
                return
            piece = await call.ask(operation, **words, offset=piece.next_offset, limit=PIECE)

    name = quote(PurePosixPath(first.path).name, safe="", errors="replace")
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "Content-Length": str(first.size),
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)
