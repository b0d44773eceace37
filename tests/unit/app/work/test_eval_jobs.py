"""Evaluations as durable work, before any worker takes them: who may start what, and what is pinned; and how jobs stand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host
from kdskills.app.identity import LOCAL, OPEN_SCOPES
from kdskills.app.operations import Context
from kdskills.app.operations.eval_jobs import EvalOrder
from kdskills.errors import BadRequest, BundleError, CallRefused, KdskillsError, NotFound
from kdskills.evals.results import EvalPlan, EvalsRefused, EvalWorkspace, RowResult
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import JobHead, step_task_id

REMOTE = replace(LOCAL, local=False, door="http", agent="reader", token="t1", tools=frozenset())
ADMIN = replace(REMOTE, scopes=OPEN_SCOPES | {"admin"})
MODEL = "openai:tiny"


@pytest.fixture
async def host(make_host, bundle: Path):
    """A Host whose work nobody runs, over a bundle with two evaluations."""
    (bundle / "evals").mkdir()
    rows = [
        {"id": "a", "prompt": "Do main.", "expected_skill": "main"},
        {"id": "b", "prompt": "Do.", "expected_skill": "lone"},
    ]
    (bundle / "evals/rows.json").write_text(json.dumps(rows))
    made = make_host(model=MODEL)
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def start(host: Host, context: Context | None = None, **arguments: Any) -> Any:
    """Start evaluations of the Host's bundle."""
    return await host.invoke("evals.start", {"kind": "trigger", **arguments}, context or Context())


async def head_of(host: Host, job: str) -> JobHead:
    """The head of a job."""
    return await host.work.job(LOCAL, job)


async def order_of(host: Host, job: str) -> EvalOrder:
    """What a worker is told of a job."""
    return EvalOrder.model_validate_json((await head_of(host, job)).spec.steps[0].command.argv[0])


async def test_everything_is_pinned(host: Host, bundle: Path, tmp_path: Path, monkeypatch) -> None:
    """A worker has another working folder and maybe other settings: paths are absolute, model and engine are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shorter.yaml").write_text("acme.main: Short.\n")
    words = {"bundle": "bundle", "against": "shorter.yaml", "workspace": "here", "judge": "replay:judged.yaml"}
    job = (await start(host, **words)).job_id
    order = await order_of(host, job)
    paths = (order.bundle, order.against, order.workspace, order.trusted)
    assert paths == (bundle, tmp_path / "shorter.yaml", tmp_path / "here", (bundle,))
    assert (order.model, order.executor, order.judge) == (MODEL, "wall", f"replay:{tmp_path}/judged.yaml")
    spec = (await head_of(host, job)).spec
    assert (spec.placement.evals, spec.placement.engine, spec.placement.network) == (True, "wall", ())
    assert (spec.steps[0].retry_on_lost, spec.steps[0].retry) == (True, 0)
    assert (await head_of(host, job)).home is not None, "the workspace is a folder of this machine"


async def test_no_command_of_a_caller_runs_outside_of_the_wall(host: Host) -> None:
    """What a caller starts by itself is never run as evaluations are, whatever it says, and whatever it refers to."""
    job = (await start(host)).job_id
    order = (await head_of(host, job)).spec.steps[0].command.argv[0]
    for operation, arguments in (
        ("skills.run_cmd_async", {"skill_name": "lone", "command": [order]}),
        (
            "skills.start_job",
            {"skill_name": "lone", "session_id": "s", "steps": [{"name": "rows", "command": [order]}]},
        ),
    ):
        for extra in ("evals", "placement"):
            with pytest.raises(BadRequest):
                await host.invoke(operation, {**arguments, extra: True}, Context())
        await host.invoke(operation, arguments, Context())
    assert {
        head.spec.placement.evals for head in await host.work.client.heads(JobHead, (await head_of(host, job)).scope)
    } == {
        False,
        True,
    }
    tasks = await host.invoke("tasks.list", {"steps": False}, Context())
    assert [(await host.work.task(LOCAL, row.task_id)).spec.placement.evals for row in tasks.tasks] == [False]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("bundle", "/etc"),
        ("workspace", "/etc"),
        ("against", "/etc/passwd"),
        ("baseline", "/etc"),
        ("model", "openai:dear"),
        ("judge", "openai:dear"),
        ("executor", "bare"),
    ],
)
async def test_callers_elsewhere_name_nothing_of_the_machine(host: Host, word: str, value: str) -> None:
    """Administrators elsewhere start evaluations of their project's bundle by the model of the settings, and choose neither."""
    with pytest.raises(CallRefused) as caught:
        await start(host, Context(identity=ADMIN), **{word: value})
    assert (caught.value.code, caught.value.details["argument"]) == ("not_yours_to_say", word)


