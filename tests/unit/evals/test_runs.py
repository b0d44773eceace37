"""Runs of evaluations: planted outcomes give planted figures, and nothing is run twice, lost, or written outside."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.bundle import load_bundle
from kdskills.errors import BadRequest, ModelFailed
from kdskills.evals import read, report
from kdskills.evals.files import MAX_PROMPT
from kdskills.evals.metering import request_tokens
from kdskills.evals.results import EvalsRefused, EvalWorkspace, read_iteration
from kdskills.evals.runs import trigger_figures
from kdskills.evals.sides import redescribed
from kdskills.models import ModelReply, Usage
from kdskills.skills.model import estimate_tokens
from kdskills.testing.models import ScriptedModel, call, say
from tests.unit.evals.planted import PlantedModel, answer, evaluation, load, quoted

NOT_SALES = {"skill": None, "should_trigger": False, "owner": "acme.sales", "must_not": ("acme.sales",)}


def written(iteration, *names):
    """The text of a file of an iteration."""
    return Path(iteration.folder, *names).read_text()


def commit(folder):
    """Put a folder under version control as it is."""
    git = ["git", "-C", str(folder.parent), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q", "-b", "main"], ["add", folder.name], ["commit", "-q", "-m", "old"]):
        subprocess.run([*git, *words], check=True, capture_output=True)


def outcomes(iteration):
    """Status, skills and steps of each row by evaluation."""
    return {row.eval: (row.status, row.picked, row.steps) for row in iteration.rows}


async def test_planted_picks_give_planted_figures(evaluate):
    """Which skill is loaded first decides, `acceptable` is right as well, and where none should be, none may."""
    evals = [
        evaluation("right"),
        evaluation("late"),
        evaluation("wrong"),
        evaluation("close", acceptable=("acme.brief",)),
        evaluation("nothing"),
        evaluation("spared", **NOT_SALES),
        evaluation("unspared", **NOT_SALES),
        evaluation("none", skill=None),
        evaluation("banned", must_not=("acme.brief",)),
    ]
    search = call("skills_search", query="sales")
    iteration = await evaluate(
        evals,
        {
            "right": [load("sales")],
            "late": [search, load("sales")],
            "wrong": [load("brief")],
            "close": [load("brief")],
            "nothing": [answer()],
            "spared": [load("brief")],
            "unspared": [load("sales")],
            "none": [answer()],
            "banned": [call("skills_load", names=["sales", "brief"])],
        },
    )
    assert outcomes(iteration) == {
        "right": ("passed", ("acme.sales",), 1),
        "late": ("passed", ("acme.sales",), 2),
        "wrong": ("failed", ("acme.brief",), 1),
        "close": ("passed", ("acme.brief",), 1),
        "nothing": ("failed", (), 1),
        "spared": ("passed", ("acme.brief",), 1),
        "unspared": ("failed", ("acme.sales",), 1),
        "none": ("passed", (), 1),
        "banned": ("failed", ("acme.sales", "acme.brief"), 1),
    }
    tokens = {row.eval: row.tokens for row in iteration.rows}
    assert tokens == {name: 220 if name == "late" else 110 for name in tokens}
    assert len(evaluate.model.requests) == 10, "a model is not asked again once it has loaded a skill"
    assert evaluate.model.closed == 0, "a provider that was handed in stays open"
    summary = json.loads(written(iteration, "benchmark.json"))["run_summary"]
    assert summary["with_skill"]["pass_rate"]["mean"] == round(5 / 9, 4)
    assert summary["with_skill"]["tokens"]["mean"] == round(1100 / 9, 4)
    figures = trigger_figures(iteration.rows)
    assert (figures["precision"]["hits"], figures["precision"]["total"]) == (3, 6)
    assert (figures["recall"]["hits"], figures["recall"]["total"]) == (3, 6)
    assert figures["f1"] == 0.5
    assert figures["confused"] == {
        "(none)": {"(none)": 1, "acme.brief": 1, "acme.sales": 1},
        "acme.sales": {"(none)": 1, "acme.brief": 2, "acme.sales": 3},
    }


async def test_steps_end(evaluate):
    """A model that never loads anything has so many decisions and no last word."""
    search = [call("skills_search", query=f"q{number}") for number in range(9)]
    iteration = await evaluate([evaluation("lost")], {"lost": search}, max_steps=3)
    assert outcomes(iteration) == {"lost": ("failed", (), 3)}
    assert len(evaluate.model.requests) == 3


async def test_the_prompt_is_the_solvers(evaluate):
    """Rules, catalog and tools are those of a turn; skills loaded from the start are no pick."""
    await evaluate([evaluation("brief", skill="acme.brief", skills=("acme.letter",))], {"brief": [load("brief")]})
    request = evaluate.model.requests[0]
    assert "Reads sales figures." in request.instructions
    assert "Do letter." in request.instructions
    assert {"skills.load", "skills.read"} <= {tool.tool_id for tool in request.tools}


async def test_with_and_without(evaluate, folder):
    """Each side has a session, folder and files of its own; without, the skill is not there; outputs are kept."""
    (folder / "skills/acme/sales/evals/files").mkdir(parents=True)
    (folder / "skills/acme/sales/evals/files/in.csv").write_text("a,b\n")
    row = evaluation(
        "sum", files=("evals/files/in.csv",), folder=str(folder / "skills/acme/sales"), assertions=("Is right.",)
    )

    def write(request):
        return call("react_write", path="note.txt", text=str("sales figures" in request.instructions))

    planted = {"sum": [write, answer("written")]}
    iteration = await evaluate([row], planted, "run")
    assert [(each.side, each.status, each.tokens) for each in iteration.rows] == [
        ("with_skill", "ungraded", 220),
        ("without_skill", "ungraded", 220),
    ]
    for each, text in zip(iteration.rows, ("True", "False"), strict=True):
        assert written(iteration, each.folder, "outputs/note.txt") == text
        assert json.loads(written(iteration, each.folder, "timing.json"))["total_tokens"] == 220
        assert json.loads(written(iteration, each.folder, "grading.json"))["assertion_results"] == []
        assert "turn.finished" in written(iteration, each.folder, "transcript.jsonl")
    assert iteration.rows[1].folder == "eval-sum/without_skill"


async def test_outcomes_are_graded_by_checks_and_a_judge(evaluate):
    """Both sides are held to the same checks and assertions; the judge's calls are no tokens of the row, and are told by name."""

    def write(request):
        return call(
            "react_write", path="note.txt", text="sales rose by half" if "sales figures" in request.instructions else ""
        )

    checks = ({"contains": {"path": "note.txt", "text": "rose"}}, {"max_tokens": 1000})
    row = evaluation("sum", assertions=("It says that sales rose.",), checks=checks)
    judge = ScriptedModel([quoted("sales rose by half"), quoted("sales rose by half")])
    iteration = await evaluate([row], {"sum": [write, answer("written")]}, "run", judge=judge)
    assert [
        (each.side, each.status, [verdict.passed for verdict in each.verdicts], each.tokens) for each in iteration.rows
    ] == [
        ("with_skill", "passed", [True, True, True], 220),
        ("without_skill", "failed", [False, True, False], 220),
    ]
    assert (iteration.plan.judge, iteration.rows[0].verdicts[2].by) == ("scripted", "scripted")
    graded = json.loads(written(iteration, iteration.rows[0].folder, "grading.json"))
    assert [each["evidence"] for each in graded["assertion_results"]][2] == "sales rose by half"
    assert all("with_skill" not in request.messages[0].text for request in judge.requests)


