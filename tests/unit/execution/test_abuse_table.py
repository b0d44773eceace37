"""The table of hostile programs is made of what came of them."""

import dataclasses

import pytest

from kdskills.execution import ExecResult, IsolationLevel, ProbeReport, Stream
from kdskills.testing.abuse import CASES
from kdskills.testing.abuse.table import BEGIN, END, Column, column, insert, render, rows


class Engine:
    """An engine on which programs say that everything worked, or that it did not."""

    name = "fake"
    level = IsolationLevel.CONTAINER

    def __init__(self, said, level=IsolationLevel.CONTAINER, limits=frozenset()):
        self.said = said
        self.level = level
        self.limits = limits

    async def probe(self):
        """Claim the limits."""
        return ProbeReport(self.name, self.level, ok=True, limits=self.limits)

    async def run(self, _request):
        """Say it."""
        return ExecResult("ok", 0, None, Stream(self.said), Stream(), 0.0, self.name, self.level, self.limits)


def cases(*names):
    """Return cases by name."""
    return [case for case in CASES if case.name in names]


async def test_cells_say_what_came_of_a_case():
    """Held, failed with its words, without the limit, not promised."""
    wanted = cases("host_files", "memory_bomb", "daemon")
    good = await column("good", Engine(b"attempts made"), wanted)
    assert good.cells == {"host_files": "held", "memory_bomb": "no bound", "daemon": "held"}
    bad = await column("bad", Engine(b"ESCAPED: read /etc/shadow\nattempts made"), wanted)
    assert bad.cells["host_files"] == "FAILED"
    assert bad.problems["host_files"] == "ESCAPED: read /etc/shadow"
    weak = await column("weak", Engine(b"attempts made", IsolationLevel.NONE), wanted)
    assert weak.cells["host_files"] == "—"


def made(name, **cells):
    """Return a column in which everything is held but *cells*."""
    return Column(name, {case.name: "held" for case in CASES} | cells, dict.fromkeys(cells, "words"))


def test_every_case_is_one_row_and_every_engine_one_column():
    """What is rendered can be read back, and replaces what stood between the marks."""
    table = render([made("a"), made("b", daemon="FAILED")], "About.", {("b", "daemon"): "because of that"})
    page = insert(f"# Title\n\n{BEGIN}\nstale words\n{END}\n\nrest\n", table)
    assert page.startswith("# Title\n")
    assert page.endswith("rest\n")
    assert "stale words" not in page
    found = rows(page)
    assert [row[1] for row in found] == [case.name for case in CASES]
    assert {row[3] for row in found} == {("held", "held"), ("held", "FAILED")}
    assert "* `daemon` on b: because of that" in page
    assert insert(page, table) == page


def test_a_failure_without_explanation_is_said():
    """The page itself shows that somebody owes an explanation."""
    assert "NOT EXPLAINED" in render([made("a", daemon="FAILED")], "About.", {})


def test_a_page_without_marks_is_refused():
    """Nothing is written where nobody asked for it."""
    with pytest.raises(ValueError, match="substring"):
        insert("# Title\n", "table")


def test_the_reference_shows_every_case_as_it_is_now(repo):
    """The page's rows are the suite's cases; no failure is unexplained; the default engines hold everything."""
    page = (repo / "docs/reference/isolation.md").read_text()
    assert [row[:3] for row in rows(page)] == [(case.area, case.name, case.must) for case in CASES]
    assert "NOT EXPLAINED" not in page
    head = next(line for line in page.splitlines() if line.startswith("| area | program |"))
    names = [word.strip() for word in head.strip("|").split("|")][3:]
    assert {"bubblewrap", "bubblewrap, pool", "bubblewrap, ordinary user", "docker"} <= set(names)
    for name in ("bubblewrap", "bubblewrap, pool", "docker"):
        assert {row[3][names.index(name)] for row in rows(page)} == {"held"}, name


def test_cases_are_of_one_kind():
    """Every case names its file once, and its sentence does not break a table."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.name for case in CASES if "|" in case.must or "\n" in case.must] == []
    assert all(dataclasses.is_dataclass(case) for case in CASES)
