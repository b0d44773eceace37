"""Handing over: a consumer as a tool, whose turn can do nothing that its own rules or those above it do not allow."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from kdskills.errors import BadRequest, ModelFailed, NameTaken, ReplayError, UnknownName
from kdskills.models.cassette import read_cassette
from kdskills.session.approval import Denial, allow
from kdskills.solver import AgentBudget, AgentSpec, PlainWiring, ReactSolver, SolverSettings, ToolContext, TurnResult
from kdskills.solver.events import read_transcript
from kdskills.testing.models import ScriptedModel, call, say, together

RESEARCH = AgentSpec("research", "Looks things up.")
BRIEFS = AgentSpec("briefs", "Writes briefs.")


def ask(task="Look it up.", *, tool="tools_research", **arguments):
    """A reply that hands over."""
    return call(tool, task=task, **arguments)


def calls_of(result, step=0):
    """The calls of a step."""
    return result.steps[step].calls


def answer_of(result, step=0, number=0):
    """What a call was answered, read."""
    return json.loads(calls_of(result, step)[number].result)


def text_of(file):
    """What a file of a turn holds."""
    return Path(file.location).read_text()


async def run(system, request="Find out.", **options):
    """Run a turn on an open system."""
    return await ReactSolver(system).run(request, **options)


async def test_an_agent_works_in_a_turn_of_its_own(build):
    """The agent sees the task alone, with skills, history and files of its own, and the caller reads its answer."""
    model = ScriptedModel(
        [ask("Sum it up."), say("It is 42.")],
        roles={"research": [call("skills_load", names=["sales"]), say("The total is 42.")]},
    )
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert (result.status, result.text) == ("final", "It is 42.")
    assert answer_of(result) == {"status": "final", "answer": "The total is 42."}
    child = [request for request in model.requests if request.role == "research"]
    assert [message.text for message in child[0].messages] == ["Sum it up."]
    assert child[1].active == ("sales",)
    assert model.requests[-1].active == ()
    (agent,) = result.agents
    assert (agent.tool, agent.consumer, agent.status, agent.steps) == ("tools.research", "research", "final", 2)
    assert result.usage.input == 400
    assert agent.usage.input == 200
    assert result.skills_used == ()


async def test_numbers_of_sources_are_the_callers(build):
    """Sources of an agent get the caller's numbers, in its text and its files, and never take the number of another."""
    model = ScriptedModel(
        [
            call("skills_load", names=["brief"]),
            ask(),
            say("Be short [[S:1]], and sum [[S:2]]."),
        ],
        roles={
            "research": [
                call("skills_load", names=["sales"]),
                call("react_write", path="notes/sums.md", text="Sum [[S:1]], not [[S:7]].\n"),
                say("Sum the column [[S:1]]."),
            ]
        },
    )
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    answer = answer_of(result, 1)
    assert answer["answer"] == "Sum the column [[S:2]]."
    assert answer["sources"] == [{"sid": 2, "title": "Sales guide"}]
    assert [(row["sid"], row["title"]) for row in result.sources] == [(1, "Brief guide"), (2, "Sales guide")]
    assert result.citation_issues == ()
    assert answer["files"] == ["research-2/notes/sums.md"]
    (file,) = result.files
    assert text_of(file) == "Sum [[S:2]], not.\n"


async def test_what_is_handed_over_keeps_its_numbers(build):
    """Citations in a task and its files mean the same sources to the agent, which knows no others of the caller's."""
    model = ScriptedModel(
        [
            call("skills_load", names=["brief", "sales"]),
            call("react_write", path="plan.md", text="Mind [[S:2]] and [[S:9]]."),
            ask("Check [[S:2]], not [[S:8]].", files=["turn:plan.md"]),
            say("Done."),
        ],
        roles={
            "research": [
                together(call("react_read", refs=["src:1-9"]), call("react_read", refs=["turn:plan.md"])),
                say("Right [[S:2]], wrong [[S:1]]."),
            ]
        },
    )
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    first, second = [request for request in model.requests if request.role == "research"]
    assert first.messages[0].text == "Check [[S:2]], not."
    read = json.loads(second.messages[2].text)["items"][0]["sources"]
    assert [(row["sid"], row["title"]) for row in read] == [(2, "Sales guide")]
    assert "Mind [[S:2]] and." in second.messages[3].text
    assert answer_of(result, 2)["answer"] == "Right [[S:2]], wrong."


