"""Bytes a program printed, as text for people and models: no character is ever split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_LONGEST: Final = 4


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of output as text.

    Attributes:
        text: The characters; bytes that are no UTF-8 are U+FFFD.
        skipped: Bytes left out at the front: the rest of a character that began before.
        incomplete: Bytes left out at the end: the beginning of a character that is not there yet.
    """

    text: str
    skipped: int = 0
    incomplete: int = 0


def text_of(data: bytes, *, cut_before: bool, more_after: bool) -> Text:
    """Return *data* as text.

    Args:
        data: Bytes of the output.
        cut_before: Whether there are bytes before them, so that they may begin within a character.
        more_after: Whether bytes may follow, so that a character at the end may be incomplete.
    """
    skipped = _rest_of_character(data) if cut_before else 0
    incomplete = _begun_character(data[skipped:]) if more_after else 0
    complete = data[skipped : len(data) - incomplete]
    return Text(complete.decode("utf-8", "replace"), skipped, incomplete)


def _rest_of_character(data: bytes) -> int:
    """Return how many bytes at the front continue a character; four or more in a row are no UTF-8 and stay."""
    count = 0
    while count < min(_LONGEST, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count if count < _LONGEST else 0


def _begun_character(data: bytes) -> int:
    """Return how many bytes at the end begin a character that needs more of them."""
    for back in range(1, min(_LONGEST, len(data) + 1)):
        lead = data[-back]
        if lead & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= lead <= 0xDF else 3 if 0xE0 <= lead <= 0xEF else 4 if 0xF0 <= lead <= 0xF4 else 1
        return back if needed > back else 0
    return 0
