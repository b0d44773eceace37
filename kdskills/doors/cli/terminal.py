"""The console of the command line."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

from rich.console import Console


class Terminal(Console):
    """A console that lets errors of its stream pass, so that every command ends in the same way."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what was caught, as the system raises it; rich would end the process here, whatever it is doing."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
