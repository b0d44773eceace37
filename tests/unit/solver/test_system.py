"""Opening and closing a system: models, engines, names."""

import pytest

from kdskills.errors import BadRequest, ExecRefused, ReplayError, UnknownName
from kdskills.execution import IsolationLevel
from kdskills.solver import PlainWiring, ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say


class Counting(ScriptedModel):
    closed = 0

    async def aclose(self):
        self.closed += 1
        await super().aclose()


async def test_models_are_looked_up_by_name_and_closed_once(bundle_path):
    """One string is one provider, whatever roles use it."""
    model = Counting([])
    wiring = PlainWiring(models={"fake:x": model})
    settings = SolverSettings(models={"answer.generator.strong": "fake:x"})
    system = SolverSystem(bundle=bundle_path, model="fake:x", executor=None, wiring=wiring, settings=settings)
    async with system:
        assert system.model("answer.generator.strong") is model
        assert system.model("another.role") is model
    assert model.closed == 1


async def test_replay_means_the_bundles_demo(bundle_path):
    """`replay` is `replay:<demo.yaml>`; a bundle without one says so."""
    with pytest.raises(ReplayError) as caught:
        async with SolverSystem(bundle=bundle_path, executor=None, wiring=PlainWiring()):
            pass
    assert caught.value.code == "cassette_missing"
    (bundle_path / "demo.yaml").write_text("schema: kdskills.cassette/1\nreplies: []\n")
    model = ScriptedModel([])
    wiring = PlainWiring(models={f"replay:{bundle_path}/demo.yaml": model})
    async with SolverSystem(bundle=bundle_path, executor=None, wiring=wiring) as system:
        assert system.model("x") is model


async def test_an_unknown_model_or_engine_is_named(bundle_path):
    """The operator is told what there is."""
    with pytest.raises(UnknownName, match="no model"):
        async with SolverSystem(bundle=bundle_path, model="nope:x", executor=None, wiring=PlainWiring()):
            pass
    with pytest.raises(UnknownName, match="no executor"):
        async with SolverSystem(bundle=bundle_path, model=ScriptedModel([]), wiring=PlainWiring()):
            pass


async def test_without_an_engine_nothing_runs_and_nothing_is_offered(build):
    """`executor=None` turns scripts and generated code off."""
    model = ScriptedModel(
        [call("skills_load", names=["sales"]), call("skills_run_script", path="scripts/sum.py"), say("ok")]
    )
    async with build(model=model, engine=None) as system:
        result = await ReactSolver(system).run("x")
    assert {tool.tool_id for tool in model.requests[0].tools}.isdisjoint({"skills.run_script", "exec.python"})
    assert result.steps[1].calls[0].error == "tool_not_found"


async def test_an_engine_that_does_not_isolate_needs_a_second_word(build, executor):
    """Level NONE is off unless the settings ask for it; then the call asks for the unsafe profile."""
    executor.level = IsolationLevel.NONE
    async with build() as system:
        assert system.executor is None
    replies = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py"),
        call("exec_python", code="1"),
        say("ok"),
    ]
    async with build(replies, run_scripts=True) as system:
        await ReactSolver(system).run("x")
    assert [request.profile for request in executor.requests] == ["unsafe-local", "unsafe-local"]


async def test_scripts_can_be_forbidden(build):
    """`run_scripts=False` wins over any engine."""
    async with build(run_scripts=False) as system:
        assert system.executor is None


async def test_no_engine_works_means_no_system(bundle_path):
    """Refuse rather than pretend; the models are closed again."""

    class Refusing(PlainWiring):
        async def executor(self, name):
            raise ExecRefused("nothing isolates here")

    model = Counting([])
    with pytest.raises(ExecRefused):
        async with SolverSystem(bundle=bundle_path, model=model, wiring=Refusing()):
            pass
    assert model.closed == 1


async def test_a_system_is_used_while_it_is_open(build):
    """Before and after, there is nothing to work with."""
    system = build([say("ok")])
    with pytest.raises(BadRequest, match="not open"):
        await ReactSolver(system).run("x")
    async with system:
        await ReactSolver(system).run("x")
    with pytest.raises(BadRequest, match="not open"):
        _ = system.runtime


def test_only_a_session_is_taken_for_remote_skills(bundle_path):
    """Anything that cannot list and dispatch is refused before anything is opened."""
    with pytest.raises(BadRequest, match="remote must be a session"):
        SolverSystem(bundle=bundle_path, remote=object(), wiring=PlainWiring())


@pytest.mark.parametrize(
    "bad", [{"max_steps": 0}, {"wall_s": 0}, {"model_retries": -1}, {"on_unknown_sid": "x"}, {"max_setps": 3}]
)
def test_settings_are_checked(bad):
    """A typo or a bound below one is no setting."""
    with pytest.raises(ValueError, match="validation error"):
        SolverSettings(**bad)


async def test_approval_is_asked_for_generated_code_and_scripts(build, executor):
    """With `approve` a person decides before anything runs; a no is an answer for the model."""
    from kdskills.session import allow, deny

    asked = []

    async def approve(request):
        asked.append((request.skill, request.path))
        return allow() if request.skill else deny("not today")

    replies = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py"),
        call("exec_python", code="1"),
        say("ok"),
    ]
    seen = []
    async with build(replies, approve=approve, sinks=(seen.append,)) as system:
        result = await ReactSolver(system).run("x")
    assert asked == [("acme.sales", "scripts/sum.py"), (None, None)]
    assert [step.calls[0].error for step in result.steps[1:3]] == [None, "approval_denied"]
    assert len(executor.requests) == 1
    assert [event.allowed for event in seen if event.type == "approval.decided"] == [True, False]


async def test_a_recording_masks_the_secrets_of_the_settings(build, tmp_path):
    """What is `***` in a transcript is `***` in a cassette."""
    from pydantic import SecretStr

    from kdskills.builtin.models.record import RecordingModel

    model = RecordingModel(ScriptedModel([say("it is MARK-9")]), tmp_path / "c.yaml")
    async with build(model=model, secrets=(SecretStr("MARK-9"),)) as system:
        await ReactSolver(system).run("say MARK-9")
    written = (tmp_path / "c.yaml").read_text()
    assert "MARK-9" not in written
    assert written.count("***") == 2
