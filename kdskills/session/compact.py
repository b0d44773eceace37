"""A shorter view of a message list that keeps what must not be lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from kdskills.models import Message
from kdskills.skills.model import TokenCounter, estimate_tokens

KEEP_LAST: Final = 2
"""Assistant messages whose results stay whole, counted from the end."""


def compact(
    messages: Sequence[Message], pins: Collection[str], budget: int, *, count: TokenCounter = estimate_tokens
) -> tuple[Message, ...]:
    """Return *messages* within *budget* tokens where that can be had; the list itself never changes.

    Old results become one line naming tool, size and step, oldest first, until the rest fits. Messages with a pin in
    *pins* stay byte-equal, and so do user and assistant messages, so each call keeps its result.

    Args:
        messages: The append-only history.
        pins: `skill:<id>@<digest>` of what is active.
        budget: Tokens to fit into; what cannot be shortened may exceed it.
        count: Counts tokens of a text.
    """
    view = list(messages)
    tokens = sum(_size(message, count) for message in view)
    active_pins = set(pins)
    for position, step in _old_results(view):
        if tokens <= budget:
            break
        message = view[position]
        if message.pin is not None and active_pins & set(message.pin.split()):
            continue
        line = f"[result of {message.tool or 'tool'} at step {step} left out: {len(message.text)} characters]"
        shorter = replace(message, text=line, pin=None)
        saved = _size(message, count) - _size(shorter, count)
        if saved > 0:
            view[position] = shorter
            tokens -= saved
    return tuple(view)


def pins_of(receipts: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the pins of `(id, digest)` pairs of active skills."""
    return frozenset(f"skill:{name}@{digest}" for name, digest in receipts)


def _size(message: Message, count: TokenCounter) -> int:
    return count(message.text) + sum(count(call.arguments) for call in message.calls)


def _old_results(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return `(position, step)` of results that may be shortened: all but those of the last steps."""
    steps = [position for position, message in enumerate(messages) if message.role == "assistant" and message.calls]
    border = steps[-KEEP_LAST] if len(steps) >= KEEP_LAST else 0
    positions: list[tuple[int, int]] = []
    step = 0
    for position, message in enumerate(messages):
        if message.role == "assistant" and message.calls:
            step += 1
        elif message.role == "tool" and position < border:
            positions.append((position, step))
    return positions
