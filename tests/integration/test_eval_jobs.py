"""Evaluations as durable work, with a real worker and a provider on loopback: to the end, killed, canceled, broken, robbed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from kdskills.app import Host
from kdskills.app.identity import LOCAL
from kdskills.app.operations import Context
from kdskills.evals.results import EvalsRefused, EvalWorkspace, read_iteration
from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts
from kdskills.testing.model_server import ModelServer
from kdskills.testing.models import call, say
from kdskills.testing.work import WorkLab

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(400), pytest.mark.xdist_group("work")]

LONG = 300.0
SKILL = "---\nname: {name}\ndescription: {does}\n---\nDo it.\n"
PROMPTS = {f"row-{number}": f"Prompt number {number}." for number in range(6)}
SCRIPT_ROWS = "- {script: scripts/say.sh, expect: {stdout: said}}\n- {id: wrong, script: scripts/say.sh, expect: {stdout: sung}}\n"


class Answers:
    """Loads `sums`, or what is planted for a prompt; holds the requests after the third until it is let go."""

    def __init__(self, *, holding=False):
        self.planted = {}
        self.holding, self.broken = holding, False
        self.count, self.reached, self.free = 0, threading.Event(), threading.Event()

    def __call__(self, request):
        self.count += 1
        if self.broken:
            return None
        if self.holding and self.count > 3 and not self.free.is_set():
            self.reached.set()
            self.free.wait(LONG)
        planted = next((reply for name, reply in self.planted.items() if PROMPTS[name] in request.text), None)
        return planted or call("skills_load", names=["sums"])


@pytest.fixture
def bundle(tmp_path):
    """A bundle of two skills with six evaluations, and two rows of scripts."""
    root = tmp_path / "shop"
    for name, does in (("sums", "Adds numbers up."), ("words", "Counts words.")):
        (root / "skills/acme" / name).mkdir(parents=True)
        (root / "skills/acme" / name / "SKILL.md").write_text(SKILL.format(name=name, does=does))
    rows = [{"id": name, "prompt": prompt, "expected_skill": "sums"} for name, prompt in PROMPTS.items()]
    (root / "evals").mkdir()
    (root / "evals/rows.json").write_text(json.dumps(rows))
    (root / "skills/acme/sums/scripts").mkdir()
    (root / "skills/acme/sums/scripts/say.sh").write_text("echo said\n")
    (root / "skills/acme/sums/evals").mkdir()
    (root / "skills/acme/sums/evals/scripts.yaml").write_text(SCRIPT_ROWS)
    return root


@pytest.fixture
def answers():
    """What the provider answers."""
    return Answers()


def text_in(*path):
    """What stands in a file."""
    return Path(*path).read_text()


class Desk:
    """A host with a worker, and somebody who asks it for evaluations."""

    def __init__(self, lab, bundle, server, answers):
        self.lab, self.bundle, self.server, self.answers = lab, bundle, server, answers
        self.host = Host(lab.settings)
        self.host.work.__dict__["client"] = lab.client  # which starts no worker beside those of the test

    async def __call__(self, operation, key=None, **arguments):
        context = Context(identity=LOCAL, idempotency_key=key)
        return await asyncio.wait_for(self.host.invoke(operation, arguments, context), LONG)

    async def start(self, kind="trigger", **arguments):
        """Start evaluations of the bundle and return the job's id."""
        return (await self("evals.start", **({"kind": kind, "bundle": self.bundle} | arguments))).job_id

    async def over(self, job):
        """Wait for a job's end and return how it stands then."""
        status = await self("evals.status", job_id=job, wait_sec=LONG)
        assert status.status in {"succeeded", "failed", "canceled"}, (status, self.lab.said())
        return status

    async def held(self):
        """Wait until the provider holds a request."""
        assert await asyncio.to_thread(self.answers.reached.wait, LONG), self.lab.said()

    def runner(self):
        """The folder, the shim and the runner of the one living attempt."""
        attempts = Attempts(self.lab.settings.state_dir)
        (task,) = attempts.tasks()
        attempt = attempts.latest(task)
        return attempt.folder, shim.read_identity(attempt.folder)["pid"], attempt.facts().runner.pid

    @property
    def asked(self):
        """How often the provider was asked about each evaluation."""
        texts = [request.text for request in self.server.requests]
        return Counter({name: sum(prompt in text for text in texts) for name, prompt in PROMPTS.items()})


