"""The kind `retrieval`: the search that models use, judged by rows."""

from __future__ import annotations

import pytest

from kdskills.evals.files import Eval, read
from kdskills.evals.retrieval import rank_rows, retrieval_figures
from kdskills.turn import SkillsSubsystem


@pytest.fixture
def view(bundle):
    """A view of an office: a skill for invoices, and one that draws questions about them away."""
    for name, description, body in (
        ("invoices", "Reads invoices.", "Totals of scanned bills."),
        ("archive", "Archives old bills and keeps invoices of past years, scanned or not.", "Boxes for scanned bills."),
        ("trips", "Plans business trips.", "Compare trains and flights."),
    ):
        bundle.put(f"skills/office/{name}/SKILL.md", f"---\nname: {name}\ndescription: {description}\n---\n{body}\n")
    return SkillsSubsystem({}, bundle_root=bundle.root, roots=(), index_dir=None).view()


def test_ranks_and_confusion(view):
    """A hit is passed; a miss has the rank of the right skill, what stood first, and the words that pulled it up."""
    rows = [
        Eval("a", "compare trains", "office.trips"),
        Eval("b", "archive scanned bills of past years", "office.invoices"),
        Eval("c", "compare trains", "office.invoices", acceptable=("office.trips",)),
        Eval("d", "compare trains", "office.nobody"),
    ]
    hit, miss, accepted, lost = rank_rows(rows, view.search)
    assert (hit.status, hit.picked[0], hit.facts) == ("passed", "office.trips", {"expects": True, "rank": 1})
    assert (miss.status, miss.picked[:2], miss.facts["rank"]) == ("failed", ("office.archive", "office.invoices"), 2)
    words = miss.facts["pulled"]["office.archive"]
    assert {"past", "years"} <= set(words["description"])
    assert (accepted.status, lost.status, lost.facts["rank"]) == ("passed", "failed", None)
    found = retrieval_figures([hit, miss, accepted, lost])
    assert [found[f"recall@{first}"]["value"] for first in (1, 3, 5)] == [0.5, 0.75, 0.75]
    assert (found["mrr"], found["rows"]) == (0.625, 4)
    assert found["confused"] == [
        {"expected": "office.invoices", "picked": "office.archive", "times": 1},
        {"expected": "office.nobody", "picked": "office.trips", "times": 1},
    ]
    assert [row["eval"] for row in found["misses"]] == ["b", "d"]


def test_rows_for_which_no_skill_is_right(view):
    """They pass where nothing is found, or what must not be loaded does not stand first; recall does not count them."""
    rows = [
        Eval("a", "compare trains", None, should_trigger=False, must_not=("office.trips",)),
        Eval("b", "compare trains", None, should_trigger=False, must_not=("office.archive",)),
        Eval("c", "xyzzy plugh", None, should_trigger=False),
        Eval("d", "compare trains", None, should_trigger=False),
    ]
    found = list(rank_rows(rows, view.search))
    assert [row.status for row in found] == ["failed", "passed", "passed", "failed"]
    figures = retrieval_figures(found)
    assert (figures["rows"], figures["refused"]) == (0, {"hits": 2, "total": 4})


def test_the_same_search_as_models_use(bundle, view):
    """What is read from files is ranked by the search of `skills.search`, answer for answer."""
    found = bundle.rows([{"question": "old bills", "expected_skill": "archive"}])
    (row,) = rank_rows(read(bundle.root).evals, view.search)
    assert found.evals[0].skill == row.skill == "office.archive"
    assert row.picked == tuple(hit.full_id for hit in view.search("old bills").hits)


def test_hostile_prompts(view):
    """Half characters, NUL, operators and a megabyte find or find not, without an error."""
    prompts = ["\ud800", "\0", '"NEAR(a b)" * OR', "word " * 200_000, ""]
    rows = list(rank_rows([Eval(str(n), text, "office.trips") for n, text in enumerate(prompts)], view.search))
    assert [row.status for row in rows] == ["failed"] * 5
