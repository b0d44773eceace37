"""What the inputs and outputs of operations have in common; in a file of its own, so that naming operations needs no pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from kdskills.errors import Diagnostic


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
