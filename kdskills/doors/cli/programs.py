"""Commands that are no row of the table: any operation by name, benchmarks, other doors, workers; and which scripts start.

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
from kdskills.app.identity import PROFILES
from kdskills.app.operations.table import Context
from kdskills.app.wire import json_text
from kdskills.doors.cli.derived import AT_CLI, Json, Row, Trust, Word, answer, host_of, run, run_loop, split, trusting
from kdskills.doors.cli.output import console, counted, disarmed, failing, line, one_line, print_json, table
from kdskills.doors.cli.packages import env
from kdskills.errors import BadRequest, MissingExtra


def _print_version(given: bool) -> None:
    if given:
        sys.stdout.write(f"kdskills {kdskills.__version__}\n")
        raise typer.Exit


def version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options of the program itself."""


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
EXTRAS: Final = {"serve": "service", "mcp": "mcp", "nats": "service", "ui": "service"}


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


def ui(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")] = Path(),
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT on loopback; port 0 takes any that is free.")
    ] = "127.0.0.1:0",
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the link, and open no browser.")] = False,
    trust: Trust = False,
) -> None:
    """Show a bundle's folder as pages in a browser, live, without a service: skills, why, prompts, turns, evaluations."""
    with failing(as_json=False):
        door("ui")(host_of(ctx), bundle, listen=listen, browser=not no_open, trust=trust)


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


#: Clients of MCP that start their servers themselves: the file of theirs, and the word under which it has servers.
CLIENTS: Final = {
    "claude-code": (".mcp.json of the project", "mcpServers"),
    "claude-desktop": ("claude_desktop_config.json", "mcpServers"),
    "codex": ("~/.codex/config.toml", "mcp_servers"),
    "cursor": (".cursor/mcp.json of the project, or ~/.cursor/mcp.json", "mcpServers"),
    "gemini": (".gemini/settings.json of the project, or ~/.gemini/settings.json", "mcpServers"),
    "vscode": (".vscode/mcp.json of the project", "servers"),
    "zed": ("Zed's settings.json", "context_servers"),
}


def mcp_config(
    ctx: typer.Context, client: Annotated[str, typer.Argument(help=f"One of {', '.join(CLIENTS)}.")]
) -> None:
    """Print what a client's own file needs, to be served as the options of `kdskills mcp` before this word say."""
    assert ctx.parent is not None
    options = {str(word.name): word.default for word in ctx.parent.command.params}
    words = {name: ctx.parent.params[name] for name in options if ctx.parent.params[name] != options[name]}
    with failing(as_json=False):
        if client not in CLIENTS:
            raise BadRequest(f"clients are {', '.join(CLIENTS)}; not {client!r}", code="client_unknown")
        if "http" in words:
            raise BadRequest(
                "a client that is told an address starts nothing: give it the address itself", code="usage"
            )
        if words.get("profile", PROFILES[0]) not in PROFILES:
            raise BadRequest(f"profiles are {', '.join(PROFILES)}; not {words['profile']!r}", code="profile_unknown")
        file, servers = CLIENTS[client]
        program = Path(sys.executable).with_name("kdskills")  # clients that people start do not have our PATH
        entry: dict[str, Any] = {"type": "stdio"} if client == "vscode" else {}
        entry["command"] = str(program) if program.exists() else "kdskills"
        entry["args"] = ["mcp", *(part for name, text in words.items() for part in (f"--{name}", text))]
        bundle = host_of(ctx).settings.bundle
        if bundle is not None:
            entry["env"] = {"KDSKILLS_BUNDLE": str(bundle.absolute())}
        if client == "codex":
            facts = {name: json.dumps(fact) for name, fact in entry.items() if name != "env"}
            facts |= {f"env.{name}": json.dumps(text) for name, text in entry.get("env", {}).items()}
            text = f"[{servers}.kdskills]\n" + "\n".join(f"{name} = {fact}" for name, fact in facts.items())
        else:
            text = json.dumps({servers: {"kdskills": entry}}, indent=2)
        sys.stderr.write(f"for {file}:\n")
        sys.stdout.write(f"{text}\n")


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


