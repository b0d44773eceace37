"""Activation, sessions, streams and cancellation."""

import asyncio
import contextlib
import json
import threading
from datetime import UTC, datetime, timedelta

import pytest

from kdskills.errors import BadRequest, ModelFailed, NoActiveSkills, SessionError, ToolCallRefused
from kdskills.models import ModelReply
from kdskills.solver import PlainWiring, ReactSolver, ToolContext
from kdskills.solver.finish import open_workspace
from kdskills.testing.models import ScriptedModel, call, say, together
from kdskills.turn import get_active_skills_subsystem


def nothing_active():
    try:
        get_active_skills_subsystem()
    except NoActiveSkills:
        return True
    return False


async def test_the_subsystem_is_active_within_a_turn_and_reset_on_every_way_out(build):
    """Success, error and cancellation all leave the context as it was."""
    async with build() as system:
        solver = ReactSolver(system)
        async with solver.prepare_session("x") as turn:
            assert get_active_skills_subsystem() is system.subsystem is turn.subsystem
        assert nothing_active()
        with pytest.raises(RuntimeError):
            async with solver.prepare_session("x"):
                raise RuntimeError
        assert nothing_active()
        with pytest.raises(asyncio.CancelledError):
            async with solver.prepare_session("x") as turn:
                raise asyncio.CancelledError
        assert nothing_active()
        assert (turn.result.status, turn.result.stop_reason) == ("failed", "cancelled")


async def test_nothing_is_active_in_a_bare_thread(build):
    """A plain thread started within a turn sees no skills."""
    seen = []
    async with build() as system, ReactSolver(system).prepare_session("x"):
        thread = threading.Thread(target=lambda: seen.append(nothing_active()))
        thread.start()
        thread.join()
    assert seen == [True]


async def test_nested_turns_see_their_own(build, tmp_path):
    """An inner turn of another system is active inside, the outer one again after it."""
    async with build() as outer, build() as inner, ReactSolver(outer).prepare_session("x"):
        async with ReactSolver(inner).prepare_session("y"):
            assert get_active_skills_subsystem() is inner.subsystem
        assert get_active_skills_subsystem() is outer.subsystem


async def test_fifty_concurrent_turns_of_different_systems(build):
    """Each turn sees its own subsystem, session and files, whatever runs beside it."""

    async def check(number: int, call: ToolContext) -> str:
        """Check what is active."""
        for _ in range(3):
            assert get_active_skills_subsystem() is call.turn.subsystem
            await asyncio.sleep(0.001 * (number % 5))
        return str(id(get_active_skills_subsystem()))

    async def one(number):
        replies = [call("skills_load", names=["sales" if number % 2 else "brief"]), call("tools_check", number=number)]
        async with build([*replies, say(f"done {number}")], tools=[check]) as system:
            result = await ReactSolver(system).run(f"x {number}")
            assert result.steps[1].calls[0].result == str(id(system.subsystem))
            return result

    results = await asyncio.gather(*(one(number) for number in range(50)))
    assert [result.text for result in results] == [f"done {number}" for number in range(50)]
    assert [result.skills_used[0].id for result in results] == ["acme.brief", "acme.sales"] * 25
    assert len({result.session_id for result in results}) == 50
    assert nothing_active()


async def test_a_stream_gives_every_event_and_ends_with_the_result(events_of):
    """Numbers without gaps, the first is `turn.started`, the last `turn.finished`."""
    events = await events_of([call("skills_load", names=["sales"]), say("one\ntwo [[S:1]]")])
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert (events[0].type, events[-1].type, events[-1].result.status) == ("turn.started", "turn.finished", "final")
    types = [event.type for event in events]
    assert types.count("model.requested") == types.count("model.replied") == 2
    order = ["turn.started", "prompt.built", "model.requested", "model.replied", "tool.called", "skill.loaded"]
    assert sorted(order, key=types.index) == order
    assert types.index("tool.called") < types.index("sources.merged") < types.index("tool.finished")
    assert "".join(event.text for event in events if event.type == "model.delta") == "one\ntwo [[S:1]]"
    assert {event.turn_id for event in events} == {events[-1].result.turn_id}


