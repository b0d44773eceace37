"""A turn from the request to a cited answer."""

from kdskills.solver import TurnResult
from kdskills.testing.models import ScriptedModel, call, say, together


async def test_a_turn_loads_reads_runs_and_answers_with_citations(build, executor, tmp_path):
    """The whole way: load a skill, read its notes, run its script, answer with a citation that resolves."""
    from kdskills.solver import ReactSolver

    executor.outcome = {"files": {"out/report.html": b"<p>42</p>"}}
    model = ScriptedModel(
        [
            call("skills_load", names=["sales"]),
            together(call("react_read", refs=["sk:sales/references/notes.md"]), call("skills_read", path="SKILL.md")),
            call("skills_run_script", path="scripts/sum.py", args=["data/sales.csv"]),
            say("North grew to 42 [[S:1]]."),
        ]
    )
    async with build(model=model) as system:
        result = await ReactSolver(system).run("Which region grew?")
    assert (result.status, result.stop_reason, result.text) == ("final", "answer", "North grew to 42 [[S:1]].")
    assert result.rendered == "North grew to 42 [Sales guide](https://example.org/sales)."
    assert (result.cited, result.citation_issues) == ((1,), ())
    assert [use.id for use in result.skills_used] == ["acme.sales"]
    assert [[one.tool for one in step.calls] for step in result.steps] == [
        ["skills.load"],
        ["react.read", "skills.read"],
        ["skills.run_script"],
        [],
    ]
    assert [step.active_after for step in result.steps] == [("sales",)] * 4
    assert all(one.ok for step in result.steps for one in step.calls)
    assert [file.path for file in result.files] == ["out/report.html"]
    assert "See [[S:1]]" in model.requests[1].instructions
    assert result.replayed
    assert TurnResult.from_transcript(tmp_path / "transcripts" / f"{result.turn_id}.jsonl") == result
