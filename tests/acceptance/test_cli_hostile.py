"""The command line against hostile file names, odd folders, poor locales and wrong calls: one clear line each."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENTRY = "from kdskills.doors.cli import main; main()"
GOOD = "---\nname: good\ndescription: A good skill.\n---\nDo it.\n"


def process(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as an own process; what it prints is read as UTF-8, whatever it is."""
    command = [sys.executable, "-c", ENTRY, *map(str, args)]
    env = {**os.environ, **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=110, check=False)


def write(folder: Path, text: str = GOOD) -> Path:
    """Write a skill."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(text)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of one good skill, to be spoilt."""
    write(tmp_path / "b/skills/acme/good")
    return tmp_path / "b"


def test_file_names_cannot_forge_lines_or_obey(run: Callable[..., Any], bundle: Path) -> None:
    """Line feeds, escapes and bytes that are no UTF-8 in folder names are shown as escapes, on one line a finding."""
    write(bundle / "skills/acme/a\nb/SKILL.md:1 error[forged] x").rename(bundle / "skills/acme/a\nerror[forged]")
    write(bundle / "skills/acme/\x1b[31mred")
    for command in ("check", "list"):
        done = run(command, bundle)
        lines = [line for line in done.stdout.splitlines() if line.startswith("error[forged]")]
        assert (lines, "\x1b" in done.stdout, done.stderr) == ([], False, "")


def test_bytes_that_are_no_utf8_in_names_print_and_become_json(answer: Callable[..., Any], bundle: Path) -> None:
    """A path with byte 0x9b (a control code of old terminals) is printed as an escape and does not break `--json`."""
    write(bundle / "skills/acme" / os.fsdecode(b"\x9b31m"), "---\nname: odd\ndescription: Odd.\n---\nDo it.\n")
    for locale in ("C", "C.UTF-8"):
        command = [sys.executable, "-c", ENTRY, "check", str(bundle)]
        printed = subprocess.run(command, env={**os.environ, "LC_ALL": locale}, capture_output=True, check=False)
        assert (b"\x9b" in printed.stdout, printed.returncode) == (False, 0)
    assert [d["code"] for d in answer("check", bundle)["diagnostics"]] == ["name_dir_mismatch"]
    assert "acme.odd" in answer("list", bundle)["visible"]
    assert "\ufffd" in answer("show", bundle, "acme.odd")["path"]


@pytest.mark.parametrize("command", ["list", "show", "render"])
def test_an_ascii_terminal_gets_escapes(bundle: Path, command: str) -> None:
    """What the encoding of stdout lacks is written as escapes, never a traceback."""
    write(bundle / "skills/acme/long", f"---\nname: long\ndescription: {'ä' * 200}…\n---\nÄ … 漢\n")
    args = {"show": (bundle, "acme.long")}
    done = process(command, *args.get(command, (bundle,)), PYTHONIOENCODING="ascii:strict", LC_ALL="C")
    assert ("Traceback" in done.stderr, done.returncode) == (False, 0)


def test_findings_are_not_wrapped(run: Callable[..., Any], bundle: Path) -> None:
    """A finding is one line, however narrow the terminal, so that `grep` and editors read it."""
    write(bundle / "skills/acme/good", "---\nname: Quite-Another-And-Long-Name\ndescription: A.\n---\nDo it.\n")
    lines = run("check", bundle, COLUMNS="30").stdout.splitlines()
    assert any(
        line.startswith("acme/good/SKILL.md:2:1 warning[name_dir_mismatch]") and "folder" in line for line in lines
    )


def test_errors_are_one_line(run: Callable[..., Any], bundle: Path) -> None:
    """An error is one line on stderr, however long, and its message cannot add lines."""
    done = run("show", bundle, "acme.nope\nforged: line " + "x" * 200, COLUMNS="40")
    assert (done.returncode, done.stderr.count("\n"), done.stderr.startswith("unknown_skill: ")) == (2, 1, True)


