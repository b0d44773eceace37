"""What tests of the command bus share: a caller on the bus, and gateways in this process or in their own."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import nats
import pytest
from nats.errors import Error as NatsError

from kdskills.app import Host, Settings
from kdskills.doors.nats import serve
from kdskills.doors.nats.messages import tool_of

WAIT_S = 120
PROGRAM = Path(__file__).parent / "gateway_process.py"


class Caller:
    """Somebody on the bus: sends commands and requests, and keeps every result and event by the call's id."""

    def __init__(self, connection):
        self.nc = connection
        self.js = connection.jetstream()
        self.results = defaultdict(list)
        self.progress = defaultdict(list)

    async def listen(self):
        """Read all results from the first one on."""
        await self.nc.subscribe("cg.v1.*.*.evt.tool.>", cb=self._heard)

    async def _heard(self, message):
        said = json.loads(message.data)
        kept = self.progress if message.subject.endswith(".progress") else self.results
        kept[said["tool_call_id"]].append(said)

    async def stored(self):
        """Return the results the stream kept, by the call's id: what a late reader gets."""
        name = await self.js.find_stream_name_by_subject("cg.v1.local.main.evt.tool.skills.list")
        last = (await self.js.stream_info(name)).state.last_seq
        found = defaultdict(list)
        for number in range(1, last + 1):
            message = await self.js.get_msg(name, number)
            if not message.subject.endswith(".progress"):
                said = json.loads(message.data)
                found[said["tool_call_id"]].append(said)
        return found

    @staticmethod
    def subject(operation, kind="cmd", project="local", channel="main"):
        return f"cg.v1.{project}.{channel}.{kind}.tool.{tool_of(operation)}"

    async def send(self, call, operation, arguments, **where):
        """Send a command; tried again while the bus is away."""
        data = json.dumps({"tool_call_id": call, "tool_name": operation, "arguments": arguments}).encode()
        await self.send_raw(self.subject(operation, **where), data)

    async def send_raw(self, subject, data):
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await self.js.publish(subject, data)
                except (NatsError, TimeoutError):
                    await asyncio.sleep(0.2)

    async def result(self, call):
        """Wait for the result of a call."""
        await until(lambda: self.results[call])
        return self.results[call][0]

    async def call(self, call, operation, arguments, **where):
        """Send a command and return its result."""
        await self.send(call, operation, arguments, **where)
        return await self.result(call)

    async def request(self, operation, arguments, call="r1", tool_name=None, **where):
        """Ask for a quick read."""
        data = json.dumps({"tool_call_id": call, "tool_name": tool_name or operation, "arguments": arguments}).encode()
        found = await self.nc.request(self.subject(operation, "req", **where), data, timeout=WAIT_S)
        return json.loads(found.data)


async def until(condition, seconds=WAIT_S):
    """Wait until *condition*, plain or async, is true."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.05)


async def served(caller):
    """Wait until a gateway serves the bus."""

    async def there():
        with contextlib.suppress(NatsError, TimeoutError):
            stream = await caller.js.find_stream_name_by_subject("cg.v1.local.main.cmd.tool.skills.list")
            await caller.js.find_stream_name_by_subject("cg.v1.local.main.evt.tool.skills.list")
            await caller.js.consumer_info(stream, "kdskills-v1")
            return True
        return False

    await until(there)


@pytest.fixture
def waiting():
    """`until` and `served`, for tests."""
    return until, served


@pytest.fixture
def bus_settings(tmp_path, repo):
    """Make settings of a gateway."""

    def make(**given):
        jobs = {"idle_s": 3.0} | given.pop("jobs", {})
        walls = {"executor": "bubblewrap"}
        places = {
            "state_dir": tmp_path / "state",
            "index_dir": tmp_path / "index",
            "bundle": repo / "bundles" / "hello",
        }
        return Settings(**walls, **places, jobs=jobs, **given)

    return make


@pytest.fixture
async def caller(bus):
    """A caller that hears everything."""
    connection = await nats.connect(bus.url, max_reconnect_attempts=-1, reconnect_time_wait=0.2)
    made = Caller(connection)
    await made.listen()
    yield made
    await connection.close()


@pytest.fixture
async def gateway(bus, bus_settings, caller):
    """Start a gateway in this process; returns its Host. Ended with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**given):
            host = Host(bus_settings(**given), entry_points=False)
            stack.push_async_callback(host.storage.aclose)
            stack.push_async_callback(host.work.aclose)
            task = asyncio.create_task(serve(host, bus.url))
            stack.push_async_callback(ended, task)
            await served(caller)
            return host, task

        yield start


async def ended(task):
    """Stop a gateway and wait for it."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def gateway_processes(bus, bus_settings, tmp_path):
    """Start gateways as processes; they are killed with the test."""
    running = []

    def start(**given):
        log = (tmp_path / f"gateway-{len(running)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), bus.url], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        process.stdin.write(bus_settings(**given).model_dump_json().encode())
        process.stdin.close()
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait(60)
