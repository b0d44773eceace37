"""The table of commands that are made of operations: each row stands above the printer of its answers.

Printers show answers to people; `--json` needs none. What only one of them needs is imported where it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from kdskills.app.resources import shipped_bundle
from kdskills.doors.cli.derived import Json, Row, Trust, Word, answer, format_option, split
from kdskills.doors.cli.output import (
    EXIT_NEGATIVE,
    EXIT_OK,
    console,
    counted,
    disarmed,
    dollars,
    findings,
    from_here,
    line,
    mark,
    plain,
    print_github,
    print_sarif,
    shortened,
    table,
)
from kdskills.doors.cli.packages import offer_packages
from kdskills.errors.reports import ReportRow, sarif_log

#: Commands on skills and turns, and those on the installation; the help lists them in this order.
skill_commands = typer.Typer()
installation_commands = typer.Typer()
conversation = typer.Typer(help="What was said in sessions of solvers.", no_args_is_help=True)
codex = typer.Typer(help="Codex app-servers and the remote skills of their sessions.", no_args_is_help=True)
image = typer.Typer(help="The tree that sandboxes run in.", no_args_is_help=True)
mcp = typer.Typer()
db = typer.Typer(help="The service's database.", no_args_is_help=True)


@skill_commands.command()
def check(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(help="A skill folder or file, a folder of skills, or a bundle.")],
    verdict: Annotated[str, typer.Option(help="`lenient`, `spec` or `skills-ref`.")] = "lenient",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Tell findings of the audit, too.")] = False,
    select: Annotated[
        list[str] | None,
        typer.Option(
            help="Codes of findings, or how they begin, with commas or again: only these are told, whatever the bundle says; "
            "`all`: every one."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Codes of findings, or how they begin, that are left out; an error goes by its whole code."),
    ] = None,
    form: format_option(("sarif", "github")) = "text",  # type: ignore[valid-type]
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended without touching a body.")] = False,
    rename: Annotated[bool, typer.Option("--rename", help="With --fix: fit folder names to skill names.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix: show the diff, change nothing.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a skill, a folder of skills or a bundle; exit 0 without errors, 1 with."""
    if (rename or dry_run) and not fix:
        raise typer.BadParameter("--rename and --dry-run go with --fix")
    if audit and fix:
        raise typer.BadParameter("--audit mends nothing, and goes without --fix")
    if fix and form in CHECK_FORMATS:
        raise typer.BadParameter(f"--format {form} tells findings, and goes without --fix")
    arguments: dict[str, Any] = {"path": path, "verdict": verdict}
    arguments |= {"select": split(",".join(select or ())), "ignore": split(",".join(ignore or ()))}
    arguments |= {"rename": rename, "dry_run": dry_run} if fix else {"audit": audit}
    operation, printer = ("skills.fix", fixes) if fix else ("skills.check", summary)
    show = CHECK_FORMATS.get(form) or partial(printer, strict=strict)
    as_json = as_json or form == "json"
    output = answer(ctx, operation, arguments, show, as_json=as_json, trust=trust, asks=False)
    left = output.left if fix else output
    failed = output.negative or (strict and not (fix and dry_run) and left.warnings > 0)
    raise typer.Exit(EXIT_NEGATIVE if failed else EXIT_OK)


def summary(answer: Any, *, strict: bool = False) -> None:
    """Print findings and a summary line; red with errors, or with warnings under --strict."""
    findings(answer.diagnostics)
    failed = answer.errors > 0 or (strict and answer.warnings > 0)
    colour = "red" if failed else "green"
    console().print(
        f"[{colour}]{counted(answer.skills, 'skill')} checked as {answer.verdict}: {counted(answer.errors, 'error')}, "
        f"{counted(answer.warnings, 'warning')}, {counted(answer.infos, 'info')}"
        f"{f', {answer.left_out} left out' if answer.left_out else ''}[/]"
    )


