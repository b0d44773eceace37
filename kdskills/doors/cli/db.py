"""`kdskills db`: the service's tables."""

from __future__ import annotations

from typing import Annotated

import typer

from kdskills.doors.cli.output import console, failing, line, print_json, table
from kdskills.doors.cli.within import ask, run

app = typer.Typer(help="The service's database.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Keep `upgrade` a word of its own: an application with one command would swallow it."""


@app.command("upgrade")
def upgrade(
    ctx: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False
) -> None:
    """Bring the tables up to date; doing it twice changes nothing."""
    with failing(as_json=as_json):
        report = run(ctx, lambda host: ask(host, "db.upgrade", {}))
        if as_json:
            print_json(report)
            return
        rows = table("part", "revision", "what was done")
        for row in report.model_dump()["parts"]:
            rows.add_row(line(row["part"]), line(row["revision"]), "upgraded" if row["changed"] else "nothing to do")
        console().print(rows)
