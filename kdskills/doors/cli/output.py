"""Printing: one console for people, one JSON form for machines, one place that turns errors into exit codes.

Every command imports this module, also those that print JSON or their help: what only people need is imported there.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kdskills.app.wire import as_text, json_facts, json_text
from kdskills.errors import KdskillsError, OperatorMustAct, UserMustAct
from kdskills.errors.reports import ReportRow, github_commands

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table


def steady_streams() -> None:
    """Let the three streams be there, and write what their encoding lacks as escapes, whatever the locale.

    A closed one reads as empty and writes to nowhere. Otherwise the next file to be opened would become the standard
    output, and what is printed would be written into it.
    """
    for number, mode, name in ((0, "r", "stdin"), (1, "w", "stdout"), (2, "w", "stderr")):
        if getattr(sys, name) is None:
            _fill(number)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fill(number: int) -> None:
    """Open the null device under a number that is free, also for programs that are started from here."""
    try:
        os.fstat(number)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)


def reader_left(stream: TextIO) -> bool:
    """Return whether nobody reads what is written to *stream* any more; what is no pipe or socket is always read."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stream of a test, or one that was closed
        return True
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def give_up(stream: TextIO) -> None:
    """Let what is still to be written to *stream* go nowhere, so that the end of the process does not fail by it."""
    try:
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):
        return
    try:
        os.dup2(null, number)
    finally:
        os.close(null)


#: Exit codes, documented in docs/reference/cli.md: who must act decides.
EXIT_OK, EXIT_NEGATIVE, EXIT_USAGE, EXIT_AUTHOR, EXIT_OPERATOR = 0, 1, 2, 3, 4
#: As shells have it for what Ctrl-C ended.
EXIT_INTERRUPTED = 130
EXITS = {
    "caller": EXIT_USAGE,
    "model": EXIT_USAGE,
    "author": EXIT_AUTHOR,
    "operator": EXIT_OPERATOR,
    "user": EXIT_NEGATIVE,
}

#: What a terminal could obey or be fooled by, and what stands for bytes that are no text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

#: What begins a command of GitHub's runner: `::` and a name where a line begins, in an older form `##[` anywhere in it.
COMMAND = re.compile(r"\A(\s*):(?=:[A-Za-z])")
OLD_COMMAND = "##["

#: How the states of work look, and which of them are over.
COLORS = {"succeeded": "green", "failed": "red", "canceled": "yellow", "running": "cyan", "starting": "cyan"}
OVER = frozenset({"succeeded", "failed", "canceled", "skipped"})

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


class SystemRefused(OperatorMustAct, code="system_refused"):
    """The system refused something that a command needs: a full disk, a folder without rights, a stream that takes nothing."""


class Interrupted(UserMustAct, code="interrupted"):
    """Somebody pressed Ctrl-C."""


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout, or stderr; it honours NO_COLOR and plain pipes, and ends no command by itself."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> NoReturn:  # rich would end the process here, whatever it is doing
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Terminal(stderr=stderr, highlight=False)


def print_json(*answers: BaseModel) -> None:
    """Print an answer as one JSON document, several as the fields of all; bytes of a path that are no UTF-8 become U+FFFD."""
    texts = [json_text(answer, indent=2) for answer in answers]
    if len(texts) > 1 or not texts[0].startswith("{\n"):
        fields = {name: value for text in texts for name, value in json.loads(text).items()}
        texts = [json.dumps(fields, indent=2, ensure_ascii=False)]
    sys.stdout.write(unheard(texts[0]) + "\n")


@contextmanager
def failing(*, as_json: bool) -> Iterator[None]:
    """Turn an error into one clear line, or its JSON form, and the exit code of who must act.

    What the system refuses and nobody foresaw is the operator's; a reader that leaves early is no error.
    """
    try:
        yield
    except KdskillsError as error:
        _end(error, EXITS.get(error.who, EXIT_USAGE), as_json=as_json)
    except BrokenPipeError as error:
        if not any(reader_left(stream) for stream in (sys.stdout, sys.stderr)):
            _end(SystemRefused(_words(error)), EXIT_OPERATOR, as_json=as_json)
        give_up(sys.stdout)
        give_up(sys.stderr)
        raise SystemExit(EXIT_OK) from None
    except OSError as error:
        _end(SystemRefused(_words(error)), EXIT_OPERATOR, as_json=as_json)
    except KeyboardInterrupt:
        _end(Interrupted("it was interrupted, and stopped"), EXIT_INTERRUPTED, as_json=as_json)


