"""The door of the bus with a real server: answers, refusals, reads, streams."""

import pytest

pytestmark = [pytest.mark.needs("nats", "bubblewrap"), pytest.mark.timeout(300), pytest.mark.xdist_group("chaos")]


async def test_reads_are_answered_by_the_tool(caller, gateway):
    """A request gets the library's answer; commands are no reads; names must agree; nothing in a payload widens."""
    await gateway()
    said = await caller.request("skills.list", {})
    assert (said["status"], said["tool_name"]) == ("ok", "skills.list")
    assert (await caller.request("skills.run_cmd", {}))["error"]["code"] == "not_a_read"
    assert (await caller.request("skills.list", {}, tool_name="skills.show"))["error"]["code"] == "message_unreadable"
    assert (await caller.request("skills.list", {}, project="other"))["error"]["code"] == "project_not_open"
    assert (await caller.request("skills.list", {}, channel="local"))["error"]["code"] == "channel_not_open"
    assert (await caller.request("tokens.list", {}))["error"]["code"] == "scope_missing"
    assert (await caller.request("skills.nothing", {}))["error"]["code"] == "unknown_operation"
    assert (await caller.request("skills.list", {"nothing": 1}))["error"]["code"] == "bad_request"


async def test_a_call_that_comes_again_gets_its_answer(caller, gateway):
    """The same id is one execution; with another body it is a conflict, which is told beside the first result."""
    await gateway(bus={"scopes": ["admin"]})
    arguments = {"agent": "writer", "scopes": ["skills:read"]}
    first = await caller.call("t1", "tokens.create", arguments)
    await caller.send("t1", "tokens.create", arguments)
    await caller.send("t1", "tokens.create", {**arguments, "agent": "other"})
    await caller.call("end", "tokens.list", {})
    rows = (await caller.request("tokens.list", {}))["result"]["tokens"]
    assert (first["status"], len(rows)) == ("ok", 1)
    ran = {"skill_name": "hello", "command": "true"}
    task = await caller.call("w1", "skills.run_cmd_async", ran)
    await caller.send("w1", "skills.run_cmd_async", {**ran, "command": "false"})
    await caller.send("w1", "skills.run_cmd_async", ran)
    await caller.call("end2", "skills.list", {})
    tasks = (await caller.request("tasks.list", {}))["result"]["tasks"]
    assert [row["task_id"] for row in tasks] == [task["result"]["task_id"]]


async def test_existing_streams_are_used(bus, caller, gateway):
    """Where streams have the subjects, none is made."""
    await caller.js.add_stream(name="MINE", subjects=["cg.*.*.*.cmd.>", "cg.*.*.*.evt.>"])
    await gateway()
    assert (await caller.call("a", "skills.list", {}))["status"] == "ok"
    assert [info.config.name for info in await caller.js.streams_info()] == ["MINE"]