def check_rows(answer: Any) -> list[ReportRow]:
    """Return findings with their paths from the working folder; one without a file has that of what was checked."""
    rows = []
    for finding in answer.diagnostics:
        paths = [os.path.join(folder, finding.path or "") for folder in (answer.base, answer.path)]  # noqa: PTH118
        path = next(filter(os.path.lexists, paths), paths[0]) if finding.path else answer.path
        rows.append(ReportRow(finding.model_copy(update={"path": from_here(path)})))
    return rows


def check_sarif(answer: Any) -> None:
    """Print findings as SARIF."""
    from kdskills.app.operations.checking import code_rules

    print_sarif(sarif_log("kdskills check", code_rules(), check_rows(answer)))


CHECK_FORMATS: Final[Mapping[str, Any]] = MappingProxyType(
    {"sarif": check_sarif, "github": lambda answer: print_github(check_rows(answer))}
)


def fixes(answer: Any, *, strict: bool = False) -> None:
    """Print what was mended, as diffs, what was left alone, and what is found now; a dry run only says."""
    out = console()
    for change in answer.changes:
        for deed in change.done:
            word = "would mend" if answer.dry_run else "mended"
            out.print(f"[green]{word}[/] {line(change.path)}: {line(deed)}", soft_wrap=True)
        for deed in change.skipped:
            out.print(f"[yellow]left alone[/] {line(change.path)}: {line(deed)}", soft_wrap=True)
        if change.diff:
            from rich.syntax import Syntax

            out.print(Syntax(disarmed(change.diff), "diff", background_color="default"))
    if not any(change.done for change in answer.changes):
        out.print("nothing to mend")
    if not answer.dry_run:
        summary(answer.left, strict=strict)


@Row(
    skill_commands,
    "list",
    "skills.list",
    positional=("bundle",),
    words={"sort": Word(help="Order: `id`, `name`, `state`, or `tokens` with the most expensive first.")},
    trust=True,
)
def skills(answer: Any) -> None:
    """List a bundle's skills as a consumer sees them."""
    colours = {"listed": "green", "hidden": "cyan", "unlisted": "cyan", "refused": "red", "invalid": "bold red"}
    out = console()
    longest = max((len(row.full_id) for row in answer.skills), default=5)
    room = max(out.width - longest - len("SK000  refused  ~tokens      "), 24)
    rows = table("", "skill", "state", "~tokens", "what it does, or why not")
    for row in answer.skills:
        words = shortened(f"{row.code}: {row.reason}" if row.code else row.description, room)
        state = f"[{colours[row.state]}]{row.state}[/]"
        rows.add_row(row.short_id or "", plain(row.full_id), state, str(row.tokens or ""), plain(words))
    out.print(f"[bold]{line(answer.bundle)}[/] for {line(answer.consumer) or 'an anonymous consumer'}")
    out.print(rows)
    for row in answer.skills:
        if row.source:
            resolved = f" at {row.resolved[:19]}" if row.resolved else ""
            out.print(f"{line(row.full_id)} {row.lock}: {line(row.source)}{line(resolved)}", soft_wrap=True)
    if answer.next_cursor:
        more = f"{len(answer.skills)} of {answer.total}; for the next: --cursor {line(answer.next_cursor)}"
        out.print(more, soft_wrap=True)
    findings(answer.diagnostics)


