"""A restored backup is its source, on both databases, whatever ran meanwhile; damaged and hostile ones change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from hypothesis import given, settings, strategies
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.backup import check_backup, table_columns, table_names
from kdskills.app.operations import Context
from kdskills.app.settings import settings_line
from kdskills.doors.cli.main import build_cli
from kdskills.errors import Conflict, KdskillsError, NotFound
from kdskills.jobs.artifacts import ArtifactKeeper, open_artifacts
from kdskills.jobs.attempts import OutFile
from kdskills.jobs.model import TaskHead
from kdskills.storage.backup_file import BackupReader, BackupRefused, BackupWriter, Member
from kdskills.storage.database import Database
from kdskills.testing.work import WorkLab, labs

KINDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))]


def skill_archive(folder: Path, name: str = "brief", body: str = "Read.") -> Path:
    """Write the archive of a skill with a program."""
    place = folder / f"{name}-{secrets.token_hex(4)}.zip"
    with zipfile.ZipFile(place, "w") as out:
        out.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes pages.\n---\n{body}\n")
        program = zipfile.ZipInfo(f"{name}/scripts/run.sh")
        program.external_attr = 0o755 << 16
        out.writestr(program, "#!/bin/sh\necho hi\n")
    return place


def make_host(folder: Path, url: str | None = None, **more: object) -> Host:
    """Return a Host with a state folder of its own, and conversations in a database."""
    store = f"sqlite:///{folder / 'conversations.db'}"
    facts = {"state_dir": folder / "state", "index_dir": folder / "index", "database_url": url, "bundle": None}
    return Host(Settings(**{**facts, "session_store": store, **more}), entry_points=False)


async def close(*hosts: Host) -> None:
    """Close what hosts opened."""
    for host in hosts:
        if "work" in vars(host):
            await host.work.aclose()
        await host.storage.aclose()


def rows_of(url: str) -> dict[str, list[tuple[object, ...]]]:
    """Return every row of every table."""

    def ask(link: sa.Connection) -> dict[str, list[tuple[object, ...]]]:
        tables = [table_columns(link, name) for name in table_names(link)]
        return {table.name: sorted((tuple(row) for row in link.execute(table.select())), key=repr) for table in tables}

    with contextlib.closing(Database(url)) as database:
        return database.ask(ask)


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Return mode and digest of every file below a folder."""
    return {
        str(path.relative_to(folder)): (stat.S_IMODE(path.stat().st_mode), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


async def keep_artifact(host: Host, content: bytes, project: str = "acme") -> str:
    """Store an input of a project and return its id."""
    work = await host.work.client.work()
    keeper = ArtifactKeeper(host.work.artifacts(), work.database, work.tables, host.settings.state_dir / "inputs")
    from kdskills.jobs.model import Scope

    return await keeper.keep_input(Scope(project=project, agent="writer"), content)


async def fill(host: Host, folder: Path) -> None:
    """Keep something of each kind: versions, tokens, audit rows, artifacts, conversations, session files, a journal of calls."""
    context = Context()
    await host.invoke("projects.create", {"project": "acme"}, context)
    for body in ("Read.", "Read twice."):
        await host.projects.upload("acme", skill_archive(folder, body=body), who="test")
    await host.invoke("tokens.create", {"project": "acme", "agent": "writer", "scopes": ["skills:read"]}, context)
    for number in range(5):
        await keep_artifact(host, f"content {number}".encode() * 1000, "acme" if number % 2 else "strange ~ /../ ü")
    await host.session_store(host.settings.session_store).get("nobody")
    session = host.settings.state_dir / "sessions" / "s1" / "deep"
    session.mkdir(parents=True, mode=0o700)
    (session / "ü \udcff\n.txt").write_bytes(os.urandom(3_000_000))
    (session / "ü \udcff\n.txt").chmod(0o600)
    (session / "run").write_text("#!/bin/sh\n")
    (session / "run").chmod(0o700)
    (session / "link").symlink_to("/etc/passwd")
    (session / "empty").mkdir()
    os.mkfifo(session / "pipe")


@pytest.fixture(params=KINDS)
def urls(request: pytest.FixtureRequest) -> tuple[str | None, str | None]:
    """URLs of two databases, which the default ones are where there are none."""
    if request.param == "sqlite":
        return None, None
    server = request.getfixturevalue("postgres")
    return server.create(f"kept_{secrets.token_hex(6)}"), server.create(f"restored_{secrets.token_hex(6)}")


async def test_a_restored_backup_is_its_source(tmp_path, urls):
    """Tables row for row, objects and files byte for byte, and lists through operations are those of the source."""
    for name in "ab":
        (tmp_path / name).mkdir()
    source, target = make_host(tmp_path / "a", urls[0]), make_host(tmp_path / "b", urls[1])
    await fill(source, tmp_path)
    made = await source.invoke("backup.create", {"path": str(tmp_path)}, Context())
    assert (made.complete, made.objects, made.versions, made.left_out) == (True, 5, 2, 2)
    assert stat.S_IMODE(Path(made.path).stat().st_mode) == 0o600
    whole = await target.invoke("backup.restore", {"path": made.path, "check": True}, Context())
    assert (whole.rows, whole.restored, (tmp_path / "b" / "state").exists()) == (made.rows, False, False)
    done = await target.invoke("backup.restore", {"path": made.path}, Context())
    assert done.restored
    assert rows_of(source.settings.work_database) == rows_of(target.settings.work_database)
    assert rows_of(source.settings.session_store) == rows_of(target.settings.session_store)
    for part in ("artifacts", "sessions", "host"):
        one, other = (host.settings.state_dir / part for host in (source, target))
        assert tree(one) == tree(other)
    versions = [
        {path: facts for path, facts in tree(host.settings.state_dir / "projects").items() if not path.endswith(".zip")}
        for host in (source, target)
    ]
    assert versions[0] == versions[1] != {}
    assert (target.settings.state_dir / "sessions/s1/deep/empty").is_dir()
    for operation in ("projects.list", "tokens.list", "audit_log.list", "project_skills.list"):
        arguments = {"project": "acme"} if operation.startswith("project_") else {}
        answers = [await host.invoke(operation, arguments, Context()) for host in (source, target)]
        assert answers[0] == answers[1]
    checked = await target.invoke("db.check", {}, Context())
    assert (checked.ok, checked.findings) == (True, ())
    await target.invoke("projects.create", {"project": "later"}, Context())  # numbers of rows go on after those restored
    with pytest.raises(KdskillsError) as refused:
        await target.invoke("backup.restore", {"path": made.path}, Context())
    assert refused.value.code == "restore_not_empty"
    await close(source, target)
