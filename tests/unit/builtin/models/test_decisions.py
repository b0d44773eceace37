"""Plain-JSON decisions for models without tool calling."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.builtin.models.decisions import JsonDecisions, decision_schema, find_decision, read_decision
from kdskills.models import Message, ModelReply, ModelRequest, TextDelta, ToolCall, ToolSpec
from kdskills.testing.models import ScriptedModel, call, say

LOAD = ToolSpec("skills_load", "Load skills.", {"type": "object", "properties": {"names": {}}}, "skills.load")


def request(*messages, tools=(LOAD,)):
    return ModelRequest("solver.react.decision", "rules", messages or (Message("user", "u"),), tools)


@pytest.mark.parametrize(
    "text",
    [
        '{"tool": "skills_load", "arguments": {"names": ["a"]}}',
        'Sure!\n```json\n{"tool": "skills_load", "arguments": {"names": ["a"]}}\n```\nDone.',
        '{"thought": {"x": 1}} {"tool": "skills_load", "arguments": {"names": ["a"]}}',
        '{"tool": "skills_load", "arguments": "{\\"names\\": [\\"a\\"]}"}',
        'a { b } {"tool": "skills_load", "arguments": {"names": ["a"]}} {"tool": "other"}',
    ],
)
def test_a_call_is_found_whatever_surrounds_it(text):
    """Fences, words and thoughts around the object do not matter; the first decision counts."""
    reply = read_decision(ModelReply(text), (LOAD,), 4)
    assert (reply.text, reply.calls) == ("", (ToolCall("call_4", "skills_load", '{"names": ["a"]}'),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"answer": "Up 4 % [[S:1]]"}', "Up 4 % [[S:1]]"),
        ('{"answer": {"a": 1}}', '{"a": 1}'),
        ("just words", "just words"),
        ("a set {1, 2}", "a set {1, 2}"),
        ("", ""),
        ('{"other": 1}', '{"other": 1}'),
    ],
)
def test_an_answer_is_text(text, said):
    """An answer object gives its text; text without a decision is the answer."""
    reply = read_decision(ModelReply(text), (LOAD,), 1)
    assert (reply.text, reply.calls) == (said, ())


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ('{"tool": "skills_load", "arguments": {"names": ["a"}', "skills_load"),
        ('{"tool": "skills.load", "arguments": {names: a}}', "skills_load"),
        ('{"tool": "made_up", "arguments": {', "unreadable"),
        ('{"tool": ', "unreadable"),
    ],
)
def test_malformed_json_is_an_answerable_call(text, tool):
    """A broken decision reaches the solver as a call with bad arguments, never as a crash."""
    (broken,) = read_decision(ModelReply(text), (LOAD,), 1).calls
    assert (broken.tool, broken.arguments) == (tool, text)


def test_missing_and_odd_arguments_stay_what_they_are():
    """The solver validates arguments; nothing is repaired here."""
    assert read_decision(ModelReply('{"tool": "x"}'), (LOAD,), 1).calls[0].arguments == "{}"
    assert read_decision(ModelReply('{"tool": 5, "arguments": [1]}'), (LOAD,), 1).calls[0] == ToolCall(
        "call_1", "5", "[1]"
    )


@given(st.text(alphabet='{}[]":, toolanswer1\\\n', max_size=200))
def test_no_text_breaks_the_reading(text):
    """Whatever a small model writes, there is a reply."""
    reply = read_decision(ModelReply(text), (LOAD,), 1)
    assert isinstance(reply.text, str)
    assert len(reply.calls) <= 1


def test_floods_of_braces_cost_little():
    """A text of braces is given up after a bounded number of tries."""
    assert find_decision("{" * 200_000) is None
    assert find_decision('{"a":' * 50_000) is None


async def test_tools_go_out_as_text_and_results_come_back_as_messages():
    """The inner provider sees no tools, but their schemas, and a history it can read."""
    inner = ScriptedModel([say('{"answer": "ok"}')])
    history = (
        Message("user", "u"),
        Message("assistant", "thinking", calls=(ToolCall("1", "skills_load", '{"names": []}'),)),
        Message("tool", "no", call_id="1", tool="skills_load", ok=False),
        Message("user", "go on"),
    )
    reply = await JsonDecisions(inner).reply(request(*history))
    sent = inner.requests[0]
    assert (reply.text, sent.tools) == ("ok", ())
    assert json.dumps(LOAD.input_schema) in sent.instructions
    assert [(m.role, m.text) for m in sent.messages] == [
        ("user", "u"),
        ("assistant", 'thinking\n{"tool": "skills_load", "arguments": {"names": []}}'),
        ("user", "Result of skills_load (failed):\nno\n\ngo on"),
    ]


SCRIPTS = ToolSpec("skills_run_script", "Run a script.", {"type": "object", "properties": {}}, "skills.run_script")


LOADING = '{"tool": "skills_load", "arguments": {"names": ["<name of the skill>"]}}'
RUNNING = (
    '{"tool": "skills_run_script", "arguments": {"path": "scripts/greet.py", "args": ["NAME", "--language", "CODE"]}}'
)


@pytest.mark.parametrize(
    ("active", "answered", "shown"),
    [
        ((), None, (True, False)),
        (("hello",), "skills_load", (False, True)),
        (("hello",), "skills_read", (False, True)),
        (("hello",), "skills_run_script", (False, False)),
    ],
)
async def test_the_next_call_stands_last(active, answered, shown):
    """While nothing is loaded the rules end with a load; then the first script of the text stands last, until a run."""
    text = "<active_skills>\nRun `scripts/greet.py NAME --language CODE`, then `scripts/b.py`.\n</active_skills>"
    history = [Message("user", "u")]
    if answered is not None:
        history += [Message("assistant", calls=(ToolCall("1", answered, "{}"),))]
        history += [Message("tool", "{}", call_id="1", tool=answered)]
    inner = ScriptedModel([say('{"answer": "ok"}')])
    await JsonDecisions(inner).reply(ModelRequest("r", text, tuple(history), (LOAD, SCRIPTS), active))
    sent = inner.requests[0]
    assert (sent.instructions.rstrip().endswith(LOADING), sent.messages[-1].text.endswith(RUNNING)) == shown


@pytest.mark.parametrize("text", ["`scripts/a.py 'x`", "`scripts/`", "scripts/a.py", "`" * 50_000])
async def test_a_script_that_cannot_be_read_is_not_shown(text):
    """A quote that is not closed, or no script at all, shows no call, or one without arguments."""
    inner = ScriptedModel([say("ok")])
    asked = ModelRequest("r", f"<active_skills>{text}</active_skills>", (Message("user", "u"),), (SCRIPTS,), ("s",))
    await JsonDecisions(inner).reply(asked)
    assert len(inner.requests[0].messages[-1].text) < 200


@pytest.mark.parametrize(
    ("said", "read"),
    [('{"answer": "done"}', "done"), ("done", "done"), ('{"tool": "skills_load", "arguments": {}}', "")],
)
async def test_the_last_word_after_calls_is_an_answer(said, read):
    """Without tools, after calls, an answer is unwrapped and a call is none: nobody would make it."""
    history = (
        Message("user", "u"),
        Message("assistant", calls=(ToolCall("1", "skills_load", "{}"),)),
        Message("tool", "{}", call_id="1", tool="skills_load"),
    )
    inner = ScriptedModel([say(said)])
    reply = await JsonDecisions(inner, constrained=True).reply(ModelRequest("r", "", history, (), ()))
    assert (reply.text, reply.calls) == (read, ())
    assert inner.requests[0].answer_schema == decision_schema(())


async def test_call_ids_are_unique_within_a_turn():
    """Ids go on from the calls of the history."""
    history = (
        Message("user", "u"),
        Message("assistant", calls=(ToolCall("call_1", "skills_load", "{}"),)),
        Message("tool", "{}", call_id="call_1", tool="skills_load"),
    )
    reply = await JsonDecisions(ScriptedModel([say('{"tool": "skills_load"}')])).reply(request(*history))
    assert reply.calls[0].id == "call_2"


async def test_without_tools_the_answer_is_taken_as_it_is():
    """A generator's text is no decision, even when it looks like one; a call of the inner provider passes."""
    text = '{"tool": "x"}'
    model = JsonDecisions(ScriptedModel([say(text), say(text), call("skills_load", names=["a"])]))
    assert (await model.reply(request(tools=()))).text == text
    assert [type(item) async for item in model.stream(request(tools=()))] == [TextDelta, ModelReply]
    assert (await model.reply(request())).calls[0].tool == "skills_load"


