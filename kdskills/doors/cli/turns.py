"""Turns for people: what happens while one runs, as `run`, `chat` and `demo` print it, and the timeline of `turn show`.

Everything in a turn may be hostile: skills, models and scripts wrote it. In the timeline texts of several lines are
therefore printed behind a bar and names on one line, so that neither can pass for a line of it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kdskills.doors.cli.output import console, counted, disarmed, dollars, findings, one_line, plain
from kdskills.sources import CitationStream

LINE = 110
LINES, CHARACTERS = 12, 1200
"""How much of a text is printed unless all of it is asked for."""
INDENT = 21
MOST_NAMES = 20
"""Names of skills on one line."""
SILENT = frozenset({"model.delta", "model.requested", "turn.finished"})
"""Events whose facts stand in others: pieces of a reply, the call before it, the result."""


def told(word: str, style: str, text: Callable[[Any], str | None]) -> Callable[[EventPrinter, Any], None]:
    """Return a method that prints an event as one line, *text* of it behind *word*; None of it is not printed."""
    return lambda printer, event: printer.say(event, word, row, style) if (row := text(event)) is not None else None


def listed_of(shown: int, total: int) -> str:
    """Say how much of a catalog that does not fit is listed."""
    return f"listed {shown:,} of {total:,}, ranked for the request"


def _truncated(event: Any) -> str:
    if not event.total:  # of a transcript that says no more
        return f"cut to level {event.level} to fit its budget"
    gone = f"; {event.gone:,} listed before no longer" if event.gone else ""
    return listed_of(event.shown, event.total) + gone


class EventPrinter:
    """Prints events by its methods `on_<type>`; an event it has no method for is not printed.

    `agent` names the agents whose turn is told of at the moment.
    """

    agent = ""

    def __call__(self, event: Any) -> None:
        """Print *event*, if it is one that people want to see."""
        handler = getattr(self, "on_" + event.type.replace(".", "_"), None)
        if handler is not None:
            handler(event)

    def say(self, event: Any, word: str, text: str, style: str = "cyan") -> None:
        """Print one line: what happened, and to what."""
        raise NotImplementedError  # how a line looks is all that printers differ in

    def on_agent_event(self, event: Any) -> None:
        """Print what happened in the turn of an agent, its tool in front of it."""
        before, inner = self.agent, event.opened()
        self.agent = f"{before}{flat(event.tool)} › "
        if inner is not None:
            self(inner)
        self.agent = before


class Narrator(EventPrinter):
    """Prints the events of a turn as lines a person can follow; markup and control characters in them do nothing."""

    def __init__(self, out: Console) -> None:
        self.out = out

    def say(self, event: Any, word: str, text: str, style: str = "cyan") -> None:
        """Print one line, further ones indented."""
        self._row(word, plain(text), style)

    def _row(self, word: str, markup: str, style: str) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=9, justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(f"[{style}]{word}[/]", f"[dim]{plain(self.agent)}[/]{markup}" if self.agent else markup)
        self.out.print(grid)

    def on_turn_started(self, event: Any) -> None:
        """Print request, model and engine."""
        self.say(event, "request", event.request, "bold")
        how = " (recorded replies; skills, policy, scripts and isolation are real)" if event.replayed else ""
        self.say(event, "model", f"{event.model}{how}")
        self.say(event, "engine", event.engine or "none: scripts are off")

    def on_prompt_built(self, event: Any) -> None:
        """Print which skills are considered and which are active."""
        self.out.print()
        self.say(event, "step", f"{event.role}, prompt of ~{event.tokens} tokens", "bold blue")
        if len(event.available) < event.total:
            self.say(event, "considers", listed_of(len(event.available), event.total), "dim")
        for word, names in (("considers", event.available), ("active", event.active)):
            if names and (word == "active" or len(names) == event.total):
                more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
                self.say(event, word, ", ".join(names[:MOST_NAMES]) + more, "dim")

    def on_tool_called(self, event: Any) -> None:
        """Print the call."""
        self._row("call", f"[bold]{plain(event.tool)}[/] {plain(cut(event.arguments))}", "cyan")

    def on_sources_merged(self, event: Any) -> None:
        """Print the numbers that came into the pool, or were found there."""
        added = f"added {', '.join(map(str, event.added))}" if event.added else "nothing new"
        merged = f"; known already {', '.join(map(str, event.merged_sids))}" if event.merged_sids else ""
        dropped = f"; citations dropped {', '.join(map(str, event.dropped))}" if event.dropped else ""
        self.say(event, "sources", f"{event.skill}: {added}{merged}{dropped}", "green")

    def on_script_finished(self, event: Any) -> None:
        """Print how the program ended, behind which wall, and which limits held."""
        script = f"{event.skill}/{event.path}" if event.path else "generated code"
        self.say(
            event, "script", f"{script}: {event.status}, exit {event.exit_code}, {event.duration_ms} ms", "magenta"
        )
        limits = ", ".join(event.limits)
        self.say(event, "wall", f"{event.engine}, level {event.level}; limits enforced: {limits}", "dim")

    def on_tool_finished(self, event: Any) -> None:
        """Print the outcome, of JSON a script's output or which refs were read; what a load did was said already."""
        if not event.ok:
            self.say(event, "failed", f"{event.error}: {cut(event.text)}", "red")
        elif event.tool != "skills.load":
            try:
                answer = json.loads(event.text)
            except ValueError:
                answer = None
            gist = event.text
            if isinstance(answer, dict) and answer.get("stdout"):
                gist = str(answer["stdout"])
            elif isinstance(answer, dict) and "items" in answer:
                gist = ", ".join(f"{item['ref']} {item['status']}" for item in answer["items"])
            self.say(event, "result", cut(gist), "dim")

    on_model_replied = told("says", "cyan", lambda e: cut(e.text) if e.text and e.calls else None)
    on_skill_loaded = told("loaded", "green", lambda event: f"{event.skill} {event.digest[:19]}…")
    on_skill_refused = told("refused", "red", lambda event: f"{event.ref}: {event.code}")
    on_script_connection = told(
        "network", "magenta", lambda event: f"{one_line(event.host)}:{event.port} {event.outcome}"
    )
    on_file_written = told("file", "green", lambda event: f"{one_line(event.path)} ({counted(event.size, 'byte')})")

    def on_diagnostic(self, event: Any) -> None:
        """Print the diagnostic."""
        diagnostic = event.diagnostic
        self.say(event, diagnostic.severity, f"{diagnostic.code}: {diagnostic.message}", "yellow")

    on_model_retry = told(
        "retry",
        "yellow",
        lambda e: f"{flat(e.code)}: {flat(e.message)}; try {e.attempt + 1} after {e.delay_s:g} s",
    )
    on_answer_checked = told(
        "checked", "yellow", lambda e: f"not there: {joined(e.missing)}; sent back" if e.sent_back else None
    )

    def end(self, answer: Any) -> None:
        """Print the answer of the turn, its sources and where the files are."""
        text, _, sources = answer.footnoted.partition("\n\nSources:\n")
        self.out.print(Panel(Markdown(disarmed(text) or "(no answer)"), title="answer", title_align="left"))
        for row in sources.splitlines():
            self.out.print(f"  {plain(row)}", soft_wrap=True)
        print_rest(self.out, answer)


