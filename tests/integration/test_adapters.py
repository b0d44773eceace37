"""Agents of pydantic-ai itself work with skills: with its `FunctionModel` and `TestModel`, and over the wires of providers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from kdskills.builtin.adapters.pydantic_ai import SkillsCapability, SkillsToolset
from kdskills.models import ModelReply
from kdskills.session import SkillRuntime
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say, together
from kdskills.turn import SkillsSubsystem

Wrap = Callable[[SkillRuntime], dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bundle folder with two skills."""
    for name, body in (("sales", "Sum the column."), ("charts", "Draw bars.")):
        folder = tmp_path / "skills" / "acme" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}.\n---\n{body}\n")
        (folder / "notes.md").write_text(f"Notes on {name}.\n")
    return tmp_path


@pytest.fixture
def denied() -> dict[str, str]:
    """Skills a policy plugin denies; tests add to it while agents run."""
    return {}


@pytest.fixture
def runtime(root: Path, denied: dict[str, str]) -> SkillRuntime:
    """A runtime over a live subsystem."""
    subsystem = SkillsSubsystem(
        {}, bundle_root=root, roots=(), index_dir=None, auto_refresh=0.0, filters=[lambda who, skills: dict(denied)]
    )
    return SkillRuntime(subsystem=subsystem)


@pytest.fixture(params=["toolset", "capability"])
def wrap(request: pytest.FixtureRequest) -> Wrap:
    """Gives an agent its skills in either way."""
    if request.param == "toolset":
        return lambda runtime: {"toolsets": [SkillsToolset(runtime)]}
    return lambda runtime: {"capabilities": [SkillsCapability(runtime)]}


class Script:
    """A model that answers with the given calls, one list a request, and keeps what it was shown."""

    def __init__(self, *steps: list[tuple[str, Any]], between: Callable[[int], None] = lambda step: None) -> None:
        self.steps = steps
        self.between = between
        self.instructions: list[str] = []
        self.tools: list[list[str]] = []
        self.messages: list[list[ModelMessage]] = []
        self.model = FunctionModel(self)

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        """Answer."""
        step = len(self.instructions)
        self.instructions.append(info.instructions or "")
        self.tools.append([tool.name for tool in info.function_tools])
        self.messages.append(list(messages))
        self.between(step)
        if step < len(self.steps):
            return ModelResponse(parts=[ToolCallPart(name, arguments) for name, arguments in self.steps[step]])
        return ModelResponse(parts=[TextPart("done")])

    def results(self) -> list[ToolReturnPart]:
        """Every tool result the model was shown, in order."""
        requests = [message for message in self.messages[-1] if isinstance(message, ModelRequest)]
        return [part for message in requests for part in message.parts if isinstance(part, ToolReturnPart)]


def load(*names: str, mode: str = "replace") -> tuple[str, Any]:
    """A call that loads."""
    return ("skills_load", {"names": list(names), "mode": mode})


async def test_instructions_are_fresh_for_each_request(runtime: SkillRuntime, wrap: Wrap) -> None:
    """A body stands in the instructions from the request after its load until it is switched; messages never change."""
    script = Script([load("sales")], [load("charts")])
    result = await Agent(script.model, instructions="Be brief.", **wrap(runtime)).run("Chart the sales")
    held = [("Sum the column." in text, "Draw bars." in text) for text in script.instructions]
    assert (result.output, held) == ("done", [(False, False), (True, False), (False, True)])
    assert all(text.startswith("Be brief.") and "<available_skills>" in text for text in script.instructions)
    for earlier, later in zip(script.messages, script.messages[1:], strict=False):
        assert repr(later[: len(earlier)]).count("Draw bars.") == repr(earlier).count("Draw bars.")
    assert [part.outcome for part in script.results()] == ["success", "success"]


