"""What becomes of commands when the bus loses what a gateway relies on: it recovers, or says so."""

import asyncio
import contextlib
import logging
import os
from types import SimpleNamespace

import nats
import pytest
from nats.errors import Error as NatsError

from kdskills.app import Host
from kdskills.doors.nats import serve
from kdskills.doors.nats.messages import BUCKET, Commands
from kdskills.errors import OperatorMustAct

pytestmark = [pytest.mark.needs("nats", "bubblewrap"), pytest.mark.timeout(400), pytest.mark.xdist_group("chaos")]

MADE = {"agent": "writer", "scopes": ["skills:read"]}


async def stream_of(caller, kind):
    """Return the name of the stream that has subjects of *kind*."""
    return await caller.js.find_stream_name_by_subject(f"cg.v1.local.main.{kind}.tool.skills.list")


async def refused(host, url):
    """Serve a bus that cannot be used, and return the error that says so."""
    try:
        with pytest.raises(OperatorMustAct) as caught:
            async with asyncio.timeout(60):
                await serve(host, url)
        return caught.value
    finally:
        await host.work.aclose()
        await host.storage.aclose()


async def stored(caller, call):
    """Wait until the stream of results has *call*."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(NatsError):
                found = await caller.stored()
                if call in found:
                    return found[call]
            await asyncio.sleep(0.2)


async def test_a_cancellation_that_the_client_loses(gateway, monkeypatch):
    """A gateway ends though the bus's client swallows the cancellation: what it was told is not forgotten."""
    waiting, lost = asyncio.Event(), asyncio.Event()
    fetch = Commands.next

    async def losing(commands):
        waiting.set()
        try:
            return await fetch(commands)
        except asyncio.CancelledError:
            lost.set()
            return None

    monkeypatch.setattr(Commands, "next", losing)
    _, task = await gateway()
    waiting.clear()
    await waiting.wait()  # the cancellation meets the client, and not what the gateway does between two commands
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=30)
    assert (bool(done), lost.is_set()) == (True, True)
    assert task.cancelled()


async def test_a_bus_that_comes_later(bus, bus_settings, waiting, caplog):
    """A gateway that is started before its bus says so in the log and to `/readyz`, and serves as soon as there is one."""
    until, served = waiting
    bus.stop()
    host = Host(bus_settings(), entry_points=False)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.storage.aclose)
        stack.push_async_callback(host.work.aclose)
        with caplog.at_level(logging.WARNING, "kdskills.nats"):
            task = asyncio.create_task(serve(host, bus.url))
            stack.push_async_callback(ended, task)
            await until(lambda: "the bus: " in caplog.text)
            assert (await host.ready()).notices["bus"] == "bus_unavailable"
        bus.start()
        connection = await nats.connect(bus.url)
        stack.push_async_callback(connection.close)
        await served(SimpleNamespace(js=connection.jetstream()))
        assert (await host.ready()).notices["bus"] == "ok"


