"""Iterations: a page, the form that CI systems read, what changed between two, and whether one is good enough."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal
from xml.etree import ElementTree as ET

from jinja2 import Environment, Template
from pydantic import BaseModel, Field

from kdskills.errors import Diagnostic, FileRefused, StrPath
from kdskills.evals.figures import NOTHING, Share, confusion, share, spread
from kdskills.evals.results import (
    OUTPUTS,
    TRANSCRIPT,
    EvalForm,
    EvalPlan,
    EvalsRefused,
    EvalWorkspace,
    Iteration,
    RowResult,
    read_iteration,
    read_plan,
)
from kdskills.evals.runs import figures_of
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import printable_path, read_file, walk_tree

REPORT: Final = "report.html"
JUNIT: Final = "junit.xml"
MAX_ROWS: Final = 2_000
"""Evaluations that a page shows one by one; the figures count all."""
MAX_TEXT: Final = 20_000
"""Characters that a page shows of one file."""
MAX_LINE: Final = 600
"""Characters of one event of a transcript."""
MAX_FILES: Final = 20
MAX_READ: Final = 1024 * 1024
MAX_NAMES: Final = 40
"""Rows and columns of a confusion table."""
RECALL_AT: Final = 5


class Thresholds(BaseModel):
    """What an iteration must reach; the first side counts, and rows that are errors or ungraded do not."""

    min_recall: float | None = Field(
        None, ge=0, le=1, description="Share of rows whose right skill must be among the first five, or loaded first."
    )
    min_pass: float | None = Field(None, ge=0, le=1, description="Share of rows that must pass.")
    max_regression: float | None = Field(
        None,
        ge=0,
        le=1,
        description="How much the share of rows that pass may fall against the last iteration before of its kind and sides.",
    )


Change = Literal["added", "removed", "fixed", "broken", "status", "skill"]


class RowChange(EvalForm):
    """A row that two iterations differ in: it passes now (`fixed`) or no more (`broken`), has another status, loads
    another `skill` first, or is in one only. `before` and `after` are status and skill, "" where there is no row.
    """

    eval: str
    side: str
    repeat: int
    change: Change
    before: tuple[str, str] = ("", "")
    after: tuple[str, str] = ("", "")


def changes(before: Iteration, after: Iteration) -> tuple[RowChange, ...]:
    """Return what is different between two iterations, row by row, in the order of the later one's rows."""
    old, new = ({row.key: row for row in iteration.rows} for iteration in (before, after))
    return tuple(
        RowChange(
            eval=key[0],
            side=key[1],
            repeat=key[2],
            change=kind,
            before=_facts(old.get(key)),
            after=_facts(new.get(key)),
        )
        for key in dict.fromkeys((*new, *old))
        if (kind := _change(old.get(key), new.get(key))) is not None
    )


def _facts(row: RowResult | None) -> tuple[str, str]:
    return ("", "") if row is None else (row.status, next(iter(row.picked), ""))


def _change(old: RowResult | None, new: RowResult | None) -> Change | None:
    if old is None or new is None:
        return "added" if old is None else "removed"
    if old.status != new.status:
        if {old.status, new.status} == {"passed", "failed"}:
            return "fixed" if new.status == "passed" else "broken"
        return "status"
    return "skill" if _facts(old) != _facts(new) else None


def former_iteration(
    iteration: Iteration, folder: StrPath | None = None
) -> tuple[Iteration | None, tuple[Diagnostic, ...]]:
    """Return the iteration in *folder*, else the last one before in the same workspace that is `comparable`, or None.

    Those before that cannot be read are passed over, and told. Raises EvalsRefused: the one in *folder* cannot be read.
    """
    if folder is not None:
        return read_iteration(folder), ()
    path, former = Path(os.path.realpath(iteration.folder)), None
    numbers: list[int] = []
    refusals: list[str] = []
    try:
        numbers = EvalWorkspace(path.parent).before(path.name)
    except OSError as error:
        refusals.append(str(error))
    for number in reversed(numbers):
        candidate = path.with_name(f"iteration-{number}")
        try:
            if comparable(read_plan(candidate), iteration.plan):
                former = read_iteration(candidate)
                break
        except EvalsRefused as refused:
            refusals.append(refused.message)
    if not refusals:
        return former, ()
    further = f", nor can {len(refusals) - 1} before it" if refusals[1:] else ""
    words = f"{refusals[0]}{further}: nothing is compared with what cannot be read"
    return former, (Diagnostic("eval_former_unreadable", "warning", words),)


def comparable(before: EvalPlan, after: EvalPlan) -> bool:
    """Whether two iterations are of the same kind and sides, so that falling behind means something."""
    return (before.kind, before.sides) == (after.kind, after.sides)


def passed_share(rows: Sequence[RowResult]) -> Share:
    """Return how many of the rows that were judged passed."""
    judged = [row.status == "passed" for row in rows if row.status in {"passed", "failed"}]
    return share(sum(judged), len(judged))


