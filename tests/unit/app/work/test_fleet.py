"""How the fleet stands: hosts, workers, what waits and what is over; and hosts that are told to take nothing new."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, upkeep
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Context
from kdskills.doors.cli.main import build_cli
from kdskills.doors.web.application import build_app
from kdskills.errors import BadRequest, CallRefused, NotFound
from kdskills.jobs.client import MAX_COUNTED, Fleet, JobsClient
from kdskills.jobs.model import Scope
from kdskills.jobs.queue import Work, hold_slot
from kdskills.jobs.quotas import QuotaExceeded
from kdskills.projects.service import CollectReport
from kdskills.storage.database import micros, moment_of, utc_now
from kdskills.testing.work import keep_finished

ADMIN = Identity(scopes=frozenset({"admin"}), token="t", door="http")


@pytest.fixture
async def host(make_host):
    """A Host whose work nobody runs."""
    made = make_host()
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def ask(this: Host, name: str = "fleet.show", identity: Identity = LOCAL, **arguments: Any) -> Any:
    """Run an operation."""
    return await this.invoke(name, arguments, Context(identity=identity))


async def start(host: Host, identity: Identity = LOCAL, **more: Any) -> str:
    """Start a command in the background, and return its task."""
    answer = await ask(host, "skills.run_cmd_async", identity, skill_name="lone", command="true", **more)
    return str(answer.task_id)


def worker(work: Work, executor: str, **more: Any) -> None:
    """Put a worker into the roster."""
    now = micros(utc_now())
    row = {"host": "far", "slot": 0, "pid": 7, "name": "box", "state": "live", "started_at": now, "beat_at": now} | more
    work.database.change(lambda link: link.execute(work.tables.workers.insert().values(executor=executor, **row)))


async def test_an_empty_place(host: Host) -> None:
    """Before anything ever ran there is an answer all the same, with nothing in it."""
    told = await ask(host)
    assert (told.hosts, told.queue, told.waiting, told.pooled, told.version) == ((), (), 0, False, host.version)
    assert set(told.tasks) == {"queued", "starting", "running", "succeeded", "failed", "canceled"}
    assert set(told.tasks.values()) == {0}


async def test_workers_of_this_host_and_of_others(host: Host) -> None:
    """A worker lives by its lock here and by its lease elsewhere; version, places and what it has in hand are told."""
    work = await host.work.client.work()
    now = micros(utc_now())
    work.roster.enter("mine", 0)
    worker(work, "leased", lease_until=now + 60_000_000, beat_at=now - 5_000_000, version="9", slots=3, services=1)
    worker(work, "mute", slot=1, lease_until=now - 60_000_000, beat_at=now - 90_000_000, full_since=now)
    worker(work, "old", host="gone", name="gone", state="dead", started_at=1)
    worker(work, "older", host="gone", name="gone", state="dead", started_at=0)
    task = work.tables.tasks
    for status in ("starting", "running"):
        item = await start(host)
        values = {"status": status, "executor": "leased", "host": "far"}
        change = task.update().where(task.c.id == item).values(values)
        work.database.change(lambda link, change=change: link.execute(change))
    with hold_slot(work.state_dir, 0):
        told = await ask(host)
    hosts = {row.host: row for row in told.hosts}
    assert {name: row.state for name, row in hosts.items()} == {work.host: "live", "far": "live", "gone": "ended"}
    assert [row.here for row in told.hosts if row.host == work.host] == [True]
    (mine,) = hosts[work.host].workers
    limits = host.settings.jobs
    assert (mine.version, mine.slots, mine.services) == (host.version, limits.slots, limits.services)
    assert (mine.state, mine.lease_left_s, mine.beat_age_s < 60) == ("live", None, True)
    leased, mute = hosts["far"].workers
    assert (leased.state, leased.version, leased.slots, leased.commands) == ("live", "9", 3, 2)
    assert 50 < leased.lease_left_s <= 60
    assert 5 <= leased.beat_age_s < 60
    assert (mute.state, mute.version, mute.lease_left_s, mute.commands) == ("silent", None, 0.0, 0)
    assert (mute.full_since, leased.full_since) == (moment_of(now), None)
    assert [row.executor for row in hosts["gone"].workers] == ["old"]
    assert (told.tasks["starting"], told.tasks["running"]) == (1, 1)
    assert next(row for row in (await ask(host)).hosts if row.here).state == "silent"


async def test_what_waits_by_project(host: Host, bundle) -> None:
    """Tasks and jobs that wait are counted by project, what waits longest first; callers elsewhere see their own only."""
    await host.projects.create("acme", bundle=bundle, who="ann")
    await start(host, replace(LOCAL, project="acme"))
    for _ in range(2):
        await start(host)
    steps = [{"name": "x", "command": "true"}]
    await ask(host, "skills.start_job", skill_name="lone", session_id="s", steps=steps)
    told = await ask(host)
    assert [(row.project, row.waiting) for row in told.queue] == [("acme", 1), ("local", 3)]
    assert (told.waiting, told.tasks["queued"]) == (4, 3)
    assert all(0 <= row.oldest_age_s < 600 for row in told.queue)
    seen = await ask(host, identity=ADMIN)
    assert ([(row.project, row.waiting) for row in seen.queue], seen.waiting) == ([("local", 3)], 4)
    assert await ask(host, identity=replace(ADMIN, project="nothing", door="console"))


async def test_metrics_tell_what_waits_and_what_was_removed(host: Host) -> None:
    """What is queued is told by state, with how long the oldest has been, whoever asks; what upkeep removes, by kind."""
    await start(host)
    await ask(host, "skills.start_job", skill_name="lone", session_id="s", steps=[{"name": "x", "command": "true"}])
    task = (await host.work.client.work()).tables.tasks
    earlier = task.update().values(created_at=micros(utc_now()) - 90_000_000)
    (await host.work.client.work()).database.change(lambda link: link.execute(earlier))
    assert "kdskills_retention" in host.telemetry.scraped.text()
    await host.upkeep.collect()
    text = (await ask(host, "metrics.show", ADMIN)).text
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, state, count in (("queue_depth", "queued", 1), ("queue_depth", "running", 0), ("jobs", "queued", 1)):
        assert float(rows[f'kdskills_{name}{{state="{state}"}}']) == count
    assert 90 <= float(rows["kdskills_queue_oldest_seconds"]) < 600
    assert {name for name in rows if "retention" in name and "_total" in name} == {
        f'kdskills_retention_removed_total{{kind="{kind}"}}' for kind in ("hold", "version")
    }
    assert "acme" not in text


async def test_each_task_is_measured_once(host: Host, monkeypatch) -> None:
    """Whenever its record comes, and by whatever clock, what began and ended is told once; what was before it is not."""
    monkeypatch.setattr(upkeep, "MOST", 2)
    work, second = await host.work.client.work(), 1_000_000
    metrics, task = host.telemetry.scraped, work.tables.tasks

    def become(item: str, status: str, began_s: float, ended_s: float | None = None) -> None:
        now = micros(utc_now())
        values = {"status": status, "started_at": now + int(began_s * second)}
        values |= {} if ended_s is None else {"finished_at": now + int(ended_s * second)}
        work.database.change(lambda link: link.execute(task.update().where(task.c.id == item).values(values)))

    def told() -> tuple[float, float]:
        value = metrics.registry.get_sample_value
        runs = value("kdskills_run_duration_seconds_count", {"engine": "wall", "status": "succeeded"})
        return value("kdskills_task_starts_total") or 0.0, runs or 0.0

    items = [await start(host) for _ in range(8)]
    become(items[0], "running", -60)
    become(items[1], "succeeded", -60, -50)
    tally = await host.upkeep.measure()
    assert told() == (0, 0)
    become(items[0], "succeeded", -60, -40)  # its files were stored first
    become(items[2], "running", -500)  # of a slow clock
    tally = await host.upkeep.measure(tally)
    assert told() == (1, 1)
    become(items[2], "succeeded", -500, -400)
    become(items[3], "succeeded", 200, 300)  # of a fast one
    tally = await host.upkeep.measure(tally)
    assert told() == (2, 3)
    for number in (4, 5, 6):
        become(items[number], "running", -3)
    tally = await host.upkeep.measure(tally)
    for number in (4, 5, 6, 7):
        become(items[number], "succeeded", -3, -2)
    tally = await host.upkeep.measure(tally)  # two of four: it is so many at a time
    assert told()[1] == 5
    for _ in range(3):
        tally = await host.upkeep.measure(tally)
    assert told() == (6, 7)


async def test_upkeep_outlives_what_a_round_meets(make_host, monkeypatch, caplog) -> None:
    """A disk that fails, or anything else that nobody foresaw, is logged with where it was met; the next round collects."""
    host, again = make_host(collect_interval_s=0.01, pulse_s=0.01), asyncio.Event()
    met = [OSError(errno.EIO, "broken disk"), ValueError("a driver's own"), BadRequest("ours")]

    async def collect(**_: object) -> CollectReport:
        if met:
            raise met.pop(0)
        again.set()
        return CollectReport((), 0)

    monkeypatch.setattr(host.storage.projects, "collect", collect)
    running = asyncio.ensure_future(host.upkeep.run())
    try:
        async with asyncio.timeout(30):
            await again.wait()
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
        await host.work.aclose()
        await host.storage.aclose()
    told = [record for record in caplog.records if "upkeep" in record.message]
    assert [record.exc_info and str(record.exc_info[1]) for record in told] == [
        "[Errno 5] broken disk",
        "a driver's own",
        None,
    ]


@pytest.mark.parametrize("scopes", [{"skills:read", "work:run", "work:read", "skills:write"}, set()])
@pytest.mark.parametrize("name", ["fleet.show", "metrics.show", "fleet.drain", "fleet.undrain", "fleet.evict"])
async def test_it_is_for_administrators(host: Host, name: str, scopes: set[str]) -> None:
    """Nobody else learns what machines there are, nor stops them."""
    with pytest.raises(CallRefused) as refused:
        await ask(
            host, name, replace(ADMIN, scopes=frozenset(scopes)), **({} if name.endswith(".show") else {"host": "x"})
        )
    assert refused.value.code == "scope_missing"


async def test_a_host_is_drained_and_back_again(host: Host) -> None:
    """By its id or its name; who did it, and when, is told; doing it twice changes nothing."""
    work = await host.work.client.work()
    worker(work, "w", name="box")
    told = await ask(host, "fleet.drain", ADMIN, host="box")
    assert (told.host, told.name, told.drained, told.changed) == ("far", "box", True, True)
    assert (await ask(host, "fleet.drain", host="far")).changed is False
    (row,) = (await ask(host)).hosts
    assert (row.drained_by, row.drained_at is not None) == ("http:token:t", True)
    assert (await ask(host, "fleet.undrain", host="far")).changed is True
    assert (await ask(host, "fleet.undrain", host="box")).changed is False
    assert (await ask(host)).hosts[0].drained_at is None


async def test_which_host_is_meant(host: Host) -> None:
    """An unknown word is not found, a name that several have is told with their ids, an id goes before a name."""
    work = await host.work.client.work()
    worker(work, "a", host="one", name="box")
    worker(work, "b", host="two", name="box")
    worker(work, "c", host="box", name="three")
    for word in ("nothing", "' OR 1=1 --", "on", "\u202ebox"):
        with pytest.raises(NotFound):
            await ask(host, "fleet.drain", host=word)
    assert (await ask(host, "fleet.drain", host="box")).name == "three"
    work.database.change(
        lambda link: link.execute(work.tables.workers.delete().where(work.tables.workers.c.host == "box"))
    )
    with pytest.raises(BadRequest, match="one, two"):
        await ask(host, "fleet.drain", host="box")
    for wrong in ("", "x" * 256, 3):
        with pytest.raises(BadRequest):
            await ask(host, "fleet.drain", host=wrong)


async def test_administrators_of_one_project_stop_no_machine_of_all(host: Host) -> None:
    """Every project's work runs on these hosts: only the account and the service's own project drain them."""
    work = await host.work.client.work()
    worker(work, "w")
    for name in ("fleet.drain", "fleet.undrain", "fleet.evict"):
        with pytest.raises(CallRefused) as refused:
            await ask(host, name, replace(ADMIN, project="acme"), host="far")
        assert refused.value.code == "not_yours_to_say"
    assert (await ask(host)).hosts[0].drained_at is None


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)
async def test_the_cost_does_not_grow_with_what_is_kept(tmp_path, database: str | None, make_task) -> None:
    """With many finished tasks no statement walks through them: each asks an index, and counting ends by itself."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    client = JobsClient(database or f"sqlite:///{folder / 'work.db'}", folder)
    try:
        work = await client.work()
        first = await client.submit(make_task)
        await keep_finished(work.database, first.id, 20_000)
        asked: list[tuple[str, Any]] = []
        sa.event.listen(work.database.engine, "before_cursor_execute", lambda *row: asked.append((row[2], row[3])))
        state = await work.database.read(Fleet(work).state)
        looks = [(words, values) for words, values in asked if "kd_tasks" in words]
        assert state.counts["queued"] == 1
        assert 3000 < state.counts["succeeded"] <= 3700  # those of the last hour
        assert [(row.project, row.waiting) for row in state.waiting] == [(Scope().project, 1)]
        assert 0 < len(looks) <= len(asked) <= 13
        tasks = work.tables.tasks
        lately = tasks.update().where(tasks.c.id != first.id).values(finished_at=micros(utc_now()))
        await work.database.write(lambda link: link.execute(lately))
        assert (await work.database.read(Fleet(work).state)).counts["succeeded"] == MAX_COUNTED
        if work.database.dialect == "sqlite":

            def plans(link: sa.Connection) -> list[str]:
                rows = [link.exec_driver_sql(f"EXPLAIN QUERY PLAN {words}", values).all() for words, values in looks]
                return [str(row[3]) for plan in rows for row in plan]

            every = [plan for plan in await work.database.read(plans) if "kd_tasks" in plan]
            assert every
            assert [plan for plan in every if "INDEX kd_tasks_" not in plan] == []
    finally:
        await client.aclose()


