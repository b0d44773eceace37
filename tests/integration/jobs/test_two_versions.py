"""An upgrade under way: this version and the next one on the same tables, each doing work of the other."""

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

import kdskills
from kdskills.app.worker.main import REFUSED
from kdskills.jobs.model import TaskHead
from kdskills.jobs.queue import Roster
from kdskills.storage.database import HEADS
from kdskills.testing.work import WorkLab
from kdskills.testing.work.lab import run_from

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("pool"), pytest.mark.timeout(300)]

NEXT = "99.0.0"
REVISION = '''"""What the next version adds: a column to each table that is there, a table and an index."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{before}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    for table in {tables}:
        op.add_column(table, sa.Column("of_the_next_version", sa.Integer))
    op.create_table("kd_next_{part}", sa.Column("id", sa.Integer, primary_key=True))
    op.create_index("kd_next_{part}_index", "{first}", ["of_the_next_version"])
'''
TABLES = {
    "service": ("kd_tokens", "kd_projects"),
    "work": ("kd_tasks", "kd_jobs", "kd_workers", "kd_work_sessions", "kd_hosts", "kd_usage", "kd_artifacts"),
}


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with the next version: this one, a revision further on in each part of the tables."""
    folder = tmp_path_factory.mktemp("next")
    package = folder / "kdskills"
    shutil.copytree(Path(kdskills.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    database = package / "storage" / "database.py"
    text = database.read_text(encoding="utf-8")
    for part, head in HEADS.items():
        revision = f"{part}_{int(head.rpartition('_')[2]) + 1:04d}"
        assert text.count(f'"{head}"') == 1
        text = text.replace(f'"{head}"', f'"{revision}"')
        facts = {"revision": revision, "before": head, "part": part, "tables": TABLES[part], "first": TABLES[part][0]}
        file = package / "storage" / "migrations" / "versions" / f"{revision}_next.py"
        file.write_text(REVISION.format(**facts), encoding="utf-8")
    database.write_text(text, encoding="utf-8")
    facts = folder / f"kdskills-{NEXT}.dist-info"
    facts.mkdir()
    told = distribution("kdskills").read_text("METADATA")
    assert told is not None
    facts.joinpath("METADATA").write_text(told.replace(f"Version: {version('kdskills')}", f"Version: {NEXT}", 1))
    facts.joinpath("entry_points.txt").write_text(distribution("kdskills").read_text("entry_points.txt") or "")
    return folder


@pytest.fixture
async def hosts(cluster, code):
    """Two hosts on one empty database: `old` of this version and `new` of the next one; everything of them is ended."""
    url = await asyncio.to_thread(cluster.create, f"versions_{Path(tempfile.mktemp()).name.lower()}")
    with tempfile.TemporaryDirectory(prefix="kdskills-versions-") as top:
        pair = [WorkLab(Path(top), url, host=name, slots=3) for name in ("old", "new")]
        await asyncio.to_thread(db_upgrade, pair[0])
        pair[1].code = code
        yield pair
        for lab in pair:
            await lab.aclose()


def db_upgrade(lab: WorkLab, code: Path | None = None) -> str:
    """Run `kdskills db upgrade` of the version in *code*, or of this one, and return what it said."""
    variables = {"KDSKILLS_STATE_DIR": str(lab.settings.state_dir), "KDSKILLS_DATABASE_URL": lab.settings.work_database}
    command = [sys.executable, "-c", "from kdskills.doors.cli import main; main()", "db", "upgrade"]
    done = subprocess.run(
        command, env=run_from(code) | variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_two_versions_share_the_work(hosts, code):
    """Tables are upgraded beneath a worker that runs; both versions then do what either submitted, each task once."""
    old, new = hosts
    old.start()
    held = await old.client.submit(old.task(old.ledger.held("held")))
    await old.running(held.id)
    told = await asyncio.to_thread(db_upgrade, old, code)
    assert told.count("upgraded") == len(HEADS), told
    alone = await old.client.submit(old.task(old.ledger.script("alone")))
    assert (await old.client.wait(TaskHead, old.scope, alone.id, 60)).status == "succeeded"
    new.start()
    work = await old.client.work()

    def versions(link):
        return {(row.host, row.version) for row in Roster(work).live(link)}

    await new.until(lambda: len(work.database.ask(versions)) == 2)
    assert {name for _, name in work.database.ask(versions)} == {version("kdskills"), NEXT}
    # `held` has one place of five, so four of these meet only when both hosts run some
    heads = [
        await old.client.submit(old.task(old.ledger.meeting(f"t{n}", 6), session=f"s{n % 10}", retry_on_lost=True))
        for n in range(40)
    ]
    ended = [await old.client.wait(TaskHead, old.scope, head.id, 120) for head in heads]
    assert {head.status for head in ended} == {"succeeded"}
    assert len({head.host for head in ended}) == 2
    assert old.ledger.begun() == {"held": 1, "alone": 1} | {f"t{n}": 1 for n in range(40)}


async def test_the_next_version_takes_a_host_over(hosts, code):
    """A program that runs outlives its worker's version; the version before, started again, refuses and changes nothing."""
    old = hosts[0]
    old.start()
    held = await old.client.submit(old.task(old.ledger.held("held"), session="s"))
    behind = await old.client.submit(old.task(old.ledger.script("behind"), session="s"))
    await old.running(held.id)
    await asyncio.to_thread(db_upgrade, old, code)
    assert old.kill(number=signal.SIGTERM) == 0
    again = old.start()
    assert await asyncio.to_thread(again.wait, 60) == REFUSED
    assert "a newer version brought the database to" in old.said()
    old.workers.clear()
    old.code = code
    old.start()
    await old.started()
    old.ledger.let_go()
    ended = [await old.client.wait(TaskHead, old.scope, head.id, 60) for head in (held, behind)]
    assert [(head.status, head.attempt) for head in ended] == [("succeeded", 1)] * 2
    assert old.ledger.lines() == [("b", "held"), ("e", "held"), ("b", "behind"), ("e", "behind")]
