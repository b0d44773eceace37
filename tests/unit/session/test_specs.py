"""The JSON forms of three model APIs: every call is answered once, in its own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdskills.errors import ToolCallRefused
from kdskills.session import SkillRuntime
from kdskills.session.specs import anthropic_tools, arguments_of, dispatch, openai_tools, responses_tools


def chat(arguments: object, name: object = "skills_load") -> dict[str, Any]:
    """A call in the form of chat completions."""
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def block(given: object, name: object = "skills_load") -> dict[str, Any]:
    """A call in the form of messages."""
    return {"type": "tool_use", "id": "t1", "name": name, "input": given}


def item(arguments: object, name: object = "skills_load") -> dict[str, Any]:
    """A call in the form of Responses."""
    return {"type": "function_call", "id": "fc_1", "call_id": "c2", "name": name, "arguments": arguments}


def code(answer: dict[str, Any]) -> str | None:
    """The code of a refused answer, None of a good one."""
    return json.loads(answer["output"] if "output" in answer else answer["content"]).get("error", {}).get("code")


def test_specs_are_the_same_in_each_form(runtime: SkillRuntime) -> None:
    """The forms carry the names, descriptions and schemas of the runtime's own specs, as plain JSON."""
    specs = runtime.tool_specs()
    chats, blocks, items = openai_tools(specs), anthropic_tools(specs), responses_tools(specs)
    assert items == [{"type": "function", "strict": False, **chat["function"]} for chat in chats]
    assert json.loads(json.dumps(chats)) == chats
    assert json.loads(json.dumps(blocks)) == blocks
    assert [c["function"] | {"input_schema": c["function"]["parameters"]} for c in chats] == [
        b | {"parameters": b["input_schema"]} for b in blocks
    ]
    assert [b["name"] for b in blocks] == ["skills_load", "skills_unload", "skills_read"]


def test_no_specs_without_skills() -> None:
    """Nothing offered gives empty lists, which the APIs take as no tools."""
    assert (openai_tools(()), responses_tools(()), anthropic_tools(())) == ([], [], [])


@pytest.mark.parametrize("given", [{"names": ["sales"]}, '{"names": ["sales"]}'])
@pytest.mark.parametrize("name", ["skills_load", "skills.load"])
async def test_each_form_is_answered_in_its_own(runtime: SkillRuntime, given: object, name: str) -> None:
    """Arguments as an object or as JSON text, names in either spelling: all load, and the id comes back."""
    await runtime.create_session("s")
    as_chat = await dispatch(runtime, "s", chat(given, name))
    as_block = await dispatch(runtime, "s", block(given, name))
    as_item = await dispatch(runtime, "s", item(given, name))
    assert (as_item["type"], as_item["call_id"], code(as_item)) == ("function_call_output", "c2", None)
    assert (as_chat["role"], as_chat["tool_call_id"], code(as_chat)) == ("tool", "c1", None)
    assert (as_block["type"], as_block["tool_use_id"], as_block["is_error"]) == ("tool_result", "t1", False)
    assert [s["name"] for s in json.loads(as_chat["content"])["active_skills"]] == ["sales"]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        [],
        ["sales"],
        7,
        True,
        "{",
        "[" * 9000,
        '{"names": ["\\ud800"]}',
        {"names": "sales"},
        {"nmes": []},
        b"x",
    ],
    ids=lambda given: repr(given)[:20],
)
async def test_malformed_arguments_are_answered(runtime: SkillRuntime, given: object) -> None:
    """Whatever a server puts where arguments belong is answered `invalid_argument`, never dropped or raised."""
    await runtime.create_session("s")
    as_chat, as_block = await dispatch(runtime, "s", chat(given)), await dispatch(runtime, "s", block(given))
    assert code(await dispatch(runtime, "s", item(given))) == "invalid_argument"
    assert (code(as_chat), code(as_block), as_block["is_error"]) == ("invalid_argument", "invalid_argument", True)


@pytest.mark.parametrize("name", [None, "", "skills_delete", "SKILLS_LOAD", 3])
async def test_unknown_tools_are_answered(runtime: SkillRuntime, name: object) -> None:
    """A name nobody offered is `tool_not_found`."""
    await runtime.create_session("s")
    assert code(await dispatch(runtime, "s", chat({}, name))) == "tool_not_found"


@pytest.mark.parametrize(
    "call", [{}, {"function": "skills_load"}, {"type": "text", "text": "hi"}, {"type": "function"}, "skills_load", None]
)
async def test_what_is_no_call_is_the_callers_mistake(runtime: SkillRuntime, call: Any) -> None:
    """Something of no form is raised: there is no form to answer in."""
    await runtime.create_session("s")
    with pytest.raises(ToolCallRefused) as refused:
        await dispatch(runtime, "s", call)
    assert refused.value.code == "invalid_argument"


async def test_a_closed_session_is_an_answer(runtime: SkillRuntime) -> None:
    """A call on a session that is gone still gets its one answer."""
    assert code(await dispatch(runtime, "gone", chat({"names": ["sales"]}))) == "session_not_found"


async def test_half_a_surrogate_pair_can_be_sent_back(runtime: SkillRuntime) -> None:
    """The answer repeats the name as an escape, so that any transport can encode it."""
    await runtime.create_session("s")
    answer = await dispatch(runtime, "s", block({"names": ["\ud800"]}))
    assert (code(answer), json.loads(answer["content"].encode())["error"]["details"]["names"]) == (
        "skill_not_found",
        ["\ud800"],
    )


def test_arguments_of_nothing_is_an_empty_object() -> None:
    """Servers send null or nothing for calls without arguments."""
    assert (arguments_of(None), arguments_of(""), arguments_of([1])) == ({}, {}, "[1]")
