"""Artifacts with their provenance: who may read them, what storing twice does, and when bytes are forgotten."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from kdskills.errors import Conflict, NotFound
from kdskills.jobs.artifacts import INPUT_KEEP, ArtifactKeeper, ArtifactStore, ArtifactStoreUnavailable, open_artifacts
from kdskills.jobs.attempts import OutFile
from kdskills.jobs.model import Command, Placement, Scope, TaskHead, TaskSpec, artifact_id
from kdskills.jobs.records import STALE, WorkTables, content_note, new_row
from kdskills.storage.database import Database, micros, utc_now

SCOPE = Scope(tenant="t", project="p", agent="a")


def head(task: str = "task_1", scope: Scope = SCOPE, job: str | None = None) -> TaskHead:
    """A task that is over."""
    placement = Placement(engine="bubblewrap", skill_name="public.hello", version_hash="sha256:" + "0" * 64)
    spec = TaskSpec(scope=scope, session_id="s", command=Command(argv=("true",)), placement=placement)
    return TaskHead(
        id=task, spec=spec, status="succeeded", mode="batch", session_key="k", created_at=utc_now(), job_id=job
    )


class Place:
    """A keeper with its database and store in a folder."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.tables = WorkTables()
        self.database = Database(url)
        self.database.create(self.tables.metadata)
        self.store: ArtifactStore = open_artifacts(str(folder / "kept"))
        self.keeper = ArtifactKeeper(self.store, self.database, self.tables, folder / "cache")

    def left(self, path: str, data: bytes) -> OutFile:
        """Write an output."""
        file = hashlib.sha256(path.encode() + data).hexdigest()
        (self.folder / file).write_bytes(data)
        return OutFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest(), mode=0o644, file=file)

    def workers(self, **hosts: str) -> None:
        """Enter workers, by the name of each and its host, into the roster."""
        row = {"slot": 0, "pid": 1, "name": "n", "state": "live", "started_at": 1, "beat_at": 1}
        rows = [row | {"executor": executor, "host": host} for executor, host in hosts.items()]
        self.database.change(lambda link: link.execute(self.tables.workers.insert(), rows))

    def note(self, project: str, sha256: str, age: timedelta) -> None:
        """Note that somebody began to delete bytes that long ago."""
        values = {"name": content_note(project, sha256), "value": str(micros(utc_now() - age))}
        self.database.change(lambda link: link.execute(self.tables.meta.insert().values(values)))

    def row(self, task: str, **values: object) -> TaskHead:
        """Add the row of a task that runs, and return its head."""
        spec = head().spec
        row = new_row(task, spec, "k", body_hash="", home=None) | {"status": "running"} | values
        self.database.change(lambda link: link.execute(self.tables.tasks.insert().values(row)))
        return replace(head(), id=task, executor=values.get("executor"))

    def let_notes_age(self) -> None:
        """Let whoever deletes have begun long ago."""
        meta = self.tables.meta
        old = meta.update().where(meta.c.name.startswith("forget:")).values(value="0")
        self.database.change(lambda link: link.execute(old))

    def notes(self) -> int:
        """Return how many notes stand."""
        return len(self.database.ask(lambda link: link.execute(self.tables.meta.select()).all()))


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place to keep artifacts in, on SQLite unless a test says otherwise."""
    url = f"sqlite:///{tmp_path / 'work.db'}"
    if getattr(request, "param", "sqlite") == "postgres":
        url = request.getfixturevalue("postgres").create(f"kd_{secrets.token_hex(6)}")
    made = Place(tmp_path, url)
    yield made
    made.database.close()


BOTH = pytest.mark.parametrize(
    "place", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)


async def test_provenance_is_kept(place: Place) -> None:
    """An artifact tells its name, content, type, task, job, skill and version."""
    (ref,) = await place.keeper.keep(head(job="job_1"), [place.left("out/data.csv", b"a,b\n")], place.folder)
    assert (ref.artifact_id, ref.path, ref.size, ref.mime) == (
        artifact_id("task_1", "out/data.csv"), "out/data.csv", 4, "text/csv",
    )  # fmt: skip
    found = await place.keeper.find(SCOPE, ref.artifact_id)
    assert (found.task_id, found.job_id, found.skill_name, found.version_hash, found.sha256) == (
        "task_1", "job_1", "public.hello", "sha256:" + "0" * 64, hashlib.sha256(b"a,b\n").hexdigest(),
    )  # fmt: skip


async def test_keeping_again_is_keeping_once(place: Place) -> None:
    """A worker that stores a task's outputs a second time, after a crash, gets the same ids."""
    files = [place.left("a", b"1"), place.left("b", b"1")]
    first = await place.keeper.keep(head(), files, place.folder)
    assert await place.keeper.keep(head(), files, place.folder) == first
    assert len({ref.artifact_id for ref in first}) == 2


