"""Measure every page of the console among many skills and tasks, and what many followers of one log cost.

    python tests/benchmarks/console.py [--skills 2351] [--tasks 5000] [--rounds 10] [--followers 200] [--json]

The console is asked as an application, so that a figure is what the page costs and not what a network does. It exits 1 when
a page takes more processor time or more bytes than it may, or when followers make the process grow. On a machine that does
other things, too, elapsed times are larger than the processor's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from kdskills.app import Host, Settings
from kdskills.app.crowd import write_crowd
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Context
from kdskills.doors.ui.console import Console
from kdskills.jobs.attempts import AttemptOrder
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec
from kdskills.testing.work import keep_finished

BOUND_MS = 300.0
"""Most milliseconds of processor time for a page, once its parts were found."""
FIRST_MS = 60.0
"""The same for the page of skills, which people wait for at each letter they type."""
BOUND_BYTES = 100 * 1024
GROWTH_MIB = 32.0
PAGES = {
    "skills": "/ui/skills",
    "skills, words": "/ui/skills?q=report+monthly",
    "skills, by meaning": "/ui/skills?q=write+the+report&by=meaning",
    "skills, last page": "/ui/skills?sort=tokens&offset=2300",
    "home": "/ui/",
    "skill": "/ui/skills/{skill}",
    "skill, files": "/ui/skills/{skill}?tab=files",
    "skill, findings": "/ui/skills/{skill}?tab=findings",
    "skill, facts": "/ui/skills/{skill}?tab=facts",
    "file": "/ui/skills/{skill}/files/SKILL.md",
    "why": "/ui/skills/{skill}/why?consumer=team.agent-0",
    "prompt": "/ui/prompt?consumer=team.agent-0",
    "try": "/ui/try",
    "turns": "/ui/turns",
    "tasks": "/ui/work",
    "tasks, by state": "/ui/work?status=succeeded",
    "tasks, by skill": "/ui/work?skill={skill}",
    "jobs": "/ui/work/jobs",
    "hosts": "/ui/work/hosts",
    "task": "/ui/work/tasks/{task}",
    "log": "/ui/work/tasks/{task}/log/stdout?offset=0",
    "projects": "/ui/projects",
    "evals": "/ui/evals",
}
LONG = {"prompt": 450 * 1024}
"""Pages that may be longer: that of a prompt shows what is sent."""


async def running_task(client: JobsClient, state: Path) -> str:
    """Keep a task that runs on this host and has printed much, and return its id."""
    placement = Placement(engine="bubblewrap", skill_name="public.x", version_hash="0")
    spec = TaskSpec(
        scope=Scope(), session_id=None, command=Command(argv=("/bin/true",), timeout_s=60), placement=placement
    )
    head, work = await client.submit(spec), await client.work()
    order = AttemptOrder(task_id=head.id, attempt=1, spec=spec, log_limit=1 << 40)
    folder = state / "runs" / head.id / "1"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "order.json").write_text(json.dumps(order.to_json()))
    (folder / "exit.json").write_text("{}")
    (folder / "stdout.log").write_bytes(b"\x1b[32mok\x1b[0m a line of a log that somebody reads\n" * 50_000)
    tasks = work.tables.tasks
    values = {"status": "running", "attempt": 1, "host": work.host, "executor": "x"}
    await work.database.write(lambda link: link.execute(tasks.update().where(tasks.c.id == head.id).values(values)))
    return head.id


async def measured(client: httpx.AsyncClient, names: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """Return what each page costs, in milliseconds and bytes."""
    rows = []
    for name, path in PAGES.items():
        address = path.format(**names)
        first = await client.get(address)
        if first.status_code != 200:
            raise AssertionError(f"{address}: {first.status_code}")
        walls, busy = [], []
        for _ in range(rounds):
            began, used = time.perf_counter(), time.process_time()
            await client.get(address)
            walls.append(1000 * (time.perf_counter() - began))
            busy.append(1000 * (time.process_time() - used))
        rows.append(
            {
                "page": name,
                "median_ms": statistics.median(walls),
                "cpu_ms": statistics.median(busy),
                "most_cpu_ms": max(busy),
                "bytes": len(first.content),
            }
        )
    return rows


async def followed(client: httpx.AsyncClient, task: str, followers: int, rounds: int) -> dict[str, float]:
    """Return what so many followers of one log cost, who have it nearly to its end, and how others fare meanwhile."""
    page = (await client.get(f"/ui/work/tasks/{task}")).text
    end = int(page.partition("stdout?offset=")[2].rpartition("stdout?offset=")[2].partition('"')[0])
    offsets, took, grown = [end - 10_000] * followers, list[float](), 0

    async def ask(number: int) -> None:
        answer = await client.get(f"/ui/work/tasks/{task}/log/stdout?offset={offsets[number]}")
        offsets[number] = int(answer.text.rpartition("offset=")[2].partition('"')[0])

    used = time.process_time()
    for number in range(rounds):
        if number == rounds // 3:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        asking = [asyncio.ensure_future(ask(each)) for each in range(followers)]
        began = time.perf_counter()
        await client.get("/ui/try")
        took.append(1000 * (time.perf_counter() - began))
        await asyncio.gather(*asking)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) / 1024
    each_ms = 1000 * (time.process_time() - used) / (followers * rounds)
    return {"followers": followers, "growth_mib": growth, "cpu_ms_each": each_ms, "others_ms": statistics.median(took)}


async def run(folder: Path, words: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Build what is measured, and measure it."""
    bundle = folder / "bundle"
    namespaces = write_crowd(bundle / "skills", words.skills)
    rules = {f"team.agent-{n}": {"enabled": [f"{each}.*" for each in namespaces[n % 2 :: 2]]} for n in range(5)}
    (bundle / "skills_descriptor.json").write_text(json.dumps({"agents_config": rules}), encoding="utf-8")
    settings = Settings(bundle=bundle, state_dir=folder / "state", index_dir=folder / "index", requests_per_minute=0)
    host = Host(settings, entry_points=False)
    jobs = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    host.work.__dict__["client"] = jobs  # its workers are nobody: nothing of this runs
    task = await running_task(jobs, settings.state_dir)
    await keep_finished((await jobs.work()).database, task, words.tasks)
    identity: Identity = replace(LOCAL, door="console")
    matrix = await host.invoke("skills.matrix", {"limit": 1}, Context(identity=identity))
    console = Console(host, _nobody, frozenset(), owner=identity, folder=bundle, trust=True)
    transport = httpx.ASGITransport(console)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
        await client.get(f"/ui/enter/{console.key}")
        rows = await measured(client, {"skill": matrix.skills[0].full_id, "task": task}, words.rounds)
        follows = await followed(client, task, words.followers, words.rounds)
    await host.work.aclose()
    await host.storage.aclose()
    return rows, follows