async def test_a_streamed_decision_shows_no_half_object():
    """Only the answer's own text is streamed."""
    model = JsonDecisions(ScriptedModel([say('{"answer": "a\\nb"}'), say('{"tool": "skills_load"}')]))
    items = [item async for item in model.stream(request())]
    assert (items[0], items[1].text) == (TextDelta("a\nb"), "a\nb")
    assert [type(item) async for item in model.stream(request())] == [ModelReply]
    with pytest.raises(Exception, match="no reply"):
        await model.reply(request())
    await model.aclose()


# ---- decisions held to a schema ----

RUN = ToolSpec(
    "tools_run",
    "Run.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 9, "description": "Which.", "pattern": "^a+$"},
            "env": {"type": "object", "additionalProperties": {"type": "string", "format": "uri"}},
            "names": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 64},
        },
        "required": ["path"],
        "additionalProperties": False,
    },
    "tools.run",
)


def test_the_schema_of_a_decision_is_a_call_or_an_answer():
    """One branch per tool, one for the answer; of schemas what says how values look, lists no longer than their choices."""
    schema = decision_schema((LOAD, RUN))
    assert [list(branch["properties"]) for branch in schema["anyOf"]] == [
        ["tool", "arguments"],
        ["tool", "arguments"],
        ["answer"],
    ]
    assert [branch["properties"].get("tool") for branch in schema["anyOf"]] == [
        {"const": "skills_load"},
        {"const": "tools_run"},
        None,
    ]
    assert schema["anyOf"][1]["properties"]["arguments"] == {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "names": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["path"],
        "additionalProperties": False,
    }


