"""A Host with a real worker, a real sandbox and a small bundle; the worker ends with the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Context
from kdskills.app.settings import settings_line
from kdskills.jobs.queue import slot_taken
from kdskills.testing.work import end_attempts

LONG = 100.0

DESCRIPTOR = """
CUSTOM_SKILLS_ROOT = "skills"
AGENTS_CONFIG = {"reader": {"enabled": ["tool"]}, "stranger": {"disabled": ["tool"]}}
"""


class Place:
    """Where work is done: settings, a worker process, and Hosts that speak to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundle = folder / "bundle"
        self._write_bundle()
        self.settings = Settings(
            state_dir=folder / "state", bundle=self.bundle, executor="bubblewrap", jobs={"idle_s": 5.0}
        )
        self.worker: subprocess.Popen[bytes] | None = None

    def _write_bundle(self) -> None:
        skill = self.bundle / "skills" / "tool"
        (skill / "scripts").mkdir(parents=True)
        (self.bundle / "skills_descriptor.py").write_text(DESCRIPTOR)
        (skill / "SKILL.md").write_text("---\nname: tool\ndescription: A tool for tests.\n---\nUse it.\n")
        (skill / "scripts" / "hello.py").write_text("import sys\nprint('hello', *sys.argv[1:])\n")

    def start_worker(self) -> None:
        """Start a worker and wait until it holds its slot."""
        self.settings.state_dir.mkdir(parents=True, exist_ok=True)
        with (self.folder / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "kdskills.app.worker.main"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        assert self.worker.stdin is not None
        self.worker.stdin.write(settings_line(self.settings.model_copy(update={"jobs": self._stays()})) + b"\n")
        self.worker.stdin.close()
        deadline = time.monotonic() + LONG
        while not slot_taken(self.settings.state_dir, 0):
            assert self.worker.poll() is None, (self.folder / "worker.log").read_text(errors="replace")
            assert time.monotonic() < deadline, "the worker does not begin"
            time.sleep(0.05)

    def _stays(self) -> Any:
        return self.settings.jobs.model_copy(update={"idle_s": 600.0})

    def kill_worker(self) -> None:
        """Kill the worker as a crash would."""
        assert self.worker is not None
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait()

    def end(self) -> None:
        """End the worker and every program it or a test left."""
        if self.worker is not None and self.worker.poll() is None:
            self.worker.terminate()
            try:
                self.worker.wait(30)
            except subprocess.TimeoutExpired:
                self.kill_worker()
        end_attempts(self.settings.state_dir)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One worker for the tests of a file."""
    made = Place(tmp_path_factory.mktemp("work"))
    made.folder.chmod(0o755)
    try:
        made.start_worker()
        yield made
    finally:
        made.end()


class Caller:
    """Calls operations as somebody.

    Args:
        host: The Host.
        identity: Who calls.
    """

    def __init__(self, host: Host, identity: Identity = LOCAL) -> None:
        self.host = host
        self.identity = identity

    async def __call__(
        self, operation: str, *, key: str | None = None, emit: Callable[[Any], None] | None = None, **arguments: Any
    ) -> Any:
        """Run an operation of the table."""
        context = Context(identity=self.identity, emit=emit, idempotency_key=key)
        return await asyncio.wait_for(self.host.invoke(f"skills.{operation}", arguments, context), LONG)

    async def cmd(self, command: Any, **more: Any) -> Any:
        """Run a command of the skill and wait for it."""
        return await self("run_cmd", **({"skill_name": "tool", "command": command, "workdir": "session"} | more))

    async def start(self, command: Any, **more: Any) -> str:
        """Start a command of the skill and return its task."""
        started = await self(
            "run_cmd_async", **({"skill_name": "tool", "command": command, "workdir": "session"} | more)
        )
        assert started.status == "queued"
        found: str = started.task_id
        return found

    async def over(self, task_id: str) -> Any:
        """Watch a task to its end."""
        return await self("task_watch", task_id=task_id, poll_interval_sec=0.05, timeout_sec=LONG)

    async def job_over(self, job_id: str) -> Any:
        """Watch a job to its end."""
        return await self("job_watch", job_id=job_id, poll_interval_sec=0.05, timeout_sec=LONG)

    async def until(self, task_id: str, truth: Callable[[Any], bool]) -> Any:
        """Look at a task until something is so."""
        return await until(lambda: self("task_status", task_id=task_id), truth)


async def until(look: Callable[[], Awaitable[Any]], truth: Callable[[Any], bool]) -> Any:
    """Look until something is so, and return what was seen."""
    deadline = time.monotonic() + LONG
    while True:
        seen = await look()
        if truth(seen):
            return seen
        assert time.monotonic() < deadline, f"it never came to be so: {seen}"
        await asyncio.sleep(0.03)


@pytest.fixture
async def local(place: Place):
    """The local account."""
    host = Host(place.settings)
    yield Caller(host)
    await host.work.aclose()
    await host.storage.aclose()


@pytest.fixture
def caller(local):
    """Return a function that makes callers of this Host."""

    def make(**identity: Any) -> Caller:
        chosen = {"scopes": frozenset({"work:run", "work:read"}), "local": False, "agent": "reader"} | identity
        return Caller(local.host, replace(LOCAL, **chosen))

    return make


@pytest.fixture
def alive():
    """Return a function that tells whether a process runs."""

    def check(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    return check
