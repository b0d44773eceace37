"""The table of moves: what may become of a call, and what never."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.journal.calls import ANSWERED, KEEPS_LATE, MOVES, NEEDS_DEAD_OWNER, Event, takeover
from kdskills.remote.ports import CallState, JournalRow

STATES: tuple[CallState, ...] = get_args(CallState)
EVENTS: tuple[Event, ...] = get_args(Event)


def row(state: CallState, *, alive: bool, idempotent: bool) -> JournalRow:
    """A row of another owner."""
    return JournalRow("k", state, "other", idempotent, 0.0, alive)


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_reached(state: CallState) -> None:
    """No state of the spec is only written down."""
    assert state in MOVES.values()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(sorted(ANSWERED), EVENTS)))
def test_answered_calls_never_move(state: CallState, event: Event) -> None:
    """What the model was answered is never answered otherwise, whatever happens afterwards."""
    assert MOVES.get((state, event)) is None


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_a_handler_starts_from_a_claim_only(events: list[Event]) -> None:
    """Whatever happens in whatever order: `running` is entered by `start` out of `claimed` alone."""
    state: CallState | None = None
    for event in events:
        before, state = state, MOVES.get((state, event)) or state
        if state == "running" and before != "running":
            assert (before, event) == ("claimed", "start")


@given(st.lists(st.sampled_from([event for event in EVENTS if event != "rerun"]), max_size=30))
def test_without_a_rerun_a_call_starts_once(events: list[Event]) -> None:
    """Only the re-run of an idempotent skill can start a handler a second time."""
    state: CallState | None = None
    starts = 0
    for event in events:
        moved = MOVES.get((state, event))
        starts += moved is not None and event == "start"
        state = moved or state
    assert starts <= 1


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_live_owners_keep_their_calls(state: CallState, idempotent: bool) -> None:
    """Nobody takes a call whose owner's lease runs."""
    assert takeover(row(state, alive=True, idempotent=idempotent), idempotent=idempotent) is None


@pytest.mark.parametrize(
    ("state", "row_says", "asks", "expected"),
    [
        ("claimed", False, False, "take"),
        ("claimed", True, True, "take"),
        ("running", True, True, "rerun"),
        ("running", True, False, None),
        ("running", False, True, None),
        ("running", False, False, None),
        ("done", True, True, None),
        ("overdue", True, True, None),
        ("unknown", True, True, None),
    ],
)
def test_calls_of_the_dead(state: CallState, row_says: bool, asks: bool, expected: Event | None) -> None:
    """A dead owner's claim is anybody's; what it ran is run again only when both sides say idempotent."""
    event = takeover(row(state, alive=False, idempotent=row_says), idempotent=asks)
    assert event == expected
    assert event is None or (event in NEEDS_DEAD_OWNER and MOVES.get((state, event)) == "claimed")


def test_late_answers_wait_in_answered_states_only() -> None:
    """`done` has the answer itself; only where another one was given is a second one kept."""
    assert ANSWERED - {"done"} == KEEPS_LATE
