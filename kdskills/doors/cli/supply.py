"""Commands on skills from elsewhere and for others: what comes is shown and asked about before anything of it is in the bundle."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import typer

from kdskills.doors.cli.derived import Ask, Row, Word, confirmed
from kdskills.doors.cli.output import (
    console,
    counted,
    disarmed,
    findings,
    from_here,
    line,
    plain,
    print_github,
    print_sarif,
    table,
)
from kdskills.errors import BadRequest, UserMustAct

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

app = typer.Typer()

STATES: Final = MappingProxyType(
    {"new": "green", "changed": "yellow", "same": "dim", "removed": "yellow", "restored": "green", "ok": "green"}
    | {"pinned": "cyan", "unlocked": "cyan", "refused": "red", "missing": "red"}
)
BUNDLE: Final = Word(short="-b", help="The bundle's folder.", default=Path())
NOT_SAID: Final = ("agreed",)


class SupplySteps:
    """Shows how far downloads are, where somebody can see it; `end` prints the answer."""

    def __init__(self, printer: Any) -> None:
        self._printer = printer
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: Any) -> None:
        """Take an event of the operation."""
        if self._progress is None:
            from rich.progress import Progress

            out = console(stderr=True)
            self._progress = Progress(console=out, transient=True, disable=not out.is_terminal)
            self._progress.start()
        words = f"{event.kind} {line(event.subject)}"
        if event.kind not in self._tasks:
            self._tasks[event.kind] = self._progress.add_task(words, total=None)
        task = self._tasks[event.kind]
        self._progress.update(task, description=words, completed=event.done, total=event.total or None)

    def stop(self) -> None:
        """Take the bars away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()

    def end(self, answer: Any, **flags: Any) -> None:
        """Print the answer."""
        self.stop()
        self._printer(answer, **flags)


def steps() -> SupplySteps:
    """Return what shows how far a command is."""
    return SupplySteps(supplied)


async def agree(ctx: typer.Context, ask: Ask, arguments: Mapping[str, Any], *, trust: bool, operation: str) -> None:
    """Show what would come and ask the person at the terminal; what is agreed to becomes part of the arguments.

    Raises BadRequest, `confirmation_missing`, where nobody is there, and UserMustAct on a no.
    """
    words: Any = arguments
    if arguments.get("yes") or arguments.get("check"):
        return
    bars = steps()
    try:
        preview = await ask(operation, arguments, bars, trust=trust)
    finally:
        bars.stop()
    coming = [row for row in preview.skills if row.state in {"new", "changed"}]
    if not coming:
        return
    supplied(preview, err=True)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        message = "nobody is at a terminal to be asked whether these skills may come: look at them, then say --yes"
        raise BadRequest(message, code="confirmation_missing")
    agreed = confirmed(f"Put {counted(len(coming), 'skill')} into the bundle?")
    if not agreed:
        raise UserMustAct("nothing was changed, as you said", code="confirmation_refused")
    words["yes"] = True
    words["agreed"] = tuple(row.agreement for row in coming)


