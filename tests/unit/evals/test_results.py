"""Workspaces of evaluations on disk: names, torn lines, iterations that are none, and the published figures."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.evals.reports import report
from kdskills.evals.results import (
    CheckVerdict,
    EvalPlan,
    EvalsRefused,
    EvalWorkspace,
    Iteration,
    RowResult,
    benchmark,
    read_iteration,
    slugs_of,
    write_row_files,
)
from kdskills.evals.runs import figures_of

PLAN = EvalPlan(
    kind="run", bundle="b", consumer="c", sides=("with_skill", "without_skill"), evals={"a": "", "b": ""}, total=4
)


def row(name="a", side="with_skill", **facts):
    """A row that passed."""
    return RowResult(**{"eval": name, "side": side, "status": "passed"} | facts)


@given(st.lists(st.text(max_size=80), unique=True))
def test_slugs_are_safe_and_differ(names):
    """Whatever stands in ids: small letters, digits and single dashes, no two alike, none empty."""
    slugs = slugs_of(names)
    assert len(set(slugs.values())) == len(names)
    assert all(slug.strip("-") == slug and "--" not in slug for slug in slugs.values())
    assert all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and slug for slug in slugs.values())


def test_a_torn_line_is_dropped_and_cut(tmp_path):
    """A line that was not written to its end is no row; the next one stands on a line of its own."""
    space = EvalWorkspace(tmp_path / "w")
    with space.alone():
        folder = space.begin(PLAN)
        folder.add(row())
        rows = folder.folder / "rows.jsonl"
        rows.write_bytes(rows.read_bytes() + b'{"eval": "b", "sta')
        assert [each.eval for each in read_iteration(folder.folder).rows] == ["a"]
        again = space.resume(PLAN)
        again.add(row("b"))
    assert [each.eval for each in read_iteration(again.folder).rows] == ["a", "b"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"kind": "run"}', "null", "\udcff", '{"kind": 1e999}']
)
def test_what_is_no_iteration_is_refused(tmp_path, content):
    """A plan or line that is none is one clear refusal."""
    (tmp_path / "plan.json").write_text(content, errors="surrogateescape")
    with pytest.raises(EvalsRefused):
        read_iteration(tmp_path)
    (tmp_path / "plan.json").write_text(PLAN.model_dump_json())
    (tmp_path / "rows.jsonl").write_text(content + "\n", errors="surrogateescape")
    with pytest.raises(EvalsRefused):
        read_iteration(tmp_path)


def test_the_later_line_of_a_row_counts(tmp_path):
    """An error that was run again is what came of it then."""
    space = EvalWorkspace(tmp_path)
    with space.alone():
        folder = space.begin(PLAN)
        folder.add(row(status="error", error=("model_failed", "x")))
        assert not folder.settled(("a", "with_skill", 0))
        folder.add(row())
    assert [each.status for each in read_iteration(folder.folder).rows] == ["passed"]


def test_iterations_count_up(tmp_path):
    """The next iteration has the next number, whatever lies beside them."""
    (tmp_path / "iteration-9").mkdir()
    (tmp_path / "iteration-10x").mkdir()
    assert EvalWorkspace(tmp_path).begin(PLAN).folder.name == "iteration-10"


def test_the_figures_are_the_published_ones():
    """Mean and standard deviation of each side, and the difference; errors count for nothing."""
    yes, no = CheckVerdict(text="t", passed=True), CheckVerdict(text="t", passed=False)
    unjudged = CheckVerdict(text="t", passed=None)
    rows = (
        row(verdicts=(yes, yes), tokens=100, duration_ms=1000),
        row("b", verdicts=(yes, no, unjudged), tokens=300, duration_ms=3000),
        row(side="without_skill", verdicts=(no,), tokens=50, duration_ms=500),
        row("b", side="without_skill", status="error", tokens=9999),
    )
    figures = benchmark(Iteration(folder="f", plan=PLAN, rows=rows), {})
    assert figures["run_summary"] == {
        "with_skill": {
            "pass_rate": {"mean": 0.75, "stddev": 0.3536},
            "time_seconds": {"mean": 2.0, "stddev": 1.4142},
            "tokens": {"mean": 200, "stddev": 141.4214},
        },
        "without_skill": {
            "pass_rate": {"mean": 0, "stddev": 0.0},
            "time_seconds": {"mean": 0.5, "stddev": 0.0},
            "tokens": {"mean": 50, "stddev": 0.0},
        },
        "delta": {"pass_rate": 0.75, "time_seconds": 1.5, "tokens": 150},
    }
    assert figures["kdskills"]["rows"]["without_skill"] == {"passed": 1, "error": 1}


def test_the_files_of_a_row_are_the_published_ones(tmp_path):
    """What nobody judged is no result, and is told beside them."""
    verdicts = (CheckVerdict(text="t", passed=True, evidence="e"), CheckVerdict(text="u", passed=None))
    write_row_files(tmp_path, row(verdicts=verdicts, tokens=7, duration_ms=9, status="ungraded"))
    grading = json.loads((tmp_path / "grading.json").read_text())
    assert grading["assertion_results"] == [{"text": "t", "passed": True, "evidence": "e"}]
    assert grading["summary"] == {"passed": 1, "failed": 0, "total": 1, "pass_rate": 1.0}
    assert grading["kdskills"] == {"status": "ungraded", "ungraded": ["u"]}
    assert json.loads((tmp_path / "timing.json").read_text()) == {"total_tokens": 7, "duration_ms": 9}


def test_a_task_finds_its_own_iteration(tmp_path):
    """Whatever was begun since, and whatever lies about: a task goes on with the iteration it began, and with no other."""
    space = EvalWorkspace(tmp_path / "w")
    assert space.of_task("t1") is None
    mine = PLAN.model_copy(update={"tasks": ("t1",)})
    with space.alone():
        first = space.open(mine, resume=False)
        first.add(row())
        space.open(PLAN, resume=False)
        (tmp_path / "w/iteration-7").mkdir()
        (tmp_path / "w/iteration-8").mkdir()
        (tmp_path / "w/iteration-8/plan.json").write_text('{"tasks": ["t1"], "kind": ')
        assert space.of_task("t1") == first.folder
        again = space.open(mine, resume=False)
        assert (again.folder, again.settled(row().key)) == (first.folder, True)
        assert space.of_task("t2") is None
        with pytest.raises(EvalsRefused) as caught:
            space.open(mine.model_copy(update={"seed": 1}), resume=False)
    assert (caught.value.code, caught.value.details["differs"]) == ("evals_plan_changed", ["seed"])


def test_an_iteration_knows_every_task_that_went_on_with_it(tmp_path):
    """Who resumes it is written down beside who began it; a plan from before there were tasks is gone on with, too."""
    space = EvalWorkspace(tmp_path / "w")
    with space.alone():
        folder = space.begin(PLAN).folder
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(
            json.dumps({key: plan[key] for key in plan if key not in {"tasks", "repeats"}})
        )
        for task in ("t1", "t2", "t1"):
            assert space.open(PLAN.model_copy(update={"tasks": (task,)}), resume=True).folder == folder
    assert read_iteration(folder).plan.tasks == ("t1", "t2")
    assert space.of_task("t1") == space.of_task("t2") == folder
    assert space.numbers() == [1]


def test_an_iteration_that_was_taken_away_is_written_to_no_more(tmp_path):
    """Neither a folder, nor a row, nor figures: they would lie where nobody looks for them."""
    space = EvalWorkspace(tmp_path / "w")
    with space.alone():
        folder = space.begin(PLAN)
        folder.add(row())
        (folder.folder / "rows.jsonl").unlink()
        (folder.folder / "plan.json").unlink()
        folder.folder.rmdir()
        for act in (
            lambda: folder.row_folder(row("b").key).__enter__(),
            lambda: folder.add(row("b")),
            lambda: folder.close(dict),
        ):
            with pytest.raises(EvalsRefused) as caught:
                act()
            assert caught.value.code == "evals_none"
    assert not folder.folder.exists()


def test_the_keys_of_a_plan_are_all_its_rows():
    """Each evaluation on each side as often as it is run, in that order."""
    plan = PLAN.model_copy(update={"repeats": {"b": 2}, "total": 6})
    assert plan.keys() == [
        *(("a", "with_skill", 0), ("a", "without_skill", 0)),
        *(("b", "with_skill", 0), ("b", "with_skill", 1), ("b", "without_skill", 0), ("b", "without_skill", 1)),
    ]


def put(folder, *lines, plan=None):
    """Write an iteration as somebody else may have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan or PLAN.model_dump_json())
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def line_of(**facts):
    """The line of a row with fields of any shape."""
    return json.dumps({"eval": "a", "status": "passed"} | facts)


