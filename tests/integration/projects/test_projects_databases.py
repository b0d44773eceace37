"""Projects and tokens on SQLite and PostgreSQL: the same answers, between processes, through kill -9."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.tokens import TOKENS
from kdskills.app.worker.launcher import AttemptRunner
from kdskills.errors import NotFound
from kdskills.execution import SkillMount
from kdskills.jobs.attempts import AttemptOrder
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec
from kdskills.projects.records import METADATA
from kdskills.projects.service import VersionMissing
from kdskills.skills.archives import read_tree, unpack_skill, version_of
from kdskills.turn import Granted
from tests.project_rows import audit, pin

pytestmark = pytest.mark.xdist_group("postgres")


async def test_the_life_of_a_skill(hosts, archive) -> None:
    """Upload, activation, disabling, pin, deletion and retention answer alike on both databases."""
    host = hosts()
    first = await host.projects.upload("acme", archive("One."), who="ann")
    second = await host.projects.upload("acme", archive("Two."), activate=False, who="ann")
    assert [(v.version, v.active) for v in await host.projects.versions("acme", "brief")] == [
        (second.version, False),
        (first.version, True),
    ]
    await pin(host.projects, "acme", "brief", "job")
    await host.projects.activate("acme", "brief", second.version, who="bob")
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    view = await host.projects.view("acme", "writer")
    assert view.resolve("brief").code == "plugin_denied"
    await host.projects.delete("acme", "brief", who="op")
    gone = await host.projects.collect(keep_days=-1)
    assert gone.versions == (f"brief@{second.version}",)
    await host.projects.unpin("acme", "job")
    assert (await host.projects.collect(keep_days=-1)).versions == (f"brief@{first.version}",)
    actions = [row.action for row in reversed(await audit(host.projects, "acme"))]
    assert actions == [
        *("skill.upload", "skill.upload", "skill.activate", "skill.patch", "skill.delete"),
        *("version.collect", "version.collect"),
    ]


async def test_names_are_sorted_by_code_point(hosts, archive) -> None:
    """Listings have one order, whatever the server's language."""
    host = hosts()
    names = ["b-x", "b", "a1", "bx", "b0"]
    for name in names:
        await host.projects.upload("acme", archive("x", name), who="ann")
    assert [state.name for state in await host.projects.list("acme")] == sorted(names)


async def test_holding_a_version_twice_is_holding_it_once(hosts, archive) -> None:
    """Work holds a version in its own transaction, again without harm; what is not there is held by nobody."""
    host = hosts()
    version = (await host.projects.upload("acme", archive(), who="ann")).version
    for versions in ({"brief": version}, {"brief": version}, {"brief": "sha256:0"}, {"other": version}):
        await host.storage.database.write(
            lambda link, versions=versions: host.projects.hold(link, "acme", "task_1", versions)
        )
    assert await host.projects.holders() == [("acme", "task_1")]
    assert (await host.projects.version("acme", "brief")).pins == 1
    assert await host.projects.unpin("acme", "task_1") == 1


async def test_an_empty_database_opened_at_once(hosts, archive) -> None:
    """Hosts that open a new database at one time make its tables once, and none fails."""
    made = [hosts() for _ in range(4)]
    place = archive("One.")
    reports = await asyncio.gather(*(host.projects.upload("acme", place, who="ann") for host in made))
    assert sorted(report.created for report in reports) == [False, False, False, True]


async def test_uploads_and_retention_at_once(hosts, archive) -> None:
    """While others upload, activate, pin and collect, the active version always has its files."""
    places = [archive(f"Text {number}.") for number in range(3)]
    made = [hosts() for _ in range(3)]

    async def upload(host, rounds: int) -> None:
        for number in range(rounds):
            await host.projects.upload("acme", places[number % 3], who="ann")

    async def collect(host, rounds: int) -> None:
        for _ in range(rounds):
            await host.projects.collect(keep_days=-1, keep_versions=0)

    async def hold(host, rounds: int) -> None:
        for number in range(rounds):
            try:
                pinned = await pin(host.projects, "acme", "brief", f"job{number}")
            except NotFound:
                continue
            assert version_of(read_tree(pinned.folder)) == pinned.version
            await host.projects.unpin("acme", f"job{number}")

    await upload(made[0], 1)
    await asyncio.gather(upload(made[0], 12), upload(made[1], 12), collect(made[2], 12), hold(made[1], 12))
    found = await made[0].projects.version("acme", "brief")
    skill_file = await made[0].projects.file("acme", "brief", "SKILL.md")
    assert skill_file.path.read_text().endswith(".\n")
    assert found.active


