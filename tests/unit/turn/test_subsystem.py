"""The subsystem: registry, refresh, fingerprint, roots."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from kdskills.bundle import SkillsDescriptor, load_bundle
from kdskills.errors import DescriptorError
from kdskills.turn import SkillsSubsystem


def test_registry_is_the_same_object_until_something_changes(write, build) -> None:
    """The mapping is immutable, sorted, and the same object until a refresh finds a change or the cache is cleared."""
    write("b.x")
    write("a.x")
    subsystem = build()
    first = subsystem.registry
    assert list(first) == ["a.x", "b.x"]
    with pytest.raises(TypeError):
        first["c.x"] = None
    subsystem.refresh()
    assert subsystem.registry is first
    write("c.x")
    assert subsystem.registry is first
    assert subsystem.refresh().added == ("c.x",)
    second = subsystem.registry
    assert second is not first
    subsystem.clear_cache()
    assert subsystem.registry is not second
    assert list(subsystem.registry) == ["a.x", "b.x", "c.x"]


def test_auto_refresh_lets_view_look_again(write, build, monkeypatch) -> None:
    """`view` refreshes once the time is over, and not before; None never does."""
    now = [0.0]
    monkeypatch.setattr("kdskills.turn.subsystem.time.monotonic", lambda: now[0])
    write("a.x")
    manual, timed = build(), build(auto_refresh=5.0)
    old = timed.view()
    manual.view()
    write("a.y")
    now[0] = 4.9
    assert list(timed.view().skills) == ["a.x"]
    now[0] = 5.0
    assert list(timed.view().skills) == ["a.x", "a.y"]
    assert list(old.skills) == ["a.x"]
    now[0] = 1_000.0
    assert list(manual.view().skills) == ["a.x"]


def test_failing_refresh_keeps_the_old_snapshot(write, build, monkeypatch) -> None:
    """When looking again fails it raises, and what was known stays."""
    write("a.x")
    subsystem = build(auto_refresh=0.0)
    first = subsystem.registry

    def broken(*args):
        raise OSError("no more files")

    with monkeypatch.context() as patched:
        patched.setattr("kdskills.skills.registry.RootScanner.run", broken)
        with pytest.raises(OSError, match="no more files"):
            subsystem.view()
        assert subsystem.registry is first
    assert list(subsystem.view().skills) == ["a.x"]


def test_fingerprint(write, build) -> None:
    """It depends on rules, files and winners, and not on the folder's place."""
    folder = write("a.x")
    base = build().fingerprint
    assert build().fingerprint == base
    assert build({"w": {"disabled": ["z"]}}).fingerprint != base
    (folder / "SKILL.md").write_text("---\nname: x\ndescription: Other.\n---\nText.\n")
    assert build().fingerprint != base


def test_fingerprint_does_not_hold_host_paths(write, build, bundle, tmp_path: Path) -> None:
    """The same bundle elsewhere has the same fingerprint."""
    write("a.x")
    here = build().fingerprint
    other = tmp_path / "elsewhere"
    shutil.copytree(bundle, other)
    assert build(bundle_root=other).fingerprint == here


def test_roots_in_order_and_custom_last(write, build, root) -> None:
    """The custom root comes last and wins; further roots stand by kind below it."""
    write("public.same", body="from the bundle")
    write("x.same", root="user", body="from the user")
    write("x.mine", root="user")
    subsystem = build(roots=(root("user", "user"), root("plugin", "plug")))
    assert [entry.kind for entry in subsystem.roots] == ["plugin", "user", "bundle"]
    assert subsystem.registry["public.same"].body == "from the bundle"
    assert subsystem.registry["public.mine"].layer == "user"
    assert any(finding.code == "skill_overridden" for finding in subsystem.diagnostics)


def test_invalid_skill_hides_the_one_below(write, build, root) -> None:
    """A skill refused at load keeps a weaker root's skill of the same id from shining through."""
    write("public.same", description="")
    write("x.same", root="user")
    view = build(roots=(root("user", "user"),)).view()
    assert view.resolve("public.same").code == "skill_invalid"


def test_no_roots_no_skills(tmp_path: Path) -> None:
    """Without descriptor, roots and bundle there is nothing, which is no error."""
    subsystem = SkillsSubsystem(roots=(), index_dir=None)
    assert (dict(subsystem.registry), subsystem.roots, subsystem.diagnostics) == ({}, (), ())
    assert subsystem.view("w").catalog().text == "[SKILL CATALOG]\n(no skills)"
    assert SkillsSubsystem(index_dir=None, bundle_root=tmp_path).registry == {}


