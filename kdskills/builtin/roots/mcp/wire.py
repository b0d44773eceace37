"""Speaking to an MCP server with the official SDK: its URI and label, one connection, and what is asked over it.

Questions come from any thread, also from one whose event loop is busy, so the connection has a thread and loop of its own.
It ends when nobody asked for a while, and with the first thing that goes wrong; what it fails at is asked once more.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import binascii
import ipaddress
import os
import re
import shlex
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from kdskills.errors import BadRequest, MissingExtra, OperatorMustAct

T = TypeVar("T")

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes a method and its parameters, and returns the server's answer."""
Question = Callable[[Ask], Awaitable[T]]
Connect = Callable[[AsyncExitStack], Awaitable[Ask]]

AT_ONCE: Final = 8
"""Questions a server gets at one time; more wait, and their time runs."""
IDLE_S: Final = 120.0
ENDING_S: Final = 5.0


class ConnectionLost(Exception):  # internal to this package: it becomes a failure of the server
    """The connection ended before the question was answered."""


@dataclass(eq=False, slots=True)
class _PendingQuestion:
    question: Question[Any]
    timeout_s: float
    answer: Future[Any] = field(default_factory=Future)


class Connection:
    """One connection, opened by its first question. Safe from any thread.

    What the stack of *connect* holds is closed with it; an error that is *settled* is an answer of the server, after which
    the connection still works. *idle_s* without a question close it.
    """

    def __init__(
        self, connect: Connect, name: str, settled: Callable[[BaseException], bool], *, idle_s: float = IDLE_S
    ) -> None:
        self._connect, self._settled, self._idle_s = connect, settled, idle_s
        self._room = asyncio.Semaphore(AT_ONCE)
        self._lock = threading.RLock()  # the garbage collector may call `close` in a thread that holds it
        self._waiting: deque[_PendingQuestion] = deque()
        self._open = True
        self._wake: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.proven = False
        """Whether the server answered on it: what fails then may be the connection's fault alone."""

    def ask(self, question: Question[T], timeout_s: float) -> Future[T] | None:
        """Take a question; None when this connection takes no more. After *timeout_s* seconds the answer is a
        TimeoutError; connecting has as many of its own.
        """
        pending = _PendingQuestion(question, timeout_s)
        with self._lock:
            if not self._open:
                return None
            self._waiting.append(pending)
            if self._thread.ident is None:
                atexit.register(self._end)
                self._thread.start()
            elif self._wake is not None:
                self._wake()
        return pending.answer

    def close(self) -> None:
        """Take no more questions, and end when those under way are answered."""
        with self._lock:
            self._open = False
            if self._wake is not None:
                self._wake()

    def _end(self) -> None:
        """Close before the interpreter exits, so that a server process we started sees the end of its input."""
        self.close()
        self._thread.join(ENDING_S)

    def _run(self) -> None:
        failure: Exception = ConnectionLost("the connection was closed")
        try:
            asyncio.run(self._live())
        except Exception as error:  # noqa: BLE001 - told below to those who asked, in their threads
            failure = error
        except asyncio.CancelledError:  # a broken transport cancels `_live`; those who asked were not cancelled
            failure = ConnectionLost("the connection was lost")
        with self._lock:
            self._open, self._wake = False, None
            unanswered = list(self._waiting)
            self._waiting.clear()
        for pending in unanswered:
            pending.answer.set_exception(failure)
        atexit.unregister(self._end)

    async def _live(self) -> None:
        """Connect, and answer until nothing is left to do."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._wake = lambda: loop.call_soon_threadsafe(woken.set)
            patience = max((pending.timeout_s for pending in self._waiting), default=0.0)
        running: set[asyncio.Task[None]] = set()

        def over(task: asyncio.Task[None]) -> None:
            running.discard(task)
            woken.set()

        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(patience):
                    ask = await self._connect(stack)
                while True:
                    woken.clear()
                    with self._lock:
                        questions = list(self._waiting)
                        self._waiting.clear()
                    for pending in questions:
                        task = loop.create_task(self._answer(pending, ask))
                        running.add(task)
                        task.add_done_callback(over)
                    with self._lock:
                        finished = not running and not self._open and not self._waiting
                    if finished:
                        return
                    try:
                        async with asyncio.timeout(None if running else self._idle_s):
                            await woken.wait()
                    except TimeoutError:  # quiet for long enough: no more is taken
                        with self._lock:
                            self._open = self._open and bool(self._waiting)
        finally:
            with self._lock:  # nobody may wake a loop that is about to close
                self._open, self._wake = False, None
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, pending: _PendingQuestion, ask: Ask) -> None:
        try:
            async with asyncio.timeout(pending.timeout_s), self._room:
                answer = await pending.question(ask)
        except asyncio.CancelledError:
            pending.answer.set_exception(ConnectionLost("the connection was lost"))
            raise
        except Exception as error:  # noqa: BLE001 - told to whoever asked, in that thread
            if not self._settled(error):
                self.close()
            pending.answer.set_exception(error)
        else:
            self.proven = True
            pending.answer.set_result(answer)


SCHEMES: Final = ("mcp+https://", "mcp+http://", "mcp+stdio:")
LABEL: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
DYNAMIC: Final = "allow_dynamic"


class McpAddress(NamedTuple):
    """A server: `url` or `command`, and the label the operator gave it."""

    label: str
    url: str | None = None
    command: tuple[str, ...] = ()
    allow_dynamic: bool = False


def parse_address(uri: str) -> McpAddress:
    """Read `mcp+https://…#label`, `mcp+http://…#label` on loopback or `mcp+stdio:program args#label`.

    `#label;allow_dynamic` also takes skills whose server does not say what files they have.

    Raises:
        BadRequest: It is none of these.
    """
    target, _, fragment = uri.partition("#")
    label, _, option = fragment.partition(";")
    if not LABEL.fullmatch(label) or len(label) > 32:
        raise _bad(uri, "end it with #label: up to 32 lower-case letters and digits, with single hyphens between")
    if option not in {"", DYNAMIC}:
        raise _bad(uri, f"the only option behind the label is {DYNAMIC}")
    dynamic = option == DYNAMIC
    if target.startswith("mcp+stdio:"):
        try:
            command = tuple(shlex.split(unquote(target.removeprefix("mcp+stdio:"))))
        except ValueError as error:
            raise _bad(uri, f"the command cannot be read: {error}") from error
        if not command or "\0" in "".join(command):
            raise _bad(uri, "it names no program")
        return McpAddress(label, command=command, allow_dynamic=dynamic)
    url = target.removeprefix("mcp+")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _bad(uri, f"the address cannot be read: {error}") from error
    if not host or parts.username is not None or parts.password is not None:
        raise _bad(uri, "it must name a host, without a user or password")
    loopback = host == "localhost"
    with suppress(ValueError):  # a name is no address, and only `localhost` is known to be this machine
        loopback = loopback or ipaddress.ip_address(host).is_loopback
    if parts.scheme == "http" and not loopback:
        raise _bad(uri, "plain http is for servers on loopback; use mcp+https")
    return McpAddress(label, url=url, allow_dynamic=dynamic)


def _bad(uri: str, problem: str) -> BadRequest:
    masked_uri = re.sub(r"//[^/@#]*@", "//***@", uri)
    return BadRequest(f"{masked_uri!r} is no address of an MCP root: {problem}", code="mcp_root_invalid")


TIMEOUT_S: Final = 30.0
STREAM_S: Final = 300.0  # a server may hold a stream open without a word
MAX_PAGES: Final = 200
MAX_LISTED: Final = 10_000
MAX_ANSWER: Final = 64 * 1024 * 1024
"""Bytes of one HTTP answer: the largest file of a skill, as base64, has a third of them."""
CREDENTIALS: Final = "KDSKILLS_MCP_TOKEN_"
LOST: Final = frozenset((-32000, -32001, -32600, -32603))
"""Codes the SDK gives when a connection, a session or an HTTP request failed; a server's own answers have others."""


