"""`kdskills jobs` and `kdskills logs`: what runs in the background, for people."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdskills.doors.cli.derived import Json
from kdskills.doors.cli.following import Raw, Stream, follow
from kdskills.doors.cli.output import (
    COLORS,
    EXIT_INTERRUPTED,
    EXIT_NEGATIVE,
    EXIT_OK,
    console,
    failing,
    line,
    one_line,
    plain,
    print_json,
    table,
)
from kdskills.doors.cli.within import ask, run

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app import Host

Id = Annotated[str, typer.Argument(help="Id of a task or job.", show_default=False)]
Status = Annotated[str | None, typer.Option("--status", "-s", help="Only those of this status.")]
Limit = Annotated[int, typer.Option("--limit", "-n", help="How many at most.", min=1, max=500)]
Cursor = Annotated[str | None, typer.Option("--cursor", help="Where the page before ended, as it told.")]
Err = Annotated[bool, typer.Option("--stderr", help="Standard error instead of standard output.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until it is over.")]

app = typer.Typer(help="Tasks, jobs and services in the background.", no_args_is_help=True)


def kind_of(item: str) -> str:
    """Return whether an id is one of a job or of a task."""
    return "job" if item.startswith("job_") else "task"


@app.command("list")
def list_work(
    ctx: typer.Context, status: Status = None, limit: Limit = 20, cursor: Cursor = None, as_json: Json = False
) -> None:
    """List jobs, and tasks that belong to none, the newest first."""
    from kdskills.app.operations.models import encode_moment

    async def jobs_and_tasks(host: Host) -> list[dict[str, Any]]:
        query = {"status": status, "limit": limit, "cursor": cursor}
        jobs, tasks = await ask(host, "jobs.list", query), await ask(host, "tasks.list", {**query, "steps": False})
        return [jobs.model_dump(), tasks.model_dump()]

    with failing(as_json=as_json):
        jobs, tasks = run(ctx, jobs_and_tasks)
        rows = sorted([*jobs["jobs"], *tasks["tasks"]], key=_age, reverse=True)
        page, following = rows[:limit], None
        if len(rows) > limit or jobs["next_cursor"] or tasks["next_cursor"]:
            following = encode_moment(*_age(page[-1]))
        if as_json:
            print_json(_page(page, following))
            return
        listing = table("id", "status", "submitted", "took", "skill", "what")
        listing.columns[0].no_wrap = True
        for row in page:
            listing.add_row(*(_job_cells(row) if "steps" in row else _task_cells(row)))
        console().print(listing if page else "nothing has run yet")
        if following:
            console().print(f"there are more: kdskills jobs list --cursor {line(following)}")


def _age(row: dict[str, Any]) -> tuple[datetime, str]:
    return row["created_at"], row["job_id"] if "steps" in row else row["task_id"]


def _page(rows: list[dict[str, Any]], following: str | None) -> BaseModel:
    """Return jobs and tasks of one page as one answer."""
    from kdskills.app.operations.work_outputs import JobRow, TaskRow, WorkPage

    return WorkPage(
        jobs=tuple(JobRow(**row) for row in rows if "steps" in row),
        tasks=tuple(TaskRow(**row) for row in rows if "steps" not in row),
        next_cursor=following,
    )


def _job_cells(row: dict[str, Any]) -> list[str]:
    step = row["current_step_index"] + 1
    return [*_cells("job_id", row), f"step {step} of {row['steps']}"]


def _task_cells(row: dict[str, Any]) -> list[str]:
    words = row["command"][-1] if row["command"][:2] == ("/bin/sh", "-c") else " ".join(row["command"])
    program = ("service: " if row["mode"] == "service" else "") + one_line(words)
    return [*_cells("task_id", row), plain(program if len(program) <= 40 else program[:39] + "…")]


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    status = row["status"] if not row["error_code"] else f"{row['status']} ({row['error_code']})"
    began = row["created_at"].astimezone().strftime("%m-%d %H:%M:%S")
    color = COLORS.get(row["status"], "dim")
    return [
        line(row[name]),
        f"[{color}]{line(status)}[/]",
        began,
        took(row["started_at"], row["finished_at"]),
        line(row["skill_name"]),
    ]


def took(begin: datetime | None, end: datetime | None) -> str:
    """Return how long something took, in words."""
    if begin is None or end is None:
        return ""
    seconds = max(0.0, (end - begin).total_seconds())
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


@app.command("show")
def show(
    ctx: typer.Context,
    item: Id,
    tail: Annotated[int, typer.Option("--tail", help="Bytes of output to show.", min=0, max=1024 * 1024)] = 2048,
    as_json: Json = False,
) -> None:
    """Show a task or job: state, steps, endpoints, artifacts and the end of its output."""
    with failing(as_json=as_json):
        kind = kind_of(item)
        snapshot = run(ctx, lambda host: ask(host, f"skills.{kind}_status", {f"{kind}_id": item, "tail_bytes": tail}))
        if as_json:
            print_json(snapshot)
            return
        _print(snapshot.model_dump(), item)


def _print(answer: dict[str, Any], item: str) -> None:
    out = console()
    status = answer["status"]
    out.print(f"{line(item)}: [{COLORS.get(status, 'dim')}]{status}[/]  {line(answer['skill_name'])}")
    for label in ("session_id", "attempt", "exit_code", "signal", "error_code", "error_message", "engine"):
        if answer.get(label) is not None:
            out.print(f"  {label}: {line(str(answer[label]))}")
    span = took(answer["started_at"], answer["finished_at"])
    if span:
        out.print(f"  took: {span}")
    for endpoint in answer.get("exposed_endpoints", ()):
        reached = endpoint["url"] or "not reached yet"
        out.print(f"  port {endpoint['port']}: {line(reached)}")
    steps = answer.get("steps", ())
    if steps:
        step_table = table("step", "status", "tries", "exit", "took", "task")
        for step in steps:
            code = "" if step["exit_code"] is None else str(step["exit_code"])
            color = COLORS.get(step["status"], "dim")
            span = took(step["started_at"], step["finished_at"])
            cells = (line(step["name"]), f"[{color}]{step['status']}[/]", str(step["tries"]), code, span)
            step_table.add_row(*cells, line(step["task_id"] or ""))
        out.print(step_table)
    for part in (answer, *steps):
        for artifact in part.get("artifacts", ()):
            out.print(
                f"  artifact {line(artifact['artifact_id'])}: {line(artifact['path'])} ({artifact['size']} bytes)"
            )
        for lost in part.get("output_errors", ()):
            out.print(f"  [yellow]not kept[/] {line(lost['path'])}: {line(lost['message'])}")
        name = f"{part['name']} " if "name" in part else ""
        for stream in ("stdout", "stderr"):
            if part.get(f"{stream}_tail"):
                out.print(f"[bold]{line(name)}{stream}[/]")
                out.print(plain(part[f"{stream}_tail"].rstrip("\n")), soft_wrap=True)


@app.command("watch")
def watch_work(ctx: typer.Context, item: Id) -> None:
    """Watch a task or job until it is over: steps, bars and live output; exit 0 when it succeeded, else 1."""
    from kdskills.doors.cli.watching import Screen, watch  # of all commands, this one alone draws bars

    screen = Screen(console())

    async def watch_on_screen(host: Host) -> str:
        if not screen.live:
            return await watch(host, item, screen)
        with screen.progress:
            return await watch(host, item, screen)

    with failing(as_json=False):
        try:
            status = run(ctx, watch_on_screen)
        except KeyboardInterrupt:
            console(stderr=True).print(
                f"it goes on without being watched; end it with: kdskills jobs cancel {line(item)}"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(EXIT_OK if status == "succeeded" else EXIT_NEGATIVE)


@app.command("cancel")
def cancel(
    ctx: typer.Context,
    item: Id,
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who look later.")] = "",
    as_json: Json = False,
) -> None:
    """End a task or job and everything it started; exit 1 when it was over already."""
    with failing(as_json=as_json):
        kind = kind_of(item)
        report = run(ctx, lambda host: ask(host, f"skills.{kind}_cancel", {f"{kind}_id": item, "reason": reason}))
        answer = report.model_dump()
        if as_json:
            print_json(report)
        elif answer["canceled"]:
            console().print(f"{line(item)}: {answer['status']}")
        else:
            console().print(f"{line(item)} was over already: {answer['status']}")
    raise typer.Exit(EXIT_OK if answer["canceled"] else EXIT_NEGATIVE)


@app.command("logs")
def logs(ctx: typer.Context, item: Id, follow_on: Follow = False, stderr: Err = False) -> None:
    """Print the output of a task, or of every step of a job."""
    stream: Stream = "stderr" if stderr else "stdout"

    async def printed(host: Host) -> None:
        if kind_of(item) == "task":
            lost = await follow(host, item, stream, Raw(), until_over=follow_on)
            if lost:
                console(stderr=True).print("earlier output is not kept", style="yellow")
            return
        await _job_logs(host, item, stream, until_over=follow_on)

    with failing(as_json=False):
        run(ctx, printed)


async def _job_logs(host: Host, item: str, stream: Stream, *, until_over: bool) -> None:
    """Print the output of a job's steps one after another; each has its name on standard error."""
    import asyncio

    printed_tasks: set[str] = set()
    heads = console(stderr=True)
    while True:
        job = (await ask(host, "skills.job_status", {"job_id": item, "tail_bytes": 0})).model_dump()
        fresh = [step for step in job["steps"] if step["task_id"] is not None and step["task_id"] not in printed_tasks]
        for step in fresh:
            printed_tasks.add(step["task_id"])
            heads.print(f"== {line(step['name'])}", style="bold")
            await follow(host, step["task_id"], stream, Raw(), until_over=until_over)
        if not fresh and (not until_over or job["status"] in {"succeeded", "failed", "canceled"}):
            return
        if not fresh:
            await asyncio.sleep(0.2)
