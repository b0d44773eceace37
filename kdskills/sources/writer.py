"""Writes a text while tokens leave it: the blank that goes with a removed token."""

from __future__ import annotations

import unicodedata

from kdskills.sources.tokens import grammar

_CLOSING = frozenset({"Pe", "Pf", "Po"})


class Writer:
    """Collects output and holds its last blank back, because the next token may take it along."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._blank = ""
        self._last = ""  # the last character before the held blank
        self.length = 0  # of all that was written, the held blank not counted

    def write(self, text: str) -> int:
        """Append *text*; return the offset it begins at."""
        if not text:
            return self.length + len(self._blank)
        if self._blank:
            self._append(self._blank)
        begins = self.length
        self._blank = text[-1] if is_blank(text[-1]) else ""
        self._append(text[: len(text) - len(self._blank)])
        return begins

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._last = text[-1]
            self.length += len(text)

    def remove(self, following: str) -> int:
        """Note that a token was removed; return how many of the following characters must be removed with it.

        Args:
            following: The character after the token, or `""` at the end of the text.
        """
        blank_next = is_blank(following)
        if self._blank and (blank_next or following in {"", "\n", "\r"} or is_punctuation(following)):
            self._blank = ""
            return 0
        begins_line = not self._blank and self._last in {"", "\n", "\r"}
        return 1 if blank_next and begins_line else 0

    def take(self, *, everything: bool) -> str:
        """Return what was written since the last call; the held blank only if *everything* is asked for."""
        if everything and self._blank:
            self._append(self._blank)
            self._blank = ""
        text = "".join(self._parts)
        self._parts.clear()
        return text


def is_blank(character: str) -> bool:
    """Say whether a character, or `""`, is a blank within a line."""
    return character == " " or (bool(character) and grammar().blank.match(character) is not None)


def is_punctuation(character: str) -> bool:
    """Say whether a character, or `""`, is punctuation that closes or separates."""
    return bool(character) and unicodedata.category(character) in _CLOSING
