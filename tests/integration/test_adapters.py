"""Agents of pydantic-ai itself, with its `FunctionModel` and `TestModel`, work with skills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from kdskills.builtin.adapters.pydantic_ai import SkillsCapability, SkillsToolset
from kdskills.session import SkillRuntime
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