async def _nobody(header: str | None) -> Identity:
    raise AssertionError("nobody signs in here")


def missed(rows: list[dict[str, Any]], follows: dict[str, float]) -> list[str]:
    """Return what is over its bound."""
    over = [
        f"{row['page']}: {row['cpu_ms']:.0f} ms"
        for row in rows
        if row["cpu_ms"] > (FIRST_MS if row["page"] == "skills" else BOUND_MS)
    ]
    over += [
        f"{row['page']}: {row['bytes']} bytes" for row in rows if row["bytes"] > LONG.get(row["page"], BOUND_BYTES)
    ]
    return over + (["followers: memory grows"] if follows["growth_mib"] > GROWTH_MIB else [])


def main() -> int:
    """Measure, print, and return 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--skills", type=int, default=2351)
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--followers", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kdskills-console-") as name:
        rows, follows = asyncio.run(run(Path(name), words))
    if words.json:
        print(json.dumps({"pages": rows, "followers": follows}))
    else:
        print("| page | median ms | processor ms | most processor ms | bytes |\n|---|---|---|---|---|")
        for row in rows:
            figures = f"{row['median_ms']:.1f} | {row['cpu_ms']:.1f} | {row['most_cpu_ms']:.1f} | {row['bytes']:,}"
            print(f"| {row['page']} | {figures} |")
        print(
            f"\n{words.followers} followers of one log: memory grew by {follows['growth_mib']:.1f} MiB (bound {GROWTH_MIB:g}), "
            f"{follows['cpu_ms_each']:.1f} ms of processor each time they ask, others answered in {follows['others_ms']:.0f} ms"
        )
    over = missed(rows, follows)
    print("\n".join(over), file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