async def ended(task):
    """Stop a gateway and wait for it."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("url", ["nats://me:s3cret-word@[::1:4222", "nats://me:s3cret-word@a:99999999"])
async def test_an_address_that_is_none(bus_settings, url):
    """What can never be reached is told at once, without the password in it."""
    error = await refused(Host(bus_settings(), entry_points=False), url)
    assert error.code == "bus_unavailable"
    assert "s3cret-word" not in error.message


async def test_a_bus_without_jetstream(bus, bus_settings):
    """A bus that keeps nothing cannot be served, and the error says what it lacks."""
    bus.stop()
    bus.start(jetstream=False)
    error = await refused(Host(bus_settings(), entry_points=False), bus.url)
    assert error.code == "bus_unavailable"
    assert "JetStream" in error.message


async def test_streams_no_consumer_can_read(caller, bus, bus_settings):
    """Commands that lie in two streams are refused at the start, with the names of both."""
    await caller.js.add_stream(name="ONE", subjects=["cg.v1.a.*.cmd.>"])
    await caller.js.add_stream(name="TWO", subjects=["cg.v1.b.*.cmd.>"])
    error = await refused(Host(bus_settings(), entry_points=False), bus.url)
    assert (error.code, error.details["streams"]) == ("streams_disagree", ["ONE", "TWO"])


async def test_the_consumer_is_deleted_while_somebody_waits(caller, gateway):
    """A consumer that is deleted under a gateway that waits for commands is made again."""
    await gateway()
    assert (await caller.call("a", "skills.list", {}))["status"] == "ok"
    await caller.js.delete_consumer(await stream_of(caller, "cmd"), "kdskills-v1")
    assert (await caller.call("b", "skills.list", {}))["status"] == "ok"


async def test_the_consumer_is_deleted_while_nobody_waits(caller, gateway, waiting, tmp_path, caplog):
    """A gateway with its hands full learns of it later: the bus says nothing, so it looks; the log tells."""
    until, _ = waiting
    await gateway(bus={"concurrency": 1})
    held = {"skill_name": "hello", "command": "touch begun; sleep 3", "workdir": "session", "session_id": "held"}
    await caller.send("slow", "skills.run_cmd", held)
    await until(lambda: any("begun" in names for _, _, names in os.walk(tmp_path / "state")))
    with caplog.at_level(logging.WARNING, "kdskills.nats"):
        await caller.js.delete_consumer(await stream_of(caller, "cmd"), "kdskills-v1")
        assert (await caller.result("slow"))["status"] == "ok"
        assert (await caller.call("b", "skills.list", {}))["status"] == "ok"
    assert any("consumer" in record.getMessage() or "bus" in record.getMessage() for record in caplog.records)


async def test_the_stream_of_commands_is_deleted(caller, gateway):
    """The stream is made again, and commands sent afterwards are answered."""
    await gateway()
    assert (await caller.call("a", "skills.list", {}))["status"] == "ok"
    await caller.js.delete_stream(await stream_of(caller, "cmd"))
    assert (await caller.call("b", "skills.list", {}))["status"] == "ok"


async def test_the_stream_of_results_is_deleted(caller, gateway, waiting):
    """A result for which there is no stream waits until there is one again: the gateway makes it."""
    until, _ = waiting
    await gateway()
    assert (await caller.call("a", "skills.list", {}))["status"] == "ok"
    await caller.js.delete_stream(await stream_of(caller, "evt"))
    await caller.send("b", "skills.list", {})
    (row,) = await stored(caller, "b")
    assert row["status"] == "ok"

    async def acknowledged():
        info = await caller.js.consumer_info(await stream_of(caller, "cmd"), "kdskills-v1")
        return info.num_pending == 0 and info.num_ack_pending == 0

    await until(acknowledged)


async def test_the_kept_answers_are_deleted(caller, gateway):
    """A call that ran is answered, and runs once, when what answers are kept in was deleted meanwhile."""
    await gateway(bus={"scopes": ["admin"], "ack_wait_s": 30, "max_deliver": 3})
    assert (await caller.call("a", "tokens.create", MADE))["status"] == "ok"
    await caller.js.delete_key_value(f"{BUCKET}_v1")
    assert (await caller.call("b", "tokens.create", MADE))["status"] == "ok"
    await caller.send("b", "tokens.create", MADE)
    await caller.call("end", "tokens.list", {})
    rows = (await caller.request("tokens.list", {}))["result"]["tokens"]
    assert len(rows) == 2


async def test_everything_is_deleted_at_once(caller, gateway):
    """Even then the next command is answered."""
    await gateway()
    assert (await caller.call("a", "skills.list", {}))["status"] == "ok"
    for info in await caller.js.streams_info():
        await caller.js.delete_stream(info.config.name)
    assert (await caller.call("b", "skills.list", {}))["status"] == "ok"
    await stored(caller, "b")
