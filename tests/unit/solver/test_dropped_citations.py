"""A citation dropped from a skill's text is no secret of the turn: its result says so."""

from __future__ import annotations

from pathlib import Path

from kdskills import load_bundle
from kdskills.app import Host, Settings
from kdskills.solver import ReactSolver, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say


async def test_the_result_names_dropped_citations(tmp_path: Path) -> None:
    """A body citing a source its skill does not have leaves one diagnostic in the turn's result, and its token is gone."""
    skill = tmp_path / "skills" / "odd"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: odd\ndescription: Cites nothing.\n---\nTrue [[S:7]].\n")
    model = ScriptedModel([call("skills.load", names=["odd"]), say("done")])
    wiring = Host(Settings(), entry_points=False).wiring
    async with SolverSystem(bundle=load_bundle(tmp_path), model=model, executor=None, wiring=wiring) as system:
        result = await ReactSolver(system).run("go")
    found = [(d.code, d.ref, d.path) for d in result.diagnostics if d.code == "citation_dropped"]
    assert found == [("citation_dropped", "7", "skill://public/odd/SKILL.md")]
    assert "[[S:7]]" not in model.requests[-1].instructions
