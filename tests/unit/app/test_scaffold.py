"""What `new` makes works as it is, and is made whole or not at all."""

import importlib.util
import subprocess
import sys

import pytest

from kdskills.app import Host, Settings
from kdskills.errors import BadRequest, Conflict


def output_of(command):
    """Return what a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def host():
    """A Host with shipped plugins only."""
    return Host(Settings(), entry_points=False)


@pytest.mark.parametrize("kind", ["bundle", "skill"])
async def test_a_new_bundle_or_skill_passes_the_strict_check(host, kind, tmp_path):
    """Nothing has to be mended before the first line is written, but for the description, which says so."""
    made = await host.call("new", kind=kind, name="market-news", into=tmp_path)
    checked = await host.call("skills.check", path=made.path, verdict="spec")
    assert [each.code for each in checked.diagnostics] == ["description_placeholder"]
    assert (checked.errors, checked.warnings, checked.skills) == (0, 1, 1)
    assert set(made.files) == {
        p.relative_to(tmp_path / "market-news").as_posix() for p in (tmp_path / "market-news").rglob("*") if p.is_file()
    }


async def test_a_new_bundle_grants_its_skill(host, tmp_path):
    """The agent named in the new descriptor may use the new skill, and nobody is refused by accident."""
    made = await host.call("new", kind="bundle", name="desk", into=tmp_path)
    found = await host.call("skills.list", bundle=made.path, consumer="solver.react.decision")
    assert list(found.visible) == ["public.desk"]


async def test_a_new_skills_script_runs(host, tmp_path):
    """The script of a new skill does what its text says."""
    made = await host.call("new", kind="skill", name="count", into=tmp_path)
    data = tmp_path / "data.txt"
    data.write_text("a\nb\n")
    assert output_of([sys.executable, f"{made.path}/scripts/main.py", data]) == "data.txt: 2 lines\n"


async def test_a_new_plugin_registers_and_hides(tmp_path, repo):
    """The module of a new plugin is taken by a Host, and its hook is asked."""
    host = Host(Settings(), entry_points=False)
    made = await host.call("new", kind="plugin", name="no-drafts", into=tmp_path)
    assert made.files == ("kdskills_no_drafts.py", "pyproject.toml", "test_kdskills_no_drafts.py")
    spec = importlib.util.spec_from_file_location("kdskills_no_drafts", f"{made.path}/kdskills_no_drafts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drafts = tmp_path / "bundle/skills/public/sketch"
    drafts.mkdir(parents=True)
    (drafts / "SKILL.md").write_text("---\nname: sketch\ndescription: Unfinished.\ntags: [draft]\n---\nText.\n")
    with_plugin = Host(Settings(), entry_points=False, plugins=[module])
    rows = (await with_plugin.call("skills.list", bundle=tmp_path / "bundle")).skills
    assert [(row.state, row.reason) for row in rows] == [
        ("refused", "public.sketch is denied by a plugin: it is a draft")
    ]


async def test_nothing_is_overwritten(host, tmp_path):
    """A taken name is a conflict, be it a folder, a file or a broken link, and everything stays."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("mine")
    (tmp_path / "c").symlink_to("nowhere")
    for name in ("a", "b", "c"):
        with pytest.raises(Conflict):
            await host.call("new", kind="skill", name=name, into=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "A", "../x", "a/b", "-a", "a-", "a--b", "a b", "é", "a" * 65, "a\n"], ids=repr)
async def test_only_names_of_skills_are_taken(host, tmp_path, name):
    """A name no skill may have makes nothing."""
    with pytest.raises(BadRequest):
        await host.call("new", kind="skill", name=name, into=tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_plugins_are_listed_with_what_they_bring(host):
    """Every shipped plugin is there with its hooks, and the names it registered."""
    found = await host.call("plugins")
    rows = {row.name: row for row in found.plugins}
    assert rows["kdskills.builtin.executors.docker"].hooks == ("kdskills_register_executors",)
    assert all(row.shipped for row in found.plugins)
    assert {"bubblewrap", "docker"} <= set(found.registered["executors"])
    assert set(found.registered) == {"executors", "models", "stores", "tools", "interpreters", "checks"}