@pytest.mark.parametrize(
    "other",
    [Scope(tenant="t", project="q", agent="a"), Scope(tenant="u", project="p", agent="a")],
    ids=["project", "tenant"],
)
async def test_other_projects_find_nothing(place: Place, other: Scope) -> None:
    """Another project's or tenant's id reads like one that does not exist."""
    (ref,) = await place.keeper.keep(head(), [place.left("a", b"1")], place.folder)
    with pytest.raises(NotFound) as theirs:
        await place.keeper.find(other, ref.artifact_id)
    with pytest.raises(NotFound) as nothing:
        await place.keeper.find(other, "art_nothing")
    assert theirs.value.to_json()["error"]["code"] == nothing.value.to_json()["error"]["code"] == "not_found"
    with pytest.raises(NotFound):
        await place.keeper.fetch(other, ref.artifact_id)


async def test_agents_of_a_project_share_artifacts(place: Place) -> None:
    """Artifacts belong to the project: another agent of it may use them as inputs."""
    (ref,) = await place.keeper.keep(head(), [place.left("a", b"1")], place.folder)
    assert (await place.keeper.find(SCOPE.model_copy(update={"agent": "b"}), ref.artifact_id)).agent == "a"


async def test_fetched_copies_are_whole_and_used_again(place: Place) -> None:
    """A copy for a program has the right bytes; asked for again it is the same file."""
    (ref,) = await place.keeper.keep(head(), [place.left("a", b"input")], place.folder)
    first = await place.keeper.fetch(SCOPE, ref.artifact_id)
    assert first.read_bytes() == b"input"
    await place.store.delete("p", ref.sha256)
    assert await place.keeper.fetch(SCOPE, ref.artifact_id) == first


async def test_old_copies_go(place: Place) -> None:
    """A copy nobody asked for in a day is removed; its artifact is not."""
    refs = await place.keeper.keep(head(), [place.left("a", b"old"), place.left("b", b"new")], place.folder)
    copy = await place.keeper.fetch(SCOPE, refs[0].artifact_id)
    os.utime(copy, (1, 1))
    await place.keeper.fetch(SCOPE, refs[1].artifact_id)
    assert not copy.is_file()
    assert (await place.keeper.fetch(SCOPE, refs[0].artifact_id)).read_bytes() == b"old"


async def test_bytes_go_with_their_last_artifact(place: Place) -> None:
    """Forgetting a task keeps bytes another task of the project has, and deletes those nobody has."""
    await place.keeper.keep(head("task_1"), [place.left("a", b"shared"), place.left("b", b"alone")], place.folder)
    await place.keeper.keep(head("task_2"), [place.left("c", b"shared")], place.folder)
    shared, alone = (hashlib.sha256(data).hexdigest() for data in (b"shared", b"alone"))
    await place.keeper.forget(["task_1"])
    assert (await place.store.has("p", shared), await place.store.has("p", alone)) == (True, False)
    with pytest.raises(NotFound):
        await place.keeper.find(SCOPE, artifact_id("task_1", "a"))
    await place.keeper.forget(["task_2", "task_2", "unknown"])
    assert (await place.store.has("p", shared), place.notes()) == (False, 0)


async def test_forgetting_nothing_is_nothing(place: Place) -> None:
    """No tasks, no change."""
    await place.keeper.keep(head(), [place.left("a", b"1")], place.folder)
    await place.keeper.forget([])
    await place.keeper.find(SCOPE, artifact_id("task_1", "a"))


