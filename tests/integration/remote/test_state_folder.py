"""What a client keeps in its state folder, and what it leaves alone."""

import asyncio
import gc
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kdskills.errors import KdskillsError
from kdskills.remote import AsyncCodexClient, CodexClient, MemoryJournal, SqlJournal
from kdskills.remote.journal import JournalUnavailable, journal_url
from kdskills.testing import AppServerEmulator, FakeResponses
from kdskills.testing.app_server import listening

WRAPPED = '!call kdskills_call {"skill": "ship", "arguments": {"order": "1"}}'


@pytest.fixture
def emulator():
    """Return the emulated program."""
    with AppServerEmulator() as one:
        yield one.binary


@pytest.fixture
def model():
    """Return a fake model."""
    with FakeResponses() as one:
        yield one


@pytest.fixture(autouse=True)
def users(tmp_path, monkeypatch):
    """Return the user's own state folder, which is empty."""
    place = tmp_path / "users"
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    return place / "kdskills"


def ship(order: str) -> str:
    """Book a parcel."""
    return f"parcel {order}" + "!" * 20_000


def states(folder):
    """Return the states of the calls kept in a state folder."""
    with closing(sqlite3.connect(folder / "remote" / "calls.sqlite3")) as db:
        return [row[0] for row in db.execute("SELECT state FROM remote_calls")]


async def test_calls_are_kept_in_the_state_folder(emulator, model, tmp_path, users):
    """Journal and spool are those of the folder; a second client of it knows the first one's calls and receipts."""
    state = tmp_path / "state"
    how = {"home": tmp_path / "home", "binary": str(emulator), "config": model.config, "probe": "never", "state": state}
    async with await AsyncCodexClient.spawn(**how) as client:
        assert isinstance(client.journal, SqlJournal)
        _, session = await client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", ship), cwd=str(tmp_path)
        )
        done = await session.send_and_handle(WRAPPED, inject_skills=False, timeout_seconds=60)
        assert [one.handled for one in done.dispatches] == [True]
    assert states(state) == ["done"]
    assert [path.suffix for path in (state / "remote" / "spool").iterdir()] == [".txt"]
    assert (state / "remote" / "calls.sqlite3").stat().st_mode & 0o777 == 0o600
    async with await AsyncCodexClient.spawn(**how) as client:
        again = client.remote_skills.session(session.session_id)
        receipt = await asyncio.to_thread(again.receipt, done.turn_id)
        assert [call.state for call in receipt.calls] == ["done"]
    assert not users.exists()


async def test_without_a_state_folder_it_is_the_users(emulator, model, tmp_path, users):
    """`spawn` and `connect` keep calls in the user's own state folder when none is named."""
    home = tmp_path / "home"
    async with await AsyncCodexClient.spawn(home=home, binary=str(emulator), config=model.config, probe="never"):
        assert states(users) == []
    other = tmp_path / "other"
    other.mkdir()
    (users / "remote" / "calls.sqlite3").unlink()
    with listening(emulator, other, model.config_args) as url, CodexClient.connect(url) as client:
        assert isinstance(client.journal, SqlJournal)
        assert states(users) == []


async def test_a_receipt_tells_the_strategy_that_was_asked_for(emulator, model, tmp_path):
    """`connect` without a profile means the dispatcher whatever was asked for, and the turn's receipt tells both."""
    home, state = tmp_path / "home", tmp_path / "state"
    home.mkdir()
    with listening(emulator, home, model.config_args) as url:
        for options, expected in (({"strategy": "reload"}, "reload"), ({}, "auto")):
            async with await AsyncCodexClient.connect(url, state=state, **options) as client:
                _, session = await client.remote_skills.create_session(
                    register=lambda draft: draft.register("ship", lambda order: f"parcel {order}"), cwd=str(tmp_path)
                )
                done = await session.send_and_handle("!say hello", timeout_seconds=60)
                receipt = await asyncio.to_thread(session.receipt, done.turn_id)
                assert (receipt.strategy, receipt.strategy_asked) == ("dispatcher", expected)


