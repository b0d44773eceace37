"""Catalog changes that died half-way, and threads that took another's place."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kdskills.remote import AsyncCodexClient, ServerProfile
from kdskills.remote.catalog import rollout
from kdskills.remote.names import flat_tools, wire_tools
from kdskills.testing.app_server import listening

PROVEN = ServerProfile(
    name="0.169.0", reload=True, materialise=("name_set",), rewind="revert", context=True, probed=True
)


def alpha() -> str:
    """The first one."""
    return "from alpha"


def beta() -> str:
    """The second one."""
    return "from beta"


async def talked(lab, client):
    """Start a session with one skill and one turn."""
    _, session = await client.remote_skills.create_session(
        register=lambda draft: draft.register("alpha", alpha), cwd=str(lab.home)
    )
    done = await session.send_and_handle("!say hello", timeout_seconds=60)
    assert done.status == "completed"
    return session


def put(path, thread, *tools):
    """Write tools into a thread's first line, as a change that was never noted."""
    head = rollout.read_head(path, thread)
    rollout.swap(head, rollout.stage(head, head.with_tools(wire_tools(flat_tools(list(tools)), namespaces=True))))


def garbled(path):
    """Make line 1 unreadable."""
    path.write_bytes(b"garbage" + path.read_bytes()[7:])


async def path_of(client, session):
    """Return a session's file."""
    return Path((await client.sessions.get(session.session_id))["session"]["path"])


async def test_a_change_that_was_never_noted_is_not_called_current(lab):
    """A worker died between the file and its note: the next one sees that another catalog is in force, and pushes again."""
    async with await lab.client(profile=PROVEN) as client:
        session = await talked(lab, client)
        path, thread = await path_of(client, session), session.session_id
    put(path, thread, {"name": "beta", "description": "b", "inputSchema": {"type": "object"}})
    async with await lab.client(profile=PROVEN) as client:
        session = client.remote_skills.session(thread)
        session.register("alpha", alpha)
        sent = await session.send("!say what do you see")
        assert sent["catalog"] == "stale"
        await client.wait.assistant_reply(thread, sent["turnId"], timeout_seconds=60)
        assert lab.shown() == ["beta"]
        report = await session.prepare_catalog()
        assert (report["status"], report["strategy"]) == ("ok", "reload")
        sent = await session.send("!say and now")
        await client.wait.assistant_reply(thread, sent["turnId"], timeout_seconds=60)
        assert sent["catalog"] == "current"
        assert lab.shown() == ["alpha"]


async def test_a_change_nobody_saw_confirmed_is_taken_back(lab):
    """Killed after the rename: the next start of the home has the old catalog, and the turns are where they were."""
    async with await lab.client(profile=PROVEN) as client:
        session = await talked(lab, client)
        await session.send_and_handle("!say zweites", timeout_seconds=60)
        path, thread = await path_of(client, session), session.session_id
    rollout.back_up(rollout.read_head(path, thread))
    put(path, thread, {"name": "beta", "description": "b" * 40_000, "inputSchema": {"type": "object"}})
    async with await lab.client(profile=PROVEN) as client:
        session = client.remote_skills.session(thread)
        session.register("alpha", alpha)
        await client.sessions.resume(thread)
        await client.sessions.rollback(thread, 1)
        await session.send_and_handle("!say third", timeout_seconds=60)
        assert lab.shown() == ["alpha"]
        asked = json.dumps(lab.model.requests[-1]["input"])
        assert "hello" in asked
        assert "zweites" not in asked
    assert not rollout.backup_of(path).exists()


@pytest.mark.parametrize("local", [True, False], ids=["this machine's", "elsewhere"])
async def test_a_running_server_is_mended_only_where_its_files_are(lab, monkeypatch, local):
    """`connect` puts an unreadable first line back on this machine; files of a server elsewhere are not looked at."""
    async with await lab.client(profile=PROVEN) as client:
        session = await talked(lab, client)
        path, thread = await path_of(client, session), session.session_id
    rollout.back_up(rollout.read_head(path, thread))
    garbled(path)
    left = path.read_bytes()
    if not local:
        monkeypatch.setattr("kdskills.remote.client.base._LOOPBACK", frozenset())
    with listening(Path(lab.binary), lab.home, lab.model.config_args) as url:
        async with await AsyncCodexClient.connect(url, profile=PROVEN, state=lab.state) as client:
            if not local:
                assert path.read_bytes() == left
                return
            assert rollout.read_head(path, thread).path == path
            sent = await client.sessions.send_message(thread, "!call alpha {}")
            assert sent["status"] == "accepted"
            assert not rollout.backup_of(path).exists()


