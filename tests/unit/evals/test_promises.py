"""What evaluations promise as a whole, by planted models: exact figures of many rows, nothing asked twice, no lie that helps."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.errors import ModelFailed
from kdskills.evals import judge
from kdskills.evals.results import read_iteration
from kdskills.evals.runs import figures_of
from kdskills.models import ModelPrice, Usage
from kdskills.testing.models import ScriptedModel, call
from tests.unit.evals.planted import PlantedModel, answer, evaluation, load, quoted

LIES = ("The report is there.", "sales rose by half, as asked", "Knows everything about it.", "prompt a and prompt b")


def benchmark_of(iteration):
    """What stands in an iteration's `benchmark.json`."""
    return json.loads(Path(iteration.folder, "benchmark.json").read_text())


async def test_planted_sides_and_repeats_give_planted_figures(evaluate):
    """Of 4 rows, each 3 times, on 2 sides: shares, intervals, pairs, p, tokens and differences are those that were planted."""
    picks = {"a": ("sales", "brief"), "b": ("sales", "brief"), "c": ("sales", "sales"), "d": ("letter", "brief")}

    def picking(old, new):
        return lambda request: replace(
            load(new if "Says it anew." in request.instructions else old),
            usage=Usage(290, 10) if "Says it anew." in request.instructions else Usage(90, 10),
        )

    iteration = await evaluate(
        [evaluation(name) for name in picks],
        {name: [picking(*pair)] for name, pair in picks.items()},
        against=("anew", {"acme.letter": "Says it anew."}),
        repeat=3,
        jobs=4,
    )
    assert (len(iteration.rows), iteration.missing, len(evaluate.model.requests)) == (24, 0, 24)
    figures = benchmark_of(iteration)
    summary, ours = figures["run_summary"], figures["kdskills"]["figures"]
    assert {name: summary[name]["pass_rate"]["mean"] for name in ("with_skill", "anew")} == {
        "with_skill": 0.75,
        "anew": 0.25,
    }
    assert [summary[name]["tokens"] for name in ("with_skill", "anew")] == [
        {"mean": 100, "stddev": 0},
        {"mean": 300, "stddev": 0},
    ]
    assert (summary["delta"]["pass_rate"], summary["delta"]["tokens"]) == (0.5, -200)
    assert ours["compared"] == {"only_first": 6, "only_second": 0, "pairs": 12, "p": pytest.approx(2 / 2**6, abs=1e-4)}
    assert ours["with_skill"]["recall"] == {"hits": 9, "total": 12, "value": 0.75, "low": 0.4677, "high": 0.9111}
    assert ours["with_skill"]["confused"] == {"acme.sales": {"acme.letter": 3, "acme.sales": 9}}
    assert ours["anew"]["confused"] == {"acme.sales": {"acme.brief": 9, "acme.sales": 3}}
    assert ours == figures_of(read_iteration(iteration.folder))


