"""`turn show`: the timeline of a turn, as its transcript tells it.

Everything in a transcript may be hostile: skills, models and scripts wrote it. Texts of several lines are therefore
printed behind a bar and names on one line, so that neither can pass for a line of the timeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from kdskills.doors.cli.output import console, disarmed, findings

LINES, CHARACTERS = 12, 1200
"""How much of a text is printed unless all of it is asked for."""
INDENT = 21
SILENT = frozenset({"model.delta", "model.requested", "turn.finished"})
"""Events whose facts stand in others: pieces of a reply, the call before it, the result."""


def flat(text: object) -> str:
    """Return *text* on one line."""
    return " ".join(disarmed(str(text)).split())


def joined(values: Any) -> str:
    """Return *values* with commas between."""
    return ", ".join(map(flat, values))


class Timeline:
    """Prints events one by one.

    Args:
        out: Where to.
        full: Whether long texts are printed whole.
    """

    def __init__(self, out: Console, *, full: bool = False) -> None:
        self.out = out
        self.full = full
        self._begun: datetime | None = None
        self._prompts: dict[str, str] = {}

    def __call__(self, event: Any) -> None:
        """Print *event*."""
        handler = getattr(self, "on_" + event.type.replace(".", "_"), None)
        if handler is not None:
            handler(event)

    # ---- lines and blocks ----

    def line(self, when: str, word: str, text: str, style: str = "cyan") -> None:
        """Print one line of the timeline."""
        head = Text.assemble((f"{when:>9} ", "dim"), (f"{word:>9}", style), "  ")
        for row in self._rows(text):
            self.out.print(head + row, soft_wrap=True)
            head = Text(" " * INDENT)

    def block(self, text: str) -> None:
        """Print a text behind a bar; a long one is cut, unless everything was asked for."""
        excerpt = text if self.full else "\n".join(text[:CHARACTERS].split("\n")[:LINES])
        for raw in disarmed(excerpt).split("\n"):
            for row in self._rows(raw, bar=2):
                self.out.print(Text(" " * INDENT + "│ ", "dim") + row, soft_wrap=True)
        if excerpt != text:
            hint = Text(f"{' ' * INDENT}… {len(text) - len(excerpt)} more characters: --full prints them", "dim")
            self.out.print(hint, soft_wrap=True)

    def _rows(self, text: str, *, bar: int = 0) -> Iterator[Text]:
        """Give *text* in rows as wide as the terminal; whole where there is none."""
        if not self.out.is_terminal:
            yield Text(text)
            return
        yield from Text(text).wrap(self.out, max(20, self.out.width - INDENT - bar), overflow="fold") or [Text("")]

    def _say(self, event: Any, word: str, text: str, style: str = "cyan") -> None:
        self.line(self._when(event), word, text, style)

    def _when(self, event: Any) -> str:
        try:
            now = datetime.fromisoformat(event.ts)
        except ValueError:
            return "?"
        self._begun = self._begun or now
        return f"{(now - self._begun).total_seconds():.3f}s" if (now.tzinfo is None) == self._naive else "?"

    @property
    def _naive(self) -> bool:
        return self._begun is not None and self._begun.tzinfo is None

    # ---- the turn and its models ----

    def on_turn_started(self, event: Any) -> None:
        """Print what the turn is about."""
        self._say(event, "request", f"as {flat(event.consumer)}, turn {flat(event.turn_id)}", "bold")
        self.block(event.request)
        how = ", recorded replies" if event.replayed else ""
        self._say(event, "model", f"{flat(event.model)}{how}; session {flat(event.session_id)}")
        self._say(event, "engine", flat(event.engine) if event.engine else "none: scripts are off")
        if event.files:
            self._say(event, "given", joined(event.files))

    def on_prompt_built(self, event: Any) -> None:
        """Print which prompt a model is about to get, and its text where it is new."""
        self.out.print()
        active = f"; active: {joined(event.active)}" if event.active else ""
        self._say(event, f"step {event.step}", f"{flat(event.role)}{active}", "bold blue")
        note = "" if event.text else ", text as before"
        self._say(event, "prompt", f"~{event.tokens} tokens, {flat(event.digest)}{note}")
        if event.text:
            self.block(self._changed(event.role, event.text))
        if event.asked:
            self._say(event, "asked", "")
            self.block(event.asked)

    def _changed(self, role: str, text: str) -> str:
        """Return a prompt without the lines that it has in common with the role's last one at its beginning."""
        before, self._prompts[role] = self._prompts.get(role, ""), text
        old, new = before.split("\n"), text.split("\n")
        common = next((number for number, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1), 0)
        if self.full or common < 2:
            return text
        return "\n".join([f"… {common} lines as before", *new[common:]])

    def on_model_retry(self, event: Any) -> None:
        """Print a failure that was tried again."""
        text = f"{flat(event.code)}: {flat(event.message)}; try {event.attempt + 1} after {event.delay_s:g} s"
        self._say(event, "retry", text, "yellow")

    def on_model_replied(self, event: Any) -> None:
        """Print what the model answered."""
        ended = f", ended by {flat(event.finish_reason)}" if event.finish_reason else ""
        calls = f"; calls {joined(event.calls)}" if event.calls else ""
        tokens = f"{event.usage.input} tokens in, {event.usage.output} out"
        self._say(event, "reply", f"{flat(event.model)}: {tokens}{ended}{calls}")
        if event.text:
            self.block(event.text)

    def on_catalog_truncated(self, event: Any) -> None:
        """Print how far the catalog was cut."""
        self._say(event, "catalog", f"cut to level {event.level} to fit its budget", "yellow")

    def on_history_elided(self, event: Any) -> None:
        """Print that old results were shortened."""
        self._say(event, "history", f"{event.messages} old results shortened to fit the window", "yellow")

    # ---- tools, scripts, files ----

    def on_tool_called(self, event: Any) -> None:
        """Print the call with its arguments."""
        self._say(event, "call", f"{flat(event.tool)}  {flat(event.call_id)}", "bold cyan")
        self.block(readable(event.arguments))

    def on_tool_output(self, event: Any) -> None:
        """Print what a tool wrote."""
        self._say(event, event.stream, flat(event.call_id))
        self.block(event.text)

    def on_tool_finished(self, event: Any) -> None:
        """Print the call's answer."""
        word, style = ("result", "green") if event.ok else ("failed", "red")
        code = "" if event.ok else f"{flat(event.error)}  "
        files = f"; files: {joined(event.artifacts)}" if event.artifacts else ""
        self._say(event, word, f"{code}{flat(event.tool)}  {flat(event.call_id)}, {event.duration_ms} ms{files}", style)
        self.block(readable(event.text))

    def on_script_started(self, event: Any) -> None:
        """Print which program goes behind the wall."""
        self._say(event, "script", f"{program(event)} starts in {flat(event.engine)}", "magenta")

    def on_script_finished(self, event: Any) -> None:
        """Print how it ended, and which limits held."""
        ended = f"{flat(event.status)}, exit {event.exit_code}, {event.duration_ms} ms"
        wall = f"{flat(event.engine)}, level {flat(event.level)}, limits {joined(event.limits)}"
        self._say(event, "script", f"{program(event)}: {ended}; {wall}", "magenta")

    def on_file_written(self, event: Any) -> None:
        """Print the file."""
        self._say(event, "file", f"{flat(event.path)}, {event.size} bytes, by {flat(event.tool)}", "green")

    def on_answer_checked(self, event: Any) -> None:
        """Print which files the answer reports that are not there."""
        if event.missing:
            outcome = "sent back" if event.sent_back else "unverified"
            self._say(event, "checked", f"not there: {joined(event.missing)}; {outcome}", "yellow")
        else:
            self._say(event, "checked", f"there: {joined(event.claimed)}", "green")

    # ---- skills, sources, people ----

    def on_skill_loaded(self, event: Any) -> None:
        """Print which skill was loaded, by whom."""
        self._say(event, "loaded", f"{flat(event.skill)} by {flat(event.by)}, {flat(event.digest)}", "green")

    def on_skill_unloaded(self, event: Any) -> None:
        """Print which skill was unloaded."""
        self._say(event, "unloaded", flat(event.skill))

    def on_skill_stale(self, event: Any) -> None:
        """Print which skill's file changed."""
        self._say(event, "stale", f"{flat(event.skill)}: its file changed after it was loaded", "yellow")

    def on_skill_pruned(self, event: Any) -> None:
        """Print which skill is granted no more."""
        self._say(event, "pruned", f"{flat(event.skill)} is granted no more", "yellow")

    def on_skill_refused(self, event: Any) -> None:
        """Print a refusal with the reason that the model does not get."""
        self._say(event, "refused", f"{flat(event.ref)}: {flat(event.code)}: {flat(event.reason)}", "red")

    def on_sources_merged(self, event: Any) -> None:
        """Print which numbers a skill brought along."""
        parts = [("added", event.added), ("known already", event.merged_sids), ("citations dropped", event.dropped)]
        summary = "; ".join(f"{word} {joined(sids)}" for word, sids in parts if sids)
        self._say(event, "sources", f"{flat(event.skill)}: {summary or 'nothing new'}", "green")

    def on_approval_requested(self, event: Any) -> None:
        """Print what a person is asked about."""
        self._say(event, "approval", f"asked for {program(event)}", "magenta")

    def on_approval_decided(self, event: Any) -> None:
        """Print the decision."""
        reason = f": {flat(event.reason)}" if event.reason else ""
        verdict = "allowed" if event.allowed else "denied"
        self._say(event, "approval", f"{program(event)} {verdict}{reason}", "magenta")

    def on_diagnostic(self, event: Any) -> None:
        """Print the diagnostic."""
        diagnostic = event.diagnostic
        self._say(event, diagnostic.severity, f"{flat(diagnostic.code)}: {flat(diagnostic.message)}", "yellow")


