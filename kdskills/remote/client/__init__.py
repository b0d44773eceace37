"""The client of a Codex app-server: sessions, turns, signals and answers.

`link` is one connection with its pending calls, `server` what outlives a connection, `threads` what is known of each thread;
`sessions`, `calls`, `waits` and `stream` are the names a caller sees; `base` puts them together, `blocking` serves callers
without an event loop.
"""

from __future__ import annotations

from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.options import ClientOptions

__all__ = ["AsyncAppServerClient", "ClientOptions"]
