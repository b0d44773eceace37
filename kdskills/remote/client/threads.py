"""The state of threads and turns, as the notifications of a connection report it; no I/O."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdskills.remote.ports import JsonObject

MAX_TURNS = 512
"""Turns remembered per thread; older ones are requested from the server."""

ENDED = frozenset({"completed", "failed", "interrupted"})


@dataclass(slots=True)
class WatchedTurn:
    """One turn, as this connection watched it.

    Attributes:
        id: The turn.
        status: `inProgress`, then `completed`, `failed` or `interrupted`.
        error: The server's own words for a failed one.
        messages: Its messages so far, oldest first.
    """

    id: str
    status: str = "inProgress"
    error: Any = None
    messages: list[JsonObject] = field(default_factory=list)

    def transcript(self) -> list[JsonObject]:
        """Return its messages as transcript entries."""
        status = "complete" if self.status == "completed" else self.status
        return [{"turnId": self.id, "role": m["role"], "status": status, "text": m["text"]} for m in self.messages]


@dataclass(slots=True)
class WatchedThread:
    """One thread, as this connection watched it.

    Attributes:
        id: The thread.
        subscribed: Whether this connection receives its notifications.
        active_turn: The turn that runs now.
        turns: The watched turns, oldest first.
        path: Its rollout file, once known.
        info: The server's newest description.
        closings: How often it was closed (unloaded).
        compactions: How often its history was compacted.
        ended_turns: How many turns ended.
    """

    id: str
    subscribed: bool = False
    active_turn: str | None = None
    turns: OrderedDict[str, WatchedTurn] = field(default_factory=OrderedDict)
    path: str | None = None
    info: JsonObject = field(default_factory=dict)
    closings: int = 0
    compactions: int = 0
    ended_turns: int = 0

    def turn(self, turn_id: str) -> WatchedTurn:
        """Return a turn's record, creating it where needed."""
        if turn_id not in self.turns:
            self.turns[turn_id] = WatchedTurn(turn_id)
            while len(self.turns) > MAX_TURNS:
                self.turns.popitem(last=False)
        return self.turns[turn_id]


class WatchedThreads:
    """The threads of a client, and the tasks that wait for changes of them. Used on one event loop only."""

    def __init__(self) -> None:
        self._threads: dict[str, WatchedThread] = {}
        self._to_resume: dict[str, None] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def get(self, thread_id: str) -> WatchedThread:
        """Return a thread's record, creating it where needed."""
        return self._threads.setdefault(thread_id, WatchedThread(thread_id))

    def drop(self, thread_id: str) -> None:
        """Forget a deleted thread."""
        self._threads.pop(thread_id, None)
        self._to_resume.pop(thread_id, None)
        self.changed()

    def all(self) -> list[WatchedThread]:
        """Return every known thread."""
        return list(self._threads.values())

    def learn(self, info: JsonObject, *, subscribed: bool | None = None) -> WatchedThread:
        """Update a thread from the server's description (`thread` of an answer)."""
        thread = self.get(str(info.get("id")))
        thread.info = {key: value for key, value in info.items() if key != "turns"}
        thread.path = info.get("path") or thread.path
        if subscribed is not None:
            thread.subscribed = subscribed
        self._status(thread, info.get("status"))
        self.changed()
        return thread

    def connection_lost(self) -> None:
        """Record that no notification will arrive any more; the state of running turns is unknown from now on."""
        for thread in self._threads.values():
            if thread.subscribed:
                self._to_resume[thread.id] = None
            thread.subscribed, thread.active_turn = False, None
            for turn_id in [turn.id for turn in thread.turns.values() if turn.status not in ENDED]:
                del thread.turns[turn_id]
        self.changed()

    def to_resume(self) -> list[str]:
        """Return the threads that were subscribed when a connection was lost and were not resumed since."""
        return list(self._to_resume)

    def resumed(self, thread_id: str) -> None:
        """Record that a thread was resumed, or cannot be."""
        self._to_resume.pop(thread_id, None)

    def note(self, method: str, params: JsonObject) -> None:
        """Update the state from a notification."""
        thread_id = params.get("threadId")
        if not isinstance(thread_id, str):
            return
        thread = self.get(thread_id)
        match method:
            case "turn/started":
                self._started(thread, params.get("turn"))
            case "turn/completed":
                self._completed(thread, params.get("turn"))
            case "item/completed":
                self._item(thread, params)
            case "thread/status/changed":
                self._status(thread, params.get("status"))
            case "thread/closed":
                thread.closings += 1
                thread.subscribed, thread.active_turn = False, None
            case "thread/compacted":
                thread.compactions += 1
            case _:
                return
        self.changed()

    def begin_turn(self, thread_id: str, turn: JsonObject) -> WatchedTurn:
        """Record the answer of `turn/start`; the turn may have ended before the answer was read."""
        thread = self.get(thread_id)
        record = thread.turn(str(turn.get("id")))
        if record.status not in ENDED:
            thread.active_turn = record.id
        self.changed()
        return record

    def changed(self) -> None:
        """Wake all tasks that wait for a change."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition is true; return False on a timeout."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        while not condition():
            seconds_left = None if end is None else end - loop.time()
            if seconds_left is not None and seconds_left <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=seconds_left)
            finally:
                self._waiters.discard(waiter)
        return True

    def _started(self, thread: WatchedThread, turn: Any) -> None:
        if isinstance(turn, dict) and isinstance(turn.get("id"), str) and thread.turn(turn["id"]).status not in ENDED:
            thread.active_turn = turn["id"]

    def _completed(self, thread: WatchedThread, turn: Any) -> None:
        if not isinstance(turn, dict) or not isinstance(turn.get("id"), str):
            return
        record = thread.turn(turn["id"])
        status = turn.get("status")
        record.status = status if status in ENDED else "completed"
        record.error = turn.get("error")
        thread.ended_turns += 1
        if thread.active_turn in (record.id, None):
            thread.active_turn = None

    def _item(self, thread: WatchedThread, params: JsonObject) -> None:
        item, turn_id = params.get("item"), params.get("turnId")
        if isinstance(turn_id, str) and isinstance(item, dict) and (message := item_message(item)) is not None:
            thread.turn(turn_id).messages.append(message)
        if isinstance(item, dict) and item.get("type") == "contextCompaction":
            thread.compactions += 1

    def _status(self, thread: WatchedThread, status: Any) -> None:
        kind = status.get("type") if isinstance(status, dict) else None
        if kind in ("idle", "notLoaded", "systemError"):
            thread.active_turn = None
        if kind == "notLoaded":
            thread.subscribed = False


def item_message(item: JsonObject) -> JsonObject | None:
    """Return `role` and `text` of an item that is a message, else None."""
    if item.get("type") == "agentMessage":
        return {"role": "assistant", "text": str(item.get("text") or "")}
    if item.get("type") == "userMessage":
        content = item.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        return {"role": "user", "text": "\n".join(str(p.get("text") or "") for p in parts if p.get("type") == "text")}
    return None


def turn_record(turn: JsonObject) -> WatchedTurn:
    """Return a turn as the server lists it."""
    record = WatchedTurn(str(turn.get("id")), str(turn.get("status") or "inProgress"), turn.get("error"))
    items = turn.get("items")
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and (message := item_message(item)) is not None:
            record.messages.append(message)
    return record
