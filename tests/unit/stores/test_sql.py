"""The SQL store keeps the promises of a session store on SQLite, also between processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.app import Host, Settings
from kdskills.builtin.stores.sql import SqlStore, entries_of_text, entries_to_text, micros, moment_of
from kdskills.errors import UnknownName
from kdskills.session import MemoryStore, SkillRuntime, StoreConflict, StoreUnavailable
from kdskills.session.store import ImportedSkill, LoadedSkill, SessionRecord
from kdskills.testing.stores import STORE_CHECKS, sample

HELLO = Path(__file__).parents[3] / "bundles" / "hello"
START = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture
async def store(tmp_path: Path):
    """An empty store in a file."""
    made = SqlStore(f"sqlite:///{tmp_path / 'sessions.db'}")
    yield made
    await made.aclose()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.name)
async def test_promises_hold(check, store: SqlStore) -> None:
    """Every promise of the shipped suite holds on SQLite."""
    await check.run(store)


MOMENTS = st.integers(0, 7_000_000_000_000_000).map(moment_of)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)
IMPORTS = st.lists(st.builds(ImportedSkill, WORDS, WORDS, WORDS), max_size=3).map(tuple)
ENTRIES = st.lists(st.builds(LoadedSkill, WORDS, WORDS, WORDS, MOMENTS, WORDS, IMPORTS), max_size=4).map(tuple)


@given(active=ENTRIES)
def test_entries_come_back_equal(active: tuple[LoadedSkill, ...]) -> None:
    """Whatever a session holds, its text form reads back equal."""
    record = SessionRecord("s", "c", 1, START, START, 8, active)
    assert entries_of_text(entries_to_text(record)) == active


@given(moment=MOMENTS)
def test_times_keep_their_microseconds(moment: datetime) -> None:
    """A time survives the database to the microsecond."""
    assert moment_of(micros(moment)) == moment


async def test_a_purge_drops_texts_nobody_needs(tmp_path: Path) -> None:
    """Unused texts older than the purge's moment go; used ones and fresh ones stay."""
    now = [START]
    made = SqlStore(f"sqlite:///{tmp_path / 's.db'}", clock=lambda: now[0])
    await made.put_body("sha256:used", "used")
    await made.put_body("sha256:old", "old")
    await made.put(replace(sample("s", "writer", 1, "sha256:used"), touched_at=START + timedelta(hours=9)), expect=None)
    now[0] = START + timedelta(hours=2)
    await made.put_body("sha256:fresh", "fresh")
    assert await made.purge(START + timedelta(hours=1)) == 0
    assert [await made.get_body(f"sha256:{name}") for name in ("used", "old", "fresh")] == ["used", None, "fresh"]
    await made.aclose()


async def test_a_store_is_found_again(tmp_path: Path) -> None:
    """What was kept is there after closing and opening."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    first = SqlStore(url)
    await first.put(sample("kept"), expect=None)
    await first.aclose()
    second = SqlStore(url)
    assert await second.get("kept") == sample("kept")
    await second.aclose()


@pytest.mark.parametrize("hostile", ["'; DROP TABLE kd_sessions; --", "s%", "S", "ключ"])
async def test_hostile_ids_are_values(hostile: str, store: SqlStore) -> None:
    """An id is a value, never SQL and never a pattern."""
    await store.put(replace(sample("s"), session_id=hostile), expect=None)
    assert await store.get("s") is None
    assert (await store.get(hostile)).session_id == hostile
    assert [head.session_id for head in await store.page(consumer=None, after=None, limit=5)] == [hostile]


async def test_a_lost_database_is_the_operators(tmp_path: Path) -> None:
    """A file that is no database, or a folder that is not there, is `store_unavailable` without its path's secrets."""
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database, only text that is long enough to be read as a header" * 20)
    for url in (f"sqlite:///{broken}", "sqlite:////nowhere/at/all/s.db", "no url at all"):
        with pytest.raises(StoreUnavailable) as caught:
            SqlStore(url)
        assert (caught.value.code, caught.value.who) == ("store_unavailable", "operator")


async def test_a_full_write_lock_is_waited_for(tmp_path: Path, store: SqlStore) -> None:
    """A writer that finds the file locked waits for its turn instead of failing."""
    other = sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    put = asyncio.create_task(store.put(sample("waits"), expect=None))
    await asyncio.sleep(0.2)
    assert not put.done()
    other.execute("COMMIT")
    other.close()
    await put
    assert await store.get("waits") == sample("waits")


def _bump(url: str, rounds: int) -> None:
    """Add one to the version as often as asked, against whoever else does so."""

    async def work() -> None:
        made = SqlStore(url)
        done = 0
        while done < rounds:
            kept = await made.get("shared")
            assert kept is not None
            try:
                await made.put(replace(kept, version=kept.version + 1), expect=kept.version)
                done += 1
            except StoreConflict:
                continue
        await made.aclose()

    asyncio.run(work())


async def test_two_processes_lose_no_change(tmp_path: Path) -> None:
    """Two processes that open a new file at once and change one session by turns lose no change."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    first = SqlStore(url)
    await first.put(sample("shared"), expect=None)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_bump, args=(url, 15)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(worker.join, 60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert (await first.get("shared")).version == 1 + 30
    await first.aclose()


async def test_a_session_outlives_its_process(tmp_path: Path) -> None:
    """A conversation loaded in one process goes on in another with the same skills."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    program = (
        "import asyncio, sys\n"
        "from kdskills import SkillsSubsystem, load_bundle\n"
        "from kdskills.builtin.stores.sql import SqlStore\n"
        "from kdskills.session import SkillRuntime\n"
        "async def main():\n"
        "    bundle = load_bundle(sys.argv[2])\n"
        "    runtime = SkillRuntime(subsystem=SkillsSubsystem(bundle.descriptor), store=SqlStore(sys.argv[1]))\n"
        "    session = await runtime.create_session('talk')\n"
        "    await session.load(['hello'], by='code')\n"
        "asyncio.run(main())\n"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program, url, str(HELLO)], check=True)
    host = Host(Settings(), entry_points=False)
    runtime = SkillRuntime(subsystem=host.subsystem(host.bundle(HELLO)), store=host.session_store(url))
    session = await runtime.get_session("talk")
    assert [skill.full_id for skill in await session.active()] == ["public.hello"]
    await runtime.aclose()


def test_kdskills_register_stores() -> None:
    """A URL's scheme names the plugin that opens the store; an unknown one is an error that lists the known."""
    host = Host(Settings(), entry_points=False)
    assert isinstance(host.session_store("memory:"), MemoryStore)
    assert isinstance(host.session_store("sqlite://"), SqlStore)
    with pytest.raises(UnknownName, match="known: memory, postgresql, sqlite"):
        host.session_store("redis://localhost")


@settings(max_examples=10, deadline=None)
@given(ids=st.lists(st.text("abcXYZ._:-09", min_size=1, max_size=8), unique=True, max_size=8), size=st.integers(1, 4))
def test_pages_join_to_the_whole(ids: list[str], size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pages of any size, one after the other, give every session once, sorted by code point."""

    async def work() -> list[str]:
        made = SqlStore(f"sqlite:///{tmp_path_factory.mktemp('pages') / 's.db'}")
        for session_id in ids:
            await made.put(sample(session_id), expect=None)
        seen: list[str] = []
        while page := await made.page(consumer=None, after=seen[-1] if seen else None, limit=size):
            seen += [head.session_id for head in page]
        await made.aclose()
        return seen

    assert asyncio.run(work()) == sorted(ids)
