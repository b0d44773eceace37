"""Folders of sessions in the store: what comes back, what is sent, who may overwrite, and what hostile stores and lists do."""

import asyncio
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.errors import Conflict
from kdskills.execution.request import Artifact
from kdskills.jobs.artifacts import ArtifactStoreUnavailable, open_artifacts
from kdskills.jobs.attempts import OutputBounds
from kdskills.jobs.exchange import SessionFile, SessionFolder, WorkdirFiles
from kdskills.jobs.model import Scope, TaskHead
from kdskills.jobs.queue import Work
from kdskills.jobs.records import new_row
from kdskills.jobs.session_folders import (
    MANY,
    PACK,
    SMALL,
    FolderManifest,
    FolderPointer,
    SessionFolderCorrupt,
    SessionFolders,
    plan_folder,
    put_pointer,
    read_note,
    read_pointer,
)
from kdskills.jobs.settings import JobsSettings
from kdskills.storage.database import utc_now

ROOMY = OutputBounds(files=4000, total=2**30)
KEY = Scope().session_key("s")


class Counted:
    """A store that counts what it is asked, and fails or lies where a test says so."""

    def __init__(self, blobs):
        self.blobs, self.asked = blobs, Counter()
        self.room = None
        self.spoil = None

    async def save(self, key, source):
        """Keep a file, as long as there is room."""
        if self.room is not None:
            if not self.room:
                raise ArtifactStoreUnavailable("the storage of artifacts does not answer: Away")
            self.room -= 1
        self.asked["save"] += 1
        await self.blobs.save(key, source)

    async def size(self, key):
        """Return a size."""
        self.asked["size"] += 1
        return await self.blobs.size(key)

    async def read(self, key):
        """Stream a key, spoilt if a test says so."""
        self.asked["read"] += 1
        async for chunk in self.blobs.read(key):
            yield chunk if self.spoil is None else self.spoil(key, chunk)

    async def delete(self, key):
        """Forget a key."""
        self.asked["delete"] += 1
        await self.blobs.delete(key)

    async def keys(self, prefix):
        """List keys."""
        self.asked["keys"] += 1
        return await self.blobs.keys(prefix)


class Keeper:
    """Has a store, as a keeper of artifacts has."""

    def __init__(self, store):
        self.store = store


class HostFolders:
    """One host of several that share a database and a store."""

    def __init__(self, top, name, **jobs):
        store = open_artifacts(str(top / "store"))
        self.blobs = store.blobs = Counted(store.blobs)
        given = JobsSettings(**{"session_folders": "store"} | jobs)
        self.work = Work(f"sqlite:///{top / 'work.db'}", top / name, given)
        self.folders = SessionFolders(self.work, Keeper(store))
        self.folder = SessionFolder(self.work.attempts.session_dir(KEY))

    def write(self, files, modes=()):
        """Let a command leave exactly these files, as bytes by path."""
        left = [
            Artifact(path, len(data), hashlib.sha256(data).hexdigest(), dict(modes).get(path, 0o600), data)
            for path, data in files.items()
        ]
        with self.folder.reading() as base:
            pass
        assert self.folder.commit(base, WorkdirFiles(files=left, complete=True), ROOMY) == []

    def files(self):
        """Return bytes and modes by path, as the next command would get them."""
        with self.folder.reading() as version:
            found = {path: (file.read_bytes(), mode) for path, (file, mode) in version.files.items()}
            assert all(file.stat().st_mode & 0o777 == mode for file, mode in version.files.values())
            assert all(len(found[path][0]) == entry.size for path, entry in version.entries.items())
        return found

    def contents(self):
        """Return bytes by path."""
        return {path: data for path, (data, _) in self.files().items()}

    async def save(self, head):
        """Save as the end of a run does; return what could not be saved."""
        async with self.folders.saving(head) as save:
            self.work.database.change(save.settle)
            await save.tidy()
        return [error.code for error in save.errors]

    def pointer(self):
        """Return what counts."""
        return self.work.database.ask(lambda link: read_pointer(self.work, link, KEY))

    def point(self, pointer):
        """Let something else count."""
        assert self.work.database.change(lambda link: put_pointer(self.work, link, KEY, self.pointer(), pointer))

    async def stored(self):
        """Return the keys of the session in the store."""
        return sorted(await self.blobs.blobs.keys(f"session-folders/local/{KEY}"))

    def host(self):
        """Return the host the session is bound to."""
        table = self.work.tables.sessions
        return self.work.database.ask(lambda link: link.execute(table.select()).one().host)

    def settled(self):
        """Bind the session to this host, as a claim does."""
        self.work.database.change(lambda link: self.work.queue._settle(link, [KEY]))


