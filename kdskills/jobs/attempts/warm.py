"""The worker's end of the launcher: a process that has the engines imported and forks a shim per order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kdskills.errors import ExecFailed

ANSWER_S: Final = 60.0
"""Seconds a launcher may take for an answer; its first one waits for every import."""
REAP_S: Final = 120.0
_LINE: Final = 65536


class WarmStarter:
    """Starts shims through one launcher process, made when it is first needed and again when it died.

    Any thread and any event loop may use it; orders go through one at a time, as a fork takes milliseconds.

    Args:
        command: Command line of the launcher.
        greeting: First line it reads: the settings, which may hold secrets and so are no arguments.
    """

    def __init__(self, command: Sequence[str], greeting: bytes) -> None:
        self._command = tuple(command)
        self._greeting = greeting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, folder: Path) -> None:
        """Start the shim of the attempt in *folder*. Raises ExecFailed."""
        await asyncio.to_thread(self._start, folder)

    async def reap(self, engine: str) -> None:
        """End what dead runners left on *engine*. Raises ExecFailed."""
        await asyncio.to_thread(self._reap, engine)

    def warm(self) -> None:
        """Start the launcher ahead of the first order."""
        with self._lock:
            self._launcher()

    def close(self) -> None:
        """Let the launcher go; shims stay."""
        with self._lock:
            self._end()

    def _start(self, folder: Path) -> None:
        order = {"start": str(folder)}
        with self._lock:
            answer = self._ask(order)
            if answer is None:  # it died: a second one is asked, and finds the order begun if the first got that far
                answer = self._ask(order)
        if answer is None or "error" in answer:
            cause = "it died" if answer is None else answer["error"]
            raise ExecFailed(f"the launcher could not start an attempt: {cause}", code="launcher_failed")

    def _ask(self, order: dict[str, str]) -> dict[str, object] | None:
        """Send an order and read the answer; None when the launcher is dead or mute, and gone by now."""
        process = self._launcher()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], ANSWER_S)[0]:
                line = process.stdout.readline(_LINE)
                if line:
                    answer = json.loads(line)
                    return answer if isinstance(answer, dict) else None
        except (OSError, ValueError):
            pass  # a launcher that went away, or is none
        self._end()
        return None

    def _launcher(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # found out by whoever asks it something
            process.stdin.write(self._greeting + b"\n")
            process.stdin.flush()
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _reap(self, engine: str) -> None:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [*self._command, "--reap", engine],
                input=self._greeting + b"\n",
                capture_output=True,
                timeout=REAP_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ExecFailed(f"reaping {engine} took longer than {time.monotonic() - began:.0f} s") from None
        if done.returncode:
            words = done.stderr.decode("utf-8", "replace").strip()[-500:]
            raise ExecFailed(f"reaping {engine} failed: {words}", code="reap_failed")