async def test_bytes_being_deleted_are_waited_for(place: Place) -> None:
    """Who stores bytes that are just being deleted waits, and has them in the end."""
    left = place.left("a", b"again")
    sha256 = hashlib.sha256(b"again").hexdigest()
    place.note("p", sha256, timedelta())
    keeping = asyncio.create_task(place.keeper.keep(head(), [left], place.folder))
    done, _ = await asyncio.wait([keeping], timeout=0.5)
    assert done == set()
    place.database.change(lambda link: link.execute(place.tables.meta.delete()))
    (ref,) = await asyncio.wait_for(keeping, 60)
    assert await place.store.has("p", ref.sha256)


async def test_a_note_of_the_dead_holds_nobody_up(place: Place) -> None:
    """The note of a process that died while deleting is overruled."""
    left = place.left("a", b"again")
    place.note("p", hashlib.sha256(b"again").hexdigest(), STALE * 2)
    (ref,) = await asyncio.wait_for(place.keeper.keep(head(), [left], place.folder), 60)
    assert (await place.store.has("p", ref.sha256), place.notes()) == (True, 0)


@BOTH
async def test_storing_and_forgetting_at_once_leaves_no_row_without_bytes(place: Place) -> None:
    """However storing and forgetting of one content interleave, every row has its bytes."""
    left = [place.left(name, b"same") for name in "abcdef"]
    await place.keeper.keep(head("task_0"), left[:1], place.folder)
    for number in range(1, 6):
        await asyncio.gather(
            place.keeper.forget([f"task_{number - 1}"]),
            place.keeper.keep(replace(head(), id=f"task_{number}"), [left[number]], place.folder),
        )
        ref = await place.keeper.find(SCOPE, artifact_id(f"task_{number}", "abcdef"[number]))
        assert await place.store.has("p", ref.sha256)


