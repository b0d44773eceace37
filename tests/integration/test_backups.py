"""A restored backup is its source, on both databases, whatever ran meanwhile; damaged and hostile ones change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import itertools
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from hypothesis import given, settings, strategies
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.backup import BackupMaker, Restorer, check_backup
from kdskills.app.operations import Context
from kdskills.app.settings import settings_line
from kdskills.app.turns import TurnArchive
from kdskills.doors.cli.main import build_cli
from kdskills.errors import Conflict, KdskillsError, NotFound
from kdskills.execution.dirs import locked
from kdskills.execution.request import Artifact
from kdskills.jobs.artifacts import ArtifactKeeper
from kdskills.jobs.attempts import OutputBounds
from kdskills.jobs.exchange import SessionFolder, WorkdirFiles
from kdskills.jobs.model import Scope, TaskHead
from kdskills.jobs.queue import Work
from kdskills.storage import backup_file
from kdskills.storage.backup_file import BackupMember, BackupReader, BackupRefused, BackupWriter, DatabaseRows
from kdskills.storage.database import Database, table_columns, table_names
from kdskills.storage.folder import StorageFull
from kdskills.testing.work import WorkLab, labs

KINDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))]


def skill_archive(folder: Path, name: str = "brief", body: str = "Read.") -> Path:
    """Write the archive of a skill with a program."""
    place = folder / f"{name}-{secrets.token_hex(4)}.zip"
    with zipfile.ZipFile(place, "w") as out:
        out.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes pages.\n---\n{body}\n")
        program = zipfile.ZipInfo(f"{name}/scripts/run.sh")
        program.external_attr = 0o755 << 16
        out.writestr(program, "#!/bin/sh\necho hi\n")
    return place


def make_host(folder: Path, url: str | None = None, **more: object) -> Host:
    """Return a Host with a state folder of its own, and conversations in a database."""
    store = f"sqlite:///{folder / 'conversations.db'}"
    facts = {"state_dir": folder / "state", "index_dir": folder / "index", "database_url": url, "bundle": None}
    return Host(Settings(**{**facts, "session_store": store, **more}), entry_points=False)


async def close(*hosts: Host) -> None:
    """Close what hosts opened."""
    for host in hosts:
        if "work" in vars(host):
            await host.work.aclose()
        await host.storage.aclose()


def rows_of(url: str) -> dict[str, list[tuple[object, ...]]]:
    """Return every row of every table."""

    def ask(link: sa.Connection) -> dict[str, list[tuple[object, ...]]]:
        tables = [table_columns(link, name) for name in table_names(link)]
        return {table.name: sorted((tuple(row) for row in link.execute(table.select())), key=repr) for table in tables}

    with contextlib.closing(Database(url)) as database:
        return database.ask(ask)


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Return mode and digest of every file below a folder."""
    return {
        str(path.relative_to(folder)): (
            stat.S_IMODE(path.stat().st_mode),
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


async def keep_artifact(host: Host, content: bytes, project: str = "acme") -> str:
    """Store an input of a project and return its id."""
    work = await host.work.client.work()
    keeper = ArtifactKeeper(host.work.artifacts(), work.database, work.tables, host.settings.state_dir / "inputs")
    return await keeper.keep_input(Scope(project=project, agent="writer"), content)


async def fill(host: Host, folder: Path) -> None:
    """Keep something of each kind: versions, tokens, audit rows, artifacts, conversations, session files, a journal of calls."""
    context = Context()
    await host.invoke("projects.create", {"project": "acme"}, context)
    for body in ("Read.", "Read twice."):
        await host.projects.upload("acme", skill_archive(folder, body=body), who="test")
    await host.invoke("tokens.create", {"project": "acme", "agent": "writer", "scopes": ["skills:read"]}, context)
    for number in range(5):
        await keep_artifact(host, f"content {number}".encode() * 1000, "acme" if number % 2 else "strange ~ /../ ü")
    await host.session_store(host.settings.session_store).get("nobody")
    session = host.settings.state_dir / "sessions" / "s1" / "deep"
    session.mkdir(parents=True, mode=0o700)
    (session / "ü \udcff\n.txt").write_bytes(os.urandom(3_000_000))
    (session / "ü \udcff\n.txt").chmod(0o600)
    (session / "run").write_text("#!/bin/sh\n")
    (session / "run").chmod(0o700)
    (session / "link").symlink_to("/etc/passwd")
    (session / "empty").mkdir()
    os.mkfifo(session / "pipe")


@pytest.fixture(params=KINDS)
def urls(request: pytest.FixtureRequest) -> tuple[str | None, str | None]:
    """URLs of two databases, which the default ones are where there are none."""
    if request.param == "sqlite":
        return None, None
    server = request.getfixturevalue("postgres")
    return server.create(f"kept_{secrets.token_hex(6)}"), server.create(f"restored_{secrets.token_hex(6)}")


async def test_a_restored_backup_is_its_source(tmp_path, urls):
    """Tables row for row, objects and files byte for byte, and lists through operations are those of the source."""
    for name in "ab":
        (tmp_path / name).mkdir()
    source, target = make_host(tmp_path / "a", urls[0]), make_host(tmp_path / "b", urls[1])
    await fill(source, tmp_path)
    made = await source.invoke("backup.create", {"path": str(tmp_path)}, Context())
    assert (made.complete, made.objects, made.versions, made.left_out) == (True, 5, 2, 2)
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o600  # noqa: PTH116 - asked within a loop
    whole = await target.invoke("backup.restore", {"path": made.path, "check": True}, Context())
    assert (whole.rows, whole.restored, (tmp_path / "b" / "state").exists()) == (made.rows, False, False)
    done = await target.invoke("backup.restore", {"path": made.path}, Context())
    assert done.restored
    assert rows_of(source.settings.work_database) == rows_of(target.settings.work_database)
    assert rows_of(source.settings.session_store) == rows_of(target.settings.session_store)
    for part in ("artifacts", "sessions", "host"):
        one, other = (host.settings.state_dir / part for host in (source, target))
        assert tree(one) == tree(other)
    versions = [
        {path: facts for path, facts in tree(host.settings.state_dir / "projects").items() if not path.endswith(".zip")}
        for host in (source, target)
    ]
    assert versions[0] == versions[1] != {}
    assert (target.settings.state_dir / "sessions/s1/deep/empty").is_dir()
    for operation in ("projects.list", "tokens.list", "audit_log.list", "project_skills.list"):
        arguments = {"project": "acme"} if operation.startswith("project_") else {}
        answers = [await host.invoke(operation, arguments, Context()) for host in (source, target)]
        assert answers[0] == answers[1]
    checked = await target.invoke("db.check", {}, Context())
    assert (checked.ok, checked.findings) == (True, ())
    await target.invoke(
        "projects.create", {"project": "later"}, Context()
    )  # numbers of rows go on after those restored
    with pytest.raises(KdskillsError) as refused:
        await target.invoke("backup.restore", {"path": made.path}, Context())
    assert refused.value.code == "restore_not_empty"
    await close(source, target)


@pytest.mark.needs("postgres")
async def test_a_backup_goes_from_one_kind_of_database_to_the_other(tmp_path, postgres):
    """Rows are written the same whatever they came from: a backup of either kind restores into both."""
    for name in "abc":
        (tmp_path / name).mkdir()
    url = postgres.create(f"kept_{secrets.token_hex(6)}")
    hosts = [make_host(tmp_path / "a"), make_host(tmp_path / "b", url), make_host(tmp_path / "c")]
    await fill(hosts[0], tmp_path)
    for number, (source, target) in enumerate(itertools.pairwise(hosts)):
        made = await source.invoke("backup.create", {"path": str(tmp_path / f"{number}.tar")}, Context())
        await target.invoke("backup.restore", {"path": made.path}, Context())
        assert rows_of(source.settings.work_database) == rows_of(target.settings.work_database)
    told = [check_backup(tmp_path / name).databases["service"].tables for name in ("0.tar", "1.tar")]
    assert told[0] == told[1]
    await close(*hosts)


async def test_what_ran_is_lost_and_what_waited_runs(tmp_path):
    """A backup while programs run and skills are uploaded is whole; restored, what ran is lost, and what waited is done."""
    async with labs("a") as [lab]:
        lab.start()
        over = await lab.client.submit(lab.task("echo printed"))
        await lab.client.wait(TaskHead, lab.scope, over.id)
        runs = await lab.client.submit(lab.task(lab.ledger.held("held"), session="s"))
        await lab.running(runs.id)
        waits = await lab.client.submit(lab.task("echo late", session="s"))
        source = Host(lab.settings, entry_points=False)
        await source.projects.upload("local", skill_archive(tmp_path), who="test")

        async def upload(number: int) -> None:
            await source.projects.upload("local", skill_archive(tmp_path, f"name-{number}"), who="test")

        made, *_ = await asyncio.gather(
            source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context()),
            *(upload(number) for number in range(4)),
        )
        assert made.complete
        other = WorkLab(tmp_path, host="b")
        target = Host(other.settings, entry_points=False)
        try:
            await target.invoke("backup.restore", {"path": made.path}, Context())
            assert (await target.invoke("db.check", {}, Context())).ok
            other.start()
            ends = [await other.client.wait(TaskHead, other.scope, item.id) for item in (over, runs, waits)]
            assert [(head.status, head.error_code) for head in ends] == [
                ("succeeded", None),
                ("failed", "lost"),
                ("succeeded", None),
            ], other.said()
            for head in (ends[0], ends[2]):
                assert (await other.client.piece(head, "stdout", 0, 100)).log.data in {b"printed\n", b"late\n"}
            assert (await lab.client.head(TaskHead, lab.scope, runs.id)).status == "running"
        finally:
            await other.aclose()
            await close(source, target)
            lab.ledger.let_go()


async def ran(lab: WorkLab, script: str) -> bytes:
    """Run a command of the session to its end and return what it printed."""
    head = await lab.client.submit(lab.task(script, session="s"))
    ended = await lab.client.wait(TaskHead, lab.scope, head.id, 60)
    assert (ended.status, ended.output_errors) == ("succeeded", ()), lab.said()
    return ended.stdout_tail


async def test_folders_of_sessions_in_the_store_are_kept(tmp_path, monkeypatch):
    """What the store has of a session as its row says is in a backup, whatever a command saves meanwhile; what is gone is told."""
    async with contextlib.AsyncExitStack() as ends:
        stores = [{"artifacts": str(tmp_path / f"store-{host}")} for host in "ab"]
        one, two = (
            WorkLab(tmp_path, host=host, engine_settings=store, session_folders="store")
            for host, store in zip("ab", stores, strict=True)
        )
        source, target = (Host(lab.settings, entry_points=False) for lab in (one, two))
        ends.push_async_callback(close, source, target)
        ends.push_async_callback(one.aclose)
        ends.push_async_callback(two.aclose)
        one.start()
        await ran(one, "echo one > f")
        loop, keep_state = asyncio.get_running_loop(), BackupMaker._keep_state

        def later(self: BackupMaker) -> None:
            asyncio.run_coroutine_threadsafe(ran(one, "echo two >> f"), loop).result()
            keep_state(self)

        with monkeypatch.context() as patch:
            patch.setattr(BackupMaker, "_keep_state", later)
            made = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
        assert (made.complete, made.objects) == (True, 2)
        await target.invoke("backup.restore", {"path": made.path}, Context())
        assert not list((two.settings.state_dir / "sessions").glob("*/saved.json"))
        two.start()
        assert await ran(two, "cat f") == b"one\n"
        saved = [path for path in (tmp_path / "store-a" / "session-folders").rglob("*-*") if path.suffix != ".json"]
        saved[-1].unlink()
        made = await source.invoke("backup.create", {"path": str(tmp_path / "less.tar")}, Context())
        assert {name.rpartition("/")[2] for name in made.missing} >= {saved[-1].name}
        assert (made.complete, made.missing_count) == (False, 2)


async def test_a_command_that_ends_while_its_session_is_copied(tmp_path, monkeypatch):
    """The version that `current` names is in the backup: whoever would take it away waits until the session is copied."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source, target = (make_host(tmp_path / name, session_store=None) for name in "ab")
    await source.invoke("projects.create", {"project": "acme"}, Context())
    one, other = (SessionFolder(host.settings.state_dir / "sessions" / "s1") for host in (source, target))

    def commit(content: bytes) -> None:
        item = Artifact(
            path="f", size=len(content), sha256=hashlib.sha256(content).hexdigest(), mode=0o600, content=content
        )
        with one.reading() as base:
            pass
        assert not one.commit(base, WorkdirFiles([item], True), OutputBounds())

    commit(b"one")
    keep_file, waited = BackupMaker._keep_file, []

    def ends(self: BackupMaker, path: str, descriptor: int) -> None:
        keep_file(self, path, descriptor)
        if path == "sessions/s1/current":
            try:
                with locked(source.settings.state_dir / "sessions" / "s1" / ".lock", wait=False):
                    pass
                commit(b"two")
            except BlockingIOError:
                waited.append(path)

    monkeypatch.setattr(BackupMaker, "_keep_file", ends)
    made = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
    await target.invoke("backup.restore", {"path": made.path}, Context())
    with other.reading() as version:
        assert (version.folder / "f").read_bytes() == b"one"
    assert waited
    commit(b"two")  # and it is let go
    await close(source, target)


async def test_a_backup_that_waits_for_a_session_can_be_stopped(tmp_path, monkeypatch):
    """Whoever gives up on a backup need not wait until a session is let go; nothing of it stays, and the next is whole."""
    (tmp_path / "a").mkdir()
    source, looks = make_host(tmp_path / "a"), asyncio.Semaphore(0)
    await fill(source, tmp_path)
    loop = asyncio.get_running_loop()

    def looked(path: Path, *, wait: bool) -> contextlib.AbstractContextManager[None]:
        loop.call_soon_threadsafe(looks.release)
        return locked(path, wait=wait)

    monkeypatch.setattr(backup_file, "locked", looked)
    with locked(source.settings.state_dir / "sessions" / "s1" / ".lock"):
        making = asyncio.create_task(source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context()))
        for _ in range(3):
            await looks.acquire()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert not list(tmp_path.glob("*made.tar*"))
    assert (await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())).complete
    await close(source)


DYING = """
import asyncio, importlib, os, signal, sys
from pathlib import Path
from kdskills.app import Host
from kdskills.app.operations import Context
from kdskills.app.settings import Settings

module, _, dotted = sys.argv[1].partition(":")
owner = importlib.import_module(module)
*path, name = dotted.split(".")
for part in path:
    owner = getattr(owner, part)
before = getattr(owner, name)

def dies(*arguments, **more):
    if sys.argv[2] == "after":
        before(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, dies)
settings = Settings.model_validate_json(sys.stdin.read())
asyncio.run(Host(settings, entry_points=False).invoke(sys.argv[3], {"path": sys.argv[4]}, Context()))
"""


def die(where: str, when: str, host: Host, operation: str, path: Path) -> None:
    """Run an operation in a process that is killed when it comes to a function, or has done it."""
    words = [sys.executable, "-c", DYING, where, when, operation, str(path)]
    done = subprocess.run(words, input=settings_line(host.settings), capture_output=True, check=False, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


async def test_a_killed_backup_leaves_nothing_that_is_restored(tmp_path):
    """Killed before its manifest, or before it has its name: no file there is a backup, and the next one is made."""
    (tmp_path / "a").mkdir()
    source = make_host(tmp_path / "a")
    await fill(source, tmp_path)
    folder = tmp_path / "kept"
    folder.mkdir()
    where = "kdskills.storage.backup_file:BackupWriter.finish"
    await asyncio.to_thread(die, where, "before", source, "backup.create", folder / "made.tar")
    leftovers = sorted(folder.iterdir())
    assert leftovers
    assert folder / "made.tar" not in leftovers
    for path in leftovers:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(BackupRefused):
            check_backup(path)
    assert (await source.invoke("backup.create", {"path": str(folder / "made.tar")}, Context())).complete
    with pytest.raises(Conflict, match="never replaces"):
        await source.invoke("backup.create", {"path": str(folder / "made.tar")}, Context())
    await close(source)


@pytest.mark.parametrize(
    ("where", "when"),
    [
        ("kdskills.app.backup:Restorer._save_object", "after"),
        ("kdskills.app.backup:Restorer._fill", "after"),
        ("kdskills.app.backup:remove_tree", "before"),
    ],
)
async def test_a_killed_restore_is_done_again(tmp_path, where, when):
    """Killed among the objects, or with everything in place but its rows: the next restore puts all of it in place.

    Killed after its rows were there it is done, and the next one is refused. Until then nobody begins to work there.
    """
    for name in "ab":
        (tmp_path / name).mkdir()
    source, target = make_host(tmp_path / "a"), make_host(tmp_path / "b")
    await fill(source, tmp_path)
    made = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
    await asyncio.to_thread(die, where, when, target, "backup.restore", tmp_path / "made.tar")
    facts = target.settings
    begins = [
        target.invoke("projects.list", {}, Context()),
        asyncio.to_thread(Work, facts.work_database, facts.state_dir),
        asyncio.to_thread(TurnArchive(facts.turns, facts.state_dir).folder, "acme"),
    ]
    told = await asyncio.gather(*begins, return_exceptions=True)
    assert [getattr(error, "code", error) for error in told] == ["restore_unfinished"] * 3
    if where.endswith("remove_tree"):
        with pytest.raises(KdskillsError) as refused:
            await target.invoke("backup.restore", {"path": made.path}, Context())
        assert refused.value.code == "restore_not_empty"
        shutil.rmtree(facts.state_dir / ".restore")
        assert (await target.invoke("projects.list", {}, Context())).projects
    else:
        await target.invoke("backup.restore", {"path": made.path}, Context())
    assert rows_of(source.settings.work_database) == rows_of(target.settings.work_database)
    for part in ("artifacts", "sessions", "host"):
        assert tree(source.settings.state_dir / part) == tree(target.settings.state_dir / part)
    assert (await target.invoke("db.check", {}, Context())).ok
    await close(source, target)


@pytest.mark.parametrize("killed", [True, False])
async def test_conversations_that_were_there_first_are_taken_back(tmp_path, monkeypatch, killed):
    """Killed or failed when only one of two databases had its rows: what an error left is empty, and the next restore is whole."""
    for name in "ab":
        (tmp_path / name).mkdir()
    source, target = make_host(tmp_path / "a"), make_host(tmp_path / "b")
    await fill(source, tmp_path)
    await source.session_store(source.settings.session_store).put_body("0" * 64, "said")
    made = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
    within = Restorer._within

    def fails(self: Restorer, steps: list[object], links: dict[str, object]) -> None:
        within(self, steps, links)
        if len(steps) == 1:
            raise BackupRefused("the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(Restorer, "_within", fails)
        if killed:  # which leaves everything as it is at that moment
            patch.setattr(Restorer, "_undo", lambda self, steps: None)
        with pytest.raises(BackupRefused):
            await target.invoke("backup.restore", {"path": made.path}, Context())
    assert any(rows_of(target.settings.session_store).values()) == killed
    assert not any(rows_of(target.settings.work_database).values())
    await target.invoke("backup.restore", {"path": made.path}, Context())
    for name in ("session_store", "work_database"):
        assert rows_of(getattr(source.settings, name)) == rows_of(getattr(target.settings, name))
    await close(source, target)


async def test_a_second_host_of_a_pool_gets_its_files_back(tmp_path, urls):
    """Rows are restored once; each further host's files go beside them, whole, and only where there are rows."""
    before, after = ((urls[n] or f"sqlite:///{tmp_path / name}.db") for n, name in enumerate(("before", "after")))
    hosts = {}
    for name in ("a", "b", "new-a", "new-b"):
        (tmp_path / name).mkdir()
        facts = {"artifacts": str(tmp_path / ("new-store" if "new" in name else "store")), "session_store": None}
        hosts[name] = make_host(tmp_path / name, after if "new" in name else before, **facts)
    await hosts["a"].projects.upload("acme", skill_archive(tmp_path), who="test")
    await keep_artifact(hosts["b"], b"content")
    for name in "ab":
        session = hosts[name].settings.state_dir / "sessions" / f"of-{name}"
        session.mkdir(parents=True)
        (session / "file").write_text(name)
        (session / "file").chmod(0o600)
        await hosts[name].invoke("backup.create", {"path": str(tmp_path / f"{name}.tar")}, Context())
        await hosts[name].invoke("projects.create", {"project": f"after-{name}"}, Context())

    async def restored(name: str, **arguments: object) -> str | None:
        facts = {"path": str(tmp_path / f"{name}.tar"), **arguments}
        try:
            await hosts[f"new-{name}"].invoke("backup.restore", facts, Context())
        except KdskillsError as error:
            return error.code
        return None

    assert await restored("b", state_only=True) == "restore_no_rows"
    assert await restored("a") is None
    assert await restored("b") == "restore_not_empty"
    rows, objects = rows_of(after), tree(tmp_path / "new-store")
    assert await restored("b", state_only=True) is None
    assert (rows_of(after), tree(tmp_path / "new-store")) == (rows, objects)
    old, new = (hosts[name].settings.state_dir for name in ("b", "new-b"))
    assert tree(old / "sessions") == tree(new / "sessions")
    assert (new / "host").read_text() == (old / "host").read_text()
    assert not (new / ".restore").exists()
    assert await restored("b", state_only=True) == "restore_not_empty"
    await close(*hosts.values())


async def test_a_restore_that_fails_takes_all_of_it_back(tmp_path, monkeypatch):
    """An error at the very end, when everything else is in place, leaves an empty database and no file."""
    for name in "ab":
        (tmp_path / name).mkdir()
    source, target = make_host(tmp_path / "a"), make_host(tmp_path / "b")
    await fill(source, tmp_path)
    made = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
    fill_all = Restorer._fill

    def fails(self: object, links: object) -> None:
        fill_all(self, links)
        raise BackupRefused("the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(Restorer, "_fill", fails)
        with pytest.raises(BackupRefused, match="went away"):
            await target.invoke("backup.restore", {"path": made.path}, Context())
    assert {path.name.partition("-")[0] for path in target.settings.state_dir.iterdir()} <= {"restore.lock", "work.db"}
    assert set(map(len, rows_of(target.settings.work_database).values())) <= {0}
    await target.invoke("backup.restore", {"path": made.path}, Context())
    assert rows_of(source.settings.work_database) == rows_of(target.settings.work_database)
    await close(source, target)


async def test_bytes_that_are_gone_are_told(tmp_path):
    """An object that was lost, and one that is not what was stored, are named by the backup; the rest of it is whole."""
    for name in "ab":
        (tmp_path / name).mkdir()
    source, target = make_host(tmp_path / "a"), make_host(tmp_path / "b")
    await fill(source, tmp_path)
    objects = [path for path in (source.settings.state_dir / "artifacts").rglob("*") if path.is_file()]
    objects[0].unlink()
    objects[1].write_bytes(b"x" * objects[1].stat().st_size)
    gone = sorted("objects/" + str(path.relative_to(source.settings.state_dir)) for path in objects[:2])
    found = {row.code: row.count for row in (await source.invoke("db.check", {}, Context())).findings}
    assert found == {"artifact_bytes_missing": 1}
    answer = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
    assert (answer.complete, answer.negative, sorted(answer.missing), answer.objects) == (False, True, gone, 3)
    await target.invoke("backup.restore", {"path": answer.path}, Context())
    found = {row.code: row.count for row in (await target.invoke("db.check", {}, Context())).findings}
    assert found == {"artifact_bytes_missing": 2}
    await close(source, target)


async def test_only_what_goes_to_the_disk_needs_its_room(tmp_path, monkeypatch):
    """Objects need room in the state folder where they are kept there; elsewhere the largest of them does, one at a time."""
    (tmp_path / "a").mkdir()
    source = make_host(tmp_path / "a", session_store=None)
    for letter in b"abcd":
        await keep_artifact(source, bytes([letter]) * 1_000_000)
    made = await source.invoke("backup.create", {"path": str(tmp_path / "made.tar")}, Context())
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=2_000_000))
    for name, store, code in (("b", None, "storage_full"), ("c", str(tmp_path / "store"), None)):
        (tmp_path / name).mkdir()
        target = make_host(tmp_path / name, session_store=None, artifacts=store)
        told = await asyncio.gather(
            target.invoke("backup.restore", {"path": made.path}, Context()), return_exceptions=True
        )
        assert [getattr(error, "code", None) for error in told] == [code]
        await close(target)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=900_000))
    (tmp_path / "d").mkdir()
    target = make_host(tmp_path / "d", session_store=None, artifacts=str(tmp_path / "other"))
    with pytest.raises(StorageFull):
        await target.invoke("backup.restore", {"path": made.path}, Context())
    await close(source, target)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small backup that is whole, of a host with a project, a version, an object and a session's file."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "a").mkdir()

    async def make() -> Path:
        host = make_host(folder / "a", session_store=None)
        await host.projects.upload("acme", skill_archive(folder), who="test")
        await keep_artifact(host, b"content")
        session = host.settings.state_dir / "sessions" / "s1"
        session.mkdir(parents=True)
        (session / ("long" * 40)).write_bytes(b"of a session")
        await host.invoke("backup.create", {"path": str(folder / "small.tar")}, Context())
        await close(host)
        return folder / "small.tar"

    return asyncio.run(make())


