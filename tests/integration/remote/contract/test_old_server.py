"""The emulated old version: what it lacks, and what its files do not change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kdskills.remote.labmodel import texts_of
from kdskills.testing import AppServerEmulator
from kdskills.testing.app_server import private_env

OURS = frozenset({"ping", "quux", "shop__order"})


@pytest.mark.parametrize(
    "method",
    [
        "thread/unsubscribe",
        "thread/revert",
        "thread/turns/list",
        "thread/inject_items",
        "thread/delete",
        "skills/extraRoots/set",
    ],
)
def test_unknown_methods(old, method):
    """Methods of the new version are unknown variants."""
    code, text = old.wire().refused(method, threadId="00000000-0000-7000-8000-000000000000")
    assert (code, f"unknown variant `{method}`" in text) == (-32600, True)


def test_naming_writes_no_file(old, tool):
    """Naming a thread writes nothing; the first turn does; before it a resume finds no rollout."""
    wire = old.wire()
    thread = wire.start(tool("ping"))
    wire.get("thread/name/set", threadId=thread["id"], name="mine")
    assert not Path(thread["path"]).exists()
    assert "no rollout found" in wire.refused("thread/resume", threadId=thread["id"])[1]
    assert "not materialized yet" in wire.refused("thread/read", threadId=thread["id"], includeTurns=True)[1]
    wire.turn(thread["id"], "!say hi")
    assert Path(thread["path"]).exists()


def test_context_is_ignored(old, tool):
    """`additionalContext` is accepted and goes nowhere."""
    wire = old.wire()
    thread = wire.start(tool("ping"))["id"]
    wire.turn(thread, "!say hi", additionalContext={"kdskills": {"kind": "application", "value": "told"}})
    assert not any("told" in text for text in texts_of(old.model.requests[-1], "developer"))


def test_namespaces_are_unknown(old, tool):
    """A namespace entry is a tool without a schema; flattened names work."""
    wire = old.wire()
    spaced = {"type": "namespace", "name": "shop", "description": "d", "tools": [tool("order")]}
    code, text = wire.refused("thread/start", dynamicTools=[spaced], cwd=str(old.home))
    assert (code, "missing field `inputSchema`" in text) == (-32600, True)
    thread = wire.start(tool("shop__order"))["id"]
    wire.turn(thread, "!call shop__order {}")
    assert (old.shown(among=OURS), "namespace" in wire.calls[0]["params"]) == (["shop__order"], False)


def test_rollback(old, tool):
    """Turns are taken back by number; the file stays the same, and the tools too."""
    wire = old.wire()
    thread = wire.start(tool("ping"))
    for number in range(3):
        wire.turn(thread["id"], f"!say number {number}")
    rolled = wire.get("thread/rollback", threadId=thread["id"], numTurns=2)["thread"]
    assert (rolled["path"], len(rolled["turns"])) == (thread["path"], 1)
    wire.turn(thread["id"], "!say after")
    said = [text for text in texts_of(old.model.requests[-1], "user") if text.startswith("!say")]
    assert said == ["!say number 0", "!say after"]
    assert wire.refused("thread/rollback", threadId=thread["id"], numTurns=0)[1] == "numTurns must be >= 1"


def test_a_rewritten_first_line_changes_nothing(old, tool):
    """The old version keeps tools in a place of its own: its files are no way to change them."""
    wire = old.wire()
    thread = wire.start(tool("ping"))
    wire.turn(thread["id"], "!say hi")
    wire.close()
    path = Path(thread["path"])
    head, _, rest = path.read_text("utf-8").partition("\n")
    line = json.loads(head)
    line["payload"]["dynamic_tools"] = [tool("quux")]
    path.write_text(json.dumps(line) + "\n" + rest, "utf-8")
    again = old.wire()
    again.resume(thread["id"])
    again.turn(thread["id"], "!say on")
    assert old.shown(among=OURS) == ["ping"]


@pytest.mark.parametrize("version", ["0.169", "0.105"])
def test_version(tmp_path, version):
    """The launcher says its version as the real one does."""
    with AppServerEmulator(version) as emulator:
        asked = subprocess.run(
            [emulator.binary, "--version"], env=private_env(tmp_path, emulator.binary), capture_output=True, text=True
        )
    assert (asked.returncode, asked.stdout) == (0, f"codex-cli {version}.0\n")


def test_unknown_versions():
    """Only known versions are emulated."""
    with pytest.raises(ValueError, match=r"0\.105, 0\.169"):
        AppServerEmulator("0.1")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--listen", "stdio://"], ["app-server", "--nope"], ["app-server", "--ws-auth", "capability-token"]],
    ids=["none", "no-command", "option", "no-token"],
)
def test_bad_command_lines(tmp_path, arguments):
    """Wrong arguments end the program with status 2 and words."""
    with AppServerEmulator() as emulator:
        env = private_env(tmp_path, emulator.binary)
        ended = subprocess.run([emulator.binary, *arguments], env=env, capture_output=True, text=True)
    assert (ended.returncode, bool(ended.stderr), ended.stdout) == (2, True, "")


def test_no_home(tmp_path):
    """Without a home the emulator does not guess one."""
    with AppServerEmulator() as emulator:
        env = {**private_env(tmp_path, emulator.binary), "CODEX_HOME": ""}
        ended = subprocess.run([emulator.binary, "app-server"], env=env, capture_output=True, text=True)
    assert (ended.returncode, "CODEX_HOME" in ended.stderr) == (2, True)
