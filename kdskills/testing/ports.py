"""Ports of loopback for servers of tests."""

from __future__ import annotations

import contextlib
import secrets
import socket


def unused_port() -> int:
    """Return a port of loopback nobody listens on, which stays free while its server is away.

    The kernel hands out ports from 32768 on to whoever connects somewhere, so one of those may be taken before a server
    binds it, or between two starts of one server.

    Raises:
        OSError: None is free.
    """
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of loopback is free")
