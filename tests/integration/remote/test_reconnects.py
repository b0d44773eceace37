"""Connections that are cut and servers that die: one effect, every delivery answered, skills as before."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kdskills.remote import AsyncCodexClient, CodexClient
from kdskills.remote.labmodel import tool_outputs
from kdskills.remote.ports import AppServerGone, ServerProfile
from kdskills.testing.app_server import listening

PATIENCE_S = 60.0
PROVEN = ServerProfile(name="0.169", reload=True, materialise=("name_set",), rewind="revert", context=True, probed=True)
WRAPPED = '!call kdskills_call {"skill": "ship", "arguments": {}}'


async def until(condition, _what):
    """Wait for something to become true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is watched are plain values
            await asyncio.sleep(0.01)


def wait_until(condition, what):
    """The same for tests without an event loop."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Slow:
    """A handler that waits inside until it is let go, and counts how often it ran."""

    def __init__(self):
        self.effects = []
        self.go = asyncio.Event()

    async def ship(self) -> str:
        """Ship a parcel."""
        self.effects.append(1)
        await self.go.wait()
        return "shipped"


@pytest.fixture
def url(lab):
    """The address of a server that goes on whatever becomes of its clients."""
    lab.home.mkdir(parents=True, exist_ok=True)
    with listening(Path(lab.binary), lab.home, lab.model.config_args) as found:
        yield found


@asynccontextmanager
async def connected(url, lab, **options):
    """Be a client of a listening server, with a session whose skill is slow."""
    slow = Slow()
    async with await AsyncCodexClient.connect(url, state=lab.state, **options) as client:
        try:
            _, session = await client.remote_skills.create_session(
                register=lambda draft: draft.register("ship", slow.ship), cwd=str(lab.home)
            )
            yield client, session, slow
        finally:
            slow.go.set()


async def ended(client, session, turn_id):
    """Wait for a turn's end, however its client learns of it."""
    return await client.wait.assistant_reply(session.session_id, turn_id, timeout_seconds=PATIENCE_S)


@pytest.mark.parametrize("automatic", [True, False], ids=["by itself", "by reconnect"])
async def test_a_connection_is_cut_while_a_call_runs(url, lab, automatic):
    """The server delivers the call again on the new connection; the handler ran once, and the turn completes."""
    async with connected(url, lab, reconnect_s=PATIENCE_S if automatic else 0.0) as (client, session, slow):
        accepted = await session.send(WRAPPED, inject_skills=False)
        await until(lambda: slow.effects, "the call")
        before = client.connection
        await client.server.transport.close()
        if not automatic:
            await until(lambda: not client.connected, "the loss")
            await client.reconnect()
        await until(lambda: client.connection != before and client.connected, "another connection")
        await until(lambda: client.server.threads.get(session.session_id).subscribed, "the thread")
        slow.go.set()
        done = await ended(client, session, accepted["turnId"])
    assert (done["status"], slow.effects) == ("complete", [1])
    assert list(tool_outputs(lab.model.requests[-1]).values()) == ["shipped"]


async def test_the_cut_is_told_and_the_session_goes_on(url, lab):
    """After the cut the same handles serve the next turns; an answer under an old handle reaches nobody."""
    async with connected(url, lab, reconnect_s=PATIENCE_S) as (client, session, slow):
        slow.go.set()
        first = await session.send_and_handle(WRAPPED, inject_skills=False, timeout_seconds=PATIENCE_S)
        before = client.connection
        await client.server.transport.close()
        await until(lambda: client.connection != before and client.connected, "another connection")
        second = await session.send_and_handle(WRAPPED, inject_skills=False, timeout_seconds=PATIENCE_S)
    assert (first.status, second.status, slow.effects) == ("completed", "completed", [1, 1])
    assert [one.submission_status for one in (*first.dispatches, *second.dispatches)] == ["ok", "ok"]


async def test_a_server_of_ours_is_started_again(lab):
    """A killed server is started anew: the catalog in force is the one of the registry, no effect is repeated."""
    effects = []

    def ship() -> str:
        """Ship a parcel."""
        effects.append(1)
        return "shipped"

    def cancel() -> str:
        """Cancel a parcel."""
        return "cancelled"

    async with await lab.client(reconnect_s=PATIENCE_S) as client:
        _, session = await client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", ship), cwd=str(lab.home)
        )
        await session.send_and_handle("!call ship {}", timeout_seconds=PATIENCE_S)
        session.register("cancel", cancel)
        assert (await session.prepare_catalog())["status"] == "ok"
        before, group = client.connection, client.server.transport.pid
        os.killpg(group, signal.SIGKILL)
        await until(lambda: client.connection != before and client.connected, "another server")
        assert client.server.transport.pid != group
        assert (await session.prepare_catalog())["status"] == "noop"
        done = await session.send_and_handle("!call cancel {}", timeout_seconds=PATIENCE_S)
    assert (done.status, effects, lab.shown()) == ("completed", [1], ["cancel", "ship"])
    assert list(tool_outputs(lab.model.requests[-1]).values()) == ["shipped", "cancelled"]