def run_script(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")],
    skill: Annotated[str, typer.Argument(help="The skill, by id.")],
    path: Annotated[str, typer.Argument(help="The script, such as scripts/report.py.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, options too.")] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--file", help="File the script gets a copy of, under the same relative path.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the files the script makes.")] = None,
    timeout: Annotated[float, typer.Option("--timeout-s", help="Seconds the script may take.")] = 60.0,
    consumer: Annotated[str | None, typer.Option("--consumer", "-c", help="Whose view of the skills holds.")] = None,
    executor: Annotated[str | None, typer.Option("--executor", "-e", help="Engine to run in.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run one script behind the wall, without a model, and end with its exit code; options come before BUNDLE."""
    arguments: dict[str, Any] = {
        "bundle": bundle,
        "skill": skill,
        "path": path,
        "args": args or [],
        "timeout_s": timeout,
    }
    arguments |= {"files": files or [], "out": out, "consumer": consumer, "executor": executor}
    output = answer(ctx, "scripts.run", arguments, script_outcome, as_json=as_json, trust=trust)
    raise typer.Exit(EXIT_KILLED if output.exit_code is None else output.exit_code)


def shell(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")],
    skill: Annotated[str, typer.Argument(help="The skill, by id.")],
    script: Annotated[str, typer.Argument(help="The script whose sandbox it is; the skill's first when omitted.")] = "",
    files: Annotated[list[Path] | None, typer.Option("--file", help="File that is copied into the sandbox.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the files that are made.")] = None,
    consumer: Annotated[str | None, typer.Option("--consumer", "-c", help="Whose view of the skills holds.")] = None,
    executor: Annotated[str | None, typer.Option("--executor", "-e", help="Engine to run in.")] = None,
    trust: Trust = False,
) -> None:
    """Open a shell in the sandbox of a script, with its packages, files and limits; needs a terminal."""
    from kdskills.app.operations.scripts import ScriptRunInput, open_shell

    with failing(as_json=False):
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise BadRequest("a shell needs a terminal on standard input and output", code="terminal_missing")
        arguments = ScriptRunInput(
            bundle=bundle,
            skill=skill,
            path=script,
            files=tuple(files or ()),
            out=out,
            consumer=consumer,
            executor=executor,
        )
        screen = sys.stdin.fileno(), sys.stdout.fileno()

        def do(trusted: bool) -> Any:
            return run_loop(open_shell(host_of(ctx), arguments, Context(AT_CLI, trust=trusted), screen))

        output = trusting(do, trust=trust, asks=True)
        script_outcome(output)
    raise typer.Exit(EXIT_KILLED if output.exit_code is None else output.exit_code)


@Row(
    env,
    "suggest",
    "environments.suggest",
    "Tell which image profiles have the programs and packages that skills need; exit 1 when the image misses some.",
    positional=("bundle", "skills"),
    trust=True,
)
def profiles(answer: Any) -> None:
    """Print what each profile would bring, and what none has."""
    out = console()
    for row in answer.profiles:
        out.print(f"[bold]{line(row.profile)}[/] {line(', '.join(row.programs + row.packages))}", soft_wrap=True)
        if row.absent:
            out.print(f"    not on this machine: {line(', '.join(row.absent))}", soft_wrap=True)
    for title, names in (("programs in no profile", answer.programs), ("packages in no profile", answer.packages)):
        if names:
            out.print(f"{title}: {line(', '.join(names))}", soft_wrap=True)
    if answer.ok:
        out.print("[green]the image has all that skills need[/]")


@Row(
    env,
    "probe",
    "scripts.probe",
    "Start every script with `--help`, and tell which lack something; exit 1 when fewer start than --at-least.",
    positional=("bundle", "skills"),
    words={"at_once": Word(ranged=True), "at_least": Word(ranged=True)},
    trust=True,
)
def probed(answer: Any) -> None:
    """Print a table of scripts, and how many of them start."""
    rows = table("skill", "script", "starts", "missing", "seconds")
    for row in answer.rows:
        state = "[green]yes[/]" if row.started else "[red]no[/]"
        words = ", ".join(row.missing) or (row.code or row.reason if not row.started else "")
        rows.add_row(line(row.skill), line(row.path), state, line(words), f"{row.seconds:.2f}")
    console().print(rows)
    colour = "green" if answer.ok else "red"
    console().print(f"[{colour}]{answer.started} of {counted(answer.scripts, 'script')} start, {answer.percent:g} %[/]")


#: What follows the script is the script's, options too.
AS_WRITTEN: Final = {"allow_interspersed_args": False}
#: Of a script that was ended from outside and has no exit code of its own.
EXIT_KILLED: Final = 137


def script_outcome(answer: Any) -> None:
    """Write what a script wrote, each stream to its own, and tell what became of its files."""
    for stream, text in ((sys.stdout, answer.stdout), (sys.stderr, answer.stderr)):
        stream.write(disarmed(text) if stream.isatty() else text)
        stream.flush()
    notes = [answer.note] if answer.note else []
    notes += [
        f"the first part of {name} is left out" for name in ("stdout", "stderr") if getattr(answer, f"{name}_truncated")
    ]
    if answer.status not in {"ok", "nonzero"}:
        notes.append(f"the script was ended: {answer.status}")
    for file in answer.files:
        size = f"{file.path} ({counted(file.size, 'byte')})"
        notes.append(f"{size} written to {file.saved}" if file.saved else f"{size} made; --out DIR brings it here")
    notes += [f"{path} not brought back: {reason}" for path, reason in answer.dropped]
    for note in notes:
        typer.echo(one_line(note), err=True)
