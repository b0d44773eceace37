"""Model calls of a turn: tries, windows, bounds, generators."""

import asyncio

import pytest

from kdskills.errors import ModelFailed, ReplayError
from kdskills.models import ModelReply, TextDelta, ToolCall, Usage
from kdskills.solver import CODEGEN, DECISION, PlainWiring, ReactSolver
from kdskills.solver.turn import RETRY_CAP_S
from kdskills.testing.models import ScriptedModel, call, say, together

GENERATOR = "answer.generator.strong"


def busy(**options):
    return ModelFailed("busy", retryable=True, **options)


async def test_failures_that_may_pass_are_tried_again_with_growing_waits(solve):
    """0.5 s doubled each time with full jitter; `Retry-After` is obeyed instead."""
    waits = []
    result = await solve([busy(), busy(), busy(retry_after=7.5), busy(), say("ok")], waits=waits)
    assert (result.status, waits, result.steps[0].retries) == ("final", [0.5, 1.0, 7.5, 4.0], 4)


async def test_waits_are_capped(solve):
    """No wait grows beyond the cap."""
    waits = []
    await solve([*[busy()] * 9, say("ok")], waits=waits, model_retries=9)
    assert max(waits) == RETRY_CAP_S


async def test_a_provider_that_fails_for_good_raises_with_the_result_so_far(solve):
    """What was done until then is not lost."""
    with pytest.raises(ModelFailed) as caught:
        await solve([call("skills_load", names=["sales"]), ModelFailed("no such key")])
    result = caught.value.result
    assert (caught.value.who, result.status, result.stop_reason) == ("operator", "failed", "model_failed")
    assert [use.id for use in result.skills_used] == ["acme.sales"]


async def test_tries_run_out(solve):
    """After `model_retries` the failure is final."""
    with pytest.raises(ModelFailed):
        await solve([busy(), busy()], model_retries=1)


async def test_a_silent_provider_times_out_and_is_tried_again(solve):
    """A model call has its time."""

    class Slow(ScriptedModel):
        async def reply(self, request):
            if not self.requests:
                self.requests.append(request)
                await asyncio.sleep(3600)
            return await super().reply(request)

    result = await solve(model=Slow([say("ok")]), model_timeout_s=0.05)
    assert (result.status, result.steps[0].retries) == ("final", 1)


async def test_a_full_context_is_tried_once_with_a_shorter_history(solve):
    """Old results become one line; the history itself stays; a second time is final."""

    def fact(number: int) -> str:
        """Give a long fact."""
        return f"fact {number} " + "x" * 4000

    model = ScriptedModel(
        [*(call("tools_fact", number=n) for n in range(8)), ModelFailed("full", code="context_full"), say("ok")]
    )
    result = await solve(model=model, tools=[fact])
    full, shorter = model.requests[-2], model.requests[-1]
    assert result.status == "final"
    assert len(full.messages) == len(shorter.messages)
    assert sum(len(m.text) for m in shorter.messages) < sum(len(m.text) for m in full.messages)
    assert shorter.messages[-1] == full.messages[-1]
    with pytest.raises(ModelFailed):
        await solve([ModelFailed("full", code="context_full"), ModelFailed("full", code="context_full")])


async def test_a_recording_that_does_not_fit_is_raised(solve):
    """Divergence ends the turn loudly, with the result so far."""
    with pytest.raises(ReplayError) as caught:
        await solve([call("skills_load", names=["sales"])])
    assert (caught.value.code, caught.value.result.status) == ("replay_exhausted", "failed")


async def test_leftovers_are_told_when_the_system_closes(build):
    """A script that holds more than was asked for is no fit; another error is not hidden by it."""
    with pytest.raises(ReplayError, match="1 replies"):
        async with build([say("ok"), say("never")]) as system:
            await ReactSolver(system).run("x")
    with pytest.raises(RuntimeError) as caught:
        async with build([say("never")]):
            raise RuntimeError("mine")
    assert any("1 replies" in note for note in caught.value.__notes__)


async def test_out_of_steps_gives_one_last_call_without_tools(build):
    """The turn is partial; with `final_call=False` there is no such call."""
    model = ScriptedModel([call("skills_load", names=["sales"]), say("so far")])
    async with build(model=model, max_steps=1) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, result.stop_reason, result.text) == ("partial", "max_steps", "so far")
    assert model.requests[-1].tools == ()
    model = ScriptedModel([call("skills_load", names=["sales"])])
    async with build(model=model, max_steps=1, final_call=False) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, result.text) == ("partial", "")


async def test_out_of_tokens_ends_the_turn_at_once(solve):
    """Tokens of all calls count."""
    heavy = ModelReply(calls=(ToolCall("a", "react_read", '{"refs": ["src:1"]}'),), usage=Usage(900, 200))
    result = await solve([heavy], max_total_tokens=1000)
    assert (result.status, result.stop_reason, result.usage.input) == ("budget", "max_total_tokens", 900)


