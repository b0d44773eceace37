"""Commands made of operations: words from the input model, the call, the exit code of the answer.

What a command's parameters are stands in a model, and models cost time to import. A command therefore makes its
parameters when it is called or its own help is asked for; the help of its group needs one sentence only.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar, Union, get_args, get_origin

import typer
from typer.core import TyperCommand
from typer.main import get_command

from kdskills.app.identity import LOCAL
from kdskills.app.operations import OPERATIONS
from kdskills.app.operations.table import Context, Emit
from kdskills.doors.cli.output import EXIT_NEGATIVE, EXIT_OK, failing, one_line, print_json
from kdskills.errors import BundleError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from kdskills.app import Host


T = TypeVar("T")
Ask = Callable[..., Awaitable[Any]]
"""Runs an operation by name with its arguments, as the account at the command line, and returns its answer."""

Prelude = Callable[..., Awaitable[None]]
"""What a command does first: takes its context, what runs operations, the arguments, and `trust`."""

AT_CLI: Final = replace(LOCAL, door="cli")


class HostSource:
    """What the commands of one command line share: a Host, made of this machine's settings when one first needs it."""

    def __init__(self, host: Host | None = None) -> None:
        if host is not None:
            self.host = host

    @cached_property
    def host(self) -> Host:
        """The Host. Raises as making one does."""
        from kdskills.app import Host  # help and completion must not cost what a Host imports

        return Host()


def split(text: str) -> tuple[str, ...]:
    """Return the values of an option that holds several, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def host_of(ctx: typer.Context) -> Host:
    """Return the Host the command line was started with. Raises as making one does."""
    source = ctx.find_object(HostSource)
    if source is not None:
        return source.host
    from kdskills.app import Host

    host = ctx.find_object(Host)
    if host is None:
        raise RuntimeError("commands run below `build_cli`, which says what Host they have")
    return host


def run(ctx: typer.Context, do: Callable[[Ask], Awaitable[T]]) -> T:
    """Do something with what runs operations, and close what background work opened for it."""

    async def do_and_close() -> T:
        host = host_of(ctx)

        async def ask(
            operation: str,
            arguments: Mapping[str, Any],
            emit: Emit | None = None,
            *,
            key: str | None = None,
            trust: bool = False,
        ) -> BaseModel:
            from kdskills.app.logs import number_of  # which the help of commands does not need
            from kdskills.errors.traces import VARIABLE

            context = Context(identity=AT_CLI, emit=emit, idempotency_key=key, trust=trust)
            with host.telemetry.request("cli", number_of(""), os.environ.get(VARIABLE)):
                return await host.invoke(operation, arguments, context)

        try:
            return await do(ask)
        finally:
            if "turn_runs" in vars(host):  # what was started here ends with this process
                await host.turn_runs.wait()
            if "work" in vars(host):  # else nothing was opened, and asking would open it
                await host.work.aclose()

    return run_loop(do_and_close())


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own, as `asyncio.run` does; Ctrl-C ends it whenever it comes.

    With `asyncio.run` alone, one that comes just before the loop waits is noticed when the loop next wakes, which may be never.
    """
    import asyncio
    import socket

    async def woken_by_signals() -> T:
        waking, signals = socket.socketpair()
        with waking, signals:
            signals.setblocking(False)
            waking.setblocking(False)
            loop = asyncio.get_running_loop()
            loop.add_reader(waking, waking.recv, 4096)
            before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
            try:
                return await work
            finally:
                signal.set_wakeup_fd(before)
                loop.remove_reader(waking)

    in_main = threading.current_thread() is threading.main_thread()  # which alone hears signals
    return asyncio.run(woken_by_signals() if in_main else work)


