"""A cancel that comes in each state, with and without a worker that could see it."""

import asyncio
import json
import os

import pytest

from kdskills.jobs import shim
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import JobHead, TaskHead
from kdskills.jobs.records import new_row

GONE = {"pid": 1, "started": "never", "boot": "none"}


def attempt_of(bench, head, *, number=1, prints=b"so far", verdict=None):
    """Leave on disk what an attempt of a task left whose worker and shim are dead; with a verdict it ended by itself."""
    folder = bench.work.attempts._folder(head.id, number)
    folder.mkdir(parents=True)
    order = {"task_id": head.id, "attempt": number, "spec": head.spec.model_dump(mode="json")}
    shim.write_json(folder / shim.ORDER, {"order": order})
    (folder / shim.LOCK).write_text(json.dumps(GONE))
    (folder / shim.STDOUT).write_bytes(prints)
    shim.write_json(folder / shim.FACTS, {"started_at": 5.0, "ready_at": 5.0, "engine": "e"})
    if verdict is not None:
        shim.write_json(folder / shim.EXIT, {"finished_at": 9.0} | verdict)
    return folder


async def orphan(bench, client, status="running", **more):
    """Return a task that a dead worker had in a state, with what its attempt left."""
    head = await client.submit(bench.make.task())
    bench.put("task", head.id, status=status, attempt=1, host=bench.work.host, executor="dead")
    attempt_of(bench, head, **more)
    return head


@pytest.mark.parametrize("status", ["starting", "running"])
async def test_without_a_worker_the_head_tells_what_was_printed(bench, client, status):
    """The call ends what nobody alive holds, and its head has times and output as one a worker wrote."""
    head = await orphan(bench, client, status)
    assert await client.cancel(TaskHead, bench.make.scope, head.id, "enough")
    over = bench.head(head.id)
    assert (over.status, over.error_code, over.cancel_reason) == ("canceled", "canceled", "enough")
    assert (over.stdout_tail, over.stdout_total, over.stderr_total) == (b"so far", 6, 0)
    assert over.started_at == over.ready_at
    assert over.started_at is not None
    assert not await client.cancel(TaskHead, bench.make.scope, head.id, "again")
    assert bench.head(head.id) == over


@pytest.mark.parametrize(
    ("verdict", "end"),
    [({"status": "ok", "exit_code": 0}, ("succeeded", 0)), ({"status": "nonzero", "exit_code": 4}, ("failed", 4))],
    ids=["ok", "nonzero"],
)
async def test_what_had_ended_by_itself_keeps_its_result(bench, client, verdict, end):
    """A program that was over before the cancel is no canceled one because no worker had told of it yet."""
    head = await orphan(bench, client, verdict=verdict)
    assert await client.cancel(TaskHead, bench.make.scope, head.id)
    waits = bench.head(head.id)
    assert (waits.status, waits.cancel_at is not None) == ("running", True)
    over = await bench.run(head.id)
    assert ((over.status, over.exit_code), over.stdout_tail) == (end, b"so far")


async def test_a_worker_is_started_for_what_a_cancel_leaves(bench, place):
    """What had ended by itself is written by a worker, and the cancel that found it starts one."""
    calls = []
    client = JobsClient(bench.work.url, place, spawn=lambda: calls.append(1))
    bench.gone(1)
    head = await orphan(bench, client, verdict={"status": "ok", "exit_code": 0})
    calls.clear()
    client._spawned_at = float("-inf")
    assert await client.cancel(TaskHead, bench.make.scope, head.id)
    assert calls == [1]
    await client.aclose()


async def test_outputs_nobody_could_keep_are_named(bench, client):
    """Outputs of a program that was canceled without a worker are rows of their own, not silently gone."""
    out = {"path": "a.txt", "size": 1, "sha256": "0", "mode": 0o600, "file": "out/0000"}
    head = await orphan(bench, client, verdict={"status": "cancelled", "error_code": "canceled", "artifacts": [out]})
    assert await client.cancel(TaskHead, bench.make.scope, head.id)
    over = bench.head(head.id)
    assert (over.status, [(one.path, one.code) for one in over.output_errors]) == ("canceled", [("a.txt", "not_kept")])


async def test_what_never_began_has_no_output(bench, client):
    """A task whose worker died between its decision and the start is canceled without an attempt to look at."""
    head = await client.submit(bench.make.task())
    bench.put("task", head.id, status="starting", attempt=1, host=bench.work.host, executor="dead")
    assert await client.cancel(TaskHead, bench.make.scope, head.id)
    over = bench.head(head.id)
    assert (over.status, over.error_code, over.started_at, over.stdout_total) == ("canceled", "canceled", None, None)


async def test_another_hosts_program_is_not_looked_for_here(bench, client):
    """A dead host's task is ended in its row; folders of this host say nothing of it."""
    head = await orphan(bench, client, verdict={"status": "ok"})
    bench.put("task", head.id, host="elsewhere")
    assert await client.cancel(TaskHead, bench.make.scope, head.id)
    assert (bench.head(head.id).status, bench.head(head.id).stdout_total) == ("canceled", None)


