"""Standard streams, whatever state a shell or a service manager hands them over in."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TextIO


def steady_streams() -> None:
    """Let the three streams be there, and write what their encoding lacks as escapes, whatever the locale.

    A closed one reads as empty and writes to nowhere. Otherwise the next file to be opened would become the standard
    output, and what is printed would be written into it.
    """
    for number, mode, name in ((0, "r", "stdin"), (1, "w", "stdout"), (2, "w", "stderr")):
        if getattr(sys, name) is None:
            _fill(number)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fill(number: int) -> None:
    """Open the null device under a number that is free, also for programs that are started from here."""
    try:
        os.fstat(number)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)


def reader_left(stream: TextIO) -> bool:
    """Return whether nobody reads what is written to *stream* any more; what is no pipe or socket is always read."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stream of a test, or one that was closed
        return True
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def give_up(stream: TextIO) -> None:
    """Let what is still to be written to *stream* go nowhere, so that the end of the process does not fail by it."""
    try:
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):
        return
    try:
        os.dup2(null, number)
    finally:
        os.close(null)