async def test_tokens(hosts) -> None:
    """Made through one Host a token is known to another, until it is revoked."""
    one, two = hosts(), hosts()
    token, text = await one.tokens.create("acme", "writer", ["skills:read"], who="op")
    assert (await two.tokens.authenticate(text)).agent == "writer"
    await two.tokens.revoke(token.id, who="op")
    assert await one.tokens.authenticate(text) is None


async def test_the_migration_makes_what_the_tables_say(hosts) -> None:
    """No column, type or index differs between the revision and the tables in code."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    host = hosts()
    await host.projects.projects()
    for metadata in (METADATA, TOKENS.metadata):

        def differences(link, metadata=metadata):
            def ours(thing, name, kind, reflected, other):
                return kind != "table" or name in metadata.tables

            context = MigrationContext.configure(link, opts={"include_object": ours, "compare_type": True})
            return compare_metadata(context, metadata)

        assert host.storage.database.ask(differences) == []


async def test_kill_anywhere(hosts, archive, settings, tmp_path) -> None:
    """However often an uploading and collecting process is killed, the active version is whole and uploads go on."""
    places = [archive(f"Big {number}.") for number in range(3)]
    known = {unpack_skill(place, tmp_path / f"known{n}").version for n, place in enumerate(places)}
    host = hosts()
    await host.projects.upload("acme", places[0], who="ann")
    program = str(Path(__file__).with_name("upload_forever.py"))
    chance = random.Random(7)
    for _ in range(5):
        command = [sys.executable, program, str(settings.state_dir), settings.database_url or "", *map(str, places)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220 - it is there to be killed
            try:
                for _ in range(1 + chance.randrange(6)):
                    assert await asyncio.to_thread(child.stdout.readline)
                await asyncio.sleep(chance.random() * 0.05)
            finally:
                child.kill()
        found = await host.projects.version("acme", "brief")
        assert found.version in known
        pinned = await pin(host.projects, "acme", "brief", "check")
        assert version_of(read_tree(pinned.folder)) == pinned.version
        granted = (await host.projects.view("acme", None)).resolve("brief")
        assert isinstance(granted, Granted)
        assert granted.skill.body.strip().startswith("Big")
        copy = await host.projects.archive("acme", "brief", pinned.version)
        assert unpack_skill(copy, tmp_path / f"copy{random.random()}").version == pinned.version
        await host.projects.unpin("acme", "check")
    for place in places:
        assert (await host.projects.upload("acme", place, who="ann")).active


async def test_a_worker_fetches_what_a_door_elsewhere_took_in(settings, archive, tmp_path) -> None:
    """An uploaded skill runs on a machine that has none of its files: they are fetched once, and only the version asked for."""
    store = str(tmp_path / "store")
    url = settings.work_database
    door = Host(
        Settings(state_dir=tmp_path / "door", database_url=url, artifacts=store, bundle=None), entry_points=False
    )
    worker = Settings(state_dir=tmp_path / "worker", database_url=url, artifacts=store, bundle=None)
    version = (await door.projects.upload("acme", archive("One."), who="ann")).version
    folder = await door.projects.folder("acme", "brief", version)
    await door.projects.upload("acme", archive("Two."), who="ann")
    await door.storage.aclose()
    shutil.rmtree(tmp_path / "door" / "projects")
    placement = Placement(engine="none", skill_name="public.brief", version_hash=version, uploaded={"brief": version})
    spec = TaskSpec(scope=Scope(project="acme"), session_id=None, command=Command(argv=("true",)), placement=placement)
    runner = AttemptRunner(tmp_path, AttemptOrder(task_id="task_1", attempt=1, spec=spec), None, worker)
    mounts = (SkillMount("public.brief", folder, "sha256:" + "0" * 64), SkillMount("public.own", tmp_path, "sha256:1"))
    brief, own = await runner.at_hand(mounts)
    assert brief.root.is_relative_to(tmp_path / "worker")
    assert (brief.root / "SKILL.md").read_text().endswith("One.\n")
    assert (brief.tree, own) == (mounts[0].tree, mounts[1])
    shutil.rmtree(store)
    assert await runner.at_hand(mounts) == (brief, own)
    shutil.rmtree(tmp_path / "worker" / "projects")
    with pytest.raises(VersionMissing):
        await runner.at_hand(mounts)
