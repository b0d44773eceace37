"""What background work promises, measured. Run as `kdskills bench jobs [--chaos] [--postgres]`.

Prints one row per promise: what was measured, the bound, and whether it holds. Programs run on the bare engine, so that the
table tells of the machinery and not of a wall. `--chaos` adds the storms in full, which take many minutes; `--postgres`
measures on a private PostgreSQL server instead of SQLite.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from kdskills.jobs.model import JobHead, TaskHead
from kdskills.jobs.settings import JobsSettings
from kdskills.testing.work import (
    Report,
    WorkLab,
    failover_storm,
    failover_url,
    job_storm,
    keep_finished,
    kill_storm,
    outage_storm,
    private_cluster,
    service_storm,
    two_host_storm,
)
from kdskills.testing.work.postgres import Cluster, StatementCount

MS = 1000.0


@dataclass(frozen=True, slots=True)
class Row:
    """One promise, and what was measured."""

    promise: str
    measured: str
    bound: str
    holds: bool


def p50(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def p95(values: list[float]) -> float:
    """Return the value that 95 of 100 do not exceed."""
    return sorted(values)[min(len(values) - 1, round(0.95 * len(values)))]


@contextlib.asynccontextmanager
async def host(url: str | None, *names: str, **jobs: object) -> AsyncIterator[list[WorkLab]]:
    """Give hosts in a folder of their own, and end everything of them."""
    with tempfile.TemporaryDirectory(prefix="kdskills-bench-") as top:
        given = {"beat_s": JobsSettings().beat_s} | jobs  # a laboratory's workers beat faster than they do by default
        labs = [WorkLab(Path(top), url, host=name, **given) for name in names or ("a",)]
        try:
            yield labs
        finally:
            for lab in labs:
                await lab.aclose()


async def clock(work: Callable[[], Awaitable[object]], rounds: int) -> list[float]:
    """Return how long each of *rounds* takes, in milliseconds."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        took.append((time.perf_counter() - began) * MS)
    return took


async def calls(url: str | None) -> list[Row]:
    """Measure submitting and status, without a worker in the way."""
    async with host(url) as (lab,):
        head = await lab.client.submit(lab.task("true"))
        submit = p50(await clock(lambda: lab.client.submit(lab.task("true")), 100))
        status = p50(await clock(lambda: lab.client.head(TaskHead, lab.scope, head.id), 100))
    return [
        Row("submit, p50", f"{submit:.1f} ms", "5 ms", submit <= 5),
        Row("status, p50", f"{status:.1f} ms", "5 ms", status <= 5),
    ]


async def calls_beside_many(url: str | None, *, rows: int = 100_000, rounds: int = 200) -> list[Row]:
    """Measure submitting and status in a database that keeps many finished tasks, without a worker in the way."""
    async with host(url) as (lab,):
        head = await lab.client.submit(lab.task("true"))
        await keep_finished((await lab.client.work()).database, head.id, rows)
        began = time.perf_counter()
        submit = p50(await clock(lambda: lab.client.submit(lab.task("true")), rounds))
        rate = rounds / (time.perf_counter() - began)
        used = time.process_time()
        await clock(lambda: lab.client.head(TaskHead, lab.scope, head.id), rounds)
        status = (time.process_time() - used) * MS / rounds
        lists = {
            "newest": {},
            "by state": {"status": ("succeeded",)},
            "by skill": {"skill_name": "x"},
            "of every agent": {"any_agent": True},
        }
        times = {
            name: p50(await clock(lambda words=words: lab.client.heads(TaskHead, lab.scope, limit=50, **words), 20))
            for name, words in lists.items()
        }
    slowest = max(times, key=lambda name: times[name])
    return [
        Row(f"submit, p50, {rows:,} finished", f"{submit:.1f} ms", "10 ms", submit <= 10),
        Row(f"submits, {rows:,} finished", f"{rate:.0f}/s", "100/s", rate >= 100),
        Row(f"status, processor, {rows:,} finished", f"{status:.2f} ms", "1.5 ms", status <= 1.5),
        Row(f"50 of a list, {slowest}, {rows:,} finished", f"{times[slowest]:.1f} ms", "60 ms", times[slowest] <= 60),
    ]


