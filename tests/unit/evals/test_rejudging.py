"""Iterations judged again: by what was kept alone, whatever the checks and the judge are by now."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.errors import BadRequest, ModelFailed
from kdskills.evals import judge
from kdskills.evals.results import EvalsRefused, read_iteration
from kdskills.models import Usage
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import read_file
from kdskills.solver import PlainWiring
from kdskills.testing.models import ScriptedModel, call
from tests.unit.evals.planted import answer, evaluation, load, quoted
from tests.unit.solver.conftest import FakeExecutor

ROW = evaluation("sum", assertions=("It says that sales rose.",), checks=({"contains": "written"},))


def silent(**models):
    """A wiring whose every model is one that a test handed in."""
    return PlainWiring(executors={"auto": FakeExecutor()}, models=models)


def contents(*folder):
    """What lies in a folder: the bytes of files, and None for folders."""
    top = Path(*folder)
    return {path.relative_to(top).as_posix(): path.read_bytes() if path.is_file() else None for path in top.rglob("*")}


@pytest.fixture
async def kept(evaluate):
    """An iteration of two rows, with and without the skill, that nobody judged; a run that is judged is judged again."""

    def write(request):
        rose = "sales rose by half" if "sales figures" in request.instructions else "no idea"
        return call("react_write", path="sub/note.txt", text=rose)

    return await evaluate([ROW], {"sum": [write, answer("written")]}, "run")


def facts(iteration):
    """Side, status and verdicts of each row."""
    return [(row.side, row.status, [verdict.passed for verdict in row.verdicts]) for row in iteration.rows]


async def test_what_was_kept_is_judged_without_its_model(kept, evaluate):
    """Another judge and other checks grade the same outputs into an iteration of its own; no model but the judge is asked."""
    assert facts(kept) == [("with_skill", "ungraded", [True, None]), ("without_skill", "ungraded", [True, None])]
    asked, before = len(evaluate.model.requests), contents(kept.folder)
    row = replace(
        ROW, checks=({"contains": {"path": "sub/note.txt", "text": "rose"}}, {"skill_used": "acme.sales"}, {"max_tokens": 220})
    )  # fmt: skip
    model = ScriptedModel([quoted("sales rose by half")] * 2)
    again = await judge([row], kept.folder, judge=model, wiring=silent())
    assert facts(again) == [
        ("with_skill", "failed", [True, False, True, True]),
        ("without_skill", "failed", [False, False, True, False]),
    ]
    assert (len(evaluate.model.requests), len(model.requests)) == (asked, 2)
    assert again.folder.endswith("iteration-2")
    assert (again.plan.judged, again.plan.judge, again.plan.model) == ("iteration-1", "scripted", "planted:model")
    assert [row.tokens for row in again.rows] == [220, 220], "what the turn took, not what judging takes"
    assert contents(kept.folder) == before
    new = contents(again.folder)
    for each in again.rows:
        for name in ("outputs/sub/note.txt", "transcript.jsonl"):
            assert new[f"{each.folder}/{name}"] == before[f"{each.folder}/{name}"]
        assert json.loads(new[f"{each.folder}/grading.json"])["summary"]["passed"] in {1, 3}
    assert json.loads(new["benchmark.json"])["kdskills"]["judged"] == "iteration-1"


async def test_what_was_judged_again_is_judged_once_more(kept):
    """The new iteration stands alone: it is judged again when the one it came of is gone."""
    again = await judge([ROW], kept.folder, judge=None, wiring=silent())
    shutil.rmtree(kept.folder)
    third = await judge([ROW], again.folder, judge=ScriptedModel([quoted("sales rose by half")] * 2), wiring=silent())
    assert facts(third) == [("with_skill", "passed", [True, True]), ("without_skill", "failed", [True, False])]


async def test_a_judge_that_failed_is_asked_again(kept):
    """Its failure is an error of the new rows, and going on judges these alone; a named judge is opened and closed."""
    model = ScriptedModel([quoted("sales rose by half"), ModelFailed("overloaded")])
    broken = await judge([ROW], kept.folder, judge=model, wiring=silent())
    assert [row.status for row in broken.rows] == ["passed", "error"]
    once = ScriptedModel([quoted("it says nothing")])
    once.name = "scripted"
    again = await judge([ROW], kept.folder, judge="j:x", wiring=silent(**{"j:x": once}), resume=True)
    assert (again.folder, [row.status for row in again.rows]) == (broken.folder, ["passed", "failed"])
    assert len(once.requests) == 1


async def test_first_picks_are_held_to_other_answers(evaluate):
    """What `trigger` saw is compared anew, without any model, when the evaluation allows another skill by now."""
    iteration = await evaluate([evaluation("a")], {"a": [load("brief")]})
    assert facts(iteration) == [("with_skill", "failed", [False])]
    again = await judge([evaluation("a", acceptable=("acme.brief",))], iteration.folder, wiring=silent())
    assert facts(again) == [("with_skill", "passed", [True])]


async def test_what_was_not_kept_is_not_judged(evaluate):
    """A turn that did not end stays its error, evaluations that are gone are left out, and another prompt is told."""
    evals = [evaluation(name, checks=({"contains": "done"},)) for name in ("ends", "fails", "gone", "changed")]
    planted = {name: [answer()] for name in ("ends", "gone", "changed")} | {"fails": [ModelFailed("no key")]}
    kept = await evaluate(evals, planted, "run")
    now = [evals[0], evals[1], replace(evals[3], prompt="Something else.")]
    again = await judge(now, kept.folder, wiring=silent())
    assert {row.eval: (row.status, row.error and row.error[0]) for row in again.rows} == {
        "ends": ("passed", None),
        "fails": ("error", "model_failed"),
        "changed": ("error", "eval_changed"),
    }
    assert (again.missing, read_iteration(again.folder).rows) == (0, again.rows)


async def test_hostile_leftovers_are_not_followed(kept, tmp_path):
    """Links, transcripts that are none and folders that lead out are errors of their rows; nothing outside is copied."""
    secret = tmp_path / "secret.txt"
    secret.write_text("sales rose by half, says swordfish")
    first, second = (Path(kept.folder, row.folder) for row in kept.rows)
    (first / "outputs/link.txt").symlink_to(secret)
    os.mkfifo(first / "outputs/pipe")
    (second / "transcript.jsonl").unlink()
    (second / "transcript.jsonl").symlink_to(secret)
    model = ScriptedModel([quoted("says swordfish there")] * 2)
    again = await judge([ROW], kept.folder, judge=model, wiring=silent())
    assert [(row.status, row.error and row.error[0]) for row in again.rows] == [("failed", None), ("error", "symlink")]
    assert set(contents(again.folder, again.rows[0].folder, "outputs")) == {"sub", "sub/note.txt"}
    assert all("swordfish" not in request.messages[0].text for request in model.requests)
    for text in ("", "no json\n", "[" * 100_000 + "\n", '{"schema": "x"}\n'):
        (second / "transcript.jsonl").unlink()
        (second / "transcript.jsonl").write_text(text)
        again = await judge([ROW], kept.folder, wiring=silent())
        assert again.rows[1].status == "error", text[:20]
    rows = first.parent.with_name("rows.jsonl")
    rows.write_text(json.dumps(kept.rows[0].model_dump(mode="json") | {"folder": "../../../etc"}) + "\n")
    again = await judge([ROW], kept.folder, wiring=silent())
    assert again.rows[0].error[0] == "path_unsafe"


async def test_what_cannot_be_judged_is_refused(kept, evaluate):
    """Another kind, no row of the evaluations, an unknown check: each is said before anything is written."""
    ranked = await evaluate([evaluation("a")], {}, "retrieval")
    for evals, folder, error, code in (
        ([evaluation("a")], ranked.folder, EvalsRefused, "evals_other_kind"),
        ([evaluation("a")], kept.folder, BadRequest, "evals_missing"),
        ([replace(ROW, checks=({"contain": "x"},))], kept.folder, BadRequest, "check_invalid"),
        ([ROW], f"{kept.folder}0", EvalsRefused, "evals_invalid"),
    ):
        with pytest.raises(error) as refused:
            await judge(evals, folder, wiring=silent())
        assert refused.value.code == code
    assert set(contents(kept.folder, "..")) & {"iteration-2", "iteration-3"} == {"iteration-2"}


async def test_no_workspace_lies_where_skills_see_it(kept, folder, tmp_path):
    """Iterations in the bundle, in a skill's folder or where its skills are otherwise are not judged into; nothing is made."""
    outside = tmp_path / "outside"
    (outside / "skills_descriptor.yaml").parent.mkdir()
    (outside / "skills_descriptor.yaml").write_text(f"custom_skills_root: {tmp_path / 'elsewhere'}\n")
    shutil.copytree(folder / "skills", tmp_path / "elsewhere")
    (tmp_path / "door").symlink_to(folder)
    for bundle, place in (
        (folder, folder / "work"),
        (tmp_path / "door", folder / "work"),
        (folder, tmp_path / "door/work"),
        (folder / "skills/acme/sales", folder / "skills/acme/sales/work"),
        (outside, tmp_path / "elsewhere/work"),
    ):
        shutil.copytree(Path(kept.folder), place / "iteration-1", dirs_exist_ok=True)
        with pytest.raises(EvalsRefused) as refused:
            await judge([ROW], place / "iteration-1", bundle=bundle, wiring=silent())
        assert refused.value.code == "workspace_inside", place
        assert [path.name for path in place.iterdir()] == ["iteration-1"]
    assert (await judge([ROW], kept.folder, bundle=outside, wiring=silent())).folder.endswith("iteration-2")


