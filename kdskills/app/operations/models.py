"""What the inputs and outputs of operations have in common; in a file of its own, so that naming operations needs no pydantic."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from kdskills.errors import Diagnostic


class Input(BaseModel):
    """Arguments of an operation; unknown fields are refused.

    `MAY_HOLD_NUL` lists paths of texts, such as `/inputs/*/text`, that may hold NUL; it breaks databases and file names
    everywhere else, and is refused there before a model sees it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ()


class Output(BaseModel):
    """The answer of an operation."""

    model_config = ConfigDict(frozen=True)

    @property
    def negative(self) -> bool:
        """Whether the answer is a no, for which the command line exits with 1."""
        return False


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
