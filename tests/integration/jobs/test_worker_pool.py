"""Hosts that share a PostgreSQL: leases, takeovers that never overlap, and sessions that stay where their files are."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from kdskills.app import Host
from kdskills.errors import Conflict
from kdskills.jobs.model import Command, JobHead, StepSpec, TaskHead
from kdskills.jobs.queue import Roster
from kdskills.testing.work import WorkLab

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("pool"), pytest.mark.timeout(300)]

BEATS = 'i=0; while [ $i -lt {count} ]; do echo "b {name}-$$" >> {ledger}; sleep 0.1; i=$((i+1)); done; echo done'


@pytest.fixture
async def hosts(cluster, tmp_path_factory):
    """Return a maker of hosts that share an empty database and a ledger; everything of them is ended."""
    made = []
    name = f"pool_{Path(tempfile.mktemp()).name.lower()}"
    url = await asyncio.to_thread(cluster.create, name)
    with tempfile.TemporaryDirectory(prefix="kdskills-pool-") as top:

        def make(*names, **jobs):
            made.extend(WorkLab(Path(top), url, host=host, **jobs) for host in names)
            return made[-len(names) :]

        yield make
        for lab in made:
            await lab.aclose()


async def alive(lab):
    """Wait until the host of *lab* has a worker in the roster."""
    work = await lab.client.work()
    roster = Roster(work)
    await lab.until(lambda: work.database.ask(lambda link: work.host in {row.host for row in roster.live(link)}))


async def test_a_host_without_room_says_so_and_takes_nothing(hosts):
    """What waits runs where there is room; the roster tells since when the other host's disk has been full."""
    (full,), (roomy,) = hosts("a", room_bytes=2**60), hosts("b")
    full.start()
    await alive(full)
    work = await full.client.work()

    def full_hosts(link):
        return {row.host for row in Roster(work).live(link) if row.full_since is not None}

    await full.until(lambda: work.database.ask(full_hosts) == {work.host})
    heads = [await full.client.submit(full.task("true")) for _ in range(5)]
    roomy.start()
    ended = [await full.client.wait(TaskHead, full.scope, head.id, 60) for head in heads]
    there = (await roomy.client.work()).host
    assert {(head.status, head.host) for head in ended} == {("succeeded", there)}
    assert work.database.ask(full_hosts) == {work.host}


@pytest.mark.needs("bubblewrap")
async def test_a_host_on_which_nothing_starts_leaves_work_to_others(hosts, monkeypatch, tmp_path):
    """It fails what it finds that out by, and nothing else; mended, it takes work again."""
    broken, sound = hosts("a", "b", engine="bubblewrap")
    wall = tmp_path / "bwrap"
    wall.write_text("#!/bin/sh\necho no wall today >&2\nexit 1\n")
    wall.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        broken.start()
    await alive(broken)
    found_out = await broken.client.submit(broken.task("true"))
    told = await broken.client.wait(TaskHead, broken.scope, found_out.id, 60)
    assert (told.status, told.error_code) == ("failed", "executor_failed")
    await broken.until(lambda: "is left to other hosts, as it starts no program here" in broken.said())
    waiting = [await broken.client.submit(broken.task("true")) for _ in range(6)]
    sound.start()
    ended = [await broken.client.wait(TaskHead, broken.scope, head.id, 60) for head in waiting]
    assert {(head.status, head.host) for head in ended} == {("succeeded", (await sound.client.work()).host)}
    sound.kill()
    wall.unlink()
    (again,) = [await broken.client.submit(broken.task("true"))]
    assert (await broken.client.wait(TaskHead, broken.scope, again.id, 120)).status == "succeeded", broken.said()


async def test_a_dead_host_is_taken_over(hosts):
    """Its lease over, another host runs the task anew; the first program ended before the second began."""
    one, two = hosts("a", "b", lease_s=3.0)
    one.start()
    script = BEATS.format(count=3000, name="x", ledger=one.ledger.path)
    head = await one.client.submit(one.task(script, retry_on_lost=True))
    first = await one.running(head.id)
    two.start()
    await alive(two)
    one.kill()
    await one.until(lambda: len(one.ledger.begun()) > 1)
    over = await two.running(head.id)
    assert (over.attempt, over.host != first.host) == (2, True)
    order = [name for name in one.ledger.order() if name.startswith("x-")]
    switch = order.index(next(name for name in order if name != order[0]))
    assert set(order[switch:]) == {order[switch]}
    assert await two.client.cancel(TaskHead, two.scope, head.id)
    assert (await two.client.wait(TaskHead, two.scope, head.id, 60)).status == "canceled"


async def test_an_evicted_host_is_taken_over_at_once(hosts):
    """Not while its lease holds, but when that is said to be meant; what it says of the work afterwards is refused."""
    one, two = hosts("a", "b", lease_s=300.0)
    one.start()
    head = await one.client.submit(one.task(one.ledger.held("x"), retry_on_lost=True))
    first = await one.running(head.id)
    two.start()
    await alive(two)
    door = Host(two.settings, entry_points=False)
    with pytest.raises(Conflict) as refused:
        await door.call("fleet.evict", host=first.host)
    assert refused.value.code == "host_alive"
    told = await door.call("fleet.evict", host=first.host, force=True)
    assert (told.tasks, told.jobs) == (1, 0)
    work = await two.client.work()
    late = ("task", head.id, "succeeded", first.executor)
    assert not await work.database.write(lambda link: work.records.move(link, *late))
    await two.until(lambda: two.ledger.begun()["x"] == 2)
    two.ledger.let_go()
    over = await two.client.wait(TaskHead, two.scope, head.id, 60)
    assert (over.status, over.attempt, two.ledger.begun()) == ("succeeded", 2, {"x": 2}), one.said()
    await alive(one)
    await door.work.aclose()
    await door.storage.aclose()