@Row(
    skill_commands,
    "search",
    "skills.search",
    "Find the skills that fit a task, among those a consumer is shown; exit 1 when none does.",
    positional=("bundle", "query"),
    words={
        "query": Word(
            help="What is to be done, in plain words; `--` before words that begin with a dash.", joined=True
        ),
        "limit": Word(short="-n", ranged=True),
        "offset": Word(ranged=True),
    },
    trust=True,
)
def hits(answer: Any) -> None:
    """Print two lines a hit: what it is, with the words that matched and where, and what it does."""
    out = console()
    out.print(f"[bold]{line(answer.bundle)}[/] for {line(answer.consumer) or 'an anonymous consumer'}")
    numbers = max((len(row.short_id) for row in answer.hits), default=0)
    ids = min(max((len(row.full_id) for row in answer.hits), default=0), MAX_ID_COLUMN)
    if answer.hits:
        out.print(f"[bold]{'':{numbers}}  {'skill':{ids}}   score  ~tokens  matched[/]", soft_wrap=True)
    digits = 2 if any(row.score >= 0.1 for row in answer.hits) else 4  # sums of reciprocal ranks are small
    for row in answer.hits:
        facts = f"  {line(row.full_id):{ids}}  {row.score:6.{digits}f}  {row.tokens:7}  "
        matched = shortened(strongest(row.why), max(out.width - numbers - len(facts), MIN_TEXT))
        out.print(f"{row.short_id:{numbers}}{facts}{plain(matched)}", soft_wrap=True)
        about = shortened(row.description, max(out.width - numbers - 2, MIN_TEXT))
        out.print(f"[dim]{'':{numbers}}  {plain(about)}[/]", soft_wrap=True)
    if answer.hits:
        end = answer.offset + len(answer.hits)
        span = counted(len(answer.hits), "hit") if end == len(answer.hits) else f"hits {answer.offset + 1} to {end}"
        words = f"{span} of {answer.total}; for the next: --offset {end}" if answer.more else span
    else:
        words = no_hits(answer)
    out.print(words, soft_wrap=True)
    findings(answer.diagnostics)


MAX_ID_COLUMN: Final = 40
"""Characters that ids are padded to; a longer one moves its own line only."""

MIN_TEXT: Final = 24
"""Characters of a text that are shown however narrow the terminal is."""


def strongest(why: Mapping[str, Iterable[str]]) -> str:
    """Return the words that matched, each in the first of the fields it stands in, which counts most."""
    printed: set[str] = set()
    parts = []
    for name, words in why.items():
        new = [word for word in words if word not in printed]
        printed.update(new)
        parts += [f"{name}: {' '.join(new)}"] if new else []
    return "; ".join(parts)


def no_hits(answer: Any) -> str:
    """Return why there is no hit, and what to do next."""
    if answer.total:
        return f"no more hits: there are {answer.total} in all"
    weak = "skills have some of these words, but none fits well enough to be an answer"
    reason = weak if answer.abstained else "no skill that was searched has any of these words"
    return (
        f"nothing fits: {reason}\n"
        "    [green]try:[/] other words for the task; kdskills list --filter WORD shows what there is, and kdskills why SKILL\n"
        "    whether this consumer is shown it"
    )


@Row(
    skill_commands,
    "show",
    "skills.show",
    positional=("bundle", "ref"),
    constants={"by": "code"},
    hidden=("tools",),
    trust=True,
)
def skill(answer: Any) -> None:
    """Show one skill in full."""
    from rich.markdown import Markdown
    from rich.panel import Panel

    out = console()
    facts = table("", "")
    facts.show_header = False
    for name in ("full_id", "name", "layer", "location", "path", "disclosure", "digest", "tree_digest"):
        facts.add_row(name, line(str(getattr(answer, name) or "")))
    facts.add_row("size", f"{counted(answer.size, 'byte')}, ~{answer.tokens} tokens")
    for name in ("imports", "closure", "tools"):
        if getattr(answer, name):
            facts.add_row(name, line(", ".join(getattr(answer, name))))
    out.print(facts)
    out.print(Panel(Markdown(disarmed(answer.body)), title="instructions", title_align="left"))
    for script in answer.scripts:
        needs = ["starts" if script.starts else "does not start"]
        needs += [f"{name} {', '.join(words)}" for name in _NEEDS if (words := getattr(script, name))]
        needs += [f"packages {script.packages}"] if script.packages else []
        out.print(f"script {line(script.path)}: {line('; '.join(needs))}", soft_wrap=True)
    for row in answer.sources:
        words = f"{line(str(row.get('sid', '-')))}: {line(str(row.get('title', '')))} {line(str(row.get('url', '')))}"
        out.print(f"source {words}", soft_wrap=True)
    findings(answer.diagnostics)


_NEEDS: Final = ("requirements", "node", "programs", "origins", "suggested", "missing")