def shortfalls(
    iteration: Iteration, figures: Mapping[str, Any], wanted: Thresholds, before: Iteration | None
) -> tuple[str, ...]:
    """Return a sentence for each threshold that an iteration falls short of; what cannot be told falls short, too.

    Args:
        iteration: What is judged.
        figures: Its figures, by side.
        wanted: The thresholds; those that are None hold always.
        before: The iteration it may not fall behind, by the rows that were judged in both.
    """
    problems = []
    name = iteration.plan.sides[0]
    rows = [row for row in iteration.rows if row.side == name]
    if wanted.min_recall is not None:
        side = figures.get(name, {})
        recall = side.get(f"recall@{RECALL_AT}", side.get("recall")) or {}
        if not recall.get("total") or recall["value"] < wanted.min_recall:
            words = f"{recall['value']:.2f}" if recall.get("total") else "not known"
            problems.append(f"recall is {words}; at least {wanted.min_recall:.2f} is asked for")
    if wanted.min_pass is not None:
        passed = passed_share(rows)
        if not passed.total or passed.value < wanted.min_pass:
            words = f"{passed.value:.2f} of the rows pass" if passed.total else "no row was judged"
            problems.append(f"{words}; at least {wanted.min_pass:.2f} is asked for")
    if wanted.max_regression is not None and before is not None and not comparable(before.plan, iteration.plan):
        was, now = (f"{each.plan.kind} of {', '.join(each.plan.sides)}" for each in (before, iteration))
        problems.append(f"no regression can be told: {Path(before.folder).name} is {was}, this one {now}")
    elif wanted.max_regression is not None and before is not None:
        judged = {"passed", "failed"}
        old = {row.key: row for row in before.rows if row.status in judged}
        both = [row for row in rows if row.key in old and row.status in judged]
        fall = passed_share([old[row.key] for row in both]).value - passed_share(both).value
        if not both or round(fall, 9) > wanted.max_regression:
            name = Path(before.folder).name
            words = (
                f"{fall:.2f} fewer of the rows pass than in {name}" if both else f"no row was judged in {name} and now"
            )
            problems.append(f"{words}; at most {wanted.max_regression:.2f} may be lost")
    return tuple(problems)


def junit(iteration: Iteration) -> bytes:
    """Return the rows as JUnit's XML: a suite for each side, a case for each row; ungraded rows are skipped."""
    top = ET.Element("testsuites", name=f"kdskills eval {iteration.plan.kind}")
    for side in iteration.plan.sides:
        rows = [row for row in iteration.rows if row.side == side]
        count = {status: str(sum(row.status == status for row in rows)) for status in ("failed", "error", "ungraded")}
        facts = {"failures": count["failed"], "errors": count["error"], "skipped": count["ungraded"]}
        suite = ET.SubElement(top, "testsuite", {"name": _xml(side), "tests": str(len(rows))} | facts)
        for row in rows:
            name = f"{row.eval} ({row.repeat + 1})" if row.repeat else row.eval
            case = ET.SubElement(suite, "testcase", name=_xml(name), classname=_xml(row.skill or iteration.plan.kind))
            case.set("time", f"{row.duration_ms / 1000:.3f}")
            if row.status != "passed":
                tag = {"failed": "failure", "error": "error", "ungraded": "skipped"}[row.status]
                element = ET.SubElement(case, tag, message=_xml(": ".join(row.error or (row.status,))))
                failed = [f"{each.text}: {each.evidence}" for each in row.verdicts if each.passed is False]
                element.text = _xml("\n".join(failed) or f"picked: {', '.join(row.picked) or NOTHING}")
    data: bytes = ET.tostring(top, encoding="utf-8", xml_declaration=True)
    return data


def _xml(text: str) -> str:
    """Return *text* without characters that no XML may have."""
    return "".join(
        c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe") or c > "\uffff" else "�"
        for c in text
    )


