"""One task in a worker's hands: what its head says does not depend on what the worker happened to see."""

import asyncio
import dataclasses
import errno
import os
import time
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from kdskills.jobs import runs, shim
from kdskills.jobs.attempts import Attempt, AttemptFacts, Verdict
from kdskills.jobs.model import TaskHead
from kdskills.jobs.records import follows
from kdskills.jobs.runs import TaskRun
from kdskills.storage.database import DatabaseUnavailable, micros, moment_of, utc_now

ENDPOINT = {"port": 80, "host_port": 4711, "url": "http://127.0.0.1:4711"}


def away():
    """Return what a database says that restarts."""
    error = DatabaseUnavailable("it is away")
    error.__cause__ = OperationalError("SELECT", {}, Exception("gone"))
    return error


def moment(seconds):
    """Return a time as a head has it."""
    return moment_of(round(seconds * 1_000_000))


async def test_a_program_nobody_saw_has_its_times(bench, client):
    """Start, readiness and output of a program that was over at the first look stand in the head."""
    bench.starter.scenes = [{"prints": b"hi\n", "exit_code": 0, "facts": {"started_at": 1000.5, "ready_at": 1000.5}}]
    over = await bench.run((await client.submit(bench.make.task())).id)
    assert (over.status, over.exit_code, over.stdout_tail, over.stdout_total) == ("succeeded", 0, b"hi\n", 3)
    assert (over.started_at, over.ready_at) == (moment(1000.5), moment(1000.5))


async def test_a_full_disk_keeps_a_task_waiting_and_nothing_is_lost(bench, client, monkeypatch):
    """What could not begin for want of room begins as the same attempt once there is some; a cancel ends the wait."""
    monkeypatch.setattr("kdskills.jobs.runs._ROOM_S", 0.05)
    refused, both, play = set(), asyncio.Event(), bench.starter.start

    async def start(folder):
        refused.add(folder)
        if len(refused) == 2:
            both.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.starter.start = start
    head, unwanted = [await client.submit(bench.make.task()) for _ in range(2)]
    runs = [asyncio.ensure_future(bench.run(item.id)) for item in (head, unwanted)]
    await asyncio.wait_for(both.wait(), 10)
    assert [(bench.head(item.id).status) for item in (head, unwanted)] == ["starting"] * 2
    bench.context.cancel_events[unwanted.id].set()
    over = await asyncio.wait_for(runs[1], 10)
    assert (over.status, over.attempt, bench.starter.folders) == ("canceled", 1, [])
    bench.starter.start = play
    over = await asyncio.wait_for(runs[0], 10)
    assert (over.status, over.attempt, len(bench.starter.folders)) == ("succeeded", 1, 1)


@pytest.mark.parametrize("again", [True, False])
async def test_what_its_shim_did_not_begin_for_want_of_room_is_begun_again(bench, client, monkeypatch, again):
    """Whatever a task allows when it is lost: nothing began. Only so often, should the disk be full for another reason."""
    monkeypatch.setattr("kdskills.jobs.runs._ROOM_S", 0.02)
    monkeypatch.setattr("kdskills.jobs.runs.FULL_S", 0.02)
    refused = {"status": "refused", "error_code": "disk_full", "error_message": "nothing began"}
    bench.starter.scenes = [refused, refused, {}]
    over = await bench.run((await client.submit(bench.make.task(retry_on_lost=again))).id)
    assert (over.status, over.attempt) == ("succeeded", 3)
    bench.starter.folders, bench.starter.scenes = [], [refused]
    over = await bench.run((await client.submit(bench.make.task(retry_on_lost=again))).id)
    assert (over.status, over.error_code, over.attempt) == ("failed", "disk_full", 4)


async def test_a_program_of_a_later_version_is_left_to_it(bench, client):
    """A worker that cannot read its order gives the task back, which stays as it was; another run of it is not begun."""
    head = await client.submit(bench.make.task())
    bench.starter.scenes = [{"status": "open"}]
    play, begun = bench.starter.start, asyncio.Event()

    async def start(folder):
        await play(folder)
        begun.set()

    bench.starter.start = start
    run = asyncio.ensure_future(bench.run(head.id))
    await asyncio.wait_for(begun.wait(), 10)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    (folder,) = bench.starter.folders
    facts = shim.read_json(folder / shim.ORDER)
    facts["order"]["of_a_later_version"] = True
    shim.write_json(folder / shim.ORDER, facts)
    before = bench.head(head.id)
    after = await bench.run(head.id)
    assert (after.status, after.attempt, after.error_code) == (before.status, before.attempt, None)
    assert (after.executor, len(bench.starter.folders), head.id in bench.work.queue.unreadable) == (None, 1, True)


