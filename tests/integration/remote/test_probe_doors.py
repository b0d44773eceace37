"""`codex.probe` and `codex.receipts` at the command line and as operations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, SCOPES, Identity
from kdskills.app.operations import Context
from kdskills.doors.cli.main import build_cli
from kdskills.errors import CallRefused
from kdskills.remote.calls import Receipt, Receipts, ReceiptSkillEntry
from kdskills.remote.journal import SqlJournal, journal_url
from kdskills.testing import AppServerEmulator


@pytest.fixture
def emulator():
    """An emulated app-server."""
    with AppServerEmulator() as made:
        yield made


@pytest.fixture
def host(tmp_path, emulator):
    """A Host whose configured binary is the emulator."""
    return Host(Settings(state_dir=tmp_path / "state", codex_binary=str(emulator.binary)), entry_points=False)


def run(host: Host, *arguments: str):
    """Run the command line."""
    return CliRunner().invoke(build_cli(host), ["codex", *arguments])


def test_probe_for_people(host):
    """The command says what is proven, by which strategy catalogs will travel, and when an earlier probe answered."""
    first, second = run(host, "probe"), run(host, "probe")
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "strategy: reload" in first.output
    assert "no   a resume changes the tools: the new tool does not reach the model" in first.output
    assert ("an earlier probe" in first.output, "an earlier probe" in second.output) == (False, True)


def test_probe_as_json(host):
    """With `--json` the answer has facts and findings; `--force` asks again; `--binary` names another program."""
    found = json.loads(run(host, "probe", "--json").output)
    again = json.loads(run(host, "probe", "--json", "--force").output)
    assert (found["ok"], found["strategy"], found["cached"], again["cached"]) == (True, "reload", False, False)
    assert found["facts"] == again["facts"]
    with AppServerEmulator("0.105") as old:
        other = json.loads(run(host, "probe", "--json", "--binary", str(old.binary)).output)
    assert (other["facts"]["name"], other["strategy"]) == ("0.105", "dispatcher")


def test_a_missing_program(host, tmp_path):
    """A program that is not there is the caller's mistake, with its code."""
    done = run(host, "probe", "--binary", str(tmp_path / "nothing"))
    assert done.exit_code == 2


@pytest.mark.parametrize(
    "identity",
    [
        Identity(scopes=SCOPES),
        *(replace(LOCAL, door=door) for door in ("http", "mcp", "nats")),
    ],
    ids=["remote", "http", "mcp", "nats"],
)
async def test_other_doors_cannot_choose_the_program(host, emulator, identity):
    """At other doors only the configured binary runs."""
    with pytest.raises(CallRefused) as refused:
        await host.invoke("codex.probe", {"binary": str(emulator.binary)}, Context(identity=identity))
    assert refused.value.code == "not_yours_to_say"
    found = await host.invoke("codex.probe", {}, Context(identity=identity))
    assert (found.ok, found.binary) == (True, str(emulator.binary))


def test_receipts(host):
    """A session's receipts are read from the journal of the state folder."""
    journal = SqlJournal(journal_url(host.settings.state_dir))
    skill = ReceiptSkillEntry("public.hello", "ab" * 32)
    kept = Receipt("session-1", "turn-1", "0123456789abcdef", None, "reload", ("ping",), (skill,))
    Receipts(journal).note(kept)
    journal.close()
    told = run(host, "receipts", "session-1")
    assert (told.exit_code, "turn turn-1: catalog 0123456789abcdef by reload" in told.output) == (0, True)
    assert "skill public.hello" in told.output
    [one] = json.loads(run(host, "receipts", "session-1", "--json").output)["receipts"]
    assert (one["turn_id"], one["visible_tools"], one["skills"][0]["ref"]) == ("turn-1", ["ping"], "public.hello")
    assert (one["strategy"], one["strategy_asked"]) == ("reload", None)


@pytest.mark.parametrize(
    ("asked", "told"), [("reload", "by dispatcher (reload was asked for),"), ("auto", "by dispatcher,")]
)
def test_a_receipt_tells_the_strategy_that_was_asked_for(host, asked, told):
    """People read that another strategy is in use than the one somebody named."""
    journal = SqlJournal(journal_url(host.settings.state_dir))
    Receipts(journal).note(Receipt("session-1", "turn-1", strategy="dispatcher", strategy_asked=asked))
    journal.close()
    assert told in run(host, "receipts", "session-1").output
    [one] = json.loads(run(host, "receipts", "session-1", "--json").output)["receipts"]
    assert (one["strategy"], one["strategy_asked"]) == ("dispatcher", asked)


def test_no_receipts(host):
    """Reading the receipts of an unknown session makes no database, and says that there are none."""
    done = run(host, "receipts", "\x1b[31mred")
    assert (done.exit_code, "no receipt is kept" in done.output, "\x1b" in done.output) == (1, True, False)
    assert run(host, "receipts", "unknown", "--json").exit_code == 1
    assert not (host.settings.state_dir / "remote").exists()
