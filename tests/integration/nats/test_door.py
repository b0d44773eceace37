"""The door of the bus with a real server: answers, refusals, reads, streams."""

import io
import json

import pytest

from kdskills.app.logs import json_logs
from kdskills.errors.traces import Trace

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


async def test_a_trace_goes_through_the_bus(caller, gateway):
    """The trace in a command's headers is the result's, the task's and the log's; one that is none is replaced; so for reads."""
    out, results, trace = io.StringIO(), {}, "4bf92f3577b34da6a3ce929d0e0e4736"

    async def keep(message):
        results[json.loads(message.data)["tool_call_id"]] = Trace.read(message.headers["traceparent"])

    await caller.nc.subscribe("cg.v1.*.*.evt.tool.>", cb=keep)
    await gateway()
    with json_logs(out):
        for call, sent in (("good", f"00-{trace}-00f067aa0ba902b7-01"), ("bad", f"00-{trace}-zz")):
            arguments = {"skill_name": "hello", "command": 'printf %s "$TRACEPARENT"'}
            body = {"tool_call_id": call, "tool_name": "skills.run_cmd", "arguments": arguments}
            subject = caller.subject("skills.run_cmd")
            await caller.js.publish(subject, json.dumps(body).encode(), headers={"Traceparent": sent})
            inside = Trace.read((await caller.result(call))["result"]["stdout"])
            assert inside.trace_id == results[call].trace_id
        body = json.dumps({"tool_call_id": "r", "tool_name": "skills.nothing"}).encode()
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        read = await caller.nc.request(caller.subject("skills.nothing", "req"), body, timeout=60, headers=headers)
    assert (
        results["good"].trace_id == Trace.read(read.headers["traceparent"]).trace_id == trace != results["bad"].trace_id
    )
    told = [line for line in map(json.loads, out.getvalue().splitlines()) if line.get("door") == "nats"]
    assert [(line.get("operation"), line["code"]) for line in told] == [
        *[("skills.run_cmd", "ok")] * 2,
        (None, "unknown_operation"),
    ]
    assert [line["trace_id"] == trace for line in told] == [True, False, True]
    assert (told[0]["request_id"], told[0]["agent"], told[0]["project"]) == ("good", "main", "local")