@pytest.fixture
async def desk(bundle, answers, monkeypatch):
    """A host whose worker, and whoever follows it, asks a provider on loopback."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ModelServer(answers) as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
        settings = {"executor": "bubblewrap", "model": f"openai:tiny@{server.url}/v1", "bundle": bundle}
        lab = WorkLab(Path(top), engine_settings=settings)
        lab.start()
        yield Desk(lab, bundle, server, answers)
        answers.free.set()
        await lab.aclose()


async def test_a_job_runs_to_its_end(desk, answers, tmp_path):
    """Its rows are its steps, its figures exactly the planted ones, and other operations know it as a job."""
    answers.planted = {"row-1": call("skills_load", names=["words"]), "row-2": say("Nothing needed.")}
    started = await desk("evals.start", key="once", kind="trigger", jobs=2)
    assert (started.status, started.workspace) == ("queued", tmp_path / "shop-workspace")
    assert (await desk("evals.start", key="once", kind="trigger", jobs=2)).job_id == started.job_id
    status = await desk.over(started.job_id)
    assert (status.status, status.error_code, status.complete) == ("succeeded", None, True)
    assert (status.done, status.total, status.counts) == (6, 6, {"passed": 4, "failed": 2})
    figures = status.figures["with_skill"]
    assert (figures["precision"]["hits"], figures["precision"]["total"]) == (4, 5)
    assert (figures["recall"]["hits"], figures["recall"]["total"]) == (4, 6)
    assert figures["confused"] == {"acme.sums": {"acme.sums": 4, "acme.words": 1, "(none)": 1}}
    steps = {step.eval: (step.status, step.picked) for step in status.steps}
    assert steps == dict.fromkeys(PROMPTS, ("passed", ("acme.sums",))) | {
        "row-1": ("failed", ("acme.words",)),
        "row-2": ("failed", ()),
    }
    assert status.tokens == sum(step.tokens for step in status.steps) > 0
    assert json.loads(text_in(status.folder, "benchmark.json"))["kdskills"]["figures"] == status.figures
    assert "<html" in text_in(status.report)
    job = await desk("skills.job_status", job_id=started.job_id)
    assert [(step.name, step.status, step.tries) for step in job.steps] == [("rows", "succeeded", 1)]
    assert job.steps[0].stdout_tail.splitlines()[-1] == "6 of 6 rows: 2 failed, 4 passed"


async def test_rows_of_scripts_need_no_provider(desk):
    """The rows of `evals/scripts.yaml` land in an iteration, too, which `resume` finds complete."""
    status = await desk.over(await desk.start("scripts"))
    assert (status.status, status.counts, status.complete) == ("succeeded", {"passed": 1, "failed": 1}, True)
    assert [step.status for step in status.steps] == ["passed", "failed"]
    again = await desk.over(await desk.start("scripts", resume=True))
    assert (again.folder, again.done, again.status) == (status.folder, 2, "succeeded")
    assert len(text_in(status.folder, "rows.jsonl").splitlines()) == 2
    assert desk.server.requests == []


def _kill_runner(desk):
    os.kill(desk.runner()[2], signal.SIGKILL)


def _kill_worker(desk):
    desk.lab.kill_with_launcher()
    desk.lab.start()


def _kill_everything(desk):
    _, watcher, runner = desk.runner()
    desk.lab.kill_with_launcher()
    for pid in (watcher, runner):
        os.kill(pid, signal.SIGKILL)
    desk.lab.start()


@pytest.mark.parametrize("kill", [_kill_runner, _kill_worker, _kill_everything])
async def test_no_row_runs_twice_after_a_kill(desk, answers, kill):
    """Killed in the middle, whatever of it: the job goes on by itself, and asks about nothing again that had ended."""
    answers.holding = True
    job = await desk.start()
    await desk.held()
    folder = Path((await desk("evals.status", job_id=job)).folder)
    done = {row.eval for row in read_iteration(folder).rows}
    assert len(done) == 3
    kill(desk)
    await desk.lab.started()
    answers.free.set()
    status = await desk.over(job)
    assert (status.status, status.counts, status.folder) == ("succeeded", {"passed": 6}, str(folder))
    assert status.figures["with_skill"]["f1"] == 1.0
    again = 1 if kill is _kill_worker else 2  # the request that was held was of a runner that lived on, or did not
    assert desk.asked == dict.fromkeys(PROMPTS, 1) | {"row-3": again}
    lines = [json.loads(line)["eval"] for line in text_in(folder, "rows.jsonl").splitlines()]
    assert sorted(lines) == sorted(PROMPTS), "one line for each row"
    assert EvalWorkspace(folder.parent).numbers() == [1]


async def test_a_cancel_keeps_what_has_ended(desk, answers):
    """What had landed stays, with figures and a report; a later job goes on with it."""
    answers.holding = True
    job = await desk.start()
    await desk.held()
    running = await desk("evals.status", job_id=job)
    assert (running.status, running.done, running.total, running.report) == ("running", 3, 6, None)
    assert [step.status for step in running.steps] == ["passed"] * 3 + ["queued"] * 3
    assert (await desk("evals.cancel", job_id=job, reason="enough")).canceled
    status = await desk.over(job)
    assert (status.status, status.error_code, status.cancel_requested) == ("canceled", "canceled", True)
    assert (status.counts, status.complete) == ({"passed": 3}, False)
    assert [step.status for step in status.steps] == ["passed"] * 3 + ["skipped"] * 3
    assert "skipped" not in text_in(status.report)
    assert not (await desk("evals.cancel", job_id=job)).canceled, "it is over"
    answers.free.set()
    later = await desk.over(await desk.start(resume=True))
    assert (later.status, later.folder, later.counts) == ("succeeded", status.folder, {"passed": 6})
    assert desk.asked == dict.fromkeys(PROMPTS, 1) | {"row-3": 2}
    assert (await desk("evals.status", job_id=job)).folder == status.folder, "the canceled job still knows it"


async def test_a_broken_provider_makes_errors(desk, answers):
    """A provider that refuses makes rows `error`, not `failed`; the job says so, and `resume` runs only these."""
    answers.broken = True
    job = await desk.start()
    status = await desk.over(job)
    assert (status.status, status.error_code, status.counts) == ("failed", "evals_incomplete", {"error": 6})
    assert {step.error[0] for step in status.steps} == {"model_failed"}
    assert status.figures["with_skill"]["recall"]["total"] == 0
    answers.broken = False
    mended = await desk.over(await desk.start(resume=True))
    assert (mended.status, mended.folder, mended.counts) == ("succeeded", status.folder, {"passed": 6})


async def test_a_ceiling_stops_before(desk):
    """The rows beyond the ceiling are told as not run, and the job as incomplete."""
    status = await desk.over(await desk.start(max_tokens_total=1))
    assert (status.status, status.error_code, status.done) == ("failed", "evals_incomplete", 0)
    assert desk.server.requests == []


@pytest.mark.parametrize("killed", [False, True])
async def test_a_workspace_that_is_deleted_ends_the_job(desk, answers, killed):
    """Nothing is written beside where it was, and nothing is begun anew: what had been asked would be asked again."""
    answers.holding = True
    job = await desk.start()
    await desk.held()
    shutil.rmtree(desk.bundle.with_name("shop-workspace"))
    if killed:
        _kill_runner(desk)
    answers.free.set()
    status = await desk.over(job)
    assert (status.status, status.error_code) == ("failed", "evals_none")
    assert (status.folder, status.report, status.steps, status.total) == (None, None, (), None)
    assert desk.asked.total() == 4
    assert EvalWorkspace(desk.bundle.with_name("shop-workspace")).numbers() == []


async def test_two_starts_on_one_workspace(desk, answers):
    """The second is refused and names the first; a run at another door waits for neither, and is refused, too."""
    answers.holding = True
    job = await desk.start()
    await desk.held()
    with pytest.raises(EvalsRefused) as caught:
        await desk.start("retrieval")
    assert (caught.value.code, caught.value.details["holder"]) == ("evals_running", job)
    with pytest.raises(EvalsRefused) as caught:
        await desk("evals.run", kind="retrieval", bundle=desk.bundle)
    assert caught.value.code == "evals_running"
    elsewhere = await desk.over(await desk.start("retrieval", workspace=desk.bundle.with_name("elsewhere")))
    assert (elsewhere.status, elsewhere.counts) == ("succeeded", {"passed": 6})
    answers.free.set()
    assert (await desk.over(job)).counts == {"passed": 6}
    assert (await desk.over(await desk.start("retrieval"))).folder.endswith("iteration-2")


async def test_a_workspace_that_somebody_else_holds(desk):
    """A job that finds a run of the command line in its workspace fails with the code of that."""
    with EvalWorkspace(desk.bundle.with_name("shop-workspace")).alone():
        status = await desk.over(await desk.start("retrieval"))
    assert (status.status, status.error_code, status.folder) == ("failed", "evals_running", None)


async def test_the_command_line_starts_and_waits(desk, tmp_path):
    """Paths are those of the caller's folder, a bundle whose code nobody trusts is refused, and a job's end is waited for."""
    config = {"state_dir": desk.lab.settings.state_dir, "executor": "bubblewrap", "bundle": desk.bundle}
    variables = os.environ | {f"KDSKILLS_{name.upper()}": str(value) for name, value in config.items()}
    program = str(Path(sys.executable).parent / "kdskills")

    async def said(*words, folder=tmp_path):
        process = await asyncio.create_subprocess_exec(
            program, "eval", *words, cwd=folder, env=variables, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), LONG)
        return process.returncode, out.decode()

    code, out = await said("start", "retrieval", "shop", "sums", "-w", "here", "--json")
    job = json.loads(out)["job_id"]
    assert (code, json.loads(out)["workspace"]) == (0, str(tmp_path / "here"))
    code, out = await said("status", job, "--wait", "120")
    assert (code, "succeeded: 6 of 6 rows: 6 passed; 0 tokens" in out) == (0, True), out
    assert "here/iteration-1/report.html" in out.replace("\n", "")
    assert (await said("cancel", job))[1].strip() == f"{job} was over: succeeded"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stranger = shutil.copytree(desk.bundle, tmp_path / "stranger")
    (stranger / "tools.py").write_text("raise SystemExit('it ran')\n")
    assert (await said("start", "retrieval", str(stranger), "--json", folder=elsewhere))[0] == 2
