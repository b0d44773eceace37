"""`kdskills tool`: any operation by name, arguments and answer in JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdskills.app.operations.table import Context
from kdskills.app.wire import json_text
from kdskills.doors.cli.output import console, failing, line, print_json, table
from kdskills.doors.cli.within import AT_CLI, host_of, run
from kdskills.errors import BadRequest

if TYPE_CHECKING:
    from kdskills.app import Host


def list_tools(host: Host) -> None:
    """Print every operation with what it does and the scope it needs."""
    operations = table("operation", "scope", "what it does")
    for name, operation in sorted(host.operations.items()):
        operations.add_row(line(name), line(operation.scope), line(operation.summary))
    console().print(operations)


def arguments_of(text: str) -> dict[str, Any]:
    """Return arguments from JSON text, or from standard input for `-`.

    Raises:
        BadRequest: It is no JSON object.
    """
    try:
        arguments = json.loads(sys.stdin.read() if text == "-" else text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadRequest("the arguments are no JSON object")
    return arguments


def _progress(event: object) -> None:
    from pydantic import BaseModel

    if isinstance(event, BaseModel):
        sys.stderr.write(json_text(event) + "\n")
        sys.stderr.flush()


def command(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Operation, such as `skills.run_cmd`; none lists them all.")
    ] = None,
    text: Annotated[str, typer.Option("--json", "-j", help="Arguments as a JSON object; `-` reads them.")] = "{}",
    key: Annotated[str | None, typer.Option("--key", help="Idempotency key: a repeated call is the first one.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run code of a bundle that is named by its folder with your rights.")
    ] = False,
) -> None:
    """Run any operation; its answer is JSON on standard output, its progress JSON lines on standard error."""
    if name is None:
        with failing(as_json=False):
            list_tools(host_of(ctx))
        return
    with failing(as_json=True):
        arguments = arguments_of(text)
        context = Context(identity=AT_CLI, emit=_progress, idempotency_key=key, trust=trust)
        print_json(run(ctx, lambda host: host.invoke(name, arguments, context)))
