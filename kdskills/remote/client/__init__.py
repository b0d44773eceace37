"""The client of a Codex app-server: sessions, turns, signals and answers.

`transports` carry messages, `wire` tells them apart and matches replies to requests, `server` is what outlives a connection,
`threads` the state of each thread; `sessions` and `base` have the names a caller sees.
"""

from __future__ import annotations

from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.server import ClientOptions

__all__ = ["AsyncAppServerClient", "ClientOptions"]
