"""Typed answers: the value a caller asked for, however the model is held to it, or a code and nothing half-written."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import pytest
from pydantic import BaseModel, Field, RootModel, SecretStr

from kdskills.builtin.models.record import RecordingModel
from kdskills.builtin.models.replay import open_replay
from kdskills.errors import BadRequest, NameTaken
from kdskills.solver import ReactSolver, tool_from_function
from kdskills.testing.models import ScriptedModel, call, say, together


class Growth(BaseModel):
    region: str
    percent: float = Field(ge=0)
    since: date | None = None
    reasons: list[str] = []


@dataclass
class Region:
    name: str
    total: int


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


GOOD = '{"region": "north", "percent": 4.2}'


def held(mode, replies):
    """Return a model that says it is held to a type so."""
    model = ScriptedModel(replies)
    model.output_mode = mode
    return model


@pytest.fixture
def typed(build):
    """Return a function that runs one request for a type and gives result, model and events."""

    async def run(replies, output_type=Growth, *, mode="tool", skills=(), **options):
        model, events = held(mode, replies), []
        async with build(model=model, sinks=[events.append], **options) as system:
            result = await ReactSolver(system).run("Which region grew?", output_type=output_type, skills=skills)
        return result, model, events

    return run


async def test_a_final_tool_gives_the_value(typed):
    """Held by a tool, the model is offered one with the type's schema, and its arguments are the answer."""
    result, model, _ = await typed([call("final_answer", region="north", percent=4.2, since="2026-01-01")])
    assert (result.status, result.stop_reason) == ("final", "answer")
    assert result.output == Growth(region="north", percent=4.2, since=date(2026, 1, 1))
    offered = {tool.name: tool for tool in model.requests[0].tools}
    assert offered["final_answer"].input_schema["required"] == ["region", "percent"]
    assert model.requests[0].answer_schema is None
    assert "final_answer" in model.requests[0].instructions


async def test_the_own_mode_of_a_provider_gives_the_value(typed):
    """Held by its provider, the model is sent the schema beside the tools, and its text is the answer."""
    result, model, _ = await typed([call("skills_load", names=["acme.sales"]), say(GOOD)], mode="native")
    assert result.output == Growth(region="north", percent=4.2)
    assert model.requests[0].answer_schema["required"] == ["region", "percent"]
    assert "final_answer" not in {tool.name for tool in model.requests[0].tools}


async def test_words_alone_give_the_value(typed):
    """Held by words, the model reads the schema in its instructions; fences and words around the object do not matter."""
    result, model, _ = await typed([say(f"Here it is:\n```json\n{GOOD}\n```\nDone.")], mode="text")
    assert result.output == Growth(region="north", percent=4.2)
    assert '"percent"' in model.requests[0].instructions
    assert model.requests[0].answer_schema is None


async def test_the_setting_says_how_a_model_is_held(typed):
    """`output_mode` of the settings goes before what the provider says."""
    result, model, _ = await typed([say(GOOD)], mode="native", output_mode="text")
    assert result.output == Growth(region="north", percent=4.2)
    assert model.requests[0].answer_schema is None


async def test_a_provider_that_says_nothing_is_held_by_a_tool(build):
    """A provider without `output_mode` is offered the tool."""
    model = ScriptedModel([call("final_answer", name="north", total=42)])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("Which?", output_type=Region)
    assert result.output == Region("north", 42)


@pytest.mark.parametrize("mode", ["tool", "native", "text"])
async def test_what_does_not_fit_goes_back_with_pointers(typed, mode):
    """An answer that does not fit is sent back with JSON pointers, and told as a diagnostic."""
    bad, good = {"region": "north", "percent": -1, "reasons": ["a", 2]}, {"region": "north", "percent": 4.2}
    replies = [call("final_answer", **bad), call("final_answer", **good)]
    if mode != "tool":
        replies = [say('{"region": "north", "percent": -1, "reasons": ["a", 2]}'), say(GOOD)]
    result, model, _ = await typed(replies, mode=mode)
    assert (result.status, result.output) == ("final", Growth(**good))
    asked = model.requests[1].messages[-1]
    assert asked.role == "user"
    assert "- /percent: " in asked.text
    assert "- /reasons/1: " in asked.text
    assert [finding.code for finding in result.diagnostics] == ["output_invalid"]


@pytest.mark.parametrize("retries", [0, 2])
async def test_a_type_that_never_comes_ends_with_a_code(typed, retries):
    """A model that gives anything but the type ends the turn `failed`, `output_invalid`, after `output_retries`, without an answer."""
    result, model, events = await typed([say("It is the north.")] * (retries + 1), output_retries=retries)
    assert (result.status, result.stop_reason) == ("failed", "output_invalid")
    assert (result.output, result.text, result.files) == (None, "", ())
    assert len(model.requests) == retries + 1
    assert events[-1].result.output is None