async def test_a_long_deletion_takes_nothing_from_who_stores(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored while others of its batch are deleted, for longer than a note is fresh, keeps its bytes."""
    names = ("a", "b", "c")
    await place.keeper.keep(head("task_1"), [place.left(name, name.encode()) for name in names], place.folder)
    delete, gone = place.store.delete, list[str]()

    async def slow(project: str, sha256: str) -> None:
        gone.append(sha256)
        if len(gone) == 1:
            place.let_notes_age()
            rest = [
                place.left(name, name.encode())
                for name in names
                if hashlib.sha256(name.encode()).hexdigest() not in gone
            ]
            await asyncio.wait_for(place.keeper.keep(head("task_2"), rest, place.folder), 60)
        await delete(project, sha256)

    monkeypatch.setattr(place.store, "delete", slow)
    await place.keeper.forget(["task_1"])
    present = [await place.store.has("p", hashlib.sha256(name.encode()).hexdigest()) for name in names]
    assert (len(gone), sorted(present)) == (1, [False, True, True])


async def test_a_deletion_that_hangs_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its note is stale a store that does not answer is told, and what it had to delete is deleted later."""
    (ref,) = await place.keeper.keep(head(), [place.left("a", b"1")], place.folder)
    monkeypatch.setattr("kdskills.jobs.artifacts.DELETE_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(place.store, "delete", lambda *_: asyncio.Event().wait())
        with pytest.raises(ArtifactStoreUnavailable):
            await place.keeper.forget(["task_1"])
    await place.keeper.tend()  # its note is fresh: somebody else may be at it
    assert await place.store.has("p", ref.sha256)
    place.let_notes_age()
    await place.keeper.tend()
    assert (await place.store.has("p", ref.sha256), place.notes()) == (False, 0)


@BOTH
async def test_what_was_left_over_is_deleted_later(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes whose rows went before a kill, beside an old note that tells no digest, go in a later round, but for what came back."""
    await place.keeper.keep(head(), [place.left("a", b"1"), place.left("b", b"2")], place.folder)
    one, two = (hashlib.sha256(data).hexdigest() for data in (b"1", b"2"))
    place.note("p", "0" * 64, STALE * 2)

    def killed(*_: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place.store, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            await place.keeper.forget(["task_1"])
    place.let_notes_age()
    await place.keeper.keep(head("task_2"), [place.left("c", b"2")], place.folder)
    await place.keeper.tend()
    assert (await place.store.has("p", one), await place.store.has("p", two), place.notes()) == (False, True, 1)


async def test_other_content_at_the_same_path_leaves_nothing(place: Place) -> None:
    """A worker that stores a task's output anew, with other bytes, does not leave the first ones for ever."""
    (old,) = await place.keeper.keep(head(), [place.left("a", b"old")], place.folder)
    (new,) = await place.keeper.keep(head(), [place.left("a", b"new")], place.folder)
    await place.keeper.tend()
    assert old.artifact_id == new.artifact_id
    assert (await place.store.has("p", old.sha256), await place.store.has("p", new.sha256)) == (False, True)


@BOTH
async def test_hosts_with_a_store_each_keep_their_own(place: Place) -> None:
    """A content that two hosts have goes on each with its last artifact there; that of a host not heard of stays."""
    place.workers(first="one", second="two")
    keepers = {}
    for number, host in enumerate(("one", "two")):
        store = open_artifacts(str(place.folder / host))
        keepers[host] = ArtifactKeeper(store, place.database, place.tables, place.folder / "cache", host=host)
        await keepers[host].keep(place.row(f"task_{number}", host=host), [place.left("a", b"same")], place.folder)
    sha256 = hashlib.sha256(b"same").hexdigest()
    await keepers["one"].forget(["task_0"])
    assert [await keepers[host].store.has("p", sha256) for host in keepers] == [False, True]
    await keepers["one"].keep(place.row("task_3", host="one"), [place.left("a", b"same")], place.folder)
    await keepers["one"].keep(place.row("task_4", host="gone"), [place.left("a", b"same")], place.folder)
    await keepers["one"].forget(["task_3"])
    assert [await keepers[host].store.has("p", sha256) for host in keepers] == [True, True]


async def test_what_is_not_what_was_told_is_no_artifact(place: Place) -> None:
    """Files that a power cut emptied, changed or took are not stored in the place of what the program left."""
    left = [place.left(name, name.encode()) for name in ("good", "cut", "changed", "gone")]
    (place.folder / left[1].file).write_bytes(b"")
    (place.folder / left[2].file).write_bytes(b"CHANGED")
    (place.folder / left[3].file).unlink()
    assert [ref.path for ref in await place.keeper.keep(head(), left, place.folder)] == ["good"]


@BOTH
async def test_who_lost_a_task_changes_nothing_of_it(place: Place) -> None:
    """A worker that was given up, or whose task another has or is over, does not replace what the successor stored."""
    place.workers(old="one", new="two")
    tables, taken = place.tables, place.row("task_1", executor="old")
    (first,) = await place.keeper.keep(taken, [place.left("a", b"1")], place.folder, executor="old")
    tasks, buried = tables.tasks, tables.workers.update().where(tables.workers.c.executor == "old")
    for changes in (
        [tasks.update().values(executor="new")],
        [tasks.update().values(executor="old", status="canceled")],
        [tasks.update().values(status="running"), buried.values(state="dead")],
    ):
        place.database.change(lambda link, changes=changes: [link.execute(change) for change in changes])
        with pytest.raises(Conflict):
            await place.keeper.keep(taken, [place.left("a", b"2")], place.folder, executor="old")
    assert (await place.keeper.find(SCOPE, first.artifact_id)).sha256 == first.sha256


async def test_inputs_of_calls_are_kept_for_a_while(place: Place) -> None:
    """A large input is kept once however often it comes, is found by its project alone, and goes when it is old."""
    item = await place.keeper.keep_input(SCOPE, b"large")
    assert await place.keeper.keep_input(SCOPE, b"large") == item
    assert (await place.keeper.fetch(SCOPE, item)).read_bytes() == b"large"
    with pytest.raises(NotFound):
        await place.keeper.find(SCOPE.model_copy(update={"project": "q"}), item)
    await place.keeper.tend()
    await place.keeper.find(SCOPE, item)
    old = micros(utc_now() - INPUT_KEEP * 2)
    place.database.change(lambda link: link.execute(place.tables.artifacts.update().values(created_at=old)))
    await place.keeper.tend()
    with pytest.raises(NotFound):
        await place.keeper.find(SCOPE, item)
    assert await place.store.has("p", hashlib.sha256(b"large").hexdigest()) is False
    assert list((place.folder / "cache" / "coming").iterdir()) == []
