"""What is over is forgotten whole: head, workflow, artifacts, run folders; what is not over stays."""

import hashlib
import os
import shutil
import time

import pytest

from kdskills.errors import NotFound
from kdskills.jobs import shim
from kdskills.jobs.artifacts import INPUT_KEEP, ArtifactKeeper, open_artifacts
from kdskills.jobs.attempts import OutFile, cancel_attempt
from kdskills.jobs.model import FromArtifact, JobHead, TaskHead, step_task_id
from kdskills.jobs.queue import Roster
from kdskills.jobs.quotas import project_bytes
from kdskills.jobs.records import new_row
from kdskills.jobs.worker import Retention, end_leftovers
from kdskills.storage.database import micros, utc_now

DAY = 86_400_000_000


class Forgetful:
    """Artifacts that remember what they were told to forget."""

    def __init__(self):
        self.gone = []

    async def forget(self, task_ids):
        """Forget."""
        self.gone += task_ids

    async def tend(self):
        """Have nothing left over."""


@pytest.fixture
def artifacts():
    """Return where artifacts are."""
    return Forgetful()


def age(work, item, days, kind="task", status="succeeded"):
    """Let something be over for days."""
    table = work.records.table(kind)
    over = micros(utc_now()) - round(days * DAY)
    work.database.change(
        lambda link: link.execute(
            table.update().where(table.c.id == item).values(status=status, finished_at=over, host=work.host)
        )
    )


async def test_what_is_old_goes_whole(client, make, work, artifacts):
    """Head, artifacts and run folder of a task that was over for longer than it is kept."""
    old, young = await client.submit(make.task()), await client.submit(make.task())
    age(work, old.id, 8)
    age(work, young.id, 6)
    folder = work.state_dir / "runs" / old.id / "1"
    folder.mkdir(parents=True)
    assert await Retention(work, artifacts).round() == 1
    assert [head.id for head in await client.heads(TaskHead, make.scope)] == [young.id]
    assert artifacts.gone == [old.id]
    assert not folder.parent.exists()


async def test_what_is_not_over_stays(client, make, work, artifacts):
    """Old work that runs is not old."""
    head = await client.submit(make.task())
    age(work, head.id, 90, status="running")
    assert await Retention(work, artifacts).round() == 0
    assert (await client.head(TaskHead, make.scope, head.id)).status == "running"


async def test_a_project_keeps_so_many(client, make, open_place, artifacts):
    """Beyond the number a project keeps, those that ended first go; other projects are counted for themselves."""
    work = open_place(keep_per_project=3, retention_batch=2)
    ids = [(await client.submit(make.task())).id for _ in range(8)]
    for index, item in enumerate(ids):
        age(work, item, 1 - index / 100)
    other = await client.submit(make.task(scope=make.scope.model_copy(update={"project": "other"})))
    age(work, other.id, 2)
    assert await Retention(work, artifacts).round() == 5
    assert [head.id for head in await client.heads(TaskHead, make.scope)] == ids[:-4:-1]
    assert (await client.head(TaskHead, other.scope, other.id)).terminal


async def test_the_hosts_of_a_pool_keep_so_many_together(client, make, open_place, artifacts):
    """Each host removes what is its own of the oldest that are too many in the whole project, and nothing younger."""
    work = open_place(keep_per_project=3, retention_batch=1)
    silent(work, "w", "far", 0)
    ids = [(await client.submit(make.task())).id for _ in range(8)]
    for index, item in enumerate(ids):
        age(work, item, 1 - index / 100)
    put_on(work, "far", *ids[1::2])
    assert await Retention(work, artifacts).round() == 3
    heads = await client.heads(TaskHead, make.scope)
    assert [head.id for head in heads] == [ids[number] for number in (7, 6, 5, 3, 1)]


async def test_a_job_goes_with_its_steps(client, make, work, artifacts):
    """A job's tasks go with it, and never before it."""
    job = await client.submit(make.job("a"))
    step = step_task_id(job.id, 0, 0)
    row = new_row(step, make.task("s"), job.session_key, body_hash="", home=None)
    work.database.change(
        lambda link: work.records.add(
            link, "task", row | {"job_id": job.id, "step": 0, "try": 0, "status": "succeeded"}
        )
    )
    age(work, step, 30)
    assert await Retention(work, artifacts).round() == 0
    age(work, job.id, 8, kind="job")
    assert await Retention(work, artifacts).round() == 1
    assert artifacts.gone == [step]
    assert await client.heads(TaskHead, make.scope) == []
    assert await client.heads(JobHead, make.scope) == []


def put_on(work, host, *items):
    """Let every task, or some, have run on a host."""
    table = work.tables.tasks
    change = table.update().where(table.c.id.in_(items)) if items else table.update()
    work.database.change(lambda link: link.execute(change.values(host=host)))


