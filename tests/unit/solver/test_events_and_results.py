"""Events, transcripts, results, secrets."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from kdskills.errors import BadRequest
from kdskills.models import Redactor
from kdskills.solver import ReactSolver, TurnResult
from kdskills.solver.bus import SLOW, EventBus, Reader
from kdskills.solver.events import EVENT_TYPES, ModelDelta, ToolOutput, TurnFinished
from kdskills.solver.finish import drop_unknown, issues_of, rendered
from kdskills.sources import SourcesPool
from kdskills.testing.models import ScriptedModel, call, say, together


def bus(**options):
    return EventBus("t", "s", redactor=options.pop("redactor", Redactor()), **options)


def test_every_event_has_a_type_of_its_own():
    """28 types, each named once, as the specification lists them."""
    names = [kind.model_fields["type"].default for kind in EVENT_TYPES]
    assert len(names) == len(set(names)) == 28
    assert all("." in name or name in {"diagnostic", "answer_checked"} for name in names)


async def test_a_slow_reader_gets_deltas_merged_and_nothing_else():
    """Text is whole, and numbers tell how many were merged."""
    reader = Reader()
    one = bus()
    one.reader(reader)
    for number in range(SLOW + 500):
        one.emit(ModelDelta, role="r", text=f"{number} ")
    for number in range(10):
        one.emit(ToolOutput, call_id=str(number), tool="t", stream="stdout", text="x")
    one.emit(ModelDelta, role="r", text="end")
    await one.aclose()
    got = []
    while (event := await reader.get()) is not None:
        got.append(event)
    text = "".join(event.text for event in got if isinstance(event, ModelDelta))
    assert text == "".join(f"{number} " for number in range(SLOW + 500)) + "end"
    assert len(got) == SLOW + 11
    expected = 1
    for event in got:
        assert event.seq - event.merged == expected
        expected = event.seq + 1
    assert sum(isinstance(event, ToolOutput) for event in got) == 10


async def test_events_told_by_threads_keep_their_order_and_numbers():
    """Files are read in threads; what they tell is numbered like the rest."""
    reader = Reader()
    one = bus()
    one.reader(reader)
    one.open()
    await asyncio.gather(
        *(
            asyncio.to_thread(one.emit, ToolOutput, call_id=str(n), tool="t", stream="stdout", text="x")
            for n in range(200)
        )
    )
    await one.aclose()
    got = []
    while (event := await reader.get()) is not None:
        got.append(event)
    assert [event.seq for event in got] == list(range(1, 201))
    assert {event.call_id for event in got} == {str(n) for n in range(200)}


async def test_a_sink_that_hangs_does_not_hold_up_the_end(build, monkeypatch):
    """The turn waits a little for sinks that are behind, then goes."""
    monkeypatch.setattr("kdskills.solver.bus.SINK_GRACE_S", 0.05)

    async def hang(event):
        await asyncio.sleep(3600)

    async with build([say("ok")], sinks=(hang,)) as system:
        result = await asyncio.wait_for(ReactSolver(system).run("x"), 60)
    assert result.status == "final"


async def test_a_failing_sink_becomes_one_diagnostic(build):
    """The others go on, and the turn is not harmed."""
    seen, slow = [], []

    def bad(event):
        raise RuntimeError("sink")

    async def later(event):
        await asyncio.sleep(0)
        slow.append(event.seq)

    async with build([call("skills_load", names=["sales"]), say("ok")], sinks=(bad, seen.append, later)) as system:
        result = await ReactSolver(system).run("x")
    assert result.status == "final"
    assert [event.seq for event in seen] == slow == list(range(1, len(seen) + 1))
    told = [event.diagnostic.code for event in seen if event.type == "diagnostic"]
    assert told == ["sink_failed"]


async def test_a_transcript_that_cannot_be_written_is_told(build, tmp_path):
    """A full disk or a taken path costs the transcript, not the turn."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    async with build([say("ok")], transcripts=blocked / "below") as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, [found.code for found in result.diagnostics]) == ("final", ["transcript_failed"])


async def test_the_transcript_holds_every_event_and_gives_the_result_back(build, tmp_path):
    """JSON lines after a head, the same events a sink sees, the same result."""
    seen = []
    replies = [together(say("hm \ud83d"), call("skills_load", names=["sales"])), say("a [[S:1]] \u2028 b [[S:5]]")]
    async with build(replies, sinks=(seen.append,)) as system:
        result = await ReactSolver(system).run("Wörld\n")
    path = tmp_path / "transcripts" / f"{result.turn_id}.jsonl"
    lines = path.read_text().split("\n")
    assert json.loads(lines[0]) == {"schema": "kdskills.transcript/1"}
    assert [json.loads(line)["seq"] for line in lines[1:-1]] == [event.seq for event in seen]
    assert TurnResult.from_transcript(path) == result == TurnResult.from_json(result.to_json())


