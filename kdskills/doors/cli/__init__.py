"""The command line: friendly commands over the table of operations. A process that runs it begins here."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any, Final

import typer

from kdskills.doors.cli.main import build_cli
from kdskills.doors.cli.output import failing, steady_streams
from kdskills.errors import BadRequest
from kdskills.hooks import NAME

__all__ = ["main"]

#: What typer raises for a call it does not understand; of its errors it gives away only those derived from this one.
_Usage: Final[Any] = typer.BadParameter.__base__


def main() -> None:
    """Run the command line; plugins may add commands."""
    steady_streams()
    as_json = "--json" in sys.argv
    with failing(as_json=as_json):
        try:
            host = None
            if entry_points(group=NAME):  # installed plugins may bring commands; shipped ones bring none
                from kdskills.app import Host

                host = Host()
            cli = build_cli(host)
            if not as_json:
                cli()
                return
            try:
                code = cli(standalone_mode=False)
            except _Usage as error:  # who asks for JSON gets a wrong call in JSON, too, instead of the usage
                raise BadRequest(error.format_message() or "words are missing: see --help", code="usage") from None
            raise SystemExit(code if isinstance(code, int) else 0)
        finally:
            sys.stdout.flush()
