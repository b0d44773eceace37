"""The index makes the next start quick and is believed only when it is certainly right."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills.skills import index as index_module
from kdskills.skills.discovery import RootScanner
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot

SKILL = """---
name: {name}
description: does things
version: 2.50
tags: [a, b]
when_to_use: [one, two]
imports: [acme.other]
include_for: ["writer*"]
arguments: [{{name: topic, description: what, default: news}}]
allowed-tools: Bash(git *) Read
argument_hint: "[topic]"
agent_disclosure: hidden
insert: user-message
disable_model_invocation: true
metadata: {{code: 0010}}
odd: [1, 2.5, null, true, {{deep: ä}}]
---
Body.
"""


def age(root):
    old = time.time() - 60
    for place in (*Path(root).rglob("*"), Path(root)):
        if not place.is_symlink():
            os.utime(place, (old, old))


@pytest.fixture
def root(tmp_path):
    for number in range(3):
        folder = tmp_path / "skills" / "acme" / f"skill-{number}"
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(SKILL.format(name=folder.name))
        (folder / "tools.yaml").write_text("- {id: web.search, role: finder, why: facts, required: true}\n")
    (tmp_path / "skills" / "acme" / "bad").mkdir()
    (tmp_path / "skills" / "acme" / "bad" / "SKILL.md").write_text("nothing\n")
    age(tmp_path / "skills")
    return tmp_path / "skills"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "cache" / "index"


def make(root, store):
    return SkillRegistry([SkillRoot("bundle://skills", root, "bundle", "bundle")], index_dir=store)


@pytest.fixture
def reads(monkeypatch):
    """Count the folders listed anew by each walk."""
    counts = []
    run = RootScanner.run

    def counted(self):
        scan = run(self)
        counts.append(len(self.listed))
        return scan

    monkeypatch.setattr(RootScanner, "run", counted)
    return counts


def only(store):
    (file,) = store.iterdir()
    return file


def codes(snapshot):
    return sorted(note.code for note in snapshot.diagnostics)


def test_a_warm_start_reads_nothing_and_says_the_same(root, store, reads):
    """What comes from the index equals what came from the files, in every field."""
    cold = make(root, store).snapshot()
    warm = make(root, store).snapshot()
    assert reads == [6, 0]
    assert warm.skills == cold.skills
    assert {k: v.frontmatter for k, v in warm.skills.items()} == {k: v.frontmatter for k, v in cold.skills.items()}
    assert (warm.invalid, warm.diagnostics, warm.roots, warm.digest) == (
        cold.invalid,
        cold.diagnostics,
        cold.roots,
        cold.digest,
    )
    skill = warm.skills["acme.skill-0"]
    assert (skill.version, skill.metadata, skill.tools[0].required, skill.hidden) == (
        "2.50",
        {"code": "0010"},
        True,
        True,
    )
    assert skill.frontmatter["odd"] == [1, 2.5, None, True, {"deep": "ä"}]
    assert list(skill.frontmatter)[:2] == ["name", "description"]
    assert skill.body == "Body."


def test_a_frontmatter_never_changes(root, store):
    """What is taken out of a frontmatter is a copy, whether it was JSON text before, became it now, or came from an index."""
    unused, written, warm = (make(root, folder).snapshot() for folder in (None, store, store))
    for snapshot in (unused, written, warm):
        frontmatter = snapshot.skills["acme.skill-0"].frontmatter
        frontmatter["odd"].append("more")
        assert (frontmatter["odd"], len(frontmatter["odd"])) == ([1, 2.5, None, True, {"deep": "ä"}], 5)
        assert frontmatter == unused.skills["acme.skill-0"].frontmatter


def test_the_file_is_private_and_holds_no_body(root, store):
    """Mode 0600 in a folder 0700, written whole, without bodies and without leftovers."""
    make(root, store).snapshot()
    file = only(store)
    assert (file.stat().st_mode & 0o777, store.stat().st_mode & 0o777) == (0o600, 0o700)
    assert b"Body." not in file.read_bytes()


def test_no_index_dir_keeps_nothing(root, store):
    """`None` writes nothing."""
    make(root, None).snapshot()
    assert not store.exists()


def test_the_default_is_the_users_cache(root, tmp_path, monkeypatch):
    """`"default"` is `$XDG_CACHE_HOME/kdskills/index`, or below `~/.cache` when that is unset or relative."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    make(root, "default").snapshot()
    assert only(tmp_path / "home" / ".cache" / "kdskills" / "index").is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    make(root, "default").snapshot()
    assert only(tmp_path / "xdg" / "kdskills" / "index").is_file()


