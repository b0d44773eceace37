"""Hostile replies, hostile tools, spoilt folders: a turn ends with a result and an answer for every call."""

import asyncio
import json
import shutil
import threading
import time
from contextlib import suppress

import pytest

from kdskills.errors import BadRequest, NoActiveSkills, ReplayError
from kdskills.models import ModelReply, ToolCall
from kdskills.solver import AgentSpec, ReactSolver, TurnResult
from kdskills.solver.tools import ToolContext
from kdskills.testing.models import ScriptedModel, call, call_raw, say, together

HALF = "\ud800"


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


@pytest.fixture
def ask(build):
    """Return a function that runs one request and gives the result and the model's last messages."""

    async def run(*replies, request="Which region grew?", **options):
        model = ScriptedModel(replies)
        async with build(model=model, **options) as system:
            result = await ReactSolver(system).run(request)
        return result, model.requests[-1].messages

    return run


def codes(result):
    """Return the error codes of all calls."""
    return [one.error for step in result.steps for one in step.calls]


async def test_halves_of_characters_reach_no_transport(ask, tmp_path):
    """Whatever a model or a tool says, history, result and transcript can be encoded."""

    async def broken() -> dict[str, str]:
        """Give half a character."""
        return {"a": HALF}

    result, messages = await ask(
        together(call_raw(f"bad{HALF}", "{}"), call("tools_broken"), call_raw("skills_load", '{"names":["\\ud800"]}')),
        say(f"done {HALF}"),
        tools=[broken],
    )
    assert codes(result) == ["tool_not_found", None, "invalid_argument"]
    for message in messages:
        (message.text + "".join(one.arguments + one.tool for one in message.calls)).encode()
    json.dumps(result.to_json(), ensure_ascii=False).encode()
    assert TurnResult.from_transcript(tmp_path / "transcripts" / f"{result.turn_id}.jsonl") == result


async def test_a_request_read_in_the_wrong_encoding_is_refused(ask):
    """Half a character cannot be sent to a model: the caller is told before the turn."""
    with pytest.raises(BadRequest, match="halves of characters"):
        await ask(say("never"), request=f"a{HALF}")


@pytest.mark.parametrize("depth", [65, 320, 500, 900, 5_000, 100_000])
async def test_deeply_nested_arguments_are_an_answer(ask, depth):
    """JSON of any depth is `invalid_argument`, and nobody runs out of stack."""
    lists = '{"names":' + "[" * depth + "]" * depth + "}"
    objects = '{"a":' * depth + "1" + "}" * depth
    result, _ = await ask(call_raw("skills_load", lists), call_raw("react_write", objects), say("ok"))
    assert (codes(result), result.status) == (["invalid_argument"] * 2, "final")


async def test_ten_thousand_calls_of_one_id_are_answered_in_little_time(ask):
    """Each has its answer and an id of its own; those beyond the bound are not run."""
    calls = tuple(ToolCall("x", "skills_load", json.dumps({"names": [f"n{number}"]})) for number in range(10_000))
    begun = time.monotonic()
    result, messages = await ask(ModelReply(calls=calls), say("ok"))
    assert time.monotonic() - begun < 100
    assert codes(result) == ["skill_not_found"] * 96 + ["budget_exceeded"] * 9_904
    assert len({one.call_id for one in messages if one.role == "tool"}) == 10_000


@pytest.mark.parametrize(
    "reply",
    [
        call("skills_load", **{"x" * 5_000_000: 1}),
        call("x" * 5_000_000),
        call("skills_read", path="/" + "x" * 5_000_000),
        call("react_read", refs=["x" * 5_000_000]),
        call("react_write", path="x/" * 2_500_000 + "x", text="x"),
        call("tools_echo", text="x" * 5_000_000),
    ],
    ids=["key", "tool", "path", "ref", "folders", "error"],
)
async def test_refusals_do_not_repeat_megabytes(ask, reply):
    """An answer that says no takes its share of the window, as any other."""

    async def echo(text: str) -> str:
        """Fail with all it was given."""
        from kdskills.solver.tools import ToolError

        raise ToolError(text)

    result, messages = await ask(call("skills_load", names=["sales"]), reply, say("ok"), tools=[echo])
    assert codes(result)[1] is not None
    assert max(len(message.text) for message in messages) < 50_000


async def test_a_path_through_many_folders_makes_none(ask, tmp_path):
    """The turn's folder stays one that can be walked and removed."""
    result, _ = await ask(call("react_write", path="a/" * 1_500 + "f", text="x"), say("ok"))
    assert (codes(result), result.files) == (["invalid_argument"], ())
    assert list((tmp_path / "turns").iterdir()) == []


