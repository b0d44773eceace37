"""What tests of background work share: attempts in a state folder of their own, started by a real launcher."""

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills.app.settings import Settings
from kdskills.app.worker.launcher import warm_starter
from kdskills.jobs.attempts import AttemptOrder, Attempts
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec
from kdskills.testing.work import end_attempts


class Lab:
    """Orders for short programs, and what to do with them."""

    def __init__(self, state: Path, settings: Settings, engine: str = "bubblewrap"):
        self.state, self.settings, self.engine = state, settings, engine
        self.starter = warm_starter(settings)
        self.attempts = Attempts(state, self.starter)
        self.count = 0

    def order(self, script, *, attempt=1, task=None, session=None, service=None, unsafe=False, limits=None, **command):
        """Return an order that runs *script* by the shell of its sandbox, or an argv by execve."""
        self.count += task is None
        argv = ("/bin/sh", "-c", script) if isinstance(script, str) else tuple(script)
        command.setdefault("timeout_s", None if service is not None else 60.0)
        more = {} if limits is None else {"limits": limits}
        placement = Placement(engine=self.engine, skill_name="x", version_hash="0", unsafe_local=unsafe, **more)
        spec = TaskSpec(
            scope=Scope(),
            session_id=session,
            command=Command(argv=argv, **command),
            placement=placement,
            mode="batch" if service is None else "service",
            service=service,
        )
        folder = None if session is None else self.attempts.session_dir(spec.scope.session_key(session))
        return AttemptOrder(task_id=task or f"task_{self.count}", attempt=attempt, spec=spec, session_dir=folder)

    async def run(self, script, **more):
        """Run *script* to its verdict."""
        attempt = await self.attempts.start(self.order(script, **more))
        verdict = await attempt.wait()
        return attempt, verdict

    @staticmethod
    async def ask(port, words):
        """Send *words* to a port of this host and return everything that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(words)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    async def until(condition, seconds=60.0):
        """Wait until *condition* holds, and return what it gave."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, "it never came true"
            await asyncio.sleep(0.01)
        return found

    def log(self, attempt):
        """Return what our own side had to say, for the message of a failing test."""
        return (attempt.folder / "shim.log").read_text(encoding="utf-8")


@pytest.fixture
def lab(tmp_path):
    """Attempts in a folder of this test, on bubblewrap."""
    lab = Lab(tmp_path / "state", Settings())
    yield lab
    lab.starter.close()
    end_attempts(lab.state)


@pytest.fixture
def make_lab(tmp_path):
    """Return a maker of labs with other settings or engines; they are closed at the end."""
    made = []

    def make(engine, settings=None):
        made.append(Lab(tmp_path / f"state-{len(made)}", settings or Settings(), engine))
        return made[-1]

    yield make
    for one in made:
        one.starter.close()
        end_attempts(one.state)


@pytest.fixture
def generous():
    """Settings of an operator who allows the bare engine and takes limits as they come."""
    return Settings(allow_unisolated=True, best_effort_limits=("cpu", "memory", "network", "pids", "tmp", "work"))


@pytest.fixture
def python_process():
    """Return a starter of Python processes of this checkout, which are killed at the end."""
    started = []

    def start(*words, **options):
        started.append(subprocess.Popen([sys.executable, *words], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