def test_the_commands(make_host) -> None:
    """`kdskills fleet` shows it, `drain` and `undrain` tell what they did; an unknown host is exit code 2."""
    host = make_host()
    cli = get_command(build_cli(host))

    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli, list(words), obj=host)
        assert done.exit_code == code, (done.stdout, done.stderr)
        return str(done.stdout)

    assert "no worker was ever here" in run("fleet")
    work = Work(host.settings.work_database, host.settings.state_dir)
    worker(work, "w", name="b\x1b[31mox", host="far", full_since=1)
    work.close()
    assert "takes nothing new" in run("drain", "far")
    shown = run("fleet")
    assert ("\x1b" not in shown, "full" in shown) == (True, True)
    assert "drained" in json.dumps(json.loads(run("fleet", "--json"))["hosts"][0])
    assert "takes work again" in run("undrain", "far")
    assert "was not drained" in run("undrain", "far")
    run("drain", "nowhere", code=2)
    run("evict", "far", "--force", code=2)  # SQLite has one host: nobody else could take its work


async def test_quotas_are_told_and_kept(make_host) -> None:
    """What a project may have and has is told; what is too much is a 429 that says when to come back, by HTTP as well."""
    host = make_host(jobs={"quotas": {"queued": 1, "projects": {"acme": {"queued": 0}}}})
    settings = host.settings
    host.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    await start(host)
    with pytest.raises(QuotaExceeded):
        await start(host)
    told = {row.quota: (row.used, row.limit) for row in (await ask(host, "quota.show")).quotas}
    assert (told["queued"], told["tasks_per_day"], told["running"]) == ((1, 1), (1, None), (0, None))
    assert (await ask(host, "quota.show", project="acme")).quotas[1].limit == 0
    with pytest.raises(NotFound):
        await ask(host, "quota.show", replace(ADMIN, project="local"), project="acme")
    app = build_app(host, open_on_loopback=True)
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client:
        body = {"skill_name": "lone", "command": "true"}
        answer = await client.post("/projects/local/tools/skills.run_cmd_async", json=body)
    assert (answer.status_code, answer.json()["code"], answer.headers["Retry-After"]) == (429, "quota_exceeded", "5")
    await host.work.aclose()
    await host.storage.aclose()