async def test_a_load_is_a_barrier(runtime: SkillRuntime, wrap: Wrap) -> None:
    """Calls of one reply see the loads before them, although the framework runs calls side by side."""
    script = Script(
        [load("sales"), ("skills_read", {"path": "notes.md"}), load("charts"), ("skills_read", {"path": "notes.md"})]
    )
    await Agent(script.model, **wrap(runtime)).run("go")
    texts = [part.content["text"] for part in script.results() if part.tool_name == "skills_read"]
    assert texts == ["Notes on sales.\n", "Notes on charts.\n"]


async def test_mistakes_are_answered_and_mended(runtime: SkillRuntime, wrap: Wrap) -> None:
    """Unknown names, bad shapes and malformed JSON come back as retries; the run goes on."""
    script = Script([load("nope")], [("skills_load", "[1]")], [("skills_read", '{"path"')], [load("sales")])
    result = await Agent(script.model, retries=3, **wrap(runtime)).run("go")
    assert (result.output, [part.outcome for part in script.results()]) == (
        "done",
        ["retried", "retried", "retried", "success"],
    )
    assert "skill_not_found" in str(script.results()[0].content)


async def test_a_model_that_never_learns_ends_by_the_frameworks_bound(runtime: SkillRuntime, wrap: Wrap) -> None:
    """Retries are counted by the agent's own setting, and the session is closed all the same."""
    script = Script(*([load("nope")] for _ in range(9)))
    with pytest.raises(UnexpectedModelBehavior):
        await Agent(script.model, retries=2, **wrap(runtime)).run("go")
    assert (len(script.instructions), await runtime.list_sessions()) == (3, [])


async def test_failures_of_others_cost_no_retry(runtime: SkillRuntime, wrap: Wrap, root: Path) -> None:
    """A file too large is told as failed, as often as the model tries, without ending the run."""
    script = Script([load("sales")], *([("skills_read", {"path": "large.bin"})] for _ in range(4)))
    (root / "skills/acme/sales/large.bin").write_bytes(b"0" * (runtime.config.limits.max_read_bytes + 1))
    result = await Agent(script.model, retries=1, **wrap(runtime)).run("go")
    assert (result.output, [part.outcome for part in script.results()]) == ("done", ["success", *["failed"] * 4])


async def test_a_read_sent_with_its_load_finds_the_skill(runtime: SkillRuntime, wrap: Wrap) -> None:
    """Calls of one reply run side by side here; one sent behind the load it needs waits for it."""
    script = Script([load("sales"), ("skills_read", {"path": "notes.md"})])
    await Agent(script.model, **wrap(runtime)).run("go")
    assert [part.outcome for part in script.results()] == ["success", "success"]
    assert "Notes on sales." in str(script.results()[1].content)


async def test_a_search_answers_what_it_located(root: Path, wrap: Wrap) -> None:
    """The model reads names with what the skills do, as in the catalog, not their names alone."""
    subsystem = SkillsSubsystem({}, bundle_root=root, roots=(), index_dir=None)
    script = Script([("skills_search", {"query": "draw charts"})])
    await Agent(script.model, **wrap(SkillRuntime(subsystem=subsystem, listing="search-only"))).run("go")
    assert "About charts." in str(script.results()[0].content)


async def test_policy_acts_within_a_run(runtime: SkillRuntime, wrap: Wrap, denied: dict[str, str]) -> None:
    """What is denied while an agent runs is gone from text, enum and files with the next request."""

    def deny(step: int) -> None:
        if step == 1:
            denied["acme.sales"] = "not now"

    script = Script([load("sales")], [("skills_read", {"path": "notes.md", "skill": "sales"})], between=deny)
    await Agent(script.model, retries=2, **wrap(runtime)).run("go")
    assert ["sales" in text for text in script.instructions] == [True, True, False]
    refused = script.results()[1]
    assert (refused.outcome, "Notes on" in str(refused.content)) == ("retried", False)


async def test_fifty_runs_at_once(runtime: SkillRuntime, wrap: Wrap) -> None:
    """One agent, fifty runs: each sees what it loaded itself, and no session is left."""
    scripts = [Script([load(("sales", "charts")[number % 2])]) for number in range(50)]
    agent: Agent[None, str] = Agent(**wrap(runtime))
    await asyncio.gather(*(agent.run("go", model=script.model) for script in scripts))
    held = [("Sum the column." in s.instructions[1], "Draw bars." in s.instructions[1]) for s in scripts]
    assert held == [(number % 2 == 0, number % 2 == 1) for number in range(50)]
    assert await runtime.list_sessions() == []