async def test_the_schema_goes_out_only_where_it_is_asked_for():
    """`json-schema:` sends it with tools, `json:` never; without tools there is no decision."""
    inner = ScriptedModel([say('{"answer": "a"}')] * 3)
    held = JsonDecisions(inner, constrained=True)
    await held.reply(request())
    await held.reply(request(tools=()))
    await JsonDecisions(inner).reply(request())
    assert [asked.answer_schema for asked in inner.requests] == [decision_schema((LOAD,)), None, None]
    assert held.name == "json-schema:scripted"


async def test_tools_stand_before_what_changes():
    """What a server has computed for the tools is of use after a skill was loaded, too."""
    inner = ScriptedModel([say('{"answer": "a"}')] * 2)
    for instructions in ("rules <active/>", "rules <active>more</active>"):
        await JsonDecisions(inner).reply(replace(request(), instructions=instructions))
    first, second = (asked.instructions for asked in inner.requests)
    same = next(at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1)
    assert "skills_load" in first[:same]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"answer": "The airp', "The airp"),
        ('{"answer":"a \\"b\\" c', 'a "b" c'),
        ('{"answer": "a\\', "a"),
        ('{"answer": "a\\u00e', "a"),
        ('{"answer": "a \\ud83d', "a \ud83d"),
        ('  {\n "answer" : "x\ny', "x\ny"),
        ('{"answer": "', ""),
    ],
)
def test_an_answer_that_was_cut_is_what_there_is_of_it(text, said):
    """A reply that ran into its bound in the middle of the answer is text, without the object around it."""
    reply = read_decision(ModelReply(text, finish_reason="length"), (LOAD,), 1)
    assert (reply.text, reply.calls) == (said, ())
