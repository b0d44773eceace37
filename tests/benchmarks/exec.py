"""How much a wall costs: each engine against a bare `subprocess.run`, as ratios of medians.

Run as `kdskills bench exec [rounds]`. Rounds alternate over all rows, so that a busy machine slows every row, and nothing
is made ahead of time while another row is on the clock. What ran is told per row; engines that do not work here are
named and left out. Rows `+ packages` have an environment in place, and may take `PACKAGES_S` more than the row without.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.docker import DockerExecutor
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.execution import EnvironmentMount, ExecRequest, ExecutionOptions, Executor
from kdskills.testing.conformance.packages import small_environment

PYTHON = ("python3", "-c", "pass")
POOL = 2
SETTLE_S = 10.0
PACKAGES_S = 0.010
WITH = " + packages"


@dataclass(frozen=True, slots=True)
class Row:
    """What to measure: an engine, a request, the bound on its ratio, and in which share of rounds."""

    engine: Executor
    request: ExecRequest
    bound: float | None = None
    every: int = 1


def rows(mount: EnvironmentMount) -> dict[str, Row]:
    """Return what to measure, by name; rows `+ packages` have *mount* in place."""
    options = ExecutionOptions(best_effort=frozenset({"memory", "pids"}), allow_unisolated=True)
    counted, strict = BubblewrapExecutor(options), BubblewrapExecutor(options)
    pooled, pooled_too = (BubblewrapExecutor(dataclasses.replace(options, pool=POOL)) for _ in range(2))
    setup = strict.prepared()
    strict._setup = dataclasses.replace(setup, cgroups=None)
    plain = ExecRequest(argv=PYTHON)
    unsafe = ExecRequest(argv=(sys.executable, "-c", "pass"), profile="unsafe-local")
    packed, packed_code = ExecRequest(argv=PYTHON, environment=mount), ExecRequest(code="pass", environment=mount)
    return {
        "bubblewrap strict": Row(strict, plain, 2.0),
        f"bubblewrap strict{WITH}": Row(strict, packed),
        "bubblewrap strict + cgroup": Row(counted, plain),
        "bubblewrap, generated code": Row(counted, ExecRequest(code="pass")),
        "pool, generated code": Row(pooled, ExecRequest(code="pass"), 1.0),
        f"pool, generated code{WITH}": Row(pooled_too, packed_code),
        "pool, a program": Row(pooled, plain),
        "docker": Row(DockerExecutor(options), plain, 30.0, every=5),
        "subprocess engine": Row(SubprocessExecutor(options), unsafe),
    }


async def clock(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds *work* takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def bare() -> None:
    """Run Python without any wall, as the floor; without our variables, which may make its start slower."""
    subprocess.run([sys.executable, "-c", "pass"], check=True, env={"PATH": os.defpath})  # noqa: ASYNC221 - measured


async def settle(engine: Executor) -> None:
    """Wait until a pool is full again: nobody is on the clock meanwhile."""
    end = time.monotonic() + SETTLE_S
    while isinstance(engine, BubblewrapExecutor) and engine.lacking() and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def measure(rounds: int, mount: EnvironmentMount) -> tuple[dict[str, float], dict[str, Row], dict[str, str]]:
    """Return the median of every row in seconds, the rows, and what does not work here with its cure."""
    every, absent = rows(mount), {}
    for name, row in list(every.items()):
        report = await row.engine.probe() if name != "subprocess engine" else None
        if report is not None and not report.ok:
            absent[name] = report.cure or "its probe failed"
            del every[name]
    taken: dict[str, list[float]] = {name: [] for name in ("bare", *every)}
    for turn in range(-1, rounds):
        samples = [("bare", await clock(bare))]
        for name, row in every.items():
            if turn % row.every == 0 or turn < 0:
                samples.append((name, await clock(lambda row=row: row.engine.run(row.request))))
                await settle(row.engine)
        for name, seconds in samples if turn >= 0 else ():  # the first round only warms up
            taken[name].append(seconds)
    for row in every.values():
        if isinstance(row.engine, BubblewrapExecutor):
            row.engine.close()
    return {name: statistics.median(values) for name, values in taken.items()}, every, absent


def main(argv: list[str]) -> int:
    """Print the table; 1 when a bound is not held."""
    with small_environment() as mount:
        medians, measured, absent = asyncio.run(measure(int(argv[0]) if argv else 40, mount))
    floor = medians.pop("bare")
    print(f"as uid {os.geteuid()}; medians; bound and verdict as ratio to the bare run")
    print(f"{'bare subprocess.run':38} {floor * 1000:8.1f} ms")
    held = True
    for name, median in medians.items():
        ratio, bound = median / floor, measured[name].bound
        verdict = "" if bound is None else f"<= {bound:g}  {'held' if ratio <= bound else 'NOT HELD'}"
        held = held and (bound is None or ratio <= bound)
        if name.endswith(WITH):
            more = median - medians[name.removesuffix(WITH)]
            held = held and more <= PACKAGES_S
            verdict = f"{more * 1000:+.1f} ms, <= {PACKAGES_S * 1000:g}  {'held' if more <= PACKAGES_S else 'NOT HELD'}"
        print(f"{name:38} {median * 1000:8.1f} ms  {ratio:6.2f}x  {verdict}".rstrip())
    for name, cure in absent.items():
        print(f"{name:38} not here: {cure}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
