"""Both journals keep every promise; the SQL one also keeps it between connections, on the disk, and privately."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from kdskills.remote.journal import JournalUnavailable, MemoryJournal, SqlJournal, journal_url, sql, statements
from kdskills.remote.ports import CallJournal
from kdskills.testing.journals import JOURNAL_CHECKS, JournalCheck, answer, claim, identity, ran


@pytest.fixture
def open_sql(tmp_path: Path) -> Iterator[Callable[..., SqlJournal]]:
    """Open journals on one file; all are closed afterwards."""
    opened: list[SqlJournal] = []

    def make(**options: object) -> SqlJournal:
        journal = SqlJournal(journal_url(tmp_path), **options)
        opened.append(journal)
        return journal

    yield make
    for journal in opened:
        journal.close()


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_journals_keep_their_promises(check: JournalCheck, kind: str, open_sql) -> None:
    """Every check of the conformance suite holds for both journals."""
    journal: CallJournal = MemoryJournal() if kind == "memory" else open_sql()
    check.run(journal)


def test_memory_keeps_the_newest_calls() -> None:
    """Answered calls go first and oldest first; a call that runs is never forgotten."""
    journal = MemoryJournal(kept=3)
    claim(journal, "a", key="runs")
    for number in range(5):
        ran(journal, f"k{number}", "x")
    assert [row.key for row in journal.calls("thread-1")] == ["runs", "k3", "k4"]


def test_memory_forgets_a_session_but_not_what_runs() -> None:
    """A closed session's answers go; a handler that still runs can write its answer down."""
    journal = MemoryJournal()
    ran(journal, "k", "x")
    claim(journal, "a", key="runs")
    journal.forget("thread-1")
    journal.forget("thread-1")
    assert [row.key for row in journal.calls("thread-1")] == ["runs"]


def test_memory_of_many_sessions_holds_nothing_of_forgotten_ones() -> None:
    """A program that opens and closes sessions for ever does not grow."""
    journal = MemoryJournal()
    for number in range(100):
        session = f"s{number}"
        journal.claim(session, identity(session=session), "a", 60.0, idempotent=False)
        journal.finish(session, "a", answer())
        journal.forget(session)
    assert (journal._rows, journal._sessions) == ({}, {})


def test_files_are_for_this_user_only(open_sql, tmp_path: Path) -> None:
    """Answers may hold anything: neither the database nor its folder is open to others."""
    open_sql()
    made = tmp_path / "remote" / "calls.sqlite3"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


def test_every_commit_reaches_the_disk(open_sql) -> None:
    """SQLite runs with a write-ahead log and full synchronisation: a given answer survives a power cut."""
    with open_sql().engine.connect() as link:
        assert link.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert link.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_two_openers_share_the_rows(open_sql) -> None:
    """What one worker claims another sees, and the file keeps it when both are gone."""
    first, second = open_sql(), open_sql()
    ran(first, "k", "parcel 7")
    assert not claim(second, "b").mine
    first.close()
    second.close()
    row = open_sql().get("k")
    assert row is not None
    assert row.answer == answer("parcel 7")


def test_arguments_are_not_kept(open_sql) -> None:
    """The table has no column for arguments."""
    columns = {column["name"] for column in sa.inspect(open_sql().engine).get_columns("remote_calls")}
    assert not {name for name in columns if "argument" in name}


def test_old_calls_go_after_a_week(open_sql) -> None:
    """A week later calls and receipts are forgotten when the journal is opened or used; younger ones stay."""
    now = [1_000_000.0]
    journal = open_sql(clock=lambda: now[0])
    ran(journal, "old", "x")
    journal.keep_receipt("thread-1", "t1", "{}")
    now[0] += 6 * 86_400.0
    ran(journal, "young", "x")
    now[0] += 1.1 * 86_400.0
    assert open_sql(clock=lambda: now[0]).get("old") is None
    assert journal.get("young") is not None
    assert journal.receipts("thread-1") == []


def test_a_call_that_runs_for_a_week_is_kept(open_sql) -> None:
    """What a living worker runs is not forgotten, however old."""
    now = [1_000_000.0]
    journal = open_sql(clock=lambda: now[0])
    claim(journal, "a", lease=30 * 86_400.0)
    now[0] += 8 * 86_400.0
    assert journal.purge() == 0
    assert journal.get("k") is not None


def test_purging_happens_while_in_use(open_sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs for months purges by itself when calls come."""
    now = [1_000_000.0]
    journal = open_sql(clock=lambda: now[0])
    ran(journal, "old", "x")
    now[0] += 8 * 86_400.0
    monkeypatch.setattr("kdskills.remote.journal.sql.PURGE_EVERY_S", -1.0)
    claim(journal, "a", key="new")
    assert journal.get("old") is None


@pytest.mark.parametrize("url", ["no url", "mongodb://x", "sqlite:////proc/none/of/this.sqlite3"])
def test_bad_databases_are_refused(url: str) -> None:
    """A journal that cannot be opened says so at once, to the operator."""
    with pytest.raises(JournalUnavailable):
        SqlJournal(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """Something else under the file's name is left alone and told."""
    path = tmp_path / "calls.sqlite3"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalUnavailable):
        SqlJournal(f"sqlite:///{path}")
    assert path.read_bytes().startswith(b"not a database")


def test_migrations_make_what_the_code_reads(open_sql) -> None:
    """The tables of the newest revision have the very columns, kinds, keys and indexes of the described ones."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with open_sql().engine.connect() as link:
        context = MigrationContext.configure(
            link,
            opts={
                "version_table": sql.VERSION_TABLE,
                "include_name": lambda name, kind, _: kind != "table" or name in statements.metadata.tables,
            },
        )
        assert compare_metadata(context, statements.metadata) == []


def test_revisions_are_one_chain() -> None:
    """Every revision follows the one before it by number; the newest is the last file's."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(sql.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    found = [revision.revision for revision in script.walk_revisions()]
    assert found == [f"{number:04}" for number in range(len(found), 0, -1)]
    assert script.get_current_head() == sql.NEWEST


def test_a_newer_database_is_used_as_it_is(open_sql) -> None:
    """Two versions of kdskills may share a file while one is upgraded: the older one does not refuse the newer tables."""
    journal = open_sql()
    with journal.engine.begin() as link:
        link.exec_driver_sql(f"UPDATE {sql.VERSION_TABLE} SET version_num = '9999'")
    ran(open_sql(), "k", "x")
    assert journal.get("k") is not None


def test_many_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Workers that start together make the tables once and fail never."""
    from concurrent.futures import ThreadPoolExecutor

    def opened(number: int) -> bool:
        journal = SqlJournal(journal_url(tmp_path))
        try:
            return claim(journal, f"owner-{number}").mine
        finally:
            journal.close()

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(opened, range(6))) == [False] * 5 + [True]