@pytest.mark.parametrize(
    "line",
    [
        *(line_of(facts=facts) for facts in (
            [], {"pulled": 1}, {"pulled": {"s": []}}, {"pulled": {"s": {"f": 3}}}, {"rank": "first"}, {"rank": 0},
            {"rank": -1}, {"rank": 10**30}, {"expects": []}, {"acceptable": 7}, {"model": {}},
        )),
        *(line_of(**{name: value}) for name in ("tokens", "judge_tokens", "steps", "repeat", "duration_ms")
          for value in (-1, 10**400, 1.5)),
        *(line_of(cost=0).replace("0", value) for value in ("NaN", "Infinity", "1e400", "-1", "1e300", '"much"')),
        *(line_of(facts={"more": 0}).replace("0", value) for value in ("NaN", "1e400", "9" * 5000, "[" * 400 + "]" * 400)),
        *(line_of(side=side) for side in ("third", "", "../../up", "WITH_SKILL")),
        *(line_of(**{name: 7}) for name in ("picked", "verdicts", "error", "folder", "skill", "status")),
    ],
)  # fmt: skip
def test_rows_of_strangers_are_refused_with_their_line(tmp_path, line):
    """Facts of other shapes, numbers without bound and sides that are not planned: one refusal, which says where."""
    put(tmp_path, line_of(), line)
    with pytest.raises(EvalsRefused, match=r"line 2 of rows\.jsonl: ") as refused:
        read_iteration(tmp_path)
    assert refused.value.code == "evals_invalid"
    assert len(refused.value.message) < 1000 + len(str(tmp_path))