async def test_an_engine_that_started_nothing_is_tried_before_more_is_taken(bench, client, monkeypatch):
    """A host of a pool leaves work to others until a probe says that programs start; one that does is asked once in a while."""
    monkeypatch.setattr(runs, "PROBE_S", 0.01)
    bench.work.queue = bench.pool()
    engine, reports = bench.make.task().placement.engine, ["no wall", "no wall", ""]
    taken = []

    async def probe(name):
        assert name == engine
        taken.append(len(bench.claim().tasks))
        return reports.pop(0)

    bench.starter.probe = probe
    bench.starter.scenes = [{"status": "infra_error", "error_code": "executor_failed"}, {}]
    first = await client.submit(bench.make.task())
    other = await client.submit(bench.make.task())
    for head in (first, other):
        bench.put("task", head.id, home=None)
    bench.put("task", other.id, status="canceled")
    run = asyncio.ensure_future(bench.run(first.id))
    await bench.until(lambda: bench.head(first.id).status == "failed")
    bench.put("task", other.id, status="queued")
    await run
    assert (taken, reports, bench.work.queue.broken) == ([0, 0, 0], [], {})
    assert (await bench.run(other.id)).status == "succeeded"


async def test_nothing_begins_under_a_lease_that_is_over(bench, client):
    """A worker that entered the roster late, as its path to the database was cut, waits for its next beat: its shims would
    end at once whatever it begins, try after try.
    """
    bench.context.lease_until = 0.0
    head = await client.submit(bench.make.task(retry_on_lost=True))
    run = asyncio.ensure_future(bench.run(head.id))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(run), 0.2)
    assert (bench.head(head.id).status, bench.starter.folders) == ("starting", [])
    bench.context.lease_until = time.clock_gettime(time.CLOCK_BOOTTIME) + 60
    over = await asyncio.wait_for(run, 10)
    assert (over.status, over.attempt) == ("succeeded", 1)


async def test_other_trouble_of_the_disk_is_told(bench, client):
    """Only want of room is waited for."""
    bench.starter.broken = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        await bench.run((await client.submit(bench.make.task())).id)


async def test_a_service_keeps_its_first_start_and_its_addresses(bench, client):
    """Attempts nobody saw run tell when the first began and which ports the next should have; readiness is the last's."""
    bench.starter.scenes = [
        {"status": "nonzero", "exit_code": 1, "facts": {"started_at": 10.0, "ready_at": 11.0, "endpoints": [ENDPOINT]}},
        {"status": "nonzero", "exit_code": 2, "facts": {"started_at": 20.0}},
    ]
    over = await bench.run((await client.submit(bench.service(restart=1))).id)
    assert (over.status, over.exit_code, over.attempt, over.restarts) == ("failed", 2, 2, 1)
    assert (over.started_at, over.ready_at) == (moment(10.0), None)
    assert [one.model_dump() for one in over.endpoints] == [ENDPOINT]
    assert bench.work.attempts.find(over.id, 2).order.host_ports == {80: 4711}


async def test_a_lost_service_is_restarted_as_often_as_it_may(bench, client):
    """A service whose attempts are all lost ends: each of them is one of its restarts."""
    bench.starter.scenes = [{"status": "lost", "error_code": "lost"}]
    over = await bench.run((await client.submit(bench.service(restart=3))).id)
    assert (over.status, over.error_code, over.attempt, over.restarts) == ("failed", "lost", 4, 3)


async def test_a_lost_task_is_tried_a_few_times(bench, client):
    """What may be repeated is repeated three times, not for ever."""
    bench.starter.scenes = [{"status": "lost", "error_code": "lost"}]
    over = await bench.run((await client.submit(bench.make.task(retry_on_lost=True))).id)
    assert (over.status, over.error_code, over.attempt, over.restarts) == ("failed", "lost", 4, 0)