def confirmed(question: str) -> bool:
    """Ask the person at the terminal, also from within a loop; Ctrl-C ends the question at once.

    A loop's own handler of it would wait until the question is answered.
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm(question, err=True)
    finally:
        signal.signal(signal.SIGINT, handler)


def trusting(do: Callable[[bool], T], *, trust: bool, asks: bool) -> T:
    """Do something that may need code of a bundle, and is told whether that is trusted.

    Where nobody trusts it yet, the person at a terminal is asked once if *asks*. Raises BundleError,
    `bundle_untrusted`, when nobody can be asked, or the person said no.
    """
    try:
        return do(trust)
    except BundleError as error:
        if error.code != "bundle_untrusted" or not (asks and sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        typer.echo(one_line(error.message), err=True)
        if not confirmed("Run it this time?"):
            raise BundleError("its code was not run, as you said", code=error.code, who="user") from None
    return do(True)


Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code of the bundle's folder with your rights.")]
Printer = Callable[..., None]

#: Stands for the default of the model.
OF_MODEL: Final = object()


@dataclass(frozen=True)
class Word:
    """How an argument is said at the command line, where that differs from what its model says.

    Attributes:
        name: Of the option; the field's with dashes when empty.
        short: The option's short form.
        help: What it means; the field's description when empty.
        default: What it is when nobody says it; the field's own by default.
        shown: What the help tells as the default where the value itself tells nothing.
        metavar: What a positional argument is called in the usage.
        required: Whether it must be said though the model has a default.
        commas: Whether one option holds all values, separated by commas; else the option is repeated.
        joined: Whether several words are one text, with blanks between.
        ranged: Whether the command line checks the bounds of the model itself, and shows them.
        otherwise: Gives the value when nobody says it and the command runs.
    """

    name: str = ""
    short: str = ""
    help: str = ""
    default: Any = OF_MODEL
    shown: str = ""
    metavar: str | None = None
    required: bool = False
    commas: bool = False
    joined: bool = False
    ranged: bool = False
    otherwise: Callable[[], Any] | None = None


BUNDLE: Final = Word(help="The bundle's folder.", required=True)
#: Arguments that many operations have, said alike by every command.
WORDS: Final[Mapping[str, Word]] = MappingProxyType(
    {
        "bundle": BUNDLE,
        "consumer": Word(short="-c"),
        "tools": Word(help="Tools the consumer has, comma-separated; '' means none.", commas=True),
        "roles": Word("--role", help="Role of the user it is for, whose `@role` rules hold; again for more."),
        "model": Word(short="-m"),
        "executor": Word(short="-e"),
        "out": Word(short="-o"),
    }
)


@dataclass(frozen=True)
class Row:
    """A command made of an operation: a decorator of the function that prints its answers.

    Attributes:
        summary: The command's help; the printer's docstring when empty.
        positional: Arguments that are said by their position, in order.
        words: How arguments are said that are not as in `WORDS` or the model.
        constants: Arguments nobody says here, and their values.
        hidden: Arguments nobody says here; the model's defaults hold.
        flags: Options of the printer by name, with their help.
        trust: Whether the bundle's code may have to be trusted.
        narrator: Makes what prints the events of a call, and by its `end`, where it has one, the answer instead of the printer.
        prelude: Done before the operation, with the same arguments and trust; not for `--json`.
        formats: What prints answers for other programs, by what `--format` calls it.
    """

    app: typer.Typer
    name: str
    operation: str
    summary: str = ""
    positional: tuple[str, ...] = ()
    words: Mapping[str, Word] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    trust: bool = False
    narrator: Callable[[], Any] | None = None
    prelude: Prelude | None = None
    formats: Mapping[str, Printer] = field(default_factory=dict)

    def __call__(self, printer: Printer) -> Printer:
        """Add the command, whose answers *printer* prints, and return the printer."""
        kind = type("DerivedCommand", (DerivedCommand,), {"row": self, "printer": staticmethod(printer)})
        summary = self.summary or " ".join((printer.__doc__ or "").split())
        self.app.command(self.name, cls=kind, help=summary)(lambda: None)
        return printer

    def word(self, name: str) -> Word:
        """Return how an argument is said."""
        return self.words.get(name) or WORDS.get(name) or Word()

    def fields(self) -> dict[str, FieldInfo]:
        """Return the arguments that are said here, positional ones first."""
        fields = OPERATIONS[self.operation].input.model_fields
        names = dict.fromkeys((*self.positional, *fields))
        return {name: fields[name] for name in names if name not in self.constants and name not in self.hidden}

    def arguments(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operation's arguments; one that nobody said is left to its model."""
        arguments = dict(self.constants)
        for name in self.fields():
            word, value = self.word(name), words[name]
            if value in (None, []) and word.otherwise is not None:
                value = word.otherwise()
            if word.commas and value is not None:
                value = split(value)
            if word.joined and value is not None:
                value = " ".join(value)
            if value is not None:
                arguments[name] = value
        return arguments


class DerivedCommand(TyperCommand):
    """A command that makes its parameters when they are first asked for."""

    row: ClassVar[Row]
    printer: ClassVar[Printer]

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        del self.params, self.callback  # `__getattr__` is asked for what an object has not got

    def __getattr__(self, name: str) -> Any:
        """Make the parameters, and what takes them, of the operation's input model."""
        if name not in {"params", "callback"}:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        maker = typer.Typer(add_completion=False)
        maker.command()(_function(self.row, type(self).printer))
        command = get_command(maker)
        self.params, self.callback = command.params, command.callback
        return vars(self)[name]