@pytest.mark.parametrize("kind", ["retrieval", "trigger", "run"])
def test_facts_nobody_knows_are_kept(tmp_path, kind):
    """What another version wrote beside ours stays with its row, and figures, page and JUnit are made of it."""
    more = {"later": {"deep": [1, None, "x"]}, "rank": None, "expects": True}
    put(tmp_path, line_of(facts=more, tokens=2**53), plan=PLAN.model_copy(update={"kind": kind}).model_dump_json())
    iteration = read_iteration(tmp_path)
    assert iteration.rows[0].facts == more
    assert figures_of(iteration)
    assert "later" not in report(iteration).read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"sides": ["../../up"]}, {"sides": ["a", "a"]}, {"sides": ["/etc"]}, {"sides": [""]}, {"sides": []}, {"sides": ["delta"]},
        {"total": -1}, {"total": 10**400}, {"temperature": "warm"}, {"evals": []}, {"kind": "dance"},
    ],
)  # fmt: skip
def test_plans_of_strangers_are_refused(tmp_path, changed):
    """A side is the name of a folder in the iteration and nothing else; amounts have a bound."""
    plan = json.dumps(PLAN.model_dump(mode="json") | changed)
    with pytest.raises(EvalsRefused, match=r"plan\.json: ") as refused:
        read_iteration(put(tmp_path, plan=plan))
    assert refused.value.code == "evals_invalid"


@pytest.mark.parametrize("name", ["plan.json", "rows.jsonl"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name):
    """A pipe, a link or a folder in place of a file is refused at once."""
    outside = put(tmp_path / "other", line_of()) / name
    place = put(tmp_path / "mine", line_of()) / name
    for make in (lambda: os.mkfifo(place), lambda: place.symlink_to(outside), place.mkdir):
        place.unlink()
        make()
        with pytest.raises(EvalsRefused, match=r"mine is no iteration that can be read: "):
            read_iteration(place.parent)


def test_iterations_of_another_tool_are_left_alone(tmp_path):
    """One with figures alone is none of ours: it is refused, not written to, and the next number is taken."""
    space = EvalWorkspace(tmp_path)
    theirs = tmp_path / "iteration-3/benchmark.json"
    theirs.parent.mkdir()
    theirs.write_text('{"run_summary": {"with_skill": {"pass_rate": {"mean": 1}}}}')
    before = theirs.read_bytes()
    for use in (lambda: read_iteration(theirs.parent), lambda: report(theirs.parent), lambda: space.resume(PLAN)):
        with pytest.raises(EvalsRefused, match=r"no iteration that can be read: .*plan\.json") as refused:
            use()
        assert refused.value.code == "evals_invalid"
    assert space.begin(PLAN).folder.name == "iteration-4"
    assert ([path.name for path in theirs.parent.iterdir()], theirs.read_bytes()) == (["benchmark.json"], before)


@pytest.mark.parametrize("content", ['{"run_summary": {}}', "[]", "{", "NaN", ""])
def test_figures_of_another_tool_are_not_written_over(tmp_path, content):
    """An iteration of ours in which another tool put its figures is not gone on with; without them it is."""
    space = EvalWorkspace(tmp_path)
    folder = space.begin(PLAN).folder
    (folder / "benchmark.json").write_text(content)
    with pytest.raises(EvalsRefused, match="is of another tool") as refused:
        space.resume(PLAN)
    assert (refused.value.code, (folder / "benchmark.json").read_text()) == ("evals_invalid", content)
    (folder / "benchmark.json").unlink()
    again = space.resume(PLAN)
    again.close(lambda iteration: {})
    assert space.resume(PLAN).folder == folder


def test_numbers_have_an_end(tmp_path):
    """A number beyond the last is nobody's; where the last one is taken, it is said, and nothing is written over."""
    space = EvalWorkspace(tmp_path)
    for name in ("iteration-999999999999", "iteration-0", "iteration-01", "iteration--5", "iteration-\u0663"):
        (tmp_path / name).mkdir()
    assert space.begin(PLAN).folder.name == "iteration-1"
    (tmp_path / "iteration-999999").write_text("no folder")
    with pytest.raises(EvalsRefused, match="none has a higher number") as refused:
        space.begin(PLAN)
    assert (refused.value.code, (tmp_path / "iteration-999999").read_text()) == ("evals_invalid", "no folder")
    with pytest.raises(EvalsRefused):
        space.resume(PLAN)