async def test_at_most_once_is_not_taken_over(hosts):
    """Without `retry_on_lost` a task whose host is gone is lost, here as on one host: it never begins a second time."""
    one, two = hosts("a", "b", lease_s=3.0)
    one.start()
    head = await one.client.submit(one.task(one.ledger.held("x"), session="s"))
    await one.running(head.id)
    behind = await one.client.submit(one.task(one.ledger.script("y"), session="s"))
    two.start()
    one.kill()
    over = await two.client.wait(TaskHead, two.scope, head.id, 120)
    assert (over.status, over.error_code, over.attempt) == ("failed", "lost", 1), two.said()
    assert (await two.client.wait(TaskHead, two.scope, behind.id, 120)).status == "succeeded"
    assert two.ledger.begun() == {"x": 1, "y": 1}


async def test_a_worker_that_ends_in_order_gives_no_program_away(hosts):
    """Programs go on without their worker: no other host runs them anew before the lease is over."""
    one, two = hosts("a", "b", lease_s=60.0)
    one.start()
    head = await one.client.submit(one.task(one.ledger.held("x"), retry_on_lost=True))
    await one.running(head.id)
    two.start()
    await alive(two)
    assert one.kill(number=signal.SIGTERM) == 0
    free = await two.client.submit(two.task("true"))
    assert (await two.client.wait(TaskHead, two.scope, free.id, 120)).status == "succeeded"
    assert (await two.client.head(TaskHead, two.scope, head.id)).attempt == 1
    one.start()
    one.ledger.let_go()
    assert (await one.client.wait(TaskHead, one.scope, head.id, 120)).status == "succeeded"
    assert one.ledger.begun() == {"x": 1}


async def test_a_host_that_comes_back_in_time_keeps_its_work(hosts):
    """Within its lease a host's next worker adopts what runs there, though another host is free."""
    one, two = hosts("a", "b", lease_s=60.0)
    one.start()
    head = await one.client.submit(one.task(one.ledger.held("x")))
    first = await one.running(head.id)
    two.start()
    await alive(two)
    one.kill()
    one.start()
    one.ledger.let_go()
    over = await one.client.wait(TaskHead, one.scope, head.id, 120)
    assert (over.status, over.attempt, over.host) == ("succeeded", 1, first.host), one.said()
    assert one.ledger.begun() == {"x": 1}


async def test_waiting_work_leaves_a_dead_host(hosts):
    """Steps and commands queued for a host that is gone are done by another one."""
    one, two = hosts("a", "b", lease_s=3.0, slots=1)
    one.start()
    steps = [
        StepSpec(
            name=f"s{n}", command=Command(argv=("/bin/sh", "-c", one.ledger.script(f"s{n}", 1)), timeout_s=60), retry=1
        )
        for n in range(3)
    ]
    job = await one.client.submit(one.job([], steps=tuple(steps)))
    await one.until(one.ledger.lines)
    one.kill()
    two.start()
    over = await two.client.wait(JobHead, two.scope, job.id, 120)
    states = [(step.status, step.task and step.task.error_code) for step in over.steps]
    assert over.status == "succeeded", (states, two.said())
    assert set(two.ledger.begun()) == {"s0", "s1", "s2"}


async def test_a_session_stays_where_its_files_are(hosts):
    """Commands of one session find the files of those before them, whichever hosts there are."""
    labs = hosts("a", "b", slots=2)
    for lab in labs:
        lab.start()
        await alive(lab)
    client, scope = labs[0].client, labs[0].scope
    heads = [await client.submit(labs[0].task("echo x >> f; wc -l < f", session="s")) for _ in range(6)]
    said = [(await client.wait(TaskHead, scope, head.id, 120)).stdout_tail.strip() for head in heads]
    assert sorted(said) == [b"1", b"2", b"3", b"4", b"5", b"6"]


async def test_a_worker_cut_off_comes_back_by_itself(cluster, hosts):
    """A worker that cannot renew its lease lets go, its programs end with the lease, and it works again after the outage."""
    (lab,) = hosts("a", lease_s=3.0)
    lab.start()
    script = BEATS.format(count=3000, name="x", ledger=lab.ledger.path)
    head = await lab.client.submit(lab.task(script))
    await lab.running(head.id)
    await asyncio.to_thread(cluster.stop)
    try:
        await lab.until(lambda: "begins anew" in lab.said())
        work = await lab.client.work()
        attempt = work.attempts.latest(head.id)
        verdict = await asyncio.wait_for(attempt.wait(), 60)
        assert (verdict.status, verdict.error_code) == ("lost", "lost")
        await lab.until(lambda: "there is no worker here" in lab.said())
    finally:
        await asyncio.to_thread(cluster.start)
    over = await lab.client.wait(TaskHead, lab.scope, head.id, 120)
    assert (over.status, over.error_code) == ("failed", "lost"), lab.said()
    assert over.executor != head.executor
    free = await lab.client.submit(lab.task("echo again"))
    assert (await lab.client.wait(TaskHead, lab.scope, free.id, 120)).stdout_tail == b"again\n"
    assert lab.workers[0].poll() is None


async def test_a_cancel_reaches_another_host(hosts):
    """A client on one host ends what runs on another."""
    one, two = hosts("a", "b")
    one.start()
    head = await one.client.submit(one.task("sleep 611"))
    await one.running(head.id)
    assert await two.client.cancel(TaskHead, two.scope, head.id, "from afar")
    over = await two.client.wait(TaskHead, two.scope, head.id, 60)
    assert (over.status, over.cancel_reason) == ("canceled", "from afar")
    assert one.kill(number=signal.SIGTERM) == 0
