"""A worker and the folders of its sessions: what it may still write once the others gave it up."""

import asyncio
import hashlib
from functools import partial

import pytest

from kdskills.execution.request import Artifact
from kdskills.jobs.artifacts import open_artifacts
from kdskills.jobs.attempts import OutputBounds
from kdskills.jobs.exchange import SessionFolder, WorkdirFiles
from kdskills.jobs.model import Scope
from kdskills.jobs.records import new_row
from kdskills.jobs.runs import Buried, TaskRun
from kdskills.jobs.session_folders import SessionFolders, read_pointer


class Gate:
    """A store whose saves wait until they are let through."""

    def __init__(self, store):
        self.store, self.blobs = self, self
        self.inner = store.blobs
        self.begun, self.open = asyncio.Event(), asyncio.Event()

    async def save(self, key, source):
        """Keep a file once it may."""
        self.begun.set()
        await self.open.wait()
        await self.inner.save(key, source)

    async def size(self, key):
        """Return a size."""
        return await self.inner.size(key)


async def test_a_worker_given_up_while_it_saves_lets_nothing_count(bench, make, tmp_path):
    """The others took its task while its files were on their way: neither the task's end nor the session's folder is written."""
    bench.work.settings = bench.work.settings.model_copy(update={"session_folders": "store"})
    gate = Gate(open_artifacts(str(tmp_path / "store")))
    bench.context.folders = SessionFolders(bench.work, gate)
    item = "task_1"
    bench.work.database.change(
        lambda link: bench.work.records.add(
            link, "task", new_row(item, make.task("s"), Scope().session_key("s"), body_hash="", home=bench.work.host)
        )
    )
    bench.claim()
    folder = SessionFolder(bench.work.attempts.session_dir(Scope().session_key("s")))
    left = Artifact("a", 1, hashlib.sha256(b"1").hexdigest(), 0o600, b"1")
    folder.commit(folder._version(), WorkdirFiles(files=[left], complete=True), OutputBounds())
    run = asyncio.create_task(TaskRun(bench.context, item).run())
    await gate.begun.wait()
    bench.put("task", item, executor="another")
    bench.roster.leave(bench.context.executor)
    gate.open.set()
    with pytest.raises(Buried):
        await run
    read = partial(read_pointer, bench.work, session_key=Scope().session_key("s"))
    assert (bench.head(item).status, bench.work.database.ask(read)) == ("starting", None)