@Row(
    skill_commands,
    "render",
    "skills.render",
    positional=("bundle", "refs"),
    words={
        "consumer": Word(short="-c", help="Consumer that asks; for a prompt the solver's, else anonymous."),
        "form": Word(help="`prompt`, or a catalog alone: `gallery`, `xml` or `json`.", shown="prompt"),
        "skills_loaded": Word("--skill", "-s", help="Skill loaded before the prompt."),
    },
    hidden=("include_internal",),
    trust=True,
)
def rendered(answer: Any) -> None:
    """Print the prompt a solver would send first; with skills the block a generator gets; with a budget or tools a
    catalog.
    """
    print(disarmed(answer.text) if sys.stdout.isatty() else answer.text)
    notes = [f"~{answer.tokens} tokens"]
    if answer.form == "prompt":
        names = ", ".join(str(tool["name"]) for tool in answer.offered)
        tool_note = f", ~{answer.tool_tokens} of tools sent beside it: {names}" if answer.offered else ""
        notes = [f"{notes[0]}: ~{answer.instruction_tokens} of text{tool_note}"]
    elif answer.form != "block":
        notes.append(f"the catalog alone, as {answer.form}; a solver sends --form prompt")
    if answer.total is not None:
        notes.append(f"level {answer.level}, shown {answer.shown}/{answer.total}")
    notes += [f"{ref}: {code}" for ref, code in answer.refused.items()]
    notes += [f"{diagnostic.code}: {diagnostic.message}" for diagnostic in answer.diagnostics]
    sys.stdout.flush()  # text that cannot be written is told alone: what it costs would be beside the point
    console(stderr=True).print(f"[dim]{line('; '.join(notes))}[/]", soft_wrap=True)


@Row(
    skill_commands,
    "why",
    "skills.why",
    positional=("ref",),
    words={
        "bundle": Word(short="-b", help="The bundle's folder.", default=Path()),
        "by": Word(help="Who starts the skill: `model`, `user` or `code`.", default="model"),
    },
    trust=True,
)
def why(answer: Any) -> None:
    """Explain, rule by rule, why a skill is granted or refused; exit 0 if granted, 1 if not."""
    out = console()
    verdict = "[green]granted[/]" if answer.granted else f"[red]refused: {answer.code}[/]"
    out.print(
        f"[bold]{line(answer.full_id or answer.ref)}[/] for {line(answer.consumer) or 'an anonymous consumer'}: {verdict}"
    )
    words = {"pass": "[green]  pass[/]", "refuse": "[red]refuse[/]", "unknown": "[dim]     -[/]"}
    for step in answer.steps:
        out.print(f"  {step.step} {words[step.result]}  {step.title}: {line(step.reason)}", soft_wrap=True)
        if step.rule and step.source:
            out.print(f"             [dim]rule {line(repr(step.rule))} in {line(step.source)}[/]", soft_wrap=True)
    for note in answer.notes:
        out.print(f"note: {line(note)}", soft_wrap=True)


@Row(skill_commands, "doctor", "doctor")
def doctor(answer: Any) -> None:
    """Run the self-checks of every part and say what would cure what fails."""
    out = console()
    rows = table("", "part", "found", "cure")
    for check in answer.checks:
        rows.add_row(mark(ok=check.ok), check.name, plain(check.found), "" if check.ok else plain(check.cure))
    out.print(rows)
    for engine in answer.engines:
        out.print(f"\n[bold]{engine.name}[/] {engine.level} {mark(ok=engine.ok)}")
        for check in engine.checks:
            out.print(f"  {mark(ok=check.ok)} {plain(check.name)}: {plain(check.found)}")
        if engine.limits:
            out.print(f"  [dim]limits enforced: {', '.join(engine.limits)}[/]")
        if not engine.ok and engine.cure:
            out.print(f"  [yellow]cure:[/] {plain(engine.cure)}")
    suffixes = ", ".join(f"{suffix} → {command[0]}" for suffix, command in answer.interpreters.items())
    out.print(f"\nscripts: {suffixes}")
    verdict = f"[green]{answer.chosen}[/]" if answer.chosen else f"[red]none: {plain(answer.refusal)}[/]"
    out.print(f"engine in force: {verdict}")


