"""A crowd of generated skills: how many, how different, the same every time; a bundle among them, whole or not at all."""

import re
import shutil
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.crowd import MAX_CROWD, bundle_in_crowd, write_crowd
from kdskills.bundle import load_bundle
from kdskills.errors import BadRequest, Conflict
from kdskills.turn import SkillsSubsystem

SOLVER = "solver.react.decision"


def view_of(folder, consumer=SOLVER):
    """What a consumer may use of the bundle at *folder*."""
    return SkillsSubsystem(load_bundle(folder, python="read").descriptor, index_dir=None).view(consumer)


@pytest.fixture
def press(repo):
    """The report press, trusted."""
    return load_bundle(repo / "bundles/press")


def texts_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("SKILL.md")}


def test_ten_thousand_skills_are_all_different(tmp_path):
    """As many as there may be: no two have a description or a body in common, and each team has as many as any other."""
    teams = write_crowd(tmp_path, MAX_CROWD)
    texts = texts_of(tmp_path)
    assert (len(texts), len(teams)) == (MAX_CROWD, 40)
    assert len({re.search("description: (.*)", text)[1] for text in texts.values()}) == MAX_CROWD
    assert len({text.split("---", 2)[2] for text in texts.values()}) == MAX_CROWD
    assert {sum(1 for _ in (tmp_path / team).iterdir()) for team in teams} == {MAX_CROWD // 40}
    assert not any("{" in text for text in texts.values())


def test_the_same_number_gives_the_same_skills(tmp_path):
    """Two folders are alike to the last byte, and more skills begin with the fewer."""
    for name, count in (("one", 90), ("two", 90), ("more", 120)):
        write_crowd(tmp_path / name, count)
    one, two, more = (texts_of(tmp_path / name) for name in ("one", "two", "more"))
    assert one == two
    assert one.items() < more.items()


async def test_generated_skills_pass_the_strict_check(tmp_path, press):
    """Nothing is found in them, as the specification reads a skill, and no two are too much alike."""
    bundle_in_crowd(press, tmp_path / "many", 1000, SOLVER)
    host = Host(Settings(), entry_points=False)
    for folder, verdict, count in (("", "lenient", 1009), ("skills/airline", "spec", 25)):
        checked = await host.call("skills.check", path=tmp_path / "many" / folder, verdict=verdict)
        assert (checked.errors, checked.warnings, checked.skills) == (0, 0, count)


def test_only_the_one_who_asks_sees_the_crowd(tmp_path, press):
    """The solver may use what was generated; denials and the lists of others are what they were."""
    bundle_in_crowd(press, tmp_path / "many", 80, SOLVER)
    before, after = view_of(press.root), view_of(tmp_path / "many")
    assert len(after.listed) == len(before.listed) + 80
    assert before.listed.keys() < after.listed.keys()
    assert after.codes["press.embargo"] == before.codes["press.embargo"] == "denied"
    writer = "answer.generator.strong"
    assert view_of(tmp_path / "many", writer).skills.keys() == view_of(press.root, writer).skills.keys()


def test_a_crowd_around_a_crowd_are_other_skills(tmp_path, press):
    """What was generated before stays, and as many others come."""
    bundle_in_crowd(press, tmp_path / "many", 50, SOLVER)
    bundle_in_crowd(load_bundle(tmp_path / "many", python="read"), tmp_path / "more", 50, SOLVER)
    assert texts_of(tmp_path / "many/skills").items() < texts_of(tmp_path / "more/skills").items()
    assert len(view_of(tmp_path / "more").listed) == len(view_of(press.root).listed) + 100


def test_a_bundle_without_descriptor_or_with_another_root(tmp_path):
    """Skills are generated where the bundle has its own, and a bundle without rules still has none."""
    for name, root in (("plain", "skills"), ("other", "know-how")):
        skill = tmp_path / name / root / "acme/one"
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text("---\nname: one\ndescription: One.\n---\nOne.\n")
    (tmp_path / "other/skills_descriptor.yaml").write_text("custom_skills_root: know-how\n")
    for name in ("plain", "other"):
        bundle_in_crowd(load_bundle(tmp_path / name), tmp_path / f"{name}-many", 3, SOLVER)
        assert len(view_of(tmp_path / f"{name}-many").listed) == 4
        assert not load_bundle(tmp_path / f"{name}-many").diagnostics


def test_hidden_files_and_links_stay_behind(tmp_path, repo):
    """A copy holds no `.git`, no link that leads out, and nothing that is no file; what the bundle needs is there."""
    source = Path(shutil.copytree(repo / "bundles/hello", tmp_path / "hello"))
    (source / ".git").mkdir()
    (source / ".git/config").write_text("[core]")
    (source / "outside").symlink_to("/etc")
    (source / "tools.py").write_text("")
    bundle_in_crowd(load_bundle(source), tmp_path / "many", 1, SOLVER)
    names = {path.name for path in (tmp_path / "many").iterdir()}
    assert names == {"demo.yaml", "evals", "skills", "skills_descriptor.json", "tools.py"}


@pytest.mark.parametrize("obstacle", ["file", "full", "link", "nowhere"])
def test_what_is_there_is_not_touched(tmp_path, press, obstacle):
    """A file, a folder with anything in it, a link, and a place that is not there: refused, and nothing is written."""
    target = tmp_path / "many"
    if obstacle == "file":
        target.write_text("mine")
    elif obstacle == "full":
        target.mkdir()
        (target / "mine").write_text("mine")
    elif obstacle == "link":
        (tmp_path / "empty").mkdir()
        target.symlink_to(tmp_path / "empty")
    else:
        target = tmp_path / "gone/many"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((Conflict, BadRequest)) as caught:
        bundle_in_crowd(press, target, 5, SOLVER)
    assert caught.value.code == ("path_missing" if obstacle == "nowhere" else "path_exists")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_used(tmp_path, press):
    """A folder that was made for it is filled."""
    (tmp_path / "many").mkdir()
    bundle_in_crowd(press, tmp_path / "many", 1, SOLVER)
    assert [path.name for path in tmp_path.iterdir()] == ["many"]
    assert (tmp_path / "many").stat().st_mode & 0o777 == 0o755


def test_what_fails_in_the_middle_leaves_nothing(tmp_path, press):
    """Where names become too long for the system, the failure is the system's own, and nothing half-written stays."""
    deep = tmp_path
    while len(str(deep)) < 4050:
        deep /= "d" * min(200, 4060 - len(str(deep)))
        deep.mkdir()
    with pytest.raises(OSError, match="File name too long"):
        bundle_in_crowd(press, deep / "many", 5, SOLVER)
    assert list(deep.iterdir()) == []
