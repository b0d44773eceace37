"""Beside a service: says when it is ready, and carries connections into its sandbox.

Started as a script by the runner: the standard library and RE2 only, one thread, ends with its standard input or its parent.
It listens on 127.0.0.1 first and then enters the sandbox's network: a socket belongs to the network it was made in, so
what it accepts comes from the host and what it opens leads into the sandbox. No path on disk, nothing to race for.

Standard input, one line of JSON: `{"network": FD or null, "ports": {"PORT": HOST_PORT}, "exact": bool, "ready": {...},
"logs": [PATH, PATH]}`; `ready` is `{}`, `{"pattern": RE}`, `{"tcp_port": N}` or `{"port": N, "path": P}`.
Standard output, lines of JSON: `{"ports": {"PORT": HOST_PORT}}`, later `{"ready": true}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import re2

CHUNK: Final = 65536
MAX_LINE: Final = 65536
LOOK_S: Final = 0.05
ASK_S: Final = 5.0
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_NS_GET_USERNS: Final = 0xB701
_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Do what the first line of standard input says."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    order = json.loads(sys.stdin.buffer.readline())
    listeners = {
        int(port): _listen(int(host_port), exact=bool(order["exact"])) for port, host_port in order["ports"].items()
    }
    if order["network"] is not None:
        enter(int(order["network"]))
    _say({"ports": {str(port): listener.getsockname()[1] for port, listener in listeners.items()}})
    asyncio.run(_serve(listeners, order["ready"], [Path(path) for path in order["logs"]]))
    return 0


def enter(network: int) -> None:
    """Enter the network namespace open as *network*; who is not root enters the user namespace that owns it first."""
    if os.geteuid() != 0:
        import fcntl

        owner = fcntl.ioctl(network, _NS_GET_USERNS)
        _setns(owner, _CLONE_NEWUSER)
        os.close(owner)
    _setns(network, _CLONE_NEWNET)
    os.close(network)


def line_pattern(pattern: str) -> Any:
    """Return a pattern whose search takes time that grows with the line, whatever pattern and line are.

    Raises ValueError for what is none, or holds what such patterns have not: look-around or references back.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        words = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(words) from None


class LineFinder:
    """Finds a line that matches, in bytes that come in pieces; a line counts as far as its first 64 KiB."""

    def __init__(self, pattern: str) -> None:
        self._pattern = line_pattern(pattern)
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> bool:
        """Take bytes that came; whether a line of them matches. An unfinished line counts as it stands."""
        lines = (self._rest + data).split(b"\n")
        if self._skipping and len(lines) > 1:
            lines, self._skipping = lines[1:], False
        self._rest = b"" if self._skipping else lines[-1]
        matched = not self._skipping and any(
            self._pattern.search(line[:MAX_LINE].decode("utf-8", "replace")) for line in lines
        )
        if len(self._rest) > MAX_LINE:
            self._rest, self._skipping = b"", True
        return matched


def _listen(host_port: int, *, exact: bool) -> socket.socket:
    """Listen on 127.0.0.1, at the wanted port when it is free."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", host_port))
    except OSError:
        if exact:
            raise
        listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


async def _serve(listeners: dict[int, socket.socket], ready: dict[str, Any], logs: list[Path]) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)  # nothing more is ever written there: it is readable at its end
    servers = [
        await asyncio.start_server(partial(_carry, port), sock=listener, limit=CHUNK)
        for port, listener in listeners.items()
    ]
    ended = asyncio.ensure_future(over.wait())
    looking = asyncio.ensure_future(_tell_ready(ready, logs))
    await asyncio.wait({ended, looking}, return_when=asyncio.FIRST_COMPLETED)
    if looking.done():
        looking.result()  # what cannot be looked for ends us, which the runner sees
        await ended
    loop.remove_reader(sys.stdin.fileno())
    looking.cancel()
    for server in servers:
        server.close()


async def _tell_ready(ready: dict[str, Any], logs: list[Path]) -> None:
    if "pattern" in ready:
        await _pattern(str(ready["pattern"]), logs)
    while ready and "pattern" not in ready:
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError, asyncio.LimitOverrunError):
            if "tcp_port" in ready:
                _, writer = await _connect(int(ready["tcp_port"]))
                writer.close()
                break
            if await asyncio.wait_for(_status(int(ready["port"]), str(ready["path"])), ASK_S) < 500:
                break
        await asyncio.sleep(LOOK_S)
    _say({"ready": True})


async def _pattern(pattern: str, logs: list[Path]) -> None:
    finders = {path: (LineFinder(pattern), 0) for path in logs}
    while True:
        for path, (finder, offset) in finders.items():
            data = _piece(path, offset)
            finders[path] = (finder, offset + len(data))
            if data and finder.feed(data):
                return
        if not any(_piece(path, offset) for path, (_, offset) in finders.items()):
            await asyncio.sleep(LOOK_S)


def _piece(path: Path, offset: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, 16 * CHUNK, offset)
    finally:
        os.close(fd)


async def _status(port: int, path: str) -> int:
    reader, writer = await _connect(port)
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        words = (await reader.readline()).split()
        if not words or not words[0].startswith(b"HTTP/"):
            raise ValueError("no HTTP answer")
        return int(words[1])


async def _carry(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        sandbox_reader, sandbox_writer = await _connect(port)
    except OSError:
        writer.transport.abort()
        return
    async with asyncio.TaskGroup() as copies:
        copies.create_task(copy_bytes(reader, sandbox_writer, writer))
        copies.create_task(copy_bytes(sandbox_reader, writer, sandbox_writer))
    for end in (writer, sandbox_writer):
        end.close()


async def copy_bytes(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, return_sink: asyncio.StreamWriter
) -> None:
    """Carry bytes one way until their end, which is passed on; when a side breaks, both do."""
    try:
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
        else:  # TLS knows no half of an end
            sink.close()
    except OSError:
        sink.transport.abort()
        return_sink.transport.abort()


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection("127.0.0.1", port, limit=CHUNK)
    except OSError:
        return await asyncio.open_connection("::1", port, limit=CHUNK)


def _setns(fd: int, kind: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, kind):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the sandbox's network: {os.strerror(number)}")


def _say(facts: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(facts).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
