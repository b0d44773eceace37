"""One job in a worker's hands: tries after their pause, cancels at each point, and two workers that want it."""

import asyncio
import contextlib
from datetime import timedelta

import pytest
import sqlalchemy as sa

from kdskills.jobs import runs
from kdskills.jobs.model import JobHead, step_task_id
from kdskills.jobs.runs import JobRun
from kdskills.jobs.worker import Worker
from kdskills.storage.database import micros, utc_now


async def begun(bench, head, context=None):
    """Run a job's worker until it has submitted its first step, and return the running worker."""
    run = asyncio.ensure_future(bench.run_job(head.id, context))
    await bench.until(lambda: bench.head(step_task_id(head.id, 0, 0)) is not None or run.done())
    return run


@contextlib.contextmanager
def statements(work):
    """Gather what the database is asked within the block."""
    asked = []

    def note(_link, _cursor, statement, *_):
        asked.append(statement)

    sa.event.listen(work.database.engine, "before_cursor_execute", note)
    yield asked
    sa.event.remove(work.database.engine, "before_cursor_execute", note)


def job_of(bench, head):
    """Return the job as it is now."""
    return bench.work.database.ask(lambda link: bench.work.records.head(link, JobHead, head.id))


def end(bench, head, step, status, *, number=0, ago=0.0, **more):
    """End a step's try, some seconds ago."""
    at = micros(utc_now() - timedelta(seconds=ago))
    bench.put("task", step_task_id(head.id, step, number), status=status, finished_at=at, **more)


async def test_a_job_ends_with_its_steps(bench, client):
    """Each step is submitted when the one before it succeeded, and the job ends after the last."""
    head = await client.submit(bench.make.job("a", "b"))
    run = await begun(bench, head)
    end(bench, head, 0, "succeeded", attempt=1)
    await bench.until(lambda: bench.head(step_task_id(head.id, 1, 0)) is not None)
    assert job_of(bench, head).current_step_index == 0
    end(bench, head, 1, "succeeded", attempt=1)
    await asyncio.wait_for(run, 60)
    over = job_of(bench, head)
    assert (over.status, over.error_code, over.current_step_index) == ("succeeded", None, 1)
    assert over.started_at <= over.finished_at


async def test_a_failed_step_rests_before_its_next_try(bench, client):
    """`retry_backoff_s` holds a try back, and the job goes on meanwhile; once it is over, the try is submitted."""
    bench.work.settings = bench.work.settings.model_copy(update={"retry_backoff_s": 3600.0})
    head = await client.submit(bench.make.job(bench.make.step("a", retry=1)))
    run = await begun(bench, head)
    end(bench, head, 0, "failed", attempt=1)
    assert not await JobRun(bench.context, head.id)._step(job_of(bench, head))
    assert bench.head(step_task_id(head.id, 0, 1)) is None
    found = job_of(bench, head)
    assert (found.status, found.steps[0].status, found.current_step_index) == ("running", "queued", 0)
    end(bench, head, 0, "failed", attempt=1, ago=3601.0)
    await bench.until(lambda: bench.head(step_task_id(head.id, 0, 1)) is not None)
    end(bench, head, 0, "succeeded", number=1, attempt=1)
    await asyncio.wait_for(run, 60)
    assert (job_of(bench, head).status, job_of(bench, head).steps[0].tries) == ("succeeded", 2)


async def test_a_job_sleeps_until_something_is_due(bench, client, monkeypatch):
    """The end of a step's rest and of a job's time are met though nothing tells of them; nothing is asked in between."""
    monkeypatch.setattr(runs, "_LOOK_S", 3600.0)
    bench.work.settings = bench.work.settings.model_copy(update={"retry_backoff_s": 0.3})
    head = await client.submit(bench.make.job(bench.make.step("a", retry=1), max_wall_time_s=2.0))
    run = await begun(bench, head)
    end(bench, head, 0, "failed", attempt=1)
    with statements(bench.work) as asked:
        bench.context.note_change(head.id)
        await bench.until(lambda: bench.head(step_task_id(head.id, 0, 1)) is not None)
        await asyncio.wait_for(run, 20)
    over = job_of(bench, head)
    assert (over.status, over.error_code, over.steps[0].tries) == ("failed", "timeout", 2)
    assert sum("kd_jobs" in words and "UPDATE" not in words and words.startswith("SELECT") for words in asked) < 12


async def test_a_look_at_a_job_reads_each_step_once(bench, client):
    """One question for the job and one for its steps, whose output, specifications and files are left where they are."""
    head = await client.submit(bench.make.job("a"))
    run = await begun(bench, head)
    with statements(bench.work) as asked:
        bench.context.note_change(head.id)
        await bench.until(lambda: any("kd_tasks" in words for words in asked))
    end(bench, head, 0, "succeeded", attempt=1)
    bench.context.note_change(head.id)
    await asyncio.wait_for(run, 60)
    assert [words.count("kd_jobs.spec") for words in asked[:2]] == [1, 0]
    (steps,) = [words for words in asked[:2] if "FROM kd_tasks" in words]
    assert not [name for name in ("_tail", "spec", "artifacts", "endpoints") if name in steps]


