"""Logs of running work as they come: read by offset, shown line by line."""

from __future__ import annotations

import base64
import codecs
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from kdskills.doors.cli.output import disarmed

if TYPE_CHECKING:
    from kdskills.app import Host

Stream = Literal["stdout", "stderr"]
Write = Callable[[bytes], None]

PIECE = 256 * 1024
LONGEST = 8192


async def follow(host: Host, task_id: str, stream: Stream, write: Write, *, until_over: bool, offset: int = 0) -> bool:
    """Write a task's output from *offset*; with *until_over* until the task is over, else what there is now.

    Returns:
        Whether bytes were missing, because only the last ones of a long output are kept.
    """
    lost = False
    while True:
        output = await host.call(
            "skills.task_logs",
            task_id=task_id,
            stream=stream,
            offset=offset,
            limit=PIECE,
            encoding="base64",
            follow=until_over,
        )
        piece = output.model_dump()
        lost = lost or bool(piece["truncated"])
        write(base64.b64decode(piece["data"]))
        offset = piece["next_offset"]
        if piece["ended"] or (not until_over and offset >= piece["total"]):
            return lost


class Raw:
    """Writes bytes to standard output: as they are into files and pipes, disarmed onto a terminal."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, data: bytes) -> None:
        """Write *data*."""
        if sys.stdout.isatty():
            sys.stdout.write(disarmed(self._decode.decode(data)))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()


class LineCutter:
    """Gives bytes on as whole lines of text; a line that does not end is cut.

    Args:
        show: Gets each line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._show = show
        self._rest = ""

    def __call__(self, data: bytes) -> None:
        """Take more bytes."""
        self._rest += self._decode.decode(data)
        *lines, self._rest = self._rest.split("\n")
        for text in lines:
            self._show(text)
        while len(self._rest) > LONGEST:
            self._show(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]

    def close(self) -> None:
        """Show what is left."""
        self._rest += self._decode.decode(b"", final=True)
        if self._rest:
            self._show(self._rest)
            self._rest = ""
