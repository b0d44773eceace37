"""Speaking to an MCP server with the official SDK.

One connection to a server is kept between questions. A server that hangs costs one question; one that was restarted
costs none, since what a kept connection fails at is asked once more on a new one.
"""

from __future__ import annotations

import base64
import binascii
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kdskills.builtin.roots.mcp.address import McpAddress
from kdskills.builtin.roots.mcp.connection import IDLE_S, Ask, Connection, Question
from kdskills.errors import MissingExtra, OperatorMustAct

T = TypeVar("T")
TIMEOUT_S: Final = 30.0
MAX_PAGES: Final = 200
CREDENTIALS: Final = "KDSKILLS_MCP_TOKEN_"
LOST: Final = frozenset((-32000, -32001, -32600, -32603))
"""Codes the SDK gives when a connection, a session or an HTTP request failed; a server's own answers have others."""


class ServerFailed(OperatorMustAct):
    """An MCP server does not answer, or answers what cannot be used."""

    code = "mcp_server_failed"


class Server(Protocol):
    """What a root asks its server. Every method raises ServerFailed."""

    def entries(self) -> list[dict[str, Any]]:
        """Return all pages of `skills/list`."""
        ...

    def entry(self, uri: str) -> dict[str, Any]:
        """Return one entry by `skills/get`."""
        ...

    def read(self, uris: tuple[str, ...]) -> list[bytes]:
        """Return the bytes of files by `resources/read`, as the server gives them."""
        ...


class SdkServer:
    """A server reached by its address. Safe from any thread.

    Args:
        address: Where it is.
        timeout_s: Seconds a question may take, and connecting as many.
        idle_s: Seconds without a question after which the connection is closed.
    """

    def __init__(self, address: McpAddress, *, timeout_s: float = TIMEOUT_S, idle_s: float = IDLE_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closing: weakref.finalize[..., Any] | None = None

    def entries(self) -> list[dict[str, Any]]:
        """Return all pages of `skills/list`. Raises ServerFailed."""

        async def pages(ask: Ask) -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = []
            params: dict[str, Any] = {}
            for _ in range(MAX_PAGES):
                answer = await ask("skills/list", params)
                page = answer.get("skills")
                if not isinstance(page, list) or not all(isinstance(row, dict) for row in page):
                    raise ServerFailed("the answer to skills/list has no list of skills")
                rows += page
                cursor = answer.get("nextCursor")
                if not isinstance(cursor, str):
                    return rows
                params = {"cursor": cursor}
            raise ServerFailed(f"the server lists more than {MAX_PAGES} pages of skills")

        return self._run(pages)

    def entry(self, uri: str) -> dict[str, Any]:
        """Return one entry by `skills/get`. Raises ServerFailed."""

        async def get(ask: Ask) -> dict[str, Any]:
            row = (await ask("skills/get", {"uri": uri})).get("skill")
            if not isinstance(row, dict):
                raise ServerFailed("the answer to skills/get has no skill")
            return row

        return self._run(get)

    def read(self, uris: tuple[str, ...]) -> list[bytes]:
        """Return files by `resources/read`. Raises ServerFailed."""

        async def every(ask: Ask) -> list[bytes]:
            return [content_of(await ask("resources/read", {"uri": uri}), uri) for uri in uris]

        return self._run(every)

    def _run(self, question: Question[T]) -> T:
        answer, proven = self._ask(question)
        try:
            return answer.result()
        except Exception as error:  # noqa: BLE001 - raised again in one form, or asked once more
            first = error
        if not proven or isinstance(first, TimeoutError) or _is_answer(first):
            raise _failed(self._address.label, first, self._timeout_s)
        answer, _ = self._ask(question)
        try:
            return answer.result()
        except Exception as error:  # noqa: BLE001 - raised again in one form
            raise _failed(self._address.label, error, self._timeout_s) from first

    def _ask(self, question: Question[T]) -> tuple[Future[T], bool]:
        """Ask on the open connection or a new one; return the answer's future, and whether that connection had worked."""
        with self._lock:
            if self._connection is not None:
                proven = self._connection.proven
                answer = self._connection.ask(question, self._timeout_s)
                if answer is not None:
                    return answer, proven
            name = f"mcp-{self._address.label}"
            fresh = Connection(partial(_connect, self._address), name, _is_answer, idle_s=self._idle_s)
            if self._closing is not None:
                self._closing.detach()
            self._connection = fresh
            self._closing = weakref.finalize(self, fresh.close)  # with this object goes the last who could ask
            answer = fresh.ask(question, self._timeout_s)
        assert answer is not None
        return answer, False


async def _connect(address: McpAddress, stack: AsyncExitStack) -> Ask:
    """Connect with the SDK, which speaks old and new versions of the protocol, and return what sends requests."""
    try:
        import mcp_types as types
        from mcp.client import Client, advertise
        from mcp.client.stdio import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client
        from pydantic import TypeAdapter
    except ModuleNotFoundError as error:
        raise MissingExtra("MCP roots need the mcp package: pip install 'kdskills[mcp]'", extra="mcp") from error
    extension = [advertise("io.modelcontextprotocol/skills")]
    if address.url is None:
        program = StdioServerParameters(command=address.command[0], args=list(address.command[1:]))
        client = await stack.enter_async_context(Client(program, extensions=extension, cache=None))
    else:
        token = os.environ.get(CREDENTIALS + address.label.upper().replace("-", "_"))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
        transport = streamable_http_client(address.url, http_client=http)
        client = await stack.enter_async_context(Client(transport, extensions=extension, cache=None))
    shape: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])

    async def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
        request = types.Request[dict[str, Any], str](method=method, params=params)
        return await client.session.send_request(request, shape)  # type: ignore[type-var]  # the SDK types only its own

    return ask


def content_of(answer: dict[str, Any], uri: str) -> bytes:
    """Return the bytes of the one content of *uri* in an answer to `resources/read`. Raises ServerFailed."""
    contents = answer.get("contents")
    rows = [row for row in contents if isinstance(row, dict)] if isinstance(contents, list) else []
    matching = [row for row in rows if row.get("uri") == uri]
    if len(matching) != 1:
        raise ServerFailed(f"the answer to resources/read does not hold {uri} once")
    text, blob = matching[0].get("text"), matching[0].get("blob")
    try:
        if isinstance(text, str) and blob is None:
            return text.encode("utf-8")
        if isinstance(blob, str) and text is None:
            return base64.b64decode(blob, validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise ServerFailed(f"the content of {uri} cannot be decoded") from error
    raise ServerFailed(f"the content of {uri} is neither text nor a blob")


def _is_answer(error: BaseException) -> bool:
    """Whether an error is what the server answered, on a connection that works."""
    if isinstance(error, ServerFailed):
        return True
    try:
        from mcp.shared.exceptions import MCPError
    except ModuleNotFoundError:
        return False
    return isinstance(error, MCPError) and error.code not in LOST


def _failed(label: str, error: Exception, timeout_s: float) -> Exception:
    """Return the exception for a question that failed, with the innermost cause in one sentence."""
    causes = tuple(_causes(error))
    failure = next((cause for cause in causes if isinstance(cause, ServerFailed | MissingExtra)), None)
    if failure is not None:
        return failure
    last = causes[-1]
    message = str(last).splitlines()[0] if str(last) else type(last).__name__
    if isinstance(last, TimeoutError) and not str(last):
        message = f"no answer within {timeout_s:g} s"
    server_failure = ServerFailed(f"the MCP server {label!r} failed: {message}", label=label)
    server_failure.__cause__ = error
    return server_failure


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Go through an exception and what task groups wrapped in it."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
