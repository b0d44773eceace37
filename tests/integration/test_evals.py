"""Evaluations at the command line, against a provider on loopback: killed, gone on with, interrupted, recorded, replayed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from kdskills.testing.model_server import ModelServer
from kdskills.testing.models import call, say

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(400)]

KDSKILLS = str(Path(sys.executable).parent / "kdskills")
SKILL = "---\nname: {name}\ndescription: {does}\n---\nDo it.\n"
ROWS = [{"id": f"row-{number}", "prompt": f"Prompt number {number}.", "expected_skill": "sums"} for number in range(8)]


@pytest.fixture
def bundle(tmp_path):
    """A bundle of two skills with eight evaluations."""
    root = tmp_path / "shop"
    for name, does in (("sums", "Adds numbers up."), ("words", "Counts words.")):
        (root / "skills/acme" / name).mkdir(parents=True)
        (root / "skills/acme" / name / "SKILL.md").write_text(SKILL.format(name=name, does=does))
    (root / "evals").mkdir()
    (root / "evals/rows.json").write_text(json.dumps(ROWS))
    return root


def started(server, *words):
    """Start the installed command, its model a provider on loopback."""
    variables = os.environ | {"OPENAI_API_KEY": "none", "KDSKILLS_EXECUTOR": "bubblewrap", "NO_COLOR": "1"}
    command = [
        KDSKILLS,
        "eval",
        *map(str, words),
        *(() if {"-m", "judge"} & set(words) else ("-m", f"openai:tiny@{server.url}/v1")),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=variables, start_new_session=True, **pipes)


def ended(process, code):
    """What a command that ends with *code* printed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out


def asked(server):
    """How often the provider was asked about each prompt."""
    return Counter(row["prompt"] for request in server.requests for row in ROWS if row["prompt"] in request.text)


class Holding:
    """Answers until the third request, and holds that one and those after it until it is let go."""

    def __init__(self):
        self.count, self.reached, self.free = 0, threading.Event(), threading.Event()

    def __call__(self, request):
        self.count += 1
        if self.count > 3 and not self.free.is_set():
            self.reached.set()
            self.free.wait(120)
        return call("skills_load", names=["sums"])


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_is_gone_on_with(bundle, tmp_path, by):
    """Killed or interrupted in the middle: what ended stands, and going on asks about none of it again."""
    holding = Holding()
    with ModelServer(holding) as server:
        process = started(server, "trigger", bundle, "--jobs", "2")
        assert holding.reached.wait(120)
        folder = tmp_path / "shop-workspace/iteration-1"
        os.killpg(process.pid, by)
        ended(process, -by if by == signal.SIGKILL else 130)
        done = [json.loads(line)["eval"] for line in (folder / "rows.jsonl").read_text().splitlines()]
        assert 1 <= len(done) <= 3
        holding.free.set()
        answer = json.loads(ended(started(server, "trigger", bundle, "--jobs", "2", "--resume", "--json"), 0))
    times = asked(server)
    prompts = {row["id"]: row["prompt"] for row in ROWS}
    assert {times[prompts[name]] for name in done} == {1}
    assert sorted(row["eval"] for row in answer["rows"]) == sorted(prompts)
    assert {row["status"] for row in answer["rows"]} == {"passed"}
    assert (answer["missing"], answer["complete"], answer["figures"]["with_skill"]["f1"]) == (0, True, 1.0)
    lines = [json.loads(line)["eval"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert sorted(lines) == sorted(prompts), "one line for each row"
    assert not list(folder.glob("*/.new-*"))


def test_what_was_recorded_is_replayed_without_a_provider(bundle, tmp_path):
    """`--record` keeps each row's replies; from them the same rows come to the same again, now judged by a check."""
    (bundle / "evals/rows.json").write_text(json.dumps(ROWS[:3]))
    replies = [call("react_write", path="note.txt", text="noted"), say("It is noted.")]
    with ModelServer(replies * 4) as server:
        recorded = json.loads(
            ended(started(server, "run", bundle, "sums", "--record", "--json", "--max-tokens-total", "10000000"), 1)
        )
    checked = [row | {"kdskills": {"checks": [{"command": "grep -q noted note.txt"}]}} for row in ROWS[:2]]
    (bundle / "evals/rows.json").write_text(json.dumps(checked))
    assert [row["status"] for row in recorded["rows"][:4]] == ["ungraded"] * 4
    assert {row["error"][0] for row in recorded["rows"][4:]} == {"model_failed"}, "a provider that has no more"
    with ModelServer([]) as silent:
        command = started(silent, "run", bundle, "-m", f"replay:{recorded['folder']}", "--json")
        replayed = json.loads(ended(command, 0))
        assert silent.requests == []
    facts = [(row["eval"], row["side"], row["tokens"]) for row in replayed["rows"]]
    assert facts == [(row["eval"], row["side"], row["tokens"]) for row in recorded["rows"][:4]]
    assert {row["status"] for row in replayed["rows"]} == {"passed"}
    for row in replayed["rows"]:
        assert (Path(replayed["folder"]) / row["folder"] / "outputs/note.txt").read_text() == "noted"
    assert replayed["folder"].endswith("iteration-2")


def test_what_was_kept_is_judged_again(bundle):
    """`eval judge` asks a judge about outputs that are there, and runs commands on them; nothing of the turn runs again."""
    replies = [call("react_write", path="note.txt", text="noted"), say("It is noted.")]
    with ModelServer(replies * 4) as server:
        (bundle / "evals/rows.json").write_text(json.dumps(ROWS[:2]))
        kept = json.loads(ended(started(server, "run", bundle, "sums", "--json"), 0))
    changed = {"assertions": ["It says so."], "kdskills": {"checks": [{"command": "grep -q noted note.txt"}]}}
    (bundle / "evals/rows.json").write_text(json.dumps([ROWS[0] | changed, ROWS[1] | changed]))
    with ModelServer([call("final_answer", passed=True, evidence="It is noted.")] * 4) as server:
        command = started(server, "judge", bundle, kept["folder"], "--judge", f"openai:tiny@{server.url}/v1", "--json")
        judged = json.loads(ended(command, 0))
        assert len(server.requests) == 4
        assert all("It says so." in request.text for request in server.requests)
    assert [[verdict["passed"] for verdict in row["verdicts"]] for row in judged["rows"]] == [[True, True]] * 4
    assert {(change["change"], change["before"][0]) for change in judged["changes"]} == {("status", "ungraded")}
    with ModelServer([]) as server:
        assert "4 ungraded" not in ended(started(server, "judge", bundle, kept["folder"]), 0)
        shutil.copytree(kept["folder"], bundle / "work/iteration-1")
        inside = started(server, "judge", bundle, bundle / "work/iteration-1")
        assert (inside.communicate(timeout=120)[1].partition(":")[0], inside.returncode) == ("workspace_inside", 2)
        assert server.requests == []


def test_two_runs_at_once_are_refused(bundle):
    """The second says so in one line, and the first ends as if nothing had been."""
    holding = Holding()
    with ModelServer(holding) as server:
        first = started(server, "trigger", bundle)
        assert holding.reached.wait(120)
        second = started(server, "trigger", bundle)
        out, err = second.communicate(timeout=120)
        assert (second.returncode, out, err.partition(":")[0]) == (2, "", "evals_running")
        holding.free.set()
        assert "8 passed" in ended(first, 0)