def narrator() -> Any:
    """Return what prints a turn as it happens."""
    from kdskills.doors.cli.turns import Narrator  # only turns are narrated

    return Narrator(console())


def teller() -> Any:
    """Return what also prints what a model writes, as it is written."""
    from kdskills.doors.cli.turns import Teller

    return Teller()


@Row(
    skill_commands,
    "demo",
    "solver.run",
    "Run the main job: a question, a skill, a script behind a wall, a cited answer and a report on disk.",
    positional=("bundle",),
    words={
        "bundle": Word(
            help="A bundle; the report press when omitted.", default=None, otherwise=lambda: shipped_bundle("press")
        ),
        "out": Word(short="-o", help="Folder for produced files and the transcript.", default=Path("demo-output")),
        "crowd": Word(ranged=True),
    },
    hidden=(
        *("request", "consumer", "answer_role", "files", "skills", "session", "user", "roles"),
        *("max_steps", "max_tokens", "temperature", "stream"),
    ),
    trust=True,
    prelude=offer_packages,
    narrator=narrator,
)
@Row(
    skill_commands,
    "run",
    "solver.run",
    "Run one turn on a bundle.",
    positional=("bundle", "request"),
    words={
        "files": Word("--file", "-f", help="File handed in with the request."),
        "skills": Word("--skill", "-s", help="Skill loaded before the first decision."),
        "crowd": Word(ranged=True),
        "max_steps": Word(ranged=True),
        "max_tokens": Word(ranged=True),
        "temperature": Word(ranged=True),
    },
    constants={"stream": True},
    trust=True,
    prelude=offer_packages,
    narrator=teller,
)
def end_of_turn(answer: Any) -> None:
    """Print the answer of a turn, its sources and where the files are; a narrator has an end of its own."""
    narrator().end(answer)


@Row(
    conversation, "list", "conversations.list", words={"user": Word(short="-u"), "limit": Word(short="-n", ranged=True)}
)
def conversations(answer: Any) -> None:
    """List conversations, by id."""
    listing = table("id", "consumer", "user", "turns", "last turn")
    for row in answer.conversations:
        cells = (row.conversation_id, row.consumer, row.user or "", row.number, str(row.touched_at)[:16])
        listing.add_row(*(line(str(cell)) for cell in cells))
    console().print(listing)
    if answer.next_cursor:
        console().print(f"there are more: kdskills conversation list --cursor {line(answer.next_cursor)}")


@Row(conversation, "show", "conversations.get", positional=("id",), words={"id": Word(metavar="ID")})
def dialogue(answer: Any) -> None:
    """Show what was asked and answered in a conversation."""
    for turn in answer.turns:
        counted_tokens = turn.input_tokens + turn.output_tokens > 0  # else nobody counted
        spent = f", {turn.input_tokens} tokens in, {turn.output_tokens} out" if counted_tokens else ""
        spent += "" if turn.cost is None else f", {dollars(turn.cost)}"
        head = f"[{str(turn.ended_at)[:16]}, {turn.status}{spent}]"
        typer.echo(f"{head}\n> {disarmed(turn.request)}\n{disarmed(turn.answer)}\n")


@Row(conversation, "export", "conversations.export", positional=("id",), words={"id": Word(metavar="ID")})
def export(answer: Any) -> None:
    """Print every message of a conversation as JSON."""
    import json

    typer.echo(json.dumps(answer.conversation, indent=2))


@Row(conversation, "undo", "conversations.undo", positional=("id",), words={"id": Word(metavar="ID")})
def undone(answer: Any) -> None:
    """Take back the last turn of a conversation, with all that was said in it; it cannot be undone."""
    console().print(f"taken back: {line(answer.request)}; {counted(answer.number, 'turn')} left", soft_wrap=True)


@Row(conversation, "delete", "conversations.delete", words={"idle_days": Word("--idle-days")})
def forgotten(answer: Any) -> None:
    """Forget a conversation, those of a user, or those nobody went on with for so many days; it cannot be undone."""
    console().print(f"{counted(answer.deleted, 'conversation')} forgotten")