@pytest.fixture
def hosts(tmp_path, template):
    """Return a maker of hosts; they are closed at the end."""
    shutil.copyfile(template, tmp_path / "work.db")
    made = []

    def make(*names, **jobs):
        made.extend(HostFolders(tmp_path, name, **jobs) for name in names)
        return made[-len(names) :]

    yield make
    for host in made:
        host.work.close()


@pytest.fixture
def head(make):
    """Return a task of the session."""
    return TaskHead(
        id="task_1", spec=make.task("s"), status="running", mode="batch", session_key=KEY, created_at=utc_now()
    )


ODD = {
    "a": b"1", "deep/er/file": b"22", "ümlaut/日本 ": b"", "-rf": b"x" * (SMALL + 1), "same": b"1", "$(id)": b"\0\xff", "~": b"",
}  # fmt: skip


async def test_a_folder_comes_to_another_host_as_it_was(hosts, head):
    """Names, bytes and modes of small, large, equal and empty files; then what the other host changes comes back."""
    one, two = hosts("one", "two")
    one.write(ODD, {"a": 0o700, "~": 0o700})
    one.settled()
    assert await one.save(head) == []
    assert one.host() is None
    await two.folders.bring(head)
    assert two.files() == one.files()
    two.write({"a": b"changed", "new": b"n"})
    assert await two.save(head) == []
    await one.folders.bring(head)
    assert one.contents() == {"a": b"changed", "new": b"n"}
    assert one.pointer().generation == 2


paths = st.lists(st.sampled_from(["a", "b", "ä", "日", " ", "x" * 100, "-", "$"]), min_size=1, max_size=3).map("/".join)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(
        st.dictionaries(paths, st.tuples(st.binary(max_size=40), st.sampled_from([0o600, 0o700])), max_size=6),
        min_size=1,
        max_size=4,
    )
)
async def test_any_folders_come_back(hosts, head, rounds):
    """Whatever two hosts leave in turn, the other one gets it, and the store has no more than the last list needs."""
    one, two = hosts("one", "two")
    for number, files in enumerate(rounds):
        files = {
            path: entry for path, entry in files.items() if not any(other.startswith(f"{path}/") for other in files)
        }
        here, there = (one, two) if number % 2 == 0 else (two, one)
        await here.folders.bring(head)
        here.write({path: data for path, (data, _) in files.items()}, {path: mode for path, (_, mode) in files.items()})
        assert await here.save(head) == []
        await there.folders.bring(head)
        assert here.files() == there.files() == files
    stored, note = await one.stored(), read_note(one.folders._folder(KEY))
    assert len(stored) == (0 if one.pointer() is None else 1 + len(json.loads(note.text).get("objects", ())))


async def test_what_did_not_change_costs_no_request(hosts, head):
    """Hundreds of small files are one object; unchanged they cost nothing, and one changed file one small object."""
    (one,) = hosts("one")
    files = {f"d{n % 10}/{n}": b"%d" % n * 20 for n in range(300)}
    one.write(files)
    await one.save(head)
    assert (one.blobs.asked, len(await one.stored())) == ({"size": 1, "save": 2, "keys": 1}, 2)
    one.blobs.asked.clear()
    await one.save(head)
    assert one.blobs.asked == {}
    one.write(files | {"d0/0": b"other"})
    await one.save(head)
    assert one.blobs.asked == {"size": 2, "save": 2, "keys": 1, "delete": 1}
    assert len(await one.stored()) == 3


