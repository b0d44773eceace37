"""Mending skill folders: planned without effect, applied in one step."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import FileRefused
from kdskills.skills import parse_skill, parse_skill_bytes
from kdskills.skills.fix import FixPlan, apply_fix, plan_fix

BODY = b"# Title  \r\n\r\n---\r\n...\r\nallowed-tools: [x]\r\n\xe2\x80\xa8 end"


def planned(path: Path, *, rename: bool = False) -> FixPlan:
    """Return a plan that must exist."""
    plan = plan_fix(path, rename=rename)
    assert plan is not None
    return plan


def mended(put: Callable[..., Path], data: bytes) -> bytes:
    """Return a skill file of a folder called `brief` after mending."""
    return apply_fix(planned(put("brief", data))).read_bytes()


HEAD = b"---\nname: brief\ndescription: d\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xef\xbb\xbf" + HEAD + b"---\nx", HEAD + b"---\nx"),
        (HEAD + b"...\nx", HEAD + b"---\nx"),
        (HEAD + b"... \t\r\nx", HEAD + b"---\r\nx"),
        (
            b"---\nname: brief\ndescription: it's: so # note\n---\nx",
            b"---\nname: brief\ndescription: 'it''s: so' # note\n---\nx",
        ),
        (HEAD + b"allowed-tools: [Read, 'Bash(a b)']\n---\nx", HEAD + b"allowed-tools: Read Bash(a b)\n---\nx"),
        (
            HEAD + b"allowed-tools:\n  - Read\n  - Write\nversion: 1\n---\nx",
            HEAD + b"allowed-tools: Read Write\nversion: 1\n---\nx",
        ),
        (
            HEAD + b"allowed_tools: [\n  Read,\n  Write\n  ]\nversion: 1\n---\nx",
            HEAD + b"allowed_tools: Read Write\nversion: 1\n---\nx",
        ),
        (HEAD + b"allowed-tools: ['Bash(git: x)', '#a']\n---\nx", HEAD + b"allowed-tools: 'Bash(git: x) #a'\n---\nx"),
        (HEAD + b"argument-hint: [a] [b]\n---\nx", HEAD + b"argument-hint: '[a] [b]'\n---\nx"),
    ],
)
def test_each_mend(before: bytes, after: bytes, put: Callable[..., Path]) -> None:
    """Each kind of slip is mended, to the byte."""
    assert mended(put, before) == after


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"---\nx",  # nothing to do
        HEAD + b"allowed-tools:\n  - Read # why\n  - Write\n---\nx",  # a comment would be lost
        HEAD + b"allowed-tools: {a: b}\n---\nx",
        HEAD + b"metadata: 5\n---\nx",  # not ours to decide
        b"---\nname: brief\n---\nx",  # refused as it is
        b"\xef\xbb\xbfno frontmatter",
        b"",
    ],
)
def test_what_is_left_alone(data: bytes, put: Callable[..., Path]) -> None:
    """A file without a certain mend stays byte-equal."""
    plan = planned(put("brief", data))
    assert (plan.changed, plan.diff, plan.after) == (False, "", data)


def test_everything_at_once_keeps_body_mode_and_fields(put: Callable[..., Path]) -> None:
    """All mends together leave body bytes, mode and fields as they were; mending again does nothing."""
    data = b"\xef\xbb\xbf---\r\nname: brief\r\ndescription: a: b\r\nallowed-tools: [A, B]\r\n...\r\n" + BODY
    folder = put("brief", data, name="skill.md")
    (folder / "skill.md").chmod(0o640)
    before = parse_skill(folder).skill
    assert before is not None
    body = before.body
    place = apply_fix(planned(folder))
    after = parse_skill(folder)
    assert place == folder / "SKILL.md"
    assert place.read_bytes() == b"---\r\nname: brief\r\ndescription: 'a: b'\r\nallowed-tools: A B\r\n---\r\n" + BODY
    assert stat.S_IMODE(place.stat().st_mode) == 0o640
    assert after.skill is not None
    assert (after.diagnostics, after.skill.description, after.skill.body) == ((), "a: b", body)
    assert [p.name for p in folder.iterdir()] == ["SKILL.md"]
    assert planned(folder, rename=True).changed is False


def test_planning_touches_nothing(put: Callable[..., Path]) -> None:
    """A plan is only a plan."""
    folder = put("Other", b"\xef\xbb\xbf" + HEAD + b"---\nx", name="skill.md")
    before = [(p.name, p.read_bytes()) for p in folder.iterdir()]
    assert planned(folder, rename=True).changed
    assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == before


def test_diff_shows_renames_and_lines(put: Callable[..., Path]) -> None:
    """The diff names old and new places and the changed lines."""
    plan = planned(put("Other", HEAD + b"...\nx", name="skill.md"), rename=True)
    assert plan.diff.splitlines() == [
        "rename from Other/skill.md",
        "rename to brief/SKILL.md",
        "--- a/Other/skill.md",
        "+++ b/brief/SKILL.md",
        "@@ -1,5 +1,5 @@",
        " ---",
        " name: brief",
        " description: d",
        "-...",
        "+---",
        " x",
    ]


def test_rename_fits_the_folder_to_the_name(put: Callable[..., Path], tmp_path: Path) -> None:
    """The folder takes the name; without `rename` it stays."""
    folder = put("Other")
    assert planned(folder).changed is False
    assert apply_fix(planned(folder, rename=True)) == tmp_path / "brief" / "SKILL.md"
    assert (folder.exists(), parse_skill(tmp_path / "brief").diagnostics) == (False, ())


@pytest.mark.parametrize("name", ["a/b", "..", "' .x'", "é" + "x" * 300])
def test_names_that_cannot_be_folders(name: str, put: Callable[..., Path]) -> None:
    """An unsafe or impossible name renames nothing, and says so."""
    folder = put("other", f"---\nname: {name}\ndescription: d\n---\nx")
    plan = planned(folder, rename=True)
    assert (plan.new_folder_name, plan.changed, len(plan.skipped)) == ("other", False, 1)


def test_taken_names_are_kept_free(put: Callable[..., Path]) -> None:
    """Neither a folder nor a file is ever overwritten."""
    put("brief")
    other = put("other", name="skill.md")
    put("other", b"junk")
    assert planned(put("third"), rename=True).skipped == ("The folder keeps its name: 'brief' is there already.",)
    (other / "SKILL.md").unlink()
    plan = planned(other)
    (other / "SKILL.md").write_bytes(b"came later")
    with pytest.raises(FileRefused) as caught:
        apply_fix(plan)
    assert (caught.value.code, (other / "SKILL.md").read_bytes()) == ("taken", b"came later")


def test_a_file_changed_since_is_not_overwritten(put: Callable[..., Path]) -> None:
    """A plan serves only for the bytes it was made for."""
    folder = put("brief", HEAD + b"...\nx")
    plan = planned(folder)
    (folder / "SKILL.md").write_bytes(HEAD + b"...\nnewer")
    with pytest.raises(FileRefused) as caught:
        apply_fix(plan)
    assert (caught.value.code, (folder / "SKILL.md").read_bytes()) == ("changed", HEAD + b"...\nnewer")


def test_a_failing_write_leaves_the_old_file(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the new file cannot be put in place, the old one stands and nothing is left behind."""
    folder = put("brief", HEAD + b"...\nx")
    plan = planned(folder)

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(FileRefused, match="No space left"):
        apply_fix(plan)
    assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == [("SKILL.md", HEAD + b"...\nx")]


