"""A private PostgreSQL server in a folder of its own, run by a user that is not root; to be stopped, crashed and restarted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

from kdskills.errors import OperatorMustAct
from kdskills.testing.ports import unused_port

PROGRAMS = Path("/usr/lib/postgresql")
_PATIENCE_S = 120


class NoPostgres(OperatorMustAct, code="postgres_missing"):
    """No PostgreSQL server is installed on this machine."""


@dataclass
class Cluster:
    """A server in *folder*, listening on 127.0.0.1 at *port*."""

    programs: Path
    folder: Path
    port: int

    def url(self, database: str = "postgres") -> str:
        """Return where a database of this server is reached."""
        return f"postgresql://kd@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Make an empty database and return its URL."""
        self.run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "kd", database)
        return self.url(database)

    def start(self) -> None:
        """Start the server and wait for it."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c max_connections=300"
        self.run("pg_ctl", "-D", str(self.folder), "-w", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: `fast` ends its clients, `immediate` is a crash."""
        self.run("pg_ctl", "-D", str(self.folder), "-m", mode, "-w", "stop")

    def counting(self) -> Cluster:
        """Let the server, which is started anew, count its statements for `StatementCount`; returns itself."""
        with psycopg.connect(self.url(), autocommit=True) as link:
            link.execute("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
        self.stop()
        self.start()
        return self

    @contextlib.contextmanager
    def standby(self) -> Iterator[Cluster]:
        """Give a server that follows this one, which answers no commit before both have it; stopped at the end."""
        other = Cluster(self.programs, self.folder.with_name("standby"), unused_port())
        source = f"host=127.0.0.1 port={self.port} user=kd application_name=standby"
        self.run("pg_basebackup", "-D", str(other.folder), "-d", source, "-R", "-X", "stream", "-c", "fast")
        other.start()
        try:
            with psycopg.connect(self.url(), autocommit=True) as link:
                link.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
                link.execute("SELECT pg_reload_conf()")
                state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
                while link.execute(state).fetchone() != (1,):
                    time.sleep(0.05)
            yield other
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                other.stop("immediate")
            shutil.rmtree(other.folder, ignore_errors=True)

    def promote(self) -> None:
        """Let a server that followed another one take writes itself."""
        with psycopg.connect(self.url(), autocommit=True) as link:  # it has the setting of the one before
            link.execute("ALTER SYSTEM RESET synchronous_standby_names")
        self.run("pg_ctl", "-D", str(self.folder), "-w", "promote")

    def run(self, program: str, *args: str) -> None:
        """Run one of the server's programs as its user."""
        drop = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups"] if os.geteuid() == 0 else []
        # the server keeps its starter's output open: it must not be a pipe we wait for
        with (self.folder.parent / "log.txt").open("ab") as log:
            subprocess.run(
                [*drop, str(self.programs / program), *args],
                check=True,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                timeout=_PATIENCE_S,
                cwd="/",
            )


class StatementCount:
    """How many statements a PostgreSQL database was asked, by its own count; its own questions are not among them.

    Args:
        url: The database; its server counts, as `Cluster.counting` lets it.
    """

    def __init__(self, url: str) -> None:
        self._link = psycopg.connect(url, autocommit=True)
        self._link.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")

    def __call__(self) -> int:
        """Return the number so far, transactions' begins and ends included."""
        row = self._link.execute(
            "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements JOIN pg_database d ON d.oid = dbid "
            "WHERE d.datname = current_database() AND query NOT LIKE '%pg_stat_statements%'"
        ).fetchone()
        assert row is not None
        return int(row[0])


@contextlib.contextmanager
def private_cluster() -> Iterator[Cluster]:
    """Give a running server, and leave nothing of it behind. Raises NoPostgres."""
    found = sorted(PROGRAMS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        raise NoPostgres("no PostgreSQL server is installed")
    top = Path(tempfile.mkdtemp(prefix="kdskills-postgres-"))
    top.chmod(0o777)
    made = Cluster(found[-1].parent, top / "data", unused_port())
    try:
        made.run("initdb", "-D", str(made.folder), "-U", "kd", "-A", "trust", "-N", "--locale=C.UTF-8", "-E", "UTF8")
        made.start()
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            made.stop("immediate")
        shutil.rmtree(top, ignore_errors=True)
