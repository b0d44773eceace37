"""Agents of openai-agents itself work with skills: with the SDK's scripted model, and over its wires."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call
from openai import AsyncOpenAI

from kdskills.builtin.adapters.openai_agents import SkillsAgent, skill_tools
from kdskills.errors import BadRequest
from kdskills.models import ModelReply
from kdskills.session import Session, SkillCatalog, SkillRuntime
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say, together


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    """The SDK sends traces to its maker unless told not to."""
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


@pytest.fixture
def runtime(tmp_path: Path) -> SkillRuntime:
    """Two skills, each with a file."""
    for name, body in (("sales", "Sum the column."), ("charts", "Draw bars.")):
        folder = tmp_path / "acme" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}.\n---\n{body}\n")
        (folder / "notes.md").write_text(f"Notes on {name}.\n")
    return SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path))


IDS = count()


def step(*calls: tuple[str, Any]) -> list[Any]:
    """One reply with calls, or the end of the script."""
    made = [function_call(name, given, call_id=f"{name}-{next(IDS)}") for name, given in calls]
    return made or [assistant_message("done")]


def load(*names: str) -> tuple[str, dict[str, Any]]:
    """A call that loads."""
    return ("skills_load", {"names": list(names)})


def outputs(model: ScriptedModel) -> list[str]:
    """Every tool result the model was shown."""
    assert model.last_call is not None
    items: Any = model.last_call.input
    return [item["output"] for item in items if item.get("type") == "function_call_output"]


async def run(runtime: SkillRuntime, *steps: list[Any], **options: Any) -> tuple[ScriptedModel, Session, Any]:
    """Run an agent once over a script."""
    session, model = await runtime.create_session(), ScriptedModel([*steps, step()])
    agent: Any = SkillsAgent(name="a", model=model, skills=session, **options)
    return model, session, await Runner.run(agent, "go")


async def test_instructions_are_fresh_for_each_request(runtime: SkillRuntime) -> None:
    """A body stands in the instructions from the request after its load until it is switched; own text stays in front."""
    model, _, result = await run(runtime, step(load("sales")), step(load("charts")), instructions="Be brief.")
    texts = [call.system_instructions or "" for call in model.calls]
    assert result.final_output == "done"
    assert [("Sum the column." in t, "Draw bars." in t) for t in texts] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert all(text.startswith("Be brief.\n\n") and "<available_skills>" in text for text in texts)


async def test_own_tools_and_instructions_that_are_functions_stay(runtime: SkillRuntime) -> None:
    """The agent's own tools are offered and answered beside the skills'; a function of instructions is asked each time."""

    @function_tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    asked: list[str] = []

    def own(context: Any, agent: Any) -> str:
        asked.append(agent.name)
        return "Be brief."

    model, _, _ = await run(
        runtime, step(("weather", {"city": "Bonn"}), load("sales")), tools=[weather], instructions=own
    )
    assert [tool.name for tool in model.calls[0].tools] == ["weather", "skills_load", "skills_unload", "skills_read"]
    assert (outputs(model)[0], asked) == ("rain in Bonn", ["a", "a"])


@pytest.mark.parametrize(
    ("name", "given", "code"),
    [
        ("skills_load", {"names": ["nope"]}, "skill_not_found"),
        ("skills_load", {}, "invalid_argument"),
        ("skills_load", "", "invalid_argument"),
        ("skills_load", "[1]", "invalid_argument"),
        ("skills_load", '{"names"', "invalid_argument"),
        ("skills_load", {"names": ["sales"], "self": 1, "context": 2}, "invalid_argument"),
        ("skills_read", {"path": "notes.md"}, "no_active_skills"),
    ],
)
async def test_mistakes_are_results_the_model_can_act_on(
    runtime: SkillRuntime, name: str, given: Any, code: str
) -> None:
    """Whatever the model gets wrong, malformed JSON too, comes back with the runtime's text; the run goes on."""
    model, session, result = await run(runtime, step((name, given)), step(load("sales")))
    assert json.loads(outputs(model)[0])["error"]["code"] == code
    assert (result.final_output, [skill.name for skill in await session.active()]) == ("done", ["sales"])


async def test_a_read_sent_with_its_load_finds_the_skill(runtime: SkillRuntime) -> None:
    """Calls of one reply run side by side here; one sent behind the load it needs waits for it."""
    model, _, _ = await run(runtime, step(load("sales"), ("skills_read", {"path": "notes.md"})))
    assert json.loads(outputs(model)[1])["text"] == "Notes on sales.\n"


async def test_no_skills_no_tools_no_text(tmp_path: Path) -> None:
    """Without skills an agent is as if it were a plain one."""
    (tmp_path / "none").mkdir()
    model, _, _ = await run(SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path / "none")))
    assert (model.calls[0].system_instructions, list(model.calls[0].tools)) == (None, [])


async def test_without_a_session_the_program_is_told() -> None:
    """An agent that was given no session says what it needs."""
    agent: Any = SkillsAgent(name="a", model=ScriptedModel([step()]))
    with pytest.raises(BadRequest, match="skills="):
        await Runner.run(agent, "go")


async def test_tools_are_the_runtimes_specs(runtime: SkillRuntime) -> None:
    """Names, texts and schemas are passed on as they are, not in the strict form."""
    session = await runtime.create_session()
    assert [(t.name, t.description, t.params_json_schema, t.strict_json_schema) for t in skill_tools(session)] == [
        (spec.name, spec.description, spec.input_schema, False) for spec in session.tool_specs()
    ]


async def test_cancelling_a_run_cancels_its_tool_call(runtime: SkillRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call the agent waits for is cancelled with the run."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(Session, "call", slow)
    task = asyncio.create_task(run(runtime, step(load("sales"))))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 60)


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def wire(request: pytest.FixtureRequest) -> Any:
    """The SDK's model class of either API."""
    return request.param


@pytest.mark.parametrize("streamed", [False, True])
async def test_over_the_wire(runtime: SkillRuntime, wire: Any, streamed: bool) -> None:
    """The real client sends the instructions of the moment and the tools, and gets every answer; whole and in pieces."""
    script = [together(call("skills_load", names=["nope"]), call("skills_load", names=["sales"])), say("Two words.")]
    with ModelServer(script) as server:
        async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            session = await runtime.create_session()
            agent: Any = SkillsAgent(name="a", model=wire("m", openai_client=client), skills=session)
            if streamed:
                result: Any = Runner.run_streamed(agent, "go")
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, "go")
    assert result.final_output == "Two words."
    first, second = server.requests
    assert first.tools == ["skills_load", "skills_unload", "skills_read"]
    assert ("Sum the column." in first.instructions, "Sum the column." in second.instructions) == (False, True)
    assert "skill_not_found" in second.results[0]


async def test_conversations_at_once_do_not_mix(runtime: SkillRuntime, wire: Any) -> None:
    """One agent serves many conversations by the run's context: each sees the text of its own skill alone."""

    def reader(asked: Asked) -> ModelReply:
        mine = "sales" if "please sum" in asked.text else "charts"
        if not asked.results:
            return call("skills_load", names=[mine])
        return say(f"{mine}: {'Sum the column.' in asked.instructions} {'Draw bars.' in asked.instructions}")

    with ModelServer(reader) as server:
        async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            agent: Any = SkillsAgent(name="a", model=wire("m", openai_client=client), skills=lambda session: session)
            texts = ["please sum", "please draw"] * 3
            runs = [Runner.run(agent, text, context=await runtime.create_session()) for text in texts]
            answers = [result.final_output for result in await asyncio.gather(*runs)]
    assert answers == ["sales: True False", "charts: False True"] * 3
