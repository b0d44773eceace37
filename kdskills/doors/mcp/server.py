"""The MCP server: tools and skills of one Host, over stdio or streamable HTTP.

Operations are tools under names every client takes; which of them a client is offered is its profile.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qs

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import RequestBodyLimitMiddleware
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.authentication import (
    IDENTITY,
    Authenticate,
    RequestLimits,
    Unauthenticated,
    address,
    answered_names,
    of_header,
    on_loopback,
    require_own_origin,
)
from kdskills.app.connections import BoundedServer, Crowd, serve, server_config
from kdskills.app.identity import PROFILES, Identity, Profile, own_client
from kdskills.app.logs import note_request, number_of
from kdskills.app.operations import Context, Operation
from kdskills.app.operations.calling import host_words, require_allowed
from kdskills.app.operations.table import RUNS
from kdskills.app.publication import NOT_FOUND, Publication, PublishedEntry
from kdskills.app.telemetry import Telemetry
from kdskills.app.wire import as_text, headers_of, json_facts, json_text, status_of
from kdskills.errors import BadRequest, CallRefused, KdskillsError, NotFound
from kdskills.errors.traces import TRACEPARENT

_LOG = logging.getLogger(__name__)

EXTENSION: Final = "io.modelcontextprotocol/skills"
PAGE: Final = 100
MAX_TOLD: Final = 10_000
MAX_METHOD: Final = 80
"""Characters of a method's name that the log tells."""
ENVELOPE: Final[dict[str, Any]] = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""Policy is per consumer and may change at any moment: nothing is kept, nothing is shared."""

LISTING: Final = ("skills.list",)
READING: Final = ("skills.list", "skills.load", "skills.read")
"""Operations that give what listing and reading resources gives; who may not run them is given nothing here either."""

T = TypeVar("T")
Listed = TypeVar("Listed")
Ctx = ServerRequestContext[Any, Any]
WhoAsks = Callable[[Ctx], Identity]
Invoke = Callable[[str, Mapping[str, Any], Context], Awaitable[Any]]
Publish = Callable[[Identity, dict[tuple[str, str], PublishedEntry]], Awaitable[Publication]]


class Uri(types.RequestParams):
    """One skill or file, named by its uri."""

    uri: str


class Directory(Uri):
    """One directory, and where to go on."""

    cursor: str | None = None


class Skills:
    """Answers the extension's methods, and those of resources and prompts, with what *publish* gives and *operations* let
    callers read; *session* as in `Tools`.
    """

    def __init__(
        self,
        operations: Mapping[str, Operation],
        publish: Publish,
        invoke: Invoke,
        caller_of: WhoAsks,
        session: str | None,
    ) -> None:
        self._operations = operations
        self._publish = publish
        self._invoke = invoke
        self._caller_of = caller_of
        self._session = {} if session is None else {"session_id": session}
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
        server.add_request_handler("resources/templates/list", types.PaginatedRequestParams, self._templates)
        server.add_request_handler("resources/read", types.ReadResourceRequestParams, self._read)
        server.add_request_handler("prompts/list", types.PaginatedRequestParams, self._prompts)
        server.add_request_handler("prompts/get", types.GetPromptRequestParams, self._prompt)

    async def _declare(self, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        """Declare the extension to clients of 2025-11-25, too: that protocol's form of capabilities would drop it."""
        result = await call_next(ctx)
        if ctx.method == "initialize" and isinstance(result, dict):
            result["capabilities"] = {**result["capabilities"], "extensions": {EXTENSION: {"directoryRead": True}}}
        return result

    async def _publication(self, ctx: Ctx, needed: tuple[str, ...] = LISTING) -> Publication:
        """Return what the caller may see. Raises MCPError, also for who may not run the operations *needed*."""
        identity = self._caller_of(ctx)
        with refusals():
            for name in needed:
                require_allowed(self._operations[name], identity)
            return await self._publish(identity, self._kept)

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

    async def _templates(self, ctx: Ctx, params: types.PaginatedRequestParams) -> dict[str, Any]:
        await self._publication(ctx)
        return {"resourceTemplates": TEMPLATES, **ENVELOPE}

    async def _read(self, ctx: Ctx, params: types.ReadResourceRequestParams) -> dict[str, Any]:
        publication = await self._publication(ctx, READING)
        file, data = await look_up(lambda: publication.read(str(params.uri)))
        content: dict[str, Any] = {"uri": file.uri, "mimeType": file.media_type}
        try:
            content["text"] = data.decode("utf-8")
        except UnicodeDecodeError:
            content["blob"] = base64.b64encode(data).decode("ascii")
        return {"contents": [content], **ENVELOPE}

    async def _prompts(self, ctx: Ctx, params: types.PaginatedRequestParams) -> dict[str, Any]:
        skills = (await self._publication(ctx)).startable(self._caller_of(ctx).starter)
        page, following = page_of(skills, params.cursor, uri=attrgetter("location"))
        rows = [
            {
                "name": skill.full_id,
                "title": skill.name,
                "description": skill.description,
                "arguments": [{"name": each.name, "description": each.description} for each in skill.arguments],
            }
            for skill in page
        ]
        return {"prompts": as_text(rows), **following, **ENVELOPE}

    async def _prompt(self, ctx: Ctx, params: types.GetPromptRequestParams) -> dict[str, Any]:
        """Load a skill that a person chose, and return its text with the arguments filled in."""
        publication, identity = await self._publication(ctx, READING), self._caller_of(ctx)
        skill = {skill.full_id: skill for skill in publication.startable(identity.starter)}.get(params.name)
        if skill is None:
            raise MCPError(types.INVALID_PARAMS, NOT_FOUND)
        arguments = {"names": [skill.full_id], "mode": "add", **self._session}
        with refusals():
            context = Context(identity=identity, request_id=number_of(str(ctx.request_id)), address=address_of(ctx))
            text = await asyncio.to_thread(publication.prompt, skill, params.arguments or {})
            await self._invoke("skills.load", arguments, context)
        message = {"role": "user", "content": {"type": "text", "text": as_text(text)}}
        return {"description": as_text(skill.description), "messages": [message], "resultType": "complete"}


