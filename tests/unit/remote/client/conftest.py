"""An app-server in memory for tests of the client: it answers as it is told, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kdskills.remote.catalog.backend import MemoryCatalogStore
from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.server import AppServer, ClientOptions
from kdskills.remote.ports import AppServerGone

THREAD = "thread-1"


class MemoryServer:
    """The far side: `answers` maps methods to results, errors (exceptions), or functions of the params."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.heard: list[dict[str, Any]] = []
        self.connections = 0
        self.answers: dict[str, Any] = {
            "initialize": {"userAgent": "kdskills/0.169.0 (test)", "codexHome": "/nowhere"},
            "thread/start": lambda params: {"thread": self.thread()},
            "thread/resume": lambda params: {"thread": self.thread(params["threadId"])},
            "thread/read": lambda params: {"thread": self.thread(params["threadId"])},
            "thread/turns/list": {"data": [], "nextCursor": None},
            "thread/queue/list": {"data": []},
            "turn/start": {"turn": {"id": "turn-1", "status": "inProgress"}},
            "thread/unsubscribe": {"status": "unsubscribed"},
        }
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()

    def thread(self, thread_id: str = THREAD, **more: Any) -> dict[str, Any]:
        """Describe a thread."""
        return {"id": thread_id, "path": None, "ephemeral": False, "status": {"type": "idle"}, "preview": "", **more}

    async def connect(self) -> MemoryServer:
        """Be a transport for one more connection."""
        self.connections += 1
        self._incoming = asyncio.Queue()
        return self

    async def send(self, payload: bytes) -> None:
        """Take a message; requests are answered at once."""
        message = json.loads(payload)
        if "method" not in message or "id" not in message:
            self.heard.append(message)
            return
        self.asked.append((message["method"], message.get("params") or {}))
        answer = self.answers.get(message["method"], KeyError(message["method"]))
        if callable(answer) and not isinstance(answer, Exception):
            answer = answer(message.get("params") or {})
        if answer is None:
            return
        if isinstance(answer, KeyError):
            error = {"code": -32600, "message": f"Invalid request: unknown variant `{answer.args[0]}`"}
            self.say({"id": message["id"], "error": error})
        elif isinstance(answer, Exception):
            self.say({"id": message["id"], "error": {"code": -32600, "message": str(answer)}})
        else:
            self.say({"id": message["id"], "result": answer})

    async def receive(self) -> bytes | None:
        """Hand on what was said."""
        return await self._incoming.get()

    async def close(self) -> None:
        """End the connection."""
        self._incoming.put_nowait(None)

    def why_closed(self) -> str:
        """Say why."""
        return "the test ended it"

    def say(self, *messages: dict[str, Any]) -> None:
        """Say something to the client."""
        for message in messages:
            self._incoming.put_nowait(json.dumps(message).encode())

    def note(self, method: str, **params: Any) -> None:
        """Send a notification about the thread."""
        self.say({"method": method, "params": {"threadId": THREAD, **params}})

    def call(self, raw_id: int | str = 0, **params: Any) -> None:
        """Ask for a tool call."""
        known = {"threadId": THREAD, "turnId": "turn-1", "callId": "c", "namespace": None, "tool": "x", "arguments": {}}
        self.say({"id": raw_id, "method": "item/tool/call", "params": {**known, **params}})

    def methods(self) -> list[str]:
        """Return what was asked, without the hello."""
        return [method for method, _ in self.asked if method != "initialize"]

    def params(self, method: str) -> dict[str, Any]:
        """Return the params of the newest request of a method."""
        return next(params for name, params in reversed(self.asked) if name == method)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something to become true."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - what is watched are plain lists
                await asyncio.sleep(0.001)


@pytest.fixture
def far() -> MemoryServer:
    """Return the server's side."""
    return MemoryServer()


@pytest.fixture
def nobody() -> Callable[[], Any]:
    """Return a connector that finds nobody."""

    async def connect() -> Any:
        raise AppServerGone("nobody is there")

    return connect


@pytest.fixture
async def open_client(far: MemoryServer) -> Any:
    """Return how to open a client on the server; all are closed afterwards."""
    opened: list[AsyncAppServerClient] = []

    async def open_one(*, local: bool = True, owned: bool = True, **opts: Any) -> AsyncAppServerClient:
        options = ClientOptions(**opts)
        server = AppServer(far.connect, options, local=local, owned=owned)
        client = AsyncAppServerClient(server, options, MemoryCatalogStore())
        await server.open()
        opened.append(client)
        return client

    yield open_one
    for client in opened:
        await client.close()
