"""A private PostgreSQL, and Hosts on it or on SQLite."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kdskills.app import Host, Settings


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a running private server, which is gone afterwards."""
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]))
    top = Path(tempfile.mkdtemp(prefix="kdskills-postgres-"))
    top.chmod(0o777)
    drop = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups"] if os.geteuid() == 0 else []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(program: str, *words: str) -> None:
        # the server keeps its starter's output open: it must not be a pipe we wait for
        with (top / "log.txt").open("ab") as log:
            command = [*drop, str(programs / program), "-D", str(top / "data"), *words]
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=60, cwd="/")

    try:
        run("initdb", "-U", "kd", "-A", "trust", "-N", "--locale=C.UTF-8", "-E", "UTF8")
        told = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        run("pg_ctl", "-w", "-o", told, "start")
        yield f"postgresql://kd@127.0.0.1:{port}/postgres"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("pg_ctl", "-m", "immediate", "-w", "stop")
        shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings of a new installation."""
    url = None
    if request.param == "postgresql":
        import psycopg

        url = request.getfixturevalue("postgres")
        with psycopg.connect(url, autocommit=True) as link:
            link.execute("DROP SCHEMA public CASCADE")
            link.execute("CREATE SCHEMA public")
    return Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", database_url=url, bundle=None)


@pytest.fixture
async def hosts(settings: Settings) -> AsyncIterator[Callable[[], Host]]:
    """Make Hosts of one installation."""
    made: list[Host] = []

    def make() -> Host:
        made.append(Host(settings, entry_points=False))
        return made[-1]

    yield make
    for host in made:
        await host.storage.aclose()


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """Write an archive with a body."""

    def write(body: str = "Read.", name: str = "brief") -> Path:
        place = tmp_path / f"{name}-{abs(hash(body))}.zip"
        with zipfile.ZipFile(place, "w") as out:
            out.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes pages.\n---\n{body}\n")
            out.writestr(f"{name}/data.bin", os.urandom(200_000) if body.startswith("Big") else b"x")
        return place

    return write
