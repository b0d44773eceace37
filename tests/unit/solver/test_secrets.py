"""Markers planted wherever secrets come in are in nothing that goes out."""

import json

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

from kdskills.builtin.models.record import RecordingModel
from kdskills.builtin.models.replay import ReplayModel
from kdskills.errors import KdskillsError, ModelFailed, ReplayError
from kdskills.models.cassette import read_cassette
from kdskills.solver import ReactSolver
from kdskills.solver.events import read_transcript
from kdskills.testing.models import ScriptedModel, call, say, together

SETTING, SCRIPT, HEADER, ENV = "MARK-setting-1", "MARK-script-2", "MARK-header-3", "MARK-env-4"
EVERYTHING = f"{SETTING} {SCRIPT} {HEADER} {ENV}"


@pytest.fixture
def planted(tmp_path):
    """Settings with a marker in each place, for a turn that repeats all of them wherever it can."""
    return {
        "secrets": (SecretStr(SETTING),),
        "script_env": lambda skill: {"TOKEN": SecretStr(SCRIPT)},
        "model_settings": {"extra_headers": {"X-Key": HEADER}},
        "base_text": f"The house rule names {SETTING}.",
    }


@pytest.fixture
def spans(monkeypatch):
    """The JSON of all spans, texts captured."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield lambda: "".join(span.to_json() for span in exporter.get_finished_spans())
    provider.shutdown()


def replies():
    return [
        call("skills_load", names=["sales"]),
        together(
            say(f"Using {ENV}."),
            call("skills_run_script", path="scripts/sum.py", args=[SETTING], env={"TOKEN2": ENV}),
        ),
        call("react_read", refs=[f"turn:{EVERYTHING}"]),
        call("react_write", path="notes.md", text=EVERYTHING),
        call("nowhere", text=EVERYTHING),
        say(f"The answer holds {EVERYTHING} and more."),
    ]


@pytest.mark.parametrize("value", ["1", "2026", "final", "tool", "-"])
async def test_plain_words_of_a_scripts_variables_are_no_secrets(build, executor, value):
    """What is shorter than six characters is in any text: it is masked nowhere, and the turn is told whole."""
    script = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py"),
        say(f"it is {value}"),
    ]
    async with build(script, script_env=lambda skill: {"MODE": SecretStr(value)}) as system:
        result = await ReactSolver(system).run("how much?", session_id="c1")
    assert executor.requests[0].env["MODE"] == value
    assert (result.status, result.text) == ("final", f"it is {value}")


async def test_no_output_of_a_turn_holds_a_secret(build, executor, planted, spans, tmp_path):
    """Transcript, events, result, recording and spans of a turn that says every secret it knows."""
    executor.outcome = {"stdout": EVERYTHING.encode(), "stderr": json.dumps(EVERYTHING).encode()}
    cassette, seen = tmp_path / "c.yaml", []
    model = RecordingModel(ScriptedModel(replies()), cassette)
    async with build(model=model, sinks=(seen.append,), **planted) as system:
        result = await ReactSolver(system).run(f"Use {SETTING} and {HEADER}")
    assert executor.requests[0].env["TOKEN"] == SCRIPT
    assert executor.requests[0].env["TOKEN2"] == ENV
    written = {
        "transcript": (tmp_path / "transcripts" / f"{result.turn_id}.jsonl").read_text(),
        "events": "".join(event.model_dump_json() for event in seen),
        "result": json.dumps(result.to_json()),
        "repr": repr(result),
        "cassette": cassette.read_text(),
        "spans": spans(),
    }
    assert [(name, m) for name, text in written.items() for m in EVERYTHING.split() if m in text] == []
    assert result.text == "The answer holds *** *** *** *** and more."
    assert "***" in written["cassette"]


async def test_a_model_cannot_make_names_of_fields_secret(build, executor, planted, tmp_path):
    """A call whose `env` holds names of fields and words of fixed lists ends no turn: texts are masked, the form stays."""
    words = "status failed stdout turn.finished severity warning ignored unverified tool.called sid title"
    env = {f"W{number}": word for number, word in enumerate(words.split())}
    run = call("skills_run_script", path="scripts/sum.py", args=[], env=env)
    events = []
    script = [call("skills_load", names=["sales"]), run, say("The status is ignored [[S:1]].")]
    async with build(script, sinks=[events.append], **planted) as system:
        result = await ReactSolver(system).run("go")
    assert (result.status, result.text) == ("final", "The *** is *** [[S:1]].")
    assert events[-1].result == result
    assert events[0].type == "turn.started"
    transcript = read_transcript(tmp_path / "transcripts" / f"{result.turn_id}.jsonl")
    assert [event.type for event in transcript.events] == [event.type for event in events]


@pytest.mark.parametrize("pieces", [1, 3, 200])
async def test_a_secret_in_pieces_is_no_less_secret(build, planted, pieces):
    """What a provider streams is joined before it is told, as far as it may hold a secret."""
    text = f"begin {SETTING} end MARK-set"
    size = max(1, len(text) // pieces)

    class Piecewise(ScriptedModel):
        async def stream(self, request):
            from kdskills.models import TextDelta

            answer = await self.reply(request)
            for at in range(0, len(text), size):
                yield TextDelta(text[at : at + size])
            yield answer

    async with build(model=Piecewise([say(text)]), **planted) as system:
        events = [event async for event in ReactSolver(system).stream("x")]
    told = "".join(event.text for event in events if event.type == "model.delta")
    assert told == "begin *** end MARK-set"


@pytest.mark.parametrize("retryable", [True, False])
async def test_failures_of_a_provider_do_not_repeat_secrets(build, planted, retryable):
    """Servers put what they were sent into their errors."""
    failure = ModelFailed(f"bad header {HEADER} for {SETTING}", retryable=retryable, status=400, body=EVERYTHING)
    seen = []
    with pytest.raises(ModelFailed) as caught:
        async with build(
            [failure] * (2 if retryable else 1), sinks=(seen.append,), model_retries=1, **planted
        ) as system:
            await ReactSolver(system).run("x")
    assert caught.value.message == "bad header *** for ***"
    told = json.dumps(caught.value.to_json()) + str(caught.value) + repr(caught.value)
    told += "".join(event.model_dump_json() for event in seen)
    assert [marker for marker in (SETTING, HEADER) if marker in told] == []
    assert (caught.value.retryable, caught.value.details["status"]) == (retryable, 400)


async def test_a_masked_recording_replays_for_the_same_request(build, executor, planted, tmp_path):
    """The request said a secret; the recording does not; both belong together, and a divergence does not tell it."""
    cassette = tmp_path / "c.yaml"
    async with build(model=RecordingModel(ScriptedModel([say("ok")]), cassette), **planted) as system:
        await ReactSolver(system).run(f"Use {SETTING}")
    assert SETTING not in cassette.read_text()
    async with build(model=ReplayModel(read_cassette(cassette)), **planted) as system:
        assert (await ReactSolver(system).run(f"Use {SETTING}")).text == "ok"
    with pytest.raises(ReplayError) as caught:
        async with build(model=ReplayModel(read_cassette(cassette)), **planted) as system:
            await ReactSolver(system).run(f"Misuse {SETTING}")
    assert (caught.value.code, caught.value.details["got"]) == ("replay_diverged", "Misuse ***")
    assert SETTING not in json.dumps(caught.value.to_json())


async def test_one_turns_secrets_are_kept_apart_from_anothers_text(build, executor, planted):
    """What a script was given in one turn does not mask the texts of a turn that knows nothing of it."""
    async with build([*replies()[:2], say("x"), say(f"About {ENV}.")], **planted) as system:
        solver = ReactSolver(system)
        await solver.run("first")
        second = await solver.run("second")
    assert second.text == f"About {ENV}."


def test_an_error_keeps_its_place_in_the_tree():
    """Masking a failure does not change who must act."""
    assert issubclass(ModelFailed, KdskillsError)
    assert ModelFailed("x").who == "operator"
