"""Operations as MCP tools, under names every client takes (spec runtime §5)."""

from __future__ import annotations

import json
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError

from kdskills.app import Host
from kdskills.app.identity import Identity
from kdskills.app.operations import Context, Operation
from kdskills.doors.mcp.skills import WhoAsks
from kdskills.errors import KdskillsError

Ctx = ServerRequestContext[Any, Any]


def safe_name(name: str) -> str:
    """Return an operation's name as a tool's: clients take letters, digits, `_` and `-` only."""
    return name.replace(".", "_")


def offered(host: Host, identity: Identity) -> dict[str, Operation]:
    """Return the operations the caller may run, by tool name."""
    return {
        safe_name(operation.name): operation
        for operation in host.operations.values()
        if (identity.local or not operation.local)
        and identity.may(operation.scope)
        and (identity.allowed_tools is None or operation.name in identity.allowed_tools)
    }


class Tools:
    """Lists and runs tools for *host*.

    Args:
        host: What operations run on.
        who: Tells who asks.
        session: Session of the connection, for tools that have one; None where connections are not told apart.
    """

    def __init__(self, host: Host, who: WhoAsks, session: str | None) -> None:
        self._host = host
        self._who = who
        self._session = session

    async def list(self, ctx: Ctx, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """List the caller's tools."""
        tools = [
            types.Tool(
                name=name,
                title=operation.name,
                description=operation.summary,
                input_schema=operation.input.model_json_schema(),
                output_schema=operation.output.model_json_schema(mode="serialization"),
                annotations=types.ToolAnnotations(read_only_hint=operation.reads),
            )
            for name, operation in sorted(offered(self._host, self._who(ctx)).items())
        ]
        return types.ListToolsResult(tools=tools, ttl_ms=0, cache_scope="private")

    async def call(self, ctx: Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Run a tool; every refusal is a result that tells the model what happened."""
        operation = next(
            (row for row in self._host.operations.values() if params.name in {row.name, safe_name(row.name)}), None
        )
        if operation is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}")
        arguments = dict(params.arguments or {})
        if self._session is not None and "session_id" in operation.input.model_fields:
            arguments.setdefault("session_id", self._session)
        context = Context(identity=self._who(ctx), request_id=str(ctx.request_id))
        try:
            answer = await self._host.invoke(operation.name, arguments, context)
        except KdskillsError as error:
            return _result(error.to_json(), failed=True)
        return _result(answer.model_dump(mode="json"), failed=False)


def _result(value: dict[str, Any], *, failed: bool) -> types.CallToolResult:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)],
        structured_content=None if failed else value,
        is_error=failed,
    )
