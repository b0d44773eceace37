"""The client of a Codex app-server.

`wire` carries messages, tells them apart and matches replies to requests, `server` is what outlives a connection, with the state of
each thread; `base` has the names a caller sees: sessions, turns, signals and answers.
"""

from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.server import ClientOptions

__all__ = ["AsyncAppServerClient", "ClientOptions"]