async def test_a_save_that_breaks_leaves_the_state_before_and_goes_on(hosts, head):
    """With the store away in the middle, the former folder counts and the session stays; what was sent is not sent again."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    await one.save(head)
    before = one.pointer()
    one.write({"a": b"2", "b": b"B" * (SMALL + 1), "c": b"C" * (SMALL + 1)})
    one.settled()
    one.blobs.room = 2
    assert await one.save(head) == ["artifact_store_unavailable"]
    assert (one.pointer(), one.host()) == (before, one.work.host)
    await two.folders.bring(head)
    assert two.contents() == {"a": b"1"}
    one.blobs.room = None
    one.blobs.asked.clear()
    assert await one.save(head) == []
    assert one.blobs.asked["save"] == 2  # the third object, and the list
    assert one.host() is None
    await two.folders.bring(head)
    assert two.contents() == one.contents()


async def test_killed_between_the_last_byte_and_the_row(hosts, head):
    """Everything is in the store and nothing counts: the next save finishes it, here or from another host's older state."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    await one.save(head)
    one.write({"a": b"2"})
    async with one.folders.saving(head):
        pass  # killed: no transaction, no tidying
    (one.folder._top / ".spool-dead").mkdir()
    await two.folders.bring(head)
    assert two.contents() == {"a": b"1"}
    await one.folders.bring(head)
    assert one.contents() == {"a": b"2"}, "what is here goes on from what counts"
    one.blobs.asked.clear()
    await one.save(head)
    assert one.blobs.asked["save"] == 1  # the list alone
    assert [path.name for path in one.folder._top.glob(".spool-*")] == []
    await two.folders.bring(head)
    assert two.contents() == {"a": b"2"}


KILLED = """
import asyncio, os, pathlib, signal, sys, types
from kdskills.jobs.artifacts import open_artifacts
from kdskills.jobs.queue import Work
from kdskills.jobs.session_folders import SessionFolders
from kdskills.jobs.settings import JobsSettings

top, key, store = pathlib.Path(sys.argv[1]), sys.argv[2], open_artifacts(sys.argv[1] + "/store")
save, begun = store.blobs.save, []

async def save_or_die(name, source):
    begun.append(name)
    if len(begun) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    await save(name, source)

async def main():
    work = Work(f"sqlite:///{top / 'work.db'}", top / "one", JobsSettings(session_folders="store"))
    async with SessionFolders(work, types.SimpleNamespace(store=store))._saving(key, "local"):
        raise AssertionError("it went through")

store.blobs.save = save_or_die
asyncio.run(main())
"""


async def test_killed_in_the_middle_of_saving(hosts, head, tmp_path):
    """A process killed between two objects leaves the former folder whole, and the next one sends only what is missing."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    await one.save(head)
    before = one.pointer()
    one.write({"a": b"2", "b": b"B" * (SMALL + 1), "c": b"C" * (SMALL + 1)})
    command = [sys.executable, "-c", KILLED, str(tmp_path), KEY, "3"]
    died = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60, check=False)
    assert (died.returncode, one.pointer()) == (-signal.SIGKILL, before), died.stderr
    await two.folders.bring(head)
    assert two.contents() == {"a": b"1"}
    one.blobs.asked.clear()
    assert await one.save(head) == []
    assert one.blobs.asked["save"] == 2  # the third object, and the list
    await two.folders.bring(head)
    assert two.contents() == one.contents()
    assert len(await one.stored()) == 4


async def test_saves_of_one_host_wait_for_one_another(hosts, head):
    """Of two commands that end at once, the second saves what both left, on top of what the first saved."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    async with one.folders.saving(head) as first:
        second = asyncio.create_task(one.save(head))
        one.write({"a": b"1", "b": b"2"})
        await asyncio.sleep(0)
        one.work.database.change(first.settle)
        await first.tidy()
    assert await second == []
    await two.folders.bring(head)
    assert (two.contents(), two.pointer().generation) == ({"a": b"1", "b": b"2"}, 2)