@pytest.mark.parametrize(
    "kind", [asyncio.CancelledError, SystemExit, GeneratorExit, StopIteration, StopAsyncIteration, TimeoutError, Odd]
)
async def test_whatever_a_tool_raises_is_an_answer(ask, kind):
    """Even what is no Exception ends the call alone, not the turn or the process; calls beside it are answered."""

    async def soft() -> str:
        """Raise in the loop."""
        raise kind

    def hard() -> str:
        """Raise in a thread."""
        raise kind

    result, messages = await ask(
        together(call("tools_soft"), call("tools_hard"), call("skills_load", names=["sales"])),
        say("ok"),
        tools=[soft, hard],
    )
    assert (codes(result), result.status) == (["tool_failed", "tool_failed", None], "final")
    assert sum(message.role == "tool" for message in messages) == 3


async def test_tools_that_block_their_threads_hold_up_nobody(ask):
    """More of them than the loop's pool has threads: files are still read, and the turn ends."""
    release = threading.Event()

    def block(number: int) -> str:
        """Never come back."""
        release.wait(110)
        return str(number)

    begun = time.monotonic()
    try:
        result, _ = await ask(
            *(together(*(call("tools_block", number=8 * turn + n) for n in range(8))) for turn in range(5)),
            call("skills_load", names=["sales"]),
            call("skills_read", path="references/notes.md"),
            say("ok"),
            tools=[block],
            tool_timeout_s=0.1,
        )
    finally:
        release.set()
    assert codes(result) == ["tool_timeout"] * 40 + [None, None]
    assert time.monotonic() - begun < 100


async def test_a_tool_that_ignores_its_cancellation_is_left_behind(ask):
    """The call ends while the tool goes on, which is nobody's any more."""
    release, over = asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        """Go on for as long as it likes, whatever comes."""
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        over.set()
        return "late"

    try:
        result, _ = await ask(call("tools_stubborn"), say("ok"), tools=[stubborn], tool_timeout_s=0.2)
        assert (codes(result), over.is_set()) == (["tool_timeout"], False)
    finally:
        release.set()
    await asyncio.wait_for(over.wait(), 60)
    await asyncio.sleep(0)  # its task ends


async def test_a_def_that_gives_an_awaitable_is_awaited(ask):
    """A plain function around an async one is a tool like any other."""

    async def inner() -> str:
        return "inside"

    def outer() -> str:
        """Hand on."""
        return inner()  # type: ignore[return-value]

    result, _ = await ask(call("tools_outer"), say("ok"), tools=[outer])
    assert result.steps[0].calls[0].result == "inside"


async def test_a_change_within_a_reply_forgives_a_repeated_call(ask):
    """Reading again what was written in between is no repetition; without a change it is, in one reply too."""
    both = [
        one
        for number in range(4)
        for one in (
            call("react_write", path="a", text=str(number), mode="replace"),
            call("react_read", refs=["turn:a"]),
        )
    ]
    result, _ = await ask(together(*both), say("ok"))
    assert codes(result) == [None] * 8
    result, _ = await ask(together(*[call("react_read", refs=["turn:a"])] * 4), say("ok"))
    assert codes(result) == ["nothing_read"] * 2 + ["repeated_call"] * 2


async def test_a_recording_that_does_not_fit_within_a_tool_ends_the_turn(build):
    """What generated code asks a model for must fit as well: it is not turned into an answer for the model."""
    model = ScriptedModel([call("exec_python", task="count")], roles={"solver.codegen": []})
    async with build(model=model) as system:
        with pytest.raises(ReplayError, match="no reply") as caught:
            await ReactSolver(system).run("q")
    assert (caught.value.result.status, caught.value.result.stop_reason) == ("failed", "replay_exhausted")
    assert [one.ok for one in caught.value.result.steps[-1].calls] == [False]


async def test_a_spoilt_turn_folder_costs_the_files_not_the_result(ask):
    """A tool that removes the folder under the turn's feet is answered, and the turn ends as any other."""

    async def spoil(place: ToolContext) -> str:
        """Remove the turn's folder."""
        shutil.rmtree(place.turn.workspace.root)
        return "gone"

    result, messages = await ask(
        call("tools_spoil"),
        together(call("react_write", path="a", text="x"), call("exec_python", code="1")),
        say("ok"),
        tools=[spoil],
    )
    assert (result.status, result.files) == ("final", ())
    assert [item.code for item in result.diagnostics] == ["files_lost"]
    assert not any("kdskills-turn-" in message.text for message in messages)


async def test_a_hundred_thousand_unknown_citations_are_shown(ask):
    """Showing an answer takes time in proportion to its length."""
    begun = time.monotonic()
    result, _ = await ask(say("ab [[S:9]] " * 30_000))
    assert (len(result.citation_issues), result.rendered.count("[?9]")) == (30_000, 30_000)
    assert time.monotonic() - begun < 100


async def test_a_sink_that_fails_at_the_last_event_adds_none(build, tmp_path):
    """`turn.finished` is the last event, in streams and in the transcript."""

    def sink(event):
        if event.type == "turn.finished":
            raise RuntimeError

    async with build([say("ok")], sinks=[sink]) as system:
        seen = [event.type async for event in ReactSolver(system).stream("q")]
    lines = next((tmp_path / "transcripts").iterdir()).read_text().splitlines()
    assert (seen[-1], json.loads(lines[-1])["type"]) == ("turn.finished", "turn.finished")