def silent(work, executor, host, days):
    """Put a dead worker of a host into the roster, that was last heard of days ago."""
    Roster(work).enter(executor, 5)
    table = work.tables.workers
    heard = micros(utc_now()) - round(days * DAY)
    mine = table.update().where(table.c.executor == executor)
    work.database.change(lambda link: link.execute(mine.values(host=host, state="dead", beat_at=heard)))


async def test_another_hosts_folders_are_its_own(client, make, work, artifacts):
    """What ran on another host is forgotten there, where its folders are, as long as that host is heard of."""
    head = await client.submit(make.task())
    age(work, head.id, 30)
    put_on(work, "far")
    silent(work, "w", "far", 6)
    assert await Retention(work, artifacts).round() == 0
    assert (await client.head(TaskHead, make.scope, head.id)).terminal


async def test_what_ran_on_a_host_that_is_gone_goes_too(client, make, work, artifacts):
    """A host that has been silent for as long as work is kept holds nothing back: machines of a pool come and go."""
    old, young = await client.submit(make.task()), await client.submit(make.task())
    age(work, old.id, 30)
    age(work, young.id, 1)
    put_on(work, "far")
    silent(work, "w", "far", 8)
    retention = Retention(work, artifacts)
    assert [await retention.round() for _ in range(2)] == [0, 1]  # its worker is forgotten at the end of the first
    assert [head.id for head in await client.heads(TaskHead, make.scope)] == [young.id]


async def test_folders_nobody_knows_of_go(client, make, work, artifacts):
    """A host that comes back after its work was forgotten elsewhere removes old folders without a head, and no others."""
    head = await client.submit(make.task())
    runs, old = work.state_dir / "runs", time.time() - 8 * 86_400
    for name in ("unknown-old", "unknown-young", "not ours", head.id):
        (runs / name / "1").mkdir(parents=True)
        if name != "unknown-young":
            os.utime(runs / name, (old, old))
    await Retention(work, artifacts).round()
    assert sorted(path.name for path in runs.iterdir()) == sorted(["unknown-young", "not ours", head.id])


async def test_a_living_attempt_is_not_swept_away(client, work, artifacts):
    """An old folder something still lives in stays until that is ended."""
    folder = work.state_dir / "runs" / "unknown" / "1"
    folder.mkdir(parents=True)
    lock = shim.take_lock(folder)
    os.utime(folder.parent, (1, 1))
    await Retention(work, artifacts).round()
    assert folder.is_dir()
    os.close(lock)
    await Retention(work, artifacts).round()
    assert not folder.parent.exists()


async def test_a_round_that_was_killed_is_done_again(client, make, work, artifacts, monkeypatch):
    """The head goes last, so nothing is left that nobody knows of."""
    head = await client.submit(make.task())
    age(work, head.id, 8)

    def die(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(work.attempts, "remove", die)
    with pytest.raises(KeyboardInterrupt):
        await Retention(work, artifacts).round()
    assert (await client.head(TaskHead, make.scope, head.id)).terminal
    monkeypatch.undo()
    assert await Retention(work, artifacts).round() == 1


async def test_the_journal_is_given_back(client, make, work, artifacts):
    """SQLite's write-ahead log is emptied."""
    for _ in range(20):
        await client.submit(make.task())
    log = work.state_dir / "work.db-wal"
    assert log.stat().st_size > 0
    await Retention(work, artifacts).round()
    assert log.stat().st_size == 0


async def test_a_project_keeps_so_many_bytes(client, make, open_place):
    """What ended first goes until the sum fits, to the byte: contents count once, jobs go whole, what runs stays."""
    work = open_place(retention_batch=2, log_bytes=2**20, keep_s=30 * 86_400.0)
    keeper = ArtifactKeeper(open_artifacts(str(work.state_dir)), work.database, work.tables, work.state_dir / "inputs")

    async def over(days, printed=0, content=b"", status="succeeded", project="local", job=None):
        head = await client.submit(make.task(scope=make.scope.model_copy(update={"project": project})))
        age(work, head.id, days, status=status)
        values, table = {"stdout_total": printed, "job_id": job}, work.tables.tasks
        work.database.change(lambda link: link.execute(table.update().where(table.c.id == head.id).values(values)))
        if content:
            (work.state_dir / "out").write_bytes(content)
            left = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "mode": 0o600}
            await keeper.keep(head, [OutFile(path="out", file="out", **left)], work.state_dir)
        return head.id

    def used():
        return work.database.ask(lambda link: project_bytes(link, work.tables, 2**20))[
            make.scope.tenant, make.scope.project
        ]

    async def ids():
        return {head.id for kind in (TaskHead, JobHead) for head in await client.heads(kind, make.scope)}

    runs = await over(9, printed=1000, status="running")
    first = await over(8, printed=3 * 2**20, content=b"own" * 100)  # of which one MiB is kept
    second = await over(7, printed=400, content=b"shared" * 50)
    job = (await client.submit(make.job("one"))).id
    age(work, job, 5, kind="job", status="failed")
    step = await over(7.5, printed=100, job=job)
    last = await over(4, printed=50, content=b"shared" * 50)
    total = 1000 + (2**20 + 300) + 400 + 300 + 100 + 50
    assert used() == total
    steps = (
        (total, set()),
        (total - 1, {first}),
        (total - 2**20 - 300, set()),  # what is left has so many, to the byte
        (1000 + 100 + 50 + 300, {second}),  # its content is still another's
        (1000 + 50 + 300, {job, step}),
        (1, {last}),
    )
    for most, gone in steps:
        before = await ids()
        work.settings = work.settings.model_copy(update={"keep_bytes_per_project": most})
        await Retention(work, keeper).round()
        assert before - await ids() == gone, most
        assert used() <= max(most, 1000)
    assert await ids() == {runs}
    other = await over(10, printed=10**6, project="other")
    work.settings = work.settings.model_copy(update={"keep_bytes_per_project": 10**6})
    assert await Retention(work, keeper).round() == 0
    assert (await client.head(TaskHead, make.scope.model_copy(update={"project": "other"}), other)).terminal