def _words(error: OSError) -> str:
    path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"the system refuses: {path}{error.strerror or error}"


def _end(error: KdskillsError, code: int, *, as_json: bool) -> NoReturn:
    """Tell of an error, and end with *code*; where standard output takes nothing, standard error is told."""
    try:
        if as_json:
            sys.stdout.write(unheard(json_facts(error.to_json())) + "\n")
        sys.stdout.flush()
        printed = as_json
    except OSError:
        give_up(sys.stdout)
        printed = False
    if not printed:
        from rich.text import Text

        try:
            text = Text.assemble((f"{error.code}: ", "bold red"), one_line(error.message))
            console(stderr=True).print(text, soft_wrap=True)
        except OSError:  # nobody can be told anything; the exit code is left
            give_up(sys.stderr)
    raise SystemExit(code) from None


def table(*columns: str) -> Table:
    """Return an empty table in the house's style."""
    from rich.table import Table

    empty_table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        empty_table.add_column(column, overflow="fold")
    return empty_table


def plain(text: str | None) -> str:
    """Return *text* with console markup disarmed and terminal control characters shown: skill texts are hostile."""
    from rich.markup import escape

    return escape(disarmed(text or ""))


def one_line(text: str) -> str:
    """Return *text* disarmed and on one line: no file name or message can forge further lines, or a command in a log."""
    text = disarmed(text).replace("\n", "\\n").replace("\t", "\\t").replace(OLD_COMMAND, "#\\x23[")
    return COMMAND.sub(r"\1\\x3a", text)


def line(text: str | None) -> str:
    """Return *text* as `plain` does, on one line."""
    return plain(one_line(text or ""))


def shortened(text: str, room: int) -> str:
    """Return *text* on one line, cut to *room* characters."""
    words = " ".join(text.split())
    return words if len(words) <= room else words[: room - 1] + "…"


def disarmed(text: str) -> str:
    """Return *text* with terminal control and bidirectional override characters written as escapes."""
    return CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def mark(*, ok: bool) -> str:
    """Return a green or red mark."""
    return "[green]ok[/]" if ok else "[red]no[/]"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 skill` or `2 skills`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def dollars(amount: float) -> str:
    """Return an amount of US dollars, as exact as it is known."""
    return "$" + f"{amount:.10f}".rstrip("0").rstrip(".")


def from_here(path: str) -> str:
    """Return a path as it is from the working folder; absolute where it leads out of it."""
    relative = Path(os.path.relpath(path))
    return str(Path(path).absolute()) if os.pardir in relative.parts else str(relative)


def unheard(document: str) -> str:
    """Return JSON that says the same, with escapes for what a terminal or a runner of GitHub would obey."""
    document = CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", document)
    return document.replace(OLD_COMMAND, "#\\u0023[")


def print_sarif(log: Mapping[str, Any]) -> None:
    """Print a SARIF log."""
    sys.stdout.write(unheard(json.dumps(as_text(log), indent=2)) + "\n")


def print_github(rows: Iterable[ReportRow]) -> None:
    """Print workflow commands of GitHub for findings."""
    for command in github_commands(rows):
        sys.stdout.write(disarmed(command) + "\n")


def findings(diagnostics: tuple[Any, ...]) -> None:
    """Print diagnostics as `file:line:column severity[code] message`, the cure below."""
    out = console()
    for diagnostic in diagnostics:
        parts = (diagnostic.path, diagnostic.line, diagnostic.column)
        position = ":".join(str(part) for part in parts if part is not None)
        style = STYLES[diagnostic.severity]
        ref = f" [dim]({line(diagnostic.ref)})[/]" if diagnostic.ref else ""
        text = f"[{style}]{diagnostic.severity}\\[{diagnostic.code}][/] {line(diagnostic.message)}{ref}"
        out.print(f"{line(position)}{' ' if position else ''}{text}", soft_wrap=True)
        if diagnostic.fix:
            # Texts of ours to copy keep their lines; of others a line end could forge a finding.
            ours = diagnostic.code == "dependency_undeclared"
            cure, *copied = diagnostic.fix.split("\n") if ours else [diagnostic.fix]
            out.print(f"    [green]cure:[/] {line(cure)}", soft_wrap=True)
            for text in copied:
                out.print(line(text), soft_wrap=True)
