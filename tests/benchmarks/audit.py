"""Measure the audit on the samples of the tests and on real skills, beside published scanners, and print the table.

    python tests/benchmarks/audit.py [CATALOG] [--venv FOLDER] [--real 100]

CATALOG is a gzipped file with a JSON object a line that has `name`, `description` and `body` of a real skill, or a folder
of skills. FOLDER is a virtual environment with any of the scanners; each runs as a program of its own, with its own bar for
failing, on one skill at a time, and on the first real skills only. A sample is hit when its scanner fails it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from kdskills.supply.audit import audit_folder
from tests.unit.supply.audit_samples import benign, hostile
from tests.unit.supply.test_audit import written

SCANNERS = {
    "skillxray": ("skillxray", "--quiet"),
    "skillfrisk": ("skillfrisk", "scan"),
    "agent-skill-scanner": ("agent-skill-scan", "scan", "--min-severity", "HIGH", "--quiet", "--path"),
    "ruslanlap-skill-vet": ("skillvet",),
}
SETS = {
    "hostile, tuned": hostile.TUNED,
    "hostile, held out": hostile.HELD_OUT,
    "benign, tuned": benign.TUNED,
    "benign, held out": benign.HELD_OUT,
}


def ours(folder: Path) -> bool:
    """Whether our audit has a `high`."""
    return bool(audit_folder(folder).of("high"))


def scanner(program: Path, *words: str) -> Callable[[Path], bool]:
    """Return what asks a scanner whether it fails a folder."""

    def fails(folder: Path) -> bool:
        return subprocess.run([program, *words, folder], capture_output=True, timeout=60).returncode != 0

    return fails


def real_skills(catalog: Path, into: Path) -> list[Path]:
    """Return folders of real skills, written below *into* where the catalog is a file."""
    if catalog.is_dir():
        return sorted(path.parent for path in catalog.rglob("SKILL.md"))
    folders = []
    with gzip.open(catalog, "rt", encoding="utf-8") as rows:
        for number, row in enumerate(map(json.loads, rows)):
            text = f"---\nname: {row['name']}\ndescription: {json.dumps(row['description'])}\n---\n{row['body']}"
            folders.append(written(into / str(number) / row["name"], text))
    return folders


def print_row(name: str, judge: Callable[[Path], bool], sets: dict[str, Sequence[Path]]) -> None:
    """Print one line of the table."""
    cells = []
    for folders in sets.values():
        begun = time.perf_counter()
        hits = sum(judge(folder) for folder in folders)
        ms = (time.perf_counter() - begun) * 1000 / len(folders)
        cells.append(f"{hits:>4} of {len(folders):<4} {ms:6.1f} ms")
    print(f"{name:<22}" + "  ".join(f"{cell:<22}" for cell in cells), flush=True)


def main() -> None:
    """Print hits of ours and of each scanner that is there, and milliseconds a skill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("catalog", type=Path, nargs="?")
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--real", type=int, default=100, help="Real skills that scanners are asked about.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        sets: dict[str, Sequence[Path]] = {
            name: [written(top / name / str(number) / "sample", files) for number, (_, files) in enumerate(rows)]
            for name, rows in SETS.items()
        }
        if options.catalog is not None:
            sets["real"] = real_skills(options.catalog, top / "real")
        print(" " * 22 + "  ".join(f"{name:<22}" for name in sets))
        audit_folder(next(iter(sets["benign, tuned"])))  # patterns are compiled once
        print_row("kdskills audit", ours, sets)
        for name, (program, *words) in SCANNERS.items():
            path = None if options.venv is None else options.venv / "bin" / program
            if path is not None and path.exists():
                print_row(
                    name,
                    scanner(path, *words),
                    sets | {key: sets[key][: options.real] for key in sets.keys() & {"real"}},
                )


if __name__ == "__main__":
    main()
