"""No room on the disk: the operator is told, by a code, once, and by `/readyz`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kdskills.app import Host, Settings
from kdskills.doors.web.application import build_app

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no disk can be mounted here: it needs root and the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def archive() -> bytes:
    """Return a skill with a file of 300 KiB that no zip makes smaller."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as out:
        out.writestr("SKILL.md", "---\nname: big\ndescription: A big one.\n---\nText.\n")
        out.writestr("references/noise.bin", os.urandom(300_000))
    return data.getvalue()


def fill(path: Path) -> None:
    """Let a file grow until nothing fits beside it."""
    more = os.open(path, os.O_WRONLY | os.O_APPEND)
    with contextlib.suppress(OSError):
        while True:
            os.write(more, bytes(4096))
    os.close(more)


async def test_a_full_disk_is_the_operators(small_disk: Path, tmp_path: Path, caplog) -> None:
    """An upload without room is 507 with a code, is logged once and breaks nothing; `/readyz` names the disk until there is."""
    state = small_disk / "state"
    host = Host(Settings(state_dir=state, database_url=f"sqlite:///{tmp_path}/work.db"), entry_points=False)
    app = build_app(host, open_on_loopback=True)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True, client=("127.0.0.1", 1))
    caplog.set_level(logging.ERROR, "kdskills.service")
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client:
        await host.projects.create("local", who="ann")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(900_000))
        for _ in range(2):
            answer = await client.post("/projects/local/skills:upload", files={"file": ("a.zip", archive())})
            body = answer.json()
            assert (answer.status_code, body["code"], body["who"]) == (507, "storage_full", "operator"), body
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["storage_full"]
        assert not any(path.is_file() for path in state.rglob("*") if "projects" in path.parts)
        fill(ballast)
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["disk"]) == (503, "storage_full")
        ballast.unlink(missing_ok=True)
        assert (await client.get("/readyz")).json()["checks"]["disk"] == "ok"
        answer = await client.post("/projects/local/skills:upload", files={"file": ("a.zip", archive())})
        assert answer.status_code == 201
    await host.storage.aclose()


async def test_a_full_disk_is_told_when_work_is_opened(small_disk: Path, tmp_path: Path) -> None:
    """The first look at work, which keeps the id of this host, is 507 without room and leaves no part of a file."""
    state = small_disk / "state"
    host = Host(Settings(state_dir=state, database_url=f"sqlite:///{tmp_path}/work.db"), entry_points=False)
    transport = httpx.ASGITransport(app=build_app(host, open_on_loopback=True), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client:
        await host.projects.create("local", who="ann")
        state.mkdir(mode=0o700, exist_ok=True)
        ballast = small_disk / "ballast"
        ballast.touch()
        fill(ballast)
        answer = await client.get("/projects/local/tasks")
        assert (answer.status_code, answer.json()["code"]) == (507, "storage_full"), answer.text
        assert [path.name for path in state.iterdir() if path.is_file()] == []
        ballast.unlink()
        assert (await client.get("/projects/local/tasks")).json()["tasks"] == []
    await host.work.aclose()
    await host.storage.aclose()


async def test_readiness_answers_though_the_state_folder_is_spoilt(tmp_path: Path) -> None:
    """What the system says no to while `/readyz` looks is a word of that part, not a failure of the look."""
    state = tmp_path / "state"
    (state / "host").mkdir(parents=True)  # where a file belongs
    state.chmod(0o700)
    host = Host(Settings(state_dir=state, database_url=f"sqlite:///{tmp_path}/work.db"), entry_points=False)
    await host.projects.create("local", who="ann")
    ready = await host.ready()
    assert (ready.notices, ready.checks["database"]) == ({"workers": "state_unwritable"}, "ok")
    await host.work.aclose()
    await host.storage.aclose()