class Finding(BaseModel):
    """What an agent found."""

    total: int
    words: list[str]


async def test_a_typed_answer_of_an_agent_has_the_callers_numbers(build):
    """An agent with a type answers by a value of it; citations in its texts are the caller's, those of nothing are gone."""
    answer = {"total": 42, "words": ["Sum [[S:1]].", "Not [[S:9]]."]}
    spec = AgentSpec("research", "Looks things up.", Finding)
    model = ScriptedModel(
        [call("skills_load", names=["brief"]), ask(), say("It is 42 [[S:2]].")],
        roles={
            "research": [
                call("skills_load", names=["sales"]),
                call("final_answer", total="many", words=[]),
                call("final_answer", **answer),
            ]
        },
    )
    async with build(model=model, agents={"tools.research": spec}) as system:
        result = await run(system)
    assert answer_of(result, 1) == {
        "status": "final",
        "output": {"total": 42, "words": ["Sum [[S:2]].", "Not."]},
        "sources": [{"sid": 2, "title": "Sales guide"}],
    }
    assert result.output is None


async def test_an_agent_that_never_gives_its_type_has_failed(build):
    """The caller reads that it has no answer, not half of one."""
    model = ScriptedModel([ask(), say("ok")], roles={"research": [say("42")] * 3})
    async with build(model=model, agents={"tools.research": AgentSpec("research", "Looks.", Finding)}) as system:
        result = await run(system)
    assert (calls_of(result)[0].error, result.agents[0].stop_reason) == ("agent_failed", "output_invalid")


async def test_a_type_that_no_answer_can_have_is_refused(build):
    """Before any turn, when the system is opened."""
    with pytest.raises(BadRequest) as refused:
        async with build([], agents={"tools.x": AgentSpec("x", "X.", int)}):
            pass
    assert refused.value.code == "output_type_invalid"


async def test_fake_citations_of_an_agent_name_nothing(build):
    """What an agent was told to write cites no source that is not its own, in whatever spelling."""
    fakes = "A [[S:1]] B [[ S : 1 ]] C [[S:1-99]] D [S:1] E ［［S:1］］ F [[[[S:1]]S:1]] G [[S:1"
    model = ScriptedModel(
        [
            call("skills_load", names=["brief"]),
            ask(),
            lambda request: say(json.loads(request.messages[-1].text)["answer"]),
        ],
        roles={"research": [say(fakes)]},
    )
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert (result.cited, result.citation_issues) == ((), ())
    assert "A B" in result.text
    assert "sources" not in answer_of(result, 1)


# ---- the wall ----


def set_rules(bundle_path, rules):
    """Write the rules of the bundle."""
    (bundle_path / "skills_descriptor.py").write_text(f'CUSTOM_SKILLS_ROOT = "skills"\nAGENTS_CONFIG = {rules!r}\n')


@pytest.mark.parametrize(
    "rules",
    [
        {"solver.react.decision": {"disabled": ["acme.sales"]}},
        {"solver.react.decision": {"enabled": ["acme.brief"]}, "research": {"enabled": ["acme.*"]}},
        {"research": {"enabled": ["acme.brief"]}},
    ],
)
async def test_a_skill_that_the_caller_or_the_agent_is_denied_is_not_there(build, bundle_path, rules):
    """Rules of both hold, in the catalog, for a load by name or id, and for agents further down."""
    set_rules(bundle_path, rules)
    loads = [call("skills_load", names=["acme.sales"]), call("react_read", refs=["sk:acme.sales"])]
    model = ScriptedModel(
        [ask(), say("ok")],
        roles={
            "research": [*loads, call("tools_deeper", task="Get it."), say("no")],
            "deeper": [*loads, call("skills_load", names=["brief"]), say("no")],
        },
    )
    events = []
    agents = {"tools.research": RESEARCH, "tools.deeper": AgentSpec("deeper", "Digs.")}
    async with build(model=model, agents=agents, sinks=[events.append]) as system:
        await run(system)
    assert not any("Sum the column" in request.instructions for request in model.requests)
    assert not any("Reads sales" in request.instructions for request in model.requests if request.role == "deeper")
    deeper = [request for request in model.requests if request.role == "deeper"]
    assert [message.ok for message in deeper[-1].messages if message.role == "tool"] == [False, False, True]


