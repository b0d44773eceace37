"""`doctor` looks at everything the settings name, and fails for each part that does not work."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.operations.machine import Check
from kdskills.doors.cli.main import build_cli

Change = Callable[[Path], dict[str, object]]


def made(folder: Path, **changes: object) -> Host:
    """Return a Host with a state folder of its own."""
    defaults: dict[str, object] = {"state_dir": folder / "state", "index_dir": folder / "index"}
    return Host(Settings(**(defaults | changes)), entry_points=False)


def not_a_folder(folder: Path) -> Path:
    """Return a path below a file, where nobody can make anything, root included."""
    (folder / "file").write_text("x")
    return folder / "file" / "below"


def no_database(folder: Path) -> Path:
    """Return a file that is no database."""
    (folder / "kd.db").write_bytes(b"no database " * 500)
    return folder / "kd.db"


WRONG: list[tuple[str, Change]] = [
    ("state folder", lambda folder: {"state_dir": not_a_folder(folder)}),
    ("index", lambda folder: {"index_dir": not_a_folder(folder)}),
    ("database", lambda _: {"database_url": "postgresql://127.0.0.1:1/nothing"}),
    ("database", lambda folder: {"database_url": f"sqlite:///{no_database(folder)}"}),
    ("database", lambda _: {"database_url": "oracle://x"}),
    ("artifacts", lambda folder: {"artifacts": str(not_a_folder(folder))}),
    ("artifacts", lambda _: {"artifacts": "ftp://x/y"}),
    ("session store", lambda folder: {"session_store": f"sqlite:///{not_a_folder(folder)}/s.db"}),
    ("session store", lambda _: {"session_store": "nothing://x"}),
    ("bundle", lambda folder: {"bundle": folder / "nothing"}),
    ("skill roots", lambda _: {"skill_roots": ("nothing://x",)}),
    ("codex", lambda _: {"codex_binary": "no-such-codex"}),
    ("bus", lambda _: {"bus": {"url": "nats://user:secret@127.0.0.1:1"}}),
    ("bus", lambda _: {"bus": {"url": "nats://[broken"}}),
    ("bus", lambda _: {"bus": {"url": ""}}),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
async def test_a_part_that_does_not_work_is_told(name: str, change: Change, tmp_path: Path) -> None:
    """A part that does not work is not ok, has a cure, and makes the whole not ok; the others are still looked at."""
    found = await made(tmp_path, **change(tmp_path)).call("doctor")
    wrong = {check.name: check for check in found.checks if not check.ok and not check.name.startswith("extra ")}
    assert name in wrong, found.checks
    assert (bool(wrong[name].found), bool(wrong[name].cure), found.ok) == (True, True, False)
    assert set(wrong) <= {name, "database"}  # the default database lies in the state folder


async def test_parts_that_work_are_ok(tmp_path: Path, repo: Path) -> None:
    """With everything in order each part that the settings name is ok, and nothing is made or left behind."""
    (tmp_path / "artifacts").mkdir()
    host = made(
        tmp_path,
        artifacts=str(tmp_path / "artifacts"),
        session_store=f"sqlite:///{tmp_path}/sessions.db",
        bundle=repo / "bundles" / "hello",
        codex_binary="/bin/sh",
    )
    found = await host.call("doctor")
    checks = {check.name: check for check in found.checks if not check.name.startswith("extra ")}
    assert {name: check.found for name, check in checks.items() if not check.ok} == {}
    assert {"state folder", "database", "index", "artifacts", "session store", "bundle", "codex"} <= set(checks)
    assert (tmp_path / "state").exists() is False
    assert [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()] == []


async def test_a_part_that_is_silent_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that accepts a connection and never answers is told as such, after the time it has."""
    monkeypatch.setattr("kdskills.app.operations.machine.PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = made(tmp_path, bus={"url": f"nats://127.0.0.1:{silent.getsockname()[1]}"})
        (check,) = [check for check in (await host.call("doctor")).checks if check.name == "bus"]
    assert (check.ok, check.found) == (False, "no answer in 1 s")


@pytest.mark.needs("nats")
async def test_the_bus_is_asked(tmp_path: Path, bus: Any) -> None:
    """The bus that the settings name is ok while it answers, and not once it is gone; its password is not shown."""
    url = bus.url.replace("nats://", "nats://user:s3cr3t@")
    host = made(tmp_path, bus={"url": url})

    async def look() -> Check:
        (check,) = [check for check in (await host.call("doctor")).checks if check.name == "bus"]
        return check

    first = await look()
    assert (first.ok, first.found) == (True, "answers, with JetStream")
    bus.stop()
    gone = await look()
    bus.start(jetstream=False)
    bare = await look()  # a server that keeps no commands is no bus
    for wrong in (gone, bare):
        assert (wrong.ok, bool(wrong.cure), "s3cr3t" in wrong.found) == (False, True, False), wrong


def test_the_command_ends_with_one(tmp_path: Path) -> None:
    """`kdskills doctor` ends with 1 when a part does not work, in both forms."""
    host = made(tmp_path, codex_binary="no-such-codex")
    for words in (["doctor"], ["doctor", "--json"]):
        assert CliRunner().invoke(get_command(build_cli(host)), words, obj=host).exit_code == 1
