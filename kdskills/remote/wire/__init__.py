"""How messages reach a Codex app-server and come back.

`framing` tells messages apart, `stdio` and `websocket` carry them, `peer` matches answers to requests, `pending` keeps the
server's own requests until they are answered. Nothing here knows what a thread or a tool is.
"""

from __future__ import annotations

from kdskills.remote.wire.peer import Peer, Transport
from kdskills.remote.wire.pending import PendingCall, PendingCalls

__all__ = ["Peer", "PendingCall", "PendingCalls", "Transport"]
