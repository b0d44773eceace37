"""The `kdskills` command: every command is an operation of the Host, printed for people or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdskills.app.resources import shipped_bundle
from kdskills.doors.cli import bench as benchmarks
from kdskills.doors.cli import codex as codex_output
from kdskills.doors.cli import db, doors, jobs, mcp, show, token, tool, within, worker
from kdskills.doors.cli.output import failing, print_json
from kdskills.doors.cli.within import HostSource, ask, trusting

if TYPE_CHECKING:
    from kdskills.app import Host

app = typer.Typer(
    name="kdskills",
    help="Agent Skills that can be trusted in production.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Bundle = Annotated[Path, typer.Argument(help="The bundle's folder.", show_default=False)]
Consumer = Annotated[str | None, typer.Option("--consumer", "-c", help="Consumer that asks; none is anonymous.")]
Tools = Annotated[str | None, typer.Option("--tools", help="Tools the consumer has, comma-separated; '' means none.")]
Internal = Annotated[bool, typer.Option("--include-internal", help="Grant skills of namespace `internal`, too.")]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="`replay`, `openai:NAME`, `anthropic:NAME`, `ollama:NAME`, …")
]
Executor = Annotated[str | None, typer.Option("--executor", "-e", help="`auto`, or an engine's name.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code of the bundle's folder with your rights.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Folder for produced files and the transcript; else the files stay where they are made."
    ),
]


def answer(
    ctx: typer.Context,
    operation: str,
    printer: Callable[[Any], int | None],
    *,
    as_json: bool,
    strict: bool = False,
    trust: bool = False,
    asks: bool = True,
    **arguments: Any,
) -> None:
    """Run an operation, print its answer, and exit with the printer's code; *asks* as in `trusting`."""
    with failing(as_json=as_json):
        output = trusting(
            lambda trusted: within.run(ctx, lambda host: ask(host, operation, arguments, trust=trusted)),
            trust=trust,
            asks=asks and not as_json,
        )
        code = printer(output) if not as_json else show.exit_code(output, strict=strict)
        if as_json:
            print_json(output)
    raise typer.Exit(code or 0)


def split(text: str | None) -> tuple[str, ...] | None:
    """Split a comma-separated option; None stays None, '' is nothing."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


@app.command()
def check(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(help="A skill folder or file, a folder of skills, or a bundle.")],
    verdict: Annotated[str, typer.Option(help="`lenient`, `spec` or `skills-ref`.")] = "lenient",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended without touching a body.")] = False,
    rename: Annotated[bool, typer.Option("--rename", help="With --fix: fit folder names to skill names.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix: show the diff, change nothing.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a skill, a folder of skills or a bundle; exit 0 without errors, 1 with."""
    if (rename or dry_run) and not fix:
        raise typer.BadParameter("--rename and --dry-run go with --fix")
    if fix:
        answer(
            ctx,
            "skills.fix",
            lambda found: show.fixes(found, strict=strict),
            as_json=as_json,
            strict=strict,
            trust=trust,
            asks=False,
            path=path,
            rename=rename,
            dry_run=dry_run,
            verdict=verdict,
        )
    answer(
        ctx,
        "skills.check",
        lambda found: show.check(found, strict=strict),
        as_json=as_json,
        strict=strict,
        trust=trust,
        asks=False,
        path=path,
        verdict=verdict,
    )


