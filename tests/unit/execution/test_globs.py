"""Output globs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution.check import compile_glob


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("out.txt", "out.txt", True),
        ("out.txt", "a/out.txt", False),
        ("*.csv", "a.csv", True),
        ("*.csv", "a/b.csv", False),
        ("**/*.csv", "b.csv", True),
        ("**/*.csv", "a/b/c.csv", True),
        ("a/**", "a/b/c", True),
        ("a/**/d", "a/d", True),
        ("a/**/d", "a/b/c/d", True),
        ("a/**/d", "a/b/c", False),
        ("[ab]?", "bz", True),
        ("[ab]?", "cz", False),
        ("*", ".hidden", True),
        ("a*b", "a\nb", True),
    ],
)
def test_matching(pattern, path, expected):
    """`*` stays within a part, `**` spans parts."""
    assert compile_glob(pattern).matches(tuple(path.split("/"))) == expected


names = st.lists(st.sampled_from(["a", "b", "x.csv"]), min_size=1, max_size=5)
patterns = st.lists(st.sampled_from(["a", "*", "**", "?", "*.csv"]), min_size=1, max_size=5)


@given(patterns, names)
def test_the_walk_enters_every_folder_of_a_match(pattern, path):
    """Whatever matches is reached: each folder on its way may hold a match."""
    glob = compile_glob("/".join(pattern))
    if glob.matches(tuple(path)):
        assert all(glob.may_lie_below(tuple(path[:count])) for count in range(1, len(path)))


def test_a_pattern_made_to_backtrack_is_quick():
    """A hostile name does not make matching slow."""
    assert not compile_glob("*a" * 60 + "b").matches(("a" * 250,))
