"""The tables of states: no path leaves a terminal state, and every path ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.jobs.model import ACTIVE, JOBS, TASKS, TERMINAL, before

TABLES = {"tasks": TASKS, "jobs": JOBS}
each = pytest.mark.parametrize("table", list(TABLES.values()), ids=list(TABLES))


def walk(table, choices):
    """Walk from `queued`, taking the choice-th of what may follow, and return the states passed."""
    passed = ["queued"]
    for choice in choices:
        following = sorted(table[passed[-1]])
        if not following:
            break
        passed.append(following[choice % len(following)])
    return passed


@each
@given(choices=st.lists(st.integers(0, 20), max_size=60))
def test_nothing_leaves_a_terminal_state(table, choices):
    """However one walks, a terminal state is where the walk stops."""
    passed = walk(table, choices)
    assert all(state not in TERMINAL for state in passed[:-1])


@each
def test_every_state_reaches_an_end(table):
    """From every state there is a way to a terminal one."""
    for start in table:
        seen, open_ = set(), {start}
        while open_:
            seen |= open_
            open_ = {following for state in open_ for following in table[state]} - seen
        assert seen & TERMINAL, start


@each
def test_every_state_is_reachable(table):
    """No state of a table is dead: a walk from `queued` can meet each."""
    seen, open_ = set(), {"queued"}
    while open_:
        seen |= open_
        open_ = {following for state in open_ for following in table[state]} - seen
    assert seen == set(table)


@each
def test_what_follows_is_in_the_table(table):
    """Whatever may follow is itself a state of the table."""
    assert {following for states in table.values() for following in states} <= set(table)


@each
def test_before_is_the_table_read_backwards(table):
    """`before` tells which states lead to one."""
    for state in table:
        assert before(table, state) == tuple(sorted(one for one in table if state in table[one]))


def test_a_cancel_may_come_in_every_state_that_is_not_over():
    """Cancel is possible from wherever there is something to cancel."""
    for table in (TASKS, JOBS):
        assert {state for state in table if "canceled" in table[state]} == set(table) - TERMINAL


def test_a_task_only_succeeds_with_a_program():
    """Nothing succeeds that never began."""
    assert set(before(TASKS, "succeeded")) == ACTIVE
