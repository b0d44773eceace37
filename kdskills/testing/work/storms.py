"""Storms: workers killed with -9 and databases taken away while work goes on, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from kdskills.errors import OperatorMustAct
from kdskills.jobs.model import JobHead, OnPort, Placement, ServiceSpec, TaskHead
from kdskills.testing.work.lab import WorkLab
from kdskills.testing.work.postgres import Cluster

SERVED = 8080


@dataclass(slots=True)
class Report:
    """What a storm did and what came of it.

    Attributes:
        submitted: How many tasks, or steps, there were.
        kills: How many workers were killed.
        unfinished: Ids that were not over at the deadline.
        failed: Ids that did not succeed, with their error codes.
        twice: Names of programs that began more than once.
        missing: Names of programs that never began.
        seconds: How long it took.
        most_at_once: The most programs that ran at one time.
        disorder: Jobs and sessions whose programs did not begin in order.
    """

    submitted: int
    kills: int = 0
    unfinished: list[str] = field(default_factory=list)
    failed: dict[str, str | None] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    most_at_once: int = 0
    disorder: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, failed, run twice or out of order."""
        return not (self.unfinished or self.failed or self.twice or self.missing or self.disorder)


async def kill_storm(lab: WorkLab, *, tasks: int, kills: int, seed: int = 1, deadline_s: float = 300.0) -> Report:
    """Run *tasks* short commands while the worker is killed *kills* times."""
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311 - a storm is repeatable, not secret
    names = [f"t{index}" for index in range(tasks)]
    lab.start()
    submitting = asyncio.ensure_future(_submit(lab, names, chance))
    report = Report(tasks)
    for _ in range(kills):
        await _progress(lab, chance)
        lab.kill()
        report.kills += 1
        lab.start()
    await _settle(lab, await submitting, report, deadline_s)
    _count(lab, names, report)
    report.seconds = time.monotonic() - began
    return report


async def sessions_storm(
    lab: WorkLab, *, tasks: int, sessions: int, kills: int, load: int = 0, seed: int = 5, deadline_s: float = 300.0
) -> Report:
    """Run *tasks* commands in *sessions* sessions while worker and launcher are killed together *kills* times.

    Commands of one session must begin in the order they were submitted in. Everything waits before the first kill, and
    the next kill does not wait for anything to be done. *load* busy processes run beside them. Names of sessions and tasks
    hold *seed*, so that storms may follow each other in one database.
    """
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311
    names = [f"s{seed}.{index % sessions}-{index // sessions}" for index in range(tasks)]
    report = Report(tasks)
    with _busy(load):
        lab.start()
        ids = await _submit(lab, names, chance, longest_s=0.6, sessions=True)
        for _ in range(kills):
            await lab.until(lambda: "takes work" in lab.said())
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            lab.kill_with_launcher()
            report.kills += 1
            lab.log.unlink()
            lab.start()
        await _settle(lab, ids, report, deadline_s)
    _count(lab, names, report)
    _order(lab, [f"s{seed}.{session}-" for session in range(sessions)], report)
    report.seconds = time.monotonic() - began
    return report


async def job_storm(
    lab: WorkLab, *, jobs: int, steps: int, kills: int, seed: int = 2, deadline_s: float = 300.0
) -> Report:
    """Run *jobs* jobs of *steps* steps each while the worker is killed *kills* times; steps must begin in order."""
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311
    lab.start()
    heads = [
        await lab.client.submit(
            lab.job([lab.ledger.script(f"j{job}-{step}", 0.02) for step in range(steps)], session=f"s{job}")
        )
        for job in range(jobs)
    ]
    names = [f"j{job}-{step}" for job in range(jobs) for step in range(steps)]
    report = Report(len(names))
    for _ in range(kills):
        await _progress(lab, chance)
        lab.kill()
        report.kills += 1
        lab.start()
    end = time.monotonic() + deadline_s
    for head in heads:
        over = await lab.client.wait(JobHead, lab.scope, head.id, max(0.0, end - time.monotonic()))
        if not over.terminal:
            report.unfinished.append(head.id)
        elif over.status != "succeeded":
            report.failed[head.id] = over.error_message
    _count(lab, names, report)
    _order(lab, [f"j{job}-" for job in range(jobs)], report)
    report.seconds = time.monotonic() - began
    return report


