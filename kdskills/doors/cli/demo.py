"""`run` and `demo`: the steps of a turn as they happen, then the answer."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table

from kdskills.doors.cli.output import counted, disarmed, findings, line, plain

LINE = 110


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LINE else line[: LINE - 1] + "…"


def _gist(text: str) -> str:
    """Return what matters of a tool's JSON answer: a script's output, or which refs were read."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    if isinstance(answer, dict) and answer.get("stdout"):
        return str(answer["stdout"])
    if isinstance(answer, dict) and "items" in answer:
        return ", ".join(f"{item['ref']} {item['status']}" for item in answer["items"])
    return text


class Narrator:
    """Prints the events of a turn as lines a person can follow."""

    def __init__(self, out: Console) -> None:
        self.out = out

    def __call__(self, event: Any) -> None:
        """Print *event*, if it is one that people want to see."""
        handler = getattr(self, "on_" + event.type.replace(".", "_"), None)
        if handler is not None:
            handler(event)

    def line(self, word: str, text: str, style: str = "cyan") -> None:
        """Print one line, further ones indented: what happened, and to what."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=9, justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(f"[{style}]{word}[/]", text)
        self.out.print(grid)

    def on_turn_started(self, event: Any) -> None:
        """Print request, model and engine."""
        self.line("request", plain(event.request), "bold")
        how = " (recorded replies; skills, policy, scripts and isolation are real)" if event.replayed else ""
        self.line("model", f"{plain(event.model)}{how}")
        self.line("engine", plain(event.engine) if event.engine else "none: scripts are off")

    def on_prompt_built(self, event: Any) -> None:
        """Print which skills are considered and which are active."""
        self.out.print()
        self.line("step", plain(f"{event.role}, prompt of ~{event.tokens} tokens"), "bold blue")
        if event.available:
            self.line("considers", plain(", ".join(event.available)), "dim")
        if event.active:
            self.line("active", plain(", ".join(event.active)), "dim")

    def on_model_replied(self, event: Any) -> None:
        """Print what the model said beside its calls."""
        if event.text and event.calls:
            self.line("says", plain(_cut(event.text)))

    def on_tool_called(self, event: Any) -> None:
        """Print the call."""
        self.line("call", f"[bold]{plain(event.tool)}[/] {plain(_cut(event.arguments))}")

    def on_skill_loaded(self, event: Any) -> None:
        """Print the skill."""
        self.line("loaded", plain(f"{event.skill} {event.digest[:19]}…"), "green")

    def on_skill_refused(self, event: Any) -> None:
        """Print the refusal with the reason that the model does not get."""
        self.line("refused", plain(f"{event.ref}: {event.code}"), "red")

    def on_sources_merged(self, event: Any) -> None:
        """Print the numbers that came into the pool, or were found there."""
        added = f"added {', '.join(map(str, event.added))}" if event.added else "nothing new"
        merged = f"; known already {', '.join(map(str, event.merged_sids))}" if event.merged_sids else ""
        dropped = f"; citations dropped {', '.join(map(str, event.dropped))}" if event.dropped else ""
        self.line("sources", plain(f"{event.skill}: {added}{merged}{dropped}"), "green")

    def on_script_finished(self, event: Any) -> None:
        """Print how the program ended, behind which wall, and which limits held."""
        script = f"{event.skill}/{event.path}" if event.path else "generated code"
        ended = f"{event.status}, exit {event.exit_code}, {event.duration_ms} ms"
        self.line("script", plain(f"{script}: {ended}"), "magenta")
        self.line(
            "wall", plain(f"{event.engine}, level {event.level}; limits enforced: {', '.join(event.limits)}"), "dim"
        )

    def on_tool_finished(self, event: Any) -> None:
        """Print the outcome; what a load did was said already."""
        if not event.ok:
            self.line("failed", plain(f"{event.error}: {_cut(event.text)}"), "red")
        elif event.tool != "skills.load":
            self.line("result", plain(_cut(_gist(event.text))), "dim")

    def on_file_written(self, event: Any) -> None:
        """Print the file."""
        self.line("file", line(f"{event.path} ({counted(event.size, 'byte')})"), "green")

    def on_diagnostic(self, event: Any) -> None:
        """Print the diagnostic."""
        diagnostic = event.diagnostic
        self.line(diagnostic.severity, plain(f"{diagnostic.code}: {diagnostic.message}"), "yellow")


def conclusion(out: Console, answer: Any) -> None:
    """Print the answer, its sources and where the files are."""
    result = answer.result
    text, _, sources = answer.footnoted.partition("\n\nSources:\n")
    out.print(Panel(Markdown(disarmed(text) or "(no answer)"), title="answer", title_align="left"))
    for row in sources.splitlines():
        out.print(f"  {plain(row)}", soft_wrap=True)
    for path in answer.files:
        out.print(f"  [green]file[/] {plain(path)}", soft_wrap=True)
    if answer.transcript:
        out.print(f"  [dim]transcript {plain(answer.transcript)}[/]", soft_wrap=True)
    used = ", ".join(f"{use.id} ({use.how})" for use in result.skills_used)
    tokens = result.usage.input + result.usage.output
    steps = f"{counted(len(result.steps), 'step')}, {counted(tokens, 'token')}, {result.duration_ms} ms"
    out.print(f"  [dim]{plain(f'{result.status}: {steps}; skills: {used}')}[/]")
    findings(answer.diagnostics)
    for missing in answer.unmet:
        out.print(f"  [red]not as expected:[/] {plain(missing)}")