async def test_a_broken_off_run_asks_nothing_twice(evaluate):
    """Broken off while both jobs ask a judge: what ended is asked of neither model again, and each row is there once."""
    evals = [evaluation(name, assertions=("It is done.",)) for name in "abcd"]
    planted = {name: [answer(f"it is done by {name}")] for name in "abcd"}
    reached, waiting = asyncio.Event(), Counter()

    class Judge(ScriptedModel):
        async def reply(self, request):
            if len(self.requests) == 4:
                waiting["jobs"] += 1
                if waiting["jobs"] == 2:  # a job asks when its row before is written
                    reached.set()
                await asyncio.Event().wait()
            return await super().reply(request)

    running = asyncio.create_task(evaluate(evals, planted, "run", judge=Judge([quoted("it is done by")] * 9), jobs=2))
    await asyncio.wait_for(reached.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    first = evaluate.model
    settled = read_iteration(evaluate.place / "iteration-1").rows
    assert len(settled) == 4
    again = ScriptedModel([quoted("it is done by")] * 9)
    rest = await evaluate(evals, planted, "run", judge=again, jobs=2, resume=True)
    assert Counter(row.key for row in rest.rows) == Counter(
        (name, side, 0) for name in "abcd" for side in rest.plan.sides
    )
    assert rest.rows[: len(settled)] == settled
    asked = Counter(request.messages[0].text for request in evaluate.model.requests)
    assert asked == Counter(f"prompt {row.eval}" for row in rest.rows[len(settled) :])
    assert (len(again.requests), len(first.requests) >= 4) == (4, True)
    assert (read_iteration(rest.folder).rows, rest.tokens_spent) == (
        rest.rows,
        sum(row.tokens + row.judge_tokens for row in rest.rows),
    )


@pytest.mark.parametrize("lie", LIES)
async def test_a_judge_that_lies_passes_no_row(evaluate, lie):
    """Its yes without evidence from the outputs fails rows of both sides, when they are run and when they are judged again."""
    row = evaluation("a", assertions=("It says that sales rose.",), expected="Knows everything about it.")
    planted = {"a": [call("react_write", path="note.txt", text="sales fell"), answer("nothing to tell")]}
    iteration = await evaluate([row], planted, "run", judge=ScriptedModel([quoted(lie)] * 2))
    again = await judge([row], iteration.folder, judge=ScriptedModel([quoted(lie)] * 2), wiring=evaluate.wiring)
    for each in (iteration, again):
        assert [(row.status, [verdict.passed for verdict in row.verdicts]) for row in each.rows] == [
            ("failed", [False])
        ] * 2
        assert benchmark_of(each)["run_summary"]["with_skill"]["pass_rate"]["mean"] == 0


@pytest.mark.parametrize("kind", ["trigger", "run"])
async def test_a_provider_that_fails_in_the_middle_is_no_failed_row(evaluate, kind):
    """After a first decision that was answered: the row is an error with its tokens, counts for no figure, and is run again."""
    evals = [evaluation("fine"), evaluation("odd")]
    search = replace(call("skills_search", query="sales"), usage=Usage(90, 10))
    fine = [load("sales"), answer()]
    iteration = await evaluate(evals, {"fine": fine, "odd": [search, ModelFailed("gone")]}, kind)
    odd = [row for row in iteration.rows if row.eval == "odd"]
    assert {(row.status, row.error, row.tokens, row.verdicts) for row in odd} == {
        ("error", ("model_failed", "gone"), 100, ())
    }
    summary = benchmark_of(iteration)
    assert summary["kdskills"]["rows"]["with_skill"]["error"] == 1
    assert "failed" not in summary["kdskills"]["rows"]["with_skill"]
    again = await evaluate(evals, {"odd": [search, *fine]}, kind, resume=True)
    assert {row.status for row in again.rows} == {"passed" if kind == "trigger" else "ungraded"}
    assert evaluate.model.asked("prompt fine") == 0


async def test_progress_has_rates_and_cost(evaluate):
    """After each row it is told how many ended how, with tokens, calls of models, seconds and what they cost."""
    told = []
    model = PlantedModel({f"prompt {name}": [load("sales")] for name in "ab"} | {"prompt c": [ModelFailed("x")]})
    prices = {"planted:model": ModelPrice(input=1.0, output=10.0)}
    await evaluate([evaluation(name) for name in "abc"], {}, model=model, tell=told.append, prices=prices)
    assert [(each.done, each.total, each.calls, each.tokens) for each in told] == [
        (0, 3, 0, 0), (1, 3, 1, 110), (2, 3, 2, 220), (3, 3, 3, 220),
    ]  # fmt: skip
    assert told[-1].counts == {"passed": 2, "error": 1}
    assert (told[0].cost, told[-1].cost, told[-1].seconds > 0) == (None, pytest.approx(2 * told[1].cost), True)