def cut(text: str) -> str:
    """Return *text* on one line that is not too long."""
    row = " ".join(text.split())
    return row if len(row) <= LINE else row[: LINE - 1] + "…"


#: Numbers that are shown as footnotes before anybody can say which sources they mean.
_ANY_SOURCE: Final = {sid: {"title": "-"} for sid in range(1, 10_000)}


class WrittenText:
    """Writes a text as it comes: behind a bar, as wide as the terminal, with footnotes for citations, escapes disarmed.

    `raw` is the text so far, `footnotes` are its sids by number once it has ended.
    """

    def __init__(self, out: Console) -> None:
        self.raw = ""
        self.footnotes: tuple[int, ...] = ()
        self._out, self._room = out, max(20, out.width - 4)
        self._citations = CitationStream(_ANY_SOURCE, mode="footnotes", listed=False)
        self._word, self._column = "", 0

    def feed(self, text: str) -> None:
        """Write the next piece, but for a last word that may go on."""
        self.raw += text
        self._write(self._citations.feed(text))

    def end(self) -> None:
        """Write what is held back, and end the line."""
        self._write(self._citations.flush(), last=True)
        self.footnotes = self._citations.footnotes or self.footnotes
        self.end_line()

    def end_line(self) -> None:
        """Let what follows begin on a line of its own."""
        if self._column:
            self._out.out("")
        self._column = 0

    def _write(self, text: str, *, last: bool = False) -> None:
        *words, self._word = re.split(r"(?<=\s)", self._word + disarmed(text).replace("\t", "    "))
        if last or cell_len(self._word) > self._room:
            words, self._word = [*words, self._word], ""
        for word in words:
            for piece in chop_cells(word.removesuffix("\n"), self._room):
                if self._column + cell_len(piece.rstrip()) > self._room:
                    self.end_line()
                self._out.out(piece if self._column else f"│ {piece}", end="", highlight=False)
                self._column += cell_len(piece)
            if word.endswith("\n"):
                self._out.out("" if self._column else "│", highlight=False)
                self._column = 0


