"""The code stays readable: sizes, names, imports."""

from __future__ import annotations

import ast

import pytest

from tests.arch.house import PAPERS, House, Measure, bound_names, circles, is_empty, long_parts
from tests.arch.rooms import PAGE, draw


@pytest.fixture(scope="module")
def house() -> House:
    """The product code of this checkout."""
    return House()


def test_no_measure_grows(house: House) -> None:
    """No measure of the house is beyond its limit."""
    assert [measure for measure in house.measures() if not measure.held] == [], (
        house.empty_names.most_common(20),
        house.shared_classes,
        house.papers[:20],
        house.too_long(),
        house.rings,
    )


def test_a_measure_over_its_limit_is_not_held() -> None:
    """The comparison itself can fail."""
    assert (Measure("lines", 2, 1, 1).held, Measure("lines", 1, 1, 1).held) == (False, True)


@pytest.mark.parametrize(
    ("name", "empty"),
    [
        ("found", True),
        ("_kept2", True),
        ("what_is_given", False),
        ("the_rest", False),
        ("in_place", True),
        ("__", False),
    ],
)
def test_a_name_is_empty_when_all_its_words_are(name: str, empty: bool) -> None:
    """One word that says something is enough."""
    assert is_empty(name) is empty


def test_every_kind_of_binding_counts() -> None:
    """Functions, parameters, targets of assignments, loops, `with` and comprehensions are names."""
    source = """
def one(two, *three, four=0, **five):
    six = seven, (eight, *nine) = two
    for ten in six:
        with open(ten) as eleven, four:
            return [twelve for twelve in (thirteen := three)]
    fourteen: int = 0
    fourteen += 1
"""
    words = "one two four three five six seven eight nine ten eleven twelve thirteen fourteen fourteen"
    assert sorted(bound_names(ast.parse(source))) == sorted(words.split())


def test_a_pointer_to_a_paper_is_seen() -> None:
    """Sections of papers are, links into the documentation are not."""
    assert [bool(PAPERS.search(text)) for text in ("(spec work §3)", "as in §2", "`docs/reference/work.md`")] == [
        True,
        True,
        False,
    ]


def test_a_function_and_a_class_over_budget_are_seen() -> None:
    """A function of 61 lines and a class of 401 are too long."""
    function = "def f():\n" + "    x = 1\n" * 60
    assert long_parts(ast.parse(function)) == ["f: 61 lines"]
    assert long_parts(ast.parse("class C:\n" + "    x = 1\n" * 400)) == ["C: 401 lines"]


def test_the_picture_of_the_rooms_is_current(house: House) -> None:
    """docs/explanation/rooms.svg shows today's imports; `python -m tests.arch.rooms` draws it anew."""
    assert PAGE.read_text(encoding="utf-8") == draw(house)


def test_modules_that_import_one_another_are_one_ring() -> None:
    """A circle over three modules is one group; what only leads into it, and what stands alone, is none."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"a"}, "g": {"h"}, "h": {"g"}}
    assert circles(graph) == [["a", "b", "c"], ["g", "h"]]
