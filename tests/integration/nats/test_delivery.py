"""Delivery over a real bus: one execution a call, whatever dies in between."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("nats", "bubblewrap"), pytest.mark.timeout(400), pytest.mark.xdist_group("chaos")]


def noted(name, then=":"):
    """Return arguments of a command that notes its run in a folder of its own."""
    where = {"session_id": name, "workdir": "session"}
    return {"skill_name": "hello", "command": f"echo {name} >> ran.txt; {then}", **where}


def runs(tmp_path):
    """Return what ran, as often as it ran; folders of tasks that are over go while one looks."""
    lines = []
    for top, _, names in os.walk(tmp_path / "state"):
        if "ran.txt" in names:
            lines += Path(top, "ran.txt").read_text().split()
    return lines


async def test_one_execution_a_call(bus, caller, gateway_processes, waiting, tmp_path):
    """150 calls and 50 duplicates, 4 gateways killed, the bus killed once: 150 executions, one result a call."""
    until, served = waiting
    chance = random.Random(7)
    gateways = [gateway_processes(bus={"ack_wait_s": 2}) for _ in range(2)]
    await served(caller)
    calls = [f"call-{number}" for number in range(150)]
    sent = calls + chance.sample(calls, 50)
    chance.shuffle(sent)
    for number, call in enumerate(sent):
        await caller.send(call, "skills.run_cmd_async", noted(call))
        if number % 40 == 30:  # four times
            wanted = number // 4
            await until(lambda wanted=wanted: len(caller.results) >= wanted)
            victim = gateways.pop(0)
            victim.kill()
            victim.wait(60)
            gateways.append(gateway_processes(bus={"ack_wait_s": 2}))
        if number == 100:
            bus.stop()
            bus.start()

    async def stored():
        return set(await caller.stored()) == set(calls)

    await until(lambda: len(set(runs(tmp_path))) == 150, 300)
    await until(stored)
    await until(lambda: pending_is_zero(caller))
    assert Counter(runs(tmp_path)) == Counter(calls)
    found = await caller.stored()
    assert {call: [said["status"] for said in rows] for call, rows in found.items()} == {call: ["ok"] for call in calls}
    assert len({rows[0]["result"]["task_id"] for rows in found.values()}) == 150


async def pending_is_zero(caller):
    """Whether every command is acknowledged."""
    stream = await caller.js.find_stream_name_by_subject("cg.v1.local.main.cmd.tool.skills.list")
    info = await caller.js.consumer_info(stream, "kdskills-v1")
    return info.num_pending == 0 and info.num_ack_pending == 0


async def test_a_long_command_is_held(caller, gateway, waiting, tmp_path):
    """A command that takes longer than the bus waits is not delivered again, and runs once."""
    until, _ = waiting
    await gateway(bus={"ack_wait_s": 1})
    said = await caller.call("long", "skills.run_cmd", noted("long", "sleep 3"))
    assert (said["status"], said["result"]["exit_code"]) == ("ok", 0)
    await until(lambda: pending_is_zero(caller))
    assert runs(tmp_path) == ["long"]


async def test_poison_is_ended(caller, gateway, waiting):
    """What is no command is ended, not delivered again, and never holds up what comes after it."""
    until, _ = waiting
    await gateway(bus={"ack_wait_s": 1})
    subject = caller.subject("skills.list")
    poison = [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"tool_call_id": "", "tool_name": "skills.list"}',
        b'{"tool_call_id": "a\\r\\nX: y", "tool_name": "skills.list"}',
        b'{"tool_call_id": "other", "tool_name": "skills.show", "arguments": {"ref": "hello"}}',
        b'{"tool_call_id": "odd", "tool_name": "skills.list", "arguments": []}',
    ]
    for data in poison:
        await caller.send_raw(subject, data)
    await caller.send_raw(
        "cg.v1.local.main.cmd.tool.kd.skills.list", b'{"tool_call_id": "x", "tool_name": "skills.list"}'
    )
    assert (await caller.call("good", "skills.list", {}))["status"] == "ok"
    await until(lambda: pending_is_zero(caller))
    await asyncio.sleep(1.5)  # longer than an unanswered command would wait
    assert await pending_is_zero(caller)
    assert set(caller.results) == {"good"}


async def test_commands_wait_for_a_gateway(caller, gateway, waiting):
    """A gateway that stops leaves its commands on the bus; the next one answers them."""
    _, task = await gateway()
    task.cancel()
    await asyncio.wait([task])
    await caller.send("later", "skills.list", {})
    await gateway()
    assert (await caller.result("later"))["status"] == "ok"


async def test_a_stop_lets_commands_finish(caller, gateway, waiting, tmp_path):
    """A gateway that is told to stop answers what it works on first."""
    until, _ = waiting
    _, task = await gateway(drain_s=100)
    await caller.send("slow", "skills.run_cmd", noted("slow", "sleep 2"))
    await until(lambda: runs(tmp_path))
    task.cancel()
    await asyncio.wait([task])
    assert (await caller.result("slow"))["status"] == "ok"
    assert await pending_is_zero(caller)


async def test_what_is_cut_off_comes_again(caller, gateway, waiting):
    """A watch that a stop cuts off is answered by the next gateway."""
    until, _ = waiting
    _, task = await gateway(drain_s=0, bus={"ack_wait_s": 60})
    started = await caller.call("start", "skills.run_cmd_async", {"skill_name": "hello", "command": "sleep 4"})
    watch = {"task_id": started["result"]["task_id"], "timeout_sec": 100}
    await caller.send("watch", "skills.task_watch", watch)
    await until(lambda: caller.progress["watch"])
    task.cancel()
    await asyncio.wait([task])
    assert not caller.results["watch"]
    await gateway(bus={"ack_wait_s": 60})
    said = await caller.result("watch")
    assert said["result"]["status"] == "succeeded"
