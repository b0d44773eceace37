"""The pauses of a client that comes back: growing, bounded, and not begun anew by a server that dies at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.client.server import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReconnectBudget


def test_without_a_budget_nothing_is_tried():
    """Zero seconds leave none, whatever is lost."""
    budget = ReconnectBudget(0)
    budget.opened(1.0)
    budget.lost(2.0)
    assert budget.seconds_left(2.0) == 0


def test_nothing_is_tried_before_a_loss():
    """A client that never had a connection does not come back to one."""
    assert ReconnectBudget(60).seconds_left(5.0) == 0


def test_pauses_double_up_to_the_longest():
    """The first is short, none is longer than the longest."""
    budget = ReconnectBudget(1000)
    budget.lost(0.0)
    pauses = [budget.pause(0.0) for _ in range(9)]
    assert pauses[:4] == [FIRST_PAUSE_S, FIRST_PAUSE_S * 2, FIRST_PAUSE_S * 4, FIRST_PAUSE_S * 8]
    assert pauses[-2:] == [LONGEST_PAUSE_S] * 2
    assert pauses == sorted(pauses)


def test_a_connection_that_held_earns_a_new_budget():
    """After as long a connection as the budget is, a loss is like the first one; before that, the rest has to do."""
    budget = ReconnectBudget(60)
    budget.lost(100.0)
    budget.opened(110.0)
    budget.lost(120.0)
    assert budget.seconds_left(120.0) == 40
    budget.opened(130.0)
    budget.lost(165.0)
    assert budget.seconds_left(165.0) == 0
    budget.opened(170.0)
    budget.lost(230.0)
    assert (budget.seconds_left(230.0), budget.pause(230.0)) == (60, FIRST_PAUSE_S)


@given(st.floats(0.1, 500), st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_a_server_that_dies_at_once_is_not_started_for_ever(seconds, lives):
    """However often the connection is lost within the budget, all attempts end when it is over."""
    budget, now = ReconnectBudget(seconds), 0.0
    budget.lost(now)
    for life in lives:
        if budget.seconds_left(now) == 0:
            break
        pause = budget.pause(now)
        assert 0 < pause <= min(LONGEST_PAUSE_S, seconds)
        now += pause
        budget.opened(now)
        now += min(life, seconds * 0.99)
        budget.lost(now)
        assert now + budget.seconds_left(now) <= seconds + 30
    assert budget.seconds_left(seconds) == 0
