"""Commands on evaluations: run them, and tell what came of each."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import typer

from kdskills.doors.cli.derived import Row, Word
from kdskills.doors.cli.output import console, counted, dollars, findings, line, plain, shortened, table

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(help="Whether models pick the skills of a bundle, and whether they help.", no_args_is_help=True)

COLOURS: Final = MappingProxyType({"passed": "green", "failed": "red", "ungraded": "yellow", "error": "bold red"})
WORDS: Final = MappingProxyType(
    {
        "bundle": Word(help="The bundle's folder."),
        "skills": Word(metavar="[SKILL]..."),
        "jobs": Word(short="-j"),
        "workspace": Word(short="-w"),
    }
)


class EvalSteps:
    """Shows on stderr how far a run is, with what it took so far; `end` prints the answer."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __call__(self, event: Any) -> None:
        """Take an event of the run."""
        counts = ", ".join(f"{number} {status}" for status, number in event.counts.items())
        cost = "" if event.cost is None else f", {dollars(event.cost)}"
        rate = event.calls / event.seconds * 60 if event.seconds > 0 else 0
        words = f"{counts or 'begun'}; {event.tokens} tokens{cost}; {rate:.0f} calls a minute"
        if self._progress is None:
            from rich.progress import Progress

            out = console(stderr=True)
            self._progress = Progress(console=out, transient=True, disable=not out.is_terminal)
            self._progress.start()
            atexit.register(self._progress.stop)  # an error or Ctrl-C would leave the terminal without a cursor
            self._progress.add_task(words, total=event.total)
        self._progress.update(self._progress.task_ids[0], description=words, completed=event.done)

    def end(self, answer: Any) -> None:
        """Take the bar away and print the answer."""
        if self._progress is not None:
            self._progress.stop()
        print_rows(answer)


def print_junit(answer: Any) -> None:
    """Print the rows as JUnit's XML."""
    sys.stdout.write(Path(answer.folder, "junit.xml").read_text(encoding="utf-8") + "\n")


kind = partial(
    Row,
    app,
    operation="evals.run",
    positional=("bundle", "skills"),
    words=WORDS,
    trust=True,
    narrator=EvalSteps,
    formats={"junit": print_junit},
)


ASKING: Final = (
    *("model", "executor", "repeat", "max_steps", "max_tokens", "temperature", "seed"),
    *("jobs", "rate", "max_tokens_total", "record"),
)


