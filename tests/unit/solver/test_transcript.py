"""Transcripts read back, and prompts told in them."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.builtin.models.record import RecordingModel
from kdskills.builtin.models.replay import ReplayModel
from kdskills.errors import BadRequest, ReplayError
from kdskills.models.cassette import read_cassette
from kdskills.solver import ReactSolver, TurnResult
from kdskills.solver.events import read_transcript
from kdskills.solver.loop import FINAL
from kdskills.testing.models import ScriptedModel, call, say, together

HEAD = '{"schema": "kdskills.transcript/1"}\n'


def event(seq, kind="history.elided", **fields):
    row = {"seq": seq, "ts": "2026-01-02T03:04:05.6Z", "type": kind, "turn_id": "t", "session_id": "s", **fields}
    return json.dumps({"messages": 1, **row} if kind == "history.elided" else row) + "\n"


async def run(build, tmp_path, replies, **options):
    async with build(replies, **options) as system:
        result = await ReactSolver(system).run("Which region grew?")
    return result, read_transcript(tmp_path / "transcripts" / f"{result.turn_id}.jsonl")


async def test_a_transcript_reads_back_as_the_events_a_sink_saw(build, tmp_path):
    """Same events, same result, nothing odd."""
    seen = []
    replies = [together(say("hm \ud83d"), call("skills_load", names=["sales"])), say("a [[S:1]] \u2028 b")]
    result, read = await run(build, tmp_path, replies, sinks=(seen.append,))
    assert (list(read.events), read.result, read.diagnostics) == (seen, result, ())
    assert (read.started.request, read.started.consumer) == ("Which region grew?", "solver.react.decision")


async def test_prompts_are_told_once_for_each_digest(build, tmp_path):
    """A text stands in the first event that uses it, under its own digest; later ones give the digest alone."""
    model = ScriptedModel(
        [
            call("skills_load", names=["sales"]),
            call("react_read", refs=["src:1"]),
            call("skills_unload", all=True),
            say("ok"),
        ]
    )
    _, read = await run(build, tmp_path, (), model=model)
    built = [event for event in read.events if event.type == "prompt.built"]
    texts = {event.digest: event.text for event in built if event.text}
    assert [bool(event.text) for event in built] == [True, True, False, False]
    assert [texts[event.digest] for event in built] == [asked.instructions for asked in model.requests]
    for digest, text in texts.items():
        assert digest == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


async def test_what_was_asked_is_told_where_it_is_not_the_request(build, tmp_path):
    """The last call's words and a generator's prompt stand in their events; the request is not repeated."""
    replies = [call("skills_load", names=["sales"]), say("so far"), say("The answer.")]
    options = {"max_steps": 1, "answer_role": "answer.generator.strong"}
    _, read = await run(build, tmp_path, replies[:2], **options)
    assert [e.asked for e in read.events if e.type == "prompt.built"] == ["", FINAL]
    _, read = await run(build, tmp_path, [say("draft"), say("The answer.")], answer_role="answer.generator.strong")
    decision, generator = (e for e in read.events if e.type == "prompt.built")
    assert (decision.asked, decision.role) == ("", "solver.react.decision")
    assert "[DRAFT]\ndraft" in generator.asked


async def test_prompts_in_a_transcript_are_masked(build, tmp_path):
    """A secret in the house's own text is in the model's prompt and not in the file."""
    from pydantic import SecretStr

    model = ScriptedModel([say("ok")])
    _, read = await run(build, tmp_path, (), model=model, base_text="PIN 7341-aa", secrets=(SecretStr("7341-aa"),))
    built = next(event for event in read.events if event.type == "prompt.built")
    assert ("PIN ***" in built.text, "7341-aa" in model.requests[0].instructions) == (True, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "transcript_invalid"),
        ("{}\n", "transcript_invalid"),
        ("[]\n", "transcript_invalid"),
        ('{"schema": "kdskills.transcript/2"}\n', "transcript_invalid"),
        (HEAD + "nonsense\n", "transcript_invalid"),
        (HEAD + "[" * 100_000 + "\n", "transcript_invalid"),
        (HEAD + event(1, "model.replied"), "transcript_invalid"),
        (HEAD + event(1, extra=1), "transcript_invalid"),
        (HEAD + event("many"), "transcript_invalid"),
        (HEAD + '{"type": "turn.finished"}\n', "transcript_invalid"),
        ("\udcff\udcfe\n", "transcript_invalid"),
    ],
)
def test_what_is_no_transcript_is_refused(tmp_path, text, code):
    """Foreign files, broken lines and events out of shape are errors of the caller, with the line where there is one."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadRequest) as caught:
        read_transcript(path)
    assert caught.value.code == code
    with pytest.raises(BadRequest):
        TurnResult.from_transcript(path)