def refused(path: Path, folder: Path) -> str:
    """Return the code a restore is refused with, which wrote nothing."""
    target = make_host(folder, session_store=None)
    with pytest.raises((BackupRefused, NotFound)) as error:
        asyncio.run(target.invoke("backup.restore", {"path": str(path)}, Context()))
    state = target.settings.state_dir
    assert not state.exists() or {item.name.partition("-")[0] for item in state.iterdir()} <= {
        "work.db",
        "restore.lock",
    }
    return error.value.code


@settings(max_examples=60)
@given(strategies.data())
def test_a_byte_that_differs_is_refused(small, drawn):
    """Whichever byte is another, and wherever the file ends: the backup is refused before anything is written."""
    content = bytearray(small.read_bytes())
    place = drawn.draw(strategies.integers(0, len(content) - 1))
    damaged = small.with_name("damaged.tar")
    if drawn.draw(strategies.booleans()):
        content[place] ^= drawn.draw(strategies.integers(1, 255))
    else:
        del content[place:]
    damaged.write_bytes(content)
    assert refused(damaged, small.parent / "nowhere") in {"backup_damaged", "backup_hostile", "backup_newer"}
    assert not (small.parent / "nowhere").exists()


def forged(small: Path, path: Path, change) -> Path:
    """Write a backup as *small* with every digest right, of members and a manifest that *change* made of its own."""
    members: list[tuple[BackupMember, bytes]] = []
    with small.open("rb") as source:
        manifest = BackupReader(source).read(lambda member, stream: members.append((member, stream.read())))
    kept = {"databases": {name: rows.model_dump() for name, rows in manifest.databases.items()}}
    members = change(members, kept["databases"]["service"]) or members
    with path.open("w+b") as sink:
        out = BackupWriter(sink)
        for member, content in members:
            assert out.add(member, io.BytesIO(content))
        rows = {name: DatabaseRows.model_validate(told) for name, told in kept["databases"].items()}
        out.finish(version="0", made_at="", databases=rows)
    return path