@kind(
    name="retrieval",
    summary="See whether search finds the right skill for each request; no model is asked.",
    constants={"kind": "retrieval"},
    hidden=(*ASKING, "against", "baseline", "judge"),
)
@kind(
    name="trigger",
    summary="Ask a model with the real prompt, and see which skill it loads first.",
    constants={"kind": "trigger"},
    hidden=("baseline", "judge"),
)
@kind(
    name="run",
    summary="Run whole turns with a skill and without it, and grade what they leave behind.",
    constants={"kind": "run"},
    hidden=("against",),
)
@Row(
    app,
    "judge",
    "evals.judge",
    "Judge again what an iteration kept, without asking its model or running scripts.",
    positional=("bundle", "iteration"),
    words={name: word for name, word in WORDS.items() if name not in {"skills", "workspace"}},
    narrator=EvalSteps,
    formats={"junit": print_junit},
)
@Row(
    app,
    "report",
    "evals.report",
    "Print an iteration again, write its report, and say what it falls short of; exit 1 when anything.",
    positional=("iteration",),
    formats={"junit": print_junit},
)
def print_rows(answer: Any) -> None:
    """Print a line for each row, the figures of each side, and where all of it lies."""
    out = console()
    findings(answer.diagnostics)
    rows = table("evaluation", "side", "result", "skill", "steps", "tokens", "why")
    for row in answer.rows:
        failed = next((verdict for verdict in row.verdicts if verdict.passed is False), None)
        why = ": ".join(row.error) if row.error else "" if failed is None else f"{failed.text}: {failed.evidence}"
        rows.add_row(
            line(f"{row.eval} ({row.repeat + 1})" if row.repeat else row.eval),
            line(row.side),
            f"[{COLOURS[row.status]}]{row.status}[/]",
            line(row.picked[0]) if row.picked else "[dim]none[/]",
            str(row.steps),
            str(row.tokens),
            line(shortened(why, 100)),
        )
    out.print(rows)
    for name in answer.sides:
        statuses = [row.status for row in answer.rows if row.side == name]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in COLOURS if status in statuses)
        model = f" with {line(answer.model)}" if answer.model else ""
        out.print(f"[bold]{line(name)}[/]{model}: {counts or 'nothing was run'}", soft_wrap=True)
        print_figures(answer.figures.get(name, {}))
    if "compared" in answer.figures:
        pairs = answer.figures["compared"]
        words = f"{pairs['only_first']} passed on {line(answer.sides[0])} only, {pairs['only_second']} on {line(answer.sides[1])} only"
        out.print(f"of {counted(pairs['pairs'], 'pair')} {words}: p = {pairs['p']:.3f}", soft_wrap=True)
    if answer.missing:
        out.print(f"[yellow]{counted(answer.missing, 'row')} not run: go on with --resume[/]")
    if answer.before:
        out.print(f"{counted(len(answer.changes), 'change')} since {plain(answer.before)}", soft_wrap=True)
    for words in answer.below:
        out.print(f"[red]{line(words)}[/]", soft_wrap=True)
    out.print(f"wrote {plain(answer.folder)}, with report.html", soft_wrap=True)


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print shares with their intervals, other figures, what was confused, and the words that pulled wrong skills up."""
    out = console()
    for name, value in figures.items():
        if isinstance(value, float):
            out.print(f"    {name:<10} {value:.2f}")
        elif isinstance(value, Mapping) and "low" in value:
            bounds = f"{value['low']:.2f} to {value['high']:.2f}; {value['hits']} of {value['total']}"
            out.print(f"    {name:<10} {value['value']:.2f} ({bounds})")
    confused = figures.get("confused", ())
    if isinstance(confused, Mapping):
        confused = [
            {"expected": expected, "picked": picked, "times": times}
            for expected, row in confused.items()
            for picked, times in row.items()
            if picked != expected
        ]
    for pair in confused:
        out.print(f"    {line(pair['picked'])} instead of {line(pair['expected'])}: {counted(pair['times'], 'time')}")
    for miss in figures.get("misses", ()):
        pulled = "; ".join(
            f"{skill} by {', '.join(word for words in fields.values() for word in words)}"
            for skill, fields in miss["pulled"].items()
        )
        out.print(f"    {line(miss['eval'])}: rank {miss['rank'] or 'none'}, pulled up {line(pulled)}", soft_wrap=True)


@Row(
    app,
    "scripts",
    "evals.scripts",
    "Run the rows of `evals/scripts.yaml` of skills, without a model; exit 1 unless all pass.",
    positional=("bundle", "skills"),
    words={"at_once": Word(ranged=True)},
    trust=True,
)
def tested_scripts(answer: Any) -> None:
    """Print each row, and of one that did not pass what was seen."""
    out = console()
    for row in answer.rows:
        out.print(f"[{COLOURS[row.status]}]{row.status}[/] {line(row.eval)}", soft_wrap=True)
        for verdict in row.verdicts:
            if not verdict.passed:
                out.print(f"    {line(verdict.text)}: {line(verdict.evidence)}", soft_wrap=True)
        if row.error is not None:
            out.print(f"    [red]{line(row.error[0])}[/]: {line(row.error[1])}", soft_wrap=True)
        if row.status != "passed" and row.facts.get("stderr"):
            out.print(f"    stderr: {line(row.facts['stderr'])}", soft_wrap=True)
    findings(answer.diagnostics)
    passed = sum(row.status == "passed" for row in answer.rows)
    colour = "green" if answer.ok else "red"
    out.print(f"[{colour}]{passed} of {counted(len(answer.rows), 'row')} passed[/]")


@Row(
    app,
    "add",
    "evals.add",
    "Add an evaluation to `evals/evals.json` of a skill or bundle, in the published form.",
    positional=("folder", "prompt"),
    words={"assertions": Word("--assertion"), "files": Word("--file")},
)
def print_added(answer: Any) -> None:
    """Print which id the row has, and where."""
    console().print(f"added {line(answer.id)} to {plain(str(answer.path))}", soft_wrap=True)


@Row(
    app,
    "diff",
    "evals.report",
    "Show what changed between two iterations, row by row.",
    positional=("before", "iteration"),
    words={"before": Word(required=True)},
    hidden=("min_recall", "min_pass", "max_regression"),
)
def print_changes(answer: Any) -> None:
    """Print a line for each row that is different, with what it was and is."""
    out = console()
    rows = table("evaluation", "side", "change", "before", "after")
    for row in answer.changes:
        name = f"{row.eval} ({row.repeat + 1})" if row.repeat else row.eval
        colour = {"fixed": "green", "broken": "red"}.get(row.change, "yellow")
        cells = (" ".join(filter(None, facts)) or "-" for facts in (row.before, row.after))
        rows.add_row(line(name), line(row.side), f"[{colour}]{row.change}[/]", *map(line, cells))
    out.print(rows if answer.changes else "nothing changed")


@Row(
    app,
    "start",
    "evals.start",
    "Start evaluations that go on in the background, whatever becomes of this terminal.",
    positional=("kind", "bundle", "skills"),
    words={**WORDS, "bundle": Word(help="The bundle's folder; none means that of the settings.")},
    trust=True,
)
def print_started(answer: Any) -> None:
    """Print the job's id, and how to look at it."""
    job = line(answer.job_id)
    console().print(f"{job} writes to {plain(str(answer.workspace))}: kdskills eval status {job}", soft_wrap=True)


