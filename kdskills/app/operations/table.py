"""What an operation is: a row of the one table that every door derives its commands, routes and tools from.

Whatever only names operations, as a command line that prints its help does, must not pay for their models. A shipped
operation therefore knows where its models and its function are, and imports them when one of them is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kdskills.app.identity import LOCAL, Identity, Profile, Scope

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app.host import Host

Emit = Callable[[Any], None]

#: The operation whose gate holds for every call that runs a command.
RUNS: Final = "skills.run_cmd"

#: What a shipped operation asks its implementation for.
IMPLEMENTED: Final = frozenset({"summary", "input", "output", "errors", "run"})


@dataclass(frozen=True, slots=True)
class Context:
    """Everything about a call that is not an argument.

    Attributes:
        identity: Who calls.
        emit: Told about progress, by operations that have any.
        idempotency_key: Makes a repeated call return the first one's result.
        request_id: For logs and audit rows; empty means that nobody gave one.
        trust: Whether code of a bundle that the caller names by its folder may run. Only the person at the command line
            says so; no argument of an operation does.
    """

    identity: Identity = LOCAL
    emit: Emit | None = None
    idempotency_key: str | None = None
    request_id: str = ""
    trust: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: Dotted name, the same at every door.
        summary: One sentence for help texts and tool descriptions.
        input: Model of the arguments.
        output: Model of the answer.
        errors: Stable codes it raises beside `bad_request`.
        run: Does it, for the caller the context names.
        scope: What the caller must be allowed to do.
        local: Whether it works on files of this machine, for the local account only.
        reads: Whether it changes nothing, so that doors may answer it at once and offer it with GET.
        ui_allowed: Whether pages of the console may call it.
        profile: The list of tools it belongs to: what a model works with, what an author does, or the operator's.
        for_models: Whether models call it themselves, so that arguments out of shape are theirs to mend.
        commands: Arguments that make it run a command. A call with one of them is for callers who may run `RUNS`, too,
            and is no read, whatever `reads` says of the others.
    """

    name: str
    summary: str
    input: type[BaseModel]
    output: type[BaseModel]
    errors: tuple[str, ...]
    run: Callable[[Host, Any, Context], Awaitable[BaseModel]]
    scope: Scope = "skills:read"
    local: bool = False
    reads: bool = False
    ui_allowed: bool = False
    profile: Profile = "operator"
    for_models: bool = False
    commands: tuple[str, ...] = ()

    def runs_command(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with *arguments* runs a command that an argument names."""
        fields = self.input.model_fields if self.commands else {}
        usual = {name: fields[name].get_default(call_default_factory=True) for name in self.commands}
        return any(arguments.get(name, default) != default for name, default in usual.items())

    def only_reads(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with *arguments* changes nothing."""
        return self.reads and not self.runs_command(arguments)


@dataclass(frozen=True)
class Implementation:
    """What a shipped operation needs to run, kept beside the models it names.

    Attributes:
        input: Model of the arguments.
        output: Model of the answer.
        errors: Stable codes it raises beside `bad_request`.
        run: Does it, for the caller the context names.
        summary: What it does, where those who call it without the table are told in the same words; else the table says it.
    """

    input: type[BaseModel]
    output: type[BaseModel]
    errors: tuple[str, ...]
    run: Callable[[Host, Any, Context], Awaitable[BaseModel]]
    summary: str = ""


class Shipped(Operation):
    """A shipped operation: what the table says of it is there at once, its implementation when it is first asked for.

    Args:
        name: Dotted name, the same at every door.
        summary: One sentence; None for that of the implementation.
        source: Where the implementation is, as `module:NAME` within this room.
        input_source: Where the input model is, when it can be imported for less than the implementation.
        scope: What the caller must be allowed to do.
        local: Whether it works on files of this machine, for the local account only.
        reads: Whether it changes nothing.
        ui_allowed: Whether pages of the console may call it.
        profile: The list of tools it belongs to; every operation says which.
        for_models: Whether models call it themselves.
        commands: Arguments that make it run a command.
    """

    source: str
    input_source: str

    def __init__(
        self,
        name: str,
        summary: str | None,
        source: str,
        *,
        profile: Profile,
        scope: Scope = "skills:read",
        local: bool = False,
        reads: bool = False,
        ui_allowed: bool = False,
        for_models: bool = False,
        commands: tuple[str, ...] = (),
        input_source: str = "",
    ) -> None:
        facts: dict[str, object] = {"name": name, "source": source, "scope": scope, "local": local, "reads": reads}
        facts |= {"profile": profile, "ui_allowed": ui_allowed, "for_models": for_models}
        facts |= {"commands": commands, "input_source": input_source}
        facts |= {} if summary is None else {"summary": summary}
        for fact, value in facts.items():
            object.__setattr__(self, fact, value)

    def __getattr__(self, name: str) -> object:
        """Return what only the implementation knows; asked for what this object has not got yet."""
        if name not in IMPLEMENTED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        apart = name == "input" and self.input_source
        module, _, constant = (self.input_source if apart else self.source).partition(":")
        value = getattr(import_module(f"{__package__}.{module}"), constant)
        value = value if apart else getattr(value, name)
        object.__setattr__(self, name, value)
        return value