async def test_out_of_time_ends_the_turn_and_its_tools(solve):
    """Time is up in the middle of a tool: it is cancelled, answered, and the turn says so."""
    ended = []

    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        return ""

    result = await solve([together(call("tools_hang"), call("tools_hang"))], tools=[hang], wall_s=5)
    assert (result.status, result.stop_reason, ended) == ("budget", "wall_s", [True, True])
    assert [one.error for one in result.steps[-1].calls] == ["cancelled", "cancelled"]
    result = await solve([call("tools_hang")], tools=[hang], deadline=0.1)
    assert (result.status, result.stop_reason) == ("budget", "deadline")


async def test_a_generator_writes_the_answer_under_its_own_rights(build):
    """The block is that of the generator's consumer; what it may not see is left out and listed."""
    model = ScriptedModel(
        [call("skills_load", names=["sales", "brief"]), say("draft [[S:1]]")],
        roles={GENERATOR: [say("Short [[S:2]].")]},
    )
    async with build(model=model, answer_role=GENERATOR) as system:
        result = await ReactSolver(system).run("x")
    asked = model.requests[-1]
    assert (asked.role, asked.tools, result.text) == (GENERATOR, (), "Short [[S:2]].")
    assert "Be short [[S:2]]" in asked.instructions
    assert "Sum the column" not in asked.instructions
    assert "[[S:1]] Sales guide" in asked.messages[0].text
    assert "draft" in asked.messages[0].text
    assert result.rendered == "Short [Brief guide](https://example.org/brief)."
    assert [step.role for step in result.steps] == [DECISION, DECISION, GENERATOR]
    assert [(found.code, found.ref) for found in result.diagnostics] == [("generator_skipped", "not_enabled")]
    assert {(use.id, use.how) for use in result.skills_used} >= {("acme.brief", "generator"), ("acme.sales", "model")}


async def test_a_generator_with_a_small_window_is_asked_within_it(build):
    """What tools gave is shortened to the window of who writes the answer, not of who decided."""
    small = ScriptedModel([say("Short.")], context_window=2_048)
    model = ScriptedModel([call("react_read", refs=["turn:long.txt"]), say("draft")], context_window=128_000)
    async with build(model=model, models={GENERATOR: small}, answer_role=GENERATOR) as system:
        result = await ReactSolver(system).run("x", files=[("long.txt", b"word " * 8_000)])
    assert result.text == "Short."
    assert len(model.requests[-1].messages[-1].text) > 30_000
    assert len(small.requests[0].messages[0].text) < 2_048 * 4


async def test_events_of_a_generator_belong_to_its_own_step(events_of):
    """A step's prompt, model call and record carry one number."""
    replies = [call("skills_load", names=["sales"]), say("draft")]
    events = await events_of(replies, roles={GENERATOR: [say("Short.")]}, answer_role=GENERATOR)
    steps = [(event.step, event.role) for event in events if event.type in {"prompt.built", "model.replied"}]
    assert steps == [(1, DECISION), (1, DECISION), (2, DECISION), (2, DECISION), (3, GENERATOR), (3, GENERATOR)]
    digests = [event.digest for event in events if event.type == "prompt.built"]
    assert digests == [step.prompt_digest for step in events[-1].result.steps]


async def test_generate_takes_the_turns_numbers_and_a_provider_of_its_own(build):
    """`SK` numbers mean what the catalog of the turn says; a role may have its own model."""
    own = ScriptedModel([say("text")])
    async with build([], models={GENERATOR: own}) as system, ReactSolver(system).prepare_session("x") as turn:
        number = next(short for short, full_id in turn.view.short_ids.items() if full_id == "acme.brief")
        sales = next(short for short, full_id in turn.view.short_ids.items() if full_id == "acme.sales")
        made = await turn.generate(GENERATOR, "write", skills=[number, f"sk:{sales}", "acme.secret", "acme.nothing"])
    assert (made.text, made.skills, made.model) == ("text", ("acme.brief",), "scripted")
    assert made.skipped == (("acme.sales", "not_enabled"), ("acme.secret", "denied"), ("acme.nothing", "unknown_skill"))
    assert "Be short" in own.requests[0].instructions


async def test_a_skill_only_people_start_reaches_a_generator_by_code_alone(build, bundle_path):
    """What code loaded is in the generator's text; a model that asks for it by itself does not get it."""
    (bundle_path / "skills/acme/sales/SKILL.md").write_text(
        "---\nname: sales\ndescription: d\ndisable-model-invocation: true\n---\nSum the column.\n"
    )
    model = ScriptedModel([], roles={CODEGEN: [say("a"), say("b"), say("c")]})
    async with build(model=model) as system, ReactSolver(system).prepare_session("x", skills=["acme.sales"]) as turn:
        active = await turn.generate(CODEGEN, "write")
        asked = await turn.generate(CODEGEN, "write", skills=["acme.sales"], by="model")
        by_code = await turn.generate(CODEGEN, "write", skills=["acme.sales"])
    assert [made.skills for made in (active, asked, by_code)] == [("acme.sales",), (), ("acme.sales",)]
    assert asked.skipped == (("acme.sales", "user_only"),)