async def test_a_worker_that_dies_with_its_programs_forgets_no_try(bench, client):
    """How often a task was lost counts over all the workers it had: one that takes them along ends too."""
    bench.starter.scenes = [{"status": "lost", "error_code": "lost"}]
    head = await client.submit(bench.make.task(retry_on_lost=True))
    bench.put("task", head.id, status="starting", attempt=4, host=bench.work.host, executor="one")
    over = await bench.run(head.id, bench.worker("two", 1))
    assert (over.status, over.attempt, len(bench.starter.folders)) == ("failed", 4, 1)


async def test_a_service_canceled_between_its_attempts_keeps_what_it_printed(bench, client):
    """A cancel that comes while a service waits for its restart ends it with the last attempt's words."""
    bench.work.settings = bench.work.settings.model_copy(
        update={"restart_backoff_s": 3600.0, "restart_backoff_max_s": 3600.0}
    )
    ended = {"status": "nonzero", "exit_code": 7, "prints": b"last words"}
    bench.starter.scenes = [ended | {"facts": {"started_at": 5.0, "ready_at": 6.0}}]
    head = await client.submit(bench.service(restart=1))
    running = asyncio.ensure_future(bench.run(head.id))
    await bench.until(lambda: bench.starter.folders)
    assert await client.cancel(TaskHead, bench.make.scope, head.id, "enough")
    bench.context.cancel_events[head.id].set()
    over = await asyncio.wait_for(running, 60)
    assert (over.status, over.error_code, over.exit_code, over.attempt) == ("canceled", "canceled", 7, 1)
    assert (over.stdout_tail, over.stdout_total, over.started_at) == (b"last words", 10, moment(5.0))


async def test_a_late_word_of_an_attempt_says_nothing_of_the_next(bench, client):
    """That an earlier attempt ran, told after it was over, changes nothing of the one that starts."""
    head = await client.submit(bench.service(restart=1))
    bench.put("task", head.id, status="starting", attempt=2, host=bench.work.host, executor="one")
    late, run = Mock(Attempt), TaskRun(bench.context, head.id)
    late.until_running.return_value = AttemptFacts(started_at=1.0, ready_at=2.0, engine="e")
    first = bench.head(head.id)
    stale = dataclasses.replace(first, attempt=1)
    await run._report_running(stale, late)
    assert bench.head(head.id) == first
    await run._report_running(first, late)
    assert (bench.head(head.id).status, bench.head(head.id).ready_at) == ("running", moment(2.0))


async def test_an_outage_takes_no_artifact(bench, client):
    """A database that is away while outputs are kept is waited for: they are artifacts all the same."""
    bench.starter.scenes = [
        {"artifacts": [{"path": "a.txt", "size": 1, "sha256": "0", "mode": 0o600, "file": "out/0000"}]}
    ]
    bench.shelf.failures = [away(), away()]
    over = await bench.run((await client.submit(bench.make.task())).id)
    assert ([one.path for one in over.artifacts], over.output_errors) == (["a.txt"], ())


async def test_a_store_that_refuses_is_told_of(bench, client):
    """What is no passing trouble is a row of the output's own, and the result stays what it was."""
    bench.starter.scenes = [
        {"artifacts": [{"path": "a.txt", "size": 1, "sha256": "0", "mode": 0o600, "file": "out/0000"}]}
    ]
    bench.shelf.failures = [DatabaseUnavailable("for good")]
    over = await bench.run((await client.submit(bench.make.task())).id)
    assert (over.status, over.artifacts) == ("succeeded", ())
    assert [(one.path, one.code) for one in over.output_errors] == [("a.txt", "database_unavailable")]


async def test_an_output_that_is_not_what_it_was_is_told_of(bench, client, monkeypatch):
    """What the keeper left out, because the disk lost it, is a row of the output's own."""
    names = [{"path": path, "size": 1, "sha256": "0", "mode": 0o600, "file": f"out/{path}"} for path in "ab"]
    bench.starter.scenes, keep = [{"artifacts": names}], bench.shelf.keep
    monkeypatch.setattr(bench.shelf, "keep", lambda head, files, folder, **more: keep(head, files[:1], folder, **more))
    over = await bench.run((await client.submit(bench.make.task())).id)
    assert (over.status, [one.path for one in over.artifacts]) == ("succeeded", ["a"])
    assert [(one.path, one.code) for one in over.output_errors] == [("b", "not_kept")]