async def test_a_living_worker_is_left_to_it(bench, client):
    """While a live worker holds the task a cancel only asks."""
    head = await orphan(bench, client)
    bench.put("task", head.id, executor="one")
    assert await client.cancel(TaskHead, bench.make.scope, head.id, "please")
    asked = bench.head(head.id)
    assert (asked.status, asked.cancel_reason, asked.finished_at) == ("running", "please", None)
    assert await client.cancel(TaskHead, bench.make.scope, head.id, "again")
    assert bench.head(head.id) == asked


async def test_many_cancels_at_once_agree(bench, client):
    """Cancels of one orphan from many callers end it once, and every caller finds the same head."""
    head = await orphan(bench, client)
    said = await asyncio.gather(*(client.cancel(TaskHead, bench.make.scope, head.id, f"r{n}") for n in range(8)))
    over = bench.head(head.id)
    assert any(said)
    assert (over.status, over.stdout_tail) == ("canceled", b"so far")
    assert over.cancel_reason in {f"r{n}" for n in range(8)}


class Job:
    """A job whose worker is dead, with one task per given state of its steps."""

    def __init__(self, bench, head):
        self.bench, self.head = bench, head
        bench.put("job", head.id, status="running", executor="dead", host=bench.work.host)
        self.tasks = []

    def add(self, status, **more):
        """Add the task of the next step."""
        work, step = self.bench.work, len(self.tasks)
        item = f"task_{self.head.id[4:]}{step}"
        row = new_row(item, self.bench.make.task("s"), self.head.session_key, body_hash="", home=work.host)
        row |= {"job_id": self.head.id, "step": step, "try": 0, "status": status, "host": work.host}
        work.database.change(lambda link: work.records.add(link, "task", row | more))
        self.tasks.append(self.bench.head(item))
        return self.tasks[-1]

    def look(self):
        """Return the job."""
        return self.bench.work.database.ask(lambda link: self.bench.work.records.head(link, JobHead, self.head.id))


@pytest.fixture
async def job(bench, client):
    """Return the job."""
    return Job(bench, await client.submit(bench.make.job("a", "b", "c", "d", max_concurrency=4)))


async def test_a_job_without_a_worker_ends_with_its_steps(bench, client, job):
    """Steps in every state: what ran is ended, what waited is canceled, what was over stays, what never came is skipped."""
    job.add("succeeded", executor="dead", attempt=1)
    ran = job.add("running", executor="dead", attempt=1)
    job.add("queued")
    attempt_of(bench, ran)
    assert await client.cancel(JobHead, bench.make.scope, job.head.id, "enough")
    over = job.look()
    assert (over.status, over.error_code, over.cancel_reason) == ("canceled", "canceled", "enough")
    assert [step.status for step in over.steps] == ["succeeded", "canceled", "canceled", "skipped"]
    assert over.current_step_index == 1
    assert over.steps[1].task.stdout_tail == b"so far"


async def test_a_job_waits_for_steps_that_had_ended(bench, client, job):
    """A step that was over before the cancel keeps its result; the job ends after it, canceled."""
    ended = job.add("running", executor="dead", attempt=1)
    attempt_of(bench, ended, verdict={"status": "ok", "exit_code": 0})
    assert await client.cancel(JobHead, bench.make.scope, job.head.id)
    assert job.look().status == "running"
    assert (await bench.run(ended.id)).status == "succeeded"
    await asyncio.wait_for(bench.run_job(job.head.id), 60)
    over = job.look()
    assert (over.status, over.error_code) == ("canceled", "canceled")
    assert [step.status for step in over.steps] == ["succeeded", "skipped", "skipped", "skipped"]


async def test_a_step_in_living_hands_is_asked(bench, client, job):
    """A job's cancel reaches a step that another worker has; the job ends once that is over."""
    held = job.add("running", executor="one", attempt=1)
    assert await client.cancel(JobHead, bench.make.scope, job.head.id, "stop")
    assert (bench.head(held.id).status, bench.head(held.id).cancel_reason) == ("running", "stop")
    assert job.look().status == "running"
    bench.put("task", held.id, status="canceled", finished_at=1)
    await asyncio.wait_for(bench.run_job(job.head.id), 60)
    assert job.look().status == "canceled"


async def test_a_program_that_lives_is_ended_first(bench, client, python_sleeper):
    """The row of an orphan says canceled only when its program is gone: the lock of its attempt is free."""
    head = await orphan(bench, client)
    folder = bench.work.attempts._folder(head.id, 1)
    lock = shim.take_lock(folder)
    os.pwrite(lock, json.dumps(shim.identity(python_sleeper(folder, lock))).encode(), 0)
    os.close(lock)  # the sleeper has it, as a shim would
    assert await client.cancel(TaskHead, bench.make.scope, head.id, "enough")
    taken = shim.take_lock(folder, 0.0)
    assert taken is not None
    os.close(taken)
    assert bench.head(head.id).status == "canceled"