async def two_host_storm(
    labs: Sequence[WorkLab], *, tasks: int, kills: int, seed: int = 3, deadline_s: float = 300.0
) -> Report:
    """Run *tasks* commands on the workers of several hosts that share a database, killing workers at random."""
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311
    first, names = labs[0], [f"t{index}" for index in range(tasks)]
    for lab in labs:
        lab.start()
    submitting = asyncio.ensure_future(_submit(first, names, chance))
    report = Report(tasks)
    for _ in range(kills):
        await _progress(first, chance)
        unlucky = chance.choice(labs)
        unlucky.kill()
        report.kills += 1
        unlucky.start()
    await _settle(first, await submitting, report, deadline_s)
    _count(first, names, report)
    report.most_at_once = first.ledger.most_at_once()
    report.seconds = time.monotonic() - began
    return report


async def outage_storm(
    lab: WorkLab, cluster: Cluster, *, tasks: int, away_s: float, mode: str = "fast", deadline_s: float = 300.0
) -> Report:
    """Run *tasks* commands while the database server is stopped in *mode*, away for *away_s* seconds, and back."""
    began, chance = time.monotonic(), random.Random(4)  # noqa: S311
    names = [f"t{index}" for index in range(tasks)]
    lab.start()
    ids = await _submit(lab, names, chance, seconds=0.3)
    await lab.until(lambda: len(lab.ledger.lines()) > 2)
    await asyncio.to_thread(cluster.stop, mode)
    await asyncio.sleep(away_s)
    await asyncio.to_thread(cluster.start)
    report = Report(tasks)
    await _settle(lab, ids, report, deadline_s)
    _count(lab, names, report)
    report.seconds = time.monotonic() - began
    return report


def failover_url(database: str, *clusters: Cluster) -> str:
    """Return the URL of *database* at whichever of *clusters* takes writes."""
    hosts = "&".join(f"host=127.0.0.1:{cluster.port}" for cluster in clusters)
    return f"postgresql://kd@/{database}?{hosts}&target_session_attrs=read-write&connect_timeout=3"


async def failover_storm(
    lab: WorkLab, cluster: Cluster, standby: Cluster, *, tasks: int, deadline_s: float = 300.0
) -> Report:
    """Run *tasks* commands while *cluster* crashes and *standby* takes over, in the middle of a transaction.

    The transaction submits one more task: it must come to nothing, and may be asked for again by its key.
    """
    began, chance = time.monotonic(), random.Random(7)  # noqa: S311
    names = [f"t{index}" for index in range(tasks)]
    lab.start()
    ids = await _submit(lab, names, chance, seconds=0.3)
    await lab.until(lambda: len(lab.ledger.lines()) > 2)
    begun, over = threading.Event(), threading.Event()

    def stay(_link: sa.Connection, _item: str) -> None:
        begun.set()
        over.wait(deadline_s)

    spec = lab.task(lab.ledger.script("midway"))
    midway = asyncio.ensure_future(lab.client.submit(spec, key="midway", hook=stay))
    await asyncio.to_thread(begun.wait, deadline_s)
    await asyncio.to_thread(cluster.stop, "immediate")
    await asyncio.to_thread(standby.promote)
    over.set()
    report = Report(tasks + 1)
    (refused,) = await asyncio.gather(midway, return_exceptions=True)
    if not isinstance(refused, OperatorMustAct):
        report.failed["midway"] = "its transaction was cut off, and nobody was told"
    again = await lab.client.submit(spec, key="midway")
    await _settle(lab, [*ids, again.id], report, deadline_s)
    _count(lab, [*names, "midway"], report)
    report.seconds = time.monotonic() - began
    return report


