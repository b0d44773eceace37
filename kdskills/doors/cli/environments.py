"""Commands on what scripts need: packages of skills, and scripts run by their authors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kdskills.app.operations.table import Context
from kdskills.doors.cli.derived import AT_CLI, Json, Row, Trust, Word, answer, host_of, trusting
from kdskills.doors.cli.output import console, counted, disarmed, failing, line, one_line, table
from kdskills.errors import BadRequest

if TYPE_CHECKING:
    from kdskills.app.operations.table import Emit

env = typer.Typer(help="Packages that skills need: locked, downloaded and unpacked.", no_args_is_help=True)


def steps() -> Emit:
    """Return what prints the steps of bringing packages as they happen."""
    out = console(stderr=True)

    def print_step(event: Any) -> None:
        size = f" ({mebibytes(event.size)})" if event.size else ""
        out.print(f"[dim]{event.kind}[/] {line(event.subject)}{size}", soft_wrap=True)

    return print_step


def mebibytes(size: int) -> str:
    """Return bytes for people."""
    return f"{size / (1024 * 1024):.1f} MiB"


STATES: Final = MappingProxyType({"built": "green", "locked": "cyan", "planned": "cyan", "unneeded": "dim"})


@Row(
    env,
    "plan",
    "environments.plan",
    "Find the exact packages that skills need and show their sizes; nothing is written.",
    positional=("bundle", "skills"),
    trust=True,
    narrator=steps,
)
@Row(
    env,
    "lock",
    "environments.lock",
    "Write the exact packages that skills need to kdskills.lock; exit 1 when some cannot be had.",
    positional=("bundle", "skills"),
    trust=True,
    narrator=steps,
)
@Row(
    env,
    "build",
    "environments.build",
    "Download and unpack what kdskills.lock has; nothing of a package runs.",
    positional=("bundle", "skills"),
    trust=True,
    narrator=steps,
)
@Row(
    env,
    "show",
    "environments.show",
    "Show what skills need, what is locked and what is built; exit 1 when something is missing.",
    positional=("bundle", "skills"),
    trust=True,
)
@Row(
    env,
    "clean",
    "environments.clean",
    "Remove what is built for skills, but for what programs use now.",
    positional=("bundle", "skills"),
    trust=True,
)
def environments(answer: Any) -> None:
    """Print how each environment stands, and what is wrong with it."""
    out = console()
    for row in answer.rows:
        facts = [counted(len(row.packages), "package")] if row.packages else []
        facts += [f"{mebibytes(row.download)} to download"] if row.download and not row.size else []
        facts += [f"{mebibytes(row.size)} on disk"] if row.size else []
        state = f"[{STATES.get(row.state, 'red')}]{row.state}[/]"
        out.print(f"[bold]{line(row.key)}[/] {state} {', '.join(facts)}".rstrip(), soft_wrap=True)
        words = row.packages or row.requirements
        if words:
            out.print(f"    {line(', '.join(words))}", soft_wrap=True)
        if row.reason:
            out.print(f"    {line(f'{row.code}: ' if row.code else '')}{line(row.reason)}", soft_wrap=True)
    if not answer.rows:
        out.print(f"no skill of {line(answer.bundle)} declares packages")
    if answer.changed:
        out.print("[green]kdskills.lock written[/]")
    if answer.freed:
        out.print(f"{mebibytes(answer.freed)} are free again")


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


@env.command("shell")
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
    import asyncio

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
            return asyncio.run(open_shell(host_of(ctx), arguments, Context(AT_CLI, trust=trusted), screen))

        output = trusting(do, trust=trust, asks=True)
        script_outcome(output)
    raise typer.Exit(EXIT_KILLED if output.exit_code is None else output.exit_code)


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
