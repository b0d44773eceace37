"""`kdskills chat`: a conversation at a terminal, a turn a line, and what can be done with it beside talking."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer

from kdskills.doors.cli import commands
from kdskills.doors.cli.derived import Trust, run
from kdskills.doors.cli.output import console, counted, failing, line, one_line
from kdskills.errors import BadRequest, KdskillsError

if TYPE_CHECKING:
    from kdskills.doors.cli.turns import Teller

#: Who decides in a chat: its view is what `/skills` and `/why` are about.
CONSUMER: Final = "solver.react.decision"


class Chat:
    """One conversation: *talk* holds the arguments of each of its turns."""

    def __init__(self, ctx: typer.Context, talk: Mapping[str, Any], *, trust: bool) -> None:
        self._ctx, self._talk, self._trust = ctx, talk, trust
        self._view = {"bundle": talk["bundle"], "consumer": CONSUMER, "roles": talk["roles"]}
        self._conversation = {"id": talk["session"]}

    def _ask(self, operation: str, arguments: Mapping[str, Any], emit: Teller | None = None) -> Any:
        return run(self._ctx, lambda ask: ask(operation, arguments, emit, trust=self._trust))

    def turn(self, request: str) -> None:
        """Run one turn and print it."""
        from kdskills.doors.cli.turns import Teller

        teller = Teller(brief=True)
        try:
            teller.end(self._ask("solver.run", {**self._talk, "request": request}, teller))
        except BaseException:  # raised again: what was written of the answer ends its line
            teller.pause()
            raise

    def greet(self) -> None:
        """Say what is gone on with."""
        turns: tuple[Any, ...] = ()
        with contextlib.suppress(KdskillsError):
            turns = self._ask("conversations.get", self._conversation).turns
        last = f", the last: {one_line(turns[-1].request)[:60]}" if turns else ""
        out = console(stderr=True)
        out.print(line(f"conversation {self._talk['session']}: {counted(len(turns), 'turn')} so far{last}"))
        out.print(line(", ".join(COMMANDS)) + "; an empty line ends it", style="dim")

    def skills(self, words: str) -> None:
        """List the skills as the model may use them, all or those of a word."""
        commands.skills(self._ask("skills.list", {**self._view, "filter": words}))

    def why(self, words: str) -> None:
        """Explain why a skill is available or not."""
        if not words:
            raise BadRequest("name a skill: /why SKILL", code="usage")
        commands.why(self._ask("skills.why", {**self._view, "ref": words, "by": "model"}))

    def undo(self, words: str) -> None:
        """Take back the last turn."""
        commands.undone(self._ask("conversations.undo", self._conversation))

    def save(self, words: str) -> None:
        """Write the conversation into a new file, as Markdown."""
        from kdskills.sources import render_citations

        conversation = self._ask("conversations.get", self._conversation)
        rows, path = {row["sid"]: row for row in conversation.sources}, Path(words or f"{self._talk['session']}.md")
        answers = [(turn, render_citations(turn.answer, rows, mode="footnotes")) for turn in conversation.turns]
        quoted = [("> " + turn.request.replace("\n", "\n> "), answer) for turn, answer in answers]
        try:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write("\n\n".join(text for pair in quoted for text in pair) + "\n")
        except (OSError, ValueError) as error:
            code = "path_exists" if isinstance(error, FileExistsError) else "path_missing"
            words = f"{path} is not written: {getattr(error, 'strerror', None) or error}"
            raise BadRequest(words, code=code, path=str(path)) from None
        console().print(f"{counted(len(quoted), 'turn')} written to {line(str(path))}", soft_wrap=True)

    def hear(self, words: str) -> None:
        """Do what a line says: a command, or a turn."""
        name, _, rest = words.partition(" ")
        if name in COMMANDS:
            COMMANDS[name](self, rest.strip())
        elif name.startswith("/") and name[1:].isalpha():
            raise BadRequest(f"there is no {one_line(name)}; there are {', '.join(COMMANDS)}", code="usage")
        else:
            self.turn(words)


COMMANDS: Final[Mapping[str, Callable[[Chat, str], None]]] = MappingProxyType(
    {"/skills": Chat.skills, "/why": Chat.why, "/undo": Chat.undo, "/save": Chat.save}
)


def chat(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")],
    session: Annotated[
        str | None, typer.Option(help="Conversation to go on with, kept in `session_store`; a new one when omitted.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Id of the user the conversation is with.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="Role of the user, whose `@role` rules hold.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model, as for `run`; none means the setting.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="How often the model may decide in a turn.", min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens that one reply of the model may take.", min=1)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="How freely the model chooses its words.", min=0, max=2)
    ] = None,
    trust: Trust = False,
) -> None:
    """Talk with a bundle: each line is a request of one conversation, until an empty line or the end of the input.

    `/skills [WORD]` lists skills, `/why SKILL` explains one, `/undo` takes the last turn back, `/save [FILE]` writes what was said.
    """
    session = session or f"chat-{uuid4()}"
    talk = {"bundle": bundle, "session": session, "user": user, "model": model, "max_steps": max_steps}
    talk |= {"roles": role or ()} | {"max_tokens": max_tokens, "temperature": temperature, "stream": True}
    at_terminal = sys.stdin.isatty()
    with failing(as_json=False):
        conversation = Chat(ctx, talk, trust=trust)
        if at_terminal:
            _edit_lines()
            conversation.greet()
        for words in iter(lambda: _request("> " if at_terminal else ""), ""):
            try:
                conversation.hear(words)
            except KdskillsError as error:
                if not at_terminal:
                    raise
                console(stderr=True).print(line(f"{error.code}: {error.message}"), soft_wrap=True)
            except KeyboardInterrupt:  # of this turn: the conversation is as it was before
                console(stderr=True).print("stopped; say something else, or nothing to end")
        console(stderr=True).print(f"the conversation is {line(session)}")


def _edit_lines() -> None:
    """Let lines be edited and called back, where the interpreter can."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - it is what importing it does


def _request(prompt: str) -> str:
    """Return the next line, blank at the end of the input; the prompt is no part of what a pipe reads."""
    if not sys.stdout.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    try:
        return input(prompt).strip()
    except EOFError:
        return ""
