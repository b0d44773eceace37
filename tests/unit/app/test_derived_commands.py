"""Commands made of operations: a row and a printer are enough."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.operations import OPERATIONS
from kdskills.doors.cli import commands
from kdskills.doors.cli.derived import DerivedCommand, Row, Word, run_loop
from kdskills.doors.cli.main import build_cli

HELLO = Path(__file__).parents[3] / "bundles" / "hello"


@pytest.fixture
def host(tmp_path):
    """A Host with a state folder of its own."""
    host = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    yield host
    asyncio.run(host.storage.aclose())


def derived_commands(group, path=()):
    """Walk the commands below a group that are made of operations."""
    for name, command in getattr(group, "commands", {}).items():
        if isinstance(command, DerivedCommand):
            yield pytest.param(command, id=" ".join((*path, name)))
        yield from derived_commands(command, (*path, name))


@pytest.mark.parametrize("command", list(derived_commands(get_command(build_cli()))))
def test_every_argument_is_said_or_left_out_on_purpose(command):
    """A field that a model gets later is an option at once; what a row says of fields is about fields there are."""
    row, fields = command.row, OPERATIONS[command.row.operation].input.model_fields
    own = {"as_json", *row.flags, *(["trust"] if row.trust else []), *(["format"] if row.formats else [])}
    assert {parameter.name for parameter in command.params} == {*fields} - {*row.hidden, *row.constants} | own
    assert {*row.words, *row.hidden, *row.constants, *row.positional} <= {*fields}
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    arguments = [parameter.name for parameter in command.params if parameter.param_type_name == "argument"]
    assert arguments == list(row.positional)


def command_line(row, printer):
    """Return an application with one command, made of *row*."""
    app = typer.Typer()
    app.callback()(lambda: None)
    Row(app, "it", **row)(printer)
    return get_command(app)


def test_a_row_and_a_printer_make_a_command(host):
    """An operation that has no command gets one with its path, text and switch, help and all, and JSON for machines."""
    row = {"operation": "projects.create", "summary": "Make a project.", "positional": ("project",)}
    cli = command_line(row, lambda answer: typer.echo(f"project {answer.project}"))
    shown = CliRunner().invoke(cli, ["it", "--help"]).output
    fields = OPERATIONS["projects.create"].input.model_fields
    assert all(f"--{name.replace('_', '-')}" in shown for name in fields if name != "project")
    done = CliRunner().invoke(cli, ["it", "acme", "--bundle", str(HELLO)], obj=host)
    assert (done.exit_code, done.output) == (0, "project acme\n")
    done = CliRunner().invoke(cli, ["it", "acme", "--bundle", str(HELLO), "--json"], obj=host)
    assert (done.exit_code, json.loads(done.output)["project"]) == (0, "acme")


def test_words_that_nobody_says_are_left_to_the_model(host):
    """Lists, comma-separated texts and values found at the call reach the operation as its model has them."""
    row = Row(
        typer.Typer(),
        "it",
        "tokens.create",
        "Make one.",
        words={
            "scopes": Word("--scope", default=None, otherwise=lambda: ["skills:read"]),
            "tools": Word(commas=True),
            "agent": Word(default="local"),
        },
    )
    said = dict.fromkeys(row.fields())
    assert row.arguments(said) == {"scopes": ["skills:read"]}
    said |= {"scopes": ["work:run"], "tools": "a, b,", "agent": "local", "person": False}
    assert row.arguments(said) == {"scopes": ["work:run"], "tools": ("a", "b"), "agent": "local", "person": False}
    assert row.arguments({**said, "tools": ""})["tools"] == ()


def test_a_negative_answer_ends_with_one_in_both_forms(host):
    """The exit code is the answer's own, whoever reads it."""
    words = ["why", "internal.unknown", "--bundle", str(HELLO)]
    runs = [CliRunner().invoke(get_command(build_cli(host)), [*words, *form]) for form in ((), ("--json",))]
    assert [done.exit_code for done in runs] == [1, 1]
    assert json.loads(runs[1].output)["granted"] is False


def test_a_type_without_words_is_refused(host):
    """A field that no option can say stops the first call, instead of being left out in silence."""
    cli = command_line({"operation": "skills.start_job", "summary": "Start."}, print)
    with pytest.raises(TypeError, match="no command line says"):
        CliRunner().invoke(cli, ["it", "--help"], catch_exceptions=False)


def test_pages_tell_how_to_go_on(host):
    """A list of tokens that is cut says the command for the rest."""
    cli = get_command(build_cli(host))
    for _ in range(2):
        CliRunner().invoke(cli, ["token", "create"])
    shown = CliRunner().invoke(cli, ["token", "list", "-n", "1"]).output
    assert "kdskills token list --cursor " in shown
    cursor = shown.split("--cursor ")[1].split()[0]
    assert "more" not in CliRunner().invoke(cli, ["token", "list", "--cursor", cursor]).output


def test_groups_are_shared_by_no_two_command_lines(host):
    """Commands that a plugin adds to one application are not in the next."""
    cli = build_cli(host)
    cli.command("ping")(lambda: None)
    assert "ping" not in get_command(build_cli(host)).commands
    assert "list" in {command.name for command in commands.skill_commands.registered_commands}


def test_a_signal_that_comes_as_the_loop_begins_to_wait_ends_it() -> None:
    """Ctrl-C that interrupts no wait is heard, as one is that another thread gets, or that comes just before the wait."""

    def interrupt() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def wait() -> None:
        threading.Thread(target=interrupt).start()
        async with asyncio.timeout(20):
            await asyncio.Event().wait()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_loop(wait())
    assert time.monotonic() - began < 15


def test_a_loop_runs_in_any_thread_and_leaves_signals_as_they_were() -> None:
    """Work in a thread that hears no signals gives its value, and the main thread's way of hearing them is put back."""

    async def seven() -> int:
        return 7

    with ThreadPoolExecutor() as threads:
        assert threads.submit(lambda: run_loop(seven())).result() == 7
    assert run_loop(seven()) == 7
    assert signal.set_wakeup_fd(-1) == -1
