"""Migrations make what the tables say, once, however many processes open a new database at the same time."""

import subprocess
import sys

import pytest

from kdskills.jobs.records import WorkTables
from kdskills.storage.database import HEADS, VERSIONS, Database, DatabaseUnavailable, current_revisions, upgrade


@pytest.fixture
def empty(tmp_path):
    """Return an empty database."""
    made = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    yield made
    made.engine.dispose()


def test_revisions_make_what_the_tables_say(empty):
    """Alembic finds no difference between the migrated database and the tables."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    upgrade(empty, "work")
    names = set(WorkTables().metadata.tables)

    def ours(name, kind, parents):
        return kind != "table" or name in names

    with empty.engine.connect() as link:
        options = {"version_table": VERSIONS, "include_name": ours, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(link, opts=options), WorkTables().metadata) == []


def test_an_upgrade_is_done_once(empty):
    """The second look finds nothing to do."""
    assert upgrade(empty, "work")
    assert not upgrade(empty, "work")
    assert HEADS["work"] in empty.ask(current_revisions)


def test_tables_of_a_newer_version_are_left_alone(empty):
    """An older version that is started again says so, and changes nothing."""
    upgrade(empty, "work")
    empty.change(lambda link: link.exec_driver_sql(f"UPDATE {VERSIONS} SET version_num = 'work_9999'"))
    with pytest.raises(DatabaseUnavailable, match="work_9999") as refused:
        upgrade(empty, "work")
    assert refused.value.code == "database_newer"
    assert empty.ask(current_revisions) == {"work_9999"}


def test_parts_do_not_wait_for_one_another(empty):
    """Each part is a branch: upgrading one makes no table of another."""
    parts = list(HEADS)
    for index, part in enumerate(parts):
        upgrade(empty, part)
        assert empty.ask(current_revisions) == {HEADS[one] for one in parts[: index + 1]}


def test_every_revision_stands_alone():
    """Each part has one line of revisions, whose newest is the one its room opens."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    import kdskills.storage.database as room

    config = Config()
    config.set_main_option("script_location", room.__file__.replace("database.py", "migrations"))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    assert sorted(script.get_heads()) == sorted(HEADS.values())


def test_processes_open_a_new_place_at_once(tmp_path):
    """Four processes that open an empty folder at the same time all get a place that works, of one host."""
    script = tmp_path / "opens.py"
    script.write_text(
        "import sys, pathlib\n"
        "from kdskills.jobs.queue import Work\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "work = Work(f'sqlite:///{folder / chr(119)}.db', folder)\n"
        "print(work.host)\n"
        "work.close()\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "state")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=110)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(said)) == 1
    assert said[0].strip()
