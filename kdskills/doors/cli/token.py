"""`kdskills token`: make, list and revoke tokens of projects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdskills.doors.cli.output import console, failing, line, print_json, table
from kdskills.doors.cli.within import ask, run

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(help="Tokens of callers elsewhere.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
DEFAULT = ["skills:read", "work:run", "work:read"]


def _ask(ctx: typer.Context, operation: str, arguments: dict[str, Any]) -> BaseModel:
    arguments_set = {name: value for name, value in arguments.items() if value is not None}
    return run(ctx, lambda host: ask(host, operation, arguments_set))


@app.command("create")
def create(
    ctx: typer.Context,
    project: Annotated[str, typer.Option("--project", "-p", help="Everything it reaches belongs to it.")] = "local",
    agent: Annotated[str, typer.Option("--agent", "-a", help="Consumer the policy of skills is asked for.")] = "local",
    scope: Annotated[
        list[str] | None, typer.Option("--scope", "-s", help="What it may do; reading and running when none is given.")
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", "-t", help="Operation it may run; all its scopes allow when none is given."),
    ] = None,
    person: Annotated[
        bool, typer.Option("--person", help="A person starts skills with it; else a model does.")
    ] = False,
    tools: Annotated[
        str | None, typer.Option("--tools", help="Tools its holder has, comma-separated; none when omitted.")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="What it is for, in words.")] = "",
    days: Annotated[float | None, typer.Option("--days", help="Days until it ends by itself.")] = None,
    rate: Annotated[int | None, typer.Option("--requests-per-minute", help="Requests it may make in a minute.")] = None,
    work: Annotated[
        int | None, typer.Option("--concurrent-work", help="Tasks and jobs it may have at one time.")
    ] = None,
    body: Annotated[int | None, typer.Option("--body-bytes", help="Bytes a request of it may have.")] = None,
    as_json: Json = False,
) -> None:
    """Make a token; its text is printed this once, and kept nowhere."""
    with failing(as_json=as_json):
        arguments = {
            "project": project,
            "agent": agent,
            "scopes": scope or DEFAULT,
            "allowed_tools": tool or None,
            "person": person,
            "tools": tuple(word.strip() for word in (tools or "").split(",") if word.strip()),
            "label": label,
            "expires_in_days": days,
            "requests_per_minute": rate,
            "concurrent_work": work,
            "body_bytes": body,
        }
        answer = _ask(ctx, "tokens.create", arguments)
        if as_json:
            print_json(answer)
            return
        token = answer.model_dump()
        console(stderr=True).print(
            f"token {line(token['id'])} of project {line(token['project'])}; it is shown this once:"
        )
        typer.echo(token["token"])


@app.command("list")
def list_tokens(
    ctx: typer.Context,
    project: Annotated[str | None, typer.Option("--project", "-p", help="Only of this project.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many at most.", min=1, max=500)] = 100,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Where the page before ended, as it told.")] = None,
    as_json: Json = False,
) -> None:
    """List tokens, the latest first."""
    with failing(as_json=as_json):
        page = _ask(ctx, "tokens.list", {"project": project, "limit": limit, "cursor": cursor})
        if as_json:
            print_json(page)
            return
        listing = table("id", "project", "agent", "scopes", "created", "state", "label")
        answer = page.model_dump()
        for row in answer["tokens"]:
            state = (
                "revoked"
                if row["revoked_at"]
                else "until " + str(row["expires_at"])[:10]
                if row["expires_at"]
                else "good"
            )
            cells = (row["id"], row["project"], row["agent"], " ".join(row["scopes"]), str(row["created_at"])[:16])
            listing.add_row(*(line(cell) for cell in (*cells, state, row["label"])))
        console().print(listing)
        if answer["next_cursor"]:
            console().print(f"there are more: kdskills token list --cursor {line(answer['next_cursor'])}")


@app.command("revoke")
def revoke(
    ctx: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="The token's public id.", show_default=False)],
    as_json: Json = False,
) -> None:
    """End a token, from the next request on."""
    with failing(as_json=as_json):
        answer = _ask(ctx, "tokens.revoke", {"id": token})
        if as_json:
            print_json(answer)
            return
        console().print(f"token {line(token)} opens nothing any more")
