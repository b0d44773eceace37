"""Commands on packages of skills, and the question whether to bring what is missing.

People are asked where they sit: before a turn or a build, at a terminal, and only where the setting `environments` is `ask`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import typer

from kdskills.doors.cli.derived import Ask, Row, confirmed, host_of
from kdskills.doors.cli.output import console, counted, line

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


def is_asked(ctx: typer.Context) -> bool:
    """Whether the person who started the command is there to be asked, and the operator wants it."""
    return sys.stdin.isatty() and sys.stderr.isatty() and host_of(ctx).settings.environments == "ask"


async def offer_packages(
    ctx: typer.Context, ask: Ask, arguments: Mapping[str, Any], *, trust: bool, building: bool = False
) -> None:
    """Ask the person at the terminal whether what programs lack shall be locked and built, and do it; a no changes nothing.

    Who is *building* wants what is locked, and is asked about the rest of the skills that were named.
    """
    if not is_asked(ctx):
        return
    words = {"bundle": arguments["bundle"], "lacking": True}
    words |= {name: arguments[name] for name in ("skills", "suggested") if building and name in arguments}
    rows = (await ask("environments.show", words, trust=trust)).rows
    if all(building and row.state == "locked" for row in rows):
        return
    plan = await ask("environments.plan", words, steps(), trust=trust)
    listing(plan, err=True)
    size = sum(row.download for row in plan.rows)
    indexes = ", ".join(sorted({index for row in plan.rows for index in row.indexes}))
    if not indexes:
        return
    out = console(stderr=True)
    amount = mebibytes(size) if size else "bytes as yet unknown"
    out.print(f"Skills lack these packages: {amount} from {line(indexes)}.", soft_wrap=True)
    if confirmed("Lock and build them now?"):
        await ask("environments.lock", words, steps(), trust=trust)
        listing(await ask("environments.build", words, steps(), trust=trust), err=True)


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
    prelude=partial(offer_packages, building=True),
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
    hidden=("lacking",),
    trust=True,
)
def environments(answer: Any) -> None:
    """Print how each environment stands, and what is wrong with it."""
    listing(answer)
    out = console()
    if not answer.rows:
        out.print(f"no skill of {line(answer.bundle)} declares packages")
    if answer.changed:
        out.print("[green]kdskills.lock written[/]")
    if answer.freed:
        out.print(f"{mebibytes(answer.freed)} are free again")


def listing(answer: Any, *, err: bool = False) -> None:
    """Print the environments of an answer."""
    out = console(stderr=err)
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
        for fault in row.advisories:
            color = "red" if fault.severity in {"high", "critical", "unknown"} else "yellow"
            cure = f"fixed in {fault.fixed}" if fault.fixed else "no version without it is known"
            words = f"{fault.id}: {fault.package} {fault.version}, {cure}: {fault.summary}"
            out.print(f"    [{color}]{fault.severity}[/] {line(words)}", soft_wrap=True)
