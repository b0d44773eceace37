"""Cutting a long tool result to the room there is, and saying so in its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from kdskills.models.redact import parse_object

LEAST = 80
"""Characters of a cut text that are kept at least."""


def shorten(text: str, room: int) -> str:
    """Return *text* in about *room* characters.

    A JSON object stays one: its longest texts are cut, all to the same length, and the rest is left alone. Any other
    text is cut in the middle.
    """
    if len(text) <= room:
        return text
    value = parse_object(text)
    if value is None:
        return cut_middle(text, room)
    lengths = sorted(len(json.dumps(leaf, ensure_ascii=False)) for leaf in _texts(value))
    frame = len(text) - sum(lengths)
    most = _share(lengths, room - frame)
    if most < LEAST:
        return cut_middle(text, room)
    return json.dumps(_mapped(value, lambda leaf: cut_middle(leaf, most)), ensure_ascii=False)


def cut_middle(text: str, room: int) -> str:
    """Return *text* with its middle left out when it is longer than *room*: one third of the head stays, two of the tail."""
    if len(text) <= room:
        return text
    head, tail = text[: room // 3], text[len(text) - room * 2 // 3 :]
    return f"{head}\n[… {len(text) - len(head) - len(tail)} characters left out …]\n{tail}"


def _share(lengths: list[int], room: int) -> int:
    """Return the length to which the longest must come down for all together to fit *room*."""
    room_left = room
    for index, length in enumerate(lengths):
        share = room_left // (len(lengths) - index)
        if length > share:
            return share
        room_left -= length
    return lengths[-1] if lengths else 0


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _texts(member)
    elif isinstance(value, list):
        for member in value:
            yield from _texts(member)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(member, change) for key, member in value.items()}
    return [_mapped(member, change) for member in value] if isinstance(value, list) else value
