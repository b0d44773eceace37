"""The queue: whose turn it is in a session, who may take what, and what becomes of the work of those who are gone."""

import json
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

import kdskills.jobs.queue as queue_module
from kdskills.app.upkeep import NoWorker, Upkeep
from kdskills.jobs.client import Fleet
from kdskills.jobs.model import JobHead, Scope, TaskHead
from kdskills.jobs.queue import Capacity, Work, WorkQueue, hold_slot
from kdskills.jobs.records import head_of, new_row
from kdskills.storage.database import micros, utc_now

ROOM = Capacity(batch=100, service=100, job=100)


class Line:
    """A place with one living worker, `me`, and rows put into it as a test wants them."""

    def __init__(self, work, make):
        self.work, self.make = work, make
        self.number = 0
        self.worker("me", work.host)

    def queue(self, *, pooled=False, limit=None):
        """Return the queue of this host."""
        work = self.work
        return WorkQueue(
            work.records, work.roster, work.host, pooled=pooled, global_concurrency=limit, quotas=work.quotas
        )

    def change(self, change):
        """Change something."""
        return self.work.database.change(change)

    def worker(self, executor, host, *, state="live", lease_s=None):
        """Add a worker; one of a pool has a lease that ends in *lease_s* seconds."""
        table, now = self.work.tables.workers, micros(utc_now())
        until = None if lease_s is None else now + round(lease_s * 1_000_000)
        row = {"executor": executor, "host": host, "slot": 0, "pid": 1, "name": "n", "state": state}
        row |= {"started_at": now, "beat_at": now, "lease_until": until}
        self.change(lambda link: link.execute(table.insert().values(**row)))

    def task(self, item, session=None, *, again=False, **more):
        """Add a task that came after all others."""
        self.number += 1
        spec = self.make.task(session, retry_on_lost=again)
        key = item if session is None else Scope().session_key(session)
        row = new_row(item, spec, key, body_hash="", home=self.work.host) | {"created_at": self.number} | more
        self.change(lambda link: self.work.records.add(link, "task", row))

    def job(self, item, session="s", **more):
        """Add a job that came after all others."""
        self.number += 1
        row = new_row(
            item, self.make.job("a", session=session), Scope().session_key(session), body_hash="", home=self.work.host
        )
        row |= {"created_at": self.number} | more
        self.change(lambda link: self.work.records.add(link, "job", row))

    def end(self, item, kind="task"):
        """Let something be over."""
        table = self.work.records.table(kind)
        self.change(lambda link: link.execute(table.update().where(table.c.id == item).values(status="succeeded")))

    def settle(self, session, host):
        """Put a session's files on a host."""
        table = self.work.tables.sessions
        row = {"session_key": Scope().session_key(session), "host": host, "used_at": 1}
        self.change(lambda link: link.execute(table.insert().values(**row)))

    def claim(self, executor="me", capacity=ROOM, in_hand=(), **queue):
        """Claim, and return ids of tasks and jobs."""
        asked = self.queue(**queue)
        anything = self.work.database.ask(lambda link: asked.candidates(link, executor, capacity, in_hand))
        claim = self.change(lambda link: asked.claim(link, executor, capacity, in_hand))
        assert anything or not (claim.tasks or claim.jobs)
        return [head.id for head in claim.tasks] + list(claim.jobs)

    def head(self, item):
        """Return a task."""
        return self.work.database.ask(lambda link: self.work.records.head(link, TaskHead, item))


@pytest.fixture
def line(work, make):
    """Return the line."""
    return Line(work, make)


def test_what_waited_longest_comes_first(line):
    """Work without a session is taken in the order it came, as far as there is room; what is taken is `starting`."""
    for item in ("a", "b", "c"):
        line.task(item)
    assert line.claim(capacity=Capacity(2, 0, 0)) == ["a", "b"]
    head = line.head("a")
    assert (head.status, head.attempt, head.executor, head.host) == ("starting", 1, "me", line.work.host)
    assert line.claim(in_hand=("a", "b")) == ["c"]
    assert line.claim(in_hand=("a", "b", "c")) == []


