"""The Skills extension of MCP: listing, entries, directories and files of what one caller may use."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from kdskills.app.identity import Identity
from kdskills.app.operations import Operation
from kdskills.app.operations.calling import require_allowed
from kdskills.app.publication import NOT_FOUND, Child, Publication, PublishedEntry
from kdskills.errors import KdskillsError, NotFound

_LOG = logging.getLogger(__name__)

EXTENSION: Final = "io.modelcontextprotocol/skills"
PAGE: Final = 100
MAX_TOLD: Final = 10_000
ENVELOPE: Final[dict[str, Any]] = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""Policy is per consumer and may change at any moment: nothing is kept, nothing is shared."""

LISTING: Final = ("skills.list",)
READING: Final = ("skills.list", "skills.load", "skills.read")
"""Operations that give what listing and reading resources gives; who may not run them is given nothing here either."""

T = TypeVar("T")
Listed = TypeVar("Listed", PublishedEntry, Child)
Ctx = ServerRequestContext[Any, Any]
WhoAsks = Callable[[Ctx], Identity]
Publish = Callable[[Identity, dict[tuple[str, str], PublishedEntry]], Awaitable[Publication]]


class Uri(types.RequestParams):
    """One skill or file, named by its uri."""

    uri: str


class Directory(Uri):
    """One directory, and where to go on."""

    cursor: str | None = None


class Skills:
    """Answers the extension's methods, with what *publish* gives, as `Host.publication`, and *operations* let callers read."""

    def __init__(self, operations: Mapping[str, Operation], publish: Publish, caller_of: WhoAsks) -> None:
        self._operations = operations
        self._publish = publish
        self._caller_of = caller_of
        self._kept: dict[tuple[str, str], PublishedEntry] = {}
        self._told: set[str] = set()

    def add_to(self, server: Server[Any]) -> None:
        """Register methods and the capability."""
        server.extensions[EXTENSION] = {"directoryRead": True}
        server.middleware.append(self._declare)
        server.add_request_handler("skills/list", types.PaginatedRequestParams, self._list)
        server.add_request_handler("skills/get", Uri, self._get)
        server.add_request_handler("resources/directory/read", Directory, self._directory)
        server.add_request_handler("resources/list", types.PaginatedRequestParams, self._resources)
        server.add_request_handler("resources/read", types.ReadResourceRequestParams, self._read)

    async def _declare(self, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        """Declare the extension to clients of 2025-11-25, too: that protocol's form of capabilities would drop it."""
        result = await call_next(ctx)
        if ctx.method == "initialize" and isinstance(result, dict):
            result["capabilities"] = {**result["capabilities"], "extensions": {EXTENSION: {"directoryRead": True}}}
        return result

    async def _publication(self, ctx: Ctx, needed: tuple[str, ...] = LISTING) -> Publication:
        """Return what the caller may see. Raises MCPError, also for who may not run the operations *needed*."""
        identity = self._caller_of(ctx)
        try:
            for name in needed:
                require_allowed(self._operations[name], identity)
            return await self._publish(identity, self._kept)
        except KdskillsError as error:
            raise MCPError(types.INVALID_PARAMS, error.message, error.to_json()["error"]) from error

    async def _entries(self, ctx: Ctx) -> tuple[PublishedEntry, ...]:
        """Return what the caller may see; why a skill is left out stands in the log, once."""
        publication = await self._publication(ctx)
        entries, notes = await look_up(publication.entries)
        for note in notes:
            if note.message not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(note.message)
                _LOG.warning("%s: %s", note.code, note.message)
        return entries

    async def _list(self, ctx: Ctx, params: types.PaginatedRequestParams) -> dict[str, Any]:
        page, following = page_of(await self._entries(ctx), params.cursor)
        return {"skills": [entry_json(entry) for entry in page], **following, **ENVELOPE}

    async def _get(self, ctx: Ctx, params: Uri) -> dict[str, Any]:
        publication = await self._publication(ctx)
        entry = await look_up(lambda: publication.get(params.uri))
        return {"skill": entry_json(entry), **ENVELOPE}

    async def _directory(self, ctx: Ctx, params: Directory) -> dict[str, Any]:
        publication = await self._publication(ctx)
        page, following = page_of(await look_up(lambda: publication.children(params.uri)), params.cursor)
        rows = [
            {"uri": child.uri, "name": child.name, "mimeType": child.media_type}
            | ({} if child.size is None else {"size": child.size})
            for child in page
        ]
        return {"resources": rows, **following}

    async def _resources(self, ctx: Ctx, params: types.PaginatedRequestParams) -> dict[str, Any]:
        page, following = page_of(await self._entries(ctx), params.cursor)
        rows = [
            {"uri": entry.uri, "name": entry.name, "description": entry.description, "mimeType": "text/markdown"}
            for entry in page
        ]
        return {"resources": rows, **following, **ENVELOPE}

    async def _read(self, ctx: Ctx, params: types.ReadResourceRequestParams) -> dict[str, Any]:
        publication = await self._publication(ctx, READING)
        file, data = await look_up(lambda: publication.read(str(params.uri)))
        content: dict[str, Any] = {"uri": file.uri, "mimeType": file.media_type}
        try:
            content["text"] = data.decode("utf-8")
        except UnicodeDecodeError:
            content["blob"] = base64.b64encode(data).decode("ascii")
        return {"contents": [content], **ENVELOPE}


async def look_up(look: Callable[[], T]) -> T:
    """Return what *look* finds, off the event loop since it reads files; what is unknown or refused is one error with one text."""
    try:
        return await asyncio.to_thread(look)
    except NotFound as error:
        raise MCPError(types.INVALID_PARAMS, NOT_FOUND) from error


def entry_json(entry: PublishedEntry) -> dict[str, Any]:
    """Return an entry as the extension has it."""
    return {
        "uri": entry.uri,
        "frontmatter": dict(entry.frontmatter),
        "resources": [{"uri": file.uri, "digest": file.digest, "size": file.size} for file in entry.files],
    }


def page_of(items: tuple[Listed, ...], cursor: str | None) -> tuple[tuple[Listed, ...], dict[str, str]]:
    """Return a page of sorted *items*, and the cursor of the next. Raises MCPError for a cursor that is none of ours.

    A cursor is the last uri of its page, so that it stays right when skills come and go between two pages.
    """
    if cursor is not None:
        try:
            last = base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError, ValueError) as error:
            raise MCPError(types.INVALID_PARAMS, NOT_FOUND) from error
        if not last.startswith("skill://"):
            raise MCPError(types.INVALID_PARAMS, NOT_FOUND)
        items = items[next((number for number, item in enumerate(items) if item.uri > last), len(items)) :]
    page = items[:PAGE]
    if len(items) <= PAGE:
        return page, {}
    return page, {"nextCursor": base64.urlsafe_b64encode(page[-1].uri.encode()).decode("ascii")}
