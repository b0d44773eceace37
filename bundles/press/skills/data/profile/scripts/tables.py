"""Reading a table from CSV or JSON as text cells; shared by the scripts of this skill."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path


class TableError(Exception):
    """The table cannot be read; the message says why in one sentence."""


def number(text: str) -> float | None:
    """Return the finite number *text* spells, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def cell(value: object) -> str:
    """Return a JSON value as the text of a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _from_records(records: list[object], path: Path) -> tuple[list[str], list[list[str]]]:
    if not records or not all(isinstance(record, dict) for record in records):
        raise TableError(f"{path}: JSON must be a non-empty list of objects")
    header: list[str] = []
    for record in records:
        header += [str(key) for key in record if key not in header]
    return header, [[cell(record.get(name)) for name in header] for record in records]


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table at *path*; short rows are filled up, long ones are an error."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read: {error}") from None
    if not text.strip():
        raise TableError(f"{path}: the table is empty")
    if path.suffix in {".json", ".jsonl", ".ndjson"}:
        try:
            records = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise TableError(f"{path}: not JSON: {error}") from None
        return _from_records(records if isinstance(records, list) else [records], path)
    first = text.splitlines()[0]
    delimiter = max(",;\t", key=first.count)
    lines = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
    header = [name.strip() for name in lines[0]]
    if len(set(header)) != len(header):
        raise TableError(f"{path}: a column name stands twice in the header")
    for index, row in enumerate(lines[1:], start=2):
        if len(row) > len(header):
            raise TableError(f"{path}: row {index} has {len(row)} cells, the header {len(header)}")
    return header, [[value.strip() for value in row] + [""] * (len(header) - len(row)) for row in lines[1:]]


def column(header: list[str], name: str) -> int:
    """Return the position of column *name*."""
    try:
        return header.index(name)
    except ValueError:
        raise TableError(f"no column is named {name!r}; there are {', '.join(header)}") from None