TEMPLATES: Final = [
    {
        "uriTemplate": "skill://{namespace}/{skill}/SKILL.md",
        "name": "skill",
        "description": "The instructions of a skill, with their frontmatter.",
        "mimeType": "text/markdown",
    },
    {
        "uriTemplate": "skill://{namespace}/{skill}/{+path}",
        "name": "skill-file",
        "description": "A file of a skill; resources/directory/read lists them.",
    },
]


@contextmanager
def refusals() -> Iterator[None]:
    """Tell errors of ours as the protocol does. Raises MCPError."""
    try:
        yield
    except KdskillsError as error:
        raise MCPError(types.INVALID_PARAMS, error.message, error.to_json()["error"]) from error


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


def page_of(
    items: tuple[Listed, ...], cursor: str | None, uri: Callable[[Listed], str] = attrgetter("uri")
) -> tuple[tuple[Listed, ...], dict[str, str]]:
    """Return a page of *items* sorted by *uri*, and the cursor of the next. Raises MCPError for a cursor that is none of ours.

    A cursor is the last uri of its page, so that it stays right when skills come and go between two pages.
    """
    if cursor is not None:
        try:
            last = base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError, ValueError) as error:
            raise MCPError(types.INVALID_PARAMS, NOT_FOUND) from error
        if not last.startswith("skill://"):
            raise MCPError(types.INVALID_PARAMS, NOT_FOUND)
        items = items[next((number for number, item in enumerate(items) if uri(item) > last), len(items)) :]
    page = items[:PAGE]
    if len(items) <= PAGE:
        return page, {}
    return page, {"nextCursor": base64.urlsafe_b64encode(uri(page[-1]).encode()).decode("ascii")}