async def test_sides_of_strangers_lead_nowhere(kept, tmp_path):
    """An iteration whose side leads out of it is refused before anything is written or taken away."""
    (tmp_path / "up").mkdir()
    for path in (Path(kept.folder, name) for name in ("plan.json", "rows.jsonl")):
        replace_file(path, read_file(path.parent, path.name, limit=10**6).data.replace(b"with_skill", b"../../../up"))
    before = contents(tmp_path)
    with pytest.raises(EvalsRefused) as refused:
        await judge([ROW], kept.folder, wiring=silent())
    assert (refused.value.code, contents(tmp_path)) == ("evals_invalid", before)


async def test_going_on_keeps_to_the_judges_ceiling(kept):
    """The longest reply of the judge is remembered, not that of the model that was judged."""
    yes = replace(quoted("sales rose by half"), usage=Usage(10, 29_990))
    first = ScriptedModel([yes, yes])
    half = await judge([ROW], kept.folder, judge=first, wiring=silent(), max_tokens_total=50_000)
    assert [(row.status, row.longest_reply) for row in half.rows] == [("passed", 29_990), ("error", 29_990)]
    again = await judge([ROW], kept.folder, judge=first, wiring=silent(), max_tokens_total=50_000, resume=True)
    assert (again.rows, again.rows[1].error[0], len(first.requests)) == (half.rows, "ceiling_met", 1)
