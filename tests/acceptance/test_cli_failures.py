"""The command line where something is missing or refuses: one clear error with its code, JSON where it was asked for."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdskills.doors.cli.output import Interrupted, SystemRefused, failing, give_up, print_json, reader_left
from kdskills.errors import BadRequest

ROOT = Path(__file__).parents[2]
HELLO = str(ROOT / "bundles" / "hello")
ENTRY = "from kdskills.doors.cli import main; main()"
PRINTING = {
    "table": ("list", HELLO),
    "json": ("list", HELLO, "--json"),
    "text": ("render", HELLO),
    "tool": ("tool", "skills.list", "--json", json.dumps({"bundle": HELLO})),
    "tools": ("tool",),
    "refusal": ("show", HELLO, "nobody", "--json"),
}


def shell(words: tuple[str, ...], redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a command as an own process, by a shell that redirects its streams."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", ENTRY, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    """Return the exit code and what was written to standard output and error."""
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", PRINTING.values(), ids=PRINTING)
def test_a_full_disk_is_said_once(words: tuple[str, ...]) -> None:
    """Output that cannot be written is the operator's error, in one line on standard error; refusals keep their own code."""
    done = shell(words, ">/dev/full")
    refused = "nobody" in words
    assert (done.returncode, done.stderr.count("\n")) == (2 if refused else 4, 1), done.stderr
    assert done.stderr.startswith("unknown_skill: " if refused else "system_refused: "), done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"], ids=["stdout", "all"])
@pytest.mark.parametrize("kind", ["table", "json", "text", "refusal"])
def test_closed_streams_are_no_error(kind: str, closed: str) -> None:
    """A command that was started with closed streams does its work and keeps its exit code, without a traceback."""
    done = shell(PRINTING[kind], closed)
    assert done.returncode == (2 if kind == "refusal" else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_printed_never_lands_in_a_file(tmp_path: Path) -> None:
    """With standard streams closed, the next files opened do not get their numbers, nor do files of programs started."""
    code = """
import subprocess, sys
from kdskills.doors.cli.output import steady_streams
steady_streams()
with open(sys.argv[1], "w") as file:
    number = file.fileno()
    print("printed", flush=True)
    print("told", file=sys.stderr, flush=True)
    subprocess.run(["sh", "-c", "echo of a program; echo and its errors >&2"], check=True, timeout=60)
    file.write(f"{number > 2} {sys.stdin.read() == ''}")
"""
    file = tmp_path / "file"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(file)]
    assert subprocess.run(command, check=False, timeout=110).returncode == 0
    assert file.read_text() == "True True"


@pytest.fixture
def deserted() -> Iterator[int]:
    """The writing end of a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("words", [*PRINTING.values(), ("list", "--help")], ids=[*PRINTING, "help"])
def test_a_reader_that_left_is_no_error(words: tuple[str, ...], deserted: int) -> None:
    """Nobody who leaves early gets a traceback, whether tables, texts, JSON or help were to be printed."""
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *words],
        stdout=deserted,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=110,
    )
    assert ("Traceback" in done.stderr, "Exception" in done.stderr) == (False, False)
    if "--help" not in words and "nobody" not in words:
        assert done.returncode == 0


def test_readers_are_told_from_other_pipes(deserted: int, tmp_path: Path) -> None:
    """Only a pipe without a reader counts as left: not one with a reader, not a file, not the null device."""
    reading, writing = os.pipe()
    try:
        with (
            open(writing, "w", closefd=False) as piped,
            open(deserted, "w", closefd=False) as left,
            (tmp_path / "file").open("w") as file,
            Path(os.devnull).open("w") as null,
        ):
            assert [reader_left(stream) for stream in (piped, left, file, null)] == [False, True, False, False]
            left.write("lost")
            give_up(left)  # else closing it would fail
    finally:
        os.close(reading)
        os.close(writing)


WRONG = {
    "no such command": ("nope",),
    "no bundle": ("list",),
    "no such option": ("list", HELLO, "--nope"),
    "no number": ("render", HELLO, "--budget", "many"),
    "out of range": ("jobs", "show", "task_x", "--tail", "-1"),
    "without --fix": ("check", HELLO, "--rename"),
}


@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_json_where_json_was_asked(run: Callable[..., Any], words: tuple[str, ...]) -> None:
    """With `--json` a wrong call is an error in JSON with the code `usage`; without, it is the usage; exit 2 for both."""
    code, out, err = outcome(run(*words, "--json"))
    error = json.loads(out)["error"]
    assert (code, error["code"], error["who"], bool(error["message"]), err) == (2, "usage", "caller", True, "")
    code, out, err = outcome(run(*words))
    assert (code, out, "Usage" in err) == (2, "", True)


def test_help_is_help_beside_json(run: Callable[..., Any]) -> None:
    """`--help` wins over `--json`, and the words of options do not count as the option."""
    code, out, _ = outcome(run("list", "--json", "--help"))
    assert (code, "Usage" in out) == (0, True)
    assert run("list", HELLO, "--consumer", "json").returncode == 0


STATE = {
    "jobs list": ("jobs", "list", "--json"),
    "jobs show": ("jobs", "show", "task_x", "--json"),
    "jobs cancel": ("jobs", "cancel", "job_x", "--json"),
    "token list": ("token", "list", "--json"),
    "token create": ("token", "create", "--json"),
    "db upgrade": ("db", "upgrade", "--json"),
    "tool": ("tool", "skills.task_status", "--json", '{"task_id": "task_x"}'),
    "projects": ("tool", "projects.list", "--json", "{}"),
}


@pytest.mark.parametrize("words", STATE.values(), ids=STATE)
def test_a_state_folder_that_cannot_be_made(run: Callable[..., Any], words: tuple[str, ...], tmp_path: Path) -> None:
    """Every command that keeps something says which folder it lacks, in JSON, with the operator's exit code."""
    (tmp_path / "file").write_text("no folder")
    code, out, err = outcome(run(*words, KDSKILLS_STATE_DIR=str(tmp_path / "file" / "state")))
    error = json.loads(out)["error"]
    assert (code, error["code"], error["who"], err) == (4, "database_unavailable", "operator", "")
    assert (str(tmp_path) in error["message"], "state_dir" in error["message"]) == (True, True)