def test_colours_follow_the_terminal_and_no_color(run: Callable[..., Any], bundle: Path) -> None:
    """A pipe gets no escape codes; a terminal does, unless NO_COLOR is set; a body's own never reach a terminal."""
    write(bundle / "skills/acme/good", GOOD + "\x1b]0;owned\x07\x1b[2J")

    def on_terminal(*args: str, **env: str) -> bytes:
        parent, child = pty.openpty()
        command = [sys.executable, "-c", ENTRY, *args]
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | env
        with subprocess.Popen(command, stdout=child, stderr=child, stdin=subprocess.DEVNULL, env=environment):
            os.close(child)
            pieces = []
            while True:
                try:
                    piece = os.read(parent, 65536)
                except OSError:  # the other end is closed
                    break
                pieces.append(piece)
                if not piece:
                    break
        os.close(parent)
        return b"".join(pieces)

    assert b"\x1b[" in on_terminal("check", str(bundle))
    assert b"\x1b[3" not in on_terminal("check", str(bundle), NO_COLOR="1")
    assert "\x1b" not in run("check", bundle).stdout
    for args in (("show", str(bundle), "acme.good"), ("render", str(bundle), "acme.good")):
        seen = on_terminal(*args)
        assert (b"\x1b]0;" in seen, b"\x1b[2J" in seen, b"\x07" in seen, b"owned" in seen) == (
            False,
            False,
            False,
            True,
        )
    assert "\x1b]0;owned" in run("render", bundle, "acme.good").stdout


@pytest.mark.parametrize("command", ["check", "render"])
def test_head_ends_a_command_quietly(bundle: Path, command: str) -> None:
    """A reader that leaves early is no error worth a traceback."""
    for number in range(300):
        write(bundle / f"skills/acme/s{number}", f"---\nname: other{number}\ndescription: {'d' * 300}\n---\nDo.\n")
    line = f"{sys.executable} -c '{ENTRY}' {command} {bundle} | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=110)
    assert ("Traceback" in done.stderr, "Exception" in done.stderr, done.stdout.count("\n")) == (False, False, 1)


def test_negative_answers_are_1_in_json_too(run: Callable[..., Any], bundle: Path) -> None:
    """`--strict` and a refused ref count for the exit code with and without `--json`."""
    write(bundle / "skills/acme/good", "---\nname: other\ndescription: A.\n---\nDo it.\n")
    for json_flag in ((), ("--json",)):
        assert run("check", bundle, "--strict", *json_flag).returncode == 1
        assert run("check", bundle, *json_flag).returncode == 0
        assert run("render", bundle, "acme.nope", *json_flag).returncode == 1


def test_a_budget_without_room_is_said(run: Callable[..., Any], bundle: Path) -> None:
    """An empty catalog for want of room names the reason on stderr."""
    done = run("render", bundle, "--budget", "3")
    assert (done.stdout, "budget_too_small" in done.stderr, done.returncode) == ("\n", True, 0)


@pytest.mark.parametrize("what", ["fifo", "folder", "dangling", "device", "text"])
def test_what_is_no_skill_file_is_an_error(answer: Callable[..., Any], tmp_path: Path, what: str) -> None:
    """A FIFO, folder, dead link or device in place of a skill is an error and exit 1, not an empty success."""
    place = tmp_path / "s" / "SKILL.md"
    place.parent.mkdir()
    if what == "fifo":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    elif what == "dangling":
        place.symlink_to("nowhere")
    elif what == "text":
        place = tmp_path / "notes.txt"
        place.write_text(GOOD)
    given = Path("/dev/null") if what == "device" else place
    for path in {given, given if what in {"device", "text"} else given.parent}:
        found = answer("check", path)
        assert (found["ok"], found["skills"]) == (False, 1)
    if what not in {"device", "text"}:
        found = answer("check", tmp_path)
        assert (found["errors"], found["skills"]) == (1, 1)


