"""Loops over the SDKs of OpenAI and Anthropic work with skills, against a server that speaks those wires."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from kdskills.models import ModelReply
from kdskills.session import SkillCatalog, SkillRuntime
from kdskills.session.specs import anthropic_tools, dispatch, openai_tools, responses_tools
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say, together

Ask = Callable[[str, SkillRuntime, str], Awaitable[str]]
STEPS = 6


@pytest.fixture
def runtime(tmp_path: Path) -> SkillRuntime:
    """Two skills, one of them with a file."""
    for name, body in (("sales", "Sum the column."), ("charts", "Draw bars.")):
        folder = tmp_path / "acme" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}.\n---\n{body}\n")
        (folder / "notes.md").write_text(f"Notes on {name}.\n")
    return SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path))


async def chat(url: str, runtime: SkillRuntime, text: str) -> str:
    """Chat completions, with the SDK's own calls."""
    session = await runtime.create_session()
    messages: list[Any] = [{"role": "user", "content": text}]
    async with AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        for _ in range(STEPS):
            system = {"role": "system", "content": (await session.instructions()).text}
            tools = openai_tools(session.tool_specs())
            asked: Any = {"model": "m", "messages": [system, *messages], "tools": tools}
            message = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            messages += [await dispatch(runtime, session.id, one) for one in message.tool_calls]
    raise AssertionError("no answer")


async def chat_in_pieces(url: str, runtime: SkillRuntime, text: str) -> str:
    """Chat completions in pieces, which the SDK gathers."""
    session = await runtime.create_session()
    messages: list[Any] = [{"role": "user", "content": text}]
    async with AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        for _ in range(STEPS):
            system = {"role": "system", "content": (await session.instructions()).text}
            asked: Any = {"model": "m", "messages": [system, *messages], "tools": openai_tools(session.tool_specs())}
            async with client.chat.completions.stream(**asked) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            messages += [await dispatch(runtime, session.id, one) for one in message.tool_calls]
    raise AssertionError("no answer")


async def respond(url: str, runtime: SkillRuntime, text: str, *, streamed: bool = False) -> str:
    """The Responses API, with all items sent along."""
    session = await runtime.create_session()
    items: list[Any] = [{"role": "user", "content": text}]
    async with AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        for _ in range(STEPS):
            shown = (await session.instructions()).text
            asked: Any = {"model": "m", "instructions": shown, "tools": responses_tools(session.tool_specs())}
            if streamed:
                async with client.responses.stream(**asked, input=items) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked, input=items)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return str(response.output_text)
            items += [json.loads(item.model_dump_json(exclude={"parsed_arguments"})) for item in response.output]
            items += [await dispatch(runtime, session.id, one) for one in calls]
    raise AssertionError("no answer")


async def respond_in_pieces(url: str, runtime: SkillRuntime, text: str) -> str:
    """The Responses API in pieces."""
    return await respond(url, runtime, text, streamed=True)


async def converse(url: str, runtime: SkillRuntime, text: str, *, streamed: bool = False) -> str:
    """Messages."""
    session = await runtime.create_session()
    messages: list[Any] = [{"role": "user", "content": text}]
    async with AsyncAnthropic(api_key="none", base_url=url, max_retries=0) as client:
        for _ in range(STEPS):
            shown = (await session.instructions()).text
            asked: Any = {"model": "m", "max_tokens": 99, "system": shown, "messages": messages}
            asked["tools"] = anthropic_tools(session.tool_specs())
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    reply: Any = await stream.get_final_message()
            else:
                reply = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in reply.content)
            messages.append({"role": "user", "content": [await dispatch(runtime, session.id, one) for one in calls]})
    raise AssertionError("no answer")


async def converse_in_pieces(url: str, runtime: SkillRuntime, text: str) -> str:
    """Messages in pieces."""
    return await converse(url, runtime, text, streamed=True)


@pytest.fixture(params=[chat, chat_in_pieces, respond, respond_in_pieces, converse, converse_in_pieces])
def ask(request: pytest.FixtureRequest) -> Ask:
    """A loop over each API, whole and in pieces."""
    return request.param


async def test_a_loaded_skill_has_its_text_in_the_next_request(runtime: SkillRuntime, ask: Ask) -> None:
    """Load, read, switch, answer: the SDK's own calls are answered, and the instructions are those of the moment."""
    first = together(call("skills_load", names=["sales"]), call("skills_read", path="notes.md"))
    with ModelServer([first, call("skills_load", names=["charts"]), say("Two words.")]) as server:
        assert await ask(server.url, runtime, "Sum it up") == "Two words."
    shown = [(("Sum the column." in r.instructions), ("Draw bars." in r.instructions)) for r in server.requests]
    assert shown == [(False, False), (True, False), (False, True)]
    assert "Notes on sales." in server.requests[1].results[1]
    assert server.requests[0].tools == ["skills_load", "skills_unload", "skills_read"]


async def test_what_a_model_gets_wrong_is_an_answer_it_can_mend(runtime: SkillRuntime, ask: Ask) -> None:
    """Unknown skills, tools, and paths out of the skill's folder come back as results; the loop goes on."""
    wrong = [call("skills_load", names=["nope"]), call("no_such_tool"), call("skills_read", path="../../etc/passwd")]
    with ModelServer([together(*wrong), call("skills_load", names=["sales"]), say("Done.")]) as server:
        assert await ask(server.url, runtime, "go") == "Done."
    codes = [json.loads(text)["error"]["code"] for text in server.requests[1].results]
    assert codes == ["skill_not_found", "tool_not_found", "no_active_skills"]


async def test_conversations_at_once_do_not_mix(runtime: SkillRuntime, ask: Ask) -> None:
    """Each conversation sees the text of its own skill alone."""

    def which(asked: Asked) -> ModelReply:
        mine = "sales" if "please sum" in asked.text else "charts"
        if not asked.results:
            return call("skills_load", names=[mine])
        return say(f"{mine}: {'Sum the column.' in asked.instructions} {'Draw bars.' in asked.instructions}")

    with ModelServer(which) as server:
        asked = [ask(server.url, runtime, text) for text in ("please sum", "please draw") * 3]
        answers = await asyncio.gather(*asked)
    assert answers == ["sales: True False", "charts: False True"] * 3