async def test_calls_beside_the_answer_are_answered_first(typed):
    """An answer beside other calls is not taken: the model reads their results, and then answers."""
    early = together(call("react_read", refs=["turn:data/sales.csv"]), call("final_answer", region="?", percent=0))
    result, model, _ = await typed([early, call("final_answer", region="north", percent=42)])
    assert result.output == Growth(region="north", percent=42)
    assert [message.role for message in model.requests[1].messages] == ["user", "assistant", "tool"]


async def test_out_of_steps_the_type_still_holds(typed):
    """The last call without tools is for the type, too, and is sent back likewise; the status is `partial`."""
    load = call("skills_load", names=["acme.sales"])
    result, model, _ = await typed([load, say("north"), call("final_answer", region="north", percent=1)], max_steps=1)
    assert (result.status, result.output) == ("partial", Growth(region="north", percent=1))
    assert [tool.name for tool in model.requests[-1].tools] == ["final_answer"]


async def test_citations_in_texts_resolve(typed):
    """Sources are those that any text of the answer cites; `rendered` stays JSON."""
    reasons = ["Orders [[S:1]]", "Luck [[S:9]]"]
    result, _, _ = await typed(
        [call("final_answer", region="north", percent=1, reasons=reasons)], skills=["acme.sales"]
    )
    assert result.output.reasons == reasons
    assert result.cited == (1,)
    assert [issue.sid for issue in result.citation_issues] == [9]
    rendered = Growth.model_validate_json(result.rendered)
    assert "https://example.org/sales" in rendered.reasons[0]
    assert "[?9]" in rendered.reasons[1]


async def test_unknown_citations_are_dropped_from_the_value(typed):
    """With `drop` the value holds no citation of no source."""
    answer = call("final_answer", region="north [[S:9]]", percent=1)
    result, _, _ = await typed([answer], on_unknown_sid="drop")
    assert (result.output.region, result.citation_issues) == ("north", ())


async def test_unknown_citations_are_asked_about_once(typed):
    """With `retry` an answer that cites no known source is sent back once."""
    bad = call("final_answer", region="north [[S:9]]", percent=1)
    result, model, _ = await typed([bad, call("final_answer", region="north", percent=1)], on_unknown_sid="retry")
    assert result.output.region == "north"
    assert "9" in model.requests[1].messages[-1].text


async def test_secrets_are_masked_in_the_value(typed):
    """The value holds no secret: it is of the masked JSON."""
    answer = call("final_answer", region="hunter2hunter2", percent=1)
    result, _, _ = await typed([answer], secrets=(SecretStr("hunter2hunter2"),))
    assert result.output.region == "***"
    assert "hunter2" not in result.text


