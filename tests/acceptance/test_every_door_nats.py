"""Every operation over the command bus: the answers and refusals of the command line.

The scenario and the comparison are those of the other doors; this adds the bus as one more of them.
"""

import asyncio
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import nats
import pytest
from nats.errors import Error as NatsError

from kdskills.app.operations import OPERATIONS
from kdskills.doors.nats import serve
from kdskills.doors.nats.messages import tool_of

pytestmark = [pytest.mark.needs("bubblewrap", "nats"), pytest.mark.timeout(400)]

TABLE = Path(__file__).parent / "test_every_door.py"


@pytest.fixture
def table():
    """The scenario of every door."""
    spec = importlib.util.spec_from_file_location("every_door_table", TABLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def door(table, bus):
    """Return the bus as a door: operations go as commands, and their results come back beside them."""

    @contextlib.asynccontextmanager
    async def over_nats(host):
        task = asyncio.create_task(serve(host, bus.url))
        caller = await nats.connect(bus.url)
        results = asyncio.Queue()

        async def heard(message):
            if not message.subject.endswith(".progress"):
                results.put_nowait(json.loads(message.data))

        await caller.subscribe("cg.v1.local.main.evt.tool.>", cb=heard)
        sent = iter(range(10_000))

        async def call(name, arguments):
            number = f"call-{next(sent)}"
            data = json.dumps({"tool_call_id": number, "tool_name": name, "arguments": arguments}).encode()
            async with asyncio.timeout(120):
                while True:
                    try:
                        await caller.jetstream().publish(f"cg.v1.local.main.cmd.tool.{tool_of(name)}", data)
                        break
                    except (NatsError, TimeoutError):  # the gateway makes the stream when it starts
                        assert not task.done()
                        await asyncio.sleep(0.1)
                said = await results.get()
            assert (said["tool_call_id"], said["tool_name"]) == (number, name)
            return table.Said(ok=True, value=said["result"]) if said["status"] == "ok" else table.refusal(said["error"])

        try:
            yield call
        finally:
            await caller.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    return over_nats


async def test_the_bus_says_the_same(table, bus, tmp_path, monkeypatch):
    """Answers, codes, words and details over the bus are those of the command line."""
    monkeypatch.setenv("KDSKILLS_BUS__SCOPES", '["admin"]')
    monkeypatch.setenv("KDSKILLS_BUS__CHANNELS", '{"main": "local"}')
    monkeypatch.setitem(table.DOORS, "nats", door(table, bus))
    said = {name: await table.play(name, tmp_path / name) for name in ("cli", "nats")}
    shown = {
        at: [(name, one.ok, table.shown(name, one.value, tmp_path / at)) for name, one in rows]
        for at, rows in said.items()
    }
    for one, other in zip(shown["cli"], shown["nats"], strict=False):
        assert one == other
    rest = shown["nats"][len(shown["cli"]) :]
    assert {name for name, *_ in rest} == {name for name, operation in OPERATIONS.items() if operation.local}
    assert {value["code"] for _, _, value in rest} == {"local_only"}
