"""Skills that cannot be told apart: which pairs are named, which are not, and what comparing costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdskills.search.alike import AlikePair, alike_skills
from kdskills.skills import parse_skill
from tests.unit.search.conftest import Write

ABOUT = "Drafts newsletters, posts and press releases for a product, with headlines that fit the channel."


@pytest.fixture
def pairs(tmp_path: Path) -> Callable[[], list[AlikePair]]:
    """Compare everything that was written, by full id."""

    def compare() -> list[AlikePair]:
        skills = [parse_skill(file.parent).skill for file in sorted(tmp_path.rglob("SKILL.md"))]
        return alike_skills(
            {f"{skill.path.parent.parent.name}.{skill.id}": skill for skill in skills if skill is not None}
        )  # type: ignore[union-attr]  # they lie in folders

    return compare


@pytest.fixture
def others(write: Write) -> None:
    """Write skills of other trades."""
    for number, trade in enumerate(["pipes", "roofs", "gardens", "kitchens", "bridges", "ovens", "boats", "lamps"]):
        write(f"trade.fix-{trade}", f"Mends {trade} of a house number {number}.", body=f"Look at the {trade} first.")


def test_two_that_say_the_same_are_told(others: None, write: Write, pairs: Callable[[], list[AlikePair]]) -> None:
    """Copies, and one that says the same in other words, are told with the words they share, once a pair."""
    write("a.content-writing", ABOUT, body="Ask for the audience.")
    write("b.draft-content", "Drafts press releases, posts and newsletters for products; headlines fit each channel.")
    (pair,) = pairs()
    assert pair[:2] == ("a.content-writing", "b.draft-content")
    assert {"newsletters", "posts", "press"} <= set(pair.shared)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_copies_are_told_however_many(write: Write, pairs: Callable[[], list[AlikePair]], count: int) -> None:
    """Two copies are a pair alone, and among many copies at least one pair is told."""
    for number in range(count):
        write(f"a.copy-{number}", ABOUT)
    assert pairs()[0][:2] == ("a.copy-0", "a.copy-1")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Reviews an Oslo deployment and its costs, and opens issues.", "Reviews a Bergen deployment and its costs, and opens issues."),
        ("Makes tables out of reports.", "Sends reports by mail to people."),
        (ABOUT, f"{ABOUT} For posts of partners use acme.oslo-review instead."),
    ],
    ids=["a word of name and description", "little in common", "one names the other"],
)  # fmt: skip
def test_ordinary_siblings_are_not_told(
    others: None, write: Write, pairs: Callable[[], list[AlikePair]], first: str, second: str
) -> None:
    """Apart are those with a word of their own in name and description, with little in common, and that name the other."""
    write("acme.oslo-review", first)
    write("acme.bergen-review", second)
    assert pairs() == []


def test_the_cure_cures(others: None, write: Write, pairs: Callable[[], list[AlikePair]]) -> None:
    """What the warning advises ends it: the descriptions say when to use which."""
    write("a.content-writing", ABOUT)
    write("a.content-drafts", ABOUT)
    assert len(pairs()) == 1
    write("a.content-drafts", f"{ABOUT} Use it for a first draft; for final texts use content-writing.")
    assert pairs() == []


def test_the_answer_is_the_same_in_any_order(write: Write, tmp_path: Path) -> None:
    """Neither the order nor the number of tries changes what is told."""
    for number in range(12):
        write(f"a.copy-{number}", f"{ABOUT} {'Quickly. ' * (number % 3)}")
    skills = {file.parent.name: parse_skill(file.parent).skill for file in tmp_path.rglob("SKILL.md")}
    keys = sorted(skills)
    first = alike_skills({key: skills[key] for key in keys})  # type: ignore[misc]  # all of them parse
    random.Random(7).shuffle(keys)
    assert first == alike_skills({key: skills[key] for key in keys})  # type: ignore[misc]  # all of them parse


def test_thousands_cost_a_bounded_time(write: Write, tmp_path: Path) -> None:
    """A thousand skills of one family are compared in part, and leave no file."""
    dice = random.Random(11)
    words = [f"word{number}" for number in range(400)]
    for number in range(1000):
        write(
            f"a.s{number:04}",
            f"{ABOUT} {' '.join(dice.choices(words, k=12))}",
            body=" ".join(dice.choices(words, k=80)),
        )
    skills = {file.parent.name: parse_skill(file.parent).skill for file in sorted(tmp_path.rglob("SKILL.md"))}
    files = set(tmp_path.rglob("*"))
    started = time.process_time()
    alike_skills(skills)  # type: ignore[arg-type]  # all of them parse
    assert time.process_time() - started < 30
    assert set(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("about", ["", "\0", "***", "a", "the of and", "x" * 5000, "(?P<x>[", "漢字" * 300])
def test_odd_descriptions_end_no_comparison(write: Write, tmp_path: Path, about: str) -> None:
    """Descriptions without words, of one word, of one endless word and with signs of patterns are compared like others."""
    for number in (1, 2):
        write(f"a.odd-{number}", "Something", body=about.replace("\0", ""))
    skills = {file.parent.name: parse_skill(file.parent).skill for file in tmp_path.rglob("SKILL.md")}
    import dataclasses

    odd = {key: dataclasses.replace(skill, description=about) for key, skill in skills.items()}  # type: ignore[type-var]
    assert len(alike_skills(odd)) <= 1  # type: ignore[arg-type]  # all of them parse
