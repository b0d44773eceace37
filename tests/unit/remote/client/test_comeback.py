"""The pauses of a client that comes back: growing, bounded, and not begun anew by a server that dies at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.client.comeback import FIRST_PAUSE_S, LONGEST_PAUSE_S, Comeback


def test_without_a_budget_nothing_is_tried():
    """Zero seconds leave none, whatever is lost."""
    comeback = Comeback(0)
    comeback.opened(1.0)
    comeback.lost(2.0)
    assert comeback.left(2.0) == 0


def test_nothing_is_tried_before_a_loss():
    """A client that never had a connection does not come back to one."""
    assert Comeback(60).left(5.0) == 0


def test_pauses_double_up_to_the_longest():
    """The first is short, none is longer than the longest."""
    comeback = Comeback(1000)
    comeback.lost(0.0)
    pauses = [comeback.pause(0.0) for _ in range(9)]
    assert pauses[:4] == [FIRST_PAUSE_S, FIRST_PAUSE_S * 2, FIRST_PAUSE_S * 4, FIRST_PAUSE_S * 8]
    assert pauses[-2:] == [LONGEST_PAUSE_S] * 2
    assert pauses == sorted(pauses)


def test_a_connection_that_held_earns_a_new_budget():
    """After as long a connection as the budget is, a loss is like the first one; before that, the rest has to do."""
    comeback = Comeback(60)
    comeback.lost(100.0)
    comeback.opened(110.0)
    comeback.lost(120.0)
    assert comeback.left(120.0) == 40
    comeback.opened(130.0)
    comeback.lost(165.0)
    assert comeback.left(165.0) == 0
    comeback.opened(170.0)
    comeback.lost(230.0)
    assert (comeback.left(230.0), comeback.pause(230.0)) == (60, FIRST_PAUSE_S)


@given(st.floats(0.1, 500), st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_a_server_that_dies_at_once_is_not_started_for_ever(budget, lives):
    """However often the connection is lost within the budget, all attempts end when it is over."""
    comeback, now = Comeback(budget), 0.0
    comeback.lost(now)
    for life in lives:
        if comeback.left(now) == 0:
            break
        pause = comeback.pause(now)
        assert 0 < pause <= min(LONGEST_PAUSE_S, budget)
        now += pause
        comeback.opened(now)
        now += min(life, budget * 0.99)
        comeback.lost(now)
        assert now + comeback.left(now) <= budget + 30
    assert comeback.left(budget) == 0