class ServerFailed(OperatorMustAct, code="mcp_server_failed"):
    """An MCP server does not answer, or answers what cannot be used."""


class SdkServer:
    """A server reached by its address. Safe from any thread; every question may raise ServerFailed.

    A question may take *timeout_s*, and connecting as long; the connection is closed after *idle_s* without one.
    """

    def __init__(self, address: McpAddress, *, timeout_s: float = TIMEOUT_S, idle_s: float = IDLE_S) -> None:
        self._address, self._timeout_s, self._idle_s = address, timeout_s, idle_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closing: weakref.finalize[..., Any] | None = None

    def entries(self) -> list[dict[str, Any]]:
        """Return all pages of `skills/list`."""

        async def pages(ask: Ask) -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = []
            params: dict[str, Any] = {}
            for _ in range(MAX_PAGES):
                answer = await ask("skills/list", params)
                page = answer.get("skills")
                if not isinstance(page, list) or not all(isinstance(row, dict) for row in page):
                    raise ServerFailed("the answer to skills/list has no list of skills")
                rows += page
                if len(rows) > MAX_LISTED:
                    raise ServerFailed(f"the server lists more than {MAX_LISTED} skills")
                cursor = answer.get("nextCursor")
                if not isinstance(cursor, str):
                    return rows
                params = {"cursor": cursor}
            raise ServerFailed(f"the server lists more than {MAX_PAGES} pages of skills")

        return self._run(pages)

    def entry(self, uri: str) -> dict[str, Any]:
        """Return one entry by `skills/get`."""

        async def get(ask: Ask) -> dict[str, Any]:
            row = (await ask("skills/get", {"uri": uri})).get("skill")
            if not isinstance(row, dict):
                raise ServerFailed("the answer to skills/get has no skill")
            return row

        return self._run(get)

    def read(self, uris: tuple[str, ...]) -> list[bytes]:
        """Return the bytes of files by `resources/read`, as the server gives them."""

        async def every(ask: Ask) -> list[bytes]:
            return [content_of(await ask("resources/read", {"uri": uri}), uri) for uri in uris]

        return self._run(every)

    def _run(self, question: Question[T]) -> T:
        first: Exception | None = None
        while True:
            answer, proven = self._ask(question)
            try:
                return answer.result()
            except Exception as error:  # noqa: BLE001 - raised again in one form, or asked once more
                if first is not None or not proven or isinstance(error, TimeoutError) or _is_answer(error):
                    raise _failed(self._address.label, error, self._timeout_s) from first
                first = error

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
        import httpx2
        import mcp_types as types
        from mcp.client import Client, advertise
        from mcp.client.stdio import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
        from pydantic import TypeAdapter
    except ModuleNotFoundError as error:
        raise MissingExtra("MCP roots need the mcp package: pip install 'kdskills[mcp]'", extra="mcp") from error
    extension = [advertise("io.modelcontextprotocol/skills")]
    if address.url is None:
        program = StdioServerParameters(command=address.command[0], args=list(address.command[1:]))
        client = await stack.enter_async_context(Client(program, extensions=extension, cache=None))
    else:
        token = os.environ.get(CREDENTIALS + address.label.upper().replace("-", "_"))
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        limits = httpx2.Timeout(TIMEOUT_S, read=STREAM_S)
        hooks = {"response": [_bound]}
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=limits, event_hooks=hooks))
        transport = streamable_http_client(address.url, http_client=http)
        client = await stack.enter_async_context(Client(transport, extensions=extension, cache=None))
    shape: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])

    async def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
        request = types.Request[dict[str, Any], str](method=method, params=params)
        return await client.session.send_request(request, shape)  # type: ignore[type-var]  # the SDK types only its own

    return ask


async def _bound(response: Any) -> None:
    """Let an HTTP answer fail where it is packed, or has more bytes than a sound one."""
    import httpx2

    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("the answer is packed, and nobody asked for that")
    whole = response.stream

    class BoundedAnswer(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in whole:
                size += len(piece)
                if size > MAX_ANSWER:
                    raise httpx2.ReadError(f"an answer has more than {MAX_ANSWER} bytes")
                yield piece

        async def aclose(self) -> None:
            await whole.aclose()

    response.stream = BoundedAnswer()


def content_of(answer: dict[str, Any], uri: str) -> bytes:
    """Return the bytes of the one content of *uri* in an answer to `resources/read`. Raises ServerFailed."""
    contents = answer.get("contents")
    rows = contents if isinstance(contents, list) else []
    matching = [row for row in rows if isinstance(row, dict) and row.get("uri") == uri]
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
    with suppress(ModuleNotFoundError):  # without the SDK nothing was ever connected
        from mcp.shared.exceptions import MCPError

        return isinstance(error, MCPError) and error.code not in LOST
    return False


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
