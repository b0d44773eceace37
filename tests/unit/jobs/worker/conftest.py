"""A worker without its queue: tasks are seen through on this loop, and programs are what a script says of them."""

import asyncio
import contextlib
import subprocess
import sys
import time

import pytest

from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts
from kdskills.jobs.model import ArtifactRef, TaskHead
from kdskills.jobs.queue import Roster, WorkQueue, hold_slot
from kdskills.jobs.runs import JobRun, TaskRun, WorkerContext
from kdskills.storage.database import micros, utc_now


class Scripted:
    """Starts no process: each attempt is at once what the next scene says, as a shim would have left it.

    A scene is a dict: `status` of the verdict (None leaves it open), `prints`, `facts` and whatever else a verdict has.
    The last scene is played again and again.
    """

    def __init__(self):
        self.scenes = [{}]
        self.folders = []
        self.broken = None

    async def start(self, folder):
        """Play a scene."""
        if self.broken is not None:
            raise self.broken
        self.folders.append(folder)
        scene = {"status": "ok", "prints": b"", "facts": None} | self.scenes[
            min(len(self.folders), len(self.scenes)) - 1
        ]
        (folder / shim.LOCK).write_text('{"pid": 1, "started": "never", "boot": "none"}')
        (folder / shim.STDOUT).write_bytes(scene.pop("prints"))
        facts, status = scene.pop("facts"), scene.pop("status")
        if facts is not None:
            shim.write_json(folder / shim.FACTS, {"engine": "e"} | facts)
        if status == "open":
            self.lock = shim.take_lock(folder)
        elif status is not None:
            shim.write_json(folder / shim.EXIT, {"status": status, "finished_at": time.time()} | scene)

    async def reap(self, engine):
        """Find nothing."""


class Shelf:
    """Keeps outputs by name, after as many failures as a test wants."""

    def __init__(self):
        self.failures = []
        self.kept = []

    async def keep(self, head, files, folder, *, executor):
        """Keep them."""
        if self.failures:
            raise self.failures.pop(0)
        self.kept += [file.path for file in files]
        return tuple(
            ArtifactRef(artifact_id=f"art_{file.path}", path=file.path, size=file.size, sha256=file.sha256)
            for file in files
        )

    async def fetch(self, scope, item):
        """Have none."""
        if self.failures:
            raise self.failures.pop(0)
        raise AssertionError("nothing is asked for")

    async def forget(self, task_ids):
        """Forget nothing."""

    async def tend(self):
        """Have nothing left over."""


class Bench:
    """A place with a worker in its roster, whose tasks run here."""

    def __init__(self, work, make):
        self.work, self.make = work, make
        self.starter, self.shelf = Scripted(), Shelf()
        work.attempts = Attempts(work.state_dir, self.starter)
        self.roster, self.slots = Roster(work), {}
        self.context = self.worker("one", 1)

    def worker(self, executor, slot):
        """Return the context of a new worker; whoever had the slot is dead."""
        if slot not in self.slots:
            self.slots[slot] = contextlib.ExitStack()
            assert self.slots[slot].enter_context(hold_slot(self.work.state_dir, slot))
        self.roster.enter(executor, slot)
        return WorkerContext(self.work, executor, self.shelf)

    def claim(self, context=None, queue=None):
        """Let a worker claim what it may, and return that."""
        context, queue = context or self.context, queue or self.work.queue
        return self.work.database.change(
            lambda link: queue.claim(link, context.executor, context.capacity(), context.active)
        )

    async def run(self, item, context=None):
        """Claim a task, see it through and return its head."""
        self.claim(context)
        await TaskRun(context or self.context, item).run()
        return self.head(item)

    async def run_job(self, item, context=None):
        """Claim a job and see it through, but for its tasks."""
        self.claim(context)
        await JobRun(context or self.context, item).run()

    def pool(self):
        """Return the queue of this host as one of a pool."""
        work = self.work
        return WorkQueue(work.records, self.roster, work.host, pooled=True, global_concurrency=None, quotas=work.quotas)

    def far(self, executor="far", state="live", lease_us=60_000_000):
        """Add a worker of another host, `elsewhere`."""
        table, now = self.work.tables.workers, micros(utc_now())
        row = {"executor": executor, "host": "elsewhere", "slot": 0, "pid": 1, "name": "far", "state": state}
        row |= {"started_at": now, "beat_at": now, "lease_until": now + lease_us}
        self.work.database.change(lambda link: link.execute(table.insert().values(**row)))

    def gone(self, slot):
        """Let the worker of a slot die."""
        self.slots.pop(slot).close()

    async def until(self, condition):
        """Wait until *condition* holds."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it never came true"
            await asyncio.sleep(0.01)

    def head(self, item):
        """Return a task's head."""
        return self.work.database.ask(lambda link: self.work.records.head(link, TaskHead, item))

    def put(self, kind, item, **values):
        """Put values into a row, whatever it was."""
        table = self.work.records.table(kind)
        self.work.database.change(lambda link: link.execute(table.update().where(table.c.id == item).values(**values)))

    def service(self, restart=0, **more):
        """Return a service."""
        task = self.make.task(**more)
        return task.model_validate(task.model_dump() | {"mode": "service", "service": {"restart": restart}})


@pytest.fixture
def bench(open_place, make):
    """Return the bench; services are restarted at once."""
    made = Bench(open_place(restart_backoff_s=0.001, restart_backoff_max_s=0.002), make)
    yield made
    for slot in list(made.slots):
        made.gone(slot)


@pytest.fixture
def python_sleeper():
    """Return a starter of processes that hold an attempt's lock until they are told to end; they are ended at the end."""
    started = []

    def start(folder, lock):
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        started.append(subprocess.Popen(command, pass_fds=(lock,)))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()