async def test_a_catalog_registered_while_the_server_was_away(lab):
    """Functions may be registered while there is no server; the next prepare brings them to the model."""
    async with await lab.client() as client:
        _, session = await client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", lambda: "shipped"), cwd=str(lab.home)
        )
        await session.send_and_handle("!call ship {}", timeout_seconds=PATIENCE_S)
        os.killpg(client.server.transport.pid, signal.SIGKILL)
        await until(lambda: not client.connected, "the loss")
        session.register("cancel", lambda: "cancelled")
        for asked in (session.prepare_catalog, lambda: session.send("!say hi")):
            with pytest.raises(AppServerGone):
                await asked()
        await client.reconnect()
        assert (await session.prepare_catalog())["status"] == "ok"
        done = await session.send_and_handle("!call cancel {}", timeout_seconds=PATIENCE_S)
    assert (done.status, lab.shown()) == ("completed", ["cancel", "ship"])


def test_without_an_event_loop(lab):
    """The blocking client comes back by itself, too."""
    with lab.blocking(reconnect_s=PATIENCE_S) as client:
        _, session = client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", lambda: "shipped"), cwd=str(lab.home)
        )
        session.send_and_handle("!call ship {}", timeout_seconds=PATIENCE_S)
        before = client.connection
        os.killpg(client._target.server.transport.pid, signal.SIGKILL)
        wait_until(lambda: client.connection != before and client.connected, "another server")
        done = session.send_and_handle("!call ship {}", timeout_seconds=PATIENCE_S)
    assert (done.status, done.assistant_reply["text"]) == ("completed", "shipped")


def test_a_server_that_cannot_be_started_again(lab, tmp_path):
    """When its program is gone the client gives up within its budget, says why, and can still be closed."""
    program = tmp_path / "codex"
    program.write_bytes(Path(lab.binary).read_bytes()) if lab.binary.startswith("/tmp/kdskills-emulator") else (
        program.symlink_to(lab.binary)
    )
    program.chmod(0o755)
    with CodexClient.spawn(
        home=lab.home, binary=str(program), state=lab.state, config=lab.model.config, probe="never", reconnect_s=3.0
    ) as client:
        program.unlink()
        os.killpg(client._target.server.transport.pid, signal.SIGKILL)

        def told():
            with pytest.raises(AppServerGone) as gone:
                client.request("thread/loaded/list")
            return str(gone.value)

        wait_until(lambda: "given up" in told(), "the end of the attempts")
        assert "cannot be started" in told()


@pytest.mark.parametrize("shared", [True, False], ids=["one journal", "two journals"])
async def test_two_clients_change_one_thread(url, lab, shared):
    """Whoever loses is told so; the thread stays whole, and who is left alone has the catalog it wants."""
    async with connected(url, lab, profile=PROVEN) as (client, session, slow):
        slow.go.set()
        await session.send_and_handle("!say begin", timeout_seconds=PATIENCE_S)
        reports = []

        async def change(one, name):
            for number in range(3):
                one.register(f"{name}_{number}", slow.ship)
                reports.append((await one.prepare_catalog())["status"])

        state = lab.state if shared else lab.state / "other"
        async with await AsyncCodexClient.connect(url, state=state, profile=PROVEN) as second:
            other = second.remote_skills.session(session.session_id)
            await asyncio.gather(change(session, "mine"), change(other, "theirs"))
        assert set(reports) <= {"ok", "noop", "deferred", "failed"}
        session.register("last", slow.ship)
        async with asyncio.timeout(PATIENCE_S):
            while (await session.prepare_catalog())["status"] not in ("ok", "noop"):
                pass  # the server has not noticed yet that the other one left
        done = await session.send_and_handle("!call last {}", timeout_seconds=PATIENCE_S)
        path = Path((await client.sessions.get(session.session_id))["session"]["path"])
    assert (done.status, done.assistant_reply["text"]) == ("completed", "shipped")
    assert lab.shown() == ["last", "mine_0", "mine_1", "mine_2", "ship"]
    beside = [one.name for one in path.parent.iterdir() if one != path]
    assert beside in ([], [f"{path.name}.kdskills.lock"])
