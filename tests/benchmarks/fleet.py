"""What a fleet promises, measured. Run as `kdskills bench fleet [--hosts 10] [--seconds 600] [--rate 5] [--seed 6]`.

Hosts are worker processes with a state folder and a path to one PostgreSQL of their own. While tasks are submitted, workers
are killed, hosts lose their power, paths are cut and a disk is filled; then every task is looked for. Before that, the
whole fleet waits, and the server counts what it is asked meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from kdskills.testing.work import FleetHostLab, FleetReport, fleet, fleet_storm, private_cluster
from kdskills.testing.work.postgres import StatementCount

IDLE_S = 20.0


async def idle(members: list[FleetHostLab], url: str) -> float:
    """Return how many statements a second a fleet without work asks."""
    for member in members:
        member.lab.start()
    for member in members:
        await member.lab.until(lambda lab=member.lab: "takes work" in lab.said())
    await asyncio.sleep(5.0)
    count = StatementCount(url)
    before = count()
    await asyncio.sleep(IDLE_S)
    rate = (count() - before) / IDLE_S
    for member in members:
        await asyncio.to_thread(member.lab.kill)
    return rate


def rows(report: FleetReport) -> list[tuple[str, str, str, bool]]:
    """Return promise, measurement, bound and whether it holds."""
    lost = len(report.unfinished) + len(report.missing) + len(report.failed)
    deeds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.deeds.items()))
    balance = report.begun - report.again
    return [
        ("tasks", f"{report.submitted} in {report.seconds:.0f} s", "", report.submitted > 0),
        ("harm", deeds, "every kind", len(report.deeds) >= 4),
        ("lost", str(lost), "0", lost == 0),
        ("begun more often than they allow", str(len(report.doubled)), "0", not report.doubled),
        ("ended as lost, as they must", str(report.told_lost), "", True),
        ("begun again, as they allow", str(report.again), "", True),
        (
            "programs of the ledger",
            f"{balance} of {report.submitted}",
            "each",
            balance >= report.submitted - report.told_lost,
        ),
        ("logs that a door could not read", str(len(report.unread)), "0", not report.unread),
    ]


async def main() -> int:
    """Measure, print the table, and return 1 when a promise is not held."""
    words = argparse.ArgumentParser(prog="kdskills bench fleet")
    words.add_argument("--hosts", type=int, default=10)
    words.add_argument("--seconds", type=float, default=600.0)
    words.add_argument("--rate", type=float, default=5.0)
    words.add_argument("--seed", type=int, default=6)
    given = words.parse_args()
    with private_cluster() as cluster:
        url = cluster.counting().create("fleet")
        async with fleet(url, given.hosts) as (door, members):
            rate = await idle(members, url)
            table = [(f"an idle fleet of {given.hosts}, statements", f"{rate:.1f}/s", "50/s", rate <= 50)]
            report = await fleet_storm(door, members, seconds=given.seconds, rate=given.rate, seed=given.seed)
            table += rows(report)
    for promise, measured, bound, holds in table:
        print(f"{promise:<36} {measured:>56}   {bound:>10}   {'held' if holds else 'BROKEN'}")
    if not report.clean:
        print(report)
    return 0 if all(row[-1] for row in table) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