async def speed(url: str | None) -> list[Row]:
    """Measure starts, throughput, short jobs and cancels on one worker."""
    async with host(url) as (lab,):
        lab.start()
        first = await lab.client.submit(lab.task("true"))
        await lab.client.wait(TaskHead, lab.scope, first.id, 120)
        starts = []
        for _ in range(40):
            head = await lab.client.submit(lab.task("sleep 0.2"))
            over = await lab.client.wait(TaskHead, lab.scope, head.id, 60)
            assert over.started_at is not None
            starts.append((over.started_at - over.created_at).total_seconds() * MS)
        began = time.perf_counter()
        heads = [await lab.client.submit(lab.task("true")) for _ in range(200)]
        for head in heads:
            await lab.client.wait(TaskHead, lab.scope, head.id, 120)
        rate = len(heads) / (time.perf_counter() - began)
        jobs = []
        for number in range(5):
            job = await lab.client.submit(lab.job(["true"] * 3, session=f"j{number}"))
            done = await lab.client.wait(JobHead, lab.scope, job.id, 60)
            assert done.finished_at is not None
            jobs.append((done.finished_at - done.created_at).total_seconds())
        cancels = [await cancel(lab) for _ in range(20)]
    return [
        Row("enqueue to running, p50", f"{p50(starts):.0f} ms", "60 ms", p50(starts) <= 60),
        Row("enqueue to running, p95", f"{p95(starts):.0f} ms", "150 ms", p95(starts) <= 150),
        Row("short commands per worker", f"{rate:.0f}/s", "25/s", rate >= 25),
        Row("three no-op steps", f"{p50(jobs):.2f} s", "0.6 s", p50(jobs) < 0.6),
        Row("cancel, p50", f"{p50(cancels):.0f} ms", "300 ms", p50(cancels) <= 300),
    ]


async def waiting(url: str | None, *, seconds: float = 20.0) -> list[Row]:
    """Measure what a worker without work costs."""
    async with host(url) as (lab,):
        worker = lab.start()
        head = await lab.client.submit(lab.task("true"))
        await lab.client.wait(TaskHead, lab.scope, head.id, 120)
        await asyncio.sleep(5.0)
        count = None if url is None else StatementCount(url)
        asked, used = 0 if count is None else count(), processor(worker.pid)
        await asyncio.sleep(seconds)
        share = 100 * (processor(worker.pid) - used) / seconds
        rows = [Row("an idle worker, of a core", f"{share:.2f} %", "1 %", share <= 1)]
        if count is not None:
            rate = (count() - asked) / seconds
            rows.append(Row("an idle worker, statements", f"{rate:.1f}/s", "5/s", rate <= 5))
    return rows


async def four_workers(url: str | None, *, tasks: int = 300) -> list[Row]:
    """Measure short tasks in twenty sessions on four workers of one host."""
    async with host(url, slots=4) as (lab,):
        for slot in range(4):
            lab.start(slot)
        for _ in range(16):
            head = await lab.client.submit(lab.task("true"))
            await lab.client.wait(TaskHead, lab.scope, head.id, 120)
        count = None if url is None else StatementCount(url)
        asked, began = 0 if count is None else count(), time.perf_counter()
        heads = [await lab.client.submit(lab.task("true", session=f"s{n % 20}")) for n in range(tasks)]
        submitted = time.perf_counter() - began
        last = await asyncio.gather(*(lab.client.wait(TaskHead, lab.scope, head.id, 300) for head in heads[-20:]))
        assert all(head.terminal for head in last)
        rate = tasks / (time.perf_counter() - began)
        rows = [
            Row("submits", f"{tasks / submitted:.0f}/s", "100/s", tasks / submitted >= 100),
            Row("short tasks, four workers", f"{rate:.0f}/s", "50/s", rate >= 50),
        ]
        if count is not None:
            each = (count() - asked) / tasks
            rows.append(Row("statements a task, waiting included", f"{each:.1f}", "25", each <= 25))
    return rows