@pytest.mark.parametrize("words", [("jobs", "watch", "task_x"), ("logs", "task_x"), ("logs", "task_x", "-f")])
def test_a_state_folder_that_cannot_be_made_for_people(
    run: Callable[..., Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    """Commands without JSON say it in one line."""
    (tmp_path / "file").write_text("no folder")
    code, out, err = outcome(run(*words, KDSKILLS_STATE_DIR=str(tmp_path / "file" / "state")))
    assert (code, out, err.count("\n"), err.startswith("database_unavailable: ")) == (4, "", 1, True)


def test_jobs_list_is_one_document(run: Callable[..., Any], tmp_path: Path) -> None:
    """Jobs and tasks are fields of one JSON document, so that a parser reads them."""
    code, out, _ = outcome(run("jobs", "list", "--json", KDSKILLS_STATE_DIR=str(tmp_path / "state")))
    assert (code, json.loads(out)) == (0, {"jobs": [], "tasks": [], "next_cursor": None})


class Terminal(io.StringIO):
    """A standard input at which Ctrl-C is pressed."""

    def read(self, size: int | None = -1) -> str:
        """Be interrupted."""
        raise KeyboardInterrupt


def test_ctrl_c_ends_with_130(run: Callable[..., Any]) -> None:
    """An interrupted command ends as shells know it, and says so in JSON where that was asked for."""
    code, out, err = outcome(run("tool", "skills.list", "--json", "-", stdin=Terminal()))
    assert (code, json.loads(out)["error"]["code"], err) == (130, "interrupted", "")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, Interrupted.code),
        (PermissionError(13, "Permission denied", "/root/x\nforged"), 4, SystemRefused.code),
        (OSError("no number"), 4, SystemRefused.code),
        (FileNotFoundError(2, "No such file or directory", b"/\xff"), 4, SystemRefused.code),
        (BadRequest("no"), 2, "bad_request"),
    ],
    ids=["interrupt", "permission", "words", "bytes", "own"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["people", "json"])
def test_every_failure_has_a_code(raised: BaseException, code: int, said: str, as_json: bool, capsys: Any) -> None:
    """What is raised within a command ends in its exit code and one line, on standard output in JSON, else on the other."""
    with pytest.raises(SystemExit) as ended, failing(as_json=as_json):
        raise raised
    out, err = capsys.readouterr()
    assert ended.value.code == code
    found = json.loads(out)["error"]["code"] if as_json else err.partition(":")[0]
    assert (found, (out + err).count("\n"), err if as_json else out) == (said, 1, "")


def test_errors_of_programs_are_not_swallowed() -> None:
    """A mistake of ours is no refusal of the system: it goes on as it is."""
    with pytest.raises(ZeroDivisionError), failing(as_json=True):
        print_json(1 // 0)  # type: ignore[arg-type]