@pytest.mark.parametrize(
    "bound",
    [{"keep_bytes_per_project": 1}, {"keep_s": 60.0}, {"keep_per_project": 1}],
    ids=lambda bound: next(iter(bound)),
)
async def test_inputs_of_what_waits_stay(client, make, open_place, bound):
    """A project beyond a bound keeps the artifacts that work which is not over yet takes as inputs, and then lets them go."""
    work = open_place(**{"keep_s": 30 * 86_400.0, "retention_batch": 1} | bound)
    keeper = ArtifactKeeper(open_artifacts(str(work.state_dir)), work.database, work.tables, work.state_dir / "inputs")
    made, other = await client.submit(make.task()), await client.submit(make.task())
    (work.state_dir / "out").write_bytes(b"needed" * 100)
    left = OutFile(path="out", file="out", size=600, sha256=hashlib.sha256(b"needed" * 100).hexdigest(), mode=0o600)
    (ref,) = await keeper.keep(made, [left], work.state_dir)
    command = make.command(inputs=(FromArtifact(path="in", artifact_id=ref.artifact_id),))
    job = make.job("a")
    step = job.steps[0].model_copy(update={"command": command})
    waiting = await client.submit(job.model_copy(update={"steps": (step,)}))
    age(work, made.id, 5)
    age(work, other.id, 3)
    assert await Retention(work, keeper).round() == ("keep_per_project" not in bound)
    await keeper.require(make.scope, [ref.artifact_id])
    age(work, waiting.id, 4, kind="job")
    assert await Retention(work, keeper).round() >= 1
    with pytest.raises(NotFound):
        await client.head(TaskHead, make.scope, made.id)


async def test_old_inputs_go_when_nothing_takes_them(client, make, work):
    """Without any task that is due, inputs of calls that are old go with their bytes, but for those open work takes."""
    keeper = ArtifactKeeper(open_artifacts(str(work.state_dir)), work.database, work.tables, work.state_dir / "inputs")
    ids = [await keeper.keep_input(make.scope, data) for data in (b"unused", b"wanted", b"young")]
    table, old = work.tables.artifacts, micros(utc_now() - INPUT_KEEP * 2)
    aging = table.update().where(table.c.id.in_(ids[:2])).values(created_at=old)
    work.database.change(lambda link: link.execute(aging))
    command = make.command(inputs=(FromArtifact(path="in", artifact_id=ids[1]),))
    waiting = await client.submit(make.task().model_copy(update={"command": command}))
    assert await Retention(work, keeper).round() == 0
    await keeper.require(make.scope, ids[1:])
    with pytest.raises(NotFound):
        await keeper.require(make.scope, ids[:1])
    assert not await keeper.store.has("local", hashlib.sha256(b"unused").hexdigest())
    age(work, waiting.id, 1)
    assert await Retention(work, keeper).round() == 0
    await keeper.require(make.scope, ids[2:])
    with pytest.raises(NotFound):
        await keeper.require(make.scope, ids[1:2])


async def test_folders_that_go_meanwhile_stop_no_round(work, artifacts, monkeypatch):
    """Folders others remove at the same moment, and files that are nobody's attempt, hide no program that must end."""
    runs = work.state_dir / "runs"
    for name in ("fleeting", "task_1"):
        (runs / name / "1").mkdir(parents=True)
    (runs / "stray").write_text("no folder")
    (runs / "task_1" / "stray").write_text("no attempt")
    listed = work.attempts.tasks()

    def tasks():
        shutil.rmtree(runs / "fleeting", ignore_errors=True)
        return listed

    monkeypatch.setattr(work.attempts, "tasks", tasks)
    lock = shim.take_lock(runs / "task_1" / "1")
    assert await end_leftovers(work) == 1
    os.close(lock)
    assert await end_leftovers(work) == 0
    assert cancel_attempt(runs / "fleeting" / "1") is False
    os.utime(runs / "stray", (1, 1))
    assert await Retention(work, artifacts).round() == 0
