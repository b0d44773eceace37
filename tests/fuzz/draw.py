"""Turns the bytes of a fuzzer into choices; the same bytes always make the same choices."""

from __future__ import annotations

from collections.abc import Sequence
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
