"""`kdskills mcp`: serve MCP, see what is served, and take what a server of others changed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kdskills.doors.cli import doors
from kdskills.doors.cli.output import console, failing, line, print_json, table
from kdskills.doors.cli.show import findings
from kdskills.doors.cli.within import ask, run

app = typer.Typer()

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Project = Annotated[str, typer.Option("--project", help="Project whose skills are served.")]
Tools = Annotated[
    str | None,
    typer.Option("--tools", help="Tools a client without a token holds, comma-separated; '' means none."),
]
Agent = Annotated[str, typer.Option("--agent", help="Consumer that the policy of skills is asked for.")]


@app.callback(invoke_without_command=True)
def serve(
    ctx: typer.Context,
    http: Annotated[str | None, typer.Option("--http", help="Serve HOST:PORT instead of standard input.")] = None,
    project: Project = "local",
    agent: Agent = "local",
    profile: Annotated[
        str, typer.Option("--profile", help="Tools that are served: `skills`, `author` or `operator`.")
    ] = "skills",
    tools: Tools = None,
) -> None:
    """Serve MCP to one client on standard input and output, or to many over HTTP; or do what a further word says."""
    if ctx.invoked_subcommand is None:
        doors.mcp(ctx, http=http, project=project, agent=agent, profile=profile, tools=_tool_ids(tools))


def _tool_ids(tools: str | None) -> tuple[str, ...] | None:
    return None if tools is None else tuple(word.strip() for word in tools.split(",") if word.strip())


@app.command("published")
def published(
    ctx: typer.Context,
    project: Project = "local",
    agent: Agent = "local",
    profile: Annotated[
        str, typer.Option("--profile", help="Profile on standard input, without a token: `skills` or `author`.")
    ] = "skills",
    tools: Tools = None,
    token: Annotated[
        str | None, typer.Option("--token", help="Public id of a client's token over HTTP; it says all the rest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the skills that MCP clients see, and those they do not, with the reason."""
    with failing(as_json=as_json):
        arguments = {"project": project, "agent": agent, "profile": profile, "tools": _tool_ids(tools), "token": token}
        publication: Any = run(ctx, lambda host: ask(host, "mcp.published", arguments))
        if as_json:
            print_json(publication)
            return
        rows = table("skill", "uri", "files", "bytes")
        for row in publication.published:
            rows.add_row(line(row.full_id), line(row.uri), str(row.files), str(row.size))
        console().print(rows)
        findings(publication.diagnostics)


@app.command("accept")
def accept(
    ctx: typer.Context,
    server: Annotated[str, typer.Argument(help="Label of the server in the setting `skill_roots`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what changed; accept nothing.")] = False,
    digest: Annotated[
        str | None,
        typer.Option("--digest", help="Accept only if all that changed has this digest, as a dry run shows."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Accept the files that skills of a server have now; they are refused until then (`mcp_changed`)."""
    with failing(as_json=as_json):
        arguments = {"server": server, "dry_run": dry_run, "digest": digest}
        approval: Any = run(ctx, lambda host: ask(host, "mcp.accept", arguments))
        if as_json:
            print_json(approval)
            return
        out = console()
        for row in approval.skills:
            out.print(f"[bold]{line(row.full_id)}[/] {line(row.uri)}", soft_wrap=True)
            if not row.known:
                out.print("  the files that were accepted are not known one by one")
            for sign, paths in (("+", row.added), ("-", row.removed), ("~", row.changed)):
                for path in paths:
                    out.print(f"  {sign} {line(path)}", soft_wrap=True)
        count = (
            f"{len(approval.skills)} changed skill{'' if len(approval.skills) == 1 else 's'} of {line(approval.server)}"
        )
        if not approval.skills:
            out.print(f"nothing of {line(approval.server)} waits for approval")
        elif approval.dry_run:
            out.print(f"{count} would be accepted; the digest of all of it is {line(approval.digest)}", soft_wrap=True)
        else:
            out.print(f"[green]{count} accepted[/]; a running service takes them within a minute", soft_wrap=True)