async def service_storm(
    lab: WorkLab, *, kills: int, ask: Callable[[str, int], Awaitable[bool]], engine: str = "bubblewrap"
) -> Report:
    """Keep asking a service in a sandbox, through the port it is exposed at, while the worker is killed *kills* times.

    Args:
        lab: The host.
        kills: How often.
        ask: Sends one request to an address; whether it was answered.
        engine: Engine of the service.
    """
    began = time.monotonic()
    lab.start()
    service = ServiceSpec(ready=OnPort(tcp_port=SERVED), startup_timeout_s=120, expose_ports=(SERVED,))
    spec = lab.task(f"exec python3 -m http.server {SERVED}", session="web", service=service)
    placement = Placement(engine=engine, skill_name="x", version_hash="0")
    head = await lab.client.submit(spec.model_copy(update={"placement": placement}))
    port = (await lab.running(head.id)).endpoints[0].host_port
    report, asking = Report(0), asyncio.Event()

    async def keep_asking() -> None:
        while not asking.is_set():
            report.submitted += 1
            if not await ask("127.0.0.1", port):
                report.failed[f"request {report.submitted}"] = "not answered"
            await asyncio.sleep(0.01)

    requests = asyncio.ensure_future(keep_asking())
    for _ in range(kills):
        lab.kill()
        report.kills += 1
        lab.start()
        await _held(lab, head)
    asking.set()
    await requests
    await lab.client.cancel(TaskHead, lab.scope, head.id, "the storm is over")
    over = await lab.client.wait(TaskHead, lab.scope, head.id, 120)
    if over.status != "canceled":
        report.unfinished.append(head.id)
    report.seconds = time.monotonic() - began
    return report


@contextlib.contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Keep as many processes busy inside the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


async def _held(lab: WorkLab, head: TaskHead) -> None:
    """Wait until the new worker holds the service."""
    await lab.started()
    before = head.executor
    end = time.monotonic() + 120
    while True:
        now = await lab.client.head(TaskHead, lab.scope, head.id)
        if now.executor != before or time.monotonic() > end:
            return
        await asyncio.sleep(0.05)


async def _submit(
    lab: WorkLab,
    names: Sequence[str],
    chance: random.Random,
    seconds: float | None = None,
    *,
    longest_s: float = 0.1,
    sessions: bool = False,
) -> list[str]:
    """Submit a command per name; a database that is away is asked again with the same key, so nothing doubles.

    With *sessions*, what stands before the dash of a name is the session it belongs to.
    """
    ids = []
    for name in names:
        script = lab.ledger.script(name, chance.uniform(0.0, longest_s) if seconds is None else seconds)
        spec = lab.task(script, session=name.partition("-")[0] if sessions else None)
        while True:
            with contextlib.suppress(OperatorMustAct):
                head = await lab.client.submit(spec, key=name)
                break
            await asyncio.sleep(0.1)
        ids.append(head.id)
    return ids


async def _progress(lab: WorkLab, chance: random.Random, patience_s: float = 20.0) -> None:
    """Wait until something more was done, or for a while, and then a little: kills should hit every moment."""
    before, end = len(lab.ledger.lines()), time.monotonic() + patience_s
    wanted = chance.randint(0, 12)
    while len(lab.ledger.lines()) < before + wanted and time.monotonic() < end:
        if chance.random() < 0.01:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(chance.uniform(0.0, 0.3))


async def _settle(lab: WorkLab, ids: Sequence[str], report: Report, deadline_s: float) -> None:
    """Wait for every task and note those that did not succeed."""
    end = time.monotonic() + deadline_s
    for item in ids:
        while True:
            with contextlib.suppress(OperatorMustAct):
                head = await lab.client.wait(TaskHead, lab.scope, item, max(0.0, end - time.monotonic()))
                break
            await asyncio.sleep(0.2)
        if not head.terminal:
            report.unfinished.append(item)
        elif head.status != "succeeded":
            report.failed[item] = f"{head.error_code}: {head.error_message}"


def _count(lab: WorkLab, names: Sequence[str], report: Report) -> None:
    begun = lab.ledger.begun()
    report.twice = [name for name in names if begun[name] > 1]
    report.missing = [name for name in names if not begun[name]]


def _order(lab: WorkLab, prefixes: Sequence[str], report: Report) -> None:
    """Note the jobs or sessions whose programs did not begin in the order of their numbers."""
    order = lab.ledger.order()
    for prefix in prefixes:
        mine = [name for name in order if name.startswith(prefix)]
        if mine != sorted(mine, key=lambda name: int(name.rpartition("-")[2])):
            report.disorder.append(prefix.removesuffix("-"))
