"""`db upgrade` brings databases of earlier releases up to date, and everything in them stays.

`schemas/NNNN.sql` is what a release of that schema left: a project, a disabled skill, a token and a task. A new revision adds
a file of its own; the files of earlier ones stay.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL
from kdskills.app.operations import Context
from kdskills.doors.cli.main import build_cli
from kdskills.jobs.model import Scope, TaskHead
from kdskills.storage.database import HEADS

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.sql"))
TOKEN = "kd_891aadc36fd71aba_7cKJYF8oJddna3RpbnooJ1H_vu5W3H3vB-q4qgy-De8"
TASK = "task_5l2w3gqeb25gc4hjxeel3mrgwa"


@pytest.fixture(params=SCHEMAS, ids=lambda path: path.stem)
async def host(request, tmp_path):
    """A Host over a database as an earlier release left it."""
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    with sqlite3.connect(state / "work.db") as link:
        link.executescript(request.param.read_text(encoding="utf-8"))
    link.close()
    made = Host(Settings(state_dir=state, index_dir=tmp_path / "index", bundle=None), entry_points=False)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def test_an_upgrade_keeps_everything(host):
    """Tokens open what they opened, skills are as they were, work is found."""
    done = await host.invoke("db.upgrade", {}, Context(identity=LOCAL))
    assert {part.part: part.revision for part in done.parts} == HEADS
    identity = await host.tokens.authenticate(TOKEN)
    assert (identity.project, identity.agent, identity.scopes) == ("acme", "writer", {"skills:read", "work:read"})
    assert [(skill.name, skill.enabled) for skill in await host.projects.list("acme")] == [("brief", False)]
    assert [version.active for version in await host.projects.versions("acme", "brief")] == [True]
    head = await host.work.client.head(TaskHead, Scope(project="acme", agent="writer"), TASK)
    assert (head.status, head.spec.command.argv) == ("queued", ("true",))


async def test_an_upgrade_is_done_once(host):
    """The second one says that there is nothing to do."""
    await host.invoke("db.upgrade", {}, Context(identity=LOCAL))
    again = await host.invoke("db.upgrade", {}, Context(identity=LOCAL))
    assert [part.changed for part in again.parts] == [False for _ in HEADS]


async def test_an_upgraded_database_is_like_a_new_one(host, tmp_path):
    """What an old database becomes has the tables, columns and indexes of one made today."""
    await host.invoke("db.upgrade", {}, Context(identity=LOCAL))
    fresh = Host(Settings(state_dir=tmp_path / "fresh", bundle=None), entry_points=False)
    await fresh.invoke("db.upgrade", {}, Context(identity=LOCAL))

    def shape(folder):
        link = sqlite3.connect(folder / "work.db")
        names = [name for (name,) in link.execute("SELECT name FROM sqlite_master WHERE name LIKE 'kd%' ORDER BY name")]
        found = {name: link.execute(f"PRAGMA table_info({name})").fetchall() for name in names}
        link.close()
        return found

    assert shape(tmp_path / "state") == shape(tmp_path / "fresh")


def test_the_newest_schema_has_its_file():
    """Whoever adds a revision adds what a release of it leaves, so that the next one is tested against it."""
    newest = SCHEMAS[-1].read_text(encoding="utf-8")
    assert [head for head in HEADS.values() if f"'{head}'" not in newest] == []


def test_the_command_says_what_was_done(tmp_path):
    """`kdskills db upgrade` makes a new database, and tells each part's revision."""
    host = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    for word in ("upgraded", "nothing to do"):
        done = CliRunner().invoke(get_command(build_cli(host)), ["db", "upgrade"], obj=host)
        assert (done.exit_code, done.stdout.count(word)) == (0, len(HEADS)), done.output


async def test_callers_elsewhere_cannot_upgrade(host):
    """The set-up of the machine is for its own account."""
    from dataclasses import replace

    from kdskills.errors import CallRefused

    with pytest.raises(CallRefused) as refused:
        await host.invoke("db.upgrade", {}, Context(identity=replace(LOCAL, local=False)))
    assert refused.value.code == "local_only"