async def test_two_turns_may_open_one_session_at_once(build):
    """Whoever comes second takes part in the session the first one opened, where neither is added to its conversation."""
    async with build([say("one"), say("two")]) as system:
        solver = ReactSolver(system)
        runs = (solver.run(text, session_id="shared", history="none") for text in ("a", "b"))
        results = await asyncio.gather(*runs)
    assert [result.session_id for result in results] == ["shared"] * 2


@pytest.mark.parametrize("again", [0, 1, 3])
async def test_cancelling_at_any_moment_ends_the_turn_in_order(build, executor, tmp_path, again):
    """Wherever it hits, even more than once: nothing stays active, and a transcript begun ends with its last event."""
    from kdskills.turn.subsystem import current

    replies = [
        together(call("skills_load", names=["sales"]), call("react_write", path="a", text="x", mode="replace")),
        together(call("skills_run_script", path="scripts/sum.py"), call("exec_python", code="1")),
        say("ok"),
    ]
    transcripts = tmp_path / "transcripts"
    for moment in range(0, 60, 2):
        system = build(model=ScriptedModel(list(replies)))
        solver = ReactSolver(system)
        try:
            async with system:
                task = asyncio.ensure_future(solver.run("q"))
                for _ in range(moment):
                    await asyncio.sleep(0.0005)
                task.cancel()
                for _ in range(again):
                    await asyncio.sleep(0)
                    task.cancel()
                await asyncio.wait({task})
        except ReplayError:  # the script was not needed in full
            pass
        assert task.cancelled() or task.result().status == "final"
        with pytest.raises(NoActiveSkills):
            current()
    for path in transcripts.glob("*.jsonl") if transcripts.exists() else ():
        events = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        assert events[-1]["type"] == "turn.finished"
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        called = [event["call_id"] for event in events if event["type"] == "tool.called"]
        assert called == [one["id"] for step in events[-1]["result"]["steps"] for one in step["calls"]]


# ---- what a refused call is corrected to ----


@pytest.mark.parametrize("brief", ["never", "always"])
@pytest.mark.parametrize(
    ("tool", "given", "corrected"),
    [
        ("skills_read", {"path": "references/NOTES.md"}, ("skills_read", {"path": "references/notes.md"})),
        ("skills_run_script", {"path": "sum.py"}, ("skills_run_script", {"path": "scripts/sum.py"})),
        ("skills.run_script", {"path": "sum.py"}, ("skills.run_script", {"path": "scripts/sum.py"})),
        ("skills_load", {"names": ["SALES"]}, ("skills_load", {"names": ["sales"]})),
        ("skills_load", {"names": "acme.sales"}, ("skills_load", {"names": ["acme.sales"]})),
        ("skills_load", {"names": "acme.secret"}, None),
        ("skills_load", {"names": "Secret"}, None),
        ("secret", {}, None),
        ("skills_read", {"path": ["SKILL.md"], "skill": "acme.secret"}, None),
        ("file", {"path": "a"}, None),
        ("delete", {"path": ["a"]}, None),
        ("answer", {"x": 1}, None),
        ("write", {"path": "a.txt", "text": "b"}, ("react_write", {"path": "a.txt", "text": "b"})),
        ("react_write", {"file": "x" * 1_000_000, "text": "a"}, None),
        ("tools_" + "x" * 1_000_000, {}, None),
    ],
)
async def test_a_corrected_call_is_one_that_may_be_made(ask, brief, tool, given, corrected):
    """It is spelt as the tools are offered, whole, taken by its tool, and of nothing that the view hides."""

    def file(path: str) -> str:
        """A tool of which `file` is a part of the name."""
        return path

    file.__name__ = "delete_file"
    _, messages = await ask(
        call("skills_load", names=["sales"]), call(tool, **given), say("ok"), tools=[file], brief=brief
    )
    error = json.loads(messages[-1].text)["error"]
    asked = error.get("call")
    assert (asked and (asked["tool"], asked["arguments"])) == corrected
    assert len(messages[-1].text) < 3_000


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_numbers_that_are_none_reach_no_tool(ask, number):
    """Arguments with a number that JSON does not have are malformed: no server would take them in the history."""

    def weigh(kilos: float) -> str:
        """Weigh."""
        return str(kilos)

    result, messages = await ask(call_raw("tools_weigh", f'{{"kilos": {number}}}'), say("done"), tools=[weigh])
    assert codes(result) == ["invalid_argument"]
    assert "no JSON object" in messages[-1].text


async def test_a_task_that_says_nothing_begins_no_turn(ask):
    """Nothing but citations of no source is no task: the call is malformed, not the caller's request."""
    agents = {"tools.research": AgentSpec("research", "Looks.")}
    result, messages = await ask(call("tools_research", task="[[S:7]] [[S:8]]"), say("done"), agents=agents)
    assert codes(result) == ["invalid_argument"]
    assert json.loads(messages[-1].text)["error"]["details"]["errors"][0]["path"] == "/task"