def test_missing_root_is_a_warning(bundle) -> None:
    """A custom root that is not there is `root_missing`, a warning here."""
    subsystem = SkillsSubsystem({"custom_skills_root": "gone"}, bundle_root=bundle, roots=(), index_dir=None)
    assert [(entry.code, entry.severity) for entry in subsystem.diagnostics] == [("root_missing", "warning")]


@pytest.mark.parametrize(
    ("descriptor", "code"),
    [
        ({"custom_skills_root": "x"}, "descriptor_root_relative"),
        ({"custom_skills_root": "../x", "bundle_root": "/srv/b"}, "descriptor_root_outside_bundle"),
        ({"agents_config": []}, "descriptor_type"),
    ],
)
def test_descriptor_errors_come_at_once(descriptor, code: str) -> None:
    """A descriptor that cannot be used is an error when the subsystem is built."""
    with pytest.raises(DescriptorError) as caught:
        SkillsSubsystem(descriptor, roots=(), index_dir=None)
    assert caught.value.code == code


def test_plugin_check_refuses(write, build) -> None:
    """A further check's error refuses a skill; the gate says `skill_invalid`."""
    from kdskills.errors import Diagnostic

    write("a.x")
    write("a.y")
    subsystem = build(check=lambda skill: [Diagnostic("house_rule", "error", "No.")] if skill.id == "x" else [])
    assert subsystem.view().resolve("a.x").code == "skill_invalid"
    assert list(subsystem.view().skills) == ["a.y"]


def test_diagnostics_join_everything(write, bundle) -> None:
    """Findings of descriptor, files and rules stand in one list."""
    write("a.x", description="")
    subsystem = SkillsSubsystem(
        SkillsDescriptor(owner="us", agents_config={"w": {"enabled": ["zzz"]}}),
        bundle_root=bundle,
        roots=(),
        index_dir=None,
    )
    assert {"descriptor_unknown_key", "description_missing", "rule_matches_nothing"} <= {
        finding.code for finding in subsystem.diagnostics
    }


def test_views_from_many_threads(write, build) -> None:
    """Threads taking views while others refresh all get whole views."""
    for name in "abcdef":
        write(f"x.{name}")
    subsystem = build({"*": {"disabled": ["x.f"]}}, auto_refresh=0.0)
    seen: list[object] = []

    def work() -> None:
        for _ in range(5):
            seen.append(tuple(subsystem.view("w").skills))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(seen), set(seen)) == (40, {("x.a", "x.b", "x.c", "x.d", "x.e")})


def test_shipped_press_bundle(repo: Path) -> None:
    """Each consumer of the press bundle sees what its descriptor says."""
    subsystem = SkillsSubsystem(load_bundle(repo / "bundles" / "press").descriptor, index_dir=None)
    assert subsystem.view("solver.react.decision").resolve("press.embargo").code == "denied"
    assert "press.embargo" in subsystem.view("desk.editor").skills
    assert all(full_id.startswith("data.") for full_id in subsystem.view("solver.codegen").skills)


@pytest.mark.parametrize("written", [None, {}, {"AGENTS_CONFIG": {"w": {"disabled": "a.b"}}, "owner": "us"}])
def test_the_descriptor_is_a_model_whatever_was_given(written) -> None:
    """A mapping is read at once and becomes the model it means on first use; a model given stays the same object."""
    subsystem = SkillsSubsystem(written, roots=(), index_dir=None)
    assert subsystem.descriptor == SkillsDescriptor.from_json(written or {})
    assert subsystem.descriptor is subsystem.descriptor
    given = SkillsDescriptor.from_json(written or {})
    assert SkillsSubsystem(given, roots=(), index_dir=None).descriptor is given


@pytest.mark.parametrize("written", [3, "skills", [], {"agents_config": {"w": {"disbled": ["x"]}}}])
def test_a_descriptor_not_understood_is_refused_at_once(written) -> None:
    """What is no descriptor never becomes a subsystem, although the model is made later."""
    with pytest.raises(DescriptorError):
        SkillsSubsystem(written, roots=(), index_dir=None)