async def test_a_skill_for_other_consumers_stays_theirs(build, bundle_path):
    """`include_for` says whom a skill is for: an agent it names has it, though the caller has not."""
    file = bundle_path / "skills/acme/sales/SKILL.md"
    file.write_text(file.read_text().replace("---\nSum", "include_for: [research]\n---\nSum"))
    model = ScriptedModel(
        [call("skills_load", names=["sales"]), ask(), say("ok")],
        roles={"research": [call("skills_load", names=["sales"]), say("loaded")]},
    )
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert calls_of(result)[0].error == "skill_not_found"
    assert model.requests[-2].active == ("sales",)


async def test_plugins_are_asked_for_every_agent_above(build):
    """What a plugin denies the caller, it denies those it hands over to."""
    asked = []

    class Wall(PlainWiring):
        def deny(self, request):
            asked.append((request.consumer, request.tool))
            refused = request.tool == "react.write" or request.skill == "acme.sales"
            return Denial("no") if refused and request.consumer == "solver.react.decision" else None

    loads = [call("react_write", path="a.md", text="x"), call("skills_load", names=["sales"])]
    model = ScriptedModel([ask(), say("ok")], roles={"research": [*loads, say("done")]})
    async with build(model=model, wiring=Wall(), agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
        assert system.handed_over == {}
    assert result.files == ()
    refused = [message for message in model.requests[-2].messages if message.role == "tool"]
    assert [message.ok for message in refused] == [False, False]
    assert ("research", "react.write") in asked


async def test_an_agent_has_no_tool_that_the_caller_has_not(build):
    """Its tools are those it was given of the caller's; further down there are only fewer."""
    shown = {}

    def note(reply):
        def see(request):
            shown.setdefault(request.role, {tool.tool_id for tool in request.tools})
            return reply

        return see

    agents = {
        "tools.research": AgentSpec("research", "Looks.", tools=("react.read", "tools.deeper")),
        "tools.deeper": AgentSpec("deeper", "Digs.", tools=("react.read", "exec.python", "skills.run_script")),
    }
    model = ScriptedModel(
        [note(ask()), say("ok")],
        roles={
            "research": [note(call("exec_python", code="1")), call("tools_deeper", task="x"), say("a")],
            "deeper": [note(call("exec_python", code="1")), call("skills_run_script", path="scripts/a.py"), say("b")],
        },
    )
    async with build(model=model, agents=agents) as system:
        await run(system)
    assert {"exec.python", "exec.shell", "skills.run_script"} <= shown["solver.react.decision"]
    extra = {"exec.python", "exec.shell", "skills.run_script", "react.write", "files.read", "tools.research"}
    assert shown["research"] & extra == set()
    assert {"react.read", "tools.deeper", "skills.load"} <= shown["research"]
    assert shown["deeper"] & {*extra, "tools.deeper"} == set()
    failed = [message for request in model.requests for message in request.messages if message.role == "tool"]
    assert {message.ok for message in failed if message.tool in {"exec_python", "skills_run_script"}} == {False}


async def test_a_restriction_of_the_callers_skill_restricts_its_agents(build, bundle_path, executor):
    """What the caller's active skill does not allow, no agent does for it."""
    file = bundle_path / "skills/acme/brief/SKILL.md"
    file.write_text(file.read_text().replace("---\nBe", "allowed-tools: Read Bash(ls) tools.research\n---\nBe"))
    descriptor = bundle_path / "skills_descriptor.py"
    descriptor.write_text("ALLOWED_TOOLS = {'acme': 'restrict'}\n" + descriptor.read_text())
    work = [call("exec_shell", command="rm -r x"), call("react_write", path="a", text="x"), say("no")]
    model = ScriptedModel([call("skills_load", names=["brief"]), ask(), say("ok")], roles={"research": work})
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert calls_of(result, 1)[0].ok, calls_of(result, 1)[0]
    answers = [json.loads(message.text) for message in model.requests[-2].messages if message.role == "tool"]
    assert [answer["error"]["code"] for answer in answers] == ["tool_denied", "tool_denied"]
    assert executor.requests == []


async def test_approvals_of_an_agent_go_to_the_callers_approver(build, executor):
    """Each run is asked about, and what was allowed for an agent's session is not allowed for another's."""
    asked, events = [], []

    async def approve(request):
        asked.append((request.session, request.path))
        return allow("session")

    work = [call("skills_load", names=["sales"]), call("skills_run_script", path="scripts/sum.py"), say("42")]
    model = ScriptedModel([ask("a"), ask("b"), say("ok")], roles={"research": [*work, *work]})
    options = {"approve": approve, "sinks": [events.append], "agents": {"tools.research": RESEARCH}}
    async with build(model=model, **options) as system:
        result = await run(system)
    assert result.status == "final"
    assert [path for _, path in asked] == ["scripts/sum.py"] * 2
    assert len({session for session, _ in asked}) == 2
    told = [event.opened().type for event in events if event.type == "agent.event"]
    assert told.count("approval.requested") == 2


async def test_an_agent_works_for_the_callers_user(build):
    """User and dependencies reach its tools and the policy plugins, as they reach those of the caller."""
    seen = []

    class Wall(PlainWiring):
        def deny(self, request):
            if request.consumer == "research":
                seen.append((request.user.id, request.deps))

    def whoami(context: ToolContext) -> str:
        """Tell for whom this is."""
        seen.append((context.user.id, context.deps))
        return "told"

    model = ScriptedModel([ask(), say("ok")], roles={"research": [call("tools_whoami"), say("known")]})
    deps = {"db": 1}
    async with build(model=model, agents={"tools.research": RESEARCH}, tools=[whoami], wiring=Wall()) as system:
        await run(system, user="u-1", deps=deps)
    assert len(seen) == 2
    assert all(user == "u-1" and given is deps for user, given in seen)


# ---- bounds ----


async def test_a_cycle_of_agents_ends_at_the_depth_bound(build):
    """Agents that hand over to each other for ever find no tool to do so at the bound."""
    agents = {"tools.research": AgentSpec("a", "One."), "tools.briefs": AgentSpec("b", "Other.")}
    offered = []

    def see(request):
        names = {tool.tool_id for tool in request.tools}
        offered.append((request.role, request.lane, "tools.research" in names))
        if request.messages[-1].role == "tool":
            return say(f"back from {request.lane or 'the top'}")
        return ask(tool="tools_briefs" if request.role == "a" else "tools_research")

    model = ScriptedModel([see, see], roles={"a": [see] * 4, "b": [see] * 2})
    async with build(model=model, agents=agents, agent_depth=3) as system:
        result = await run(system)
    assert result.text == "back from the top"
    assert [row for row in offered if not row[2]] == [("a", "1.1.1", False)] * 2
    assert [lane for _, lane, _ in offered] == ["", "1", "1.1", "1.1.1", "1.1.1", "1.1", "1", ""]
    assert result.usage.input == 800


async def test_tokens_of_all_agents_count_for_the_caller(build):
    """An agent may not use up more than the turn that hands over has left, whatever its own budget is."""
    spend = [call("react_write", path=f"{n}.md", text="x") for n in range(50)]
    model = ScriptedModel([ask()], roles={"research": spend})
    system = build(model=model, agents={"tools.research": RESEARCH}, max_total_tokens=1_000)
    with pytest.raises(Exception, match="not asked for"):
        async with system:
            result = await run(system)
    assert (result.status, result.stop_reason) == ("budget", "max_total_tokens")
    assert 1_000 <= result.usage.input + result.usage.output < 1_200
    assert calls_of(result)[0].error == "agent_budget"


async def test_steps_of_all_agents_are_bounded_together(build):
    """Ten agents at once make no more decisions than the turn may have agents make, and then none begins."""
    forever = [call("react_write", path=f"{n}.md", text="x") for n in range(200)]
    calls = together(*(ask(f"part {n}") for n in range(10)))
    model = ScriptedModel([calls, ask("one more"), say("ok")], roles={"research": forever})
    system = build(model=model, agents={"tools.research": RESEARCH}, max_agent_steps=20, max_parallel=10)
    with pytest.raises(Exception, match="not asked for"):
        async with system:
            result = await run(system)
    assert result.status == "final"
    assert sum(agent.steps for agent in result.agents) == 20
    assert {made.error for made in calls_of(result)} == {"agent_budget"}
    assert len(result.agents) == 10
    assert calls_of(result, 1)[0].error == "agent_budget"


@pytest.mark.parametrize(
    ("budget", "replies", "error", "reason"),
    [
        ({"max_total_tokens": 50}, [call("react_write", path="a", text="x")], "agent_budget", "max_total_tokens"),
        ({"max_steps": 1}, [call("react_write", path="a", text="x"), say(" ")], "agent_budget", "max_steps"),
        ({"wall_s": 0.2}, [call("tools_wait")], "agent_budget", "wall_s"),
        ({}, [call("tools_nothing")] * 3, "agent_stuck", "invalid_argument"),
        ({}, [say(""), say("")], "agent_stuck", "empty_reply"),
        ({}, [ModelFailed("down", code="model_down")], "agent_failed", "model_down"),
        ({}, [RuntimeError("a defect of a provider")], "agent_failed", "RuntimeError"),
    ],
)
async def test_an_agent_without_an_answer_is_an_error_that_says_what_to_do(build, budget, replies, error, reason):
    """The code tells how it ended, the words what to do next, and the caller goes on."""

    async def wait() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return ""

    spec = AgentSpec("research", "Looks.", budget=AgentBudget(**budget))
    model = ScriptedModel([ask(), say("I did it myself.")], roles={"research": replies})
    async with build(model=model, agents={"tools.research": spec}, tools=[wait]) as system:
        result = await run(system)
    assert (result.status, result.text) == ("final", "I did it myself.")
    (made,) = calls_of(result)
    assert made.error == error
    (agent,) = result.agents
    assert reason in agent.stop_reason
    assert agent.status != "final"


async def test_an_agent_out_of_steps_gives_what_it_has(build):
    """Its last word is the answer, marked as partial."""
    spec = AgentSpec("research", "Looks.", budget=AgentBudget(max_steps=1))
    replies = [call("react_write", path="a.md", text="x"), say("Half of it.")]
    model = ScriptedModel([ask(), say("ok")], roles={"research": replies})
    async with build(model=model, agents={"tools.research": spec}) as system:
        result = await run(system)
    assert answer_of(result) == {"status": "partial", "answer": "Half of it.", "files": ["research-1/a.md"]}


# ---- several at once, cancelled, recorded ----


def gated(order, released):
    """Agents that answer in the *order* of their tasks, whichever began first; `released` tells who may go on."""

    def source_of(request):
        return "sales" if "sales" in request.messages[0].text else "brief"

    class Gate(ScriptedModel):
        async def reply(self, request):
            if request.role != "research":
                return await super().reply(request)
            self.requests.append(request)
            name = source_of(request)
            if request.messages[-1].role == "user":
                return self._numbered(call("skills_load", names=[name]))
            await asyncio.wait_for(released[name].wait(), 60)
            later = order[order.index(name) + 1 :]
            if later:
                released[later[0]].set()
            return say(f"As {name} says [[S:1]].")

    replies = [together(ask("sales"), ask("brief")), say("Both [[S:1]] and [[S:2]].")]
    return Gate(replies)


@pytest.mark.parametrize("order", [("sales", "brief"), ("brief", "sales")])
async def test_agents_at_once_do_not_mix(build, order):
    """Each has skills, sources and history of its own; numbers follow the order of the calls, not who is done first."""
    released = {name: asyncio.Event() for name in order}
    released[order[0]].set()
    model = gated(order, released)
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert [answer_of(result, 0, n)["answer"] for n in (0, 1)] == ["As sales says [[S:1]].", "As brief says [[S:2]]."]
    assert [row["title"] for row in result.sources] == ["Sales guide", "Brief guide"]
    assert {(request.messages[0].text, request.active) for request in model.requests if request.active} == {
        ("sales", ("sales",)),
        ("brief", ("brief",)),
    }
    assert len({agent.turn_id for agent in result.agents}) == 2


@pytest.mark.parametrize("order", [("sales", "brief"), ("brief", "sales")])
async def test_agents_are_recorded_and_replayed(build, tmp_path, order):
    """A recording of agents at once replays to the same result, though they ask in another order then."""
    from kdskills.builtin.models.record import RecordingModel
    from kdskills.builtin.models.replay import ReplayModel

    released = {name: asyncio.Event() for name in order}
    released[order[0]].set()
    cassette = tmp_path / "agents.yaml"
    async with build(
        model=RecordingModel(gated(order, released), cassette), agents={"tools.research": RESEARCH}
    ) as system:
        recorded = await run(system)
    read = read_cassette(cassette)
    assert sorted(entry.lane for entry in read.replies) == ["", "", "1", "1", "2", "2"]
    replay = ReplayModel(read.model_copy(update={"match": "exact"}))
    async with build(model=replay, agents={"tools.research": RESEARCH}) as system:
        replayed = await run(system)
    assert (replayed.text, replayed.sources) == (recorded.text, recorded.sources)
    assert [made.result for made in calls_of(replayed)] == [made.result for made in calls_of(recorded)]


async def test_a_recording_that_does_not_fit_an_agent_ends_the_turn(build):
    """The caller's model is not told about it: it cannot mend a recording."""
    model = ScriptedModel([ask(), say("never")], roles={"research": []})
    system = build(model=model, agents={"tools.research": RESEARCH})
    with pytest.raises(ReplayError) as failed:
        async with system:
            await run(system)
    assert failed.value.code == "replay_exhausted"
    assert failed.value.result.status == "failed"


async def test_cancelling_the_caller_ends_the_agent_and_its_tool(build, tmp_path):
    """The agent's tool is cancelled, its session and its turn end, and the caller's transcript holds the end of both."""
    started, ended = asyncio.Event(), []

    async def wait() -> str:
        """Wait for ever."""
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("tool")
            raise
        return ""

    model = ScriptedModel([ask()], roles={"research": [call("tools_wait")]})
    events = []
    system = build(model=model, agents={"tools.research": RESEARCH}, tools=[wait], sinks=[events.append])
    async with system:
        task = asyncio.create_task(run(system))
        await asyncio.wait_for(started.wait(), 60)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert ended == ["tool"]
        assert system.handed_over == {}
        assert len(await system.runtime.list_sessions()) == 1
    nested = [event.event["type"] for event in events if event.type == "agent.event"]
    assert nested[-1] == "turn.finished"
    (transcript,) = (tmp_path / "transcripts").iterdir()
    result = TurnResult.from_transcript(transcript)
    assert (result.status, calls_of(result)[0].error) == ("failed", "cancelled")
    assert [agent.status for agent in result.agents] == ["failed"]


async def test_an_agent_that_ends_itself_is_answered(build):
    """A cancellation that came from within is the agent's failure, not the caller's end."""

    class Quitter(ScriptedModel):
        async def reply(self, request):
            if request.role == "research":
                raise asyncio.CancelledError
            return await super().reply(request)

    async with build(model=Quitter([ask(), say("ok")]), agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert (result.status, calls_of(result)[0].error) == ("final", "agent_cancelled")


# ---- what is told ----


async def test_events_of_an_agent_stand_within_the_call(build, tmp_path):
    """A reader who knows no agents sees one answer and one end; one who does finds every event of the agent's turn."""
    model = ScriptedModel(
        [ask(), say("Top answer.")],
        roles={"research": [call("tools_deeper", task="x"), say("Mid answer.")], "deeper": [say("Low answer.")]},
    )
    agents = {"tools.research": RESEARCH, "tools.deeper": AgentSpec("deeper", "Digs.")}
    async with build(model=model, agents=agents) as system:
        events = [event async for event in ReactSolver(system).stream("q")]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    kinds = [event.type for event in events]
    assert (kinds.count("turn.started"), kinds.count("turn.finished"), kinds[-1]) == (1, 1, "turn.finished")
    assert "".join(event.text for event in events if event.type == "model.delta") == "Top answer."
    first, last = kinds.index("tool.called"), kinds.index("tool.finished")
    assert {number for number, kind in enumerate(kinds) if kind == "agent.event"} <= set(range(first, last))
    nested = [event for event in events if event.type == "agent.event"]
    assert {(event.tool, event.consumer, event.call_id) for event in nested} == {
        ("tools.research", "research", events[first].call_id)
    }
    inner = [event.opened() for event in nested]
    assert [event.seq for event in inner] == list(range(1, len(inner) + 1))
    assert (inner[0].type, inner[0].request, inner[-1].type) == ("turn.started", "Look it up.", "turn.finished")
    low = [event.opened() for event in inner if event.type == "agent.event"]
    assert low[-1].result.text == "Low answer."
    read = read_transcript(tmp_path / "transcripts" / f"{events[-1].turn_id}.jsonl")
    assert (read.events, read.result, read.diagnostics) == (tuple(events), events[-1].result, ())
    assert len(list((tmp_path / "transcripts").iterdir())) == 1


async def test_what_an_agent_learns_to_be_secret_is_masked_above(build, tmp_path):
    """A value of a call's `env` within an agent stands in no event, transcript or result of the caller."""
    secret = "s3cret-of-the-agent"
    work = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py", env={"TOKEN": secret}),
        say(f"I used {secret}."),
    ]
    model = ScriptedModel([ask(), say(f"It used {secret}.")], roles={"research": work})
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert result.text == "It used ***."
    (transcript,) = (tmp_path / "transcripts").iterdir()
    assert secret not in transcript.read_text()
    assert answer_of(result)["answer"] == "I used ***."


async def test_an_agent_cannot_make_its_events_unreadable(build):
    """A word of the events' own form is no secret in it, though an agent's call names it as one."""
    work = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py", env={"A": "turn.finished", "B": "status"}),
        say("done"),
    ]
    model = ScriptedModel([ask(), say("ok")], roles={"research": work})
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        events = [event async for event in ReactSolver(system).stream("q")]
    inner = [event.opened() for event in events if event.type == "agent.event"]
    assert None not in inner
    assert inner[-1].type == "turn.finished"