@app.command("list")
def list_skills(
    ctx: typer.Context,
    bundle: Bundle,
    consumer: Consumer = None,
    tools: Tools = None,
    internal: Internal = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """List a bundle's skills as a consumer sees them."""
    answer(
        ctx,
        "skills.list",
        show.skills,
        as_json=as_json,
        trust=trust,
        bundle=bundle,
        consumer=consumer,
        tools=split(tools),
        include_internal=internal,
    )


@app.command("show")
def show_skill(
    ctx: typer.Context,
    bundle: Bundle,
    ref: Annotated[str, typer.Argument(help="Full id, bare id or short id.")],
    consumer: Consumer = None,
    internal: Internal = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show one skill in full."""
    answer(
        ctx,
        "skills.show",
        show.skill,
        as_json=as_json,
        trust=trust,
        bundle=bundle,
        ref=ref,
        consumer=consumer,
        include_internal=internal,
        by="code",
    )


@app.command()
def render(
    ctx: typer.Context,
    bundle: Bundle,
    refs: Annotated[list[str] | None, typer.Argument(help="Skills of a generator's block.")] = None,
    consumer: Annotated[
        str | None,
        typer.Option("--consumer", "-c", help="Consumer that asks; for a prompt the solver's, else anonymous."),
    ] = None,
    tools: Tools = None,
    form: Annotated[
        str | None,
        typer.Option(help="`prompt`, or a catalog alone: `gallery`, `xml` or `json`.", show_default="prompt"),
    ] = None,
    skill: Annotated[list[str] | None, typer.Option("--skill", "-s", help="Skill loaded before the prompt.")] = None,
    model: Model = None,
    variant: Annotated[str, typer.Option(help="Text of a skill in a block: `full` or `compact`.")] = "full",
    budget: Annotated[int | None, typer.Option(help="Tokens a catalog may take.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print the prompt a solver would send first; with skills the block a generator gets; with a budget or tools a catalog."""
    answer(
        ctx,
        "skills.render",
        show.rendered,
        as_json=as_json,
        trust=trust,
        bundle=bundle,
        refs=tuple(refs or ()),
        consumer=consumer,
        tools=split(tools),
        form=form,
        skills_loaded=tuple(skill or ()),
        model=model,
        variant=variant,
        budget=budget,
    )


@app.command()
def why(
    ctx: typer.Context,
    ref: Annotated[str, typer.Argument(help="Full id, bare id or short id.")],
    bundle: Annotated[Path, typer.Option("--bundle", "-b", help="The bundle's folder.")] = Path(),
    consumer: Consumer = None,
    tools: Tools = None,
    internal: Internal = False,
    by: Annotated[str, typer.Option(help="Who starts the skill: `model`, `user` or `code`.")] = "model",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Explain, rule by rule, why a skill is granted or refused; exit 0 if granted, 1 if not."""
    answer(
        ctx,
        "skills.why",
        show.why,
        as_json=as_json,
        trust=trust,
        bundle=bundle,
        ref=ref,
        consumer=consumer,
        tools=split(tools),
        include_internal=internal,
        by=by,
    )


@app.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """Run the self-checks of every part and say what would cure what fails."""
    answer(ctx, "doctor", show.doctor, as_json=as_json)


@app.command()
def run(
    ctx: typer.Context,
    bundle: Bundle,
    request: Annotated[str | None, typer.Argument(help="What to do; none means the request of demo.yaml.")] = None,
    model: Model = None,
    executor: Executor = None,
    consumer: Annotated[
        str, typer.Option("--consumer", "-c", help="Consumer the solver acts as.")
    ] = "solver.react.decision",
    answer_role: Annotated[str | None, typer.Option(help="Generator that writes the answer.")] = None,
    file: Annotated[list[Path] | None, typer.Option("--file", "-f", help="File handed in with the request.")] = None,
    skill: Annotated[
        list[str] | None, typer.Option("--skill", "-s", help="Skill loaded before the first decision.")
    ] = None,
    out: Out = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run one turn on a bundle."""
    _turn(
        ctx,
        as_json=as_json,
        trust=trust,
        arguments={
            "bundle": bundle,
            "request": request,
            "model": model,
            "executor": executor,
            "consumer": consumer,
            "answer_role": answer_role,
            "files": tuple(file or ()),
            "skills": tuple(skill or ()),
            "out": out,
        },
    )


@app.command("demo")
def demo_command(
    ctx: typer.Context,
    bundle: Annotated[Path | None, typer.Argument(help="A bundle; the report press when omitted.")] = None,
    model: Model = None,
    executor: Executor = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for produced files and the transcript.")] = Path(
        "demo-output"
    ),
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run the main job: a question, a skill, a script behind a wall, a cited answer and a report on disk."""
    with failing(as_json=as_json):
        chosen = bundle or shipped_bundle("press")
    arguments = {"bundle": chosen, "model": model, "executor": executor, "out": out}
    _turn(ctx, as_json=as_json, trust=trust, arguments=arguments)


def _turn(ctx: typer.Context, *, as_json: bool, trust: bool, arguments: dict[str, Any]) -> None:
    from kdskills.doors.cli.demo import run_turn  # only turns are narrated

    run_turn(ctx, as_json=as_json, trust=trust, arguments=arguments)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(ctx: typer.Context, name: Annotated[str, typer.Argument(help="Benchmark: `skills`, `imports`, …")]) -> None:
    """Run a benchmark and print its table of ratios; exit 1 when a bound is not held."""
    with failing(as_json=False):
        code = benchmarks.run(name, list(ctx.args))
    raise typer.Exit(code)


app.add_typer(jobs.app, name="jobs")
app.command("logs")(jobs.logs)
app.command("tool")(tool.command)
app.command("worker")(worker.command)

turn = typer.Typer(help="What happened in turns.", no_args_is_help=True)
app.add_typer(turn, name="turn")


@turn.command("show")
def show_turn(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="TRANSCRIPT", help="The turn's transcript, `<turn id>.jsonl`.")],
    full: Annotated[bool, typer.Option("--full", help="Print long prompts and results in full.")] = False,
    as_json: Json = False,
) -> None:
    """Show a turn from its transcript: prompts, tool calls, sources, citations, files and errors, in order."""
    from kdskills.doors.cli import transcript  # no other command prints one

    answer(ctx, "turns.show", lambda found: transcript.show(found, full=full), as_json=as_json, transcript=path)


codex = typer.Typer(help="Codex app-servers and the remote skills of their sessions.", no_args_is_help=True)
app.add_typer(codex, name="codex")


@codex.command("probe")
def probe_command(
    ctx: typer.Context,
    binary: Annotated[str | None, typer.Option("--binary", help="Program; the configured one otherwise.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Ask again although an answer is kept.")] = False,
    as_json: Json = False,
) -> None:
    """Find out what a Codex app-server really does, with an empty home and a fake model; no login, no tokens."""
    answer(ctx, "codex.probe", codex_output.probed, as_json=as_json, binary=binary, force=force)


@codex.command("receipts")
def receipts_command(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session: the server's thread id.")],
    as_json: Json = False,
) -> None:
    """Show what each turn of a session was run with: catalog, tools, skills and calls."""
    answer(ctx, "codex.receipts", codex_output.receipts, as_json=as_json, session=session)


image = typer.Typer(help="The tree that sandboxes run in.", no_args_is_help=True)
app.add_typer(image, name="image")


@image.command()
def build(
    ctx: typer.Context,
    offline: Annotated[
        bool, typer.Option("--offline/--registry", help="From this host's own files, or by a registry's image.")
    ] = True,
    tar: Annotated[bool, typer.Option("--tar", help="Also write the archive that `docker import` takes.")] = False,
    as_json: Json = False,
) -> None:
    """Build the sandbox tree from this host's Python, libraries and tools."""
    answer(ctx, "image.build", show.image, as_json=as_json, offline=offline, tar=tar)


@app.command("new")
def new_command(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(help="`bundle`, `skill` or `plugin`.")],
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    into: Annotated[Path, typer.Option("--into", help="Folder that the new folder is made in.")] = Path(),
    as_json: Json = False,
) -> None:
    """Make the files to begin a bundle, a skill or a plugin with."""
    answer(ctx, "new", show.created, as_json=as_json, kind=kind, name=name, into=into)


@app.command("plugins")
def plugins_command(ctx: typer.Context, as_json: Json = False) -> None:
    """List plugins, the hooks they answer and the names they registered."""
    answer(ctx, "plugins", show.plugins, as_json=as_json)


app.command("serve")(doors.serve)
app.add_typer(mcp.app, name="mcp")
app.add_typer(token.app, name="token")
app.add_typer(db.app, name="db")


def build_cli(host: Host | None = None) -> typer.Typer:
    """Return the application with the commands of *host*'s plugins; the shipped one stays as it is.

    Args:
        host: The Host that commands work with; without one they make their own when they need it, and no plugin adds
            commands.
    """
    cli = typer.Typer(
        name="kdskills",
        help="Agent Skills that can be trusted in production.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"obj": HostSource(host)},
    )
    cli.registered_commands = list(app.registered_commands)
    cli.registered_groups = list(app.registered_groups)
    if host is not None:
        host.answers.register_commands(cli)
    return cli