def test_links_are_not_mended(put: Callable[..., Path]) -> None:
    """A linked skill file has no plan, nor has a missing one."""
    folder = put("brief", name="real.md")
    (folder / "SKILL.md").symlink_to("real.md")
    assert (plan_fix(folder), plan_fix(folder / "nothing")) == (None, None)


_LINES = st.lists(
    st.sampled_from(
        [
            b"version: 1.0",
            b"argument-hint: [a] b",
            b"allowed-tools: [A, B]",
            b"allowed-tools:\n  - A\n  - 'B: c'",
            b"license: a: b",
            b"tags: [x]",
            b"# note",
            b"",
            b"category: @x",
            b'author: "q" r',
            b"foo: bar:",
            b"metadata:\n  a: '1'",
            b"created: 2024-01-01 # c",
        ]
    ),
    max_size=5,
    unique=True,
)


@given(
    _LINES,
    st.sampled_from([b"---", b"...", b"--- "]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.binary(max_size=30),
)
def test_mending_never_changes_fields_or_body(
    lines: list[bytes], close: bytes, bom: bytes, end: bytes, body: bytes
) -> None:
    """However a file is written, its mend has the same fields, the same body bytes and no more findings."""
    import tempfile

    text = b"\n".join([b"---", b"name: brief", b"description: d", *lines, close]) + b"\n"
    data = bom + text.replace(b"\n", end) + body
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "brief")
        folder.mkdir()
        (folder / "SKILL.md").write_bytes(data)
        plan = planned(folder)
        assert plan.after.endswith(body)
        before, after = (parse_skill_bytes(raw, folder="brief") for raw in (plan.before, plan.after))
        assert (before.skill is None) is (after.skill is None)
        assert len(after.diagnostics) < len(before.diagnostics) or plan.after == plan.before
        if before.skill and after.skill:
            for name in ("description", "license", "version", "tags", "allowed_tools", "metadata", "author", "body"):
                assert getattr(after.skill, name) == getattr(before.skill, name)
        apply_fix(plan)
        assert planned(folder).changed is False


@pytest.mark.parametrize("item", ['x "' + '\\"' * 25_000, 'x "' + "\\" * 50_001, "x '" + "''" * 25_000])
def test_planning_is_linear(put: Callable[..., Path], item: str) -> None:
    """Quotes that are never closed are looked through once; a comment behind one is still seen."""
    head = "---\nname: brief\ndescription: d\nallowed-tools:\n- "
    started = time.process_time()
    assert planned(put("brief", f"{head}{item}\n---\nx".encode())).changed
    assert time.process_time() - started < 1
    assert not planned(put("brief", f"{head}{item} # why\n---\nx".encode())).changed