def answer(
    ctx: typer.Context,
    operation: str,
    arguments: Mapping[str, Any],
    printer: Callable[[Any], None],
    *,
    as_json: bool,
    trust: bool = False,
    asks: bool = True,
    emit: Emit | None = None,
    prelude: Prelude | None = None,
) -> Any:
    """Run an operation, print its answer and return it; *asks* as in `trusting`. Raises what `failing` raises."""

    async def call(ask: Ask, trusted: bool) -> Any:
        if prelude is not None and not as_json:
            await prelude(ctx, ask, arguments, trust=trusted)
        return await ask(operation, arguments, emit, trust=trusted)

    with failing(as_json=as_json):
        output = trusting(
            lambda trusted: run(ctx, lambda ask: call(ask, trusted)),
            trust=trust,
            asks=asks and not as_json,
        )
        if as_json:
            print_json(output)
        else:
            printer(output)
    return output


def _function(row: Row, printer: Printer) -> Callable[..., None]:
    def command(ctx: typer.Context, **words: Any) -> None:
        form = words.get("format", "text")
        as_json = words["as_json"] or form == "json"
        with failing(as_json=as_json):
            arguments = row.arguments(words)
        narrator = None if as_json or row.narrator is None else row.narrator()
        show: Printer = row.formats.get(form, getattr(narrator, "end", printer))
        output = answer(
            ctx,
            row.operation,
            arguments,
            lambda output: show(output, **{name: words[name] for name in row.flags}),
            as_json=as_json,
            trust=words.get("trust", False),
            emit=narrator,
            prelude=row.prelude,
        )
        raise typer.Exit(EXIT_NEGATIVE if output.negative else EXIT_OK)

    options: dict[str, tuple[Any, Any]] = {"ctx": (typer.Context, inspect.Parameter.empty)}
    options |= {name: _parameter(row, name, info) for name, info in row.fields().items()}
    for name, text in row.flags.items():
        options[name] = Annotated[bool, typer.Option(f"--{name}", help=text)], False
    options |= {"format": (format_option(row.formats), "text")} if row.formats else {}
    options |= {"trust": (Trust, False)} if row.trust else {}
    options |= {"as_json": (Json, False)}
    by_name = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    signature = [by_name(name, annotation=kind, default=default) for name, (kind, default) in options.items()]
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # of functions, for `inspect`
    command.__annotations__ = {part.name: part.annotation for part in signature}
    return command


def format_option(formats: Iterable[str]) -> Any:
    """Return the annotation of `--format`, which may be `text`, `json`, and what *formats* name."""
    names = ("text", "json", *formats)
    *first, last = (f"`{name}`" for name in names)
    words = f"How it is told: {', '.join(first)} or {last}."
    return Annotated[StrEnum("Format", {name: name for name in names}), typer.Option("--format", help=words)]


def _parameter(row: Row, name: str, info: FieldInfo) -> tuple[Any, Any]:
    """Return annotation and default of an argument; a default that is empty means that it must be said."""
    word = row.word(name)
    kind = list[str] if word.joined else str if word.commas else _type_of(info.annotation)
    default = info.get_default(call_default_factory=True) if word.default is OF_MODEL else word.default
    if word.required or (info.is_required() and word.default is OF_MODEL):
        default = inspect.Parameter.empty
    elif default == () or word.commas:
        default = None
    facts: dict[str, Any] = {"help": word.help or _meaning(info), "metavar": word.metavar}
    if default is None:
        kind |= None
    facts |= {"show_default": word.shown} if word.shown else {}
    if word.ranged:
        facts["min"] = next((limit.ge for limit in info.metadata if hasattr(limit, "ge")), None)
        facts["max"] = next((limit.le for limit in info.metadata if hasattr(limit, "le")), None)
    if name in row.positional:
        return Annotated[kind, typer.Argument(**facts)], default
    spelling = word.name or f"--{name.replace('_', '-')}"
    return Annotated[kind, typer.Option(spelling, *filter(None, (word.short,)), **facts)], default


def _type_of(annotation: Any) -> Any:
    """Return what the command line reads for a field: one of several texts as text, several values as a list."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        return _type_of(next(part for part in parts if part is not NoneType))
    if origin is Annotated:
        return _type_of(parts[0])
    if origin is tuple:
        return list[_type_of(parts[0])]  # type: ignore[misc]  # a type made at run time
    kind = str if origin is Literal else annotation
    if kind not in {str, int, float, bool, Path}:
        raise TypeError(f"no command line says {annotation}")
    return kind


def _meaning(info: FieldInfo) -> str:
    """Return the description of a field, with the texts it may have."""
    text = info.description or ""
    annotations = [info.annotation, *get_args(info.annotation)]
    choices = next((get_args(part) for part in annotations if get_origin(part) is Literal), ())
    if not choices:
        return text
    *first, last = (f"`{choice}`" for choice in choices)
    return f"{text.removesuffix('.')}: {', '.join(first)} or {last}."