@pytest.mark.parametrize("end", ["nonzero", "timeout", "limit"])
async def test_a_cancel_that_came_too_late_changes_nothing(bench, client, end):
    """A program that had ended by itself keeps its result, though a cancel was asked for before it was written."""
    bench.starter.scenes = [{"status": end, "exit_code": 3, "error_code": end}]
    head = await client.submit(bench.make.task())
    bench.put("task", head.id, status="starting", attempt=1, host=bench.work.host, executor="one", cancel_at=1)
    over = await bench.run(head.id)
    assert (over.status, over.exit_code, over.error_code) == ("failed", 3, end)


async def test_a_canceled_service_is_not_failed(bench, client):
    """A service that ends by itself after a cancel would have been restarted: the cancel ended it."""
    bench.starter.scenes = [{"status": "nonzero", "exit_code": 3}]
    head = await client.submit(bench.service(restart=1))
    bench.put("task", head.id, status="starting", attempt=1, host=bench.work.host, executor="one", cancel_at=1)
    over = await bench.run(head.id)
    assert (over.status, over.exit_code, over.attempt) == ("canceled", 3, 1)


@pytest.mark.parametrize("when", ["queued", "claimed"])
async def test_what_was_canceled_before_it_began_never_begins(bench, client, when):
    """A task canceled in its queue has no attempt, whoever takes it afterwards, and says so as every other."""
    head = await client.submit(bench.make.task())
    if when == "claimed":
        bench.put("task", head.id, executor="one")
    assert await client.cancel(TaskHead, bench.make.scope, head.id, "no")
    over = await bench.run(head.id)
    assert (over.status, over.error_code, over.attempt, over.started_at) == ("canceled", "canceled", 0, None)
    assert bench.starter.folders == []


async def test_a_running_program_is_followed_to_its_end(bench, client):
    """`running` is written when it runs, with its times, and the end when there is one."""
    bench.starter.scenes = [{"status": "open", "facts": {"started_at": 7.0, "ready_at": 7.0}, "prints": b"so far"}]
    head = await client.submit(bench.make.task())
    running = asyncio.ensure_future(bench.run(head.id))
    await bench.until(lambda: bench.head(head.id).status == "running")
    assert bench.head(head.id).started_at == moment(7.0)
    folder = bench.starter.folders[0]
    (folder / "exit.json").write_text(f'{{"status": "nonzero", "exit_code": 9, "finished_at": {time.time()}}}')
    os.close(bench.starter.lock)
    over = await asyncio.wait_for(running, 60)
    assert (over.status, over.exit_code, over.stdout_tail) == ("failed", 9, b"so far")


async def test_what_was_ready_on_another_host_is_not_ready_here(bench, client):
    """A task taken over begins anew: its first start stays, its readiness is that of the attempt it has now."""
    bench.starter.scenes = [{"status": "infra_error", "error_code": "infra_error"}]
    head = await client.submit(bench.make.task(retry_on_lost=True))
    values = {"home": None, "host": "elsewhere", "executor": "dead", "started_at": 5, "ready_at": 5}
    bench.put("task", head.id, status="running", attempt=1, **values)
    bench.claim(queue=bench.pool())
    over = await bench.run(head.id)
    assert (over.status, over.attempt, over.host) == ("failed", 2, bench.work.host)
    assert (over.started_at, over.ready_at) == (moment_of(5), None)


@given(
    ends=st.lists(st.sampled_from(["lost", "nonzero", "infra_error", "timeout", "startup_timeout"]), min_size=200),
    restart=st.integers(0, 20),
    retry=st.booleans(),
)
def test_attempts_come_to_an_end(ends, restart, retry):
    """However attempts end, there are at most as many as restarts and tries allow, and restarts are never exceeded."""
    head = _Head(restart, retry)
    for end in ends:
        again = follows(head, Verdict(status=end))
        if again == "no":
            break
        assert again == "restart" or end == "lost"
        head.attempt += 1
        head.restarts += again == "restart"
        assert head.restarts <= restart
    else:
        raise AssertionError("it never ended")
    assert head.attempt <= 1 + restart + 3 * retry


class _Head:
    """What `follows` looks at of a service's head."""

    cancel_at = None

    def __init__(self, restart, retry):
        self.attempt, self.restarts = 1, 0
        self.spec = self
        self.service = self
        self.restart, self.retry_on_lost = restart, retry


def test_the_clock_of_heads_is_exact():
    """Times in seconds and in columns are the same moments."""
    now = utc_now()
    assert moment(micros(now) / 1_000_000) == now