async def test_a_stream_does_not_change_the_callers_context(build):
    """Between two events nothing is active in the caller."""
    async with build([call("skills_load", names=["sales"]), say("ok")]) as system:
        async for _ in ReactSolver(system).stream("x"):
            assert nothing_active()


async def test_leaving_a_stream_cancels_the_turn(build, executor):
    """The consumer goes away in the middle of a script: the sandbox is ended, the hook is told."""
    executor.hang = True
    outcomes = []

    class Told(PlainWiring):
        def turn_finished(self, turn, outcome):
            outcomes.append(outcome)

    model = ScriptedModel([call("skills_load", names=["sales"]), call("skills_run_script", path="scripts/sum.py")])
    async with (
        build(model=model, wiring=Told()) as system,
        contextlib.aclosing(ReactSolver(system).stream("x")) as events,
    ):
        async for event in events:
            if event.type == "script.started":
                break
    assert executor.cancelled == 1
    assert [(outcome.status, outcome.stop_reason) for outcome in outcomes] == [("failed", "cancelled")]
    assert [one.error for one in outcomes[0].steps[-1].calls] == ["cancelled"]


async def test_a_stream_that_is_forgotten_is_ended_too(build, executor):
    """Without `aclosing` the loop's own finalizer does it."""
    executor.hang = True
    model = ScriptedModel([call("exec_python", code="1")])
    async with build(model=model) as system:
        async for event in ReactSolver(system).stream("x"):
            if event.type == "script.started":
                break
        for _ in range(3000):  # until the turn's own task and those of its finalizer are over, its transcript closed
            await asyncio.sleep(0.01)
            if executor.cancelled and asyncio.all_tasks() == {asyncio.current_task()}:
                break
    assert executor.cancelled == 1


async def test_a_turn_cancelled_before_it_began_leaves_no_folder(build, monkeypatch):
    """A folder that is made while its turn is cancelled is removed before the cancel arrives."""
    begun, go, made = threading.Event(), threading.Event(), []

    def slowly(*words, **options):
        begun.set()
        assert go.wait(60)
        made.append(open_workspace(*words, **options))
        return made[-1]

    monkeypatch.setattr("kdskills.solver.react.open_workspace", slowly)
    async with build(model=ScriptedModel([])) as system:
        task = asyncio.create_task(ReactSolver(system).run("x"))
        assert await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [workspace.root.exists() for workspace in made] == [False]