def processor(pid: int) -> float:
    """Return the processor time a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def cancel(lab: WorkLab) -> float:
    """Return how long the end of a running program takes from another process, in milliseconds."""
    head = await lab.client.submit(lab.task("sleep 600"))
    await lab.running(head.id)
    began = time.perf_counter()
    await lab.client.cancel(TaskHead, lab.scope, head.id)
    await lab.client.wait(TaskHead, lab.scope, head.id, 60)
    return (time.perf_counter() - began) * MS


async def flood(url: str | None) -> list[Row]:
    """Measure what 300 MB of output cost the worker's memory."""
    async with host(url) as (lab,):
        worker = lab.start()
        warm = await lab.client.submit(lab.task("true"))
        await lab.client.wait(TaskHead, lab.scope, warm.id, 120)
        before = resident(worker.pid)
        head = await lab.client.submit(lab.task("head -c 300000000 /dev/zero"))
        over = await lab.client.wait(TaskHead, lab.scope, head.id, 300)
        grown = resident(worker.pid) - before
        said = f"{grown / 2**20:.0f} MiB for {(over.stdout_total or 0) / 1e6:.0f} MB"
    return [Row("300 MB of output, the worker's growth", said, "50 MiB", grown < 50 * 2**20)]


def resident(pid: int) -> int:
    """Return the memory a process has, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def ask(address: str, port: int) -> bool:
    """Whether a web server answers with 200."""
    try:
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
    except OSError:
        return False
    return b" 200 " in line


def told(promise: str, report: Report, *, most: int | None = None) -> Row:
    """Return the row of a storm."""
    lost = len(report.unfinished) + len(report.missing) + len(report.failed)
    words = f"{lost} lost, {len(report.twice)} twice, {len(report.disorder)} out of order, {report.seconds:.0f} s"
    if most is not None:
        words += f", {report.most_at_once} at once"
    exact = most is None or report.most_at_once <= most
    return Row(promise, words, "0, 0, 0" + ("" if most is None else f", {most}"), report.clean and exact)


async def storms(url: str | None) -> AsyncIterator[Row]:
    """Run the storms that need one database of any kind, in full."""
    async with host(url) as (lab,):
        yield told("300 tasks, 20 kill -9", await kill_storm(lab, tasks=300, kills=20, deadline_s=900))
    async with host(url) as (lab,):
        yield told("20 jobs of 4 steps, 8 kill -9", await job_storm(lab, jobs=20, steps=4, kills=8, deadline_s=900))
    async with host(url) as (lab,):
        report = await service_storm(lab, kills=3, ask=ask)
        yield told(f"a service asked {report.submitted} times, 3 kill -9", report)


async def shared_storms(cluster: Cluster) -> AsyncIterator[Row]:
    """Run the storms that need PostgreSQL, in full."""
    async with host(cluster.create("storm_two"), "a", "b", global_concurrency=4) as labs:
        report = await two_host_storm(labs, tasks=400, kills=25, deadline_s=1800)
        yield told("two hosts, 400 tasks, 25 kill -9", report, most=4)
    for mode, away_s, words in (
        ("fast", 0.0, "fast restart"),
        ("immediate", 0.0, "crash"),
        ("fast", 8.0, "8 s outage"),
    ):
        async with host(cluster.create(f"storm_{mode}_{away_s:.0f}")) as (lab,):
            report = await outage_storm(lab, cluster, tasks=60, away_s=away_s, mode=mode, deadline_s=600)
            yield told(f"PostgreSQL {words}, 60 tasks", report)
    with private_cluster() as first:
        first.create("storm_failover")
        with first.standby() as standby:
            async with host(failover_url("storm_failover", first, standby)) as (lab,):
                report = await failover_storm(lab, first, standby, tasks=60, deadline_s=600)
                yield told("PostgreSQL failover, 61 tasks", report)


async def main(words: list[str]) -> int:
    """Measure, print the table, and return 1 when a promise is not held."""
    rows: list[Row] = []

    def say(row: Row) -> None:
        rows.append(row)
        print(
            f"{row.promise:<42} {row.measured:>34}   {row.bound:>12}   {'held' if row.holds else 'BROKEN'}", flush=True
        )

    with contextlib.ExitStack() as stack:
        wanted = "--postgres" in words or "--chaos" in words
        cluster = stack.enter_context(private_cluster()) if wanted else None
        shared = cluster.counting().create("bench") if cluster is not None and "--postgres" in words else None
        for measure in (waiting, calls, calls_beside_many, speed, four_workers, flood):
            for row in await measure(shared):
                say(row)
        if cluster is not None and "--chaos" in words:
            for name, url in (("SQLite", None), ("PostgreSQL", cluster.create("storm_one"))):
                async for row in storms(url):
                    say(Row(f"{name}: {row.promise}", row.measured, row.bound, row.holds))
            async for row in shared_storms(cluster):
                say(row)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1:])))
