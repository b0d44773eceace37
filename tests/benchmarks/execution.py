"""How much a wall costs: each engine against a bare `subprocess.run`, as ratios of medians (spec execution §7).

Run as `python tests/benchmarks/execution.py [rounds]`. Rounds alternate over all rows, so that a busy machine slows every row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.docker import DockerExecutor
from kdskills.execution import ExecRequest, ExecutionOptions, Executor

BOUNDS = {
    "bubblewrap strict": 2.0,
    "bubblewrap strict + cgroup": None,
    "bubblewrap, generated code": None,
    "docker": 30.0,
}
PYTHON = ("python3", "-c", "pass")


def engines() -> dict[str, tuple[Executor, ExecRequest]]:
    """Return what to measure, by row."""
    options = ExecutionOptions(best_effort=frozenset({"memory", "pids"}))
    counted, strict = BubblewrapExecutor(options), BubblewrapExecutor(options)
    ground, _ = strict._prepared()
    strict._ground = dataclasses.replace(ground, cgroups=None)
    return {
        "bubblewrap strict": (strict, ExecRequest(argv=PYTHON)),
        "bubblewrap strict + cgroup": (counted, ExecRequest(argv=PYTHON)),
        "bubblewrap, generated code": (counted, ExecRequest(code="pass")),
        "docker": (DockerExecutor(options), ExecRequest(argv=PYTHON)),
    }


async def clock(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds *work* takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def bare() -> None:
    """Run Python without any wall, as the floor."""
    subprocess.run([sys.executable, "-c", "pass"], check=True)  # noqa: ASYNC221 - the thing measured


async def measure(rounds: int) -> dict[str, float]:
    """Return the median of every row in seconds; engines that do not work here are left out."""
    rows = {name: row for name, row in engines().items() if (await row[0].probe()).ok}
    taken: dict[str, list[float]] = {name: [] for name in ("bare", *rows)}
    for turn in range(rounds):
        taken["bare"].append(await clock(bare))
        for name, (engine, request) in rows.items():
            if name != "docker" or turn % 5 == 0:
                taken[name].append(await clock(lambda engine=engine, request=request: engine.run(request)))
    return {name: statistics.median(values) for name, values in taken.items()}


def main(argv: list[str]) -> int:
    """Print the table; 1 when a bound is not held."""
    medians = asyncio.run(measure(int(argv[0]) if argv else 40))
    floor = medians.pop("bare")
    print(f"{'bare subprocess.run':30} {floor * 1000:8.1f} ms")
    held = True
    for name, median in medians.items():
        ratio, bound = median / floor, BOUNDS[name]
        verdict = "" if bound is None else f"<= {bound:g}  {'held' if ratio <= bound else 'NOT HELD'}"
        held = held and (bound is None or ratio <= bound)
        print(f"{name:30} {median * 1000:8.1f} ms  {ratio:6.2f}x  {verdict}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