def report(iteration: Iteration | StrPath, figures: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` and `junit.xml` into an iteration's folder, each in one step; returns the page's path.

    *figures* are those of `figures_of`, if somebody has them already. Raises EvalsRefused: the folder is no iteration.
    """
    iteration = iteration if isinstance(iteration, Iteration) else read_iteration(iteration)
    figures = figures_of(iteration) if figures is None else figures
    folder = Path(iteration.folder)
    replace_file(folder / JUNIT, junit(iteration))
    replace_file(folder / REPORT, page(iteration, figures).encode("utf-8", "replace"))
    return folder / REPORT


def page(iteration: Iteration, figures: Mapping[str, Any]) -> str:
    """Return a page of HTML about an iteration: one file that loads nothing, runs nothing and needs no script.

    All that skills and models wrote is escaped, and a policy in the page forbids whatever would be loaded or run.
    """
    style = resources.files("kdskills.evals").joinpath("report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    groups: dict[tuple[str, int], list[RowResult]] = {}
    for row in iteration.rows:
        groups.setdefault((row.eval, row.repeat), []).append(row)
    return _template().render(
        plan=iteration.plan,
        style=style,
        digest=digest,
        sides=[_side(iteration, name, figures.get(name, {})) for name in iteration.plan.sides],
        compared=figures.get("compared"),
        heat=_heat(iteration),
        points=[_point(row) for row in iteration.rows if row.tokens and row.status in {"passed", "failed"}],
        most_tokens=max((row.tokens for row in iteration.rows), default=0),
        groups=[(rows, [_left_behind(iteration, row) for row in rows]) for rows in list(groups.values())[:MAX_ROWS]],
        unseen=max(0, len(groups) - MAX_ROWS),
        missing=iteration.missing,
    )


@cache
def _template() -> Template:
    text = resources.files("kdskills.evals").joinpath("report.html.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _side(iteration: Iteration, name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in iteration.rows if row.side == name]
    valid = [row for row in rows if row.status != "error"]
    shares = {key: value for key, value in figures.items() if isinstance(value, Mapping) and "low" in value}
    return {
        "name": name,
        "passed": passed_share(rows).to_json(),
        "errors": len(rows) - len(valid),
        "ungraded": sum(row.status == "ungraded" for row in rows),
        "tokens": spread([row.tokens for row in valid]),
        "seconds": spread([row.duration_ms / 1000 for row in valid]),
        "shares": shares,
        "numbers": {key: value for key, value in figures.items() if isinstance(value, float)},
    }


def _heat(iteration: Iteration) -> dict[str, Any] | None:
    """Return the confusion table of the first side: names, and cells with times and a heat from 0 to 9."""
    rows = [row for row in iteration.rows if row.side == iteration.plan.sides[0] and row.status != "error"]
    if iteration.plan.kind not in {"retrieval", "trigger"} or not rows:
        return None
    picked = [(row, next(iter(row.picked), None)) for row in rows]
    table = confusion((row.skill if row.facts.get("expects") else None, first) for row, first in picked)
    names = sorted({name for row_counts in table.values() for name in row_counts} | table.keys())
    columns = names[:MAX_NAMES]
    cells = [
        (
            name,
            [
                (times, 9 * times // table[name].total(), name == column)
                for column in columns
                for times in (table[name][column],)
            ],
        )
        for name in list(table)[:MAX_NAMES]
    ]
    return {"columns": columns, "rows": cells, "unseen": len(names) - len(columns)}


def _point(row: RowResult) -> dict[str, Any]:
    return {"tokens": row.tokens, "rate": row.pass_rate or 0.0, "side": row.side, "name": row.eval}


def _left_behind(iteration: Iteration, row: RowResult) -> dict[str, Any]:
    """Return the files that a row left behind, as texts, and its transcript."""
    pulled = [
        f"{skill} by {', '.join(dict.fromkeys(str(word) for words in fields.values() for word in words))}"
        for skill, fields in row.facts.get("pulled", {}).items()
    ]
    if not row.folder:
        return {"pulled": pulled, "files": [], "transcript": ""}
    folder, refusals = Path(iteration.folder), []
    try:
        entries = [entry.path for entry in walk_tree(folder, f"{row.folder}/{OUTPUTS}") if entry.kind == "file"]
    except FileRefused as error:
        entries = []
        if error.code != "file_missing":
            refusals.append((OUTPUTS, f"({error.message})"))
    files = [(printable_path(path), _text(folder, f"{row.folder}/{OUTPUTS}/{path}")) for path in entries[:MAX_FILES]]
    lines = _text(folder, f"{row.folder}/{TRANSCRIPT}").splitlines()
    return {
        "pulled": pulled,
        "files": refusals + files,
        "more": len(entries) - len(files),
        "transcript": _cut("\n".join(_told(lines)), MAX_TEXT),
    }


def _text(folder: Path, path: str) -> str:
    try:
        data = read_file(folder, path, limit=MAX_READ).data
    except FileRefused as error:
        return "" if error.code == "file_missing" else f"({error.message})"
    if b"\0" in data[:MAX_TEXT]:
        return f"({len(data):,} bytes that are no text)"
    return _cut(data.decode("utf-8", "replace"), MAX_TEXT, "\n")


def _cut(text: str, most: int, separator: str = " ") -> str:
    """Return a text as it is shown; one that is too long says how much of it is not."""
    return text if len(text) <= most else f"{text[:most]}{separator}… {len(text) - most:,} more characters"


def _told(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a transcript for people: what it is, then what else is known of it."""
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = line
        if isinstance(event, dict):
            kind = event.pop("type", event.pop("event", ""))
            yield f"{kind} {_cut(json.dumps(event, ensure_ascii=False), MAX_LINE)}"
        else:
            yield _cut(str(event), MAX_LINE)
