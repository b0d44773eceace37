"""What agents have of the turn that hands over: the user's skills, what things cost, and what is small about a model."""

import asyncio
import json

import pytest

from kdskills.models import ModelPrice
from kdskills.session import User
from kdskills.skills import SkillRoot
from kdskills.solver import AgentSpec, ReactSolver
from kdskills.testing.models import ScriptedModel, call, say

RESEARCH = AgentSpec("research", "Looks things up.")
DEEPER = {"tools.research": RESEARCH, "tools.briefs": AgentSpec("briefs", "Writes briefs.")}
OBJECT = {
    "type": "object",
    "properties": {"total": {"type": "integer", "minimum": 1}, "words": {"type": "array", "items": {"type": "string"}}},
    "required": ["total"],
    "additionalProperties": False,
}


def ask(task="Look it up.", *, tool="tools_research"):
    """A reply that hands over."""
    return call(tool, task=task)


def skill(folder, name, text):
    """A root of a user's own with one skill."""
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: Notes of {name}.\n---\n{text}\n")
    return SkillRoot("own://", folder, folder.name, "user")


class Priced(ScriptedModel):
    """A model of another name, so that it has a price of its own."""

    def __init__(self, name, replies, **options):
        super().__init__(replies, **options)
        self.name = name


def offered(request):
    """Names of the tools of a request."""
    return {tool.name for tool in request.tools}


async def test_agents_have_the_skills_laid_over_the_turn_above(build, tmp_path):
    """A user's own skill is listed and loaded by an agent and one below it; without the overlay nobody has it."""
    root = skill(tmp_path / "ada", "notes", "Ada's rule.")
    load = call("skills_load", names=["user.notes"])

    def replies(deeper):
        return {"research": [load, ask("b", tool="tools_briefs"), say("r")] if deeper else [load, say("r")]}

    model = ScriptedModel([ask(), say("ok")], roles={**replies(True), "briefs": [load, say("b")]})
    async with build(model=model, agents=DEEPER) as system:
        overlay = system.subsystem.overlay([root], {"disabled": ["acme.brief"]})
        await ReactSolver(system).run("x", overlay=overlay)
    within = [request for request in model.requests if request.role != "solver.react.decision"]
    assert {request.role for request in within if "Ada's rule." in request.instructions} == {"research", "briefs"}
    assert not [request for request in within if "brief" in request.instructions.replace("briefs", "")]
    model = ScriptedModel([ask(), say("ok")], roles=replies(False))
    async with build(model=model, agents=DEEPER) as system:
        await ReactSolver(system).run("x")
    assert "notes" not in model.requests[1].instructions
    assert "skill_not_found" in model.requests[2].messages[-1].text


async def test_rules_of_a_users_groups_hold_for_agents(build, bundle_path):
    """What a role of the user loses, the agents of the user's turn lose."""
    (bundle_path / "skills_descriptor.py").write_text('AGENTS_CONFIG = {"@guests": {"disabled": ["acme.sales"]}}\n')
    load = call("skills_load", names=["sales"])
    for roles, code in ((["guests"], "skill_not_found"), (["staff"], '"changed": true')):
        model = ScriptedModel([ask(), say("ok")], roles={"research": [load, say("r")]})
        async with build(model=model, agents={"tools.research": RESEARCH}) as system:
            await ReactSolver(system).run("x", user=User("eve", roles=roles))
        assert code in model.requests[2].messages[-1].text


async def test_what_agents_cost_is_part_of_what_the_turn_costs(build):
    """The caller's sum has the agents', by the price of each model; an unknown one leaves the whole unknown."""
    prices = {"big": ModelPrice(input=1, output=0), "small": ModelPrice(input=0.5, output=0)}
    for known, costs in ((prices, (0.0003, 0.0001)), ({"big": prices["big"]}, (None, None))):
        small = Priced("small", [call("skills_load", names=["sales"]), say("r")])
        big = Priced("big", [ask(), say("ok")])
        async with build(
            model=big, agents={"tools.research": RESEARCH}, models={"research": small}, prices=known
        ) as system:
            result = await ReactSolver(system).run("x", session_id="c1")
            kept = await system.conversations.get("c1")
        (agent,) = result.agents
        assert (result.usage.cost, agent.usage.cost) == costs
        assert (result.usage.input, agent.usage.input) == (400, 200)
        assert (kept.turns[0].cost, kept.turns[0].usage.input) == (costs[0], 400)


async def test_agents_answer_by_a_json_schema(build):
    """What does not fit goes back to the agent alone; the caller reads the object, with its own numbers."""
    spec = AgentSpec("research", "Looks things up.", OBJECT)
    replies = [
        call("skills_load", names=["sales"]),
        call("final_answer", total=0),
        call("final_answer", total=42, words=["Sum [[S:1]]."]),
    ]
    model = ScriptedModel([call("skills_load", names=["brief"]), ask(), say("It is 42.")], roles={"research": replies})
    async with build(model=model, agents={"tools.research": spec}) as system:
        result = await ReactSolver(system).run("x")
    told = json.loads(result.steps[1].calls[0].result)
    assert told["output"] == {"total": 42, "words": ["Sum [[S:2]]."]}
    assert "answer" not in told
    assert "- /total: " in model.requests[4].messages[-1].text


async def test_a_caller_that_is_cancelled_ends_the_tool_of_an_agent(build, tmp_path):
    """The tool of an agent of an agent is ended before the caller is, and nothing of the turns stays."""
    begun, ended = asyncio.Event(), []

    async def wait() -> str:
        """Wait."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("tool")
        return ""

    model = ScriptedModel([ask()], roles={"research": [ask("b", tool="tools_briefs")], "briefs": [call("tools_wait")]})
    async with build(model=model, agents=DEEPER, tools=[wait]) as system:
        task = asyncio.create_task(ReactSolver(system).run("x", session_id="c1"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["tool"]
        assert await system.conversations.get("c1") is None
        assert system.handed_over == {}
        assert len(await system.runtime.list_sessions()) == 1
    assert [path.name for path in (tmp_path / "turns").iterdir()] == []


@pytest.mark.parametrize(("own", "brief"), [(4_096, True), (32_000, False), (None, False)])
async def test_an_agent_is_told_as_its_own_model_wants(build, own, brief):
    """Few words go by the window of the agent's model, not the caller's; one without a model of its own goes by theirs."""
    small = ScriptedModel([call("skills_load", names=["sales"]), say("r")], context_window=own)
    model = ScriptedModel([ask(), say("ok")], context_window=64_000)
    async with build(model=model, agents={"tools.research": RESEARCH}, models={"research": small}) as system:
        assert (system.window(), system.window("research")) == (64_000, own)
        assert (system.brief(), system.brief("research")) == (False, brief)
        await ReactSolver(system).run("x")
    assert model.requests[0].instructions.startswith("Skills are")
    assert small.requests[0].instructions.startswith("Skills help" if brief else "Skills are")
    assert ("skills_unload" in offered(small.requests[1])) is not brief
    assert ("Do now what" in small.requests[1].messages[-1].text) is brief