def test_a_session_is_one_at_a_time_in_order(line):
    """The second of a session is nobody's before the first is over, also when both wait for the same worker."""
    for item in ("a", "b", "c"):
        line.task(item, "s")
    for item in ("a", "b", "c"):
        assert line.claim() == [item]
        assert line.claim(in_hand=(item,)) == []
        line.end(item)


def test_one_that_runs_is_not_overtaken_by_an_older_one(line):
    """What came into the table late, with an earlier time, waits for the one of its session that runs by now."""
    line.task("young", "s")
    assert line.claim() == ["young"]
    line.task("old", "s", created_at=0)
    assert line.claim(in_hand=("young",)) == []
    line.end("young")
    assert line.claim() == ["old"]


def test_jobs_and_tasks_share_the_line_of_a_session(line):
    """A job holds its session for all its steps; what came before it goes first."""
    line.task("before", "s")
    line.job("job", "s")
    line.task("after", "s")
    assert line.claim() == ["before"]
    line.end("before")
    assert line.claim() == ["job"]
    line.task("step", "s", job_id="job", step=0, **{"try": 0})
    assert line.claim(in_hand=("job",)) == ["step"]
    line.end("step")
    assert line.claim(in_hand=("job",)) == []
    line.end("job", "job")
    assert line.claim() == ["after"]


def test_a_full_worker_takes_what_it_has_room_for(line):
    """Commands, services and jobs have rooms of their own, and none keeps the others waiting."""
    line.task("batch")
    line.task("service", mode="service")
    line.job("job")
    assert line.claim(capacity=Capacity(0, 1, 0)) == ["service"]
    assert line.claim(capacity=Capacity(0, 0, 1), in_hand=("service",)) == ["job"]
    assert line.claim(capacity=Capacity(0, 0, 0), in_hand=("service", "job")) == []
    assert line.claim(capacity=Capacity(1, 0, 0), in_hand=("service", "job")) == ["batch"]


def test_orphans_of_this_host_are_adopted(line):
    """What a dead worker of this host had goes on under its next one, with the same attempt, room or not."""
    line.worker("dead", line.work.host, state="dead")
    line.task("ran", "s", status="running", attempt=3, executor="dead", host=line.work.host)
    line.job("job", "t", status="running", executor="dead", host=line.work.host)
    assert line.claim(capacity=Capacity(0, 0, 0)) == ["ran", "job"]
    assert (line.head("ran").status, line.head("ran").attempt, line.head("ran").executor) == ("running", 3, "me")


def test_what_the_living_have_stays_theirs(line):
    """Nothing is taken from a worker that lives, and nothing twice by one that has it in hand."""
    line.worker("other", line.work.host)
    line.task("theirs", status="running", attempt=1, executor="other", host=line.work.host)
    line.task("mine", status="running", attempt=1, executor="me", host=line.work.host)
    assert line.claim(in_hand=("mine",)) == []


def test_a_claim_whose_answer_was_lost_is_taken_up(line):
    """What is this worker's by its row and not in its hand is taken up: a commit may come through without its answer."""
    line.task("a")
    assert line.claim() == line.claim() == ["a"]
    assert line.head("a").attempt == 1


def test_the_dead_claim_nothing(line):
    """A worker that was buried, and one that never entered, get nothing."""
    line.worker("dead", line.work.host, state="dead")
    line.task("a")
    assert line.claim("dead") == line.claim("stranger") == []
    assert line.head("a").status == "queued"


def test_pinned_work_stays_with_its_host(line):
    """What is pinned elsewhere is not ours, and without a pool nothing unpinned is."""
    line.task("far", home="elsewhere")
    line.task("anyones", home=None)
    assert line.claim() == []
    assert line.claim(pooled=True) == ["anyones"]


