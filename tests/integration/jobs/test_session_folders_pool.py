"""Sessions of a pool whose folders live in the store: the next command runs on any host, and a lost host costs its own run."""

import asyncio
import tempfile
from pathlib import Path

import pytest

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


async def over(lab, head):
    """Wait for the end of a task and return it."""
    return await lab.client.wait(TaskHead, lab.scope, head.id, 120)


async def test_a_killed_host_is_not_waited_for(hosts):
    """What a command left on one host the next one finds on another at once, whose lease is over or not; jobs' steps, too."""
    one, two = hosts("a", "b", lease_s=600.0)
    one.start()
    first = await over(one, await one.client.submit(one.task("echo one > f", session="s")))
    assert first.status == "succeeded", (first.error_message, one.said())
    one.kill()
    two.start()
    second = await over(two, await two.client.submit(two.task("cat f; echo two >> f", session="s")))
    assert (second.stdout_tail, second.host != first.host) == (b"one\n", True), two.said()
    job = await two.client.submit(two.job(["cat f; echo three >> f", "cat f"], session="s"))
    ended = await two.client.wait(JobHead, two.scope, job.id, 120)
    assert [step.task.stdout_tail for step in ended.steps] == [b"one\ntwo\n", b"one\ntwo\nthree\n"]


async def test_a_lost_host_costs_its_run_and_overwrites_nothing(hosts):
    """The run of a host that is gone begins anew from what was saved; the host that comes back goes on from the other's."""
    one, two = hosts("a", "b", lease_s=3.0)
    one.start()
    saved = await over(one, await one.client.submit(one.task("echo saved > f", session="s")))
    script = f"cat f; echo try >> f; {one.ledger.held('x')}"
    head = await one.client.submit(one.task(script, session="s", retry_on_lost=True))
    await one.running(head.id)
    one.kill()
    two.start()
    await two.until(lambda: one.ledger.begun()["x"] == 2)
    one.start()
    one.ledger.let_go()
    again = await over(two, head)
    assert (again.attempt, again.stdout_tail, again.host != saved.host) == (2, b"saved\n", True), two.said()
    two.kill()
    last = await over(one, await one.client.submit(one.task("cat f", session="s")))
    assert (last.stdout_tail, last.host) == (b"saved\ntry\n", saved.host), one.said()
