"""Consumers that nobody is, and references that name no skill: an author is told what was probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import Identity
from kdskills.app.operations import Context
from kdskills.bundle import SkillsDescriptor
from kdskills.errors import BadRequest, DescriptorError

DECISION = "solver.react.decision"


@pytest.fixture
def host() -> Host:
    """A Host without plugins of others."""
    return Host(Settings(index_dir=None), entry_points=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with three skills in two namespaces."""
    for full_id in ("billing/dunning", "billing/invoice", "desk/invoice"):
        folder = tmp_path / "desk/skills" / full_id
        folder.mkdir(parents=True)
        text = f"---\nname: {folder.name}\ndescription: Does {folder.name}. Use when asked.\n---\nDo it.\n"
        (folder / "SKILL.md").write_text(text)
    return tmp_path / "desk"


def rules(bundle: Path, text: str) -> None:
    """Write the bundle's descriptor."""
    (bundle / "skills_descriptor.yaml").write_text(text)


async def unknown(host: Host, bundle: Path) -> list[Any]:
    """Return what `check` finds of consumers."""
    found = (await host.call("skills.check", path=bundle)).diagnostics
    return [finding for finding in found if finding.code == "consumer_unknown"]


async def test_a_mistyped_consumer_is_an_error(host: Host, bundle: Path) -> None:
    """A consumer of the solver, mistyped in the rules, is an error with file, line and cure: its denials hold for nobody."""
    rules(bundle, "agents_config:\n  solver.react.decison: {disabled: [billing.dunning]}\n")
    found = await unknown(host, bundle)
    assert [(one.severity, one.path, one.line, one.ref) for one in found] == [
        ("error", "skills_descriptor.yaml", 2, "agents_config.solver.react.decison")
    ]
    assert DECISION in found[0].fix
    assert (await host.call("skills.check", path=bundle)).ok is False


async def test_listed_consumers_are_all_there_are(host: Host, bundle: Path) -> None:
    """Where a bundle lists its consumers, rules of any other are an error, those of the solver and of the list are not."""
    listed = f"consumers: [desk.editor]\nagents_config:\n  desk.editor: {{}}\n  {DECISION}: {{}}\n  '*': {{}}\n"
    rules(bundle, listed + "  desk.reader: {}\n")
    found = await unknown(host, bundle)
    assert [(one.severity, one.ref) for one in found] == [("error", "agents_config.desk.reader")]
    rules(bundle, "consumers: solver.codegen2\nagents_config:\n  solver.codegen2: {}\n")
    assert await unknown(host, bundle) == []


@pytest.mark.parametrize(
    ("consumer", "severity"),
    [
        (DECISION, None),
        ("desk.editor", None),
        ("solver.code", "warning"),
        ("Solver.Codegen", "error"),
        ("solver", None),
    ],
)
async def test_nearness_decides_without_a_list(host: Host, bundle: Path, consumer: str, severity: str | None) -> None:
    """Without a list, a name of its own says nothing, one like a known one is a warning, a mistyped one an error."""
    rules(bundle, f"agents_config:\n  {consumer}: {{}}\n")
    assert [one.severity for one in await unknown(host, bundle)] == ([] if severity is None else [severity])


async def test_roles_of_the_demo_are_known(host: Host, bundle: Path) -> None:
    """A name like a role of the bundle's recording is told, the role itself is known."""
    demo = "schema: kdskills.cassette/1\nrequest: Go\nexpect: {answer_role: desk.writer}\nreplies: []\n"
    (bundle / "demo.yaml").write_text(demo)
    rules(bundle, "agents_config:\n  desk.writer: {}\n  desk.writter: {}\n")
    assert [one.ref for one in await unknown(host, bundle)] == ["agents_config.desk.writter"]


async def test_an_unknown_asker_is_warned(host: Host, bundle: Path) -> None:
    """Who asks as a consumer that nothing names is warned by every command that looks, known ones are not."""
    rules(bundle, f"agents_config:\n  {DECISION}: {{disabled: [billing.dunning]}}\n")
    given = {"bundle": bundle, "consumer": "solver.react.decison"}
    for name, more in (("skills.list", {}), ("skills.render", {}), ("skills.show", {"ref": "billing.dunning"})):
        found = [one for one in (await host.call(name, **given, **more)).diagnostics if one.code == "consumer_unknown"]
        assert [(one.severity, one.ref) for one in found] == [("warning", "solver.react.decison")], name
        assert DECISION in found[0].fix
        known = await host.call(name, bundle=bundle, **more)
        assert not [one for one in known.diagnostics if one.code == "consumer_unknown"]
    notes = (await host.call("skills.why", **given, ref="billing.dunning")).notes
    assert any("solver.react.decison" in note for note in notes)