async def test_administrators_elsewhere_start_what_the_settings_name(host: Host, bundle: Path) -> None:
    """Without a word of the machine it is the project's bundle, beside which the results lie."""
    started = await start(host, Context(identity=ADMIN), max_tokens_total=10_000, rate=10, jobs=2)
    order = await order_of(host, started.job_id)
    assert (order.bundle, order.model, started.workspace) == (bundle, MODEL, bundle.with_name("bundle-workspace"))
    assert (order.max_tokens_total, order.rate, order.jobs) == (10_000, 10, 2)
    status = await host.invoke("evals.status", {"job_id": started.job_id}, Context(identity=ADMIN))
    assert (status.status, status.folder, status.total, status.steps) == ("queued", None, None, ())


@pytest.mark.parametrize("operation", ["evals.start", "evals.status", "evals.cancel"])
async def test_evaluations_are_not_for_agents(host: Host, operation: str) -> None:
    """A caller who does not see everything is refused: they tell of every skill, and what the right answers are."""
    job = (await start(host, Context(identity=ADMIN))).job_id
    arguments = {"kind": "retrieval"} if operation == "evals.start" else {"job_id": job}
    agent = replace(REMOTE, scopes=OPEN_SCOPES)
    with pytest.raises(CallRefused) as caught:
        await host.invoke(operation, arguments, Context(identity=agent))
    assert (caught.value.code, caught.value.details["scope"]) == ("scope_missing", "admin")
    with pytest.raises(CallRefused):
        await host.invoke(operation, arguments, Context(identity=replace(ADMIN, scopes=frozenset({"skills:read"}))))
    with pytest.raises(NotFound if operation != "evals.start" else BadRequest):
        await host.invoke(operation, arguments, Context(identity=replace(ADMIN, project="other")))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"skills": ["acme.helper"]}, "evals_missing"),
        ({"model": "replay"}, "model_missing"),
        ({"kind": "run", "against": "x.yaml"}, "descriptions_invalid"),
        ({"baseline": "main"}, "side_invalid"),
        ({"kind": "scripts"}, "evals_missing"),
        ({"kind": "scripts", "skills": ["nobody"]}, "unknown_skill"),
        ({"kind": "lint"}, "bad_request"),
        ({"repeat": 0}, "bad_request"),
        ({"bundle": "/nowhere/at/all"}, "bundle_missing"),
        ({"workspace": "a\0b"}, "bad_request"),
    ],
)
async def test_what_cannot_run_is_refused_at_once(host: Host, arguments: dict[str, Any], code: str) -> None:
    """What a worker would find out is found out before there is a job."""
    with pytest.raises(KdskillsError) as caught:
        await start(host, **arguments)
    assert caught.value.code == code
    assert (await host.invoke("jobs.list", {}, Context())).jobs == ()


async def test_rows_of_scripts_that_cannot_be_read_are_refused(host: Host, bundle: Path) -> None:
    """No row is lost in silence: the finding says where."""
    (bundle / "skills/lone/evals").mkdir()
    (bundle / "skills/lone/evals/scripts.yaml").write_text("- {script: scripts/run.sh}\n- {scrpt: typo}\n")
    with pytest.raises(BadRequest) as caught:
        await start(host, kind="scripts")
    assert (caught.value.code, caught.value.details["errors"][0]["line"]) == ("script_eval_invalid", 2)