async def test_a_command_that_waited_for_another_to_bring_the_folder_leaves_its_changes(hosts, head):
    """Of two steps that begin at once, the second one brings nothing once the first has, whose changes stay."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    await one.save(head)
    async with two.folders._alone(KEY) as spool:
        second = asyncio.create_task(two.folders.bring(head))
        await asyncio.sleep(0.02)
        await two.folders._bring(KEY, spool)
        two.write({"a": b"1", "b": b"2"})
    await second
    assert two.contents() == {"a": b"1", "b": b"2"}


async def test_a_host_that_comes_back_overwrites_nothing(hosts, head):
    """One that was in the middle of its save when another took over is refused, harms nothing in the store, and then follows."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    await one.save(head)
    first, needed = one.pointer(), {key.rpartition("/")[2] for key in await one.stored()}
    one.write({"a": b"stale"})
    async with one.folders.saving(head) as late:
        await two.folders.bring(head)
        two.write({"a": b"1", "b": b"new"})
        await two.save(head)
        after = two.pointer()
        with pytest.raises(Conflict) as refused:
            one.work.database.change(late.settle)
        assert refused.value.code == "session_moved"
    assert two.pointer() == after
    await one.folders.sweep(KEY, first, needed)  # it was paused since its first save
    one.write({"a": b"staler"})
    assert await one.save(head) == []
    assert two.pointer() == after, "nothing that does not go on from what counts is saved"
    await one.folders.bring(head)
    assert one.contents() == {"a": b"1", "b": b"new"}


@pytest.mark.parametrize("part", ["manifest", "object"])
@pytest.mark.parametrize("spoil", ["other", "more", "less", "gone"])
async def test_a_store_that_lies_is_found_out(hosts, head, part, spoil):
    """Other bytes, more, fewer or none are refused, and the folder here stays as it was."""
    one, two = hosts("one", "two")
    one.write({"a": b"1", "b": b"2"})
    await one.save(head)
    await two.folders.bring(head)
    one.write({"a": b"3", "b": b"44"})
    await one.save(head)
    changed = {"other": lambda text: bytes([text[0] ^ 1]) + text[1:], "more": lambda text: text + b"x" * 2**20,
               "less": lambda text: text[:-1]}  # fmt: skip
    if spoil == "gone":
        for key in await one.stored():
            if key.endswith(".json") == (part == "manifest"):
                await one.blobs.blobs.delete(key)
    else:
        two.blobs.spoil = lambda key, text: (
            changed[spoil](text) if key.endswith(".json") == (part == "manifest") else text
        )
    with pytest.raises(SessionFolderCorrupt):
        await two.folders.bring(head)
    assert two.contents() == {"a": b"1", "b": b"2"}
    assert await two.save(head) == []
    assert one.pointer().generation == 2


DIGEST = hashlib.sha256(b"evil").hexdigest()
FILE = {"mode": 0o600, "size": 4, "sha256": DIGEST, "object": 0}
HOSTILE = {
    "parent": {"files": {"../out": FILE}},
    "absolute": {"files": {"/etc/out": FILE}},
    "dots": {"files": {"a/../../out": FILE}},
    "below a file": {"files": {"a": FILE, "a/b": FILE}},
    "control": {"files": {"a\nb": FILE}},
    "direction": {"files": {"a\u202eb": FILE}},
    "link": {"files": {"a": FILE | {"link": "/etc/passwd"}}},
    "setuid": {"files": {"a": FILE | {"mode": 0o4755}}},
    "no object": {"files": {"a": FILE | {"object": 7}}},
    "no bytes": {"files": {"a": FILE | {"object": None}}},
    "beyond": {"files": {"a": FILE | {"offset": 1}}},
    "negative": {"files": {"a": FILE | {"offset": -1}}},
    "digest": {"files": {"a": FILE | {"sha256": "0" * 64}}},
    "key": {"objects": [{"generation": 1, "sha256": "../../x", "size": 4}]},
    "later": {"objects": [{"generation": 9, "sha256": DIGEST, "size": 4}]},
    "too many": {"files": {str(n): FILE for n in range(6)}},
    "too large": {"files": {"a": FILE | {"size": 2**40}}, "objects": [{"generation": 1, "sha256": DIGEST, "size": 2**40}]},
    "another's": {"session": "0" * 40},
    "schema": {"schema": "kdskills.session-folder/9"},
    "more": {"owner": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTILE, "no json", "huge"])