@Row(
    app,
    "add",
    "skills.add",
    "Add skills from elsewhere to a bundle and its lock; what comes is shown and asked about first.",
    positional=("source",),
    words={"bundle": BUNDLE, "source": Word(metavar="SOURCE")},
    hidden=NOT_SAID,
    trust=True,
    narrator=steps,
    prelude=partial(agree, operation="skills.add"),
)
@Row(
    app,
    "update",
    "skills.update",
    "Bring skills from elsewhere up to date; what is different is shown and asked about first.",
    positional=("names",),
    words={"bundle": BUNDLE, "names": Word(metavar="[NAME]...")},
    hidden=NOT_SAID,
    trust=True,
    narrator=steps,
    prelude=partial(agree, operation="skills.update"),
)
@Row(
    app,
    "outdated",
    "skills.outdated",
    "Show which skills are different at their sources now; exit 1 when any is.",
    words={"bundle": BUNDLE},
    trust=True,
    narrator=steps,
)
@Row(
    app,
    "remove",
    "skills.remove",
    "Remove skills that came from elsewhere from a bundle and its lock.",
    positional=("names",),
    words={"bundle": BUNDLE, "names": Word(metavar="NAME...")},
    trust=True,
)
@Row(
    app,
    "sync",
    "skills.sync",
    "Make a bundle's skills those of its lock, without a network where the cache has them.",
    words={"bundle": BUNDLE},
    trust=True,
    narrator=steps,
)
def supplied(answer: Any, *, err: bool = False) -> None:
    """Print what came of each skill, where from, what is different, and why some are refused."""
    out = console(stderr=err)
    for row in answer.skills:
        facts = [f"~{row.tokens} tokens"] if row.tokens else []
        facts += [f"{counted(len(row.files), 'file')}, {row.size} bytes"] if row.size else []
        state = f"[{STATES.get(row.state, 'red')}]{row.state}[/]"
        out.print(f"[bold]{line(row.key)}[/] {state} {line(', '.join(facts))}".rstrip(), soft_wrap=True)
        if row.source:
            resolved = f" at {row.resolved[:19]}" if row.resolved else ""
            out.print(f"    [dim]{line(row.source)}{line(resolved)}[/]", soft_wrap=True)
        if row.signature:
            out.print(f"    {line(row.signature)}", soft_wrap=True)
        if row.files and not row.size:
            out.print(f"    differs: {line(', '.join(row.files))}", soft_wrap=True)
        if row.reason:
            out.print(f"    [red]{line(row.code)}[/]: {line(row.reason)}", soft_wrap=True)
        for title, diff in (("files", row.diff), ("what a model reads", row.prompt_diff)):
            if diff:
                from rich.syntax import Syntax

                out.print(f"    {title}:")
                out.print(Syntax(disarmed(diff), "diff", background_color="default"))
        findings(row.findings)
    findings(answer.diagnostics)
    if answer.changed:
        out.print("[green]the bundle and its lock are changed[/]")
    elif not answer.skills:
        out.print("no skill of the lock is another one now")


@Row(
    app,
    "publish",
    "skills.publish",
    positional=("bundle",),
    words={
        "bundle": Word(help="The bundle's folder; none means the skills of a project."),
        "project": Word(short="-p", help="The project; none means `local`, with the bundle of the settings."),
    },
    trust=True,
)
def published_site(answer: Any) -> None:
    """Write skills marked as public as a site others install from; exit 1 when one that is marked is left out."""
    rows = table("skill", "name", "artifact", "digest")
    for row in answer.skills:
        rows.add_row(line(row.full_id), line(row.name), line(row.kind), row.digest[:19])
    if answer.skills:
        console().print(rows)
    findings(answer.diagnostics)
    if not (answer.skills or answer.diagnostics):
        console().print("nothing is public: `public` in the descriptor says what is")
    if answer.index is not None:
        console().print(f"[green]wrote[/] {plain(answer.index)}", soft_wrap=True)


trust = typer.Typer(help="Whose signatures this machine trusts.", no_args_is_help=True)

VERDICTS: Final = MappingProxyType({"ok": "green", "unlocked": "yellow", "unsigned": "yellow"})


@Row(app, "verify", "skills.verify", positional=("path",), trust=True)
def verified_skills(answer: Any) -> None:
    """Compare skills with kdskills.lock and their signatures; exit 1 when the policy forbids one."""
    out = console()
    for row in answer.skills:
        color = "red" if row.forbidden else VERDICTS.get(row.verdict, "yellow")
        signer = f" signed by {line(row.signer)}" if row.signer else ""
        out.print(f"[bold]{line(row.skill)}[/] [{color}]{row.verdict.replace('_', ' ')}[/]{signer}", soft_wrap=True)
        if row.reason:
            out.print(f"    {line(row.reason)}", soft_wrap=True)
    findings(answer.diagnostics)
    forbidden = sum(row.forbidden for row in answer.skills)
    out.print(f"{counted(len(answer.skills), 'skill')}, {forbidden} forbidden by the policy")


