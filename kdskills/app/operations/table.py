"""What an operation is: a row of the one table that every door derives its commands, routes and tools from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from kdskills.app.identity import LOCAL, Identity, Scope
from kdskills.errors import Diagnostic

if TYPE_CHECKING:
    from kdskills.app.host import Host

Emit = Callable[[Any], None]


class Input(BaseModel):
    """Arguments of an operation; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Output(BaseModel):
    """The answer of an operation."""

    model_config = ConfigDict(frozen=True)


class Finding(Output):
    """A diagnostic in an answer; fields as `kdskills.Diagnostic`."""

    code: str
    severity: str
    message: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    ref: str | None = None
    fix: str | None = None

    @classmethod
    def of(cls, diagnostic: Diagnostic) -> Finding:
        """Return *diagnostic* as part of an answer."""
        return cls.model_validate(diagnostic.to_json())


@dataclass(frozen=True, slots=True)
class Context:
    """Everything about a call that is not an argument.

    Attributes:
        identity: Who calls.
        emit: Told about progress, by operations that have any.
        idempotency_key: Makes a repeated call return the first one's result (spec work §5).
        request_id: For logs and audit rows; empty means that nobody gave one.
    """

    identity: Identity = LOCAL
    emit: Emit | None = None
    idempotency_key: str | None = None
    request_id: str = ""


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