async def test_two_agents_may_leave_files_of_one_name(build):
    """Each call has a folder of its own, and no file of the caller's is replaced."""
    work = [call("react_write", path="out.md", text="theirs"), say("Done.")]
    model = ScriptedModel(
        [
            call("react_write", path="research-3/out.md", text="mine"),
            together(ask("a"), ask("b")),
            call("react_read", refs=["turn:research-2/out.md"]),
            say("ok"),
        ],
        roles={"research": [work[0], work[0], work[1], work[1]]},
    )
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert [file.path for file in result.files] == ["research-2/out.md", "research-3/out.md"]
    assert answer_of(result, 1, 0)["files"] == ["research-2/out.md"]
    assert answer_of(result, 1, 1)["files_lost"] == ["out.md"]
    assert text_of(result.files[1]) == "mine"
    assert "theirs" in calls_of(result, 2)[0].result
    assert "files_lost" in [finding.code for finding in result.diagnostics]


# ---- bad input ----


async def test_a_file_that_is_not_there_is_not_handed_over(build):
    """A path of another folder, or of nothing, begins no turn."""
    paths = ["gone.md", "../x", "/etc/passwd", "turn:../../etc/passwd"]
    model = ScriptedModel([together(*(ask(files=[path]) for path in paths)), ask(" "), say("ok")])
    async with build(model=model, agents={"tools.research": RESEARCH}) as system:
        result = await run(system)
    assert [made.error for made in calls_of(result)] == ["resource_not_found", *["path_denied"] * 3]
    assert calls_of(result, 1)[0].error == "invalid_argument"
    assert result.agents == ()