def more(name: str, content: bytes = b"x", **facts: bool):
    """Return a change that adds a member."""
    return lambda members, service: [*members, (BackupMember(name, len(content), **facts), content)]


def unknown_table(members, service):
    """Add rows of a table that no installation has."""
    row = b"[1]\n"
    service["tables"]["kd_evil"] = {"columns": ["a"], "rows": 1, "size": 4, "sha256": hashlib.sha256(row).hexdigest()}
    packed = gzip.compress(row)
    return [*members, (BackupMember("tables/service/kd_evil/000001.jsonl.gz", len(packed)), packed)]


def unknown_column(members, service):
    """Call a column something else."""
    service["tables"]["kd_projects"]["columns"][0] = "project) VALUES (1); DROP TABLE kd_projects; --"


def bomb(members, service):
    """Add rows that unpack to a thousand times their size."""
    packed = gzip.compress(bytes(80 * 1024 * 1024))
    return [*members, (BackupMember("tables/service/kd_evil/000001.jsonl.gz", len(packed)), packed)]


def other_version(members, service):
    """Give a version the archive of another."""
    place = next(number for number, (member, _) in enumerate(members) if member.part == "versions")
    content = skill_archive(SCRATCH[0], body="Evil.").read_bytes()
    members[place] = (BackupMember(members[place][0].name, len(content)), content)
    return members


