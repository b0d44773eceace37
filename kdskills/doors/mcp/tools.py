"""Operations as MCP tools, under names every client takes; which of them a client is offered is its profile."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel

from kdskills.app.identity import Identity
from kdskills.app.logs import number_of
from kdskills.app.operations import Context, Operation
from kdskills.app.operations.calling import host_words, require_allowed
from kdskills.app.operations.table import RUNS
from kdskills.app.wire import as_text, json_text
from kdskills.doors.mcp.skills import WhoAsks
from kdskills.errors import CallRefused, KdskillsError

Ctx = ServerRequestContext[Any, Any]
Invoke = Callable[[str, Mapping[str, Any], Context], Awaitable[BaseModel]]


def safe_name(name: str) -> str:
    """Return an operation's name as a tool's: clients take letters, digits, `_` and `-` only."""
    return name.replace(".", "_")


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
        context = Context(identity=self._caller_of(ctx), request_id=number_of(str(ctx.request_id)))
        try:
            answer = await self._invoke(operation.name, arguments, context)
        except KdskillsError as error:
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