@pytest.mark.parametrize(
    ("state", "lease_s", "taken"),
    [("live", 60, False), ("dead", 60, False), ("dead", -2, False), ("dead", -6, True)],
    ids=["alive", "ended in order", "within the fence", "gone"],
)
def test_a_session_goes_where_its_files_are(line, state, lease_s, taken):
    """Commands of a session are left to the host that has its files until that host's lease and its fence are over."""
    line.worker("far", "elsewhere", state=state, lease_s=lease_s)
    line.settle("s", "elsewhere")
    line.task("a", "s", home=None)
    line.job("b", "t", home=None)
    assert line.claim(pooled=True) == (["a", "b"] if taken else ["b"])


@pytest.mark.parametrize(
    ("state", "lease_s", "taken"),
    [("live", 60, False), ("dead", 60, False), ("dead", -2, False), ("dead", -6, True)],
    ids=["alive", "ended in order", "within the fence", "gone"],
)
def test_what_ran_elsewhere_is_taken_over_after_the_lease(line, state, lease_s, taken):
    """Programs of a worker that ended go on until their host's lease is over: nobody runs them anew before."""
    line.worker("far", "elsewhere", state=state, lease_s=lease_s)
    line.task("a", again=True, home=None, status="running", attempt=1, executor="far", host="elsewhere", ready_at=1)
    line.job("j", home=None, status="running", executor="far", host="elsewhere")
    assert line.claim(pooled=True) == (["a", "j"] if taken else [])
    if taken:
        head = line.head("a")
        assert (head.status, head.attempt, head.host, head.ready_at) == ("starting", 2, line.work.host, None)


def gone(line, *items, again=True, **more):
    """Add tasks that ran on a host that is gone."""
    line.worker(f"far-{items[0]}", "elsewhere", state="dead", lease_s=-60)
    for item in items:
        line.task(item, again=again, home=None, status="running", attempt=1, executor="far", host="elsewhere", **more)


def test_no_more_is_taken_over_than_there_is_room_for(line):
    """What a lost host ran begins anew as places get free, before what waits; other modes do not wait for it."""
    gone(line, "a", "b", "c")
    gone(line, "s", "t", mode="service")
    line.task("waits", home=None)
    assert line.claim(pooled=True, capacity=Capacity(2, 1, 9)) == ["a", "b", "s"]
    assert (line.head("c").status, line.head("c").attempt, line.head("c").host) == ("running", 1, "elsewhere")
    assert line.claim(pooled=True, capacity=Capacity(0, 0, 9), in_hand=("a", "b", "s")) == []
    assert line.claim(pooled=True, capacity=Capacity(1, 1, 9), in_hand=("a", "b", "s")) == ["c", "t"]


def test_what_is_lost_needs_no_room(line):
    """What may not begin a second time ends with its host though there is no room for it, and is not in another's way."""
    gone(line, "a", "b")
    gone(line, "lost", again=False)
    asked = line.queue(pooled=True)
    few = Capacity(0, 4, 0)
    for _ in range(2):
        claim = line.change(lambda link: asked.claim(link, "me", few, ()))
    assert (claim.tasks, claim.may_continue) == ((), False)
    assert [line.head(item).status for item in ("a", "b", "lost")] == ["running", "running", "failed"]


def test_what_runs_here_is_adopted_before_what_ran_elsewhere(line):
    """However much a lost host leaves, programs of this host are adopted, and count among what runs here."""
    gone(line, *(f"far-{number}" for number in range(8)))
    line.worker("dead", line.work.host, state="dead")
    for item in ("a", "b"):
        line.task(item, status="running", attempt=1, executor="dead", host=line.work.host)
    assert line.claim(pooled=True, capacity=Capacity(3, 0, 0)) == ["far-0", "a", "b"]
    assert line.claim(pooled=True, capacity=Capacity(0, 1, 0), in_hand=("a", "b", "far-0")) == []


def test_a_take_over_needs_no_place_in_the_pool(line):
    """What a lost host ran fills the pool's places until it is taken over, so that it waits for none of them."""
    gone(line, "a", "b")
    line.task("waits", home=None)
    assert line.claim(pooled=True, limit=2, capacity=Capacity(9, 9, 9)) == ["a", "b"]