SCRATCH: list[Path] = []
HOSTILE = {
    "dots": (more("state/sessions/../../evil"), "backup_hostile"),
    "quoted dots": (more("state/sessions/%2e%2e/%2e%2e/evil"), "backup_hostile"),
    "quoted slash": (more("state/sessions%2f..%2f..%2fevil"), "backup_hostile"),
    "nul": (more("state/sessions/a%00b"), "backup_hostile"),
    "absolute": (more("state//etc/evil"), "backup_hostile"),
    "another place": (more("state/work.db"), "backup_hostile"),
    "another kind": (more("elsewhere/evil"), "backup_hostile"),
    "twice": (more("state/sessions/s1", b"a file for a folder"), "backup_hostile"),
    "object as a folder": (more("objects/artifacts/acme/", b"", folder=True), "backup_hostile"),
    "object elsewhere": (more("objects/skills/" + hashlib.sha256(b"x").hexdigest()), "backup_hostile"),
    "object of other bytes": (more("objects/artifacts/acme/sha256/00/" + "0" * 62), "backup_damaged"),
    "version of nobody": (more(f"versions/acme/evil/{'0' * 64}.zip"), "backup_hostile"),
    "another version": (other_version, "backup_hostile"),
    "unknown table": (unknown_table, "backup_unknown_table"),
    "unknown column": (unknown_column, "backup_unknown_table"),
    "bomb": (bomb, "backup_hostile"),
    "newer tables": (lambda members, service: service["revisions"].append("work_9999"), "backup_newer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_backups_are_refused(small, tmp_path, name):
    """Members that lead out, tables and columns nobody has, bombs: refused by their code though every digest is right."""
    SCRATCH[:] = [tmp_path]
    change, code = HOSTILE[name]
    assert refused(forged(small, tmp_path / "forged.tar", change), tmp_path / "host") == code
    assert not (tmp_path / "evil").exists()


def test_other_archives_and_newer_formats_are_refused(small, tmp_path):
    """A tar of links, an empty file, a folder, nothing, and a backup of a newer format each say what they are not."""
    with tarfile.open(tmp_path / "links.tar", "w") as out:
        link = tarfile.TarInfo("state/sessions/evil")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        out.addfile(link)
    (tmp_path / "empty.tar").write_bytes(b"")
    assert [refused(tmp_path / name, tmp_path / "host") for name in ("links.tar", "empty.tar", ".", "none.tar")] == [
        *("backup_damaged", "backup_damaged"),
        *("path_missing", "path_missing"),
    ]
    content = small.read_bytes()
    manifest = content[content.rindex(b'{\n "kind"') :].partition(b"\0")[0]
    newer = manifest.replace(b'"format": 1', b'"format": 2')
    if newer == manifest:
        newer = manifest.replace(b'"format":1', b'"format":2')
    digests = [hashlib.sha256(text).hexdigest().encode() for text in (manifest, newer)]
    (tmp_path / "newer.tar").write_bytes(content.replace(manifest, newer).replace(*digests))
    assert refused(tmp_path / "newer.tar", tmp_path / "host") == "backup_newer"


async def test_the_commands_say_what_was_done(small, tmp_path):
    """`kdskills backup`, `restore`, `restore --check` and `db check` exit with 0, or with 1 for what does not fit."""
    host = make_host(tmp_path, session_store=None)

    def said(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(get_command(build_cli(host)), [*words], obj=host)
        return done.exit_code, done.output

    def all_of_them() -> list[tuple[int, str]]:
        commands = (
            ("restore", str(small), "--check"),
            ("restore", str(small)),
            ("db", "check"),
            ("backup", str(tmp_path)),
        )
        return [said(*words) for words in commands]

    whole, restored, fits, backup = await asyncio.to_thread(all_of_them)
    assert [answer[0] for answer in (whole, restored, fits, backup)] == [0, 0, 0, 0], (whole, restored, fits, backup)
    assert "whole" in whole[1]
    assert "1 object, 1 version, " in restored[1]
    assert "fit one another" in fits[1]
    await host.storage.aclose()