async def test_sources_added_beside_a_generator_are_not_lost(build):
    """A generator grows the turn's pool; it does not put another one in its place."""
    model = ScriptedModel([], roles={GENERATOR: [say("a")]})
    async with build(model=model) as system, ReactSolver(system).prepare_session("x", skills=["sales"]) as turn:
        await turn.generate(GENERATOR, "write", skills=["acme.brief"])
        assert [row.title for row in turn.pool.rows.values()] == ["Sales guide", "Brief guide"]


async def test_plugins_decide_what_one_source_is(build):
    """`kdskills_source_key` joins rows the usual key keeps apart, in loads and in generators."""

    class Joined(PlainWiring):
        def source_key(self, row):
            return "all one"

    async with (
        build([], wiring=Joined()) as system,
        ReactSolver(system).prepare_session("x", skills=["sales", "brief"]) as turn,
    ):
        assert len(turn.pool) == 1


async def test_unknown_citations_are_flagged_retried_or_dropped(solve):
    """A sid without a row is an issue; the setting decides what is done about it."""
    load = call("skills_load", names=["sales"])
    flagged = await solve([load, say("a [[S:7]] b [[S:1,9]]")])
    assert [(issue.sid, issue.kind) for issue in flagged.citation_issues] == [(7, "unknown"), (9, "unknown")]
    assert flagged.rendered == "a [?7] b [Sales guide](https://example.org/sales)[?9]"
    assert flagged.text[slice(*flagged.citation_issues[0].span)] == "[[S:7]]"
    assert flagged.cited == (1,)
    retried = await solve([load, say("a [[S:7]]"), say("a [[S:1]]")], on_unknown_sid="retry")
    assert (retried.text, retried.citation_issues) == ("a [[S:1]]", ())
    once = await solve([load, say("a [[S:7]]"), say("a [[S:8]]")], on_unknown_sid="retry")
    assert [issue.sid for issue in once.citation_issues] == [8]
    dropped = await solve([load, say("a [[S:7]] b [[S:1]]")], on_unknown_sid="drop")
    assert (dropped.text, dropped.citation_issues) == ("a b [[S:1]]", ())


async def test_code_is_written_for_a_task_and_run_with_the_codegen_view(build, executor):
    """The code generator sees its own skills; the program gets the export of that view and its skills' files."""
    model = ScriptedModel(
        [call("exec_python", task="sum it"), say("done")],
        roles={CODEGEN: [say("Here:\n```python\nprint(1)\n```\n")]},
    )
    executor.outcome = {"value": {"total": 42}, "files": {"plot.svg": b"<svg/>"}}
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    (request,) = executor.requests
    exported = request.globals["SKILLS_DESCRIPTOR"]
    assert request.code == "print(1)\n"
    assert exported["activation"]["consumer"] == CODEGEN
    assert [row["id"] for row in exported["skills"]] == ["acme.sales"] == [mount.id for mount in request.skills]
    assert [(item.path) for item in request.inputs] == ["data/sales.csv"]
    assert [file.path for file in result.files] == ["plot.svg"]
    assert [(step.index, step.role) for step in result.steps] == [(1, DECISION), (2, CODEGEN), (3, DECISION)]
    (record,) = result.steps[0].calls
    assert '"total": 42' in record.result
    assert record.artifacts == ("plot.svg",)


@pytest.mark.parametrize("arguments", [{}, {"code": "1", "task": "x"}, {"code": "  "}, {"code": "1", "timeout_s": 601}])
async def test_exec_python_wants_exactly_one_of_code_and_task(solve, executor, arguments):
    """Anything else is an invalid argument, and nothing runs."""
    result = await solve([call("exec_python", **arguments), say("ok")])
    assert (result.steps[0].calls[0].error, executor.requests) == ("invalid_argument", [])


async def test_a_code_generator_without_code_is_told(solve, executor):
    """An empty program is not run."""
    result = await solve([call("exec_python", task="sum it"), say("ok")], roles={CODEGEN: [say("```python\n```")]})
    assert ([one.error for step in result.steps for one in step.calls], executor.requests) == (["no_code"], [])


async def test_streams_of_a_provider_that_break_off_are_tried_again(events_of):
    """Pieces without a whole reply are no answer."""

    class Broken(ScriptedModel):
        async def stream(self, request):
            if not self.requests:
                self.requests.append(request)
                yield TextDelta("half")
                return
            async for item in super().stream(request):
                yield item

    events = await events_of(model=Broken([say("whole")]))
    assert [event.text for event in events if event.type == "model.delta"] == ["half", "whole"]
    assert events[-1].result.text == "whole"
