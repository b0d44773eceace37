"""One host of background work under test: its worker processes, a client, and a ledger its programs write to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from kdskills.app.settings import Settings, settings_line
from kdskills.jobs.attempts import Attempt, Attempts, attempt_alive
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, JobSpec, Placement, Scope, ServiceSpec, StepSpec, TaskHead, TaskSpec
from kdskills.jobs.queue import slot_taken
from kdskills.jobs.records import WorkTables
from kdskills.jobs.settings import JobsSettings
from kdskills.jobs.shim import read_identity
from kdskills.storage.database import Database

MODULE = "kdskills.app.worker.main"
PATIENCE_S = 120.0


def run_from(code: Path | None) -> dict[str, str]:
    """Return the environment in which `python -m kdskills…` runs the package in the folder *code*; None is the caller's own."""
    other = {} if code is None else {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    return {**os.environ, **other}


class Ledger:
    """What programs really did: each appends `b NAME` when it begins and `e NAME` when it ends.

    Args:
        path: The file; one write is one line, so lines of many programs never mix.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        path.chmod(0o666)

    def script(self, name: str, seconds: float = 0.0) -> str:
        """Return a shell script that tells its beginning, sleeps, and tells its end."""
        return f"echo 'b {name}' >> {self.path}; sleep {seconds:g}; echo 'e {name}' >> {self.path}"

    def held(self, name: str) -> str:
        """Return a shell script that tells its beginning, waits until `let_go`, and tells its end."""
        wait = f"until [ -e {self.path}.go ]; do sleep 0.05; done"
        return f"echo 'b {name}' >> {self.path}; {wait}; echo 'e {name}' >> {self.path}"

    def meeting(self, name: str, others: int, seconds: float = 0.0) -> str:
        """Return a script as `script`, which goes on when at least *others* programs have begun, itself included."""
        wait = f"until [ $(grep -c '^b' {self.path}) -ge {others} ]; do sleep 0.05; done"
        return f"echo 'b {name}' >> {self.path}; {wait}; sleep {seconds:g}; echo 'e {name}' >> {self.path}"

    def let_go(self) -> None:
        """Let programs that are held come to their end."""
        Path(f"{self.path}.go").touch()

    def lines(self) -> list[tuple[str, str]]:
        """Return (`b` or `e`, name) in the order of time."""
        rows = (line.split(" ", 1) for line in self.path.read_text().splitlines())
        return [(mark, name) for mark, name in rows]

    def begun(self) -> Counter[str]:
        """Return how often each program began."""
        return Counter(name for mark, name in self.lines() if mark == "b")

    def order(self) -> list[str]:
        """Return names in the order they began."""
        return [name for mark, name in self.lines() if mark == "b"]

    def most_at_once(self) -> int:
        """Return the most programs that were between their beginning and their end at one time."""
        running = most = 0
        for mark, _ in self.lines():
            running += 1 if mark == "b" else -1
            most = max(most, running)
        return most


def end_attempts(state_dir: Path) -> None:
    """End every program of a state folder whose workers are gone, and wait until none is left.

    Raises:
        AssertionError: One of them outlived its cancel.
    """
    attempts = Attempts(state_dir)
    living = [found for task in attempts.tasks() if (found := attempts.latest(task)) is not None]
    for attempt in living:
        attempt.cancel("the test is over")
    end = time.monotonic() + PATIENCE_S
    for attempt in living:
        while attempt_alive(attempt.folder):
            assert time.monotonic() < end, f"{attempt.order.task_id} did not end"
            time.sleep(0.02)


def kill_attempt(attempt: Attempt) -> None:
    """Kill everything an attempt runs, its shim first, as a power cut does."""
    identity = read_identity(attempt.folder)
    if identity is None:
        return
    victims = [int(identity["pid"])]
    for pid in victims:  # grows while it is gone through
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                victims += [int(word) for word in task.read_text().split()]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut_power(state_dir: Path) -> None:
    """Kill every program of a state folder whose workers are gone."""
    attempts = Attempts(state_dir)
    for task in attempts.tasks():
        attempt = attempts.latest(task)
        if attempt is not None and attempt_alive(attempt.folder):
            kill_attempt(attempt)


async def keep_finished(database: Database, task: str, count: int) -> None:
    """Keep *count* more finished tasks that are otherwise as *task*, each of another second before it.

    Args:
        database: Has the tables of background work, and the task.
        task: Its id.
        count: How many.
    """
    table = WorkTables().tasks
    changed = {"id": "id || '-' || n", "status": "'succeeded'", "created_at": "created_at - n * 1000000"}
    changed["finished_at"] = changed["created_at"]
    names = [column.name for column in table.columns]
    quoted = ", ".join(f'"{name}"' for name in names)
    values = ", ".join(changed.get(name, f'"{name}"') for name in names)
    numbers = (
        "WITH RECURSIVE numbers(n) AS (SELECT CAST(1 AS BIGINT) UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)"
    )
    query = f"INSERT INTO {table.name} ({quoted}) {numbers} SELECT {values} FROM {table.name}, numbers WHERE id = :task"  # noqa: S608 - names of columns

    def change(link: sa.Connection) -> None:
        link.execute(sa.text(query), {"count": count, "task": task})
        if link.dialect.name == "postgresql":  # its own daemon would, later
            link.exec_driver_sql("ANALYZE kd_tasks")

    await database.write(change)


class WorkLab:
    """One host: a state folder, whose workers run programs of this machine, without any wall unless an engine is named.

    Args:
        folder: Holds the state folder of *host* and the ledger all hosts of a test share.
        url: Database; SQLite in the state folder when omitted.
        host: Name of the host: a state folder of its own makes a host of its own.
        engine: What runs the programs; with a walled one they cannot write to the ledger.
        engine_settings: Further settings, such as the account of a remote engine.
        code: A folder whose `kdskills` the workers run instead of this one, as in an upgrade that is not over.
        **jobs: Fields of `JobsSettings`.
    """

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        *,
        host: str = "a",
        engine: str = "subprocess",
        engine_settings: Mapping[str, Any] | None = None,
        code: Path | None = None,
        **jobs: Any,
    ) -> None:
        given = {"idle_s": 3600.0, "beat_s": 0.5} | jobs
        self.settings = Settings(
            state_dir=folder / f"state-{host}",
            database_url=url,
            allow_unisolated=True,
            jobs=JobsSettings(**given),
            **(engine_settings or {}),
        )
        self.engine = engine
        self.code = code
        self.ledger = Ledger(folder / "ledger.txt")
        place = (self.settings.work_database, self.settings.state_dir, self.settings.jobs)
        self.client = JobsClient(*place, fleet=self.settings.fleet)
        self.scope = Scope()
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.log = folder / f"worker-{host}.log"

    async def aclose(self) -> None:
        """Kill the workers and end what they left running."""
        for slot in list(self.workers):
            self.kill(slot)
        await asyncio.to_thread(end_attempts, self.settings.state_dir)
        await self.client.aclose()

    def start(self, slot: int = 0) -> subprocess.Popen[bytes]:
        """Start a worker."""
        command = [sys.executable, "-m", MODULE, "--slot", str(slot)]
        told = settings_line(self.settings) + b"\n"
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=run_from(self.code))
        assert process.stdin is not None
        process.stdin.write(told)
        process.stdin.close()
        self.workers[slot] = process
        return process

    def kill(self, slot: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a worker a signal, wait for its end and return its exit code."""
        process = self.workers.pop(slot)
        process.send_signal(number)
        return process.wait(60)

    def kill_with_launcher(self, slot: int = 0) -> None:
        """Kill a worker and the launcher of its programs together, as a machine short of memory does."""
        process = self.workers.pop(slot)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        process.wait(60)

    async def started(self, slot: int = 0) -> None:
        """Wait until the worker of *slot* holds it."""
        await self.until(lambda: slot_taken(self.settings.state_dir, slot))

    async def until(self, condition: Any, seconds: float = PATIENCE_S) -> Any:
        """Wait until *condition* holds and return what it gave; fails after *seconds*, with the worker's log."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"it never came true; the worker said:\n{self.said()}"
            await asyncio.sleep(0.02)
        return found

    def said(self) -> str:
        """Return the end of the workers' log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def task(
        self,
        script: str,
        *,
        session: str | None = None,
        service: ServiceSpec | None = None,
        timeout_s: float | None = 300.0,
        **more: Any,
    ) -> TaskSpec:
        """Return a task that runs *script* by the shell."""
        timeout_s = None if service is not None else timeout_s
        return TaskSpec(
            scope=self.scope,
            session_id=session,
            command=Command(argv=("/bin/sh", "-c", script), timeout_s=timeout_s),
            placement=self.placement,
            mode="batch" if service is None else "service",
            service=service,
            **more,
        )

    def job(self, scripts: Sequence[str], *, session: str = "s", **more: Any) -> JobSpec:
        """Return a job whose steps run *scripts* by the shell, one after the other."""
        steps = [
            StepSpec(name=f"step-{index}", command=Command(argv=("/bin/sh", "-c", script), timeout_s=300.0))
            for index, script in enumerate(scripts)
        ]
        given = {"steps": tuple(steps), "placement": self.placement, "session_id": session, "max_wall_time_s": 600.0}
        return JobSpec(scope=self.scope, **{**given, **more})

    @property
    def placement(self) -> Placement:
        """The engine of this host's programs."""
        bare = self.engine == "subprocess"
        return Placement(engine=self.engine, skill_name="x", version_hash="0", unsafe_local=bare)

    async def running(self, item: str) -> TaskHead:
        """Wait until a task runs and return it."""
        end = time.monotonic() + PATIENCE_S
        while (head := await self.client.head(TaskHead, self.scope, item)).status != "running":
            assert not head.terminal, (head.status, head.error_code, head.error_message, self.said())
            assert time.monotonic() < end, f"it never ran; the worker said:\n{self.said()}"
            await asyncio.sleep(0.02)
        return head


@contextlib.asynccontextmanager
async def labs(*hosts: str, url: str | None = None, **jobs: Any) -> AsyncIterator[list[WorkLab]]:
    """Give one host per name, all in one folder; everything of them is ended.

    Args:
        *hosts: Their names.
        url: Database they share; SQLite in the state folder when omitted.
        **jobs: Fields of `JobsSettings`.
    """
    with tempfile.TemporaryDirectory(prefix="kdskills-work-") as top:
        made: list[WorkLab] = []
        async with contextlib.AsyncExitStack() as ends:
            for host in hosts:
                made.append(WorkLab(Path(top), url, host=host, **jobs))
                ends.push_async_callback(made[-1].aclose)
            yield made
