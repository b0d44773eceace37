"""Sum a table up by group: sums, weighted means, shares. Prints a table; numbers are computed, never estimated.

Usage: summarise.py TABLE --by COLUMN[,COLUMN] [--sum a,b] [--wmean value:weight] [--share part:whole]
                    [--bucket month|year] [--where column=value] [--sort column] [--top N] [--out FILE.csv]

A weight or column called `departed` is `scheduled - cancelled` when the table has both. Rows whose value is empty do
not count in a weighted mean. Exit codes: 0 printed, 2 the table or a column cannot be used.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

from tables import TableError, column, number, read_table

Row = dict[str, str]


def value_of(row: Row, name: str) -> float | None:
    """Return the number in column *name* of *row*, or None when the cell is empty."""
    if name == "departed" and name not in row:
        return (value_of(row, "scheduled") or 0) - (value_of(row, "cancelled") or 0)
    if name not in row:
        raise TableError(f"no column is named {name!r}; there are {', '.join(row)}")
    if row[name] == "":
        return None
    value = number(row[name])
    if value is None:
        raise TableError(f"column {name!r} holds {row[name]!r}, which is no number")
    return value


def keys_of(row: Row, by: list[str], bucket: str | None) -> tuple[str, ...]:
    """Return the group *row* belongs to; a bucket cuts ISO dates to their month or year."""
    length = {"month": 7, "year": 4}.get(bucket or "", None)
    return tuple(row[name][:length] if name == by[0] and length else row[name] for name in by)


def measure(rows: list[Row], args: argparse.Namespace) -> dict[str, float | str]:
    """Compute the asked figures of one group."""
    out: dict[str, float | str] = {"rows": len(rows)}
    for name in args.sum:
        total = sum(v for row in rows if (v := value_of(row, name)) is not None)
        out[name] = int(total) if total == int(total) else round(total, 3)
    for value, weight in args.wmean:
        pairs = [(v, w) for row in rows if (v := value_of(row, value)) is not None and (w := value_of(row, weight))]
        whole = sum(w for _, w in pairs)
        out[value] = round(sum(v * w for v, w in pairs) / whole, 2) if whole else ""
    for part, whole_name in args.share:
        whole = sum(value_of(row, whole_name) or 0 for row in rows)
        out[f"{part}_percent"] = round(100 * sum(value_of(row, part) or 0 for row in rows) / whole, 2) if whole else ""
    return out


def summarise(args: argparse.Namespace) -> list[dict[str, object]]:
    """Group the table and measure each group."""
    header, lines = read_table(args.table)
    for name in [*args.by, *(name for name, _ in args.where)]:
        column(header, name)
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for line in lines:
        row = dict(zip(header, line, strict=True))
        if all(row[name] == wanted for name, wanted in args.where):
            groups[keys_of(row, args.by, args.bucket)].append(row)
    if not groups:
        raise TableError("no row matches")
    table = [dict(zip(args.by, key, strict=True)) | measure(rows, args) for key, rows in sorted(groups.items())]
    if args.sort:
        if args.sort not in table[0]:
            raise TableError(f"cannot sort by {args.sort!r}; the result has {', '.join(table[0])}")
        table.sort(key=lambda row: (row[args.sort] != "", row[args.sort]), reverse=True)
    return table[: args.top] if args.top else table


def pairs(separator: str) -> object:
    """Return an argument type that splits `left<separator>right` lists at commas."""

    def split(text: str) -> list[tuple[str, str]]:
        out = []
        for item in text.split(","):
            left, found, right = item.partition(separator)
            if not (left and found and right):
                raise argparse.ArgumentTypeError(f"{item!r} is not of the form a{separator}b")
            out.append((left, right))
        return out

    return split


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    names = lambda text: [name for name in text.split(",") if name]  # noqa: E731 - an argparse type in one word
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--by", type=names, required=True)
    parser.add_argument("--sum", type=names, default=[])
    parser.add_argument("--wmean", type=pairs(":"), default=[])
    parser.add_argument("--share", type=pairs(":"), default=[])
    parser.add_argument("--where", type=pairs("="), default=[])
    parser.add_argument("--bucket", choices=["month", "year"])
    parser.add_argument("--sort")
    parser.add_argument("--top", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        table = summarise(args)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    writers = [csv.DictWriter(sys.stdout, list(table[0]), lineterminator="\n")]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        target = args.out.open("w", encoding="utf-8", newline="")
        writers.append(csv.DictWriter(target, list(table[0]), lineterminator="\n"))
    for writer in writers:
        writer.writeheader()
        writer.writerows(table)
    if args.out:
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