MEANINGS: Final = MappingProxyType(
    {
        "unsubscribe": "threads can be released",
        "namespaces": "namespaces are understood",
        "built_ins": "tools of the server itself",
        "materialise": "a thread's file can be written without a model call",
        "context": "context reaches the model",
        "rewind": "turns can be taken back",
        "extra_roots": "skill folders reach open threads",
        "native": "a resume changes the tools",
        "reload": "a guarded reload changes the tools",
    }
)


@Row(codex, "probe", "codex.probe", words={"binary": Word(help="Program; the configured one otherwise.")})
def probe(answer: Any) -> None:
    """Find out what a Codex app-server really does, with an empty home and a fake model; no login, no tokens."""
    say = partial(console().print, markup=False, soft_wrap=True)
    when = "an earlier probe" if answer.cached else f"probed in {answer.seconds:.1f} s"
    say(f"{disarmed(answer.facts.user_agent)} ({when})")
    say(f"  {disarmed(answer.binary)}")
    for finding in answer.findings:
        observation = f": {disarmed(finding.seen)}" if finding.seen else ""
        word = "yes" if finding.proven else "no "
        meaning = MEANINGS.get(finding.name, finding.name)
        say(f"  {word}  {meaning}{observation}")
    say(f"strategy: {answer.strategy}")


@Row(codex, "receipts", "codex.receipts", positional=("session",))
def receipts(answer: Any) -> None:
    """Show what each turn of a session was run with: catalog, tools, skills and calls."""
    say = partial(console().print, markup=False, soft_wrap=True)
    if not answer.receipts:
        say(f"no receipt is kept of session {disarmed(answer.session)}")
    for receipt in answer.receipts:
        refused = receipt.strategy != receipt.strategy_asked and receipt.strategy_asked not in {None, "auto"}
        strategy = receipt.strategy or "-"
        if refused:
            strategy += f" ({receipt.strategy_asked} was asked for)"
        catalog = f"catalog {receipt.catalog_digest or '-'} by {strategy}, context {receipt.context_digest or '-'}"
        say(f"turn {disarmed(receipt.turn_id)}: {catalog}")
        if receipt.visible_tools:
            say(f"  tools: {disarmed(', '.join(receipt.visible_tools))}")
        for skill in receipt.skills:
            say(f"  skill {disarmed(skill.ref)} {skill.body_digest}")
        for call in receipt.calls:
            response = call.response_digest or "no answer"
            say(f"  call {disarmed(call.tool)} {call.state} {response}")


@Row(image, "build", "image.build", words={"offline": Word("--offline/--registry")})
def image_tree(answer: Any) -> None:
    """Build the sandbox tree from this host's Python, libraries and tools; exit 1 when a profile's are not all there."""
    out = console()
    for sentence in answer.absent:
        out.print(f"[yellow]not on this machine, and so not in the image[/] {line(sentence)}", soft_wrap=True)
    out.print(f"{plain(answer.path)}\n{answer.size // (1024 * 1024)} MiB, {answer.files} files, key {answer.key}")
    if answer.tar:
        out.print(f"{plain(answer.tar)} {answer.tar_digest}")


@Row(installation_commands, "new", "new", positional=("kind", "name"))
def created(answer: Any) -> None:
    """Make the files to begin a bundle, a skill or a plugin with."""
    out = console()
    out.print(f"[green]made[/] {plain(answer.path)}")
    for path in answer.files:
        out.print(f"  {plain(path)}")


@Row(installation_commands, "schema", "schemas.show", positional=("name",))
def schemas(answer: Any) -> None:
    """Print the JSON Schema of a file that authors write; without a name, list them."""
    if answer.document is not None:
        from kdskills.app.operations.checking import schema_text

        sys.stdout.write(schema_text(answer.document))
        return
    rows = table("schema", "file", "$id")
    for row in answer.schemas:
        rows.add_row(row.name, row.file, row.id)
    console().print(rows)


