"""What the emulated app-server keeps in memory: connections, loaded threads, and the calls it waits for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdskills.testing.app_server_profiles import EmulatorProfile, JsonObject
from kdskills.testing.app_server_rollout import Files, Rollout, Turn

DEFAULT_UNLOAD_S = 1800.0


@dataclass(eq=False, slots=True)
class Connection:
    """One client."""

    send: Callable[[JsonObject], None]
    initialized: bool = False
    experimental: bool = False


@dataclass(eq=False, slots=True)
class Thread:
    """A loaded thread."""

    id: str
    cwd: str
    tools: list[JsonObject]
    rollout: Rollout
    paged: bool
    unload_s: float = DEFAULT_UNLOAD_S
    name: str | None = None
    history: list[JsonObject] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    context: dict[str, str] = field(default_factory=dict)
    skills_shown: str = ""
    subscribers: list[Connection] = field(default_factory=list)
    pending: dict[int, JsonObject] = field(default_factory=dict)
    steered: list[list[JsonObject]] = field(default_factory=list)
    turn: Turn | None = None
    task: asyncio.Task[None] | None = None
    failed: bool = False

    @property
    def status(self) -> JsonObject:
        """The thread's status, as the wire has it."""
        if self.turn is not None:
            return {"type": "active", "activeFlags": []}
        return {"type": "systemError" if self.failed else "idle"}

    def remember(self, item: JsonObject) -> None:
        """Add an item to what the model reads."""
        self.history.append(item)
        self.rollout.add("response_item", item)

    def mark(self, kind: str, **payload: Any) -> None:
        """Add an event to the file."""
        self.rollout.add("event_msg", {"type": kind, **payload})


class World:
    """One emulated server: its files, its loaded threads, its connections.

    Args:
        home: Its `CODEX_HOME`.
        profile: The version.
        config: Its settings, from `config.toml` and the command line.
    """

    def __init__(self, home: Path, profile: EmulatorProfile, config: JsonObject) -> None:
        self.profile = profile
        self.config = config
        self.files = Files(home, profile)
        self.threads: dict[str, Thread] = {}
        self.connections: list[Connection] = []
        self.extra_roots: list[str] = []
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}
        self._ids = itertools.count()
        self._closing: set[asyncio.TimerHandle] = set()

    def broadcast(self, method: str, params: JsonObject) -> None:
        """Tell every connection."""
        self._tell(self.connections, method, params)

    def notify(self, thread: Thread, method: str, **params: Any) -> None:
        """Tell those subscribed to a thread."""
        self._tell(thread.subscribers, method, {"threadId": thread.id, **params})

    def _tell(self, connections: Iterable[Connection], method: str, params: JsonObject) -> None:
        for connection in list(connections):
            connection.send({"method": method, "params": params})

    def status_changed(self, thread: Thread, status: JsonObject | None = None) -> None:
        """Tell every connection the status of a thread."""
        self.broadcast("thread/status/changed", {"threadId": thread.id, "status": status or thread.status})

    async def ask(self, thread: Thread, method: str, params: JsonObject) -> JsonObject:
        """Send a request to every subscriber of a thread, and to those who come while it waits; the first answer counts."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        thread.pending[number] = message
        answer: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        for connection in list(thread.subscribers):
            connection.send(message)
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)
            thread.pending.pop(number, None)

    def answered(self, message: JsonObject) -> None:
        """Take an answer; one to an unknown id, or to an id of another type, is ignored."""
        number = message.get("id")
        if type(number) is int and number in self._waiting and not self._waiting[number].done():
            self._waiting[number].set_result(message)

    def subscribe(self, thread: Thread, connection: Connection) -> None:
        """Subscribe; calls the thread waits for are sent to a connection that comes back, under their old ids."""
        if connection not in thread.subscribers:
            thread.subscribers.append(connection)
        for message in thread.pending.values():
            connection.send(message)

    def left(self, thread: Thread) -> None:
        """See whether a thread nobody listens to is to be unloaded, once its delay passed."""
        if thread.subscribers or thread.turn is not None:
            return
        self._closing.add(asyncio.get_running_loop().call_later(thread.unload_s, self._unload_idle, thread))

    def _unload_idle(self, thread: Thread) -> None:
        if not thread.subscribers and thread.turn is None and self.threads.get(thread.id) is thread:
            self.unload(thread)
            self.broadcast("thread/closed", {"threadId": thread.id})

    def unload(self, thread: Thread) -> None:
        """Take a thread out of memory."""
        del self.threads[thread.id]
        thread.subscribers.clear()
        self.status_changed(thread, {"type": "notLoaded"})

    def disconnected(self, connection: Connection) -> None:
        """A connection ended: it is subscribed to nothing any more."""
        self.connections.remove(connection)
        for thread in list(self.threads.values()):
            if connection in thread.subscribers:
                thread.subscribers.remove(connection)
                self.left(thread)