def test_a_step_is_taken_over_with_its_job(line):
    """A step of a lost host goes where its job is by then, and nowhere else; of a job that is over it goes anywhere."""
    line.job("job", status="running", home=None, executor="far", host="elsewhere")
    gone(line, "step", session="s", job_id="job", step=0, **{"try": 0})
    asked = line.queue(pooled=True)
    assert line.claim(pooled=True, capacity=Capacity(9, 0, 0)) == []
    claim = line.change(lambda link: asked.claim(link, "me", Capacity(9, 0, 1), ()))
    assert (claim.jobs, claim.may_continue) == (("job",), True)
    assert line.claim(pooled=True, in_hand=("job",)) == ["step"]
    gone(line, "left", session="s", job_id="job", step=1, **{"try": 0})
    line.worker("third", "third", lease_s=60)
    line.change(lambda link: link.execute(line.work.tables.jobs.update().values(host="third", executor="third")))
    assert line.claim(pooled=True, in_hand=("step",)) == []
    line.end("job", "job")
    assert line.claim(pooled=True, in_hand=("step",)) == ["left"]


def test_at_most_once_is_lost_with_its_host(line):
    """Without `retry_on_lost` a takeover ends the task as lost, and what waited behind it goes on."""
    line.worker("far", "elsewhere", state="dead", lease_s=-60)
    line.task("a", "s", home=None, status="running", attempt=1, executor="far", host="elsewhere")
    line.task("b", "s", home=None)
    assert line.claim(pooled=True) == []
    head = line.head("a")
    assert (head.status, head.error_code, head.attempt) == ("failed", "lost", 1)
    assert "elsewhere is gone" in head.error_message
    assert line.claim(pooled=True) == ["b"]


def test_a_cancel_survives_the_host(line):
    """What was to be canceled on a host that is gone is canceled, not lost and not run again."""
    line.worker("far", "elsewhere", state="dead", lease_s=-60)
    line.task("a", again=True, home=None, status="running", attempt=1, executor="far", host="elsewhere", cancel_at=1)
    assert line.claim(pooled=True) == []
    assert (line.head("a").status, line.head("a").error_code) == ("canceled", "canceled")


def test_the_pool_runs_no_more_than_it_may(line):
    """`global_concurrency` counts what runs anywhere; services are not among it."""
    line.worker("far", "elsewhere", lease_s=60)
    line.task("far", home=None, status="running", executor="far", host="elsewhere")
    for item in ("a", "b", "c"):
        line.task(item)
    line.task("service", mode="service")
    assert line.claim(pooled=True, limit=2) == ["a", "service"]
    assert line.claim(pooled=True, limit=2, in_hand=("a", "service")) == []
    line.end("far")
    assert line.claim(pooled=True, limit=2, in_hand=("a", "service")) == ["b"]


def test_work_without_a_worker_is_stranded(line):
    """What waits for a host without a worker is told of; without waiting work nobody is missed, elsewhere it is not ours."""
    stranded = line.queue().stranded
    line.task("a", home="elsewhere")
    assert not line.work.database.ask(stranded)
    line.task("b")
    assert not line.work.database.ask(stranded)
    line.work.roster.leave("me")
    assert line.work.database.ask(stranded)


async def test_a_service_tells_of_work_without_a_worker(client, make, work):
    """`no_worker` is told once work waits and the worker was killed, also when nobody was left to bury it."""
    upkeep = Upkeep(None, SimpleNamespace(present=True), SimpleNamespace(client=client), None, None, None)
    await upkeep.require_worker()
    await client.submit(make.task())
    work.roster.enter("killed", 0)
    with hold_slot(work.state_dir, 0):
        await upkeep.require_worker()
    with pytest.raises(NoWorker) as told:
        await upkeep.require_worker()
    assert (told.value.code, told.value.who) == ("no_worker", "operator")


