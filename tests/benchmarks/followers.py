"""What it costs the service when many people follow one long log: memory, answers to others, and what they are told.

    python tests/benchmarks/followers.py [--followers 200] [--mib 300] [--seconds 20]

A real `kdskills serve` runs on loopback. A task that runs on this host has printed much; it goes on, ten times a second,
while followers read its end as events and one more caller asks for `/healthz` and the task's status in turn. It fails when a
follower misses a byte, the service grows by more than it may, or answers the caller too late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

from service import Service

from kdskills.execution.streams import LogWriter
from kdskills.jobs.attempts import AttemptOrder
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec
from kdskills.jobs.queue import hold_slot

GROWTH_MIB = 32.0
"""Most the service may grow by in the last two thirds of the time, however much is told."""
ANSWER_MS = 1000.0
"""Most milliseconds that 95 of 100 answers to others may take meanwhile."""
LIMIT = 64 * 1024 * 1024
LINE = b"%09d " + b"x" * 1014 + b"\n"


async def running_task(state: Path) -> tuple[str, Path]:
    """Return a task that runs on the service's host, and the file its output goes to."""
    client = JobsClient(f"sqlite:///{state / 'work.db'}", state)
    placement = Placement(engine="bubblewrap", skill_name="public.x", version_hash="0")
    spec = TaskSpec(
        scope=Scope(), session_id=None, command=Command(argv=("/bin/true",), timeout_s=60), placement=placement
    )
    head, work = await client.submit(spec), await client.work()
    order = AttemptOrder(task_id=head.id, attempt=1, spec=spec, log_limit=LIMIT)
    folder = state / "runs" / head.id / "1"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "order.json").write_text(json.dumps(order.to_json()))
    (folder / "exit.json").write_text("{}")  # begun; the row says that it runs
    host = work.host
    await client.aclose()
    with sqlite3.connect(state / "work.db") as link:
        link.execute("UPDATE kd_tasks SET status = 'running', attempt = 1, host = ?, executor = 'x'", (host,))
    link.close()
    return head.id, folder / "stdout.log"


def length_of(log: Path) -> int:
    """Return how many bytes a log has."""
    return log.stat().st_size


async def follower(service: Service, task: str, offset: int, bytes_of: list[int], number: int) -> None:
    """Follow the log from *offset* as events, and note where the last piece ended."""
    reader, writer = await asyncio.open_connection(service.host, service.port, limit=1 << 22)
    path = f"/projects/local/tasks/{task}/logs?offset={offset}&encoding=base64"
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Accept: text/event-stream"]
    lines += [f"{name}: {value}" for name, value in service.headers.items()]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"id: "):
                bytes_of[number] = int(line[4:])
    finally:
        writer.close()


async def measure(
    service: Service, task: str, log: Path, followers: int, seconds: float
) -> tuple[int, int, list[float], float]:
    """Return the log's length, followers that are not there at the end, answers to others in ms, and growth in MiB."""
    begin = length_of(log)
    ends = [begin] * followers
    tasks = [asyncio.ensure_future(follower(service, task, begin, ends, number)) for number in range(followers)]
    before, took = service.resident_mib(), list[float]()
    writer, count = LogWriter(log, LIMIT), 0
    stop, warm = time.monotonic() + seconds, time.monotonic() + seconds / 3

    async def ask() -> None:
        link = service.connect()
        while time.monotonic() < stop:
            for path in ("tasks?limit=1", f"tasks/{task}?tail_bytes=0"):
                began = time.perf_counter()
                code, _ = await asyncio.to_thread(service.ask, link, "GET", path, None, {})
                took.append((time.perf_counter() - began) * 1000)
                assert code in {200, 404}, code
            await asyncio.sleep(0.1)

    asking = asyncio.ensure_future(ask())
    while time.monotonic() < stop:
        writer.write(b"".join(LINE % (count + line) for line in range(10)))
        count += 10
        before = (
            before if time.monotonic() > warm else service.resident_mib()
        )  # the first pieces bring buffers of their own
        await asyncio.sleep(0.1)
    await asking
    total = length_of(log)
    for _ in range(150):
        if min(ends) >= total:
            break
        await asyncio.sleep(0.2)
    growth = service.resident_mib() - before
    late = sum(end < total for end in ends)
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return total - begin, late, took, growth


def main() -> int:
    """Measure, print, and return 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--followers", type=int, default=200)
    parser.add_argument("--mib", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kdskills-followers-") as folder:
        service = Service(Path(folder))
        try:
            with hold_slot(service.state, 0):  # no worker looks for the program, which there is none of
                task, log = asyncio.run(running_task(service.state))
                writer = LogWriter(log, LIMIT)
                for _ in range(options.mib):
                    writer.write(os.urandom(1024 * 1024))
                used = service.processor_ms()
                run = measure(service, task, log, options.followers, options.seconds)
                told, late, took, growth = asyncio.run(run)
                used = (service.processor_ms() - used) / 1000
        finally:
            service.stop()
    p95 = sorted(took)[int(len(took) * 0.95)]
    print(f"{options.followers} followers, a log of {options.mib} MiB that grew by {told / 1024:.0f} KiB")
    print(f"followers that miss bytes   {late}")
    print(f"memory grew by              {growth:.1f} MiB (bound {GROWTH_MIB:g})")
    print(
        f"answers to others           {len(took)}, p50 {statistics.median(took):.0f} ms, p95 {p95:.0f} ms (bound {ANSWER_MS:g})"
    )
    print(f"processor time              {used:.1f} s")
    return int(bool(late) or growth > GROWTH_MIB or p95 > ANSWER_MS)


if __name__ == "__main__":
    sys.exit(main())
