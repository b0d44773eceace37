"""Measure the table of skills and consumers that pages are made of.

    python tests/benchmarks/matrix.py [--count 2351] [--consumers 5] [--rounds 40] [--json]

A generated bundle, a Host, and the answer as JSON text: what a page has before its first byte. Warm means that the skills were
found before; what a look at the roots costs, once a second, is in the slowest rounds. It exits 1 when a median is over its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kdskills.app import Host, Settings
from kdskills.app.crowd import write_crowd
from kdskills.app.wire import json_text

BOUND_MS = 40.0
"""Most milliseconds of processor time for a page of 50 skills."""
PAGES = {
    "first page": {},
    "words": {"filter": "report monthly"},
    "refused, by tokens": {"state": "refused", "sort": "tokens"},
    "last page, by name": {"sort": "name", "offset": 2300},
    "ranked search": {"query": "write the report of the month"},
}


async def measured(host: Host, rounds: int) -> list[dict[str, float | str]]:
    """Return the cost of each kind of page, in milliseconds."""
    rows: list[dict[str, float | str]] = []
    for name, arguments in PAGES.items():
        await host.call("skills.matrix", **arguments)
        walls, processor, size = [], [], 0
        for _ in range(rounds):
            began, busy = time.perf_counter(), time.process_time()
            size = len(json_text(await host.call("skills.matrix", **arguments)))
            walls.append(1000 * (time.perf_counter() - began))
            processor.append(1000 * (time.process_time() - busy))
        median, most = statistics.median(walls), max(walls)
        rows.append(
            {"page": name, "median_ms": median, "most_ms": most, "cpu_ms": statistics.median(processor), "bytes": size}
        )
    return rows


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2351)
    parser.add_argument("--consumers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        namespaces = write_crowd(folder / "bundle/skills", words.count)
        rules = {
            f"team.agent-{number}": {"enabled": [f"{each}.*" for each in namespaces[number % 2 :: 2]]}
            for number in range(words.consumers)
        }
        (folder / "bundle/skills_descriptor.json").write_text(json.dumps({"agents_config": rules}), encoding="utf-8")
        settings = Settings(bundle=folder / "bundle", state_dir=folder / "state", index_dir=folder / "index")
        rows = asyncio.run(measured(Host(settings, entry_points=False), words.rounds))
    if words.json:
        print(json.dumps(rows))
    else:
        print("| page | median ms | most ms | processor ms | bytes |\n|---|---|---|---|---|")
        for row in rows:
            print(
                f"| {row['page']} | {row['median_ms']:.1f} | {row['most_ms']:.1f} | {row['cpu_ms']:.1f} | {row['bytes']} |"
            )
    return int(any(float(row["cpu_ms"]) > BOUND_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
