"""Reports of iterations: the page, JUnit's form, what changed, and what is enough."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kdskills import evals
from kdskills.app import Host, Settings
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


@pytest.fixture
def planned(tmp_path):
    """Gives an iteration of a number, kind and sides that lies in the workspace, with rows as of `iteration`."""

    def put(number, kind="trigger", rows=(), **facts):
        made = iteration(tmp_path / f"iteration-{number}", rows, kind=kind, **facts)
        Path(made.folder).mkdir()
        write_json(Path(made.folder, "plan.json"), made.plan.model_dump(mode="json"))
        Path(made.folder, "rows.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in made.rows))
        return made

    return put


def test_the_iteration_before(planned, tmp_path):
    """It is the last one before of the same kind and sides, however many others lie between; one that is named is that."""
    first, other = planned(1), planned(2, sides=("with_skill", "new"))
    planned(4, "run")
    sixth, tenth, later = planned(6), planned(10), planned(11)
    for made, former in ((later, tenth), (tenth, sixth), (sixth, first), (first, None), (other, None)):
        assert former_iteration(made) == (former, ())
    assert former_iteration(tenth, other.folder) == (other, ())
    assert former_iteration(iteration(tmp_path / "mine")) == (None, ())
    (tmp_path / "link").symlink_to(tenth.folder)
    assert former_iteration(iteration(tmp_path / "link"))[0] == sixth
    with pytest.raises(EvalsRefused):
        former_iteration(tenth, tmp_path / "nothing")


def test_an_unreadable_iteration_before_is_told(planned, tmp_path):
    """It is passed over with a diagnostic, whatever it is; those behind what is compared are not looked at."""
    planned(1)
    (tmp_path / "iteration-1/plan.json").write_text("{")
    former, after = planned(2), planned(6)
    (tmp_path / "iteration-3").write_text("no folder")
    (tmp_path / "iteration-4").symlink_to(tmp_path / "nowhere")
    (tmp_path / "iteration-5").mkdir()
    (tmp_path / "iteration-5/benchmark.json").write_text("{}")
    found, (finding,) = former_iteration(after)
    assert (found, finding.code, finding.severity) == (former, "eval_former_unreadable", "warning")
    assert "iteration-5 is no iteration that can be read" in finding.message
    assert "nor can 2 before it" in finding.message
    Path(former.folder, "rows.jsonl").write_text('{"eval": "a", "status": "passed", "side": "none of it"}\n')
    found, (finding,) = former_iteration(after)
    assert (found, "nor can 4 before it" in finding.message) == (None, True)


@pytest.mark.parametrize(("status", "ok"), [("passed", True), ("failed", False)])
async def test_an_answer_says_what_it_was_compared_with(planned, status, ok):
    """The regression and the changes are those since the last one that is alike; where there is none, that is said."""
    first = planned(1, rows=[("a", "passed", "a.x"), ("b", "passed", "a.x")])
    planned(2, "run", rows=[("a", "failed")])
    planned(3, rows=[("a", "passed", "a.x"), ("b", status, "a.x")])
    host = Host(Settings(), entry_points=False)
    ask = partial(host.call, "evals.report", max_regression=0.1)
    answer = await ask(iteration=str(Path(first.folder).with_name("iteration-3")))
    assert (answer.ok, answer.before, answer.diagnostics) == (ok, first.folder, ())
    assert [(row.eval, row.change) for row in answer.changes] == ([] if ok else [("b", "broken")])
    assert answer.below == (
        () if ok else ("0.50 fewer of the rows pass than in iteration-1; at most 0.10 may be lost",)
    )
    alone = await ask(iteration=first.folder)
    assert (alone.ok, alone.before, alone.changes) == (True, "", ())
    assert [finding.code for finding in alone.diagnostics] == ["eval_former_missing"]
    assert (await host.call("evals.report", iteration=first.folder)).diagnostics == ()