@Row(installation_commands, "plugins", "plugins")
def plugins(answer: Any) -> None:
    """List plugins, the hooks they answer and the names they registered."""
    rows = table("plugin", "from", "hooks")
    for row in answer.plugins:
        rows.add_row(plain(row.name), "shipped" if row.shipped else "installed", ", ".join(row.hooks))
    console().print(rows)
    for kind, names in answer.registered.items():
        console().print(f"{kind}: {plain(', '.join(names)) or '-'}")


@Row(
    mcp,
    "published",
    "mcp.published",
    words={"tools": Word(help="Tools a client without a token holds, comma-separated; '' means none.", commas=True)},
)
def published(answer: Any) -> None:
    """List the skills that MCP clients see, and those they do not, with the reason."""
    rows = table("skill", "uri", "files", "bytes")
    for row in answer.published:
        rows.add_row(line(row.full_id), line(row.uri), str(row.files), str(row.size))
    console().print(rows)
    findings(answer.diagnostics)


@Row(mcp, "accept", "mcp.accept", positional=("server",))
def accepted(answer: Any) -> None:
    """Accept the files that skills of a server have now; they are refused until then (`mcp_changed`)."""
    out = console()
    for row in answer.skills:
        out.print(f"[bold]{line(row.full_id)}[/] {line(row.uri)}", soft_wrap=True)
        if not row.known:
            out.print("  the files that were accepted are not known one by one")
        for sign, paths in (("+", row.added), ("-", row.removed), ("~", row.changed)):
            for path in paths:
                out.print(f"  {sign} {line(path)}", soft_wrap=True)
    count = f"{counted(len(answer.skills), 'changed skill')} of {line(answer.server)}"
    if not answer.skills:
        out.print(f"nothing of {line(answer.server)} waits for approval")
    elif answer.dry_run:
        out.print(f"{count} would be accepted; the digest of all of it is {line(answer.digest)}", soft_wrap=True)
    else:
        out.print(f"[green]{count} accepted[/]; a running service takes them within a minute", soft_wrap=True)


@Row(db, "upgrade", "db.upgrade")
def upgraded(answer: Any) -> None:
    """Bring the tables up to date; doing it twice changes nothing."""
    rows = table("part", "revision", "what was done")
    for row in answer.parts:
        rows.add_row(line(row.part), line(row.revision), "upgraded" if row.changed else "nothing to do")
    console().print(rows)


@Row(db, "check", "db.check")
def database_findings(answer: Any) -> None:
    """Look for what does not fit, and change nothing; exit 0 when all of it fits, 1 when not."""
    out = console()
    for row in answer.findings:
        out.print(f"[red]{line(row.code)}[/] {counted(row.count, 'time')}: {line(row.message)}", soft_wrap=True)
        for example in row.examples:
            out.print(f"  {line(example)}", soft_wrap=True)
        out.print(f"  cure: {line(row.cure)}", soft_wrap=True)
    colour, words = ("green", "fit one another") if answer.ok else ("red", "do not all fit")
    out.print(
        f"[{colour}]{counted(answer.rows, 'row')} at {line(', '.join(answer.revisions))} {words}[/]", soft_wrap=True
    )


@Row(installation_commands, "backup", "backup.create", positional=("path",))
def backed_up(answer: Any, done: str = "backup") -> None:
    """Write everything that is kept into one file, while the system runs; exit 1 when something was nowhere to be found."""
    out = console()
    for name in answer.missing:
        out.print(f"[red]missing[/] {line(name)}", soft_wrap=True)
    parts = [counted(answer.rows, "row"), counted(answer.objects, "object"), counted(answer.versions, "version")]
    parts += [counted(answer.files, "file"), *([f"{answer.missing_count} missing"] if answer.missing_count else [])]
    parts += [f"{answer.left_out} left out"] if answer.left_out else []
    out.print(f"{done} {line(from_here(answer.path))}: {', '.join(parts)}; {answer.size / 1e6:.1f} MB", soft_wrap=True)


@Row(installation_commands, "restore", "backup.restore", positional=("path",))
def put_back(answer: Any) -> None:
    """Put a backup in place where nothing is, all of it or nothing; with --check read all of it and write nothing."""
    backed_up(answer, "restored" if answer.restored else "whole")
