"""What importing costs, as a ratio to importing pydantic, yaml and jinja2 alone (bound: 2.0).

Run it with the project's own Python: `python tests/benchmarks/imports.py`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

FLOOR = "import pydantic, yaml, jinja2; pydantic.BaseModel"
CASES = {
    "import kdskills": "import kdskills",
    "import kdskills and every public name": "import kdskills; [getattr(kdskills, n) for n in kdskills.__all__]",
}
BOUND = 2.0
RUNS = 9


def seconds(statement: str) -> float:
    """Return the time *statement* takes in a fresh interpreter."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Print the table; 1 when a bound is not held."""
    rows: dict[str, list[float]] = {"floor": [], **{name: [] for name in CASES}}
    for _ in range(RUNS):  # interleaved, so that a busy moment hits all alike
        rows["floor"].append(seconds(FLOOR))
        for name, statement in CASES.items():
            rows[name].append(seconds(statement))
    floor = statistics.median(rows["floor"])
    print(f"floor (pydantic, yaml, jinja2): {floor * 1000:.0f} ms")
    missed = False
    for name in CASES:
        ratio = statistics.median(rows[name]) / floor
        missed |= ratio > BOUND
        print(f"{name}: {ratio:.2f} x (at most {BOUND}) {'held' if ratio <= BOUND else 'MISSED'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