async def test_a_judge_that_fails_makes_the_row_an_error_that_is_run_again(evaluate):
    """The row is not failed and not lost; going on asks again, with a judge named and opened by the wiring."""
    row = evaluation("sum", assertions=("It is done.",))
    planted = {"sum": [answer("it is done now")]}
    broken = ScriptedModel([ModelFailed("overloaded")] * 2)
    iteration = await evaluate([row], planted, "run", judge=broken)
    assert [(each.status, each.error) for each in iteration.rows] == [("error", ("model_failed", "overloaded"))] * 2
    judge = ScriptedModel([quoted("it is done now")] * 2)
    again = await evaluate([row], planted, "run", resume=True, judge="j:x", models={"j:x": judge})
    assert ([each.status for each in again.rows], again.folder) == (["passed", "passed"], iteration.folder)


async def test_a_check_nobody_understands_is_told_before_anything_runs(evaluate):
    """No model is asked, and no iteration is begun."""
    with pytest.raises(BadRequest, match="did you mean 'file_exists'") as refused:
        await evaluate([evaluation("a", checks=({"file_exist": "x"},))], {"a": []}, "run")
    assert (refused.value.code, evaluate.model.requests) == ("check_invalid", [])


async def test_a_provider_that_fails_is_an_error_and_run_again(evaluate):
    """Rows whose provider fails are errors, the others stand; going on runs the errors only."""
    evals = [evaluation(name) for name in ("one", "two", "three")]
    failing = {"one": [load("sales")], "two": [ModelFailed("no such key")], "three": [load("sales")]}
    iteration = await evaluate(evals, failing)
    assert {row.eval: row.status for row in iteration.rows} == {"one": "passed", "two": "error", "three": "passed"}
    assert iteration.rows[1].error == ("model_failed", "no such key")
    assert iteration.rows[1].pass_rate is None
    again = await evaluate(evals, {"two": [load("sales")]}, resume=True)
    assert again.folder == iteration.folder
    assert {row.eval: row.status for row in again.rows} == dict.fromkeys(("one", "two", "three"), "passed")
    assert evaluate.model.asked("prompt two") == len(evaluate.model.requests) == 1
    assert read_iteration(again.folder).rows == again.rows