def test_what_is_no_whole_transcript_is_refused(tmp_path):
    """A foreign file, and one of a turn that did not end, are told apart."""
    path = tmp_path / "t.jsonl"
    for text, code in [
        ("", "transcript_invalid"),
        ("{}\n", "transcript_invalid"),
        ("nonsense", "transcript_invalid"),
        ('{"schema": "kdskills.transcript/1"}\n', "transcript_incomplete"),
        ('{"schema": "kdskills.transcript/1"}\n{"type": "turn.finished", "resu', "transcript_incomplete"),
        ('{"schema": "kdskills.transcript/1"}\nnonsense\n', "transcript_invalid"),
    ]:
        path.write_text(text)
        with pytest.raises(BadRequest) as caught:
            TurnResult.from_transcript(path)
        assert caught.value.code == code


async def test_secrets_are_in_no_output(build, tmp_path, executor):
    """Markers planted in settings and in a call's env are in no event, transcript or result."""
    executor.outcome = {"stdout": b"env has MARK-ENV-1 and MARK-SET-2\n"}
    replies = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py", env={"TOKEN": "MARK-ENV-1", "N": "7"}),
        say("The token is MARK-ENV-1, the other MARK-SET-2; 7 apples."),
    ]
    seen = []
    secrets = (SecretStr("MARK-SET-2"),)
    async with build(replies, sinks=(seen.append,), secrets=secrets) as system:
        result = await ReactSolver(system).run("Use MARK-SET-2")
    assert executor.requests[0].env["TOKEN"] == "MARK-ENV-1"
    written = (tmp_path / "transcripts" / f"{result.turn_id}.jsonl").read_text()
    told = "".join(event.model_dump_json() for event in seen)
    for text in (written, told, json.dumps(result.to_json())):
        assert "MARK-ENV-1" not in text
        assert "MARK-SET-2" not in text
    assert result.text == "The token is ***, the other ***; 7 apples."
    assert TurnResult.from_transcript(tmp_path / "transcripts" / f"{result.turn_id}.jsonl") == result


POOL = SourcesPool.from_rows(
    [{"sid": 1, "title": "One", "url": "https://a.example/"}, {"sid": 4, "title": "Four", "physical_path": "four.md"}]
)


@pytest.mark.parametrize(
    ("text", "issues", "shown", "kept"),
    [
        ("a [[S:1]]", [], "a [One](https://a.example/)", "a [[S:1]]"),
        ("a [[S:7]].", [7], "a [?7].", "a."),
        ("[[S:1,7]]", [7], "[One](https://a.example/)[?7]", "[[S:1]]"),
        ("[[S:50-60]]", [50], "[?50]", ""),
        ("[[S:1-4]]", [], "[One](https://a.example/) Four", "[[S:1-4]]"),
        ("`[[S:7]]`", [], "`[[S:7]]`", "`[[S:7]]`"),
        ("none", [], "none", "none"),
        ("[[S:8]] [[S:9]]", [8, 9], "[?8] [?9]", ""),
    ],
)
def test_citations_of_no_source_are_marked_or_dropped(text, issues, shown, kept):
    """Spans point at the text; known citations beside unknown ones stay."""
    found = issues_of(text, POOL)
    assert [issue.sid for issue in found] == issues
    assert rendered(text, POOL) == shown
    assert drop_unknown(text, POOL).strip() == kept


def test_the_last_event_is_not_merged_with_anything():
    """Only deltas and tool output ever are."""
    from kdskills.solver.bus import merge

    result = TurnResult(turn_id="t", session_id="s", status="final", stop_reason="answer")
    last = TurnFinished(seq=1, ts="", turn_id="t", session_id="s", result=result)
    assert merge(last, last) is None


async def test_files_handed_in_are_checked_and_copied(build, tmp_path):
    """Names are kept, originals stay, and what cannot be handed in is refused before the turn."""
    one = tmp_path / "a.csv"
    one.write_text("1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.csv").write_text("2")
    model = ScriptedModel([call("react_read", refs=["turn:a.csv", "turn:in/c.txt", "turn:data/sales.csv"]), say("ok")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        result = await solver.run("x", files=[one, ("in/c.txt", b"3")])
        items = json.loads(result.steps[0].calls[0].result)["items"]
        assert [item["text"] for item in items] == ["1", "3", "region,total\nnorth,42\n"]
        assert result.files == ()
        for bad in (
            [tmp_path / "none"],
            [tmp_path / "b"],
            [one, tmp_path / "b" / "a.csv"],
            [("../x", b"")],
            [("data/x", b"")],
            [("big", b"x" * (65 * 1024 * 1024))],
        ):
            with pytest.raises(BadRequest, match="cannot hand in"):
                await solver.run("x", files=bad)
    assert list((tmp_path / "turns").iterdir()) == []


async def test_produced_files_stay_on_disk(build, tmp_path, executor):
    """The result says where they are."""
    executor.outcome = {"files": {"report.html": b"<p>", "a.csv": b"changed"}}
    one = tmp_path / "a.csv"
    one.write_text("1")
    async with build([call("exec_python", code="1"), say("ok")]) as system:
        result = await ReactSolver(system).run("x", files=[one])
    (file,) = result.files
    assert (file.path, file.media_type, file.size) == ("report.html", "text/html", 3)
    assert await asyncio.to_thread(Path(file.location).read_bytes) == b"<p>"
    assert "read-only" in result.steps[0].calls[0].result
