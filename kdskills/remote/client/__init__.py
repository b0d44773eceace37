"""The client of a Codex app-server: `wire` is one connection, `server` what outlives it, `base` what a caller sees."""

from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.server import ClientOptions

__all__ = ["AsyncAppServerClient", "ClientOptions"]