async def test_what_a_provider_breaks_is_no_traceback(evaluate):
    """Whatever a plugin's provider raises is an error of its row."""
    iteration = await evaluate([evaluation("odd")], {"odd": [ZeroDivisionError("x")]})
    assert (iteration.rows[0].status, iteration.rows[0].error) == ("error", ("internal_error", "ZeroDivisionError"))


@pytest.mark.parametrize("usage", [Usage(-500, 10), Usage(10**30, 10), Usage(10, 10**30)])
async def test_what_a_provider_counts_wrong_is_an_error(evaluate, usage):
    """Fewer tokens than none, or more than there are: the row is an error, the others stand, and the iteration is readable."""
    planted = {"odd": [say("x", usage=usage)], "fine": [load("sales")]}
    iteration = await evaluate([evaluation("odd"), evaluation("fine")], planted)
    assert [row.status for row in iteration.rows] == ["error", "passed"]
    assert iteration.rows[0].error[0] == "model_usage_invalid"
    assert read_iteration(iteration.folder).rows == iteration.rows


async def test_the_ceiling_stops_before(evaluate):
    """No call begins that would go over it; what ended stands, and a higher ceiling goes on from there."""
    evals = [evaluation(str(number)) for number in range(6)]
    big = say("done", usage=Usage(10, 29_990))
    planted = {str(number): [big] for number in range(6)}
    iteration = await evaluate(evals, planted, max_tokens_total=70_000)
    assert (len(iteration.rows), iteration.missing) == (2, 4)
    assert sum(row.tokens for row in iteration.rows) == 60_000
    assert len(evaluate.model.requests) == 2
    rest = await evaluate(evals, planted, max_tokens_total=1_000_000, resume=True)
    assert (len(rest.rows), rest.missing, len(evaluate.model.requests)) == (6, 0, 4)


@pytest.mark.parametrize("usage", [Usage(10, 29_990), Usage(29_990, 10), None])
async def test_the_first_call_after_going_on_keeps_to_the_ceiling(evaluate, usage):
    """How long replies and requests were stands in the rows: going on asks nothing that would go over, also when it is estimated."""
    evals = [evaluation(str(number)) for number in range(4)]
    reply = say("done", usage=usage) if usage else replace(say("done " * 24_000), usage=Usage())
    planted = {str(number): [reply] for number in range(4)}
    first = await evaluate(evals, planted, max_tokens_total=70_000)
    assert (len(first.rows), first.missing, len(evaluate.model.requests)) == (2, 2, 2)
    again = await evaluate(evals, planted, max_tokens_total=70_000, resume=True)
    assert (again.rows, evaluate.model.requests) == (first.rows, [])
    rest = await evaluate(evals, planted, max_tokens_total=1_000_000, resume=True)
    assert (rest.missing, len(evaluate.model.requests)) == (0, 2)