class Teller(Narrator):
    """Also writes what a model says as it is written, and at the end no answer that was read already.

    Where standard output is no terminal, the answer alone goes there, once it is whole; all else goes to standard error.
    In *brief* the beginnings of turn and steps are not told.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self._streams = sys.stdout.isatty()
        super().__init__(console(stderr=not self._streams))
        self._brief, self._text, self._source = brief, WrittenText(self.out), (0, "")

    def __call__(self, event: Any) -> None:
        """Print *event*; the pieces of one reply follow each other, whatever came between begins a line."""
        if event.type == "model.delta":
            if self._streams:
                if self._source != (event.step, event.role):
                    self._begin((event.step, event.role))
                self._text.feed(event.text)
            return
        if event.type != "model.replied":  # which ends the text itself
            self._text.end_line()
        if event.type in {"model.requested", "model.retry"}:
            self._begin((0, ""))
        if not (self._brief and event.type in {"turn.started", "prompt.built"}):
            super().__call__(event)

    def _begin(self, source: tuple[int, str]) -> None:
        self.pause()
        self._text, self._source = WrittenText(self.out), source

    def pause(self) -> None:
        """Write what is held back of a reply."""
        self._text.end()

    def on_model_replied(self, event: Any) -> None:
        """Print what is said beside calls, where it was not written before."""
        if self._source == (event.step, event.role):
            self.pause()
        elif event.text and event.calls:
            self.say(event, "says", cut(event.text))

    def end(self, answer: Any) -> None:
        """Print the answer where nobody has read it, its sources, and where the files are."""
        result, rows = answer.result, {row["sid"]: row for row in answer.result.sources}
        if not self._streams:
            console().out(disarmed(answer.footnoted), highlight=False)
            print_rest(self.out, answer)
        elif not result.text.strip() or self._text.raw.strip() != result.text.strip():
            super().end(answer)
        else:
            for number, sid in enumerate(self._text.footnotes, 1):
                row = rows.get(sid, {})
                origin = row.get("url") or row.get("physical_path") or ""
                words = f"{row.get('title', '')} {origin}".strip() if row else f"names no source: [[S:{sid}]]"
                self.out.print(f"  {plain(one_line(f'[{number}] {words}'))}", soft_wrap=True)
            print_rest(self.out, answer)


def amounts(usage: Any) -> tuple[str, ...]:
    """Return the further tokens of a call or turn, and what it cost, where they are known."""
    kinds = (("from the cache", usage.cache_read), ("into it", usage.cache_write), ("of reasoning", usage.reasoning))
    money = () if usage.cost is None else (dollars(usage.cost),)
    return (*(f"{number} {kind}" for kind, number in kinds if number), *money)


def tokens_of(usage: Any) -> str:
    """Return the tokens of a call or turn, `~` before estimates, and what it cost."""
    mark = "~" * usage.estimated
    return ", ".join((f"{mark}{usage.input} tokens in", f"{mark}{usage.output} out", *amounts(usage)))


def print_rest(out: Console, answer: Any) -> None:
    """Print what a turn left beside its answer: files and their folder, tokens, and what was odd."""
    result = answer.result
    for path in answer.files:
        out.print(f"  [green]file[/] {plain(path)}", soft_wrap=True)
    if answer.folder:
        out.print(f"  [green]folder[/] {plain(answer.folder)}", soft_wrap=True)
    if answer.many:
        out.print(f"  [green]bundle[/] {plain(answer.many)}", soft_wrap=True)
    if answer.transcript and answer.out is None:  # it is kept with the others, which are read by their ids
        out.print(f"  [dim]turn {plain(answer.result.turn_id)}[/]", soft_wrap=True)
    elif answer.transcript:
        out.print(f"  [dim]transcript {plain(answer.transcript)}[/]", soft_wrap=True)
    used = ", ".join(f"{use.id} ({use.how})" for use in result.skills_used)
    steps = f"{counted(len(result.steps), 'step')}, {tokens_of(result.usage)}, {result.duration_ms} ms"
    out.print(f"  [dim]{plain(f'{result.status}: {steps}; skills: {used}')}[/]")
    findings(answer.diagnostics)
    for missing in answer.unmet:
        out.print(f"  [red]not as expected:[/] {plain(missing)}")


def flat(text: object) -> str:
    """Return *text* on one line."""
    return " ".join(disarmed(str(text)).split())


def joined(values: Any) -> str:
    """Return *values* with commas between."""
    return ", ".join(map(flat, values))


def program(event: Any) -> str:
    """Return the program an event is about."""
    return f"{flat(event.skill)}/{flat(event.path)}" if event.path else "generated code"


class Timeline(EventPrinter):
    """Prints events one by one, with the time since the first.

    Long texts are cut unless they are to be printed in *full*.
    """

    def __init__(self, out: Console, *, full: bool = False) -> None:
        self.out = out
        self.full = full
        self._begun: datetime | None = None
        self._prompts: dict[str, str] = {}

    def line(self, when: str, word: str, text: str, style: str = "cyan") -> None:
        """Print one line of the timeline."""
        head = Text.assemble((f"{when:>9} ", "dim"), (f"{word:>9}", style), "  ", (self.agent, "dim"))
        for row in self._rows(text):
            self.out.print(head + row, soft_wrap=True)
            head = Text(" " * INDENT)

    def block(self, text: str) -> None:
        """Print a text behind a bar; a long one is cut, unless everything was asked for."""
        excerpt = text if self.full else "\n".join(text[:CHARACTERS].split("\n")[:LINES])
        for raw in disarmed(excerpt).split("\n"):
            for row in self._rows(raw, bar=2):
                self.out.print(Text(" " * INDENT + "│ " * (1 + self.agent.count("›")), "dim") + row, soft_wrap=True)
        if excerpt != text:
            hint = Text(f"{' ' * INDENT}… {len(text) - len(excerpt)} more characters: --full prints them", "dim")
            self.out.print(hint, soft_wrap=True)

    def _rows(self, text: str, *, bar: int = 0) -> Iterator[Text]:
        """Give *text* in rows as wide as the terminal; whole where there is none."""
        if not self.out.is_terminal:
            yield Text(text)
            return
        yield from Text(text).wrap(self.out, max(20, self.out.width - INDENT - bar), overflow="fold") or [Text("")]

    def say(self, event: Any, word: str, text: str, style: str = "cyan") -> None:
        """Print one line with the time of *event*; `?` when its time is none or cannot be compared with the first."""
        try:
            now = datetime.fromisoformat(event.ts)
        except ValueError:
            self.line("?", word, text, style)
            return
        self._begun = self._begun or now
        comparable = (now.tzinfo is None) == (self._begun.tzinfo is None)
        self.line(f"{(now - self._begun).total_seconds():.3f}s" if comparable else "?", word, text, style)

    def on_turn_started(self, event: Any) -> None:
        """Print what the turn is about."""
        self.say(event, "request", f"as {flat(event.consumer)}, turn {flat(event.turn_id)}", "bold")
        self.block(event.request)
        how = ", recorded replies" if event.replayed else ""
        self.say(event, "model", f"{flat(event.model)}{how}; session {flat(event.session_id)}")
        self.say(event, "engine", flat(event.engine) if event.engine else "none: scripts are off")
        if event.files:
            self.say(event, "given", joined(event.files))

    def on_prompt_built(self, event: Any) -> None:
        """Print which prompt a model is about to get, and its text where it is new."""
        self.out.print()
        active = f"; active: {joined(event.active)}" if event.active else ""
        self.say(event, f"step {event.step}", f"{flat(event.role)}{active}", "bold blue")
        note = "" if event.text else ", text as before"
        cut = f", {listed_of(len(event.available), event.total)}" if len(event.available) < event.total else ""
        self.say(event, "prompt", f"~{event.tokens} tokens, {flat(event.digest)}{note}{cut}")
        if event.text:
            self.block(self._changed(event.role, event.text))
        if event.asked:
            self.say(event, "asked", "")
            self.block(event.asked)

    def _changed(self, role: str, text: str) -> str:
        """Return a prompt without the lines that it has in common with the role's last one at its beginning."""
        before, self._prompts[role] = self._prompts.get(role, ""), text
        old, new = before.split("\n"), text.split("\n")
        common = next((number for number, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1), 0)
        if self.full or common < 2:
            return text
        return "\n".join([f"… {common} lines as before", *new[common:]])

    def on_model_replied(self, event: Any) -> None:
        """Print what the model answered."""
        ended = f", ended by {flat(event.finish_reason)}" if event.finish_reason else ""
        calls = f"; calls {joined(event.calls)}" if event.calls else ""
        self.say(event, "reply", f"{flat(event.model)}: {tokens_of(event.usage)}{ended}{calls}")
        if event.text:
            self.block(event.text)

    def on_tool_called(self, event: Any) -> None:
        """Print the call with its arguments."""
        self.say(event, "call", f"{flat(event.tool)}  {flat(event.call_id)}", "bold cyan")
        self.block(readable(event.arguments))

    def on_tool_output(self, event: Any) -> None:
        """Print what a tool wrote."""
        self.say(event, event.stream, flat(event.call_id))
        self.block(event.text)

    def on_tool_finished(self, event: Any) -> None:
        """Print the call's answer."""
        word, style = ("result", "green") if event.ok else ("failed", "red")
        code = "" if event.ok else f"{flat(event.error)}  "
        files = f"; files: {joined(event.artifacts)}" if event.artifacts else ""
        self.say(event, word, f"{code}{flat(event.tool)}  {flat(event.call_id)}, {event.duration_ms} ms{files}", style)
        self.block(readable(event.text))

    def on_answer_checked(self, event: Any) -> None:
        """Print which files the answer reports that are not there, and which successes that failed."""
        if event.missing or event.failed:
            outcome = "sent back" if event.sent_back else "unverified"
            wrong = [("not there", event.missing), ("failed", event.failed)]
            words = "; ".join(f"{word}: {joined(names)}" for word, names in wrong if names)
            self.say(event, "checked", f"{words}; {outcome}", "yellow")
        else:
            self.say(event, "checked", f"there: {joined(event.claimed)}", "green")

    def on_sources_merged(self, event: Any) -> None:
        """Print which numbers a skill brought along."""
        parts = [("added", event.added), ("known already", event.merged_sids), ("citations dropped", event.dropped)]
        summary = "; ".join(f"{word} {joined(sids)}" for word, sids in parts if sids)
        self.say(event, "sources", f"{flat(event.skill)}: {summary or 'nothing new'}", "green")

    def on_script_finished(self, event: Any) -> None:
        """Print how it ended, and which limits held."""
        ended = f"{flat(event.status)}, exit {event.exit_code}, {event.duration_ms} ms"
        wall = f"{flat(event.engine)}, level {flat(event.level)}, limits {joined(event.limits)}"
        self.say(event, "script", f"{program(event)}: {ended}; {wall}", "magenta")

    def on_diagnostic(self, event: Any) -> None:
        """Print the diagnostic."""
        diagnostic = event.diagnostic
        self.say(event, diagnostic.severity, f"{flat(diagnostic.code)}: {flat(diagnostic.message)}", "yellow")

    on_model_retry = Narrator.on_model_retry
    on_catalog_truncated = told("catalog", "yellow", _truncated)
    on_history_elided = told(
        "history", "yellow", lambda event: f"{event.messages} old results shortened to fit the window"
    )
    on_history_cut = told(
        "history",
        "yellow",
        lambda e: (
            f"{len(e.cut.turns)} earlier turns: {e.cut.kind}, {e.cut.tokens_before} to {e.cut.tokens_after} tokens"
        ),
    )
    on_approval_decided = told(
        "approval",
        "magenta",
        lambda e: f"{program(e)} {'allowed' if e.allowed else 'denied'}{e.reason and f': {flat(e.reason)}'}",
    )
    on_script_started = told("script", "magenta", lambda event: f"{program(event)} starts in {flat(event.engine)}")
    on_script_connection = told(
        "network",
        "magenta",
        lambda e: f"{program(e)}: {flat(e.host)}:{e.port} {flat(e.outcome)}, {e.sent} bytes there, {e.received} back",
    )
    on_file_written = told("file", "green", lambda e: f"{flat(e.path)}, {e.size} bytes, by {flat(e.tool)}")
    on_skill_loaded = told("loaded", "green", lambda e: f"{flat(e.skill)} by {flat(e.by)}, {flat(e.digest)}")
    on_skill_unloaded = told("unloaded", "cyan", lambda event: flat(event.skill))
    on_skill_stale = told("stale", "yellow", lambda event: f"{flat(event.skill)}: its file changed after it was loaded")
    on_skill_pruned = told("pruned", "yellow", lambda event: f"{flat(event.skill)} is granted no more")
    on_skill_refused = told("refused", "red", lambda e: f"{flat(e.ref)}: {flat(e.code)}: {flat(e.reason)}")
    on_approval_requested = told("approval", "magenta", lambda event: f"asked for {program(event)}")


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
        _print_outcome(timeline, answer)
    findings(answer.diagnostics)


def _print_outcome(timeline: Timeline, answer: Any) -> None:
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
    reason = f"{result.status} ({flat(result.stop_reason)})"
    ended = f"{reason}: {len(result.steps)} steps, {tokens_of(result.usage)}, {result.duration_ms} ms"
    timeline.line("", "end", ended, "bold green" if result.ok else "bold red")