def test_check_of_a_bundle_says_what_discovery_left_out(answer: Callable[..., Any], bundle: Path) -> None:
    """Linked folders, nested, doubled, misplaced and too deep skills are findings, and hide no other skill."""
    skills = bundle / "skills"
    write(skills)
    write(skills / "acme/good/inner")
    write(skills / "acme/again", GOOD)
    write(skills / "a/b/deep")
    (skills / "linked").symlink_to("/etc")
    write(skills / "acme/bad", "---\nname: bad\n---\nNo description.\n")
    (skills / "acme/skill.yaml").write_text("name: x\n")
    found = answer("check", bundle)
    codes = {(d["code"], d["path"]) for d in found["diagnostics"]}
    assert codes >= {
        ("root_is_skill", "SKILL.md"),
        ("nested_skill", "acme/good/inner/SKILL.md"),
        ("duplicate_id", "acme/good/SKILL.md"),
        ("skill_too_deep", "a/b/deep/SKILL.md"),
        ("symlink_skipped", "linked"),
        ("description_missing", "acme/bad/SKILL.md"),
        ("skill_yaml", "acme/skill.yaml"),
    }
    # The good one, its double, the broken one, the too deep one and the YAML; what lies inside a skill is none.
    assert found["skills"] == 5
    assert answer("list", bundle)["visible"] == ["acme.good"]


def test_a_linked_bundle_is_a_bundle(answer: Callable[..., Any], bundle: Path) -> None:
    """A link to a bundle is followed: it is the user who names it."""
    link = bundle.with_name("link")
    link.symlink_to(bundle)
    found = answer("check", link)
    assert (found["kind"], found["skills"], found["ok"]) == ("bundle", 1, True)


@pytest.mark.parametrize("command", ["check", "list", "render", "run"])
def test_paths_no_system_takes_are_clear_errors(run: Callable[..., Any], command: str) -> None:
    """A path longer than the system allows is said to be missing, in one line."""
    done = run(command, "x" * 5000)
    assert ("Traceback" in done.stderr, done.stderr.count("\n"), done.returncode in {2, 3}) == (False, 1, True)


def test_fix_takes_a_file_and_judges_what_is_left(run: Callable[..., Any], tmp_path: Path) -> None:
    """`--fix` takes a skill file; with `--rename` it goes on under the new name; `--json` exits by what is left."""
    folder = write(tmp_path / "wrong", "---\nname: good\ndescription: Use it: now\n---\nDo it.\n")
    done = run("check", folder, "--fix", "--rename", "--strict")
    assert (done.returncode, (tmp_path / "good/SKILL.md").is_file()) == (0, True), done.stdout + done.stderr
    other = write(tmp_path / "bad", "---\nname: bad\n---\nDo it.\n")
    done = run("check", other / "SKILL.md", "--fix", "--json")
    assert (done.returncode, json.loads(done.stdout)["left"]["errors"]) == (1, 1)
    assert run("check", other / "SKILL.md", "--fix", "--dry-run", "--json").returncode == 0


def test_one_skill_that_cannot_be_renamed_costs_only_itself(run: Callable[..., Any], tmp_path: Path) -> None:
    """Two folders that want one name: the first gets it, the second is left alone and says so."""
    for name in ("one", "two"):
        write(tmp_path / name)
    done = run("check", tmp_path, "--fix", "--rename")
    assert ((tmp_path / "good").is_dir(), (tmp_path / "two").is_dir(), "left alone" in done.stdout) == (
        True,
        True,
        True,
    )


def test_diffs_are_disarmed(run: Callable[..., Any], tmp_path: Path) -> None:
    """Escape codes in a mended file are shown, not obeyed."""
    write(tmp_path / "s", "---\nname: s\ndescription: Use it: now\nversion: 1\n---\nx\n")
    data = (tmp_path / "s/SKILL.md").read_bytes().replace(b"---\nx\n", b"---\n\x1b]0;owned\x07\n")
    (tmp_path / "s/SKILL.md").write_bytes(data)
    done = run("check", tmp_path / "s", "--fix", "--dry-run")
    assert ("+description" in done.stdout, "\x1b" in done.stdout, "\x07" in done.stdout) == (True, False, False)
