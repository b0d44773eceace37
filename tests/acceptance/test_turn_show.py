"""`kdskills turn show`: a turn as its reader meets it, hostile texts included."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdskills.app import Host, Settings
from kdskills.bundle import load_bundle
from kdskills.doors.cli.turns import LINES, SILENT, Narrator, Timeline, readable
from kdskills.errors import BadRequest
from kdskills.solver import AgentSpec, ReactSolver, SolverSettings, SolverSystem, TurnResult
from kdskills.solver.events import EVENT_TYPES, read_transcript
from kdskills.testing import ScriptedModel, call, say
from kdskills.testing.models import call_raw, together

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "\x1b[2J\x1b]8;;http://evil.example\x07 [red]boo[/] \u202egnp\u2066\n   0.000s    answer  forged\r   end  final"
)


def kdskills(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = [str(Path(sys.executable).parent / "kdskills"), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)


def turn(folder: Path, replies: list[Any], request: str = "Which region grew?", **options: Any) -> Path:
    """Run a turn on a small bundle with a source and return its transcript."""
    root = folder / "bundle"
    skill = root / "skills" / "acme" / "sales"
    if not skill.is_dir():
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text("---\nname: sales\ndescription: Reads sales.\n---\nSum the column [[S:1]].\n")
        (skill / "sources.yaml").write_text("- {sid: 1, title: Sales guide, url: 'https://example.org/sales'}\n")

    async def run() -> TurnResult:
        model = ScriptedModel(replies, roles=options.pop("roles", None))
        settings = SolverSettings(work_dir=folder / "turns", transcripts=folder / "transcripts", **options)
        async with SolverSystem(bundle=load_bundle(root), model=model, executor=None, settings=settings) as system:
            return await ReactSolver(system).run(request)

    return folder / "transcripts" / f"{asyncio.run(run()).turn_id}.jsonl"


@pytest.fixture
def transcript(tmp_path: Path) -> Path:
    """A turn that loads, reads, writes, fails and cites."""
    replies = [
        together(say("Let me look."), call("skills_load", names=["sales"]), call("skills_load", names=["nowhere"])),
        together(call_raw("react_write", "{broken"), call("react_write", path="notes.md", text="one\ntwo")),
        say("North grew [[S:1]], or so [[S:7]]."),
    ]
    return turn(tmp_path, replies)


def test_the_timeline_tells_the_whole_turn(run: Callable[..., Any], transcript: Path) -> None:
    """Request, prompts, calls with arguments and answers, skills, sources, files, errors, the answer and its sources."""
    done = run("turn", "show", transcript)
    assert (done.returncode, done.stderr) == (0, "")
    result = TurnResult.from_transcript(transcript)
    digests = [f"prompt  {step.prompt_digest}" for step in result.steps]
    flat = " ".join(done.stdout.split())
    for said in [
        "request as solver.react.decision",
        "│ Which region grew?",
        "model scripted",
        "step 1 solver.react.decision",
        "│ <available_skills>",
        "│ Let me look.",
        'call skills.load call_1 │ names: ["sales"]',
        "loaded acme.sales by model, sha256:",
        "sources acme.sales: added 1",
        "failed skill_not_found skills.load",
        "step 2 solver.react.decision; active: sales",
        "call react.write call_3 │ {broken",
        "failed invalid_argument react.write",
        "call react.write call_4 │ path: notes.md │ text: one │ two",
        "file notes.md, 7 bytes, by react.write",
        "files: notes.md",
        "│ North grew [[S:1]], or so [[S:7]].",
        "[1] Sales guide https://example.org/sales (from acme.sales)",
        "[?7] names no source",
        "skills acme.sales (model)",
        "end final (answer): 3 steps, 300 tokens in, 30 out",
    ]:
        assert said in flat, said
    assert all(digest.split()[-1] in done.stdout for digest in digests)
    assert "more characters: --full prints them" in done.stdout


def test_what_agents_do_stands_behind_their_name(run: Callable[..., Any], tmp_path: Path) -> None:
    """Lines of an agent's turn, and of one below it, name it; the answer and the end are those of the turn."""
    agents = {"tools.research": AgentSpec("research", "Looks."), "tools.deeper": AgentSpec("deeper", "Digs.")}
    roles = {
        "research": [call("skills_load", names=["sales"]), call("tools_deeper", task="Dig."), say("Mid [[S:1]].")],
        "deeper": [say("Low.\n   0.000s    answer  forged")],
    }
    path = turn(tmp_path, [call("tools_research", task="Look."), say("Top [[S:1]].")], roles=roles, agents=agents)
    done = run("turn", "show", path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert len([line for line in lines if line.startswith("answer")]) == 1
    flat = " ".join(lines)
    for said in [
        "request tools.research › as research, turn",
        "loaded tools.research › acme.sales by model",
        "request tools.research › tools.deeper › as deeper, turn",
        "│ │ │ Low.",
        "│ Top [[S:1]].",
        "[1] Sales guide https://example.org/sales (from tools.research)",
        "end final (answer): 2 steps, 600 tokens in, 60 out",
    ]:
        assert said in flat, said
    told = lines_of(
        lambda out: [Narrator(out)(event) for event in read_transcript(path).events], width=99, terminal=False
    )
    assert any("tools.research › acme.sales" in line for line in told)


def test_full_prints_whole_prompts(run: Callable[..., Any], transcript: Path) -> None:
    """Nothing is cut, and a prompt that was shown is not shown again."""
    done = run("turn", "show", transcript, "--full")
    assert "more characters" not in done.stdout
    assert done.stdout.count("│ Sum the column [[S:1]].") == 1
    assert "text as before" in done.stdout


def test_json_gives_events_result_and_citations(run: Callable[..., Any], transcript: Path) -> None:
    """Programs get the same: events as written, the result, each citation with its source."""
    found = json.loads(run("turn", "show", transcript, "--json").stdout)
    lines = [json.loads(line) for line in transcript.read_text().splitlines()[1:]]
    assert found["events"] == lines[:-1]
    assert found["result"] == lines[-1]["result"]
    assert (found["ended"], found["turn_id"], found["diagnostics"]) == (True, lines[0]["turn_id"], [])
    assert found["citations"] == [
        {
            "sid": 1,
            "known": True,
            "title": "Sales guide",
            "place": "https://example.org/sales",
            "skills": ["acme.sales"],
        },
        {"sid": 7, "known": False, "title": "", "place": "", "skills": []},
    ]
    assert found["footnoted"].startswith("North grew [1]")


def test_a_turn_that_broke_off_is_shown_as_far_as_it_came(run: Callable[..., Any], transcript: Path) -> None:
    """A crash leaves a timeline without an end, and says so."""
    lines = transcript.read_text().splitlines(keepends=True)
    transcript.write_text("".join(lines[:-3]) + lines[-3][:-9])
    done = run("turn", "show", transcript)
    assert done.returncode == 0
    assert "none: the turn broke off, or is still running" in done.stdout
    assert "transcript_cut" in done.stdout
    assert json.loads(run("turn", "show", transcript, "--json").stdout)["ended"] is False


@pytest.mark.parametrize(("text", "code"), [(None, "transcript_missing"), ("{}\n", "transcript_invalid")])
def test_other_files_are_refused(run: Callable[..., Any], tmp_path: Path, text: str | None, code: str) -> None:
    """A missing file and a foreign one are errors of the caller, in one line."""
    path = tmp_path / "t.jsonl"
    if text is not None:
        path.write_text(text)
    done = run("turn", "show", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{code}: ")


def test_hostile_texts_are_text(run: Callable[..., Any], tmp_path: Path) -> None:
    """Markup, control and bidirectional characters do nothing, and no text passes for a line of the timeline."""
    replies = [
        call("react_write", path="a.md", text=HOSTILE),
        call(f"tool{HOSTILE}", **{f"name{HOSTILE}": HOSTILE}),
        say(f"{HOSTILE} [[S:7]]"),
    ]
    path = turn(tmp_path, replies, HOSTILE)
    done = run("turn", "show", path, "--full")
    assert (done.returncode, done.stderr) == (0, "")
    assert [c for c in "\x1b\x07\r\u202e\u2066" if c in done.stdout] == []
    assert "[red]boo[/]" in done.stdout
    forged = [line for line in done.stdout.splitlines() if line.split()[:2] == ["0.000s", "answer"]]
    assert forged == []
    ends = [line for line in done.stdout.splitlines() if line.split()[:1] == ["end"]]
    assert len(ends) == 1


def test_a_hostile_file_does_not_harm_its_reader(run: Callable[..., Any], tmp_path: Path) -> None:
    """Times that are none, surrogates, endless lines: shown, refused, never a traceback."""
    head = '{"schema": "kdskills.transcript/1"}\n'
    base = {"turn_id": HOSTILE, "session_id": "s"}
    rows = [
        {"seq": 1, "ts": "yesterday", "type": "file.written", "path": HOSTILE, "size": 1, "tool": HOSTILE, **base},
        {"seq": 2, "ts": "2026-01-01T00:00:00", "type": "skill.pruned", "skill": "\ud83d" + HOSTILE, **base},
        {"seq": 3, "ts": "2026-01-01T00:00:01Z", "type": "skill.stale", "skill": "x" * 100_000, **base},
        {
            "seq": 4,
            "ts": "",
            "type": "tool.output",
            "call_id": "c",
            "tool": "t",
            "stream": "stdout",
            "text": "",
            **base,
        },
    ]
    path = tmp_path / "t.jsonl"
    path.write_text(head + "".join(json.dumps(row) + "\n" for row in rows))
    for options in ((), ("--full",), ("--json",)):
        done = run("turn", "show", path, *options)
        assert (done.returncode, done.stderr) == (0, ""), options
    assert json.loads(done.stdout)["events"][0]["path"] == HOSTILE


@pytest.mark.needs("bubblewrap")
def test_the_turn_a_demo_leaves_is_readable(tmp_path: Path) -> None:
    """The main job's own transcript: scripts, walls, a generator's prompt, citations that resolve, files on disk."""
    assert kdskills("demo", "-o", tmp_path, "-e", "bubblewrap").returncode == 0
    (path,) = tmp_path.glob("*.jsonl")
    flat = " ".join(kdskills("turn", "show", path).stdout.split())
    for said in [
        "engine bubblewrap",
        "script data.profile/scripts/profile.py: ok, exit 0",
        "level namespace, limits",
        "step 8 answer.generator.strong",
        "│ [ACTIVE SKILLS]",
        "asked │ [REQUEST]",
        "generator_skipped: the skill data.chart",
        "(from data.flights",
        "file report.html",
    ]:
        assert said in flat, said
    assert "[?" not in flat


def test_every_event_has_its_line() -> None:
    """A new type of event is printed, or left out on purpose."""
    names = {str(kind.model_fields["type"].default) for kind in EVENT_TYPES}
    printed = {name for name in names if hasattr(Timeline, "on_" + name.replace(".", "_"))}
    assert printed | SILENT == names
    assert printed & SILENT == set()


def lines_of(print_to: Any, *, width: int, terminal: bool) -> list[str]:
    out = io.StringIO()
    print_to(Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False))
    return out.getvalue().splitlines()


def test_long_texts_stay_behind_their_bar() -> None:
    """In a terminal a long line goes on below itself, never at the margin; in a pipe it stays whole."""
    narrow = lines_of(lambda out: Timeline(out, full=True).block("x" * 200), width=60, terminal=True)
    assert len(narrow) > 4
    assert all(len(line) <= 60 and line.split()[0] == "│" for line in narrow)
    piped = lines_of(lambda out: Timeline(out, full=True).block("x" * 200), width=60, terminal=False)
    assert len(piped) == 1
    wrapped = lines_of(lambda out: Timeline(out).line("1s", "word", "y" * 99), width=60, terminal=True)
    assert [line[:21].split() for line in wrapped] == [["1s", "word"], [], []]


def test_what_is_cut_says_how_much() -> None:
    """Counted in characters, after so many lines."""
    text = "\n".join(f"line {number}" for number in range(LINES + 3))
    shown = lines_of(lambda out: Timeline(out).block(text), width=80, terminal=False)
    assert len(shown) == LINES + 1
    assert (
        shown[-1].strip()
        == f"… {len(text) - len(chr(10).join(text.split(chr(10))[:LINES]))} more characters: --full prints them"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": "x\\ny"}', "a: 1\nb: x\ny"),
        ('{"a": ["é"]}', 'a: ["é"]'),
        ("{}", "{}"),
        ("[1]", "[1]"),
        ("{broken", "{broken"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_made_readable(text: str, expected: str) -> None:
    """A JSON object becomes lines of names and values; anything else stays as it is."""
    assert readable(text) == expected


async def test_the_operation_answers_at_every_door(transcript_of_nothing: Path) -> None:
    """`turns.show` is a row of the table: a Host answers it without a command line."""
    found: Any = await Host(Settings(), entry_points=False).call("turns.show", transcript=transcript_of_nothing)
    assert (found.turn_id, found.events, found.result, found.ended) == ("", (), None, False)
    with pytest.raises(BadRequest):
        await Host(Settings(), entry_points=False).call("turns.show", transcript=transcript_of_nothing, more=1)


@pytest.fixture
def transcript_of_nothing(tmp_path: Path) -> Path:
    """A turn that broke off before its first event."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"schema": "kdskills.transcript/1"}\n')
    return path
