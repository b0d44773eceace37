"""The life of a call as a table; both journals read their rules here.

::

    (new) -claim-> claimed -start-> running -answer-> done
                   claimed -answer-> done            refused before it ran: unknown skill, bad arguments
                   claimed -deadline-> overdue       still in the queue
                   claimed -take-> claimed           its owner is dead; nothing ran
                                    running -deadline-> overdue
                                    running -rerun-> claimed    its owner is dead, the skill is idempotent
                                    running -lose-> unknown     its owner is dead, it is not

What is answered stays answered: an answer after `overdue` or `unknown` moves nothing and is kept as the late one.
"""

from __future__ import annotations

from typing import Final, Literal

from kdskills.remote.ports import CallState, JournalRow

Event = Literal["claim", "start", "answer", "deadline", "take", "rerun", "lose"]

MOVES: Final[dict[tuple[CallState | None, Event], CallState]] = {
    (None, "claim"): "claimed",
    ("claimed", "start"): "running",
    ("claimed", "answer"): "done",
    ("claimed", "deadline"): "overdue",
    ("claimed", "take"): "claimed",
    ("running", "answer"): "done",
    ("running", "deadline"): "overdue",
    ("running", "rerun"): "claimed",
    ("running", "lose"): "unknown",
}

ANSWERED: Final[frozenset[CallState]] = frozenset({"done", "overdue", "unknown"})
"""States whose rows hold the answer that was, or will be, given."""

KEEPS_LATE: Final[frozenset[CallState]] = frozenset({"overdue", "unknown"})
"""States in which another answer is kept as the late one."""

NEEDS_DEAD_OWNER: Final[frozenset[Event]] = frozenset({"take", "rerun"})
"""Moves allowed only when the owner's lease has run out."""


def after(state: CallState | None, event: Event) -> CallState | None:
    """Return the state *event* leads to, or None when it changes nothing there."""
    return MOVES.get((state, event))


def sources(event: Event) -> tuple[CallState, ...]:
    """Return the states *event* may move, sorted."""
    return tuple(sorted(state for state, name in MOVES if name == event and state is not None))


def takeover(row: JournalRow, *, idempotent: bool) -> Event | None:
    """Return how a row of another owner may be claimed, or None while it may not.

    Args:
        row: The row as it was read.
        idempotent: Whether the skill of the one who asks may run twice; the row must say so, too.
    """
    if row.alive:
        return None
    if row.state == "claimed":
        return "take"
    return "rerun" if row.state == "running" and row.idempotent and idempotent else None
