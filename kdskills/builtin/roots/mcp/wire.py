"""Speaking to an MCP server with the official SDK, one short connection per question (spec runtime §5).

Questions come from any thread, also from one whose event loop is busy, so each is asked in a thread of its own. Nothing
stays open between two of them: a server that hangs or restarts costs one question.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Final, Protocol, TypeVar

from kdskills.builtin.roots.mcp.address import Address
from kdskills.errors import MissingExtra, OperatorMustAct

T = TypeVar("T")
TIMEOUT_S: Final = 30.0
MAX_PAGES: Final = 200
CREDENTIALS: Final = "KDSKILLS_MCP_TOKEN_"

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


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
    """A server reached by its address."""

    def __init__(self, address: Address, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def entries(self) -> list[dict[str, Any]]:
        """Return all pages of `skills/list`. Raises ServerFailed."""

        async def pages(ask: Ask) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            params: dict[str, Any] = {}
            for _ in range(MAX_PAGES):
                answer = await ask("skills/list", params)
                page = answer.get("skills")
                if not isinstance(page, list) or not all(isinstance(row, dict) for row in page):
                    raise ServerFailed("the answer to skills/list has no list of skills")
                found += page
                cursor = answer.get("nextCursor")
                if not isinstance(cursor, str):
                    return found
                params = {"cursor": cursor}
            raise ServerFailed(f"the server lists more than {MAX_PAGES} pages of skills")

        return self._run(pages)

    def entry(self, uri: str) -> dict[str, Any]:
        """Return one entry by `skills/get`. Raises ServerFailed."""

        async def one(ask: Ask) -> dict[str, Any]:
            found = (await ask("skills/get", {"uri": uri})).get("skill")
            if not isinstance(found, dict):
                raise ServerFailed("the answer to skills/get has no skill")
            return found

        return self._run(one)

    def read(self, uris: tuple[str, ...]) -> list[bytes]:
        """Return files by `resources/read`. Raises ServerFailed."""

        async def every(ask: Ask) -> list[bytes]:
            return [content_of(await ask("resources/read", {"uri": uri}), uri) for uri in uris]

        return self._run(every)

    def _run(self, question: Callable[[Ask], Awaitable[T]]) -> T:
        answers: list[T] = []
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(asyncio.run(self._asked(question)))
            except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that asked
                failures.append(error)

        thread = threading.Thread(target=ask, name=f"mcp-{self._address.label}", daemon=True)
        thread.start()
        thread.join()
        if failures:
            raise _failed(self._address.label, failures[0])
        return answers[0]

    async def _asked(self, question: Callable[[Ask], Awaitable[T]]) -> T:
        async with asyncio.timeout(self._timeout_s), AsyncExitStack() as stack:
            return await question(await _connect(self._address, stack))


async def _connect(address: Address, stack: AsyncExitStack) -> Ask:
    """Connect in either era of the protocol, and return what asks."""
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
    found = [row for row in rows if row.get("uri") == uri]
    if len(found) != 1:
        raise ServerFailed(f"the answer to resources/read does not hold {uri} once")
    text, blob = found[0].get("text"), found[0].get("blob")
    try:
        if isinstance(text, str) and blob is None:
            return text.encode("utf-8")
        if isinstance(blob, str) and text is None:
            return base64.b64decode(blob, validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise ServerFailed(f"the content of {uri} cannot be decoded") from error
    raise ServerFailed(f"the content of {uri} is neither text nor a blob")


def _failed(label: str, error: BaseException) -> BaseException:
    """Return what to raise for a failed question: the server's failure in one sentence, or an interruption as it is."""
    causes = tuple(_causes(error))
    known = next((each for each in causes if isinstance(each, ServerFailed | MissingExtra)), None)
    if known is not None:
        return known
    if not isinstance(error, Exception):
        return error
    said = str(causes[-1]).splitlines()[0] if str(causes[-1]) else type(causes[-1]).__name__
    failed = ServerFailed(f"the MCP server {label!r} failed: {said}", label=label)
    failed.__cause__ = error
    return failed


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Go through an exception and what task groups wrapped in it."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
