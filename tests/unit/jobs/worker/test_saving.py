"""A worker and the folders of its sessions: what it may still write once the others gave it up."""

import asyncio
import hashlib
from functools import partial
from types import SimpleNamespace

import pytest

from kdskills.execution.request import Artifact
from kdskills.jobs.artifacts import ArtifactKeeper, ArtifactStoreUnavailable, open_artifacts
from kdskills.jobs.attempts import OutputBounds
from kdskills.jobs.exchange import SessionFolder, WorkdirFiles
from kdskills.jobs.model import Scope
from kdskills.jobs.records import new_row
from kdskills.jobs.runs import Buried, TaskRun
from kdskills.jobs.session_folders import FolderPointer, SessionFolders, put_pointer, read_pointer


def open_store(folder):
    """Return what has a store in a folder, as a keeper of artifacts has."""
    return SimpleNamespace(store=open_artifacts(str(folder / "store")))


class Gate:
    """A store whose saves wait until they are let through."""

    def __init__(self, store):
        self.store, self.blobs, self.inner = self, self, store.blobs
        self.begun, self.open = asyncio.Event(), asyncio.Event()

    async def save(self, key, source):
        """Keep a file once it may."""
        self.begun.set()
        await self.open.wait()
        await self.inner.save(key, source)

    async def size(self, key):
        """Return a size."""
        return await self.inner.size(key)


class Away(Gate):
    """A store that does not answer."""

    async def size(self, key):
        """Do not answer."""
        raise ArtifactStoreUnavailable("the storage of artifacts does not answer: Away")


KEY = Scope().session_key("s")


def begin(bench, make, store):
    """Let the bench's worker save to *store*, claim a task of a session, and leave a file; return the task's id."""
    bench.work.settings = bench.work.settings.model_copy(update={"session_folders": "store"})
    bench.context.folders = SessionFolders(bench.work, store)
    row = new_row("task_1", make.task("s"), KEY, body_hash="", home=bench.work.host)
    bench.work.database.change(lambda link: bench.work.records.add(link, "task", row))
    bench.claim()
    folder = SessionFolder(bench.work.attempts.session_dir(KEY))
    left = Artifact("a", 1, hashlib.sha256(b"1").hexdigest(), 0o600, b"1")
    folder.commit(folder._version(), WorkdirFiles(files=[left], complete=True), OutputBounds())
    return "task_1"


def session(bench):
    """Return the host a session is bound to, and what counts of it."""
    table = bench.work.tables.sessions
    host = bench.work.database.ask(lambda link: link.execute(table.select()).one().host)
    return host, bench.work.database.ask(partial(read_pointer, bench.work, session_key=KEY))


async def test_the_end_of_a_task_and_its_folder_are_one_transaction(bench, make, tmp_path):
    """Once the task is over its folder counts, and the session is bound to no host."""
    item = begin(bench, make, open_store(tmp_path))
    await TaskRun(bench.context, item).run()
    host, pointer = session(bench)
    assert (bench.head(item).status, host, pointer.generation) == ("succeeded", None, 1)


async def test_a_store_that_is_away_changes_no_outcome(bench, make, tmp_path):
    """The task is what it was, says what was not saved, and the session stays with its host."""
    item = begin(bench, make, Away(open_store(tmp_path).store))
    await TaskRun(bench.context, item).run()
    head = bench.head(item)
    errors = [(error.path, error.code) for error in head.output_errors]
    assert (head.status, errors) == ("succeeded", [(".", "artifact_store_unavailable")])
    assert session(bench) == (bench.work.host, None)


async def test_a_folder_that_cannot_be_brought_fails_the_task_before_it_runs(bench, make, tmp_path):
    """Nothing is started on a folder older than what counts, and nothing of it is saved."""
    item = begin(bench, make, open_store(tmp_path))
    lost = FolderPointer(generation=3, manifest="0" * 64, size=10, project="local")
    bench.work.database.change(lambda link: put_pointer(bench.work, link, KEY, None, lost))
    await TaskRun(bench.context, item).run()
    head = bench.head(item)
    assert (head.status, head.error_code, bench.starter.folders) == ("failed", "session_corrupt", [])
    assert session(bench) == (None, lost)


async def test_a_worker_given_up_while_it_saves_lets_nothing_count(bench, make, tmp_path):
    """The others took its task while its files were on their way: neither the task's end nor the session's folder is written."""
    gate = Gate(open_store(tmp_path).store)
    item = begin(bench, make, gate)
    run = asyncio.create_task(TaskRun(bench.context, item).run())
    await gate.begun.wait()
    bench.put("task", item, executor="another")
    bench.roster.leave(bench.context.executor)
    gate.open.set()
    with pytest.raises(Buried):
        await run
    assert (bench.head(item).status, session(bench)[1]) == ("starting", None)


async def test_a_worker_given_up_leaves_no_artifacts(bench, client, make, tmp_path):
    """What it would store is its successor's to store: the rows stay as they are, and it ends."""
    work = bench.work
    bench.context.keeper = ArtifactKeeper(open_artifacts(str(tmp_path)), work.database, work.tables, tmp_path)
    left = {"path": "a", "size": 1, "sha256": hashlib.sha256(b"1").hexdigest(), "mode": 0o600, "file": "left"}
    bench.starter.scenes = [{"artifacts": [left]}]
    head = await client.submit(make.task())
    start = bench.starter.start

    async def start_and_lose(folder):
        await start(folder)
        (folder / "left").write_bytes(b"1")
        bench.put("task", head.id, executor="another")
        bench.roster.leave(bench.context.executor)

    bench.starter.start = start_and_lose
    with pytest.raises(Buried):
        await bench.run(head.id)
    assert work.database.ask(lambda link: link.execute(work.tables.artifacts.select()).all()) == []