def program(event: Any) -> str:
    """Return the program an event is about."""
    return f"{flat(event.skill)}/{flat(event.path)}" if event.path else "generated code"


def readable(text: str) -> str:
    """Return a JSON object as `name: value` lines, texts as they are written; anything else unchanged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or not value:
        return text
    return "\n".join(
        f"{name}: {part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}"
        for name, part in value.items()
    )


def show(answer: Any, *, full: bool = False) -> None:
    """Print a turn: its timeline, its answer with citations resolved, its files, what was odd."""
    out = console()
    timeline = Timeline(out, full=full)
    for event in answer.events:
        timeline(event)
    out.print()
    if answer.result is None:
        timeline.line("", "end", "none: the turn broke off, or is still running", "bold red")
    else:
        conclusion(timeline, answer)
    findings(answer.diagnostics)


def conclusion(timeline: Timeline, answer: Any) -> None:
    """Print what came of the turn."""
    result = answer.result
    timeline.line("", "answer", "" if result.text else "(none)", "bold")
    if result.text:
        timeline.block(result.text)
    for cited in answer.citations:
        if cited.known:
            origin = f" (from {joined(cited.skills)})" if cited.skills else ""
            timeline.line("", f"[{cited.sid}]", f"{flat(cited.title)} {flat(cited.place)}{origin}", "green")
        else:
            timeline.line("", f"[?{cited.sid}]", "names no source", "red")
    for file in result.files:
        timeline.line("", "file", f"{flat(file.path)}, {file.size} bytes, {flat(file.digest)}: {flat(file.location)}")
    if result.skills_used:
        timeline.line("", "skills", "; ".join(f"{flat(u.id)} ({flat(u.how)})" for u in result.skills_used))
    tokens = f"{result.usage.input} tokens in, {result.usage.output} out"
    ended = (
        f"{result.status} ({flat(result.stop_reason)}): {len(result.steps)} steps, {tokens}, {result.duration_ms} ms"
    )
    timeline.line("", "end", ended, "bold green" if result.ok else "bold red")
