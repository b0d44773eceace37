"""What harnesses share: choices made of a fuzzer's bytes, always the same for the same bytes, and a folder for files."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Takes choices from the front of *data*; when it is used up, the first choice is taken."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, below: int) -> int:
        """Return a number from 0 to *below* - 1."""
        if below <= 1 or self._at >= len(self._data):
            return 0
        width = ((below - 1).bit_length() + 7) // 8
        found = int.from_bytes(self._data[self._at : self._at + width], "big")
        self._at += width
        return found % below

    def choice(self, options: Sequence[T]) -> T:
        """Return one of *options*."""
        return options[self.number(len(options))]

    def flag(self) -> bool:
        """Return true or false."""
        return bool(self.number(2))

    def text(self, most: int = 40) -> str:
        """Return a text that may hold anything Python's can, lone surrogates too."""
        length = self.number(most + 1)
        piece = self._data[self._at : self._at + length]
        self._at += length
        return piece.decode("utf-8", "surrogateescape")

    def rest(self) -> bytes:
        """Return what was not drawn."""
        piece = self._data[self._at :]
        self._at = len(self._data)
        return piece

    def pumped(self, size: int) -> bytes:
        """Return the rest, sometimes with a part of it repeated up to *size* bytes: what is slow then shows."""
        if self.number(64) != 1:
            return self.rest()
        start, length = self.number(256), 1 + self.number(32)
        data = self.rest()
        part = data[start : start + length]
        if not part or len(data) >= size:
            return data
        return data[:start] + part * ((size - len(data)) // len(part)) + data[start:]


def scratch() -> Path:
    """Return a new folder, in memory where that is possible, which goes when the process ends."""
    shared = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="kdskills-fuzz-", dir=shared if shared.is_dir() else None))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place