def test_listed_consumers_are_names() -> None:
    """`consumers` is a list of names, travels as JSON, and is read as strictly as rules are."""
    made = SkillsDescriptor(consumers=["b", "a", "b"])
    assert (made.consumers, SkillsDescriptor.from_json(made.to_json())) == (("a", "b"), made)
    for value in (7, [7], [""], {"a": {}}, ["a*"]):
        with pytest.raises(DescriptorError) as caught:
            SkillsDescriptor.model_validate({"consumers": value})
        assert caught.value.details["key"] == "consumers"


async def test_why_and_show_look_through_every_namespace(host: Host, bundle: Path) -> None:
    """A bare id means the only skill that has it, wherever it is and though it is refused, and the answer says so."""
    rules(bundle, "agents_config:\n  writer: {disabled: [billing.dunning]}\n")
    given = {"bundle": bundle, "consumer": "writer"}
    found = await host.call("skills.why", **given, ref="dunning")
    assert (found.full_id, found.code) == ("billing.dunning", "denied")
    assert "dunning was read as billing.dunning, the only skill of that id" in found.notes
    with pytest.raises(BadRequest) as caught:
        await host.call("skills.show", **given, ref="dunning")
    assert (caught.value.code, caught.value.details["full_id"]) == ("denied", "billing.dunning")
    assert (await host.call("skills.show", bundle=bundle, ref="dunning")).full_id == "billing.dunning"


@pytest.mark.parametrize(
    ("ref", "near"),
    [
        ("invoice", "billing.invoice or desk.invoice"),
        ("acme.dunning", "billing.dunning"),
        ("duning", "billing.dunning"),
        ("biling.dunning", "billing.dunning"),
    ],
)
async def test_near_names_are_suggested(host: Host, bundle: Path, ref: str, near: str) -> None:
    """What names no skill gets suggestions: skills of that id in other namespaces, else names like it."""
    found = await host.call("skills.why", bundle=bundle, ref=ref)
    assert (found.code, found.notes) == ("unknown_skill", (f"did you mean {near}?",))
    with pytest.raises(BadRequest) as caught:
        await host.call("skills.show", bundle=bundle, ref=ref)
    assert caught.value.message.endswith(f"; did you mean {near}?")
    nothing = await host.call("skills.why", bundle=bundle, ref="weather")
    assert nothing.notes == ()


async def test_the_view_of_a_user_with_roles(host: Host, bundle: Path) -> None:
    """With roles the rules of their groups are in force too, and named; roles that no rule is for change nothing."""
    rules(bundle, 'agents_config:\n  writer: {enabled: [desk.invoice]}\n  "@accountants": {enabled: ["billing.*"]}\n')
    given = {"bundle": bundle, "consumer": "writer"}
    asked = [
        (await host.call("skills.list", **given, roles=roles)).visible for roles in ((), ("guests",), ("accountants",))
    ]
    assert asked == [("desk.invoice",)] * 2 + [("billing.dunning", "billing.invoice", "desk.invoice")]
    why = [await host.call("skills.why", **given, roles=roles, ref="dunning") for roles in ((), ("accountants",))]
    assert [each.granted for each in why] == [False, True]
    assert any("@accountants" in step.model_dump_json() for step in why[1].steps)


async def test_restricted_callers_get_no_suggestions(bundle: Path) -> None:
    """A caller elsewhere without `admin` learns of no name: neither by a bare id nor by a suggestion."""
    rules(bundle, "agents_config:\n  writer: {disabled: ['*']}\n")
    host = Host(Settings(index_dir=None, bundle=bundle), entry_points=False)
    caller = Identity(agent="writer", scopes=frozenset({"skills:read"}), door="http")
    for ref in ("dunning", "duning"):
        found = await host.invoke("skills.why", {"ref": ref}, Context(caller))
        assert (found.code, found.notes, found.steps) == ("unknown_skill", (), ())
        assert "billing" not in found.model_dump_json()
        with pytest.raises(BadRequest) as caught:
            await host.invoke("skills.show", {"ref": ref}, Context(caller))
        assert "billing" not in str(caught.value.to_json())