def safe_name(name: str) -> str:
    """Return an operation's name as a tool's: clients take letters, digits, `_` and `-` only."""
    return name.replace(".", "_")


def address_of(ctx: Ctx) -> str:
    """Return where a request came from; nothing is known of a client on standard input."""
    client = None if ctx.request is None else ctx.request.client
    return "" if client is None else str(client.host)


def _may_run(operation: Operation, identity: Identity) -> bool:
    try:
        require_allowed(operation, identity)
    except CallRefused:
        return False
    return True


class Tools:
    """Lists operations as tools and runs them; *session* is the connection's, None where they are not told apart."""

    def __init__(
        self, operations: Mapping[str, Operation], invoke: Invoke, caller_of: WhoAsks, session: str | None
    ) -> None:
        self._operations = operations
        self._invoke = invoke
        self._caller_of = caller_of
        self._session = session
        self._names = {safe_name(name): name for name in operations}
        self._tools: dict[tuple[str, bool, bool], types.Tool] = {}

    async def list(self, ctx: Ctx, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """List the caller's tools."""
        identity = self._caller_of(ctx)
        offered = [(name, self._operations[operation]) for name, operation in sorted(self._names.items())]
        tools = [self._tool(name, operation, identity) for name, operation in offered if _may_run(operation, identity)]
        return types.ListToolsResult(tools=tools, ttl_ms=0, cache_scope="private")

    def _tool(self, name: str, operation: Operation, identity: Identity) -> types.Tool:
        """Return an operation as a tool: made when it is first listed, and the same from then on.

        Who may not run commands is not told of arguments that do, so that the tool reads and nothing else.
        """
        runs = bool(operation.commands) and _may_run(self._operations[RUNS], identity)
        tool = self._tools.get((name, identity.sees_all, runs))
        if tool is None:
            schema = operation.input.model_json_schema()
            hidden = () if identity.sees_all else tuple(host_words(operation))
            for word in hidden if runs else (*hidden, *operation.commands):
                schema.get("properties", {}).pop(word, None)
            tool = types.Tool(
                name=name,
                title=operation.name,
                description=operation.summary,
                input_schema=compact(schema),
                annotations=types.ToolAnnotations(read_only_hint=operation.reads and not runs),
            )
            self._tools[name, identity.sees_all, runs] = tool
        return tool

    async def call(self, ctx: Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Run a tool; every refusal is a result that tells the model what happened."""
        operation = self._operations.get(self._names.get(params.name, params.name))
        if operation is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}")
        arguments = dict(params.arguments or {})
        if self._session is not None and "session_id" in operation.input.model_fields:
            arguments.setdefault("session_id", self._session)
        context = Context(
            identity=self._caller_of(ctx), request_id=number_of(str(ctx.request_id)), address=address_of(ctx)
        )
        try:
            answer = await self._invoke(operation.name, arguments, context)
        except KdskillsError as error:
            note_request(code=error.code)
            return _result(error.to_json(), failed=True)
        return _result(json.loads(json_text(answer)), failed=False)


def compact(schema: Any) -> Any:
    """Return a JSON schema without the titles pydantic makes of names: they tell a model nothing and cost it room."""
    if isinstance(schema, list):
        return [compact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: compact(item) for key, item in value.items()}
        if name in {"properties", "$defs"} and isinstance(value, dict)
        else compact(value)
        for name, value in schema.items()
        if not (name == "title" and isinstance(value, str))
    }


def _result(value: dict[str, Any], *, failed: bool) -> types.CallToolResult:
    value = cast("dict[str, Any]", as_text(value))
    text = json.dumps(value, ensure_ascii=False)
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)],
        structured_content=None if failed else value,
        is_error=failed,
    )


def profile_of(name: str) -> Profile:
    """Return the profile with this name. Raises BadRequest, `profile_unknown`."""
    for profile in PROFILES:
        if name == profile:
            return profile
    raise BadRequest(f"profiles are {', '.join(PROFILES)}; not {name!r}", code="profile_unknown")


def profile_of_query(query: bytes, otherwise: Profile) -> Profile:
    """Return the profile that the query of an address names, as in `/mcp?profile=author`; more than one are unknown."""
    names = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("profile")
    if names is None:
        return otherwise
    return profile_of(names[0] if len(names) == 1 else " and ".join(names))


def within(identity: Identity, profile: Profile) -> Identity:
    """Return a caller narrowed to a profile.

    Raises CallRefused: `scope_missing` where the operator's profile meets no token with the scope `admin`,
    `not_in_profile` where the profile is wider than the one the caller is served.
    """
    if profile == "operator" and not (identity.token is not None and identity.may("admin")):
        words = (
            "the profile operator needs a token with the scope admin; on standard input that is the setting stdio_token"
        )
        raise CallRefused(words, code="scope_missing", scope="admin")
    if PROFILES.index(profile) > PROFILES.index(identity.profile):
        words = f"without a token this service serves the profile {identity.profile!r}, not {profile!r}"
        raise CallRefused(words, code="not_in_profile", profile=profile)
    return replace(identity, door="mcp", profile=profile)


async def client_identity(host: Host, client: Identity) -> Identity:
    """Return who the client on standard input is: *client* without a token, else whose the setting `stdio_token` is.

    An author's client and an operator's work on files of this machine. Raises Unauthenticated, and as `within`.
    """
    secret = host.settings.stdio_token
    if secret is None:
        return within(client, client.profile)
    identity = await host.tokens.authenticate(secret.get_secret_value())
    if identity is None:
        raise Unauthenticated("the token of the setting stdio_token is not known")
    return within(replace(identity, local=client.local), client.profile)


def build_server(host: Host, caller_of: WhoAsks, *, session: str | None = None) -> Server[Any]:
    """Return an MCP server over *host*; tools use *session* when a call names none: a connection's own on stdio."""
    tools = Tools(host.operations, host.invoke, caller_of, session)
    server: Server[Any] = Server(
        "kdskills",
        version=host.version,
        instructions="Load a skill with skills_load before you use it; read its files with skills_read.",
        on_list_tools=tools.list,
        on_call_tool=tools.call,
    )
    server.middleware.append(partial(_traced, host.telemetry))
    Skills(host.operations, host.publication, host.invoke, caller_of, session).add_to(server)
    return server


async def _traced(telemetry: Telemetry, ctx: Ctx, call_next: CallNext) -> HandlerResult:
    """Serve a request as a step of the trace in its `_meta`, or in the header it came with, and tell it in the answer's."""
    if ctx.request_id is None:
        return await call_next(ctx)
    meta = (ctx.params or {}).get("_meta")
    traceparent = meta.get(TRACEPARENT) if isinstance(meta, Mapping) else None
    if traceparent is None and ctx.request is not None:
        traceparent = ctx.request.headers.get(TRACEPARENT)
    with telemetry.request("mcp", number_of(str(ctx.request_id)), traceparent) as record:
        record.facts["method"] = ctx.method[:MAX_METHOD]
        result = await call_next(ctx)
    step = {TRACEPARENT: str(record.trace)}
    if isinstance(result, types.Result):
        return result.model_copy(update={"meta": {**(result.meta or {}), **step}})
    if isinstance(result, dict):
        return {**result, "_meta": {**result.get("_meta", {}), **step}}
    return result


async def serve_stdio(host: Host, identity: Identity) -> None:
    """Serve one client on standard input and output until it closes them."""
    server = build_server(host, lambda _: identity, session=f"mcp-{secrets.token_hex(8)}")
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


class McpHttp:
    """An ASGI application; `running` must be entered while it serves.

    Args:
        names: Host names clients may use beside those of loopback; other `Host` and `Origin` headers are refused.
        profile: Tools a client is offered whose address names no other, as `?profile=author` does.
    """

    def __init__(
        self, host: Host, authenticate: Authenticate, names: frozenset[str] = frozenset(), profile: Profile = "skills"
    ) -> None:
        self._authenticate = authenticate
        self._names = names
        self._profile = profile
        self._server = build_server(host, _caller_of)
        self._manager = StreamableHTTPSessionManager(self._server, json_response=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while this is open."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a caller with a token."""
        header = dict(scope["headers"]).get(b"authorization")
        try:
            require_own_origin(scope, self._names)
            identity = await self._authenticate(None if header is None else header.decode("latin-1"))
            identity = within(identity, profile_of_query(scope.get("query_string", b""), self._profile))
        except KdskillsError as error:
            await _refuse(send, error)
            return
        most, serve = identity.limits.body_bytes, self._manager.asgi_app
        if most is not None:
            serve = RequestBodyLimitMiddleware(serve, most)
        await serve({**scope, IDENTITY: identity}, receive, send)


mount = McpHttp
"""Makes what the HTTP service serves under `/mcp`; entry point `mcp` of the group `kdskills.mounts`."""


def _caller_of(ctx: ServerRequestContext[Any, Any]) -> Identity:
    """Return who sent the request, as the token told before anything was read."""
    assert ctx.request is not None
    identity = ctx.request.scope[IDENTITY]
    assert isinstance(identity, Identity)
    return identity


async def _refuse(send: Send, error: KdskillsError) -> None:
    note_request(code=error.code)
    body = json_facts(error.to_json()).encode()
    texts = {"Content-Type": "application/json", **headers_of(error)}
    headers = [(name.lower().encode(), text.encode()) for name, text in texts.items()]
    await send({"type": "http.response.start", "status": status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def command(
    host: Host,
    *,
    http: str | None = None,
    project: str = "local",
    agent: str = "local",
    profile: str = "skills",
    tools: Collection[str] | None = None,
) -> None:
    """Serve until the client closes standard input, or until TERM.

    Args:
        host: What is served.
        http: `HOST:PORT`; on loopback without tokens, elsewhere with them only.
        project: Project whose skills are served to a client without a token.
        agent: Consumer that the policy of skills is asked for, of a client without a token.
        profile: Tools that are served: `skills`, `author` or `operator`, which needs a token of an administrator.
        tools: Ids of the tools a client without a token holds; None when skills are not asked what they need.

    Raises ListenRefused; BadRequest, `profile_unknown`; CallRefused, `scope_missing`.
    """
    client = own_client(profile_of(profile), project, agent, None if tools is None else frozenset(tools))

    async def stdio() -> None:
        await serve_stdio(host, await client_identity(host, client))

    if http is None:
        asyncio.run(stdio())
        return
    name, port = address(http)
    settings, app = host.settings, http_app(host, name, client)
    crowd = Crowd(most=settings.connections, header_s=settings.header_timeout_s, body_s=settings.body_timeout_s)
    config = server_config(app, name, port, crowd)
    asyncio.run(serve(BoundedServer(config), crowd))


def http_app(host: Host, listen: str, client: Identity) -> Starlette:
    """Return the application that many clients reach; a token's own limits hold here as at every door.

    Where *listen*, its host, is loopback, who brings no token is *client*, though without files of this machine.
    """
    limits = RequestLimits(host.settings.requests_per_minute)

    async def authenticate(header: str | None) -> Identity:
        caller = await of_header(host.storage, header, open_on_loopback=on_loopback(listen))
        caller = replace(client, local=False) if header is None else caller
        limits.count(caller)
        return caller

    app = McpHttp(host, authenticate, answered_names(listen, host.settings.host_names), client.profile)
    return Starlette(routes=[Route("/mcp", app), Route("/", app)], lifespan=lambda _: app.running())
