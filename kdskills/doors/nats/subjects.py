"""Subjects of the bus: who calls what is told by them, and by nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["cmd", "req", "evt"]

TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
SKILLS: Final = "skills."
OTHER_OPERATIONS: Final = "kd."
"""Operations that are not called `skills.…` have their subjects under this reserved name."""


@dataclass(frozen=True, slots=True)
class CallAddress:
    """A subject, understood.

    Attributes:
        version: Of the protocol, such as `v1`.
        project: Whose call it is.
        channel: The caller within the project.
        kind: `cmd` for commands, `req` for quick reads, `evt` for results and progress.
        operation: Name in the table of operations.
    """

    version: str
    project: str
    channel: str
    kind: Kind
    operation: str

    def subject(self, kind: Kind, suffix: str = "") -> str:
        """Return the subject of another kind for the same call."""
        tail = f".{suffix}" if suffix else ""
        return f"cg.{self.version}.{self.project}.{self.channel}.{kind}.tool.{tool_of(self.operation)}{tail}"


def tool_of(operation: str) -> str:
    """Return the part of a subject that names an operation."""
    return operation if operation.startswith(SKILLS) else OTHER_OPERATIONS + operation


def parse(subject: str) -> CallAddress | None:
    """Return the address of a command's or read's subject; None for any other."""
    parts = subject.split(".")
    if len(parts) < 8 or parts[0] != "cg" or parts[5] != "tool" or not all(TOKEN.fullmatch(part) for part in parts):
        return None
    version, project, channel, kind = parts[1:5]
    if kind not in {"cmd", "req"}:
        return None
    tool = ".".join(parts[6:])
    if tool.startswith(OTHER_OPERATIONS) and not tool.removeprefix(OTHER_OPERATIONS).startswith(SKILLS):
        return CallAddress(version, project, channel, kind, tool.removeprefix(OTHER_OPERATIONS))  # type: ignore[arg-type]  # checked
    if tool.startswith(SKILLS):
        return CallAddress(version, project, channel, kind, tool)  # type: ignore[arg-type]  # checked
    return None


def filters(version: str, kind: Kind) -> tuple[str, str]:
    """Return the subjects of every operation, of one version and kind, in any project and channel."""
    return f"cg.{version}.*.*.{kind}.tool.skills.>", f"cg.{version}.*.*.{kind}.tool.kd.>"
