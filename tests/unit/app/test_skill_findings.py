"""`skills.findings`: what check says of one skill, its imports, tools, costs and standing, within what a caller may know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import Identity
from kdskills.app.operations import Context
from kdskills.errors import BadRequest

READER = Context(identity=Identity(agent="ann", scopes=frozenset({"skills:read"}), door="http"))


def make(bundle: Path, full_id: str, facts: str, body: str = "Do it.", **files: str) -> Path:
    """Write a skill and return its folder."""
    folder = bundle / "skills" / full_id.replace(".", "/")
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(
        f"---\nname: {folder.name}\ndescription: Does it. Use it when asked.\n{facts}---\n{body}\n"
    )
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of a skill with findings, imports, tools and a short variant."""
    bundle = tmp_path / "bundle"
    tools = "tools:\n- {id: archive.ask, required: true, why: To ask.}\n- {id: archive.tell}\n"
    make(bundle, "desk.brief", "imports: [style, billing.dunning, desk.nothing]\nversion: [1]\n",
         "See references/none.md.", tools_yaml=tools, compact_md="Short.\n")  # fmt: skip
    make(bundle, "desk.style", "imports: [words]\n")
    make(bundle, "desk.words", "")
    make(bundle, "desk.paper", "imports: [brief]\n")
    make(bundle, "billing.dunning", "")
    (bundle / "skills_descriptor.yaml").write_text("agents_config: {ann: {disabled: [billing.*, desk.paper]}}\n")
    return bundle


@pytest.fixture
def host(bundle: Path, tmp_path: Path) -> Host:
    """A Host whose project `local` has the bundle."""
    return Host(Settings(bundle=bundle, state_dir=tmp_path / "state", index_dir=None), entry_points=False)


async def findings(host: Host, ref: str = "desk.brief", context: Context | None = None, **more: Any) -> Any:
    """Return what is told of a skill."""
    return await host.invoke("skills.findings", {"ref": ref} | more, context or Context())


async def test_findings_are_those_of_check(host: Host, bundle: Path) -> None:
    """Code, path, line and severity are those that `skills.check` gives for the skill's folder."""
    answer = await findings(host)
    checked = await host.call("skills.check", path=bundle / "skills/desk/brief")
    places = [(each.code, each.path, each.line, each.severity) for each in answer.findings]
    assert places == [(each.code, each.path, each.line, each.severity) for each in checked.diagnostics]
    assert {"tool_not_known"} <= {code for code, *_ in places}
    assert (answer.errors, answer.warnings) == (checked.errors, checked.warnings)
    (bundle / "skills_descriptor.yaml").write_text("check: {ignore: [tool_not_known]}\n")
    assert "tool_not_known" not in {each.code for each in (await findings(host)).findings}


async def test_imports_are_a_graph(host: Host) -> None:
    """Edges of the whole closure, what is refused with its code, and who imports the skill."""
    answer = await findings(host, consumer="ann")
    assert {(each.importer, each.imported, each.code) for each in answer.edges} == {
        ("desk.brief", "desk.style", None),
        ("desk.brief", "billing.dunning", "denied"),
        ("desk.brief", "desk.nothing", "unknown_skill"),
        ("desk.style", "desk.words", None),
    }
    assert answer.importers == ("desk.paper",)


async def test_tools_as_the_gate_sees_them(host: Host) -> None:
    """Whether a tool is there is told where a tool gate is asked for."""
    assert [(each.id, each.required, each.present) for each in (await findings(host)).tools] == [
        ("archive.ask", True, None), ("archive.tell", False, None),
    ]  # fmt: skip
    answer = await findings(host, tools=["archive.ask"])
    assert [each.present for each in answer.tools] == [True, False]


async def test_costs_and_digests(host: Host) -> None:
    """Tokens of each variant there is; digests are those of `skills.show`; evaluations change only that of the whole tree."""
    answer, whole = await findings(host), await host.call("skills.show", ref="desk.brief")
    assert answer.tokens == {"full": whole.tokens, "compact": 2}
    assert (answer.digest, answer.tree_digest) == (whole.digest, whole.tree_digest)
    assert answer.shown_digest == answer.tree_digest
    assert (await findings(host, "desk.words")).tokens.keys() == {"full"}
    assert answer.standing.verdict == "unlocked"


async def test_evaluations_are_not_told(host: Host, bundle: Path) -> None:
    """Nothing of what lies in `evals/` is in an answer, but that the tree is another one."""
    before = await findings(host)
    (bundle / "skills/desk/brief/evals").mkdir()
    (bundle / "skills/desk/brief/evals/evals.json").write_text("{broken 42-is-the-answer")
    after = await findings(host, context=READER, ref="desk.words")
    assert "42-is-the-answer" not in after.model_dump_json()
    told = await findings(host)
    assert "evals" not in told.model_dump_json()
    assert (told.shown_digest == before.shown_digest, told.tree_digest == before.tree_digest) == (True, False)


async def test_a_caller_elsewhere_knows_its_own(host: Host, bundle: Path) -> None:
    """Imports and importers that its agent may not use do not exist, nor does a standing; nor does a refused skill."""
    (bundle / "skills/desk/brief/tools.yaml").unlink()
    (await host.project_skills("local")).subsystem.refresh()
    answer = await findings(host, context=READER)
    assert {each.imported for each in answer.edges} == {"desk.style", "desk.words"}
    assert (answer.importers, answer.standing) == ((), None)
    for ref in ("billing.dunning", "desk.nothing"):
        with pytest.raises(BadRequest) as refused:
            await findings(host, ref, READER)
        assert refused.value.code == "unknown_skill"
    assert str(bundle) not in answer.model_dump_json()


async def test_a_bundle_without_files_of_its_own(tmp_path: Path) -> None:
    """A bundle named by its folder answers, too, whatever its descriptor's `check` says."""
    make(tmp_path / "b", "desk.words", "")
    host = Host(Settings(index_dir=None), entry_points=False)
    answer = await host.call("skills.findings", bundle=tmp_path / "b", ref="words")
    assert (answer.full_id, answer.errors, answer.edges) == ("desk.words", 0, ())