async def test_hostile_lists_bring_nothing(hosts, head, tmp_path, name):
    """A list that counts and is not one of ours leaves the folder as it was and writes nowhere else."""
    (one,) = hosts("one", session_store_files=5)
    whole = {"schema": "kdskills.session-folder/1", "session": KEY, "generation": 1, "files": {"a": FILE}}
    whole |= {"objects": [{"generation": 1, "sha256": DIGEST, "size": 4}]} | HOSTILE.get(name, {})
    text = b"{" if name == "no json" else json.dumps(whole).encode()
    pointer = FolderPointer(
        generation=1,
        manifest=hashlib.sha256(text).hexdigest(),
        size=2**40 if name == "huge" else len(text),
        project="local",
    )
    for key, data in ((f"0000000001-{DIGEST}", b"evil"), (f"0000000001-{pointer.manifest}.json", text)):
        (tmp_path / "blob").write_bytes(data)
        await one.blobs.blobs.save(f"session-folders/local/{KEY}/{key}", tmp_path / "blob")
    one.write({"mine": b"m"})
    one.point(pointer)
    with pytest.raises(SessionFolderCorrupt):
        await one.folders.bring(head)
    assert one.contents() == {"mine": b"m"}
    top = one.folder._top
    assert {path.name for path in top.iterdir()} == {"current", ".lock", ".saving", *(p.name for p in top.glob("v-*"))}
    assert len(list(top.glob("v-*"))) == 1
    assert {path.name for path in top.parent.iterdir()} == {KEY}


async def test_what_is_too_much_stays_on_its_host(hosts, head):
    """Beyond the bounds nothing is sent, the task says so, and the session stays where its files are."""
    (one,) = hosts("one", session_store_bytes=10)
    one.write({"a": b"x" * 11})
    one.settled()
    assert await one.save(head) == ["session_too_large"]
    assert (one.pointer(), one.host(), await one.stored()) == (None, one.work.host, [])


async def test_a_file_that_rotted_here_is_not_sent(hosts, head):
    """Bytes that are not those of their digest any more leave the former folder as what counts."""
    (one,) = hosts("one")
    one.write({"a": b"right"})
    with one.folder.reading() as version:
        (version.folder / "a").write_bytes(b"wrong")
    assert await one.save(head) == ["session_corrupt"]
    assert one.pointer() is None


async def test_what_a_store_lost_is_sent_anew_as_a_whole(hosts, head):
    """A host whose own copy of the list is there trusts it no more once the store has none, as after the restore of a backup."""
    one, two = hosts("one", "two")
    one.write({"a": b"1", "b": b"2"})
    await one.save(head)
    for key in await one.stored():
        await one.blobs.blobs.delete(key)
    one.write({"a": b"1", "b": b"3"})
    assert await one.save(head) == []
    await two.folders.bring(head)
    assert two.contents() == {"a": b"1", "b": b"3"}


async def test_a_list_that_is_gone_is_sent_anew(hosts, head):
    """A host whose own copy of the list is gone, too, saves the whole folder."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    await one.save(head)
    for key in await one.stored():
        await one.blobs.blobs.delete(key)
    note = read_note(one.folders._folder(KEY))
    one.folders.write_note(KEY, type(note)(note.version, "lost", one.pointer().manifest))
    one.write({"a": b"2"})
    assert await one.save(head) == []
    await two.folders.bring(head)
    assert two.contents() == {"a": b"2"}


async def test_on_hosts_nothing_is_saved(hosts, head):
    """By default nobody asks the store, and the session stays bound."""
    (one,) = hosts("one", session_folders="host")
    one.write({"a": b"1"})
    one.settled()
    await one.folders.bring(head)
    assert await one.save(head) == []
    assert (one.blobs.asked, one.host()) == ({}, one.work.host)


async def test_saved_folders_are_found_after_the_setting_went_back(hosts, head):
    """A host that leaves folders where they are still brings what another one had saved."""
    (one,), (two,) = hosts("one"), hosts("two", session_folders="host")
    one.write({"a": b"1"})
    await one.save(head)
    await two.folders.bring(head)
    assert two.contents() == {"a": b"1"}


async def test_unused_sessions_are_forgotten_exactly(hosts, head, make):
    """What was unused for as long as it is kept goes from the store; an open session and others' folders stay."""
    one, two = hosts("one", "two", session_store_keep_s=3600.0)
    other = TaskHead(id="task_2", spec=make.task("t"), status="running", mode="batch", session_key=Scope().session_key("t"), created_at=utc_now())  # fmt: skip
    for key, task in ((KEY, head), (other.session_key, other)):
        SessionFolder(one.work.attempts.session_dir(key)).commit(
            SessionFolder(one.work.attempts.session_dir(key))._version(),
            WorkdirFiles(files=[Artifact("a", 1, hashlib.sha256(b"1").hexdigest(), 0o600, b"1")], complete=True), ROOMY,
        )  # fmt: skip
        one.work.database.change(lambda link, key=key: one.work.queue._settle(link, [key]))
        await one.save(task)
    await two.folders.bring(head)

    def age(key):
        table = one.work.tables.sessions
        one.work.database.change(
            lambda link: link.execute(table.update().where(table.c.session_key == key).values(used_at=1))
        )

    assert await one.folders.forget_unused() == 0
    age(KEY)
    assert await one.folders.forget_unused() == 1
    assert (await one.stored(), one.pointer().manifest) == ([], "")
    assert len(await one.blobs.blobs.keys(f"session-folders/local/{other.session_key}")) == 2
    await two.folders.bring(head)
    assert two.contents() == {}, "it begins anew"
    two.write({"b": b"2"})
    await two.save(head)
    assert two.pointer().generation == 2
    age(KEY)
    await one.folders.forget_unused()
    age(KEY)
    await one.folders.forget_unused()
    assert one.pointer() is None
    await two.folders.bring(head)
    assert two.contents() == {}