async def test_an_agent_takes_no_other_tools_name(build):
    """A system whose agents cannot be offered does not open, and says why."""

    def research() -> str:
        """Another tool."""
        return ""

    with pytest.raises(NameTaken, match=r"tools\.research"):
        async with build([], agents={"tools.research": RESEARCH}, tools=[research]):
            pass
    with pytest.raises(UnknownName, match=r"tools\.nothing"):
        async with build([], agents={"tools.x": AgentSpec("x", "X.", tools=("tools.nothing",))}):
            pass


@pytest.mark.parametrize(
    ("tool", "spec"),
    [
        ("research", {"consumer": "a", "description": "b"}),
        ("tools.a b", {"consumer": "a", "description": "b"}),
        ("tools.a\n", {"consumer": "a", "description": "b"}),
        ("tools.a", {"consumer": "*", "description": "b"}),
        ("tools.a", {"consumer": "a", "description": " "}),
        ("tools.a", {"consumer": "a", "description": "b", "budget": {"max_steps": 0}}),
        ("tools.a", {"consumer": "a", "description": "b", "more": 1}),
    ],
)
def test_agents_that_cannot_be_are_refused_when_they_are_named(tool, spec):
    """A wrong id, consumer, description or bound is no setting."""
    with pytest.raises(ValidationError):
        SolverSettings(agents={tool: AgentSpec(**spec)})
