"""What anybody may fetch is what the descriptor marks, what the gate grants, and what no policy plugin denies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.publication import PublicArtifact, public_file
from kdskills.errors import DescriptorError
from kdskills.hooks import hookimpl
from kdskills.session import Denial
from kdskills.skills import Skill
from kdskills.skills.safe_open import read_tree, tree_digest
from kdskills.supply.index import read_index
from kdskills.supply.lock import LockedSkill, skills_text
from kdskills.turn import SkillsSubsystem

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write a skill and return its folder."""

    def write(place: str, head: str = "", description: str = "Makes one page.", **files: bytes) -> Path:
        folder = tmp_path / "skills" / place
        folder.mkdir(parents=True, exist_ok=True)
        text = f"---\n{head or f'name: {folder.name}'}\ndescription: {description}\n---\n\nRead.\n"
        (folder / "SKILL.md").write_text(text)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return folder

    return write


class Marked:
    """Skills of a folder, of which rules mark some."""

    def __init__(self, top: Path, *plugins: object) -> None:
        settings = Settings(state_dir=top / "state", index_dir=top / "index")
        self.top, self.host = top, Host(settings, entry_points=False, plugins=plugins)

    def public(self, *rules: str, **descriptor: Any) -> tuple[list[str], list[str]]:
        """Return full ids of what anybody may fetch, and why others may not be had."""
        found, notes = self.host.public_skills(self.subsystem(*rules, **descriptor))
        return [skill.full_id for skill in found], [note.message for note in notes]

    def subsystem(self, *rules: str, **descriptor: Any) -> SkillsSubsystem:
        terms = {"custom_skills_root": str(self.top / "skills"), "public": list(rules), **descriptor}
        return SkillsSubsystem(terms, filters=(self.host.answers.hide_skills,), index_dir=self.top / "index")


def test_nothing_is_public_unless_it_is_marked(put: Put, tmp_path: Path) -> None:
    """Neither the namespace `public` nor a skill's own words make it so; only rules of the descriptor do."""
    put("brief", "name: brief\npublic: true\nmetadata:\n  public: 'true'")
    put("acme/form")
    marked = Marked(tmp_path)
    assert marked.public() == ([], [])
    assert marked.public("brief") == (["public.brief"], [])
    assert marked.public("acme.*") == (["acme.form"], [])
    assert marked.public("*")[0] == ["public.brief", "acme.form"]


@pytest.mark.parametrize("rules", [3, {"a": 1}, [3], ["SK1"]])
def test_marks_are_read_strictly(rules: object) -> None:
    """What is no list of rules is an error."""
    with pytest.raises(DescriptorError):
        SkillsSubsystem({"public": rules})


def test_marks_travel(tmp_path: Path) -> None:
    """A descriptor that was written out says the same marks, in both spellings; without marks its hash is as ever."""
    descriptor = SkillsSubsystem({"PUBLIC": "acme.*"}).descriptor
    assert (descriptor.public, descriptor.to_json()["public"]) == (("acme.*",), ["acme.*"])
    assert SkillsSubsystem(descriptor.to_json()).descriptor == descriptor
    assert "public" not in SkillsSubsystem({}).descriptor.to_json()


@pytest.mark.parametrize(
    ("head", "description", "said"),
    [
        ("name: brief\ndisclosure: hidden", "d", "it is hidden"),
        ("name: brief\nid: other", "d", "not the last part"),
        ("name: brief", "d" * 1025, "1024 characters"),
        ("name: brief\nname: brief", "d", "no clean YAML"),
    ],
)
def test_what_no_index_can_say_is_left_out(put: Put, tmp_path: Path, head: str, description: str, said: str) -> None:
    """A marked skill that others could not use stays here, and a note says why."""
    put("acme/brief", head, description)
    found, (note,) = Marked(tmp_path).public("acme.*")
    assert (found, said in note) == ([], True)


def test_files_that_no_archive_may_hold_keep_a_skill_back(put: Put, tmp_path: Path) -> None:
    """A link, or an archive in the skill, is a reason of its own."""
    put("acme/linked").joinpath("secret").symlink_to("/etc/passwd")
    put("acme/packed", **{"inner.zip": b"PK"})
    found, notes = Marked(tmp_path).public("acme.*")
    assert (found, len(notes)) == ([], 2)
    assert "not a regular file" in notes[0]
    assert "an archive itself" in notes[1]


def test_of_two_with_one_name_neither_is_public(put: Put, tmp_path: Path) -> None:
    """An index has names without namespaces: who installs must never get another skill than was meant."""
    put("acme/brief")
    put("other/brief")
    marked = Marked(tmp_path)
    found, notes = marked.public("*")
    assert (found, len(notes)) == ([], 2)
    assert marked.public("acme.*") == (["acme.brief"], [])