@Row(
    app,
    "status",
    "evals.status",
    "Show how evaluations in the background stand, row by row.",
    positional=("job_id",),
    words={"wait_sec": Word("--wait", help="Seconds to wait for the end first.")},
)
def print_status(answer: Any) -> None:
    """Print a line for each row, how many have ended, the figures so far, and where all of it lies."""
    out = console()
    rows = table("evaluation", "side", "result", "skill", "tokens", "why")
    for step in answer.steps:
        rows.add_row(
            line(f"{step.eval} ({step.repeat + 1})" if step.repeat else step.eval),
            line(step.side),
            f"[{COLOURS.get(step.status, 'dim')}]{step.status}[/]",
            line(step.picked[0]) if step.picked else "",
            str(step.tokens),
            line(shortened(": ".join(step.error), 100)) if step.error else "",
        )
    if answer.steps:
        out.print(rows)
    counts = ", ".join(f"{answer.counts[status]} {status}" for status in COLOURS if status in answer.counts)
    total = "an unknown number of" if answer.total is None else answer.total
    why = f" ({line(answer.error_code)}: {line(answer.error_message or '')})" if answer.error_code else ""
    out.print(
        f"{answer.status}{why}: {answer.done} of {total} rows{': ' if counts else ''}{counts}; {answer.tokens} tokens",
        soft_wrap=True,
    )
    for name, figures in answer.figures.items():
        if name != "compared":
            out.print(f"[bold]{line(name)}[/]")
            print_figures(figures)
    if answer.folder is not None:
        out.print(f"in {plain(answer.report or answer.folder)}", soft_wrap=True)


@Row(app, "cancel", "evals.cancel", "End evaluations in the background; what has ended stays.", positional=("job_id",))
def print_canceled(answer: Any) -> None:
    """Print how the job stands."""
    words = "was over" if not answer.canceled else "is being ended" if answer.status == "running" else "is"
    console().print(f"{line(answer.id)} {words}: {line(answer.status)}", soft_wrap=True)