async def test_the_ceiling_counts_all_that_is_sent(evaluate):
    """Tools are part of a request: where only its texts would fit, no call begins."""
    await evaluate([evaluation("a")], {"a": [answer()]})
    request = evaluate.model.requests[0]
    texts = estimate_tokens(request.instructions) + estimate_tokens(request.messages[0].text)
    assert request_tokens(request) > texts + 100
    refused = await evaluate([evaluation("a")], {"a": [answer()]}, max_tokens_total=texts + 100)
    assert (refused.rows, refused.missing, evaluate.model.requests) == ((), 1, [])


async def test_what_a_ceiling_broke_off_is_kept_and_counted(evaluate):
    """A row that had begun stays with its tokens, an error that is run again; its tokens count when it is gone on with."""
    big = replace(call("react_write", path="note.txt", text="half"), usage=Usage(10, 49_990))
    planted = {"a": [big, answer()]}
    broken = await evaluate([evaluation("a")], planted, max_tokens_total=70_000)
    assert [(row.status, row.error and row.error[0], row.tokens) for row in broken.rows] == [
        ("error", "ceiling_met", 50_000)
    ]
    again = await evaluate([evaluation("a")], planted, max_tokens_total=120_000, resume=True)
    assert (len(evaluate.model.requests), again.tokens_spent) == (1, 100_000)
    assert (read_iteration(again.folder).tokens_spent, len(again.rows)) == (100_000, 1)


async def test_the_ceiling_counts_the_judge(evaluate):
    """Its tokens are told beside those of the row, stop the run, and count when it is gone on with; the turn is kept."""
    row = evaluation("sum", assertions=("It is done.",))
    yes = replace(quoted("it is done now"), usage=Usage(10, 59_990))
    judge = ScriptedModel([yes, yes])
    planted = {"sum": [answer("it is done now")]}
    first = await evaluate([row], planted, "run", judge=judge, max_tokens_total=80_000)
    assert [(each.status, each.tokens, each.judge_tokens) for each in first.rows] == [("passed", 110, 60_000)]
    assert (first.missing, len(judge.requests), first.tokens_spent) == (1, 1, 60_110)
    again = await evaluate([row], planted, "run", judge=judge, max_tokens_total=60_500, resume=True)
    assert (again.rows, evaluate.model.requests, len(judge.requests)) == (first.rows, [], 1)
    rest = await evaluate([row], planted, "run", judge=judge, max_tokens_total=150_000, resume=True)
    assert [each.status for each in rest.rows] == ["passed", "passed"]


async def test_rows_run_at_once(evaluate):
    """As many rows as jobs are asked about at the same time, and no more."""
    both, at_once = asyncio.Barrier(2), []

    class Meeting(PlantedModel):
        async def reply(self, request):
            at_once.append(1)
            async with asyncio.timeout(20):
                await both.wait()
            assert len(at_once) <= 2
            at_once.pop()
            return await super().reply(request)

    model = Meeting({f"prompt {number}": [answer()] for number in range(4)})
    iteration = await evaluate([evaluation(str(number)) for number in range(4)], {}, model=model, jobs=2)
    assert len(iteration.rows) == 4


async def test_calls_are_spaced(evaluate):
    """With a rate, calls begin so far apart."""
    starts = []

    class Clock(PlantedModel):
        async def reply(self, request):
            starts.append(time.monotonic())
            return await super().reply(request)

    model = Clock({f"prompt {number}": [answer()] for number in range(4)})
    begun = time.monotonic()
    await evaluate([evaluation(str(number)) for number in range(4)], {}, model=model, jobs=4, rate=1200)
    assert all(start - begun >= 0.0499 * number for number, start in enumerate(starts))


