"""Commands on turns: of one transcript, and of those that are kept."""

from __future__ import annotations

from typing import Any, Final

import typer

from kdskills.doors.cli.derived import Row, Word
from kdskills.doors.cli.output import console, disarmed, line, one_line, table

turn = typer.Typer(help="What happened in turns.", no_args_is_help=True)

FULL: Final = {"full": "Print long prompts and results in full."}
ID: Final = {"turn_id": Word(metavar="ID")}


@Row(
    turn,
    "show",
    "turns.show",
    positional=("transcript",),
    words={"transcript": Word(metavar="TRANSCRIPT")},
    flags=FULL,
)
def timeline(answer: Any, *, full: bool) -> None:
    """Show a turn from its transcript: prompts, tool calls, sources, citations, files and errors, in order."""
    from kdskills.doors.cli.turns import show

    show(answer, full=full)


@Row(turn, "list", "turns.list", words={"limit": Word(short="-n", ranged=True)})
def turns(answer: Any) -> None:
    """List turns that were kept, the newest first."""
    listing = table("id", "began", "status", "bundle", "steps", "request")
    for row in answer.turns:
        began, request = str(row.started_at)[:16], one_line(row.request)[:60]
        cells = (row.turn_id, began, row.status, row.bundle, row.steps, request)
        listing.add_row(*(line(str(cell)) for cell in cells))
    console().print(listing)
    if answer.next_cursor:
        console().print(f"there are more: kdskills turn list --cursor {line(answer.next_cursor)}")


@Row(turn, "get", "turns.get", positional=("turn_id",), words=ID, flags=FULL)
def kept_turn(answer: Any, *, full: bool) -> None:
    """Show a turn that was kept, by its id."""
    from kdskills.doors.cli.turns import show

    show(answer, full=full)


@Row(
    turn,
    "compare",
    "turns.compare",
    positional=("turn_id", "second_id"),
    words=ID | {"second_id": Word(metavar="SECOND")},
)
def turn_pair(answer: Any) -> None:
    """Tell what is not alike in two turns that were kept."""
    for item in answer.differences:
        where = f"step {item.step} {item.name}" if item.step else item.name
        typer.echo(f"{where}: {one_line(item.first)} | {one_line(item.second)}" if item.diff == "" else f"{where}:")
        if item.diff:
            typer.echo(disarmed(item.diff))
    if not answer.differences:
        typer.echo("nothing differs")
