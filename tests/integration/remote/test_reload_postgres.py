"""Records of catalogs in PostgreSQL, shared by workers of several machines (spec remote §3 Busy and windows)."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.remote.catalog.sqlstore import SqlCatalogStore
from kdskills.remote.catalog.store import CatalogRecord
from kdskills.remote.journal import SqlJournal

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("postgres-catalogs")]


@pytest.fixture(scope="module")
def url():
    """Return the database of a private PostgreSQL server."""
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]))
    drop = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="kdskills-catalogs-", ignore_cleanup_errors=True) as folder:
        top = Path(folder)
        top.chmod(0o777)
        data = top / "data"

        def run(program, *arguments):
            with (top / "log.txt").open("ab") as log:
                command = [*drop, str(programs / program), *arguments]
                subprocess.run(
                    command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60, cwd="/"
                )

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run("initdb", "-D", str(data), "-U", "kd", "-A", "trust", "-N", "--locale=C.UTF-8", "-E", "UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        try:
            run("pg_ctl", "-D", str(data), "-w", "-o", options, "start")
            yield f"postgresql://kd@127.0.0.1:{port}/postgres"
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("pg_ctl", "-D", str(data), "-m", "fast", "-w", "stop")
            shutil.rmtree(data, ignore_errors=True)


def test_workers_share_records(url):
    """What one worker writes the others read; changes of many at once all count."""
    journals = [SqlJournal(url) for _ in range(3)]
    try:
        stores = [SqlCatalogStore(journal.engine) for journal in journals]
        stores[0].update("t", lambda old: replace(old, strategy="reload", digest="d", tools={"a": "1"}))
        assert stores[1].get("t") == CatalogRecord("t", "reload", "d", {"a": "1"}, version=1)

        def count(store):
            for _ in range(5):
                store.update("n", lambda old: replace(old, tools={"n": str(int(old.tools.get("n", "0")) + 1)}))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(count, stores))
        assert stores[2].get("n").tools == {"n": "15"}
        stores[1].update("t", lambda old: replace(old, release="releasing", release_by="w"))
        assert [one.session_id for one in stores[0].releases(["t", "n"])] == ["t"]
        stores[2].forget("t")
        assert stores[0].get("t") is None
    finally:
        for journal in journals:
            journal.close()
