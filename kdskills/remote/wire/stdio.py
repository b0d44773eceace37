"""A child `codex app-server` in its own process group, spoken to over its pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence

from kdskills.remote.ports import AppServerGone
from kdskills.remote.wire.framing import LineBuffer, LineTooLong

STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_CHUNK = 1024 * 1024
_STDERR_KEPT = 64 * 1024


class StdioTransport:
    """The pipes of a child process.

    npm's `codex` is a node launcher around a native child, so stopping signals the whole group, and the end of the
    connection is the end of the pipe, not the end of the launcher.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines = LineBuffer()
        self._ready: deque[bytes] = deque()
        self._stderr: deque[bytes] = deque()
        self._stderr_size = 0
        self._send_lock = asyncio.Lock()
        self._closing = False
        self._reason = ""
        self._ended = asyncio.Event()
        self._drain = asyncio.get_running_loop().create_task(self._drain_stderr(), name="kdskills-app-server-stderr")
        self._stopped: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: str | os.PathLike[str] | None = None
    ) -> StdioTransport:
        """Start the command in a process group of its own.

        Raises:
            AppServerGone: It cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as problem:
            raise AppServerGone(f"{command[0]} cannot be started: {problem}", command=command[0]) from problem
        return cls(process)

    @property
    def pid(self) -> int:
        """The launcher's process id, which is also the group's."""
        return self._process.pid

    def stderr_tail(self) -> str:
        """Return the newest 64 KiB of the child's error stream."""
        return b"".join(self._stderr).decode("utf-8", "replace")

    async def send(self, payload: bytes) -> None:
        """Write one line; waits while the pipe is full.

        Raises:
            AppServerGone: The pipe is broken.
        """
        stdin = self._process.stdin
        assert stdin is not None
        async with self._send_lock:
            if self._closing or stdin.is_closing():
                raise AppServerGone(f"the app-server is gone ({self.why_closed()})")
            try:
                stdin.write(payload + b"\n")
                await stdin.drain()
            except (BrokenPipeError, ConnectionResetError, RuntimeError) as problem:
                raise AppServerGone(f"the app-server is gone ({self.why_closed()})") from problem

    async def receive(self) -> bytes | None:
        """Return the next line, or None at the end; half a line at the end is dropped."""
        stdout = self._process.stdout
        assert stdout is not None
        while not self._ready:
            if self._ended.is_set():
                return None
            try:
                chunk = await stdout.read(_CHUNK)
                self._ready.extend(self._lines.feed(chunk))
            except (LineTooLong, ConnectionResetError) as problem:
                self._reason, chunk = str(problem), b""
            if not chunk:
                self._reason = self._reason or (
                    f"it ended within a line of {self._lines.pending_bytes} bytes" if self._lines.pending_bytes else ""
                )
                self._ended.set()
        return self._ready.popleft()

    async def close(self) -> None:
        """Close stdin, wait up to 5 s for the end, then signal the group; a second call waits for the first."""
        if self._stopped is None:
            self._closing = True
            self._stopped = asyncio.get_running_loop().create_task(self._stop(), name="kdskills-app-server-stop")
        await asyncio.shield(self._stopped)

    def why_closed(self) -> str:
        """Say how the child ended, with the last line of its error stream."""
        code = self._process.returncode
        how = self._reason or ("it is still running" if code is None else f"it ended with {code}")
        last = self.stderr_tail().strip().rsplit("\n", 1)[-1][-300:]
        return f"{how}; stderr: {last}" if last else how

    async def _stop(self) -> None:
        process, stdin = self._process, self._process.stdin
        assert stdin is not None
        stdin.close()
        if not await self._gone_within(STOP_SECONDS):
            self._signal(signal.SIGTERM)
            await self._gone_within(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        # A program that left the group may keep the pipes open for ever, so this side is closed without waiting for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        self._drain.cancel()
        await asyncio.wait({self._drain})
        self._ended.set()
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()
        await asyncio.sleep(0)

    async def _gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
                # the launcher's end says nothing of its child: the group has to be empty
                while not self._ended.is_set() and self._signal(0):  # noqa: ASYNC110 - the kernel sends no event for an empty group
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            return False
        return True

    def _signal(self, number: int) -> bool:
        """Signal the process group; return False when it has no process any more."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    async def _drain_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while chunk := await stderr.read(_CHUNK):
            self._stderr.append(chunk[-_STDERR_KEPT:])
            self._stderr_size += len(self._stderr[-1])
            while self._stderr_size > _STDERR_KEPT and len(self._stderr) > 1:
                self._stderr_size -= len(self._stderr.popleft())