def test_a_journal_that_is_given_wins(emulator, model, tmp_path, users):
    """`MemoryJournal()` leaves no file; a given SQL journal is used, and left open."""
    how = {"home": tmp_path / "home", "binary": str(emulator), "config": model.config, "probe": "never"}
    with CodexClient.spawn(**how, journal=MemoryJournal(), state=tmp_path / "state") as client:
        assert isinstance(client.journal, MemoryJournal)
    assert not (tmp_path / "state" / "remote" / "calls.sqlite3").exists()
    journal = SqlJournal(journal_url(tmp_path / "mine"))
    try:
        with CodexClient.spawn(**how, journal=journal, state=tmp_path / "state") as client:
            assert client.journal is journal
        assert journal.calls("any") == []
    finally:
        journal.close()
    assert not users.exists()


async def test_a_state_folder_that_cannot_be_used_starts_nothing(emulator, model, tmp_path):
    """A file in the folder's place is an error of the operator, and no server is left behind."""
    place = tmp_path / "file"
    place.write_text("in the way")
    home = tmp_path / "home"
    with pytest.raises(JournalUnavailable):
        await AsyncCodexClient.spawn(
            home=home, binary=str(emulator), config=model.config, probe="never", state=place / "state"
        )
    assert not home.exists()


def descriptors():
    """Return what this process has open, by name; sockets and pipes by kind."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()).partition(":")[0])
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return sorted(found)


def journals(state):
    """Return what this process has open of a state folder's journal."""
    return [name for name in descriptors() if name.startswith(str(state / "remote"))]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells what is open")
def test_a_killed_server_leaves_no_journal_open(emulator, model, tmp_path):
    """The server is killed in mid-call and the client closed; a handler that ends afterwards writes down its answer, and no more."""
    inside, go = threading.Event(), threading.Event()
    state = tmp_path / "state"

    def ship(order: str) -> str:
        inside.set()
        assert go.wait(60)
        return f"parcel {order}"

    client = CodexClient.spawn(
        home=tmp_path / "home", binary=str(emulator), config=model.config, probe="never", state=state
    )
    try:
        _, session = client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", ship), cwd=str(tmp_path)
        )

        def send() -> None:
            with suppress(KdskillsError):  # its server goes away
                session.send_and_handle(WRAPPED, inject_skills=False, timeout_seconds=60)

        turn = threading.Thread(target=send)
        turn.start()
        assert inside.wait(60)
        os.killpg(client._target.server.transport.pid, signal.SIGKILL)
    finally:
        client.close()
    go.set()
    turn.join(60)
    until = time.monotonic() + 60
    while states(state) != ["done"]:
        assert time.monotonic() < until
        time.sleep(0.02)
    while journals(state):
        assert time.monotonic() < until, journals(state)
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells what is open")
def test_a_closed_client_leaves_nothing_behind(emulator, model, tmp_path):
    """After a client with calls is closed no descriptor and no thread of it is left."""

    def use(number):
        with CodexClient.spawn(
            home=tmp_path / f"home-{number}",
            binary=str(emulator),
            config=model.config,
            probe="never",
            state=tmp_path / "state",
        ) as client:
            _, session = client.remote_skills.create_session(
                register=lambda draft: draft.register("ship", ship), cwd=str(tmp_path)
            )
            session.send_and_handle(WRAPPED, inject_skills=False, timeout_seconds=60)
            client.reconnect()

    def ours():
        return {one for one in threading.enumerate() if one.name.startswith(("kdskills-codex", "kdskills-leases"))}

    use(0)
    gc.collect()
    before, threads = descriptors(), ours()
    use(1)
    gc.collect()
    assert [name for name in descriptors() if name not in before] == []
    assert len(descriptors()) <= len(before)
    assert ours() <= threads