def test_an_index_that_cannot_be_written_is_a_finding(root, tmp_path):
    """A file where the folder should be costs the index, not the skills."""
    (tmp_path / "cache").write_text("")
    found = make(root, tmp_path / "cache" / "index").snapshot()
    assert (len(found.skills), "index_not_written" in codes(found)) == (3, True)


# ---- what is not believed ----------------------------------------------------------------------------------------


def _body(text):
    head, _, body = text.partition(b"\n")
    return head, body


def _flip(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def _forge(data, body=b'{"checked_at":1}'):
    """Change the body and mend the checksum, with another shape."""
    import hashlib

    head, _ = _body(data)
    header = {**json.loads(head), "checksum": hashlib.sha256(body).hexdigest()}
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + body


DAMAGE = {
    "a first line nested too deep": lambda data: b"[" * 100_000,
    "flipped": _flip,
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "no json": lambda data: b"\xff\xfe" + data,
    "the version before": lambda data: data.replace(b'"format":2', b'"format":1', 1),
    "other parser": lambda data: data.replace(b'"parser":', b'"parsed":', 1),
    "other root": lambda data: data.replace(b'/skills"', b'/skillz"', 1),
    "head is a list": lambda data: b"[]\n" + _body(data)[1],
    "other shape": _forge,
    "a frontmatter too few": lambda data: _forge(data, _body(data)[1].rpartition(b"\n")[0]),
    "a frontmatter too many": lambda data: _forge(data, _body(data)[1] + b"\n{}"),
    "no stamps": lambda data: _forge(data, b"\n".join([(lines := _body(data)[1].split(b"\n"))[0], b"", *lines[2:]])),
    "stamps too many": lambda data: _forge(data, _body(data)[1].replace(b"\n", b"\nAAAA", 1)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_index_is_ignored_and_rebuilt(root, store, damage):
    """Whatever is wrong with the file, skills are read anew, `index_ignored` says why, and the next start is quick."""
    make(root, store).snapshot()
    file = only(store)
    file.write_bytes(damage(file.read_bytes()))
    found = make(root, store).snapshot()
    note = next(note for note in found.diagnostics if note.code == "index_ignored")
    assert (len(found.skills), note.severity) == (3, "info")
    assert "index_ignored" not in codes(make(root, store).snapshot())


def test_an_index_others_may_write_is_ignored(root, store):
    """A mode that lets others write is not trusted; the new file is private again."""
    make(root, store).snapshot()
    only(store).chmod(0o620)
    assert "index_ignored" in codes(make(root, store).snapshot())
    assert only(store).stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_index_of_another_user_is_ignored(root, store):
    """The owner must be this user."""
    make(root, store).snapshot()
    os.chown(only(store), 12345, -1)
    assert "index_ignored" in codes(make(root, store).snapshot())


def test_a_linked_index_or_a_fifo_is_ignored(root, store, tmp_path):
    """A link is not followed and a FIFO does not block; both are replaced by a file."""
    make(root, store).snapshot()
    file = only(store)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "index_ignored" in codes(make(root, store).snapshot())
    assert not file.is_symlink()
    file.unlink()
    os.mkfifo(file)
    assert "index_ignored" in codes(make(root, store).snapshot())
    assert file.is_file()


def test_a_folder_in_place_of_an_index_costs_only_the_index(root, store):
    """A folder of the index's name cannot be replaced, which is said, and nothing stays open."""
    make(root, store).snapshot()
    file = only(store)
    file.unlink()
    file.mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = make(root, store).snapshot()
    assert (len(found.skills), "index_not_written" in codes(found)) == (3, True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_huge_index_is_ignored(root, store, monkeypatch):
    """A file beyond the bound is not read."""
    make(root, store).snapshot()
    monkeypatch.setattr(index_module, "MAX_BYTES", 10)
    assert "index_ignored" in codes(make(root, store).snapshot())


def test_roots_read_otherwise_have_indexes_of_their_own(root, store):
    """Kind, namespace and nesting change what files mean, so they share no index."""
    for kind, namespace, nested in (
        ("bundle", None, False),
        ("plugin", None, False),
        ("bundle", "x", False),
        ("bundle", None, True),
    ):
        place = SkillRoot("x://", root, "x", kind, namespace=namespace, nested=nested)
        SkillRegistry([place], index_dir=store).snapshot()
    assert len(list(store.iterdir())) == 4


# ---- stamps -----------------------------------------------------------------------------------------------------


def test_files_changed_just_before_are_hashed_again(root, store, reads):
    """A modification time within two seconds of the index's writing proves nothing; later it does."""
    file = root / "acme/skill-1/SKILL.md"
    os.utime(file)
    make(root, store).snapshot()
    make(root, store).snapshot()
    assert reads == [6, 1]


def test_a_same_size_edit_right_after_the_index_was_written_is_seen(root, store):
    """Size, times and inode are equal, and still the next process sees the new bytes."""
    file = root / "acme/skill-1/SKILL.md"
    os.utime(file)
    make(root, store).snapshot()
    facts = file.stat()
    with file.open("r+") as stream:
        stream.write(SKILL.format(name="skill-1").replace("does things", "does stuffs"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert make(root, store).snapshot().skills["acme.skill-1"].description == "does stuffs"


@pytest.mark.parametrize("change", ["edit", "replace", "folder", "companion", "remove", "add", "link"])
def test_every_change_between_two_starts_is_seen(root, store, change):
    """What changed while nobody ran is found by the next start."""
    make(root, store).snapshot()
    folder = root / "acme/skill-1"
    other = SKILL.format(name="skill-1").replace("does things", "does stuffs")
    if change == "edit":
        (folder / "SKILL.md").write_text(other)
    elif change == "replace":
        (folder / "new").write_text(other)
        (folder / "new").replace(folder / "SKILL.md")
    elif change == "folder":
        folder.rename(root / "acme/skill-9")
    elif change == "companion":
        (folder / "tools.yaml").write_text("[]\n")
    elif change == "remove":
        (folder / "SKILL.md").unlink()
    elif change == "add":
        (root / "acme/more").mkdir()
        (root / "acme/more/SKILL.md").write_text(SKILL.format(name="more"))
    else:
        folder.rename(root.parent / "elsewhere")
        folder.symlink_to(root.parent / "elsewhere")
    age(root)
    fresh, warm = make(root, None).snapshot(), make(root, store).snapshot()
    assert (warm.skills, warm.digest, warm.diagnostics) == (fresh.skills, fresh.digest, fresh.diagnostics)


def test_a_small_change_in_a_large_root_does_not_rewrite_the_index(tmp_path, store):
    """One change in two hundred leaves the file; the next start reads that one again and is right."""
    for number in range(200):
        folder = tmp_path / "skills" / "acme" / f"skill-{number}"
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: skill-{number}\ndescription: d\n---\nBody.\n")
    age(tmp_path / "skills")
    registry = make(tmp_path / "skills", store)
    registry.snapshot()
    written = only(store).stat().st_ino
    (tmp_path / "skills/acme/skill-7/SKILL.md").write_text("---\nname: skill-7\ndescription: e\n---\nBody.\n")
    assert registry.refresh().changed == ("acme.skill-7",)
    assert only(store).stat().st_ino == written
    assert make(tmp_path / "skills", store).snapshot().skills["acme.skill-7"].description == "e"
    for number in range(10):
        (tmp_path / f"skills/acme/skill-{number}/SKILL.md").write_text(
            f"---\nname: skill-{number}\ndescription: f\n---\n"
        )
    registry.refresh()
    assert only(store).stat().st_ino != written


def test_processes_share_one_index(root, store, tmp_path):
    """Several processes starting and writing at once all see all skills and leave one whole file."""
    program = tmp_path / "start.py"
    program.write_text(
        "import sys, shutil\n"
        "from pathlib import Path\n"
        "from kdskills.skills.registry import SkillRegistry\n"
        "from kdskills.skills.roots import SkillRoot\n"
        "root = SkillRoot('bundle://skills', Path(sys.argv[1]), 'bundle', 'bundle')\n"
        "for turn in range(10):\n"
        "    registry = SkillRegistry([root], index_dir=Path(sys.argv[2]))\n"
        "    found = registry.snapshot()\n"
        "    assert len(found.skills) == 3, found\n"
        "    assert not [n for n in found.diagnostics if n.code.startswith('index')], found.diagnostics\n"
        "    for file in Path(sys.argv[2]).glob('[!.]*'):\n"
        "        file.unlink(missing_ok=True)\n"
    )
    started = [subprocess.Popen([sys.executable, str(program), str(root), str(store)]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    make(root, store).snapshot()
    assert len(list(store.iterdir())) == 1


def no_home(monkeypatch):
    """Make this process one of a user without an account and without HOME."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_home_there_is_no_index_and_no_folder_called_tilde(tmp_path, monkeypatch):
    """A uid without an account gets no index, instead of one in `./~` of wherever it was started."""
    no_home(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skills" / "a").mkdir(parents=True)
    (tmp_path / "skills" / "a" / "SKILL.md").write_text("---\nname: a\ndescription: d\n---\nDo it.\n")
    registry = SkillRegistry([SkillRoot("bundle://skills", tmp_path / "skills", "bundle", "bundle")])
    assert (list(registry.refresh().added), [p.name for p in tmp_path.iterdir()]) == (["public.a"], ["skills"])
    assert index_module.default_index_dir() is None
