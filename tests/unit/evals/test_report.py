"""Reports of iterations: the page, JUnit's form, what changed, and what is enough."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from kdskills import evals
from kdskills.evals.reports import Thresholds, changes, former_iteration, junit, page, report, shortfalls
from kdskills.evals.results import CheckVerdict, EvalPlan, EvalsRefused, Iteration, RowResult, write_json
from kdskills.evals.runs import figures_of

HOSTILE = (
    """<script>alert(1)</script><img src=x onerror=alert(2)>"'></style>&amp;{{ 7 * 7 }}{% raw %}\x00\x1b[31m\ud800"""
)


def iteration(folder="", rows=(), *, kind="trigger", sides=("with_skill",), **facts) -> Iteration:
    """Return an iteration of rows, given as (id, status, skill loaded first) or as they are."""
    made = [
        row
        if isinstance(row, RowResult)
        else RowResult(eval=row[0], status=row[1], skill="a.x", picked=row[2:], facts={"expects": True})
        for row in rows
    ]
    plan = EvalPlan(kind=kind, bundle="b", consumer="c", sides=sides, total=len(made), **facts)
    return Iteration(folder=str(folder), plan=plan, rows=tuple(made))


class Elements(HTMLParser):
    """The tags of a page with their attributes, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Take a tag."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        """Take a text."""
        self.texts.append(data)


@pytest.fixture
def hostile(tmp_path) -> Iteration:
    """An iteration whose every text, file name and file tries to be more than text."""
    folder = tmp_path / "iteration-1"
    outputs = folder / "eval-1/with_skill/outputs"
    outputs.mkdir(parents=True)
    name = HOSTILE.replace("/", "").replace("\0", "").replace("\ud800", "")
    (outputs / name).write_text(HOSTILE.replace("\ud800", ""))
    (outputs / "binary").write_bytes(b"\0" * 100)
    (outputs / "long").write_text("x" * 100_000)
    (outputs / "link").symlink_to("/etc/passwd")
    (folder / "eval-1/with_skill/transcript.jsonl").write_text(
        f'{{"type": "{HOSTILE[:20]}"}}\nno json {HOSTILE[:60]}\n'
    )
    row = RowResult(
        eval=HOSTILE,
        skill=HOSTILE,
        status="failed",
        picked=(HOSTILE,),
        tokens=5,
        error=(HOSTILE, HOSTILE),
        verdicts=(CheckVerdict(text=HOSTILE, passed=False, evidence=HOSTILE),),
        facts={"expects": True, "pulled": {HOSTILE: {HOSTILE: [HOSTILE]}}},
        folder="eval-1/with_skill",
    )
    return iteration(folder, [row], model=HOSTILE, judge=HOSTILE, sides=("with_skill", HOSTILE))


def test_hostile_texts_stay_texts(hostile):
    """No element, attribute or style comes of what skills and models wrote, and no file behind a link is shown."""
    text = page(hostile, figures_of(hostile))
    found = Elements(text)
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form", "a"}
    names = {name for _, attributes in found.tags for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in {"style", "src", "href"}}
    assert "alert(1)" in "".join(found.texts)
    assert "{{ 7 * 7 }}" in "".join(found.texts)
    assert ("root:" in text, "100 bytes that are no text" in text, "80,000 more characters" in text) == (
        False,
        True,
        True,
    )


def test_what_is_not_shown_is_told(tmp_path):
    """Long transcripts and events, names beyond the table's size and outputs that are refused say so."""
    outputs = tmp_path / "eval-1/with_skill/outputs"
    outputs.parent.mkdir(parents=True)
    outputs.symlink_to("/etc")
    (outputs.parent / "transcript.jsonl").write_text("\n".join(["x" * 700, *["short"] * 5_000]))
    rows = [
        RowResult(
            eval=f"e{number}", skill=f"a.s{number:02}", status="passed", picked=(f"a.s{number:02}",), tokens=1,
            facts={"expects": True}, folder="eval-1/with_skill" if number == 0 else "",
        )
        for number in range(45)
    ]  # fmt: skip
    found = iteration(tmp_path, rows, sides=("with_skill",))
    assert found.plan.kind == "trigger"
    text = page(found, figures_of(found))
    assert "5 more names are not shown" in text
    assert "… 100 more characters" in text
    assert "leads through a link" in text
    assert re.search(r"… 1\d,\d{3} more characters", text)
    assert "root:" not in text


def test_the_policy_allows_the_one_style_alone(hostile):
    """The policy names the digest of the style that stands there, and nothing else may be loaded or run."""
    text = page(hostile, figures_of(hostile))
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(tag["content"] for name, tag in Elements(text).tags if "http-equiv" in tag)
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_reports_are_written(hostile):
    """Both lie in the iteration, as UTF-8 and as XML that parses, whatever stands in the rows."""
    path = report(hostile, figures_of(hostile))
    assert path.read_bytes().decode("utf-8").startswith("<!doctype html>")
    case = ET.fromstring(path.with_name("junit.xml").read_bytes()).find(".//testcase")
    assert case is not None
    assert "alert(1)" in case.attrib["name"]


