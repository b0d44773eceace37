"""`kdskills jobs` and `kdskills logs`: what runs in the background, for people."""

from __future__ import annotations

import base64
import codecs
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kdskills.doors.cli.commands import installation_commands
from kdskills.doors.cli.derived import Ask, Json, Row, run
from kdskills.doors.cli.output import (
    COLORS,
    EXIT_INTERRUPTED,
    EXIT_NEGATIVE,
    EXIT_OK,
    OVER,
    console,
    disarmed,
    failing,
    line,
    one_line,
    plain,
    print_json,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


Stream = Literal["stdout", "stderr"]
Write = Callable[[bytes], None]

POLL_S = 0.2
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
PIECE = 256 * 1024
LONGEST = 8192


async def follow(ask: Ask, task_id: str, stream: Stream, write: Write, *, until_over: bool) -> bool:
    """Write a task's output until it is over, or as it is now; whether bytes were missing: only the last are kept."""
    lost, query = False, {"task_id": task_id, "stream": stream, "limit": PIECE, "encoding": "base64", "offset": 0}
    host = None
    while True:
        piece = await ask("skills.task_logs", {**query, "follow": until_over})
        if piece.elsewhere not in {host, None}:
            host = piece.elsewhere
            console(stderr=True).print(
                f"the log lies on host {line(host)}, and {line(piece.elsewhere_reason or '')}: its end is told here once the task is over",
                style="yellow",
            )
        lost = lost or piece.truncated
        write(base64.b64decode(piece.data))
        query["offset"] = piece.next_offset
        if piece.ended or (not until_over and piece.next_offset >= piece.total):
            return lost


class Raw:
    """Writes bytes to standard output: as they are into files and pipes, disarmed onto a terminal."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, data: bytes) -> None:
        """Write *data*."""
        if sys.stdout.isatty():
            sys.stdout.write(disarmed(self._decode.decode(data)))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()


class LineCutter:
    """Gives bytes on to *show* as whole lines of text; a line that does not end is cut."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._show = show
        self._rest = ""

    def __call__(self, data: bytes) -> None:
        """Take more bytes."""
        self._rest += self._decode.decode(data)
        *lines, self._rest = self._rest.split("\n")
        for text in lines:
            self._show(text)
        while len(self._rest) > LONGEST:
            self._show(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]

    def close(self) -> None:
        """Show what is left."""
        self._rest += self._decode.decode(b"", final=True)
        if self._rest:
            self._show(self._rest)
            self._rest = ""


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
    ctx: typer.Context,
    status: Status = None,
    skill: Annotated[str | None, typer.Option("--skill", help="Only of the skill of this full id.")] = None,
    limit: Limit = 20,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List jobs, and tasks that belong to none, the newest first."""
    from kdskills.app.operations.models import encode_moment
    from kdskills.app.operations.work_follow import WorkPage

    async def jobs_and_tasks(ask: Ask) -> tuple[Any, Any]:
        query = {"status": status, "skill_name": skill, "limit": limit, "cursor": cursor}
        return await ask("jobs.list", query), await ask("tasks.list", {**query, "steps": False})

    with failing(as_json=as_json):
        jobs, tasks = run(ctx, jobs_and_tasks)
        ages = [(row.created_at, row.job_id, row) for row in jobs.jobs]
        ages += [(row.created_at, row.task_id, row) for row in tasks.tasks]
        ages.sort(key=lambda age: age[:2], reverse=True)
        page, following = [row for _, _, row in ages[:limit]], None
        if len(ages) > limit or jobs.next_cursor or tasks.next_cursor:
            following = encode_moment(*ages[:limit][-1][:2])
        if as_json:
            page_jobs = tuple(row for row in page if row in jobs.jobs)
            page_tasks = tuple(row for row in page if row in tasks.tasks)
            print_json(WorkPage(jobs=page_jobs, tasks=page_tasks, next_cursor=following))
            return
        listing = table("id", "status", "submitted", "took", "skill", "what")
        listing.columns[0].no_wrap = True
        for row in page:
            listing.add_row(*_cells(row))
        console().print(listing if page else "nothing has run yet")
        if following:
            console().print(f"there are more: kdskills jobs list --cursor {line(following)}")


def _cells(row: Any) -> list[str]:
    if hasattr(row, "job_id") and hasattr(row, "steps"):
        item, what = row.job_id, f"step {row.current_step_index + 1} of {row.steps}"
    else:
        program = ("service: " if row.mode == "service" else "") + one_line(spoken(row.command))
        item, what = row.task_id, plain(program if len(program) <= 40 else program[:39] + "…")
    status = f"{row.status} ({row.error_code})" if row.error_code else row.status
    state = f"[{COLORS.get(row.status, 'dim')}]{line(status)}[/]"
    began = row.created_at.astimezone().strftime("%m-%d %H:%M:%S")
    return [line(item), state, began, took(row.started_at, row.finished_at), line(row.skill_name), what]


def spoken(command: tuple[str, ...]) -> str:
    """Return a command as it was given: text that a shell runs, or words."""
    return command[-1] if command[:2] == ("/bin/sh", "-c") else " ".join(command)


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
        snapshot = run(ctx, lambda ask: ask(f"skills.{kind}_status", {f"{kind}_id": item, "tail_bytes": tail}))
    if as_json:
        print_json(snapshot)
        return
    answer = snapshot.model_dump()
    out = console()
    status = answer["status"]
    out.print(f"{line(item)}: [{COLORS.get(status, 'dim')}]{status}[/]  {line(answer['skill_name'])}")
    if answer.get("command"):
        out.print(f"  command: {plain(one_line(spoken(answer['command'])))}", soft_wrap=True)
    for label in ("repeat_of", "session_id", "attempt", "exit_code", "signal", "error_code", "error_message", "engine"):
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
    screen = Screen(console())

    async def watch_on_screen(ask: Ask) -> str:
        with screen.progress if screen.live else nullcontext():
            return await watch(ask, item, screen)

    with failing(as_json=False):
        try:
            status = run(ctx, watch_on_screen)
        except KeyboardInterrupt:
            words = f"it goes on without being watched; end it with: kdskills jobs cancel {line(item)}"
            console(stderr=True).print(words)
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
        report = run(ctx, lambda ask: ask(f"skills.{kind}_cancel", {f"{kind}_id": item, "reason": reason}))
        if as_json:
            print_json(report)
        else:
            console().print(f"{line(item)}{'' if report.canceled else ' was over already'}: {report.status}")
    raise typer.Exit(EXIT_OK if report.canceled else EXIT_NEGATIVE)


@app.command("again")
def again(
    ctx: typer.Context,
    item: Id,
    active: Annotated[bool, typer.Option("--active", help="With the version of the skill that is in use now.")] = False,
    as_json: Json = False,
) -> None:
    """Start a task or job that is over again: the same command, the same version of its skill, as new work."""
    with failing(as_json=as_json):
        kind = kind_of(item)
        words = {f"{kind}_id": item, "version": "active" if active else "same"}
        report = run(ctx, lambda ask: ask(f"{kind}s.again", words))
        if as_json:
            print_json(report)
        else:
            console().print(f"{line(report.task_id or report.job_id)}: {report.status}, again {line(item)}")


@app.command("logs")
def logs(ctx: typer.Context, item: Id, follow_on: Follow = False, stderr: Err = False) -> None:
    """Print the output of a task, or of every step of a job."""
    stream: Stream = "stderr" if stderr else "stdout"

    async def printed(ask: Ask) -> None:
        if kind_of(item) == "job":
            await _job_logs(ask, item, stream, until_over=follow_on)
        elif await follow(ask, item, stream, Raw(), until_over=follow_on):
            console(stderr=True).print("earlier output is not kept", style="yellow")

    with failing(as_json=False):
        run(ctx, printed)


async def _job_logs(ask: Ask, item: str, stream: Stream, *, until_over: bool) -> None:
    """Print the output of a job's steps one after another; each has its name on standard error."""
    import asyncio

    printed_tasks: set[str] = set()
    heads = console(stderr=True)
    while True:
        job = await ask("skills.job_status", {"job_id": item, "tail_bytes": 0})
        fresh = [step for step in job.steps if step.task_id is not None and step.task_id not in printed_tasks]
        for step in fresh:
            printed_tasks.add(step.task_id)
            heads.print(f"== {line(step.name)}", style="bold")
            await follow(ask, step.task_id, stream, Raw(), until_over=until_over)
        if not fresh:
            if not until_over or job.status in {"succeeded", "failed", "canceled"}:
                return
            await asyncio.sleep(0.2)


class Screen:
    """What a person sees of running work."""

    def __init__(self, console: Console) -> None:
        # Of all commands, the one that watches alone draws bars: no other pays for their import.
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.console = console
        self.live = console.is_terminal
        self.progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )
        self._bars: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def show(self, name: str, status: str, done: int, total: int) -> None:
        """Show how *name* stands; without a terminal a line is printed when the status changes."""
        if not self.live:
            if self._said.get(name) != status:
                self.say(f"{name}: {status}")
        else:
            words = f"[{COLORS.get(status, 'dim')}]{line(name)}: {status}[/]"
            if name not in self._bars:
                self._bars[name] = self.progress.add_task(words, total=total)
            self.progress.update(self._bars[name], description=words, completed=done, total=total)
            if status in OVER:
                self.progress.stop_task(self._bars[name])
        self._said[name] = status

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bars, disarmed: what programs print is hostile."""
        from rich.text import Text

        self.console.print(Text(one_line(text), style=style), soft_wrap=True)


async def watch(ask: Ask, item: str, screen: Screen) -> str:
    """Watch a task or job until it is over and return its last status."""
    import asyncio

    running: dict[str, asyncio.Future[list[None]]] = {}
    kind, shown_urls = kind_of(item), set[str]()

    async def show_output(task_id: str, label: str, stream: Stream) -> None:
        style = "" if stream == "stdout" else "dim"
        lines = LineCutter(lambda text: screen.say(f"{label}{text}", style))
        if await follow(ask, task_id, stream, lines, until_over=True):
            screen.say(f"{label}(earlier output of {stream} is not kept)", "yellow")
        lines.close()

    def show_event(event: Any) -> None:
        """Show how work stands; the output of each task is followed from its beginning, once."""
        steps = event.steps
        done = sum(step.status in OVER for step in steps) if steps else int(event.status in OVER)
        screen.show(item, event.status, done, max(1, len(steps)))
        for step in steps:
            screen.show(step.name, step.status, step.status in OVER, 1)
        width = max((len(step.name) for step in steps), default=0)
        begun = {step.task_id: f"{step.name:>{width}} | " for step in steps if step.task_id is not None}
        for task_id, label in (begun | ({item: ""} if event.attempt else {})).items():
            if task_id not in running:
                running[task_id] = asyncio.gather(*(show_output(task_id, label, stream) for stream in STREAMS))
        for endpoint in event.exposed_endpoints:
            if endpoint.url is not None and endpoint.url not in shown_urls:
                shown_urls.add(endpoint.url)
                screen.say(f"port {endpoint.port} is at {endpoint.url}", "bold green")

    try:
        while True:
            query = {f"{kind}_id": item, "poll_interval_sec": POLL_S}
            end = await ask(f"skills.{kind}_watch", query, show_event)
            if not end.watch_timeout:
                break
        await asyncio.gather(*running.values())
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
    steps = getattr(end, "steps", ())  # the last state, for whatever ended between two looks
    for step in steps:
        screen.show(step.name, step.status, step.status in OVER, 1)
    done = sum(step.status in OVER for step in steps) if steps else 1
    screen.show(item, end.status, done, max(1, len(steps)))
    if end.error_code:
        screen.say(f"{end.error_code}: {end.error_message or ''}".rstrip(": "), "red")
    return str(end.status)


@Row(installation_commands, "fleet", "fleet.show")
def fleet(answer: Any) -> None:
    """Show hosts, their workers, and what waits for them."""
    out = console()
    listing = table("host", "worker", "state", "version", "heartbeat", "lease", "commands", "services", "jobs")
    for host in answer.hosts:
        for worker in host.workers:
            words = (worker.state, "drained" if host.drained_at else "", "disk full" if worker.full_since else "")
            state = ", ".join(filter(None, words))
            name = f"{line(host.name)} {line(host.host)}"
            lease = "none" if worker.lease_left_s is None else f"{worker.lease_left_s:.0f} s"
            places = [
                f"{running} of {'?' if most is None else most}"
                for running, most in ((worker.commands, worker.slots), (worker.running_services, worker.services))
            ]
            cells = (name, f"slot {worker.slot}, {worker.pid}", state, line(worker.version or "?"))
            listing.add_row(*cells, f"{worker.beat_age_s:.0f} s ago", lease, *places, str(worker.jobs))
    out.print(listing if answer.hosts else "no worker was ever here")
    counts = ", ".join(f"{count} {status}" for status, count in answer.tasks.items())
    out.print(f"tasks, those that are over of the last hour: {counts}", soft_wrap=True)
    for row in answer.queue:
        out.print(f"{line(row.project)}: {row.waiting} waiting, the oldest for {row.oldest_age_s:.0f} s")
    elsewhere = answer.waiting - sum(row.waiting for row in answer.queue)
    if elsewhere:
        out.print(f"other projects: {elsewhere} waiting")


@Row(installation_commands, "quota", "quota.show", positional=("project",))
def quota(answer: Any) -> None:
    """Show what a project may use of background work, and uses."""
    listing = table("quota", "used", "limit")
    for row in answer.quotas:
        used = f"{row.used:g} or more" if row.used == answer.counted_to else f"{row.used:g}"
        listing.add_row(row.quota, used, "none" if row.limit is None else f"{row.limit:g}")
    console().print(listing)
    console().print(f"{line(answer.project)}: days end at {answer.day_ends_at:%Y-%m-%d %H:%M} UTC")


@Row(installation_commands, "metrics", "metrics.show")
def metrics(answer: Any) -> None:
    """Tell what is measured, as Prometheus reads it: of this process, and of the database as it is now."""
    sys.stdout.write(answer.text)


@Row(installation_commands, "drain", "fleet.drain", positional=("host",))
def drained(answer: Any) -> None:
    """Let a host take nothing new; what it runs goes on to its end."""
    words = "takes nothing new" if answer.changed else "took nothing new already"
    console().print(
        f"{line(answer.name)} ({line(answer.host)}) {words}; for work again: kdskills undrain {line(answer.host)}"
    )


@Row(installation_commands, "evict", "fleet.evict", positional=("host",))
def evicted(answer: Any) -> None:
    """Take a host's work for lost now; what may be repeated goes on elsewhere."""
    console().print(
        f"{line(answer.name)} ({line(answer.host)}) had {answer.tasks} tasks and {answer.jobs} jobs in hand"
    )


@Row(installation_commands, "undrain", "fleet.undrain", positional=("host",))
def undrained(answer: Any) -> None:
    """Let a host that was drained take work again."""
    words = "takes work again" if answer.changed else "was not drained"
    console().print(f"{line(answer.name)} ({line(answer.host)}) {words}")
