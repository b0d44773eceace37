"""A shell behind the wall on a terminal of its own: what the person types goes in, what the sandbox writes comes out.

The sandbox gets a pseudo-terminal that was made for it, never the person's own, so that nothing inside can type into the
session kdskills was started from.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kdskills.execution.protocol import Executor, Handle, ProbeReport, ReapReport
    from kdskills.execution.request import ExecRequest, ExecResult

SHELL_S: Final = 8 * 3600.0
"""Seconds a shell may last."""
_CHUNK: Final = 64 * 1024
_TAKE_TERMINAL: Final = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
_SHELL: Final = ("python3", "-I", "-c", _TAKE_TERMINAL, "bash", "--noprofile", "--norc", "-i")


class TerminalEngine:
    """An `Executor` that opens a shell wherever a program is to run: the same request, with bash in its place.

    *screen* are descriptors of the person's terminal, to read from and to write to. An engine without
    terminals refuses (`terminal_not_supported`).
    """

    def __init__(self, engine: Executor, screen: tuple[int, int]) -> None:
        self._engine, self._screen = engine, screen
        self.name, self.level = engine.name, engine.level

    async def probe(self) -> ProbeReport:
        """Probe the engine."""
        return await self._engine.probe()

    async def reap(self) -> ReapReport:
        """End what dead owners left."""
        return await self._engine.reap()

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run the shell until the person leaves it. Raises as the engine."""
        with ExitStack() as stack:
            master, slave = pty.openpty()
            stack.callback(os.close, master)
            with suppress(OSError):
                _copy_size(self._screen[1], master)
            try:
                handle = await self._engine.start(_shell_request(request, slave))
            finally:
                os.close(slave)
            stack.enter_context(_resized(self._screen[1], master))
            stack.enter_context(_raw(self._screen[0]))
            stack.enter_context(_relay(self._screen, master))
            try:
                return await handle.wait()
            except asyncio.CancelledError:
                await asyncio.shield(handle.cancel())
                raise

    async def start(self, request: ExecRequest) -> Handle:
        """Start the program itself."""
        return await self._engine.start(request)


def _shell_request(request: ExecRequest, terminal: int) -> ExecRequest:
    """Return *request* with a shell on *terminal* in place of its program, and more time."""
    limits = replace(request.limits, wall_s=SHELL_S)
    return replace(
        request, argv=_SHELL, script=None, interpreter=None, terminal=terminal, limits=limits, background=True
    )


def _copy_size(source: int, target: int) -> None:
    fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))


@contextmanager
def _resized(screen: int, master: int) -> Iterator[None]:
    """Tell the sandbox when the person's window changes."""

    def resize(_number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):
            _copy_size(screen, master)

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


@contextmanager
def _raw(screen: int) -> Iterator[None]:
    """Hand every key on as it is, and leave the person's terminal as it was; what nobody read is not for the next program."""
    before = termios.tcgetattr(screen)
    tty.setraw(screen)
    try:
        yield
    finally:
        termios.tcsetattr(screen, termios.TCSAFLUSH, before)


@contextmanager
def _relay(screen: tuple[int, int], master: int) -> Iterator[None]:
    """Carry bytes both ways in a thread; at the end what the sandbox wrote last is still shown."""
    waking, wake = os.pipe2(os.O_CLOEXEC)

    def carry() -> None:
        sources = {screen[0]: master, master: screen[1], waking: -1}
        while master in sources:
            ready = select.select([*sources], [], [])[0]
            for source in ready if ready != [waking] else ():
                if source == waking:
                    continue
                try:
                    ended = not (data := os.read(source, _CHUNK))
                    while data:
                        data = data[os.write(sources[source], data) :]
                except OSError:  # the last program of the sandbox, or the person, has left its terminal
                    ended = True
                if ended:
                    del sources[source]
            if ready == [waking]:
                return

    thread = threading.Thread(target=carry, name="kdskills-terminal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(wake, b"x")
        thread.join()
        os.close(waking)
        os.close(wake)