async def test_an_interrupted_run_goes_on(evaluate):
    """What ended before a run was cancelled is written, with its figures; going on runs the rest."""
    reached = asyncio.Event()

    class Stuck(PlantedModel):
        async def reply(self, request):
            reply = await super().reply(request)
            if self.asked("prompt b"):
                reached.set()
                await asyncio.Event().wait()
            return reply

    evals, planted = [evaluation("a"), evaluation("b")], {"a": [answer()], "b": [answer()]}
    model = Stuck({f"prompt {name}": replies for name, replies in planted.items()})
    running = asyncio.create_task(evaluate(evals, {}, model=model))
    await asyncio.wait_for(reached.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    iteration = await evaluate(evals, planted, resume=True)
    assert [row.eval for row in iteration.rows] == ["a", "b"]
    assert [each.messages[0].text for each in evaluate.model.requests] == ["prompt b"]
    assert {path.name for path in (EvalWorkspace(iteration.folder).folder / "eval-b").iterdir()} == {"with_skill"}


async def test_another_plan_is_not_gone_on_with(evaluate, folder):
    """Another prompt, another skill or another bound begins anew; the refusal says what differs."""
    await evaluate([evaluation("a")], {"a": [answer()]})
    for options, words in (({"temperature": 1.0}, "temperature"), ({"repeat": 2}, "repeat")):
        with pytest.raises(EvalsRefused, match=words) as refused:
            await evaluate([evaluation("a")], {}, resume=True, **options)
        assert refused.value.code == "evals_plan_changed"
    (folder / "skills/acme/sales/SKILL.md").write_text("---\nname: sales\ndescription: New.\n---\nDo.\n")
    with pytest.raises(EvalsRefused, match="digests"):
        await evaluate([evaluation("a")], {}, resume=True)


@pytest.mark.parametrize("kind", ["retrieval", "trigger"])
async def test_no_workspace_lies_in_the_bundle(evaluate, folder, tmp_path, kind):
    """By its path, by a link, or by a link among its parents: it is refused, and nothing is made there."""
    (tmp_path / "link").symlink_to(folder / "skills")
    (tmp_path / "shop-workspace").symlink_to(folder)
    for workspace in (folder / "results", folder, tmp_path / "link/new", tmp_path / "link", None):
        with pytest.raises(EvalsRefused) as refused:
            await evaluate([evaluation("a")], {"a": [answer()]}, kind, workspace=workspace)
        assert refused.value.code == "workspace_inside"
    assert sorted(path.name for path in folder.iterdir()) == ["skills", "skills_descriptor.yaml"]


async def test_no_workspace_lies_in_another_bundle_of_the_run(evaluate, folder, tmp_path):
    """Neither in the bundle of a baseline nor in a folder of skills that a bundle has outside; nothing is made there."""
    shutil.copytree(folder, tmp_path / "old")
    old = load_bundle(tmp_path / "old")
    shutil.copytree(folder / "skills", tmp_path / "elsewhere")
    (folder / "skills_descriptor.yaml").write_text(f"custom_skills_root: {tmp_path / 'elsewhere'}\n")
    loaded = load_bundle(folder, allow_outside_bundle=True)
    for bundle, options, place in (
        (old, {"kind": "run", "baseline": loaded}, folder / "results"),
        (old, {"kind": "run", "baseline": loaded}, tmp_path / "elsewhere/results"),
        (loaded, {}, tmp_path / "elsewhere/acme/results"),
        (loaded, {"kind": "retrieval"}, tmp_path / "elsewhere"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(EvalsRefused) as refused:
            await evaluate([evaluation("a")], {"a": [answer()]}, bundle=bundle, workspace=place, **options)
        assert (refused.value.code, sorted(tmp_path.rglob("*"))) == ("workspace_inside", before)


async def test_no_iteration_behind_a_link_is_gone_on_with(evaluate, tmp_path):
    """What a link leads to may be somebody else's: nothing is appended to it."""
    first = await evaluate([evaluation("a")], {"a": [ModelFailed("x")]}, workspace=tmp_path / "other")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/iteration-1").symlink_to(first.folder)
    with pytest.raises(EvalsRefused, match="is a link"):
        await evaluate([evaluation("a")], {"a": [answer()]}, resume=True)


async def test_one_run_at_a_time(evaluate, tmp_path):
    """A second run on a workspace is refused, and writes nothing; nothing to go on with is said, too."""
    with pytest.raises(EvalsRefused) as refused:
        await evaluate([evaluation("a")], {}, resume=True)
    assert refused.value.code == "evals_none"
    with EvalWorkspace(tmp_path / "work").alone(), pytest.raises(EvalsRefused) as refused:
        await evaluate([evaluation("a")], {"a": [answer()]})
    assert refused.value.code == "evals_running"
    assert [path.name for path in (tmp_path / "work").iterdir()] == [".lock"]


async def test_hostile_names_stay_inside(evaluate, folder, tmp_path):
    """Ids are file names at most; files outside the evaluation's folder are an error of the row, and are not read."""
    (folder / "link").symlink_to("/etc/passwd")
    ids = ["../../up", "/etc/passwd", "a/b", "a b", "\ud800", "", ".", "x" * 5000, "con\0nul", "A b"]
    evals = [evaluation(name) for name in ids]
    evals += [
        evaluation(f"file{number}", files=(path,), folder=str(folder))
        for number, path in enumerate(("../../../etc/passwd", "/etc/passwd", "link", "skills"))
    ]
    planted = PlantedModel({row.prompt: [answer()] for row in evals})
    planted.planted["prompt \ufffd"] = [answer()]
    iteration = await evaluate(evals, {}, model=planted)
    assert len(iteration.rows) == len(evals)
    assert {row.error[0] for row in iteration.rows[len(ids) :]} <= {"path_unsafe", "symlink", "not_regular"}
    assert len({row.folder for row in iteration.rows}) == len(evals)
    assert {path.name for path in tmp_path.iterdir()} <= {"shop", "work", "turns"}
    assert all((tmp_path / "work/iteration-1" / row.folder).is_dir() for row in iteration.rows)
    assert read_iteration(iteration.folder).rows == iteration.rows


async def test_evaluations_that_cannot_be_run_are_refused(evaluate):
    """None at all, two of one id, no model, sides of another kind: each says so before anything is written."""
    row = evaluation("a")
    for evals, options, code in (
        ([], {}, "evals_missing"),
        ([row, row], {}, "eval_duplicate"),
        ([row], {"model": "replay"}, "model_missing"),
        ([row], {"baseline": "main"}, "side_invalid"),
        ([row], {"kind": "run", "against": ("x", {})}, "side_invalid"),
        ([row], {"kind": "run", "baseline": "sha256:00"}, "side_invalid"),
        *(
            ([row], {"against": (name, {})}, "side_invalid")
            for name in ("../up", "", "with_skill", "delta", "compared")
        ),
        ([row], {"against": ("x", {"acme.nobody": "…"})}, "descriptions_invalid"),
    ):
        with pytest.raises(BadRequest) as refused:
            await evaluate(evals, {}, **options)
        assert refused.value.code == code


async def test_descriptions_side_by_side(evaluate, folder):
    """The second side has the same skills but for the description; the bundle itself is left alone."""
    before = (folder / "skills/acme/sales/SKILL.md").read_bytes()

    def pick(request):
        return load("sales") if "Adds up: numbers" in request.instructions else load("brief")

    text = 'Adds up: numbers, "quoted" # and more'
    iteration = await evaluate([evaluation("a")], {"a": [pick]}, against=("new-words", {"acme.sales": text}))
    assert [(row.side, row.status) for row in iteration.rows] == [("with_skill", "failed"), ("new-words", "passed")]
    assert iteration.plan.digests["acme.sales"] != iteration.plan.digests["new-words:acme.sales"]
    assert iteration.plan.digests["acme.brief"] == iteration.plan.digests["new-words:acme.brief"]
    assert (folder / "skills/acme/sales/SKILL.md").read_bytes() == before


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("name: a\ndescription: old\nlicense: MIT\n", 'name: a\ndescription: "new"\nlicense: MIT\n'),
        ("description: >\n  old\n  words\nname: a\n", 'description: "new"\nname: a\n'),
        ("name: a\ndescription: with: colon\n", 'name: a\ndescription: "new"\n'),
        ("name: a\n", 'description: "new"\nname: a\n'),
    ],
)
def test_a_description_is_exchanged_alone(head, expected):
    """Folded, unquoted, last or missing: the description changes and nothing else of the file."""
    assert redescribed(f"---\n{head}---\nBody.\n", "new") == f"---\n{expected}---\nBody.\n"


async def test_an_older_version_is_the_other_side(evaluate, folder):
    """`baseline` names a commit of the repository the bundle lies in: its skills as they were then."""
    commit(folder)
    skill = folder / "skills/acme/sales/SKILL.md"
    skill.write_text(skill.read_text().replace("Reads sales", "Knows all"))
    planted = {"a": [lambda request: answer(str("Knows all figures." in request.instructions))]}
    iteration = await evaluate([evaluation("a")], planted, "run", baseline="main")
    assert [row.side for row in iteration.rows] == ["with_skill", "old_skill"]
    said = [written(iteration, row.folder, "transcript.jsonl") for row in iteration.rows]
    assert ['"text":"True"' in text.replace(": ", ":") for text in said] == [True, False]


async def test_repeats_lie_beside_one_another(evaluate):
    """Each repetition is a row with a folder of its own, in the published layout."""
    iteration = await evaluate([evaluation("a", repeat=2), evaluation("b")], {"a": [answer()], "b": [answer()]})
    assert [row.folder for row in iteration.rows] == ["eval-a/with_skill", "eval-a--2/with_skill", "eval-b/with_skill"]
    again = await evaluate([evaluation("b")], {"b": [answer()]}, repeat=3)
    assert len(again.rows) == 3
    assert again.folder.endswith("iteration-2")


async def test_a_model_by_name_is_opened_for_each_row(evaluate):
    """Names become providers by the wiring, and are closed when a row ends."""
    model = PlantedModel({"prompt a": [answer()], "prompt b": [answer()]})
    await evaluate([evaluation("a"), evaluation("b")], {}, model="tiny", models={"tiny": model})
    assert model.closed == 3, "one of each row, and one to look at its window"


async def test_plan_and_benchmark_say_what_was_run(evaluate):
    """Model and version, seed, temperature, digests of prompt, skills and evaluations, and the version of kdskills."""
    reply = ModelReply("x", usage=answer().usage, model="planted-2026-11")
    iteration = await evaluate([evaluation("a")], {"a": [reply]}, seed=7, temperature=0.5)
    facts = json.loads(written(iteration, "benchmark.json"))["kdskills"]
    assert (facts["model"], facts["seed"], facts["temperature"]) == ("planted:model", 7, 0.5)
    assert facts["models"] == ["planted-2026-11"]
    assert set(facts["digests"]) == {"acme.sales", "acme.brief", "acme.letter"}
    assert facts["prompt_digest"].startswith("sha256:")
    assert facts["kdskills"]
    assert facts["rows"] == {"with_skill": {"failed": 1}}
    assert evaluate.model.requests[0].settings == {"temperature": 0.5, "seed": 7}


@pytest.mark.parametrize("kind", ["retrieval", "trigger", "run"])
async def test_a_prompt_of_a_megabyte_is_run(evaluate, folder, kind):
    """The longest prompt that is read reaches the model whole, is judged, reported and gone on with, and counts for a ceiling."""
    prompt = ("sales figures of a very long year; " * (MAX_PROMPT // 35 + 1))[: MAX_PROMPT - 1] + "."
    (folder / "evals").mkdir()
    (folder / "evals/evals.json").write_text(json.dumps([{"id": "long", "prompt": prompt, "skill": "sales"}]))
    (row,) = read(folder).evals
    row = replace(row, assertions=("It is done.",)) if kind == "run" else row
    model, judge = ScriptedModel([answer("it is done")] * 2), ScriptedModel([quoted("it is done")] * 2)
    iteration = await evaluate([row], {}, kind, model=model, judge=judge if kind == "run" else None)
    assert [each.status for each in iteration.rows] == {"retrieval": ["passed"], "trigger": ["failed"]}.get(
        kind, ["passed", "passed"]
    )
    assert all(request.messages[0].text == prompt for request in model.requests)
    assert len(model.requests) == {"retrieval": 0, "trigger": 1}.get(kind, 2)
    assert report(read_iteration(iteration.folder)).is_file()
    again = await evaluate([row], {}, kind, model=model, judge=judge if kind == "run" else None, resume=True)
    assert (again.rows, len(model.requests)) == (iteration.rows, len(iteration.rows) if kind != "retrieval" else 0)
    if kind == "trigger":
        refused = await evaluate([row], {}, kind, model=model, max_tokens_total=MAX_PROMPT // 8)
        assert (refused.rows, refused.missing, len(model.requests)) == ((), 1, 1)