async def test_a_thread_the_running_server_has_open_is_not_replaced(lab):
    """A file whose thread is loaded keeps its bytes: the server would go on writing into the one that was replaced."""
    lab.home.mkdir()
    with listening(Path(lab.binary), lab.home, lab.model.config_args) as url:
        async with await AsyncCodexClient.connect(url, profile=PROVEN, state=lab.state) as client:
            session = await talked(lab, client)
            path, thread = await path_of(client, session), session.session_id
            info = await client.server.describe(thread)
            assert info["status"]["type"] == "idle"
            rollout.back_up(rollout.read_head(path, thread))
            garbled(path)
            left, inode = path.read_bytes(), path.stat().st_ino
            async with await AsyncCodexClient.connect(url, profile=PROVEN, state=lab.state):
                assert (path.read_bytes(), path.stat().st_ino) == (left, inode)


@pytest.mark.parametrize("moment", ["forget", "swap"])
async def test_the_servers_pointers_survive_a_change_that_fails_there(lab, monkeypatch, moment):
    """A longer line and an error at the index or the rename: the old catalog is in force and the turns can be taken back."""
    async with await lab.client(profile=PROVEN) as client:
        session = await talked(lab, client)
        await session.send_and_handle("!say zweites", timeout_seconds=60)

        def failing(*arguments):
            raise rollout.UnknownFormat("no")

        step = "forget" if moment == "forget" and rollout.find(lab.home) else "swap"  # not every server keeps an index
        monkeypatch.setattr(rollout, step, failing)
        session.register("beta", beta, description="b" * 40_000)
        report = await session.prepare_catalog()
        monkeypatch.undo()
        assert (report["status"], report["reason"]) == ("failed", "unknown_format")
        session.unregister("beta")
        await client.sessions.rollback(session.session_id, 1)
        await session.send_and_handle("!say third", timeout_seconds=60)
        assert lab.shown() == ["alpha"]
        asked = json.dumps(lab.model.requests[-1]["input"])
        assert ("hello" in asked, "zweites" in asked) == (True, False)
        session.register("beta", beta)
        assert (await session.prepare_catalog())["status"] == "ok"
        assert not list(lab.home.rglob(f"*{rollout.BACKUP_SUFFIX}"))


def test_half_an_index_is_never_left(tmp_path):
    """An error at the second table leaves the rows of the first."""
    path = tmp_path / "thread_history_1.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        for table in ("thread_turns", "thread_items", "thread_history_projection_state"):
            db.execute(f"CREATE TABLE {table} (thread_id TEXT)")
            db.execute(f"INSERT INTO {table} VALUES ('t')")
        db.execute("CREATE TRIGGER no BEFORE DELETE ON thread_items BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(rollout.UnknownFormat, match="cannot be changed"):
        rollout.forget(path, "t")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM thread_turns").fetchone() == (1,)


async def test_a_session_goes_on_in_its_successor(lab):
    """The facade follows `new_session_id`: handles, lookups by either id, calls, and the next change."""
    profile = ServerProfile(context=True, probed=True)
    async with await lab.client(profile=profile, strategy="successor", allow_successor=True) as client:
        facade = client.remote_skills
        session = await talked(lab, client)
        old = session.session_id
        other = facade.session(old)
        session.register("beta", beta)
        report = await session.prepare_catalog()
        assert (report["status"], report["sessionId"]) == ("ok", old)
        new = report["new_session_id"]
        assert session.session_id == other.session_id == facade.session(old).session_id == new != old
        assert [skill.name for skill in facade.session(new).list()] == ["alpha", "beta"]
        done = await session.send_and_handle("!call beta {}", timeout_seconds=60)
        assert [one.tool for one in done.dispatches] == ["beta"]
        assert lab.shown() == ["alpha", "beta"]
        assert "hello" in json.dumps(lab.model.requests[-1]["input"])
        assert (await asyncio.to_thread(session.receipt, done.turn_id)).session_id == new
        assert (await session.prepare_catalog())["status"] == "noop"
        assert (await client.sessions.resume(old, dynamic_tools=session.dynamic_tools()))["new_session_id"] == new
        session.unregister("alpha")
        await session.send_and_handle("!say last", timeout_seconds=60)
        assert lab.shown() == ["beta"]
        assert session.session_id not in (old, new)
        closed = await facade.close_session(old, delete_session=True)
        assert (closed["cleared"], closed["deleted"]) == (1, True)
        assert facade.session(old).list() == []