PLANS = {
    "sqlite": ("EXPLAIN QUERY PLAN ", ("SCAN kd_tasks", "SCAN kd_jobs", "SCAN f", "SCAN kd_tasks_1", "SCAN kd_jobs_1")),
    "postgresql": ("EXPLAIN ", ("Seq Scan on kd_tasks", "Seq Scan on kd_jobs")),
}


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)
def test_a_claim_reads_what_is_not_over(database, tmp_path, make):
    """However much is kept of what is over, what a worker asks is answered from indexes of what is not."""
    import sqlalchemy as sa

    work = Work(database or f"sqlite:///{tmp_path / 'work.db'}", tmp_path / "state")
    line = Line(work, make)
    row = new_row("t", make.task("s"), "key", body_hash="", home=work.host)
    over = {"status": "succeeded", "finished_at": 1, "spec": "{}"}
    rows = [row | over | {"id": f"t{n}", "session_key": f"k{n}", "created_at": n} for n in range(5000)]
    line.change(lambda link: link.execute(work.tables.tasks.insert(), rows))
    asked = []
    sa.event.listen(work.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2:4]))
    for pooled in (False, True):
        line.work.database.ask(lambda link, p=pooled: line.queue(pooled=p).candidates(link, "me", ROOM, ()))
    line.work.database.ask(line.queue().stranded)
    line.work.database.ask(lambda link: work.queue.last_of_session(link, "key"))
    questions = [question for question in asked if "kd_tasks" in question[0]]
    assert len(questions) == 4
    prefix, scans = PLANS[work.database.dialect]
    with work.database.engine.connect() as link:
        if work.database.dialect == "postgresql":
            link.exec_driver_sql("ANALYZE")
        for question, values in questions:
            plan = "\n".join(str(tuple(row)) for row in link.exec_driver_sql(prefix + question, values))
            bad = [line for line in plan.splitlines() if any(scan in line for scan in scans) and "INDEX" not in line]
            assert not [line for line in bad if "kd_tasks" in line], plan
    work.close()


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_question_is_one_statement(database, tmp_path):
    """What is read of PostgreSQL neither begins nor ends a transaction; what is changed does."""
    work = Work(database, tmp_path / "state")

    def left(link):
        link.exec_driver_sql("SELECT 1")
        return link.connection.driver_connection.info.transaction_status.name

    assert (work.database.ask(left), work.database.change(left), work.database.ask(left)) == ("IDLE", "INTRANS", "IDLE")
    work.close()


def test_room_is_asked_for_by_name():
    """A worker looks for work it has room for."""
    full = Capacity(batch=0, service=1, job=0)
    assert full._asdict() == {"batch": 0, "service": 1, "job": 0}


async def test_clocks_that_differ_do_not_change_an_order(client, make, work):
    """What is submitted later to a session comes later, though its submitter's clock is behind."""
    first = await client.submit(make.task("s"))
    table = work.tables.tasks
    ahead = micros(utc_now()) + 3_600_000_000
    work.database.change(lambda link: link.execute(table.update().values(created_at=ahead)))
    second = await client.submit(make.job("a", session="s"))
    third = await client.submit(make.task("s"))
    assert (await client.head(TaskHead, make.scope, first.id)).created_at < second.created_at < third.created_at


def test_a_long_line_has_many_heads(line):
    """Of ten thousand that wait in fifty sessions the first of each may be taken, in the order they came."""
    spec, home = line.make.task("s"), line.work.host
    rows = [
        new_row(f"t{n}", spec, f"key{n % 50}", body_hash="", home=home) | {"created_at": n + 1} for n in range(10_000)
    ]
    table = line.work.tables.tasks
    line.change(lambda link: link.execute(table.insert(), rows))
    assert line.claim(capacity=Capacity(8, 0, 0)) == [f"t{n}" for n in range(8)]


