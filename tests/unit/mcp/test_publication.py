"""What is published of a folder of skills, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdskills.app.publication import NOT_FOUND, Publication
from kdskills.errors import NotFound
from kdskills.turn import SkillsSubsystem


class Skills:
    """A folder of skills and what a view of it publishes."""

    def __init__(self, top: Path) -> None:
        self.top, self.cache, self.kept = top / "skills", top / "cache", {}
        self.top.mkdir()
        self.rules: dict[str, object] = {}

    def put(self, place: str, head: str = "", **files: bytes) -> Path:
        folder = self.top / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "SKILL.md").write_text(f"---\n{head or f'name: {folder.name}'}\ndescription: d\n---\n\nBody.\n")
        for name, data in files.items():
            file = folder / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return folder

    def publication(self, consumer: str | None = None) -> Publication:
        subsystem = SkillsSubsystem(
            {"custom_skills_root": str(self.top), "agents_config": self.rules}, roots=(), index_dir=None
        )
        return Publication(subsystem.view(consumer), self.kept, self.cache)


@pytest.fixture
def skills(tmp_path: Path) -> Skills:
    return Skills(tmp_path)


def test_entries(skills):
    """Every regular file stands in the entry once, nested skills included, and reads as listed."""
    skills.put("acme/tidy", docs__a_md=b"# A", bin=b"\x00\xff", inner__SKILL_md=b"x")
    publication = skills.publication()
    (entry,), notes = publication.entries()
    assert notes == ()
    assert entry.uri == "skill://acme/tidy/SKILL.md"
    assert [file.path for file in entry.files] == ["SKILL.md", "bin", "docs/a_md", "inner/SKILL_md"]
    for file in entry.files:
        found, data = publication.read(file.uri)
        assert (found, len(data)) == (file, file.size)


def test_yaml_values_are_those_of_1_2(skills):
    """Words like yes and dates are strings, numbers and nulls are what they are."""
    skills.put("acme/tidy", "name: tidy\nsure: yes\nwhen: 2026-01-02\nn: 1.5\nnone: null\nflag: true\ntime: 1:30")
    frontmatter = skills.publication().get("skill://acme/tidy/SKILL.md").frontmatter
    assert json.loads(json.dumps(dict(frontmatter))) == {
        "name": "tidy", "sure": "yes", "when": "2026-01-02", "n": 1.5, "none": None, "flag": True, "time": "1:30",
        "description": "d",
    }  # fmt: skip


def test_what_was_listed_is_what_is_read(skills):
    """A skill that changes is read as its new self only, and the manifest of that moment agrees with every byte."""
    folder = skills.put("acme/tidy", note=b"one")
    before = skills.publication()
    old = before.get("skill://acme/tidy/SKILL.md")
    (folder / "note").write_bytes(b"two")
    after = skills.publication()
    new = after.get("skill://acme/tidy/SKILL.md")
    assert old.files != new.files
    assert after.read("skill://acme/tidy/note")[1] == b"two"
    assert after.read("skill://acme/tidy/note")[0].digest == new.files[1].digest


@pytest.mark.parametrize(
    ("place", "head", "said"),
    [
        ("acme/tidy", "name: tidy\nid: other", "not the last part"),
        ("acme/Tidy", "name: Tidy", "other characters"),
        ("acme/tidy", "name: tidy\nagent_disclosure: hidden", "hidden"),
        ("acme/tidy", "name: tidy\nname: tidy", "no clean YAML"),
        ("acme/tidy", "name: tidy\nhint: a: b", "no clean YAML"),
    ],
)
def test_unpublishable(skills, place, head, said):
    """A skill that others could not use or would read differently is left out, and a note says why."""
    skills.put(place, head)
    entries, notes = skills.publication().entries()
    assert entries == ()
    assert [note.code for note in notes] == ["mcp_unpublishable"]
    assert said in notes[0].message


def test_bounds(skills):
    """512 files are published, 513 are not; nor are more than 16 MiB."""
    folder = skills.put("acme/many", **{f"f{n}": b"" for n in range(511)})
    assert len(skills.publication().entries()[0][0].files) == 512
    (folder / "one-more").touch()
    entries, notes = skills.publication().entries()
    assert (entries, "512 files" in notes[0].message) == ((), True)
    big = skills.put("acme/big")
    with (big / "data").open("wb") as out:
        out.truncate(16 * 1024 * 1024)
    notes = skills.publication().entries()[1]
    assert sorted(note.ref or "" for note in notes) == ["acme.big", "acme.many"]


def test_directories(skills):
    """Direct children only, folders by kind, and an empty directory is an empty list."""
    folder = skills.put("acme/tidy", docs__a=b"1", docs__deep__b=b"2")
    (folder / "empty").mkdir()
    publication = skills.publication()
    base = "skill://acme/tidy"
    rows = {child.name: child.media_type for child in publication.children(base)}
    assert rows == {
        "SKILL.md": "text/markdown", "docs": "inode/directory",
    } | ({"empty": "inode/directory"} if "empty" in rows else {})  # fmt: skip
    assert [child.uri for child in publication.children(f"{base}/docs")] == [f"{base}/docs/a", f"{base}/docs/deep"]


@pytest.mark.parametrize(
    "uri",
    [
        "", "skill://", "skill://acme", "skill://acme/", "skill://acme/tidy/", "skill://acme/none/SKILL.md",
        "skill://other/tidy/SKILL.md", "skill://acme/tidy/../tidy/SKILL.md", "skill://acme/tidy/%2e%2e/tidy/SKILL.md",
        "skill://acme/tidy%2fSKILL.md", "skill://acme/tidy//SKILL.md", "skill://acme/tidy/SKILL.md/",
        "skill://acme/tidy/SKILL.md#x", "skill://acme/tidy/SKILL.md?x", "SKILL://acme/tidy/SKILL.md",
        "file:///etc/passwd", "skill://acme/secret/SKILL.md", "skill://internal/core/SKILL.md", "skill://acme/tidy/\0",
    ],
)  # fmt: skip
def test_hostile_uris(skills, uri):
    """Whatever is not exactly a listed uri of a granted skill is one error with one text."""
    skills.put("acme/tidy")
    skills.put("acme/secret")
    skills.put("internal/core")
    skills.rules = {"*": {"disabled": ["acme.secret"]}}
    publication = skills.publication()
    for look in (publication.get, publication.read, publication.children):
        with pytest.raises(NotFound) as caught:
            look(uri)
        assert caught.value.message == NOT_FOUND


def test_copies_that_were_changed_are_noticed(skills):
    """Bytes of the kept copy are compared with the manifest on every read."""
    from kdskills.errors import RootChanged

    skills.put("acme/tidy", note=b"one")
    publication = skills.publication()
    entry = publication.get("skill://acme/tidy/SKILL.md")
    copy = skills.cache / "stage" / entry.tree.removeprefix("sha256:") / "note"
    copy.chmod(0o644)
    copy.write_bytes(b"two")
    with pytest.raises(RootChanged):
        publication.read("skill://acme/tidy/note")
