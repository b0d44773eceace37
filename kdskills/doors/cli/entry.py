"""Where a process that runs the command line begins: streams, plugins that bring commands, and the last word on errors."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

import typer

from kdskills.doors.cli.main import build_cli
from kdskills.doors.cli.output import failing
from kdskills.doors.cli.streams import steady_streams
from kdskills.errors import BadRequest
from kdskills.hooks import NAME

if TYPE_CHECKING:
    from kdskills.app import Host


def _host() -> Host | None:
    """Return a Host where installed plugins may bring commands; None where there are only shipped ones, which bring none."""
    if not entry_points(group=NAME):
        return None
    from kdskills.app import Host

    return Host()


#: What typer raises for a call it does not understand; of its errors it gives away only those derived from this one.
_Usage: Final[Any] = typer.BadParameter.__base__


def main() -> None:
    """Run the command line; plugins may add commands."""
    steady_streams()
    as_json = "--json" in sys.argv
    with failing(as_json=as_json):
        try:
            _run(build_cli(_host()), as_json=as_json)
        finally:
            sys.stdout.flush()


def _run(cli: typer.Typer, *, as_json: bool) -> None:
    """Run *cli*; who asks for JSON gets a wrong call in JSON, too, instead of the usage."""
    if not as_json:
        cli()
        return
    try:
        code = cli(standalone_mode=False)
    except _Usage as error:
        raise BadRequest(error.format_message() or "words are missing: see --help", code="usage") from None
    raise SystemExit(code if isinstance(code, int) else 0)
