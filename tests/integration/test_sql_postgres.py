"""The SQL store on a real PostgreSQL: the same promises, between processes, and through a restart of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdskills.builtin.stores.sql import SqlStore
from kdskills.session import StoreUnavailable
from kdskills.testing.stores import STORE_CHECKS, sample

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("postgres")]


@dataclass
class Cluster:
    """A private server in a folder of its own, run by a user that is not root."""

    programs: Path
    folder: Path
    port: int

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"postgresql://kd@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *args: str) -> None:
        """Run one of PostgreSQL's programs as its user."""
        drop = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups"] if os.geteuid() == 0 else []
        command = [*drop, str(self.programs / program), *args]
        # the server keeps its starter's output open: it must not be a pipe we wait for
        with (self.folder.parent / "log.txt").open("ab") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=60, cwd="/")

    def start(self) -> None:
        """Start the server and wait for it."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self.run("pg_ctl", "-D", str(self.folder), "-w", "-o", options, "start")

    def stop(self) -> None:
        """Stop the server at once."""
        self.run("pg_ctl", "-D", str(self.folder), "-m", "fast", "-w", "stop")


@pytest.fixture(scope="module")
def cluster(free_port: Callable[[], int]) -> Iterator[Cluster]:
    """A running server."""
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]))
    top = Path(tempfile.mkdtemp(prefix="kdskills-postgres-"))
    top.chmod(0o777)
    made = Cluster(programs, top / "data", free_port())
    try:
        made.run("initdb", "-D", str(made.folder), "-U", "kd", "-A", "trust", "-N", "--locale=C.UTF-8", "-E", "UTF8")
        made.start()
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            made.stop()
        shutil.rmtree(top, ignore_errors=True)


def _emptied(url: str) -> None:
    """Drop every table, so that each test finds a new database."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as link:
        link.execute("DROP SCHEMA public CASCADE")
        link.execute("CREATE SCHEMA public")


@pytest.fixture
async def store(cluster: Cluster):
    """An empty store."""
    _emptied(cluster.url)
    made = SqlStore(cluster.url)
    yield made
    await made.aclose()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.name)
async def test_promises_hold(check, store: SqlStore) -> None:
    """Every promise of the shipped suite holds on PostgreSQL."""
    await check.run(store)


async def test_opened_at_once(cluster: Cluster) -> None:
    """Eight openings of an empty database at once make its tables once, and none fails."""
    _emptied(cluster.url)
    stores = await asyncio.gather(*(asyncio.to_thread(SqlStore, cluster.url) for _ in range(8)))
    await stores[0].put(sample("s"), expect=None)
    assert [await one.get("s") for one in stores] == [sample("s")] * 8
    for one in stores:
        await one.aclose()


async def test_pages_are_sorted_by_code_point(store: SqlStore) -> None:
    """The order of a listing is the same as on SQLite, whatever the server's language."""
    for session_id in ("b", "A", "a", "B", "_", "0"):
        await store.put(sample(session_id), expect=None)
    page = await store.page(consumer=None, after=None, limit=9)
    assert [head.session_id for head in page] == sorted(["b", "A", "a", "B", "_", "0"])


async def test_a_restart_is_survived(cluster: Cluster, store: SqlStore) -> None:
    """While the server is away calls are `store_unavailable`; when it is back they work and nothing is lost."""
    await store.put(sample("kept"), expect=None)
    await asyncio.to_thread(cluster.stop)
    try:
        with pytest.raises(StoreUnavailable) as caught:
            await store.get("kept")
        assert "127.0.0.1" not in caught.value.message
    finally:
        await asyncio.to_thread(cluster.start)
    assert await store.get("kept") == sample("kept")
