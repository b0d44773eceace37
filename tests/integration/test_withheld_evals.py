"""Evaluations hold the answers: no model and no program that one starts sees them, by whatever door."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdskills.app import Host
from kdskills.app.publication import Publication
from kdskills.builtin.roots.mcp.listing import FarFiles, read_entry
from kdskills.bundle import load_bundle
from kdskills.errors import FileRefused, KdskillsError, NotFound, RootChanged
from kdskills.execution import SkillMount
from kdskills.execution.stage import stage_skill
from kdskills.remote import publish
from kdskills.session import SkillRuntime
from kdskills.skills.archives import write_archive
from kdskills.skills.folder import shown_digest
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot
from kdskills.skills.safe_open import read_tree, tree_digest, walk_tree
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say
from kdskills.turn import SkillsSubsystem, set_skills_descriptor

ANSWER = "forty-two"
LOOK = """
import os, sys
top = sys.argv[1] if len(sys.argv) > 1 else os.environ["SKILL_DIR"]
print(sorted(os.path.relpath(os.path.join(at, name), top) for at, _, names in os.walk(top) for name in names))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bundle with one skill that has evaluations, and files that only sound like them."""
    files = {
        "SKILL.md": "---\nname: sums\ndescription: Sums.\n---\nSum with $SKILL_DIR/scripts/look.py.\n",
        "scripts/look.py": LOOK,
        "references/evals.md": "How sums are judged.\n",
        "evals/evals.json": json.dumps([{"prompt": "6 * 7", "expected_output": ANSWER}]),
        "evals/files/task/numbers.txt": ANSWER,
    }
    for name, text in files.items():
        path = tmp_path / "bundle/skills/acme/sums" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "bundle/evals").mkdir()
    (tmp_path / "bundle/evals/all.json").write_text(json.dumps([{"prompt": "1 + 1", "expected_output": ANSWER}]))
    return tmp_path / "bundle"


SHOWN = ["SKILL.md", "references/evals.md", "scripts/look.py"]


@pytest.fixture
def subsystem(root: Path) -> SkillsSubsystem:
    """The bundle's skills."""
    return SkillsSubsystem(load_bundle(root).descriptor, bundle_root=root, roots=(), index_dir=None)


@pytest.fixture
def skill(subsystem):
    """The skill."""
    return subsystem.registry["acme.sums"]


def test_they_belong_to_the_digest_and_to_archives(skill):
    """A tree digest tells of a change in them, and people who download a skill get them."""
    before, shown = skill.tree_digest(), shown_digest(skill)
    stream = io.BytesIO()
    write_archive(skill.folder, stream)
    assert "evals/evals.json" in " ".join(zipfile.ZipFile(stream).namelist())
    (skill.folder / "evals/evals.json").write_text("[]")
    assert (skill.tree_digest() != before, shown_digest(skill)) == (True, shown)


def test_what_is_mounted_of_a_locked_skill_is_locked(skill):
    """A skill that is held to its files is not mounted when an evaluation changed, though it would not be seen."""
    skill.content.pin("\0".join(file.line for file in read_tree(skill.folder)))
    assert shown_digest(skill) == tree_digest(skill.folder, shown=True)
    (skill.folder / "evals/evals.json").write_text("[]")
    with pytest.raises(FileRefused) as caught:
        shown_digest(skill)
    assert caught.value.code == "skill_changed"


@pytest.mark.parametrize("path", ["evals/evals.json", "evals", "./evals//files/task/numbers.txt", "EVALS/evals.json"])
async def test_a_session_does_not_read_them(subsystem, path):
    """They are refused in the words for a file that is not there, and no list of neighbours names them."""
    session = await SkillRuntime(subsystem=subsystem).create_session(initial=["sums"])
    with pytest.raises(KdskillsError) as caught:
        await session.read(path)
    assert caught.value.code == "resource_not_found"
    assert "evals" not in str(caught.value.details["siblings"])
    with pytest.raises(KdskillsError) as missing:
        await session.read("none.txt")
    assert missing.value.details["siblings"] == ["SKILL.md", "references/", "scripts/"]


async def test_tools_for_files_do_not_find_them(root, tmp_path):
    """`files.glob`, `files.grep` and `files.read` know the other files of the skill alone."""
    asked = [
        call("files_glob", pattern="$SKILL_DIR/**"),
        call("files_grep", pattern="forty", path="$SKILL_DIR"),
        call("files_read", path="$SKILL_DIR/evals/evals.json"),
        call("files_glob", pattern="**"),
    ]
    system = SolverSystem(
        bundle=load_bundle(root),
        model=ScriptedModel([call("skills_load", names=["sums"]), *asked, say("done")]),
        settings=SolverSettings(work_dir=tmp_path / "turns"),
    )
    async with system:
        result = await ReactSolver(system).run("x")
    globbed, grepped, read, below = (step.calls[0] for step in result.steps[1:] if step.calls)
    assert json.loads(globbed.result)["paths"] == [f"/skills/acme.sums/{path}" for path in SHOWN]
    assert (json.loads(grepped.result)["matches"], read.error) == ([], "resource_not_found")
    assert json.loads(below.result)["paths"] == []
    assert ANSWER not in "".join(call_.result or "" for step in result.steps for call_ in step.calls)


