"""Commands that are no row of the table: any operation by name, benchmarks, other doors, workers.

Doors do not import each other: entry points bring them.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import kdskills
from kdskills.app.wire import json_text
from kdskills.doors.cli.derived import host_of, run, split
from kdskills.doors.cli.output import console, failing, line, print_json, table
from kdskills.errors import BadRequest, MissingExtra


def bench(ctx: typer.Context, name: Annotated[str, typer.Argument(help="Benchmark: `skills`, `imports`, …")]) -> None:
    """Run a benchmark and print its table of ratios; exit 1 when a bound is not held."""
    folder = Path(kdskills.__file__).parents[1] / "tests" / "benchmarks"  # they come with the source, not the wheel
    names = sorted(path.stem for path in folder.glob("*.py"))
    code, before = 0, sys.argv
    with failing(as_json=False):
        if name not in names:
            available_names = ", ".join(names) or "none: benchmarks come with a source checkout"
            words = f"there is no benchmark {name!r}; there are {available_names}"
            raise BadRequest(words, code="benchmark_missing", name=name)
        sys.argv = [f"kdskills bench {name}", *ctx.args]
        try:
            runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            sys.argv = before
    raise typer.Exit(code)


#: The extra that brings what a door needs.
EXTRAS: Final = {"serve": "service", "mcp": "mcp", "nats": "service"}


def door(name: str) -> Callable[..., Any]:
    """Return what opens a door. Raises MissingExtra."""
    try:
        point = next(iter(entry_points(group="kdskills.doors", name=name)))
        return point.load()  # type: ignore[no-any-return]  # of importlib
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "kdskills":
            raise
        raise MissingExtra(f"kdskills {name}", EXTRAS[name]) from error


def serve(
    ctx: typer.Context,
    listen: Annotated[str | None, typer.Option("--listen", help="HOST:PORT; the setting when omitted.")] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no token; on loopback only.")] = False,
    nats: Annotated[
        str | None, typer.Option("--nats", help="Also answer the command bus at this URL; the setting when omitted.")
    ] = None,
) -> None:
    """Run the service: HTTP, MCP under /mcp, and the command bus that is named; TERM lets running requests finish."""
    with failing(as_json=False):
        host = host_of(ctx)
        url = host.settings.bus.url if nats is None else nats
        door("serve")(host, listen=listen, no_auth=no_auth, nats=None if url is None else (door("nats"), url))


def mcp(
    ctx: typer.Context,
    http: Annotated[str | None, typer.Option("--http", help="Serve HOST:PORT instead of standard input.")] = None,
    project: Annotated[str, typer.Option("--project", help="Project whose skills are served.")] = "local",
    agent: Annotated[str, typer.Option("--agent", help="Consumer that the policy of skills is asked for.")] = "local",
    profile: Annotated[
        str, typer.Option("--profile", help="Tools that are served: `skills`, `author` or `operator`.")
    ] = "skills",
    tools: Annotated[
        str | None,
        typer.Option("--tools", help="Tools a client without a token holds, comma-separated; '' means none."),
    ] = None,
) -> None:
    """Serve MCP to one client on standard input and output, or to many over HTTP; or do what a further word says."""
    if ctx.invoked_subcommand is None:
        with failing(as_json=False):
            serve_mcp, tool_ids = door("mcp"), None if tools is None else split(tools)
            serve_mcp(host_of(ctx), http=http, project=project, agent=agent, profile=profile, tools=tool_ids)


def worker(
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


def arguments_of(text: str) -> dict[str, Any]:
    """Return arguments from the text of a JSON object, or from standard input for `-`. Raises BadRequest."""
    try:
        arguments = json.loads(sys.stdin.read() if text == "-" else text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadRequest("the arguments are no JSON object")
    return arguments


def tool(
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
            operations = table("operation", "scope", "what it does")
            for operation_name, operation in sorted(host_of(ctx).operations.items()):
                operations.add_row(line(operation_name), line(operation.scope), line(operation.summary))
            console().print(operations)
        return
    from pydantic import BaseModel

    def progress(event: object) -> None:
        if isinstance(event, BaseModel):
            sys.stderr.write(json_text(event) + "\n")
            sys.stderr.flush()

    with failing(as_json=True):
        arguments = arguments_of(text)
        print_json(run(ctx, lambda ask: ask(name, arguments, progress, key=key, trust=trust)))