async def test_code_that_nobody_trusts_is_refused(host: Host, bundle: Path, tmp_path: Path, monkeypatch) -> None:
    """A stranger's folder with tools starts nothing; trusted once, a worker runs the code of this folder only."""
    stranger = shutil.copytree(bundle, tmp_path / "stranger")
    (stranger / "tools.py").write_text("raise SystemExit('it ran')\n")
    other = tmp_path / "elsewhere"
    other.mkdir()
    monkeypatch.chdir(other)
    at_terminal = Context(identity=replace(LOCAL, door="cli"))
    with pytest.raises(BundleError) as caught:
        await start(host, at_terminal, bundle=stranger)
    assert caught.value.code == "bundle_untrusted"
    with pytest.raises(BundleError):
        await start(host, at_terminal, kind="run", baseline=str(stranger))
    started = await start(host, replace(at_terminal, trust=True), bundle=stranger)
    assert (await order_of(host, started.job_id)).trusted == (stranger,)


async def test_a_key_starts_once_and_a_workspace_has_one_job(host: Host) -> None:
    """The same call under one key is one job; another call on the workspace is refused, and says which job has it."""
    context = Context(idempotency_key="k")
    job = (await start(host, context)).job_id
    assert (await start(host, context)).job_id == job
    with pytest.raises(KdskillsError) as caught:
        await start(host, context, repeat=2)
    assert caught.value.code == "conflict"
    with pytest.raises(EvalsRefused) as busy:
        await start(host)
    assert (busy.value.code, busy.value.details["holder"]) == ("evals_running", job)
    assert (await host.invoke("evals.cancel", {"job_id": job}, Context())).status == "canceled"
    assert (await start(host)).job_id != job, "what was canceled in the queue holds nothing"


async def test_other_jobs_are_none_of_evaluations(host: Host) -> None:
    """The id of a job of commands, or of nothing, is not found."""
    steps = [{"name": "one", "command": "true"}]
    job = (
        await host.invoke("skills.start_job", {"skill_name": "lone", "session_id": "s", "steps": steps}, Context())
    ).job_id
    for item in (job, "job_nobody", "\x7f"):
        for operation in ("evals.status", "evals.cancel"):
            with pytest.raises(NotFound):
                await host.invoke(operation, {"job_id": item}, Context())


async def test_rows_are_told_as_they_land(host: Host, bundle: Path) -> None:
    """Before a job is over its rows are queued or as they ended; afterwards those that are missing were skipped."""
    job = (await start(host)).job_id
    plan = EvalPlan(
        kind="trigger",
        bundle="bundle",
        consumer="c",
        evals={"a": "", "b": ""},
        repeats={"b": 2},
        total=3,
        tasks=(step_task_id(job, 0, 0),),
    )
    space = EvalWorkspace(bundle.with_name("bundle-workspace"))
    with space.alone():
        space.begin(plan.model_copy(update={"tasks": ("task_other",)}))
        folder = space.begin(plan)
        space.begin(plan.model_copy(update={"tasks": ()}))
        folder.add(RowResult(eval="a", status="passed", tokens=7, cost=0.5, picked=("acme.main",)))
        folder.add(RowResult(eval="b", repeat=1, status="error", tokens=2, error=("model_failed", "it is away")))
    with (folder.folder / "rows.jsonl").open("a") as stream:
        stream.write('{"eval": "b", "sta')
    status = await host.invoke("evals.status", {"job_id": job}, Context())
    assert [(step.eval, step.repeat, step.status) for step in status.steps] == [
        ("a", 0, "passed"),
        ("b", 0, "queued"),
        ("b", 1, "error"),
    ]
    assert (status.folder, status.done, status.total, status.counts) == (
        str(folder.folder),
        2,
        3,
        {"passed": 1, "error": 1},
    )
    assert (status.tokens, status.cost, status.complete, status.report) == (9, 0.5, False, None)
    assert status.steps[2].error == ("model_failed", "it is away")
    await host.invoke("evals.cancel", {"job_id": job}, Context())
    over = await host.invoke("evals.status", {"job_id": job, "wait_sec": 5}, Context())
    assert (over.status, [step.status for step in over.steps]) == ("canceled", ["passed", "skipped", "error"])
    (folder.folder / "rows.jsonl").write_text("{\n")
    with pytest.raises(EvalsRefused) as caught:
        await host.invoke("evals.status", {"job_id": job}, Context())
    assert caught.value.code == "evals_invalid"