async def test_a_job_may_be_canceled_while_a_step_rests(bench, client):
    """A cancel does not wait for the pause between two tries."""
    bench.work.settings = bench.work.settings.model_copy(update={"retry_backoff_s": 3600.0})
    head = await client.submit(bench.make.job(bench.make.step("a", retry=1)))
    run = await begun(bench, head)
    end(bench, head, 0, "failed", attempt=1)
    assert await client.cancel(JobHead, bench.make.scope, head.id, "enough")
    await asyncio.wait_for(run, 60)
    over = job_of(bench, head)
    assert (over.status, over.error_code, over.steps[0].status) == ("canceled", "canceled", "failed")


async def test_a_step_canceled_in_its_queue_never_began(bench, client):
    """A job that is canceled before its first step's program began has no current step."""
    head = await client.submit(bench.make.job("a", "b"))
    run = await begun(bench, head)
    assert await client.cancel(JobHead, bench.make.scope, head.id)
    await asyncio.wait_for(run, 60)
    over = job_of(bench, head)
    assert (over.status, over.current_step_index) == ("canceled", -1)
    assert [(step.status, step.begun) for step in over.steps] == [("canceled", False), ("skipped", False)]
    assert over.steps[0].task.error_code == "canceled"


@pytest.mark.parametrize("why", ["canceled", "taken", "buried", "over"])
async def test_nothing_begins_in_a_job_that_goes_on_elsewhere(bench, client, why):
    """A worker that looked before a cancel, a takeover or the end submits no step after it."""
    head = await client.submit(bench.make.job("a", "b"))
    bench.put("job", head.id, status="running", executor="one")
    seen = job_of(bench, head)
    change = {"canceled": {"cancel_at": 1}, "taken": {"executor": "two"}, "over": {"status": "failed"}}
    if why == "buried":
        await asyncio.to_thread(bench.roster.leave, "one")
    else:
        bench.put("job", head.id, **change[why])
    await JobRun(bench.context, head.id)._step(seen)
    assert bench.head(step_task_id(head.id, 0, 0)) is None


async def test_an_overdue_job_fails_with_timeout(bench, client):
    """A job whose time was over before this worker came cancels what runs and fails."""
    head = await client.submit(bench.make.job("a", "b", max_wall_time_s=5.0))
    began = micros(utc_now() - timedelta(hours=1))
    bench.put("job", head.id, status="running", executor="dead", host=bench.work.host, started_at=began)
    await asyncio.wait_for(bench.run_job(head.id), 60)
    over = job_of(bench, head)
    assert (over.status, over.error_code) == ("failed", "timeout")
    assert over.started_at < head.created_at


@pytest.mark.parametrize("runs_already", [False, True], ids=["queued", "running"])
async def test_a_job_that_breaks_takes_its_steps_along(bench, client, monkeypatch, runs_already):
    """Nothing of it begins or goes on any more, and it ends after the last of its programs."""
    head = await client.submit(bench.make.job("a", "b"))
    worker = Worker(bench.work, bench.shelf)
    worker.context, worker.executor = bench.context, "one"
    bench.claim()
    step = step_task_id(head.id, 0, 0)
    run = asyncio.ensure_future(worker._guarded("job", head.id, JobRun(bench.context, head.id).run()))
    await bench.until(lambda: bench.head(step) is not None)
    if runs_already:
        bench.put("task", step, status="running", attempt=1, executor="one", host=bench.work.host)
    monkeypatch.setattr(runs, "decide", lambda *_, **__: 1 / 0)
    bench.context.note_change(head.id)
    await bench.until(lambda: bench.head(step).cancel_at is not None)
    assert bench.head(step).cancel_reason == "its job broke"
    if runs_already:
        assert job_of(bench, head).status == "running"
        end(bench, head, 0, "canceled")
        bench.context.note_change(head.id)
    await asyncio.wait_for(run, 60)
    over = job_of(bench, head)
    assert (over.status, over.error_code, over.steps[0].status) == ("failed", "infra_error", "canceled")
    assert over.error_message.startswith("ZeroDivisionError")


async def test_the_next_worker_goes_on_where_the_dead_one_stood(bench, client):
    """A step that was submitted is not submitted again, and the job keeps the time it began."""
    head = await client.submit(bench.make.job("a", "b"))
    run = await begun(bench, head)
    began = job_of(bench, head).started_at
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    end(bench, head, 0, "succeeded", attempt=1)
    second = asyncio.ensure_future(bench.run_job(head.id, bench.worker("two", 1)))
    await bench.until(lambda: bench.head(step_task_id(head.id, 1, 0)) is not None)
    end(bench, head, 1, "failed", attempt=1)
    await asyncio.wait_for(second, 60)
    over = job_of(bench, head)
    assert (over.status, over.error_code, over.started_at) == ("failed", "step_failed", began)
    assert [step.tries for step in over.steps] == [1, 1]


async def test_a_job_that_is_over_is_nobodys(bench, client):
    """A worker that gets a job after its end leaves it as it is."""
    head = await client.submit(bench.make.job("a"))
    assert await client.cancel(JobHead, bench.make.scope, head.id)
    before = job_of(bench, head)
    await asyncio.wait_for(bench.run_job(head.id), 60)
    assert job_of(bench, head) == before
