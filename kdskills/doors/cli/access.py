"""Commands about who may call and who changed what: `kdskills token …` and `kdskills audit-log`."""

from __future__ import annotations

from typing import Any

import typer

from kdskills.doors.cli.commands import installation_commands
from kdskills.doors.cli.derived import Row, Word
from kdskills.doors.cli.output import console, line, table

token = typer.Typer(help="Tokens of callers elsewhere.", no_args_is_help=True)


@Row(
    installation_commands,
    "audit-log",
    "audit_log.list",
    words={
        "project": Word(short="-p", help="Only of this project."),
        "limit": Word(short="-n", ranged=True),
        "cursor": Word(help="Where the page before ended, as it told."),
    },
    flags={"jsonl": "Print one change a line as JSON, and how to go on to standard error."},
)
def audit_log(answer: Any, *, jsonl: bool = False) -> None:
    """Tell who changed which skill, token, project, task or job, the latest first."""
    if jsonl:
        for event in answer.events:
            typer.echo(event.model_dump_json())
    else:
        listing = table("when", "project", "who", "agent", "from", "did", "to", "skill")
        for event in answer.events:
            cells = (f"{event.at:%Y-%m-%d %H:%M:%SZ}", event.project, event.who, event.agent, event.address)
            listing.add_row(*(line(cell) for cell in (*cells, event.action, event.subject, event.skill or "")))
        console().print(listing)
    if answer.next_cursor:
        words = f"there are more: kdskills audit-log --cursor {line(answer.next_cursor)}"
        console(stderr=jsonl).print(words, soft_wrap=True)


@Row(
    token,
    "create",
    "tokens.create",
    words={
        "project": Word(short="-p", help="Everything it reaches belongs to it.", default="local"),
        "agent": Word(short="-a", default="local"),
        "scopes": Word(
            "--scope",
            "-s",
            help="What it may do; reading and running when none is given.",
            default=None,
            otherwise=lambda: ["skills:read", "work:run", "work:read"],
        ),
        "allowed_tools": Word("--tool", "-t", help="Operation it may run; all its scopes allow when none is given."),
        "person": Word(help="A person starts skills with it; else a model does."),
        "tools": Word(help="Tools its holder has, comma-separated; none when omitted.", commas=True),
        "expires_in_days": Word("--days"),
    },
)
def created_token(answer: Any) -> None:
    """Make a token; its text is printed this once, and kept nowhere."""
    console(stderr=True).print(f"token {line(answer.id)} of project {line(answer.project)}; it is shown this once:")
    typer.echo(answer.token)


@Row(
    token,
    "list",
    "tokens.list",
    words={
        "project": Word(short="-p", help="Only of this project."),
        "limit": Word(short="-n", ranged=True),
        "cursor": Word(help="Where the page before ended, as it told."),
    },
)
def tokens(answer: Any) -> None:
    """List tokens, the latest first."""
    listing = table("id", "project", "agent", "scopes", "created", "used", "state", "label")
    for row in answer.tokens:
        state = "revoked" if row.revoked_at else "until " + str(row.expires_at)[:10] if row.expires_at else "good"
        used = "never" if row.last_used_at is None else str(row.last_used_at)[:16]
        cells = (row.id, row.project, row.agent, " ".join(row.scopes), str(row.created_at)[:16], used)
        listing.add_row(*(line(cell) for cell in (*cells, state, row.label)))
    console().print(listing)
    if answer.next_cursor:
        console().print(f"there are more: kdskills token list --cursor {line(answer.next_cursor)}")


@Row(
    token,
    "change",
    "tokens.change",
    positional=("id",),
    words={
        "id": Word(metavar="ID"),
        "scopes": Word("--scope", "-s", help="Scope it keeps; again for more."),
        "allowed_tools": Word("--tool", "-t", help="Operation it may still run; again for more."),
        "expires_in_days": Word("--days"),
    },
    hidden=("project",),
)
def changed_token(answer: Any) -> None:
    """Narrow a token, from the next request on: less scopes, operations or use, or an end that is sooner."""
    until = f" until {answer.expires_at:%Y-%m-%d %H:%M}Z" if answer.expires_at else ""
    tools = (
        "" if answer.allowed_tools is None else f", of which it may run {', '.join(answer.allowed_tools) or 'nothing'}"
    )
    words = f"token {answer.id} has {' '.join(answer.scopes)}{tools}{until}"
    console().print(line(words), soft_wrap=True)


@Row(token, "revoke", "tokens.revoke", positional=("id",), words={"id": Word(metavar="ID")}, hidden=("project",))
def revoked(answer: Any) -> None:
    """End a token, from the next request on."""
    console().print(f"token {line(answer.id)} opens nothing any more")