@Row(app, "sign", "skills.sign", positional=("skill",))
def signed_skill(answer: Any) -> None:
    """Sign every file of a skill's folder, for whoever trusts the key or the certificate's root."""
    console().print(f"[green]wrote[/] {plain(answer.file)}", soft_wrap=True)


@Row(trust, "add", "trust.add", positional=("name",))
def trusted_anchor(answer: Any) -> None:
    """Trust what a key, the certificates of a root, or an identity sign."""
    console().print(f"[green]trusted[/] {line(answer.name)}: {_known_as(answer)}", soft_wrap=True)


@Row(trust, "list", "trust.list")
def trusted_anchors(answer: Any) -> None:
    """List whose signatures are trusted."""
    for anchor in answer.anchors:
        console().print(f"[bold]{line(anchor.name)}[/] {_known_as(anchor)}", soft_wrap=True)
    if not answer.anchors:
        console().print("nobody is trusted: `kdskills trust add`")


@Row(trust, "remove", "trust.remove", positional=("name",))
def removed_anchor(answer: Any) -> None:
    """Trust somebody no longer."""
    console().print(f"{line(answer.name)} is trusted no longer", soft_wrap=True)


def _known_as(anchor: Any) -> str:
    facts = anchor.fingerprint or f"{anchor.identity} by {anchor.issuer}"
    return f"{anchor.kind} {line(facts)}"


def audit_reports(answer: Any) -> dict[str, Any]:
    """Return audited skills by what stands before the paths of their files, seen from the working folder."""
    top = Path(answer.path)
    top = top.parent if top.name.lower() == "skill.md" else top
    return {f"{from_here(str(top / skill.below))}/".removeprefix("./"): skill for skill in answer.skills}


def audit_sarif(answer: Any) -> None:
    """Print findings as SARIF."""
    from kdskills.supply.audit import sarif

    print_sarif(sarif(audit_reports(answer)))


def audit_github(answer: Any) -> None:
    """Print findings as commands of GitHub."""
    from kdskills.supply.audit import report_rows

    print_github(report_rows(audit_reports(answer)))


SEVERITIES: Final = MappingProxyType({"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"})


@Row(
    app,
    "audit",
    "skills.audit",
    positional=("path",),
    words={"sarif": Word(metavar="FILE"), "review": Word(metavar="FOLDER")},
    formats={"sarif": audit_sarif, "github": audit_github},
)
def audited_skills(answer: Any) -> None:
    """Look for what is wrong with skills, without running anything of them; exit 1 with a finding of severity high."""
    out = console()
    for skill in answer.skills:
        for each in skill.findings:
            position = f"{skill.skill}/{each.path}{f':{each.line}' if each.line else ''}"
            style = "dim" if each.accepted is not None else SEVERITIES[each.severity]
            state = "accepted" if each.accepted is not None else each.severity
            out.print(f"{line(position)} [{style}]{state}\\[{each.rule}][/] {line(each.why)}", soft_wrap=True)
            out.print(f"    [dim]{line(each.excerpt)}[/]", soft_wrap=True)
            cure = (
                f"[dim]accepted:[/] {line(each.accepted)}"
                if each.accepted is not None
                else f"[green]cure:[/] {each.cure}"
            )
            out.print(f"    {cure}", soft_wrap=True)
    counts = ", ".join(f"{getattr(answer, name)} {name}" for name in SEVERITIES)
    accepted = f", {answer.accepted} accepted" if answer.accepted else ""
    color = "green" if answer.ok else "red"
    out.print(f"[{color}]{counted(len(answer.skills), 'skill')} audited: {counts}{accepted}[/]", soft_wrap=True)
