"""Profile a CSV or JSON table: types, gaps, ranges and warnings, as JSON on standard output.

Usage: profile.py TABLE [--out FILE] [--top N]

TABLE is CSV with a header line (comma, semicolon or tab), a JSON list of objects, or JSON lines. Exit codes: 0 profile
printed, 2 the table cannot be read.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from tables import TableError, number, read_table

DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$")


def kind(text: str) -> str:
    """Name the type of one non-empty cell."""
    if DATE.match(text):
        return "date"
    value = number(text)
    if value is None:
        return "text"
    return "integer" if value == int(value) and "." not in text and "e" not in text.lower() else "number"


def numbers(values: list[float]) -> dict[str, float]:
    """Return the five-number summary and the mean, rounded to four places."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    facts = {"min": ordered[0], "q1": quartiles[0], "median": quartiles[1], "mean": statistics.fmean(ordered)}
    facts |= {"q3": quartiles[2], "max": ordered[-1]}
    return {name: round(value, 4) for name, value in facts.items()}


def profile_column(name: str, cells: list[str], top: int) -> tuple[dict[str, object], list[dict[str, str]]]:
    """Describe one column; return its facts and the warnings it gives rise to."""
    filled = [cell for cell in cells if cell != ""]
    kinds = Counter(kind(cell) for cell in filled)
    if set(kinds) == {"integer", "number"}:
        kinds = Counter({"number": len(filled)})
    main = kinds.most_common(1)[0][0] if kinds else "empty"
    distinct = Counter(filled)
    facts: dict[str, object] = {"type": main, "filled": len(filled), "empty": len(cells) - len(filled), "distinct": len(distinct)}
    warnings = []
    if len(kinds) > 1:
        odd = [cell for cell in filled if kind(cell) != main][:3]
        facts["examples"] = odd
        warnings.append({"column": name, "code": "mixed_types", "text": f"{name} is {main} but holds {odd}"})
    if 0 < len(filled) < len(cells):
        warnings.append({"column": name, "code": "gaps", "text": f"{name} is empty in {len(cells) - len(filled)} of {len(cells)} rows"})
    if len(distinct) == 1 and len(filled) > 1:
        warnings.append({"column": name, "code": "constant", "text": f"{name} is always {filled[0]!r}"})
    if main in {"integer", "number"}:
        summary = numbers([value for cell in filled if (value := number(cell)) is not None])
        facts |= summary
        spread = summary["q3"] - summary["q1"]
        if spread and abs(summary["mean"] - summary["median"]) > spread / 2:
            warnings.append({"column": name, "code": "skewed", "text": f"mean {summary['mean']} against median {summary['median']}"})
    elif main == "date":
        facts |= {"first": min(filled), "last": max(filled)}
    elif main == "text":
        facts["top"] = [[value, count] for value, count in distinct.most_common(top)]
        if len(distinct) == len(cells) > 1:
            warnings.append({"column": name, "code": "unique_key", "text": f"every {name} is different"})
    return facts, warnings


def profile(path: Path, top: int) -> dict[str, object]:
    """Profile the table at *path*."""
    header, rows = read_table(path)
    columns: dict[str, object] = {}
    warnings: list[dict[str, str]] = []
    for index, name in enumerate(header):
        columns[name], found = profile_column(name, [row[index] for row in rows], top)
        warnings += found
    repeated = sum(count - 1 for count in Counter(map(tuple, rows)).values())
    if repeated:
        warnings.append({"column": "*", "code": "duplicates", "text": f"{repeated} rows repeat an earlier one"})
    return {"table": path.name, "rows": len(rows), "columns": columns, "warnings": warnings}


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, help="also write the profile to this file")
    parser.add_argument("--top", type=int, default=5, help="commonest values shown per text column")
    args = parser.parse_args(argv)
    try:
        text = json.dumps(profile(args.table, args.top), ensure_ascii=False, indent=1)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
