"""Pure rules: groups of calls, circles, refs."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import ToolCallRefused
from kdskills.solver.dispatch import CallGuard, canonical, plan
from kdskills.solver.turn_tools import SkillRef, SourceRef, TurnFileRef, parse_ref


@pytest.mark.parametrize(
    ("barriers", "groups"),
    [
        ([], []),
        ([0, 0, 0], [[0, 1, 2]]),
        ([1], [[0]]),
        ([0, 1, 0, 0], [[0], [1], [2, 3]]),
        ([1, 1, 0], [[0], [1], [2]]),
    ],
)
def test_a_barrier_runs_alone(barriers, groups):
    """Calls before a barrier are done, calls after it wait."""
    assert plan(list(range(len(barriers))), [bool(b) for b in barriers]) == groups


@given(st.lists(st.booleans(), max_size=30))
def test_every_call_is_planned_once_and_in_order(barriers):
    """Nothing is lost or moved."""
    assert [one for group in plan(range(len(barriers)), barriers) for one in group] == list(range(len(barriers)))


def test_identical_calls_run_twice_then_are_told_then_end_the_turn():
    """The third and fourth are answered, the fifth ends it; the step named is the first one."""
    guard = CallGuard()
    assert [guard.admit("k", step) for step in (3, 4, 5, 6, 7)] == [
        ("run", 3),
        ("run", 3),
        ("repeated", 3),
        ("repeated", 3),
        ("stuck", 3),
    ]


def test_a_change_of_state_forgives():
    """After a change the same call may answer differently."""
    guard = CallGuard()
    for step in range(4):
        guard.admit("k", step)
    guard.state_changed()
    assert guard.admit("k", 9) == ("run", 9)


def test_three_invalid_calls_in_a_row_of_one_tool():
    """A valid one between them starts the count anew; tools count alone."""
    guard = CallGuard()
    assert [guard.invalid("a"), guard.invalid("b"), guard.invalid("a")] == [False, False, False]
    guard.valid("a")
    assert [guard.invalid("a"), guard.invalid("a"), guard.invalid("a")] == [False, False, True]


def test_equal_arguments_have_one_key():
    """Order of keys does not matter, values and tools do."""
    assert canonical("t", {"a": 1, "b": [2]}) == canonical("t", {"b": [2], "a": 1})
    assert len({canonical("t", {"a": 1}), canonical("t", {"a": "1"}), canonical("u", {"a": 1})}) == 3


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("sk:acme.brief", SkillRef("sk:acme.brief")),
        (" sk: acme.brief ", SkillRef("sk:acme.brief")),
        ("sk:7", SkillRef("sk:7")),
        ("SK7", SkillRef("SK7")),
        ("skills.acme.brief", SkillRef("skills.acme.brief")),
        ("sk:acme.brief/references/a b.md", SkillRef("sk:acme.brief", "references/a b.md")),
        ("SK7/a.md", SkillRef("SK7", "a.md")),
        ("src:1-3,5", SourceRef(((1, 3), (5, 5)))),
        ("src:9-7", SourceRef(((7, 9),))),
        ("turn:a/b.md", TurnFileRef("a/b.md")),
        ("turn:a.md#L10-40", TurnFileRef("a.md", 10, 40)),
        ("turn:a.md#L10-L40", TurnFileRef("a.md", 10, 40)),
        ("turn:a.md#L7", TurnFileRef("a.md", 7, 7)),
        ("turn:a#b.md", TurnFileRef("a#b.md")),
    ],
)
def test_refs_are_read(text, ref):
    """Each form of the specification."""
    assert parse_ref(text) == ref


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "SKETCH.md",
        "sk7",
        "brief",
        "sk:",
        "src:",
        "src:a",
        "src:1-",
        "src:-1",
        "turn:",
        "turn:#L1",
        "turn:a#L0",
        "turn:a#L5-2",
        "skills.",
        "http://x",
        "SK",
        "SKx",
        "src:1234567890",
    ],
)
def test_other_words_are_invalid_refs(text):
    """A bare word is no skill, and nothing is guessed."""
    with pytest.raises(ToolCallRefused) as caught:
        parse_ref(text)
    assert (caught.value.code, caught.value.who) == ("invalid_ref", "model")


def test_a_huge_range_is_free():
    """A range is met with the pool, not counted out."""
    assert parse_ref("src:1-999999999").ranges == ((1, 999_999_999),)


@given(st.text(max_size=60))
def test_no_ref_breaks_the_parser(text):
    """Any text is a ref or `invalid_ref`."""
    with suppress(ToolCallRefused):
        assert isinstance(parse_ref(text), SkillRef | SourceRef | TurnFileRef)