def test_a_missing_file_is_told(tmp_path):
    """Neither a missing file nor a folder escapes as an OSError."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        for read in (read_transcript, TurnResult.from_transcript):
            with pytest.raises(BadRequest) as caught:
                read(path)
            assert caught.value.code == "transcript_missing"


def test_a_transcript_that_broke_off_is_read_as_far_as_it_goes(tmp_path):
    """What a crash left: whole lines count, a cut one is told, the result is missing."""
    path = tmp_path / "t.jsonl"
    path.write_text(HEAD + event(1) + event(2) + event(3)[:-20])
    read = read_transcript(path)
    assert [e.seq for e in read.events] == [1, 2]
    assert (read.result, [found.code for found in read.diagnostics]) == (None, ["transcript_cut"])
    path.write_text(HEAD)
    assert (read_transcript(path).events, read_transcript(path).started) == ((), None)


def test_gaps_and_unknown_events_are_told(tmp_path):
    """A line taken out and an event of a newer version are findings with their lines, not errors."""
    path = tmp_path / "t.jsonl"
    path.write_text(HEAD + event(1) + event(3) + event(4, "turn.dreamt") + event(5))
    read = read_transcript(path)
    assert [e.seq for e in read.events] == [1, 3, 5]
    assert [(found.code, found.line) for found in read.diagnostics] == [
        ("transcript_gap", 3),
        ("transcript_unknown_event", 4),
    ]


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(junk):
    """Whatever follows the head, reading ends in a transcript or a BadRequest."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(HEAD.encode() + junk)
        try:
            found = read_transcript(path).events
        except BadRequest as error:
            found = error.code
        assert found in {(), "transcript_invalid"}


# ---- record and replay ----


async def recorded(build, executor, path):
    replies = [
        together(say("Look."), call("skills_load", names=["sales"])),
        call("skills_run_script", path="scripts/sum.py", env={"KEY": "sesame-open"}),
        call("skills_load", names=["nowhere"]),
        say("North grew [[S:1]]; not sesame-open."),
    ]
    async with build(model=RecordingModel(ScriptedModel(replies), path)) as system:
        return await ReactSolver(system).run("Which region grew?")


def told(result):
    """What a result says but for ids, times, the model and what was masked on the way."""
    calls = [[(c.tool, c.ok, c.error) for c in step.calls] for step in result.steps]
    texts = [step.text for step in result.steps]
    return result.status, result.text, result.cited, result.sources, calls, texts


@pytest.mark.parametrize("match", ["shape", "exact", "order"])
async def test_a_recorded_turn_replays_equal(build, executor, tmp_path, match):
    """Recorded over a scripted model, replayed in a turn of its own with other ids, times and folders."""
    path = tmp_path / "c.yaml"
    replies = [
        together(say("Look."), call("skills_load", names=["sales"])),
        call("skills_load", names=["x"]),
        say("ok"),
    ]
    async with build(model=RecordingModel(ScriptedModel(replies), path)) as system:
        first = await ReactSolver(system).run("Which region grew?")
    cassette = read_cassette(path).model_copy(update={"match": match})
    async with build(model=ReplayModel(cassette)) as system:
        again = await ReactSolver(system).run("Which region grew?")
    assert told(again) == told(first)
    assert (again.replayed, again.usage) == (True, first.usage)


async def test_exact_tells_a_prompt_that_changed(build, tmp_path, bundle_path):
    """A changed skill text diverges under `exact`, at the call whose prompt holds it; `shape` does not mind."""
    path = tmp_path / "c.yaml"
    replies = [call("skills_load", names=["sales"]), say("ok")]
    async with build(model=RecordingModel(ScriptedModel(replies), path)) as system:
        await ReactSolver(system).run("Which region grew?")
    skill = bundle_path / "skills/acme/sales/SKILL.md"
    skill.write_text(skill.read_text() + "One more line.\n")
    async with build(model=ReplayModel(read_cassette(path))) as system:
        assert (await ReactSolver(system).run("Which region grew?")).text == "ok"
    exact = read_cassette(path).model_copy(update={"match": "exact"})
    with pytest.raises(ReplayError) as caught:
        async with build(model=ReplayModel(exact)) as system:
            await ReactSolver(system).run("Which region grew?")
    details = caught.value.details
    assert (caught.value.code, details["index"], details["field"]) == ("replay_diverged", 1, "digest")


async def test_a_masked_call_replays_by_shape(build, executor, tmp_path):
    """A recording without the secrets of its calls still runs; the script gets the mask."""
    path = tmp_path / "c.yaml"
    first = await recorded(build, executor, path)
    assert "sesame-open" not in path.read_text()
    async with build(model=ReplayModel(read_cassette(path))) as system:
        again = await ReactSolver(system).run("Which region grew?")
    assert told(again) == told(first)
    assert [request.env["KEY"] for request in executor.requests] == ["sesame-open", "***"]
