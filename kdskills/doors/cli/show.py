"""How each answer is printed for people, and the exit code it gives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kdskills.doors.cli.output import (
    EXIT_NEGATIVE,
    EXIT_OK,
    STYLES,
    console,
    disarmed,
    line,
    mark,
    plain,
    table,
)

if TYPE_CHECKING:
    from pydantic import BaseModel


def exit_code(answer: BaseModel, *, strict: bool = False) -> int:
    """Return the exit code of an answer printed as JSON: negative answers are 1."""
    if hasattr(answer, "left"):
        dry = getattr(answer, "dry_run", False)
        return EXIT_OK if dry else exit_code(answer.left, strict=strict)
    if getattr(answer, "granted", None) is False or int(getattr(answer, "errors", False)) > 0:
        return EXIT_NEGATIVE
    if getattr(answer, "refused", None) or (strict and int(getattr(answer, "warnings", False)) > 0):
        return EXIT_NEGATIVE
    if hasattr(answer, "engines") and not getattr(answer, "ok", True):
        return EXIT_NEGATIVE
    return EXIT_OK


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 skill` or `2 skills`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def findings(diagnostics: tuple[Any, ...]) -> None:
    """Print diagnostics as `file:line:column severity[code] message`, the cure below."""
    out = console()
    for diagnostic in diagnostics:
        position = ":".join(
            str(part) for part in (diagnostic.path, diagnostic.line, diagnostic.column) if part is not None
        )
        style = STYLES[diagnostic.severity]
        ref = f" [dim]({line(diagnostic.ref)})[/]" if diagnostic.ref else ""
        text = f"[{style}]{diagnostic.severity}\\[{diagnostic.code}][/] {line(diagnostic.message)}{ref}"
        out.print(f"{line(position)}{' ' if position else ''}{text}", soft_wrap=True)
        if diagnostic.fix:
            out.print(f"    [green]cure:[/] {line(diagnostic.fix)}", soft_wrap=True)


def check(answer: Any, *, strict: bool = False) -> int:
    """Print findings and a summary line; 1 with errors, or with warnings under --strict."""
    findings(answer.diagnostics)
    failed = answer.errors > 0 or (strict and answer.warnings > 0)
    colour = "red" if failed else "green"
    console().print(
        f"[{colour}]{counted(answer.skills, 'skill')} checked as {answer.verdict}: {counted(answer.errors, 'error')}, "
        f"{counted(answer.warnings, 'warning')}, {counted(answer.infos, 'info')}[/]"
    )
    return EXIT_NEGATIVE if failed else EXIT_OK


def fixes(answer: Any, *, strict: bool = False) -> int:
    """Print what was mended, as diffs, what was left alone, and what is found now; a dry run only says."""
    out = console()
    for change in answer.changes:
        for deed in change.done:
            out.print(
                f"[green]{'would mend' if answer.dry_run else 'mended'}[/] {line(change.path)}: {line(deed)}",
                soft_wrap=True,
            )
        for deed in change.skipped:
            out.print(f"[yellow]left alone[/] {line(change.path)}: {line(deed)}", soft_wrap=True)
        if change.diff:
            from rich.syntax import Syntax

            out.print(Syntax(disarmed(change.diff), "diff", background_color="default"))
    if not any(change.done for change in answer.changes):
        out.print("nothing to mend")
    return EXIT_OK if answer.dry_run else check(answer.left, strict=strict)


def skills(answer: Any) -> int:
    """Print one line a skill, with what the consumer may do with it."""
    colours = {"listed": "green", "hidden": "cyan", "unlisted": "cyan", "refused": "red", "invalid": "bold red"}
    out = console()
    longest = max((len(row.full_id) for row in answer.skills), default=5)
    room = max(out.width - longest - len("SK000  refused  ~tokens      "), 24)
    rows = table("", "skill", "state", "~tokens", "what it does, or why not")
    for row in answer.skills:
        words = " ".join((f"{row.code}: {row.reason}" if row.code else row.description).split())
        cut = words if len(words) <= room else words[: room - 1] + "…"
        state = f"[{colours[row.state]}]{row.state}[/]"
        rows.add_row(row.short_id or "", plain(row.full_id), state, str(row.tokens or ""), plain(cut))
    out.print(f"[bold]{line(answer.bundle)}[/] for {line(answer.consumer) or 'an anonymous consumer'}")
    out.print(rows)
    findings(answer.diagnostics)
    return EXIT_OK


def skill(answer: Any) -> int:
    """Print a skill's facts, its text and its companions."""
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
    for row in answer.sources:
        words = f"{line(str(row.get('sid', '-')))}: {line(str(row.get('title', '')))} {line(str(row.get('url', '')))}"
        out.print(f"source {words}", soft_wrap=True)
    findings(answer.diagnostics)
    return EXIT_OK


def rendered(answer: Any) -> int:
    """Print the text to stdout, as it is unless that is a terminal, and what it costs to stderr."""
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
    return EXIT_NEGATIVE if answer.refused else EXIT_OK


def why(answer: Any) -> int:
    """Print every step of the gate; 1 when the skill is refused."""
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
    return EXIT_OK if answer.granted else EXIT_NEGATIVE


def doctor(answer: Any) -> int:
    """Print self-checks and engine probes with their cures; 1 when a part that the settings name does not work."""
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
    return EXIT_OK if answer.ok else EXIT_NEGATIVE


def image(answer: Any) -> int:
    """Print where the tree lies and what it holds."""
    out = console()
    out.print(f"{plain(answer.path)}\n{answer.size // (1024 * 1024)} MiB, {answer.files} files, key {answer.key}")
    if answer.tar:
        out.print(f"{plain(answer.tar)} {answer.tar_digest}")
    return EXIT_OK


def created(answer: Any) -> int:
    """Print what was made, file by file."""
    out = console()
    out.print(f"[green]made[/] {plain(answer.path)}")
    for path in answer.files:
        out.print(f"  {plain(path)}")
    return EXIT_OK


def plugins(answer: Any) -> int:
    """Print plugins with their hooks, and registered names by kind."""
    rows = table("plugin", "from", "hooks")
    for row in answer.plugins:
        rows.add_row(plain(row.name), "shipped" if row.shipped else "installed", ", ".join(row.hooks))
    console().print(rows)
    for kind, names in answer.registered.items():
        console().print(f"{kind}: {plain(', '.join(names)) or '-'}")
    return EXIT_OK