async def test_no_script_starts_among_them(subsystem):
    """They are no working folder of a script."""
    runtime = SkillRuntime(subsystem=subsystem, run_scripts=True, executor=SimpleNamespace(name="none"))
    session = await runtime.create_session(initial=["sums"])
    with pytest.raises(KdskillsError) as caught:
        await session.run_script("scripts/look.py", workdir="evals/files")
    assert caught.value.code == "resource_not_found"


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")),
        pytest.param("docker", marks=pytest.mark.needs("docker")),
    ],
)
async def test_no_program_sees_them(root, tmp_path, engine):
    """A script, a command and generated code find the other files alone, where the skill is mounted."""
    code = f"import sys\nsys.argv = ['look', '/skills/acme.sums']\n{LOOK}"
    system = SolverSystem(
        bundle=load_bundle(root),
        model=ScriptedModel(
            [
                call("skills_load", names=["sums"]),
                call("skills_run_script", path="scripts/look.py"),
                call("exec_shell", command="ls -R $SKILL_DIR; cat $SKILL_DIR/evals/* || true"),
                call("exec_python", code=code),
                say("done"),
            ]
        ),
        executor=engine,
        settings=SolverSettings(work_dir=tmp_path / "turns"),
        wiring=Host(entry_points=False).wiring,
    )
    async with system:
        result = await ReactSolver(system).run("x")
    answers = [json.loads(step.calls[0].result) for step in result.steps[1:] if step.calls]
    assert [answers[0]["stdout"], answers[2]["stdout"]] == [f"{SHOWN}\n"] * 2, answers
    assert "evals.md" in answers[1]["stdout"]
    assert ("evals.json" in answers[1]["stdout"], ANSWER in str(answers)) == (False, False)


def test_copies_have_none(skill, tmp_path):
    """A staged copy has the shown files, is found again, and is refused for another tree."""
    mount = SkillMount("acme.sums", skill.folder, shown_digest(skill))
    copy = stage_skill(mount, tmp_path / "cache")
    assert [entry.path for entry in walk_tree(copy)] == SHOWN
    (skill.folder / "evals/evals.json").write_text("[]")
    inode = copy.stat().st_ino
    assert stage_skill(mount, tmp_path / "cache").stat().st_ino == inode
    with pytest.raises(RootChanged):
        stage_skill(SkillMount("acme.sums", skill.folder, skill.tree_digest()), tmp_path / "cache")


def test_a_server_does_not_list_them(subsystem, tmp_path):
    """Skills published over MCP have no such resource: not in their list, not by its uri, not as a directory."""
    publication = Publication(subsystem.view(None), {}, tmp_path / "cache")
    (entry,), _ = publication.entries()
    assert [file.path for file in entry.files] == SHOWN
    assert "evals" not in [child.name for child in publication.children(entry.base)]
    for path in ("evals/evals.json", "evals"):
        with pytest.raises(NotFound):
            publication.read(f"{entry.base}/{path}")
        with pytest.raises(NotFound):
            publication.children(f"{entry.base}/{path}")


@pytest.mark.parametrize("listed", [True, False])
def test_those_of_another_server_are_not_read(tmp_path, listed):
    """Where a foreign server lists evaluations, or serves whatever it is asked for, none is asked for."""
    base, digest = "skill://acme/sums", f"sha256:{'0' * 64}"
    files = [
        {"uri": f"{base}/{path}", "digest": digest, "size": 1} for path in ("SKILL.md", "evals/evals.json", "a.md")
    ]
    row = {"uri": f"{base}/SKILL.md", "frontmatter": {"name": "sums"}, "resources": files if listed else "dynamic"}
    asked: list[object] = []
    server = SimpleNamespace(read=lambda uris: asked.append(uris) or [b"x"])
    far = FarFiles(read_entry(row, allow_dynamic=True), server, tmp_path, lambda entry: None, lambda *_: None)
    assert far.paths == (("SKILL.md", "a.md") if listed else ())
    with pytest.raises(FileRefused) as caught:
        far.fetch("evals/evals.json", 100)
    assert (caught.value.code, asked) == ("file_missing", [])


def test_codex_is_given_none(subsystem, tmp_path):
    """The folder that skills are written to for another agent has the shown files."""
    view = subsystem.view(None)
    with contextlib.ExitStack() as failing:
        folder, notes = publish._write(tmp_path, view, {"sums": ("acme.sums", None)}, {"acme.sums": "text"}, failing)
        paths = [entry.path for entry in walk_tree(Path(folder) / "sums")]
    assert (paths, notes) == (SHOWN, [])


def test_exported_skills_are_checked_without_them(root, subsystem, tmp_path):
    """An export holds of a folder that has evaluations and of a copy that has none: other processes have either."""
    names = json.loads(json.dumps(subsystem.view(None).export_runtime_globals()))
    (row,) = names["SKILLS_DESCRIPTOR"]["skills"]
    folder = root / "skills/acme/sums"
    copy = stage_skill(SkillMount(row["id"], folder, row["tree"]), tmp_path / "cache")
    for path in (folder, copy):
        assert tree_digest(path, shown=True) == row["tree"]
    restore = partial(copy_context().run, set_skills_descriptor, names["SKILLS_DESCRIPTOR"], verify="tree")
    assert restore().registry["acme.sums"].folder == folder
    folder.joinpath("scripts/look.py").write_text("")
    with pytest.raises(RootChanged):
        restore()


def test_skills_among_them_are_none(root):
    """Where skills may lie in skills, one that evaluations work on is still no skill to load."""
    for path in ("evals/files/trap", "more/inner"):
        folder = root / "skills/acme/sums" / path
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {folder.name}\ndescription: d\n---\n{ANSWER}\n")
    nested = SkillRoot("bundle://skills", root / "skills", "bundle", "bundle", nested=True)
    assert sorted(SkillRegistry([nested], index_dir=None).snapshot().skills) == ["acme.inner", "acme.sums"]
