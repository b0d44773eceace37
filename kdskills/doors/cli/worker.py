"""`kdskills worker`: the one process that runs background work."""

from __future__ import annotations

from typing import Annotated

import typer

from kdskills.doors.cli.output import failing
from kdskills.doors.cli.within import host_of


def command(
    ctx: typer.Context,
    slot: Annotated[int, typer.Option("--slot", help="Which of this host's workers; each slot has one.", min=0)] = 0,
    idle: Annotated[
        float | None, typer.Option("--idle", help="Seconds without work after which it ends; none means never.", min=0)
    ] = None,
) -> None:
    """Run background work until told to stop; programs it started outlive it, and the next worker takes them over."""
    with failing(as_json=False):
        from kdskills.app.worker.main import run  # starting any other command must not cost what a worker imports

        run(host_of(ctx).settings, slot=slot, idle_s=idle)
