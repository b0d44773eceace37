"""`kdskills jobs watch`: bars for steps and the output below them while work runs; plain lines where there is no terminal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kdskills.doors.cli.following import LineCutter, Stream, follow
from kdskills.doors.cli.output import COLORS, OVER, line, one_line
from kdskills.doors.cli.within import ask

if TYPE_CHECKING:
    from kdskills.app import Host

POLL_S = 0.2


class Screen:
    """What a person sees of running work.

    Args:
        console: Where it is shown.
    """

    def __init__(self, console: Console) -> None:
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
                self.console.print(Text(f"{one_line(name)}: {status}"), soft_wrap=True)
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
        self.console.print(Text(one_line(text), style=style), soft_wrap=True)


class Follower:
    """Prints the output of tasks as it comes.

    Args:
        host: Answers `skills.task_logs`.
        screen: Shows the lines.
    """

    def __init__(self, host: Host, screen: Screen) -> None:
        self._host = host
        self._screen = screen
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self, task_id: str, label: str) -> None:
        """Follow a task, once."""
        if task_id not in self._running:
            self._running[task_id] = asyncio.create_task(self._follow_streams(task_id, label))

    async def finish(self) -> None:
        """Wait until everything followed is over and shown."""
        await asyncio.gather(*self._running.values())

    async def stop(self) -> None:
        """Stop following."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _follow_streams(self, task_id: str, label: str) -> None:
        await asyncio.gather(
            self._follow_stream(task_id, label, "stdout"), self._follow_stream(task_id, label, "stderr")
        )

    async def _follow_stream(self, task_id: str, label: str, stream: Stream) -> None:
        style = "" if stream == "stdout" else "dim"
        lines = LineCutter(lambda text: self._screen.say(f"{label}{text}", style))
        if await follow(self._host, task_id, stream, lines, until_over=True):
            self._screen.say(f"{label}(earlier output of {stream} is not kept)", "yellow")
        lines.close()


async def watch(host: Host, item: str, screen: Screen) -> str:
    """Watch a task or job until it is over and return its last status."""
    follower = Follower(host, screen)
    kind = "job" if item.startswith("job_") else "task"
    shown_urls: set[str] = set()

    def show_event(event: Any) -> None:
        _show_event(event, screen, follower, item, shown_urls)

    try:
        while True:
            query = {f"{kind}_id": item, "poll_interval_sec": POLL_S}
            snapshot = await ask(host, f"skills.{kind}_watch", query, show_event)
            answer = snapshot.model_dump()
            if not answer["watch_timeout"]:
                break
        await follower.finish()
    finally:
        await follower.stop()
    _ended(answer, screen, item)
    status: str = answer["status"]
    return status


def _show_event(event: Any, screen: Screen, follower: Follower, item: str, shown_urls: set[str]) -> None:
    if item.startswith("job_"):
        done = sum(step.status in OVER for step in event.steps)
        screen.show(item, event.status, done, len(event.steps))
        width = max((len(step.name) for step in event.steps), default=0)
        for step in event.steps:
            screen.show(step.name, step.status, step.status in OVER, 1)
            if step.task_id is not None:
                follower.start(step.task_id, f"{step.name:>{width}} | ")
        return
    screen.show(item, event.status, event.status in OVER, 1)
    if event.attempt:
        follower.start(item, "")
    for endpoint in event.exposed_endpoints:
        if endpoint.url is not None and endpoint.url not in shown_urls:
            shown_urls.add(endpoint.url)
            screen.say(f"port {endpoint.port} is at {endpoint.url}", "bold green")


def _ended(answer: dict[str, Any], screen: Screen, item: str) -> None:
    """Show the last state, for whatever ended between two looks."""
    steps = answer.get("steps", ())
    for step in steps:
        screen.show(step["name"], step["status"], step["status"] in OVER, 1)
    done = sum(step["status"] in OVER for step in steps) if steps else 1
    screen.show(item, answer["status"], done, max(1, len(steps)))
    if answer["error_code"]:
        screen.say(f"{answer['error_code']}: {answer['error_message'] or ''}".rstrip(": "), "red")