async def test_the_test_model_can_call_every_tool_it_is_shown(runtime: SkillRuntime, wrap: Wrap) -> None:
    """pydantic-ai's own TestModel makes arguments from the schemas, so these hold what a generator needs."""
    await runtime.create_session("kept", initial=["sales"])
    for tool in ("skills_load", "skills_read"):
        agent: Agent[None, str] = Agent(
            TestModel(call_tools=[tool]), toolsets=[SkillsToolset(runtime, session_id="kept")]
        )
        if tool == "skills_load":
            assert "active_skills" in (await agent.run("go")).output
        else:  # it makes up a path, which no file has: answered, not raised, until retries run out
            with pytest.raises(UnexpectedModelBehavior):
                await agent.run("go")


async def test_streaming_and_entered_agents(runtime: SkillRuntime, wrap: Wrap) -> None:
    """An agent that is entered, and one that streams, get the same skills."""
    agent: Agent[None, str] = Agent(TestModel(call_tools=["skills_load"]), **wrap(runtime))
    async with agent:
        assert "active_skills" in (await agent.run("go")).output
        async with agent.run_stream("go") as stream:
            assert "active_skills" in await stream.get_output()
    assert await runtime.list_sessions() == []


async def test_wrapped_toolsets(runtime: SkillRuntime) -> None:
    """pydantic-ai's own wrappers work around it: a prefix, a filter."""
    script = Script([("kd_skills_load", {"names": ["sales"]})])
    kept = SkillsToolset[None](runtime).filtered(lambda ctx, tool: tool.name != "skills_unload").prefixed("kd")
    await Agent(script.model, toolsets=[kept]).run("go")
    assert (script.tools[0], "Sum the column." in script.instructions[1]) == (
        ["kd_skills_load", "kd_skills_read"],
        True,
    )


WIRES: dict[str, Callable[[str], Model]] = {
    "chat": lambda url: OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")),
    "responses": lambda url: OpenAIResponsesModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")),
    "anthropic": lambda url: AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key="none")),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_over_the_wire(runtime: SkillRuntime, wrap: Wrap, wire: str, streamed: bool) -> None:
    """The real clients send the instructions of the moment and the tools, and get every answer; whole and in pieces."""
    script = [together(call("skills_load", names=["nope"]), call("skills_load", names=["sales"])), say("Two words.")]
    with ModelServer(script) as server:
        agent: Agent[None, str] = Agent(WIRES[wire](server.url), retries=2, **wrap(runtime))
        if streamed:
            async with agent.run_stream("go") as stream:
                output = await stream.get_output()
        else:
            output = (await agent.run("go")).output
    assert output == "Two words."
    first, second = server.requests
    assert first.tools == ["skills_load", "skills_unload", "skills_read"]
    assert ("Sum the column." in first.instructions, "Sum the column." in second.instructions) == (False, True)
    assert "skill_not_found" in second.text


@pytest.mark.parametrize("wire", WIRES)
async def test_conversations_at_once_do_not_mix(runtime: SkillRuntime, wrap: Wrap, wire: str) -> None:
    """One agent serves many runs over a wire: each sees the text of its own skill alone."""

    def reader(asked: Asked) -> ModelReply:
        mine = "sales" if "please sum" in asked.text else "charts"
        if not asked.results:
            return call("skills_load", names=[mine])
        return say(f"{mine}: {'Sum the column.' in asked.instructions} {'Draw bars.' in asked.instructions}")

    with ModelServer(reader) as server:
        agent: Agent[None, str] = Agent(WIRES[wire](server.url), **wrap(runtime))
        runs = await asyncio.gather(*(agent.run(text) for text in ("please sum", "please draw") * 3))
    assert [run.output for run in runs] == ["sales: True False", "charts: False True"] * 3