async def test_the_next_turn_reads_the_answer(build):
    """In the conversation stands the answer as JSON, once."""
    model = ScriptedModel([call("final_answer", name="north", total=42), say("The north.")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        first = await solver.run("Which?", session_id="c1", output_type=Region)
        await solver.run("Which again?", session_id="c1")
    said = [(m.role, m.text) for m in model.requests[1].messages]
    assert said == [("user", "Which?"), ("assistant", first.text), ("user", "Which again?")]
    assert first.text == '{"name": "north", "total": 42}'


async def test_a_failed_type_leaves_the_conversation_as_it_was(build):
    """A turn that never gave the type adds nothing."""
    model = ScriptedModel([say("no"), say("The north.")])
    async with build(model=model, output_retries=0) as system:
        solver = ReactSolver(system)
        await solver.run("Which?", session_id="c1", output_type=Region)
        await solver.run("Which again?", session_id="c1")
    assert [m.text for m in model.requests[1].messages] == ["Which again?"]


async def test_streams_show_no_json(build):
    """While it is written, a typed answer is no text of the answer: no `model.delta`; the last event holds the value."""
    async with build(model=held("native", [say(GOOD)])) as system:
        events = [event async for event in ReactSolver(system).stream("Which?", output_type=Growth)]
    assert "model.delta" not in {event.type for event in events}
    assert events[-1].result.output == Growth(region="north", percent=4.2)


async def test_a_generator_writes_no_typed_answer(build):
    """With `answer_role` a type is refused before the turn begins."""
    async with build(model=ScriptedModel([]), answer_role="answer.generator.strong") as system:
        with pytest.raises(BadRequest) as refused:
            await ReactSolver(system).run("Which?", output_type=Growth)
    assert refused.value.code == "output_type_invalid"


@pytest.mark.parametrize("mode", ["tool", "native", "text"])
async def test_typed_answers_are_recorded_and_replayed(build, tmp_path, mode):
    """A recording of a typed answer replays to the same value, held as the recorded model was."""
    path, good = tmp_path / "demo.yaml", call("final_answer", region="north", percent=4.2)
    replies = [say("the north"), good if mode == "tool" else say(GOOD)]
    async with build(model=RecordingModel(held(mode, replies), path)) as system:
        first = await ReactSolver(system).run("Which?", output_type=Growth)
    async with build(model=open_replay(str(path))) as system:
        again = await ReactSolver(system).run("Which?", output_type=Growth)
    assert first.output == again.output == Growth(region="north", percent=4.2)
    assert again.replayed


SCHEMA = {
    "type": "object",
    "properties": {"region": {"type": "string", "pattern": "^[a-z]+$"}, "next": {"$ref": "#"}},
    "required": ["region"],
    "additionalProperties": False,
}


async def test_a_json_schema_gives_a_dict(typed):
    """By a JSON Schema, one within itself, too, the value is the object; what does not fit goes back with pointers."""
    bad, good = {"region": "north", "next": {"region": "7"}}, {"region": "north", "next": {"region": "south"}}
    result, model, _ = await typed([call("final_answer", **bad), call("final_answer", **good)], SCHEMA)
    assert result.output == good
    assert "- /next/region: " in model.requests[1].messages[-1].text


@pytest.mark.parametrize(
    "output_type",
    [
        {"type": "object", "properties": {"x": {"$ref": "https://example.org/x.json"}}},
        {"type": "object", "properties": {"x": {"$ref": "file:///etc/passwd"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/gone"}}},
        {"type": "object", "properties": {"x": {"$id": "https://example.org/x", "$ref": "y"}}},
        {"type": "object", "properties": {"x": {"$dynamicRef": "https://example.org/x#y"}}},
        {"type": "object", "properties": {"x": {"pattern": "(?=a)a"}}},
        {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(5_000)}},
        {"type": "object", "description": {"not": "a text"}},
        {"type": "object", "enum": {1, 2}},
        {"type": "array"},
        {},
        RootModel[list[int]],
        int,
        list[int],
        Callable,
        "Growth",
        Growth(region="north", percent=1),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_types_that_cannot_be_had_are_refused(build, output_type, tmp_path):
    """Schemas that lead elsewhere, enormous ones and what is no object are `output_type_invalid` before a turn begins."""
    async with build(model=ScriptedModel([])) as system:
        with pytest.raises(BadRequest) as refused:
            await ReactSolver(system).run("Which?", output_type=output_type)
    assert refused.value.code == "output_type_invalid"
    assert not (tmp_path / "turns").exists()


def ladder(steps):
    """Return a small schema whose references lead to more references, twice as many with each step."""
    both = [{"$ref": f"#/$defs/s{n + 1}"} for n in range(steps) for _ in range(2)]
    defs = {f"s{n}": {"anyOf": both[2 * n : 2 * n + 2]} for n in range(steps)} | {f"s{steps}": {"type": "integer"}}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/s0"}}, "$defs": defs}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "output_type",
    [ladder(60), {"type": "object", "allOf": [{"$ref": "#"}]}, {"type": "object", "$ref": "#"}],
    ids=["doubling", "within all", "itself"],
)
async def test_schemas_without_an_end_end_the_turn(typed, output_type):
    """References that never end are an answer that does not fit, soon."""
    result, _, _ = await typed([call("final_answer", x="no")], output_type, output_retries=0)
    assert (result.status, result.stop_reason, result.output) == ("failed", "output_invalid", None)


async def test_a_type_within_itself_is_no_matter(typed):
    """A recursive model is shown by references, and read however deep it goes."""
    tree = {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}
    result, _, _ = await typed([call("final_answer", **tree)], Tree)
    assert result.output.children[0].children[0].name == "c"


@pytest.mark.parametrize(
    "words",
    [
        "{" * 100_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        "[1, 2]",
        '{"percent": NaN}',
        '"x"',
        '{"region": "n", "percent": 1e999}',
    ],
)
async def test_broken_json_is_an_answer_that_does_not_fit(typed, words):
    """Whatever a model writes is sent back, and never raised."""
    result, _, _ = await typed([say(words)], mode="text", output_retries=0)
    assert (result.status, result.stop_reason) == ("failed", "output_invalid")


@pytest.mark.parametrize("end", ["cancel", "deadline", "tokens"])
async def test_a_turn_that_is_ended_has_no_output(build, end):
    """Cancelled, out of time or out of tokens while the type is asked for again: no value, and a conversation as before."""
    asked = asyncio.Event()

    class Slow(ScriptedModel):
        async def reply(self, request):
            if len(self.requests) == 1 and end != "tokens":
                asked.set()
                await asyncio.Event().wait()
            return await super().reply(request)

    options = {"max_total_tokens": 50} if end == "tokens" else {}
    async with build(model=Slow([say("north")]), **options) as system:
        solver = ReactSolver(system)
        turn = asyncio.create_task(
            solver.run("Which?", session_id="c1", output_type=Growth, deadline=0.5 if end == "deadline" else None)
        )
        if end == "cancel":
            await asked.wait()
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            assert await system.conversations.get("c1") is None
            return
        result = await turn
    assert (result.status, result.output) == ("budget", None)


async def test_the_tools_name_is_reserved(build):
    """No other tool may be called `final_answer`."""
    tool = tool_from_function(lookup, tool_id="final_answer")
    with pytest.raises(NameTaken):
        async with build([], tools=[tool]):
            pass


def lookup(item: str) -> str:
    """Look something up."""
    return item
