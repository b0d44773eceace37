"""The server's calls that wait for an answer; the client stores them, because the server has no list of them."""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from kdskills.remote.ports import JsonObject
from kdskills.remote.wire.framing import RawId

PendingState = Literal["pending", "responding", "resolved"]

MAX_RESOLVED = 4096
"""How many answered calls of a connection are remembered at least (twice as many at most), so that late answers get `not_found`."""


def new_epoch() -> str:
    """Return a name no other connection has: raw ids start at 0 again with every server."""
    return secrets.token_hex(6)


@dataclass(slots=True)
class PendingCall:
    """One tool call of the server.

    Attributes:
        handle: Connection epoch and raw id; the `request_id` of signals and rows.
        raw_id: The id as it goes back on the wire.
        params: The call's params.
        state: The state of its answer.
        claimed: Whether the client itself is answering the call, so that `rows` leaves it out.
    """

    handle: str
    raw_id: RawId
    params: JsonObject
    state: PendingState = field(default="pending")
    claimed: bool = False

    @property
    def thread_id(self) -> str:
        """The thread that asks."""
        return str(self.params.get("threadId") or "")

    @property
    def turn_id(self) -> str:
        """The turn that asks."""
        return str(self.params.get("turnId") or "")

    def row(self) -> JsonObject:
        """Return the row of `sessions.tool_calls`."""
        keys = ("tool", "arguments", "callId", "threadId", "turnId", "namespace")
        return {"requestId": self.handle, **{key: self.params.get(key) for key in keys}}


class PendingCalls:
    """The pending calls of one connection; safe to use from several threads.

    Args:
        epoch: The connection's name.
    """

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._calls: OrderedDict[str, PendingCall] = OrderedDict()
        self._lock = threading.Lock()

    def handle(self, raw_id: RawId) -> str:
        """Return the handle of a raw id; `0` and `"0"` have different ones."""
        return f"{self.epoch}:{json.dumps(raw_id)}"

    def add(self, raw_id: RawId, params: JsonObject) -> PendingCall | None:
        """Add a call; return None when its id was added before (a repeated delivery)."""
        with self._lock:
            handle = self.handle(raw_id)
            if handle in self._calls:
                return None
            call = self._calls[handle] = PendingCall(handle, raw_id, params)
            if len(self._calls) > 2 * MAX_RESOLVED:
                resolved = [old_handle for old_handle, old_call in self._calls.items() if old_call.state == "resolved"]
                for old in resolved[:-MAX_RESOLVED]:
                    del self._calls[old]
            return call

    def rows(self, session_id: str) -> list[JsonObject]:
        """Return the rows of a thread's pending calls that are not claimed, oldest first."""
        with self._lock:
            waiting = [call for call in self._calls.values() if call.state == "pending" and not call.claimed]
            return [call.row() for call in waiting if call.thread_id == session_id]

    def begin(self, handle: str) -> PendingCall | JsonObject:
        """Reserve a pending call for answering; return a report when it cannot be answered now."""
        with self._lock:
            call = self._calls.get(handle)
            if call is None or call.state == "resolved":
                return {"status": "not_found", "requestId": handle}
            if call.state == "responding":
                return {"status": "conflict", "code": "in_flight", "requestId": handle}
            call.state = "responding"
            return call

    def end(self, call: PendingCall, *, sent: bool) -> None:
        """End the answering that `begin` started: resolved when sent, else pending again."""
        with self._lock:
            call.state = "resolved" if sent else "pending"

    def expire(self, *, thread_id: str, turn_id: str | None = None) -> list[str]:
        """Resolve the calls of an ended turn, or of a deleted thread; returns their handles."""
        with self._lock:
            expired = [
                call
                for call in self._calls.values()
                if call.thread_id == thread_id and turn_id in (None, call.turn_id) and call.state != "resolved"
            ]
            for call in expired:
                call.state = "resolved"
            return [call.handle for call in expired]

    def expire_all(self) -> None:
        """Resolve all calls, because the connection ended and its ids are invalid."""
        with self._lock:
            for call in self._calls.values():
                call.state = "resolved"
