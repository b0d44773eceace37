"""Tool calls of a reply: checks, order, limits, one answer each."""

import asyncio
import json

import pytest

from kdskills.errors import ExecFailed, ExecRefused, ModelFailed
from kdskills.models import ModelReply, ToolCall
from kdskills.session.approval import Denial
from kdskills.solver import PlainWiring, ReactSolver, ToolContext, ToolError
from kdskills.testing.models import ScriptedModel, call, call_raw, say, together


def results(model):
    """Return the tool messages the last request held."""
    return [message for message in model.requests[-1].messages if message.role == "tool"]


def code(message):
    return json.loads(message.text)["error"]["code"]


@pytest.mark.parametrize(
    "raw", ['{"names": "sales"}', '{"names": [1]}', "{bad", "[]", '{"nmaes": ["sales"]}', '{"names": []}']
)
async def test_bad_arguments_are_answered_with_problems_and_the_schema(build, raw):
    """Arguments out of shape are not run; the model gets pointers and the schema, and the turn goes on."""
    model = ScriptedModel([call_raw("skills_load", raw), say("ok")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    (answer,) = results(model)
    error = json.loads(answer.text)["error"]
    assert (result.status, answer.ok, error["code"], error["who"]) == ("final", False, "invalid_argument", "model")
    assert error["details"]["errors"]
    assert error["details"]["schema"]["properties"]["names"]


async def test_three_invalid_calls_in_a_row_end_the_turn(solve):
    """A model that cannot call a tool does not go on forever."""
    result = await solve([call_raw("react_read", "{"), call("react_read", refs=[]), call("react_read", nope=1)])
    assert (result.status, result.stop_reason, len(result.steps)) == ("stuck", "invalid_argument", 3)


class Unnumbered(ScriptedModel):
    """Gives replies with the very ids they were written with."""

    def _numbered(self, reply):
        return reply


async def test_ids_left_out_or_used_twice_become_unique(build):
    """Each call has a result of its own, paired by an id of its own, whatever the server wrote."""
    twice = ModelReply(
        calls=tuple(
            ToolCall(name, "react_read", f'{{"refs": ["src:{n}"]}}') for n, name in enumerate(["a", "a", "", ""])
        )
    )
    model = Unnumbered([twice, twice, say("ok")])
    async with build(model=model) as system:
        await ReactSolver(system).run("x")
    asked = [one.id for message in model.requests[-1].messages for one in message.calls]
    assert len(set(asked)) == len(asked) == 8
    assert [message.call_id for message in results(model)] == asked


async def test_an_unknown_tool_is_answered_with_the_known_ones(build):
    """A made-up tool is no crash."""
    model = ScriptedModel([call("web_search", q="x"), say("ok")])
    async with build(model=model) as system:
        await ReactSolver(system).run("x")
    assert code(results(model)[0]) == "tool_not_found"
    assert "react.read" in results(model)[0].text


async def test_text_beside_calls_does_not_end_the_turn(solve):
    """Calls are dispatched whatever is said beside them."""
    result = await solve([together(say("Let me look."), call("skills_load", names=["sales"])), say("done")])
    assert (result.text, [step.text for step in result.steps]) == ("done", ["Let me look.", "done"])


async def test_an_empty_reply_is_retried_once(solve):
    """One empty reply is forgiven, two are stuck; a call between them forgives again."""
    assert (await solve([say(""), say("ok")])).status == "final"
    result = await solve([say(" "), say("")])
    assert (result.status, result.stop_reason) == ("stuck", "empty_reply")
    again = await solve([say(""), call("skills_load", names=["sales"]), say(""), say("ok")])
    assert again.status == "final"


async def test_repeated_calls_name_the_step_and_then_end_the_turn(build):
    """The third identical call is not run; the fifth ends the turn."""
    model = ScriptedModel([call("skills_load", names=["sales"]), *[call("skills_read", path="SKILL.md")] * 5])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    outcomes = [one.error for step in result.steps for one in step.calls]
    assert outcomes == [None, None, None, "repeated_call", "repeated_call", "repeated_call"]
    assert (result.status, result.stop_reason) == ("stuck", "repeated_call")
    repeated = next(m for m in model.requests[-1].messages if m.role == "tool" and not m.ok)
    assert json.loads(repeated.text)["error"]["details"] == {"step": 2}


async def test_a_denied_skill_asked_for_by_exact_id_reads_like_an_unknown_one(build):
    """The model sees `skill_not_found`, whatever door it tries; people see why."""
    model = ScriptedModel(
        [
            call("skills_load", names=["acme.secret"]),
            call("skills_load", names=["acme.nothing"]),
            call("react_read", refs=["sk:acme.secret", "sk:acme.secret/SKILL.md", "sk:acme.nothing"]),
            say("no"),
        ]
    )
    seen = []
    async with build(model=model, sinks=(seen.append,)) as system:
        await ReactSolver(system).run("x")
    denied, unknown, read = results(model)
    assert code(denied) == code(unknown) == "skill_not_found"
    assert denied.text.replace("acme.secret", "X") == unknown.text.replace("acme.nothing", "X")
    assert "denied" not in read.text
    refusals = {(event.ref, event.code) for event in seen if event.type == "skill.refused"}
    assert ("acme.secret", "denied") in refusals
    assert "Hidden things" not in "".join(request.instructions for request in model.requests)


async def test_one_bad_ref_spoils_no_other(build):
    """Each ref has its own answer."""
    model = ScriptedModel(
        [call("react_read", refs=["sk:sales", "SKETCH.md", "src:1", "turn:none.md", "sk:sales"]), say("ok")]
    )
    async with build(model=model) as system:
        await ReactSolver(system).run("x")
    items = json.loads(results(model)[0].text)["items"]
    assert [item["status"] for item in items] == ["loaded", "error", "ok", "error", "already_active"]
    assert [item["error"]["code"] for item in items if "error" in item] == ["invalid_ref", "resource_not_found"]
    assert "Sum the column" not in results(model)[0].text
    assert model.requests[1].instructions.count("Sum the column") == 1


async def test_read_only_places_and_written_files(build, tmp_path):
    """`react.write` makes files of the turn; inputs and data/ stay as they are."""
    given = tmp_path / "in.txt"
    given.write_text("one\ntwo\nthree\n")
    model = ScriptedModel(
        [
            together(
                call("react_write", path="notes/a.md", text="hello"),
                call("react_write", path="notes/a.md", text="!", mode="append"),
                call("react_write", path="notes/a.md", text="again"),
                call("react_write", path="in.txt", text="x", mode="replace"),
                call("react_write", path="data/sales.csv", text="x", mode="replace"),
                call("react_write", path="../out.txt", text="x"),
                call("react_write", path="b.bin", b64="AAEC"),
                call("react_write", path="c.bin", b64="nope!"),
                call("react_write", path="d.bin", b64="AAEC", text="both"),
            ),
            call(
                "react_read",
                refs=["turn:notes/a.md", "turn:in.txt#L2-2", "turn:data/sales.csv", "turn:b.bin", "turn:../x"],
            ),
            say("ok"),
        ]
    )
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", files=[given])
    *writes, read = results(model)
    assert [message.ok for message in writes] == [True, True, False, False, False, False, True, False, False]
    assert [code(message) for message in writes if not message.ok] == [
        "invalid_argument",
        "path_denied",
        "path_denied",
        "path_denied",
        "invalid_argument",
        "invalid_argument",
    ]
    items = json.loads(read.text)["items"]
    assert [item.get("text") for item in items[:3]] == ["hello!", "two\n", "region,total\nnorth,42\n"]
    assert [item["error"]["code"] for item in items[3:]] == ["not_text", "path_denied"]
    assert [(file.path, file.size) for file in result.files] == [("b.bin", 3), ("notes/a.md", 6)]
    assert (tmp_path / "in.txt").read_text() == "one\ntwo\nthree\n"


async def test_calls_of_one_reply_run_together_up_to_the_bound(solve):
    """Calls overlap, never more than `max_parallel`, and answers keep the order of calls."""
    running = peak = 0

    async def wait(number: int) -> str:
        """Wait a little."""
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.02 * (6 - number))
        running -= 1
        return str(number)

    calls = together(*(call("tools_wait", number=n) for n in range(6)))
    result = await solve([calls, say("ok")], tools=[wait], max_parallel=3)
    assert (peak, [one.result for one in result.steps[0].calls]) == (3, [str(n) for n in range(6)])


async def test_state_changers_are_barriers(solve):
    """A load in the middle of a reply is done before what follows it is begun."""
    order = []

    async def mark(name: str, call: ToolContext) -> str:
        """Note what is active."""
        active = tuple(one.name for one in await call.turn.session.active())
        order.append((name, active))
        return "ok"

    reply = together(call("tools_mark", name="a"), call("skills_load", names=["sales"]), call("tools_mark", name="b"))
    await solve([reply, say("ok")], tools=[mark])
    assert order == [("a", ()), ("b", ("sales",))]


async def test_what_tools_raise(build):
    """A ToolError's text reaches the model, of other exceptions only the class."""

    def refuse(x: int) -> str:
        """Refuse."""
        raise ToolError("the number must be even", hint=x)

    def crash() -> str:
        """Crash."""
        raise ValueError("password=hunter2")

    model = ScriptedModel([together(call("tools_refuse", x=3), call("tools_crash")), say("ok")])
    async with build(model=model, tools=[refuse, crash]) as system:
        await ReactSolver(system).run("x")
    said, crashed = results(model)
    assert json.loads(said.text)["error"] == {
        "next": "Read the message, and send the call again with other arguments, or go on without it.",
        "code": "tool_error",
        "who": "model",
        "message": "the number must be even",
        "details": {"hint": 3},
    }
    assert code(crashed) == "tool_failed"
    assert "ValueError" in crashed.text
    assert "hunter2" not in crashed.text


async def test_a_tool_that_hangs_is_ended(build):
    """A tool has its time; then it is cancelled and answered."""
    ended = []

    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(True)
            raise
        return "never"

    model = ScriptedModel([call("tools_hang"), say("ok")])
    async with build(model=model, tools=[hang], tool_timeout_s=0.05) as system:
        await ReactSolver(system).run("x")
    assert (code(results(model)[0]), ended) == ("tool_timeout", [True])


async def test_every_call_passes_the_policy_plugins(build):
    """A Denial refuses a tool; the model reads its public text only."""

    class Denying(PlainWiring):
        def deny(self, request):
            if request.tool == "react.write" and request.kind == "tool":
                return Denial("secret reason", "writing is closed today")
            return None

    model = ScriptedModel(
        [together(call("react_write", path="a", text="x"), call("skills_load", names=["sales"])), say("ok")]
    )
    async with build(model=model, wiring=Denying()) as system:
        result = await ReactSolver(system).run("x")
    denied, loaded = results(model)
    assert (code(denied), loaded.ok) == ("tool_denied", True)
    assert "writing is closed today" in denied.text
    assert "secret reason" not in denied.text
    assert result.files == ()


async def test_going_round_between_two_tools_ends_the_turn(build):
    """Two calls in turn with the same answers run twice; then they are not run, and at last the turn is stuck."""
    pair = [call("skills_load", names=["sales"]), call("skills_load", names=["brief"])]
    model = ScriptedModel((pair * 5)[:9])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    errors = [one.error for step in result.steps for one in step.calls]
    assert (result.status, result.stop_reason) == ("stuck", "repeated_call")
    assert errors == [None] * 4 + ["repeated_call"] * 5


async def test_a_read_that_finds_the_same_again_counts_across_other_calls(build):
    """Between loads, writes and runs an identical read is a repetition, until what it reads has changed."""
    read = call("react_read", refs=["turn:in.txt"])
    loads = [call("react_write", path=f"{n}.txt", text="x") for n in range(9)]
    model = ScriptedModel([one for load in loads for one in (read, load)][:9])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", files=[("in.txt", b"i")])
    reads = [one.error for step in result.steps for one in step.calls if one.tool == "react.read"]
    assert reads == [None, None, "repeated_call", "repeated_call", "repeated_call"]
    assert (result.status, result.stop_reason) == ("stuck", "repeated_call")


async def test_what_left_the_history_may_be_read_again(build):
    """A model that is no longer shown what it read reads it again, and is not told to look where it does not stand."""
    read = call("react_read", refs=["turn:in.txt"])
    loads = [call("react_write", path=f"{n}.txt", text="x") for n in range(3)]
    before = [one for load in loads for one in (read, load)]
    model = ScriptedModel([*before, ModelFailed("full", code="context_full"), read, say("ok")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", files=[("in.txt", b"i" * 4000)])
    reads = [one.error for step in result.steps for one in step.calls if one.tool == "react.read"]
    assert (result.status, reads) == ("final", [None, None, "repeated_call", None])


async def test_a_read_of_what_changed_is_new(build):
    """Reading a file after each change of it is work, not a circle."""
    read = call("react_read", refs=["turn:a.txt"])
    writes = [call("react_write", path="a.txt", text=str(n), mode="replace") for n in range(6)]
    model = ScriptedModel([one for write in writes for one in (write, read)] + [say("ok")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    assert result.status == "final"
    assert [one.error for step in result.steps for one in step.calls] == [None] * 12


async def test_trying_again_after_each_change_is_no_circle(build, executor):
    """A script that fails alike after every edit may be run again: the edits differ."""
    runs = [call("skills_run_script", path="scripts/sum.py")] * 5
    writes = [call("react_write", path="a.txt", text=str(n), mode="replace") for n in range(5)]
    executor.outcome = {"status": "nonzero", "exit_code": 1}
    steps = [one for pair in zip(writes, runs, strict=True) for one in pair]
    model = ScriptedModel([call("skills_load", names=["sales"]), *steps, say("gave up")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, [one.error for step in result.steps for one in step.calls]) == ("final", [None] * 11)


async def test_a_policy_plugin_that_fails_refuses(build):
    """What cannot be asked is not allowed: the transcript says why, the model does not read it."""

    class Broken(PlainWiring):
        def deny(self, request):
            raise RuntimeError("no policy")

    model = ScriptedModel([call("react_write", path="a", text="x"), say("ok")])
    async with build(model=model, wiring=Broken()) as system:
        result = await ReactSolver(system).run("x")
    answer = results(model)[0]
    assert (code(answer), result.files) == ("tool_failed", ())
    assert "no policy" not in answer.text
    assert [(found.code, found.ref) for found in result.diagnostics] == [("plugin_failed", "react.write")]
    assert "RuntimeError: no policy" in result.diagnostics[0].message


async def test_calls_beyond_the_bound_are_answered_and_the_turn_is_partial(build):
    """Each call has its answer; then there is one call without tools."""
    model = ScriptedModel([together(*(call("react_read", refs=[f"src:{n}"]) for n in range(1, 5))), say("what I have")])
    async with build(model=model, max_tool_calls=2) as system:
        result = await ReactSolver(system).run("x")
    assert [one.error for one in result.steps[0].calls][2:] == ["budget_exceeded", "budget_exceeded"]
    assert (result.status, result.stop_reason, result.text) == ("partial", "max_tool_calls", "what I have")
    assert model.requests[-1].tools == ()
    assert len(results(model)) == 4


@pytest.mark.parametrize(
    ("error", "expected"), [(ExecRefused("no"), "executor_unavailable"), (ExecFailed("broke"), "executor_failed")]
)
async def test_engine_faults_are_no_fault_of_the_script(build, executor, error, expected):
    """A sandbox that refuses or breaks says so in its own code."""
    executor.error = error
    model = ScriptedModel(
        [
            call("skills_load", names=["sales"]),
            call("skills_run_script", path="scripts/sum.py"),
            call("exec_python", code="1"),
            say("ok"),
        ]
    )
    async with build(model=model) as system:
        await ReactSolver(system).run("x")
    assert [code(message) for message in results(model)[1:]] == [expected, expected]


async def test_a_script_that_hangs_or_floods_is_a_result(build, executor):
    """Timeouts and cut output are facts for the model, not errors."""
    executor.outcome = {"status": "timeout", "exit_code": None, "stdout": b"x" * 1000, "total": 10**9}
    model = ScriptedModel(
        [
            call("skills_load", names=["sales"]),
            together(call("skills_run_script", path="scripts/sum.py"), call("exec_python", code="1")),
            say("ok"),
        ]
    )
    async with build(model=model) as system:
        await ReactSolver(system).run("x")
    for message in results(model)[1:]:
        found = json.loads(message.text)
        assert (message.ok, found["status"], found["exit_code"], found["stdout_truncated"]) == (
            True,
            "timeout",
            124,
            True,
        )


async def test_a_long_result_is_cut_and_said_so(solve):
    """One result takes at most its share of the window."""

    def much() -> str:
        """Give much."""
        return "begin " + "x" * 400_000 + " end"

    result = await solve([call("tools_much"), say("ok")], tools=[much])
    text = result.steps[0].calls[0].result
    assert len(text) < 60_000
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "characters left out" in text
    assert [found.code for found in result.diagnostics] == ["result_cut"]