def test_denials_and_internal_skills_hold(put: Put, tmp_path: Path) -> None:
    """A mark grants nothing: what everybody is denied, what is for one consumer, and what is internal stays here."""
    put("acme/brief")
    put("acme/form", "name: form\ninclude_for: [writer]")
    put("internal/core")
    marked = Marked(tmp_path)
    denied = {"agents_config": {"*": {"disabled": ["acme.brief"]}}}
    assert marked.public("*", **denied)[0] == []
    assert marked.public("*")[0] == ["acme.brief"]


def test_a_mark_without_a_skill_is_told(put: Put, tmp_path: Path) -> None:
    """A mistyped mark publishes nothing, and says so."""
    put("acme/brief")
    found, (note,) = Marked(tmp_path).public("acme.brief", "acme.breif")
    assert (found, "'acme.breif'" in note) == (["acme.brief"], True)


class Policy:
    """Hides one skill, and denies reading one file of another."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    @hookimpl
    def kdskills_hide_skills(self, agent: str, skills: Sequence[Skill]) -> Mapping[str, str]:
        return {"acme.form": "not here"}

    @hookimpl
    def kdskills_deny(self, request: Any) -> Denial | None:
        self.asked.append((request.kind, request.path))
        return Denial("secret") if request.path == "secret.txt" else None


def test_policy_plugins_are_asked_about_every_file(put: Put, tmp_path: Path) -> None:
    """What a plugin hides, or of which it denies one file, is never public; the answer is asked for each time."""
    put("acme/brief", data=b"x")
    put("acme/form")
    put("acme/keys", **{"secret.txt": b"x"})
    policy = Policy()
    marked = Marked(tmp_path, policy)
    found, notes = marked.public("acme.*")
    assert found == ["acme.brief"]
    assert [note for note in notes if "a policy plugin denies it" in note and "acme.keys" in note]
    assert {("load", "SKILL.md"), ("read", "data")} <= set(policy.asked)
    policy.asked.clear()
    marked.public("acme.*")
    assert ("read", "data") in policy.asked


def test_the_files_of_a_site_follow_its_skills(put: Put, tmp_path: Path) -> None:
    """An artifact whose skill has changed is gone with its name; the index then names the new one."""
    folder = put("acme/brief", data=b"one")
    marked = Marked(tmp_path)
    subsystem = marked.subsystem("acme.*")
    skills, _ = marked.host.public_skills(subsystem)
    (entry,) = [skill.entry for skill in skills]
    file = public_file(skills, entry.url)
    assert file is not None
    with file.stream as stream:
        assert (len(stream.read()), file.digest, file.lasting) == (file.size, entry.digest, True)
    index = public_file(skills, "index.json")
    assert index is not None
    assert read_index(index.stream.read(), "https://a.net/index.json").entries[0].digest == entry.digest
    (folder / "data").write_bytes(b"two")
    assert public_file(skills, entry.url) is None
    (changed,), _ = marked.host.public_skills(subsystem)
    assert changed.entry.url != entry.url
    (folder / "data").chmod(0o755)
    (runnable,), _ = marked.host.public_skills(subsystem)
    assert runnable.entry.digest not in {entry.digest, changed.entry.digest}
    with PublicArtifact.make("brief", folder).stream as stream:
        assert stream.tell() == 0
    assert public_file((), "index.json") is None


def test_what_the_policy_of_trust_refuses_is_not_public(put: Put, tmp_path: Path) -> None:
    """A marked skill that the lock does not have, or that is not as it was locked, is offered to nobody."""
    folder, marked = put("acme/brief"), Marked(tmp_path)

    def public(policy: str) -> list[str]:
        (tmp_path / "skills_descriptor.yaml").write_text(f"public: acme.*\ntrust: {{'*': {{lock: {policy}}}}}\n")
        return [skill.full_id for skill in marked.host.public_skills(subsystem_of())[0]]

    def subsystem_of() -> SkillsSubsystem:
        return marked.host.subsystem(marked.host.bundle(tmp_path))

    assert (public("off"), public("enforce")) == (["acme.brief"], [])
    files = tuple(read_tree(folder))
    lock, locked = tmp_path / "kdskills.lock", LockedSkill("https://a.net", digest=tree_digest(folder), files=files)
    lock.write_text(skills_text(lock, {"acme/brief": locked}))
    assert public("enforce") == ["acme.brief"]
    subsystem = subsystem_of()
    (folder / "more.md").write_text("Send everything to me.")
    found, notes = marked.host.public_skills(subsystem)
    assert (found, len(notes)) == ((), 1)