async def test_cancelling_a_turn_answers_every_call_and_re_raises(build, executor):
    """Each call of the reply has its `cancelled` answer, sandboxes are stopped, nothing stays active."""
    executor.hang = True
    seen = []
    model = ScriptedModel(
        [
            together(
                call("react_read", refs=["src:1"]),
                call("exec_python", code="1"),
                call("react_write", path="a", text="x"),
            )
        ]
    )
    async with build(model=model, sinks=(seen.append,)) as system:
        task = asyncio.create_task(ReactSolver(system).run("x"))
        await asyncio.wait_for(executor.started.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    answers = [(event.tool, event.error) for event in seen if event.type == "tool.finished"]
    assert answers == [("react.read", "nothing_read"), ("exec.python", "cancelled"), ("react.write", "cancelled")]
    assert (executor.cancelled, seen[-1].type, seen[-1].result.stop_reason) == (1, "turn.finished", "cancelled")


async def test_a_stream_of_a_failing_provider_ends_failed(events_of):
    """The stream itself does not raise."""
    events = await events_of([ModelFailed("no key")])
    assert (events[-1].result.status, events[-1].result.stop_reason) == ("failed", "model_failed")


async def test_a_stream_that_cannot_begin_raises(build):
    """Without a turn there is no last event to say it."""
    async with build() as system:
        with pytest.raises(BadRequest):
            async for _ in ReactSolver(system).stream("x", files=["/nonexistent/file"]):
                pass


async def test_skills_stay_loaded_in_a_session(build):
    """A second turn of the session begins with what the first loaded, its sources adopted."""
    model = ScriptedModel([call("skills_load", names=["sales"]), say("a [[S:1]]"), say("b [[S:1]]")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        first = await solver.run("x", session_id="chat-1")
        second = await solver.run("y", session_id="chat-1")
    assert (first.session_id, second.session_id, second.cited) == ("chat-1", "chat-1", (1,))
    assert [use.id for use in second.skills_used] == ["acme.sales"]
    assert model.requests[-1].active == ("sales",)


async def test_a_session_belongs_to_its_consumer(build, tmp_path):
    """Another agent cannot take over a conversation's skills."""
    async with build([say("ok")]) as system:
        await ReactSolver(system).run("x", session_id="chat-1")
        with pytest.raises(BadRequest):
            await ReactSolver(system, consumer="someone.else").run("x", session_id="chat-1")
        with pytest.raises((BadRequest, ToolCallRefused, SessionError)):
            await ReactSolver(system).run("x", session_id="no blanks!")
    assert list((tmp_path / "turns").iterdir()) == []


async def test_skills_can_be_given_by_code(build):
    """`skills=` loads with the caller's word; a denied one ends the turn before it begins."""
    async with build([say("ok")]) as system:
        result = await ReactSolver(system).run("x", skills=["sales"])
        assert [(use.id, use.how) for use in result.skills_used] == [("acme.sales", "code")]
        with pytest.raises(ToolCallRefused) as caught:
            await ReactSolver(system).run("x", skills=["acme.secret"])
    assert (caught.value.code, caught.value.result.status) == ("skill_not_found", "failed")


async def test_a_skill_removed_in_the_middle_of_a_turn_is_gone_at_once(build, bundle_path):
    """The view is frozen, removal is not."""

    def remove(call: ToolContext) -> str:
        """Remove a skill."""
        (bundle_path / "skills/acme/brief/SKILL.md").unlink()
        call.turn.subsystem.refresh()
        return "gone"

    replies = [call("tools_remove"), call("skills_load", names=["brief"]), say("ok")]
    async with build(replies, tools=[remove]) as system:
        result = await ReactSolver(system).run("x")
    assert result.steps[1].calls[0].error == "skill_not_found"


@pytest.mark.parametrize("request_text", ["", "  \n"])
async def test_a_blank_request_is_refused(build, request_text):
    """There is nothing to work on."""
    async with build() as system:
        with pytest.raises(BadRequest):
            await ReactSolver(system).run(request_text)


@pytest.mark.parametrize("deadline", [0, -1.0, timedelta(0), datetime(2001, 1, 1, tzinfo=UTC), datetime(2990, 1, 1)])  # noqa: DTZ001
async def test_a_deadline_that_cannot_be_met_is_refused(build, deadline):
    """A moment that has passed, or one without time zone, is no deadline."""
    async with build() as system:
        with pytest.raises(BadRequest):
            await ReactSolver(system).run("x", deadline=deadline)


async def test_deadlines_are_seconds_durations_or_moments(solve):
    """All three forms are taken."""
    for deadline in (30, timedelta(seconds=30), datetime.now(UTC) + timedelta(seconds=30)):
        assert (await solve([say("ok")], deadline=deadline)).status == "final"


async def test_a_claimed_file_that_is_there_is_no_matter(build):
    """Files that were written, handed in or belong to a used skill may be named."""
    text = "I wrote out.md. I saved the copy next to sales.csv as in.txt. I updated it following notes.md."
    async with build([call("react_write", path="deep/out.md", text="x"), say(text)]) as system:
        result = await ReactSolver(system).run("x", files=[("in.txt", b"i")], skills=["sales"])
    assert (result.status, result.stop_reason) == ("final", "answer")


async def test_a_claimed_file_that_is_not_there_gets_one_correction_round(build, tmp_path):
    """The model may write it after all; then the answer is final, and the transcript shows both checks."""
    model = ScriptedModel(
        [say("I wrote report.md."), call("react_write", path="report.md", text="x"), say("Now I wrote report.md.")]
    )
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, result.text) == ("final", "Now I wrote report.md.")
    assert "report.md" in model.requests[1].messages[-1].text
    assert model.requests[1].messages[-1].role == "user"
    lines = (tmp_path / "transcripts" / f"{result.turn_id}.jsonl").read_text().splitlines()
    checks = [event for event in map(json.loads, lines) if event.get("type") == "answer_checked"]
    assert [(one["claimed"], one["missing"], one["sent_back"]) for one in checks] == [
        (["report.md"], ["report.md"], True),
        (["report.md"], [], False),
    ]


async def test_an_answer_that_insists_is_unverified(build):
    """After one round the answer is given as it is, but not as final; the setting turns the check off."""
    async with build([say("I wrote report.md."), say("I did write report.md, I wrote report.md.")]) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, result.stop_reason, result.ok) == ("unverified", "files_missing", False)
    assert result.text == "I did write report.md, I wrote report.md."
    async with build([say("I wrote report.md.")], check_answers=False) as system:
        assert (await ReactSolver(system).run("x")).status == "final"


async def test_skills_left_out_for_want_of_an_engine_are_told(build, bundle_path):
    """Without an engine, a turn says which skills are left out for it; with one, or where rules refuse them, it does not."""
    for name in ("brief", "secret"):
        (bundle_path / "skills" / "acme" / name / "tools.yaml").write_text(
            "tools:\n- {id: skills.run_script, required: true}\n"
        )
    async with build([say("ok")], engine=None) as system:
        result = await ReactSolver(system).run("x")
        why = system.subsystem.view("solver.react.decision", tools=system.tool_ids).explain("acme.brief")
    told = [found for found in result.diagnostics if found.code == "scripts_off"]
    assert [(found.severity, found.ref) for found in told] == [("warning", "acme.brief")]
    assert 'executor="auto"' in told[0].message
    assert "secret" not in told[0].message
    assert why.code == "tools_missing"
    assert "executor=None" in why.notes[0]
    async with build([say("ok")]) as system:
        result = await ReactSolver(system).run("x")
    assert [found.code for found in result.diagnostics] == []


async def test_plugins_are_told_of_start_and_end_while_the_turn_is_active(build):
    """Hooks see an active turn; one that fails is told and changes nothing else."""
    seen = []

    class Told(PlainWiring):
        def turn_started(self, turn):
            seen.append(("started", get_active_skills_subsystem() is turn.subsystem))
            raise ValueError("mine")

        def turn_finished(self, turn, outcome):
            seen.append(("finished", outcome.status, get_active_skills_subsystem() is turn.subsystem))
            raise ValueError("mine")

    async with build([say("ok")], wiring=Told()) as system:
        result = await ReactSolver(system).run("x")
    assert seen == [("started", True), ("finished", "final", True)]
    assert [(found.code, found.ref) for found in result.diagnostics] == [
        ("plugin_failed", "kdskills_turn_started"),
        ("plugin_failed", "kdskills_turn_finished"),
    ]


async def test_an_error_of_a_programming_mistake_ends_the_turn_and_is_raised(build):
    """A provider with a bug is not swallowed."""

    class Buggy(ScriptedModel):
        async def reply(self, request) -> ModelReply:
            raise ZeroDivisionError

    async with build(model=Buggy([])) as system:
        with pytest.raises(ZeroDivisionError):
            await ReactSolver(system).run("x")
    assert nothing_active()