def test_a_drained_host_takes_nothing_new_and_sees_through_what_it_began(line):
    """What waits goes on waiting, alone or in a session; steps of a job that runs, and orphans of this host, are taken."""
    fleet, host = Fleet(line.work), line.work.host
    line.job("job", "s")
    assert line.claim() == ["job"]
    assert line.change(lambda link: fleet.drain(link, host, "ann")) is True
    assert line.change(lambda link: fleet.drain(link, host, "bob")) is False
    line.task("new")
    line.job("later", "t")
    line.task("step", "s", job_id="job", step=0, **{"try": 0})
    line.worker("dead", host, state="dead")
    line.task("orphan", "u", status="running", attempt=1, executor="dead", host=host)
    for pooled in (False, True):
        line.task(f"anybody's {pooled}", home=None)
    assert sorted(line.claim(in_hand=("job",), pooled=True)) == ["orphan", "step"]
    assert line.claim(in_hand=("job", "orphan", "step"), pooled=True) == []
    assert line.change(lambda link: fleet.undrain(link, host)) is True
    assert line.change(lambda link: fleet.undrain(link, host)) is False
    assert sorted(line.claim(in_hand=("job", "orphan", "step"))) == ["later", "new"]


def test_a_drained_host_takes_nothing_over(line):
    """Work of a host that is gone waits for a host that is not drained."""
    fleet = Fleet(line.work)
    line.worker("far", "far", state="dead", lease_s=-60)
    line.task("lost", again=True, status="running", attempt=1, executor="far", host="far", home=None)
    line.change(lambda link: fleet.drain(link, line.work.host, "ann"))
    assert line.claim(pooled=True) == []
    line.change(lambda link: fleet.undrain(link, line.work.host))
    assert line.claim(pooled=True) == ["lost"]


def test_a_drained_host_does_not_drain_others(line):
    """Each host has a word of its own."""
    line.change(lambda link: Fleet(line.work).drain(link, "far", "ann"))
    line.task("mine")
    assert line.claim() == ["mine"]


def of_a_later_version(line, item, kind="task"):
    """Give the specification of *item* a field that this version does not know."""
    table = line.work.records.table(kind)
    text = sa.func.replace(table.c.spec, '{"scope":', '{"of_a_later_version":true,"scope":')
    line.change(lambda link: link.execute(table.update().where(table.c.id == item).values(spec=text)))


def test_what_a_later_version_understands_is_left_to_it(line):
    """It stays as it was, its session is not bound here, what came behind others is claimed, and it is asked for once."""
    for number in range(3):
        line.task(f"later-{number}", session=f"s{number}")
        of_a_later_version(line, f"later-{number}")
    line.task("mine")
    line.job("job", session="j")
    of_a_later_version(line, "job", "job")
    queue, table = line.queue(), line.work.tables.tasks
    few = Capacity(batch=2, service=0, job=1)

    taken = []

    def claim(link):
        return [head.id for head in queue.claim(link, "me", few, taken).tasks]

    for _ in range(3):
        taken += line.change(claim)
    assert taken == ["mine"]
    assert not line.work.database.ask(lambda link: queue.candidates(link, "me", ROOM, ("mine",)))
    rows = line.work.database.ask(lambda link: link.execute(table.select().where(table.c.id != "mine")).all())
    assert {(row.status, row.attempt, row.executor, row.host) for row in rows} == {("queued", 0, None, None)}
    jobs = line.work.tables.jobs
    assert line.work.database.ask(lambda link: link.execute(sa.select(jobs.c.status, jobs.c.executor)).all()) == [
        ("queued", None)
    ]
    assert not line.work.database.ask(lambda link: link.execute(line.work.tables.sessions.select()).all())


def test_orphans_of_a_later_version_stay_orphans(line):
    """A program that a later version began here goes on, for a worker of that version to adopt."""
    line.task("later", status="running", executor="dead", host=line.work.host, attempt=1)
    of_a_later_version(line, "later")
    line.task("mine", status="running", executor="dead", host=line.work.host, attempt=1)
    assert line.claim() == ["mine"]
    table = line.work.tables.tasks
    row = line.work.database.ask(lambda link: link.execute(table.select().where(table.c.id == "later")).one())
    assert (row.status, row.attempt, row.executor, row.host) == ("running", 1, None, line.work.host)
    line.task("gone", status="running", executor="dead", host="elsewhere", home=None, attempt=1, again=True)
    of_a_later_version(line, "gone")
    assert line.claim(in_hand=("mine",), pooled=True) == []


