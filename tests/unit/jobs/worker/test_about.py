"""Lines of a worker's log: JSON, with the task and the job they are about."""

import asyncio
import io
import json
import logging

from kdskills.app.logs import json_logs
from kdskills.app.telemetry import Telemetry
from kdskills.errors.traces import Trace
from kdskills.jobs import shim
from kdskills.jobs.runs import AboutWork, TaskRun, about
from kdskills.jobs.worker import Worker
from kdskills.storage.database import DatabaseUnavailable

LOG = logging.getLogger("kdskills.jobs")


class Lines:
    """What a worker would write to its standard error."""

    def __init__(self):
        self.out = io.StringIO()

    def __enter__(self):
        self.logs = json_logs(self.out)
        self.logs.__enter__()
        self.filter = AboutWork()
        self.handler = logging.getLogger().handlers[-1]
        self.handler.addFilter(self.filter)
        return self

    def __exit__(self, *caught):
        self.handler.removeFilter(self.filter)
        self.logs.__exit__(*caught)

    def read(self):
        """Return the lines."""
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


def test_a_line_names_what_it_is_about():
    """Inside the block a line has the ids, outside it has none, and an inner block adds to the outer."""
    with Lines() as lines:
        LOG.info("before")
        with about(task="t"), about(job="j", other=None):
            LOG.info("inside")
        LOG.info("after")
    before, inside, after = lines.read()
    assert (inside["task"], inside["job"]) == ("t", "j")
    assert all("task" not in line and "other" not in line for line in (before, after))
    assert "other" not in inside


def test_facts_of_the_line_itself_come_first():
    """A line that names a task of its own is about that one; other facts stay beside it."""
    with Lines() as lines, about(task="outer", job="j"):
        LOG.info("x", extra={"facts": {"task": "own", "kept": 3}})
        LOG.info("y", extra={"facts": "no facts"})
    own, other = lines.read()
    assert (own["task"], own["job"], own["kept"]) == ("own", "j", 3)
    assert other["task"] == "outer"


async def test_tasks_at_once_keep_their_ids_apart():
    """Fifty pieces of work at one time, threads included, each write their own id."""

    async def one(number):
        with about(task=f"t{number}"):
            await asyncio.sleep(0)
            await asyncio.to_thread(LOG.info, "m%d", number)

    with Lines() as lines:
        await asyncio.gather(*(one(number) for number in range(50)))
    assert {(line["task"], line["message"]) for line in lines.read()} == {(f"t{n}", f"m{n}") for n in range(50)}


async def test_what_breaks_is_told_with_its_task(bench, client):
    """A worker's own failure ends the task with `infra_error`; the log names the task, and where it broke."""
    head = await client.submit(bench.make.task())
    worker = Worker(bench.work, bench.shelf)
    worker.context, worker.executor = bench.context, "one"
    bench.starter.broken = RuntimeError("a bug")
    bench.claim()
    with Lines() as lines:
        await worker._guarded("task", head.id, TaskRun(bench.context, head.id).run())
    over = bench.head(head.id)
    assert (over.status, over.error_code, over.error_message) == ("failed", "infra_error", "RuntimeError: a bug")
    (line,) = lines.read()
    assert (line["task"], line["level"], line["message"]) == (head.id, "error", f"task {head.id} broke")
    assert "RuntimeError: a bug" in line["error"]


async def test_an_entry_whose_answer_was_lost_is_made_anew(bench, monkeypatch):
    """A worker that begins anew enters, under a name nobody had, also after an entry that came through without its answer."""
    worker, enter, names = Worker(bench.work, bench.shelf), bench.work.roster.enter, []

    def losing(executor, slot, entry):
        enter(executor, slot, entry)
        names.append(executor)
        if len(names) == 1:
            raise DatabaseUnavailable("its answer was lost")

    monkeypatch.setattr(bench.work.roster, "enter", losing)
    assert await asyncio.wait_for(worker._enter_again(), 20)
    alive = {row.executor for row in bench.work.database.ask(bench.roster.live)}
    assert (len(set(names)), alive) == (2, {"one", worker.executor})


async def test_a_task_goes_on_with_its_trace(bench, client):
    """What a worker logs of a task is of the trace it was submitted with, and so is its program: a step within that."""
    begun, context = Trace.new(), bench.context
    context.span = Telemetry().span
    spec = bench.make.task().model_copy(update={"traceparent": str(begun)})
    head = await client.submit(spec)
    plain_start, texts = bench.starter.start, []

    async def start(folder):
        LOG.info("it starts")
        texts.append((folder / shim.ORDER).read_text(encoding="utf-8"))
        await plain_start(folder)

    bench.starter.start = start
    with Lines() as lines:
        await bench.run(head.id)
    (order,) = (Trace.read(json.loads(text)["traceparent"]) for text in texts)
    assert (order.trace_id, order.span_id == begun.span_id) == (begun.trace_id, False)
    assert bench.head(head.id).spec.trace_id == begun.trace_id
    assert [line["trace_id"] for line in lines.read()] == [begun.trace_id]
