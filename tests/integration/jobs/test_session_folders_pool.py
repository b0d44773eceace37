"""Sessions of a pool whose folders live in the store: the next command runs on any host, and a lost host costs its own run."""

import asyncio
import signal
import tempfile
from pathlib import Path

import pytest

from kdskills.jobs.client import Fleet
from kdskills.jobs.model import JobHead, TaskHead
from kdskills.testing.work import WorkLab

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("pool"), pytest.mark.timeout(300)]


@pytest.fixture
async def hosts(cluster):
    """Return a maker of hosts that share an empty database, a store and a ledger; everything of them is ended."""
    made = []
    url = await asyncio.to_thread(cluster.create, f"folders_{Path(tempfile.mktemp()).name.lower()}")
    with tempfile.TemporaryDirectory(prefix="kdskills-folders-") as top:
        store = {"artifacts": str(Path(top) / "store")}

        def make(*names, **jobs):
            jobs = {"session_folders": "store"} | jobs
            made.extend(WorkLab(Path(top), url, host=host, engine_settings=store, **jobs) for host in names)
            return made[-len(names) :]

        yield make
        for lab in made:
            await lab.aclose()


async def only(lab, other):
    """Let *lab* take work, and *other*, which lives on, nothing new."""
    work, far = await lab.client.work(), await other.client.work()
    fleet = Fleet(work)
    assert await work.database.write(lambda link: fleet.drain(link, far.host, "the test"))
    await work.database.write(lambda link: fleet.undrain(link, work.host))


async def run(lab, script):
    """Run a command of the session to its end and return it."""
    head = await lab.client.submit(lab.task(script, session="s"))
    return await lab.client.wait(TaskHead, lab.scope, head.id, 120)


async def test_a_session_goes_anywhere_and_a_lost_host_costs_its_run(hosts):
    """What a command or step left on one host the next finds on another, which need not be over; the run of a host that fell
    silent begins anew from what was saved, and that host, when it comes back, overwrites nothing and goes on from there.
    """
    one, two = hosts("a", "b", lease_s=2.0)
    await only(one, two)
    one.start()
    two.start()
    first = await run(one, "echo one > f")
    await only(two, one)
    second = await run(two, "cat f; echo two >> f")
    assert (second.stdout_tail, second.host != first.host) == (b"one\n", True), two.said()
    job = await two.client.submit(two.job(["echo three >> f", "cat f"], session="s"))
    ended = await two.client.wait(JobHead, two.scope, job.id, 120)
    assert ended.steps[1].task.stdout_tail == b"one\ntwo\nthree\n"
    script = f"wc -l < f; echo try >> f; {one.ledger.held('x')}"
    head = await two.client.submit(two.task(script, session="s", retry_on_lost=True))
    await two.running(head.id)
    two.workers[0].send_signal(signal.SIGSTOP)
    await only(one, two)
    await one.until(lambda: one.ledger.begun()["x"] == 2)
    two.workers[0].send_signal(signal.SIGCONT)
    one.ledger.let_go()
    again = await one.client.wait(TaskHead, one.scope, head.id, 120)
    assert (again.attempt, again.stdout_tail.strip(), again.host) == (2, b"3", first.host), one.said()
    await only(two, one)
    last = await run(two, "cat f")
    assert (last.stdout_tail, last.host) == (b"one\ntwo\nthree\ntry\n", second.host), two.said()