def test_what_is_remembered_of_later_versions_is_bounded(line, monkeypatch):
    """However much of it waits, a worker's question stays short, and it asks no more often than otherwise."""
    monkeypatch.setattr(queue_module, "MAX_LEFT", 3)
    for number in range(8):
        line.task(f"later-{number}")
        of_a_later_version(line, f"later-{number}")
    queue = line.queue()
    for number in range(10):
        claim = line.change(lambda link: queue.claim(link, "me", Capacity(1, 0, 0), ()))
        assert (claim.tasks, len(queue.unreadable) <= 3) == ((), True)
        assert claim.may_continue == (number < 3)  # else a worker would ask without a pause


def test_work_of_an_engine_that_starts_nothing_is_left_to_other_hosts(line, monkeypatch):
    """But for what may run here only, and what runs here already; once the engine works, it is taken."""
    monkeypatch.setattr(queue_module, "MAX_LEFT", 2)
    queue, engine = line.queue(pooled=True), line.make.task().placement.engine
    line.task("mine")
    line.task("in session", session="s", home=None)
    line.task("begun", status="running", executor="dead", host=line.work.host, home=None, attempt=1)
    line.task("gone", status="running", executor="dead", host="elsewhere", home=None, attempt=1, again=True)
    for number in range(4):
        line.task(f"anybody's {number}", home=None)

    def claim(capacity=ROOM):
        return line.change(lambda link: queue.claim(link, "me", capacity, ("begun", "in session", "mine")))

    queue.broken["another"] = set()
    queue.broken[engine] = set()
    assert sorted(head.id for head in claim().tasks) == ["begun", "in session", "mine"]
    table = line.work.tables.tasks
    ask = sa.select(table.c.id, table.c.attempt, table.c.executor, table.c.host).where(table.c.status == "queued")
    rows = line.work.database.ask(lambda link: link.execute(ask).all())
    assert sorted(rows) == [(f"anybody's {number}", 0, None, None) for number in range(4)]
    assert (len(queue.broken[engine]), claim().may_continue, claim().tasks) == (2, False, ())
    del queue.broken[engine]
    assert sorted(head.id for head in claim().tasks) == [*(f"anybody's {number}" for number in range(4)), "gone"]


def test_a_job_whose_steps_a_later_version_wrote_is_left_to_it(line):
    """Its own specification may be one that this version understands."""
    line.job("job", session="j", status="running", executor="dead", host=line.work.host)
    line.task("step", job_id="job", step=0)
    of_a_later_version(line, "step")
    assert line.claim() == []
    table = line.work.tables.jobs
    assert line.work.database.ask(lambda link: link.execute(sa.select(table.c.status)).scalars().all()) == ["running"]


STORED_FIELDS = {
    "task": {"scope", "session_id", "command", "placement", "mode", "on_busy", "retry_on_lost", "service"},
    "job": {"scope", "session_id", "steps", "placement", "max_concurrency", "max_wall_time_s", "on_busy"},
}


@pytest.mark.parametrize("kind", STORED_FIELDS)
def test_rows_have_the_fields_that_earlier_versions_read(make, kind):
    """Workers of the version before refuse a specification with a field they do not know, and then run nothing of it.

    A new field has a column of its own, or is left out of the text while it says nothing.
    """
    spec = make.task("s") if kind == "task" else make.job("a")
    traced = spec.model_copy(update={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    row = new_row("x", traced, "key", body_hash="", home=None)
    assert set(json.loads(row["spec"])) == STORED_FIELDS[kind]
    assert head_of(TaskHead if kind == "task" else JobHead, row).spec == traced