def test_the_library_reports_on_a_folder(tmp_path):
    """`kdskills.evals` has `read`, `run`, `grade` and `report`; the last takes a folder and finds the figures itself."""
    assert {"read", "run", "grade", "report"} <= set(evals.__all__)
    assert all(callable(getattr(evals, name)) for name in ("read", "run", "grade", "report"))
    made = iteration(rows=[("a", "passed", "a.x"), ("b", "failed", "a.y")])
    write_json(tmp_path / "plan.json", made.plan.model_dump(mode="json"))
    lines = [row.model_dump_json() + "\n" for row in made.rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    written = evals.report(tmp_path)
    assert (written, written.with_name("junit.xml").is_file()) == (tmp_path / "report.html", True)
    assert "recall 0.50" in written.read_text()
    with pytest.raises(EvalsRefused):
        evals.report(tmp_path / "nothing")


def test_junit_counts_each_status():
    """A failure has its evidence, an error its words, and what was not graded is skipped."""
    rows = [
        RowResult(eval="a", status="passed"),
        RowResult(
            eval="b", status="failed", verdicts=(CheckVerdict(text="is short", passed=False, evidence="900 words"),)
        ),
        RowResult(eval="c", status="error", error=("model_failed", "no answer"), repeat=1),
        RowResult(eval="d", status="ungraded"),
    ]
    suite = ET.fromstring(junit(iteration(rows=rows)))[0]
    assert [suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["error"], ["skipped"]]
    assert (suite[1][0].text, suite[2][0].attrib["message"]) == ("is short: 900 words", "model_failed: no answer")
    assert suite[2].attrib["name"] == "c (2)"


def test_the_page_has_figures():
    """Shares with intervals, the confusion table, and points of tokens stand in it."""
    rows = [("a", "passed", "a.x"), ("b", "failed", "a.y")]
    rows.append(RowResult(eval="c", status="passed", skill="a.x", picked=("a.x",), tokens=900, facts={"expects": True}))
    made = iteration(rows=rows)
    text = "".join(Elements(page(made, figures_of(made))).texts)
    assert "passed: 2 of 3, between 21 % and 94 %" in text
    assert "recall 0.67" in text
    assert ("a.y" in text, "900 tokens" in text) == (True, True)


def test_an_empty_iteration_has_a_page():
    """Nothing was run, and it says so."""
    text = page(iteration(kind="run", sides=("with_skill", "without_skill")), {})
    assert text.count("nothing was judged") == 2


def test_what_changed():
    """Each kind of change is named once, and rows that are alike are not."""
    before = [
        ("same", "passed", "a.x"),
        ("better", "failed"),
        ("worse", "passed"),
        ("gone", "passed"),
        ("other", "failed", "a.y"),
    ]
    after = [
        ("same", "passed", "a.x"),
        ("better", "passed"),
        ("worse", "failed"),
        ("other", "failed", "a.z"),
        ("new", "error"),
    ]
    found = changes(iteration(rows=before), iteration(rows=after))
    assert [(row.eval, row.change) for row in found] == [
        ("better", "fixed"),
        ("worse", "broken"),
        ("other", "skill"),
        ("new", "added"),
        ("gone", "removed"),
    ]
    assert (found[2].before, found[2].after) == (("failed", "a.y"), ("failed", "a.z"))
    assert changes(iteration(rows=[("a", "failed")]), iteration(rows=[("a", "error")]))[0].change == "status"


@pytest.mark.parametrize(
    ("wanted", "short"),
    [
        ({}, False),
        ({"min_pass": 0.75}, False),
        ({"min_pass": 0.76}, True),
        ({"min_recall": 0.75}, False),
        ({"min_recall": 0.8}, True),
        ({"max_regression": 0.25}, False),
        ({"max_regression": 0.24}, True),
    ],
)
def test_thresholds(wanted, short):
    """At the threshold is enough; errors and rows that are new count for nothing in a regression."""
    rows = [
        ("a", "passed", "a.x"),
        ("b", "passed", "a.x"),
        ("c", "passed", "a.x"),
        ("d", "failed", "a.y"),
        ("e", "error"),
    ]
    after = iteration(rows=rows)
    before = iteration(rows=[(name, "passed", "a.x") for name in "abcde"])
    assert bool(shortfalls(after, figures_of(after), Thresholds(**wanted), before)) is short


def test_what_cannot_be_told_is_not_enough():
    """No row that was judged, a kind without recall, and nothing to compare fall short; no earlier iteration does not."""
    nothing = iteration(rows=[("a", "error")], kind="run")
    wanted = Thresholds(min_recall=0, min_pass=0, max_regression=1)
    assert len(shortfalls(nothing, figures_of(nothing), wanted, nothing)) == 3
    assert len(shortfalls(nothing, figures_of(nothing), wanted, None)) == 2


def test_only_what_is_alike_is_held_to_no_regression():
    """An iteration of another kind, or with other sides, is no measure: it is said, and falls short."""
    rows = [("a", "passed", "a.x")]
    after, wanted = iteration(rows=rows), Thresholds(max_regression=1)
    for before in (iteration(rows=rows, kind="run"), iteration(rows=rows, sides=("with_skill", "other"))):
        (words,) = shortfalls(after, figures_of(after), wanted, before)
        assert words.startswith("no regression can be told")
    assert shortfalls(after, figures_of(after), wanted, iteration(rows=rows)) == ()


def test_the_iteration_before(tmp_path):
    """It is the one with the number before, where it can be read."""
    for number, kind in ((1, "trigger"), (2, "trigger"), (3, "run")):
        folder = tmp_path / f"iteration-{number}"
        folder.mkdir()
        write_json(folder / "plan.json", iteration(kind=kind).plan.model_dump(mode="json"))
    found = former_iteration(iteration(tmp_path / "iteration-2"))
    assert found is not None
    assert found.folder.endswith("iteration-1")
    assert former_iteration(iteration(tmp_path / "iteration-3", kind="run")) is not None
    assert former_iteration(iteration(tmp_path / "iteration-1")) is None
    assert former_iteration(iteration(tmp_path / "mine")) is None
