"""What an operation is: a row of the one table that every door derives its commands, routes and tools from.

Whatever only names operations, as a command line that prints its help does, must not pay for their models. A shipped
operation therefore knows where its models and its function are, and imports them when one of them is asked for.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

from kdskills.app.identity import LOCAL, Identity, Profile, Scope

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app.host import Host
    from kdskills.projects.records import Author

Emit = Callable[[Any], None]

#: The operation whose gate holds for every call that runs a command.
RUNS: Final = "skills.run_cmd"

#: What a shipped operation finds out when it is first asked for.
IMPLEMENTED: Final = frozenset({"summary", "input", "output", "errors", "run"})


@dataclass(frozen=True, slots=True)
class Context:
    """Everything about a call that is not an argument.

    Attributes:
        identity: Who calls.
        emit: Told about progress, by operations that have any.
        idempotency_key: Makes a repeated call return the first one's result.
        request_id: For logs and audit rows; empty means that nobody gave one.
        address: Where the call came from, for audit rows; empty where the door knows no address.
        trust: Whether code of a bundle that the caller names by its folder may run. Only the person at the command line
            says so; no argument of an operation does.
    """

    identity: Identity = LOCAL
    emit: Emit | None = None
    idempotency_key: str | None = None
    request_id: str = ""
    address: str = ""
    trust: bool = False

    @property
    def author(self) -> Author:
        """The caller as audit rows name it."""
        from kdskills.projects.records import Author  # which needs SQLAlchemy, as whatever writes such a row does

        identity = self.identity
        name = f"token:{identity.token}" if identity.token else identity.agent
        who = f"{identity.door}:{name}"
        return Author(who, identity.token, identity.agent, self.address, self.request_id)


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: Dotted name, the same at every door.
        summary: One sentence for help texts and tool descriptions.
        errors: Stable codes it raises beside `bad_request`.
        local: Whether it works on files of this machine, for the local account only.
        reads: Whether it changes nothing, so that doors may answer it at once and offer it with GET.
        ui_allowed: Whether pages of the console may call it.
        profile: The list of tools it belongs to: what a model works with, what an author does, or the operator's.
        for_models: Whether models call it themselves, so that arguments out of shape are theirs to mend.
        sees_all: Whether it tells of every skill, or of what no model may see, and so is for callers who see everything.
        commands: Arguments that make it run a command. A call with one of them is for callers who may run `RUNS`, too,
            and is no read, whatever `reads` says of the others.
        judged: Arguments of the host's that the operation itself refuses from callers who may not say them.
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
    sees_all: bool = False
    commands: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()

    def runs_command(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with *arguments* runs a command that an argument names."""
        fields = self.input.model_fields if self.commands else {}
        usual = {name: fields[name].get_default(call_default_factory=True) for name in self.commands}
        return any(arguments.get(name, default) != default for name, default in usual.items())

    def only_reads(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with *arguments* changes nothing."""
        return self.reads and not self.runs_command(arguments)


@dataclass(frozen=True, slots=True)
class OperationFunction:
    """Runs an operation by a function that names what it needs, as a test names fixtures.

    Parameters called `arguments` and `context` are those of the call, `host` is the Host. Every other one is named like
    an attribute of the Host and gets it alone, so that a signature tells what of the composition an operation works on.
    A function that is no coroutine function blocks, and runs in a thread.
    """

    function: Callable[..., Any]

    async def __call__(self, host: Host, arguments: BaseModel, context: Context) -> BaseModel:
        """Run the operation. Raises as the function, and as the attributes of the Host."""
        call = {"host": host, "arguments": arguments, "context": context}
        names = [name for name in self.function.__annotations__ if name != "return"]
        values = {name: call[name] if name in call else getattr(host, name) for name in names}
        blocks = not iscoroutinefunction(self.function)
        answer: BaseModel = await (to_thread(self.function, **values) if blocks else self.function(**values))
        return answer

    def model(self, name: str) -> type[BaseModel]:
        """Return the model that a parameter, or `return`, is annotated with."""
        model: type[BaseModel] = self.function.__globals__[self.function.__annotations__[name]]
        return model


class Shipped(Operation):
    """A shipped operation: what the table says of it is there at once, its function and models when they are asked for.

    Without a *summary* it is what a model is told of the tool of that name. *source* is where the function is, as
    `module:name` within this room, whose annotations name the models; *input_source* is given when the input model can
    be imported for less. *errors* may be a function, for codes that it takes an import to know.
    """

    source: str
    input_source: str

    def __init__(
        self,
        name: str,
        summary: str | None,
        source: str,
        errors: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
        *,
        profile: Profile,
        input_source: str = "",
        **facts: Any,
    ) -> None:
        assert facts.keys() <= self.__dataclass_fields__.keys(), facts  # a fact that is misspelt holds for nobody
        facts |= {"name": name, "source": source, "profile": profile, "input_source": input_source}
        facts |= {"_errors": errors} if callable(errors) else {"errors": errors}
        facts |= {} if summary is None else {"summary": summary}
        for fact, value in facts.items():
            object.__setattr__(self, fact, value)

    def __getattr__(self, name: str) -> object:
        """Find out what this object has not got yet."""
        if name not in IMPLEMENTED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        value: object
        if name == "summary":
            value = _located("kdskills.session.tools:DESCRIPTIONS")[self.name]
        elif name == "errors":
            value = vars(self)["_errors"]()
        elif name == "input" and self.input_source:
            value = _located(f"{__package__}.{self.input_source}")
        else:
            function = OperationFunction(_located(f"{__package__}.{self.source}"))
            value = function if name == "run" else function.model("arguments" if name == "input" else "return")
        object.__setattr__(self, name, value)
        return value


def _located(source: str) -> Any:
    module, _, name = source.partition(":")
    return getattr(import_module(module), name)