def entries(*sizes):
    """Return files of these sizes, each of its own bytes."""
    return {f"f{n}": SessionFile(0o600, size, f"{n:064x}") for n, size in enumerate(sizes)}


def applied(plan, files, generation):
    """Return the manifest after a plan was done."""
    objects, places = list(plan.objects), dict(plan.places)
    sizes = {file.sha256: file.size for file in files.values()}
    for group in plan.missing:
        offset = 0
        for sha256 in group:
            places[sha256] = (len(objects), offset)
            offset += sizes[sha256]
        objects.append({"generation": generation, "sha256": f"{generation * 1000 + len(objects):064x}", "size": offset})
    named = {
        path: {"mode": file.mode, "size": file.size, "sha256": file.sha256}
        | ({"object": places[file.sha256][0], "offset": places[file.sha256][1]} if file.size else {})
        for path, file in files.items()
    }
    return FolderManifest(
        schema="kdskills.session-folder/1", session="s", generation=generation, objects=objects, files=named
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1, 50, SMALL, SMALL + 1, PACK]), max_size=12), min_size=1, max_size=12))
def test_plans_keep_few_objects_and_little_waste(rounds):
    """After any changes every file has its bytes, objects stay few, and at least half of each is needed."""
    manifest = None
    for number, sizes in enumerate(rounds, 1):
        files = {
            f"f{n}": SessionFile(0o600, size, f"{number * (n % 3 == 0)}{n}{size:062x}"[:64])
            for n, size in enumerate(sizes)
        }
        plan = plan_folder(files, manifest)
        manifest = applied(plan, files, number)
        assert manifest.problem("s", 100, 2**40) is None
        needed = {file.sha256: file for file in manifest.files.values() if file.size}
        used = Counter()
        for file in needed.values():
            used[file.object] += file.size
        assert all(2 * used[index] >= item.size for index, item in enumerate(manifest.objects))
        large = sum(file.size > SMALL for file in needed.values())
        assert len(manifest.objects) <= large + MANY + 3


async def test_what_stayed_on_a_host_is_saved_later(hosts, head, make):
    """Once the store answers again, what an idle session left is saved without a further command; not of one in use."""
    one, two = hosts("one", "two")
    one.write({"a": b"1"})
    one.settled()
    one.blobs.room = 0
    assert await one.save(head) == ["artifact_store_unavailable"]
    row = new_row("task_1", make.task("s"), KEY, body_hash="", home=None)
    one.work.database.change(lambda link: one.work.records.add(link, "task", row))
    one.blobs.room = None
    await one.folders.tend()
    assert one.pointer() is None, "it is in use"
    tasks = one.work.tables.tasks
    one.work.database.change(lambda link: link.execute(tasks.update().values(status="succeeded")))
    await two.folders.tend()
    assert one.pointer() is None, "it is another host's"
    await one.folders.tend()
    assert one.host() is None
    await two.folders.bring(head)
    assert two.contents() == {"a": b"1"}
