"""What the turn room answers with: lists and texts that also say what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

from kdskills.errors import Diagnostic
from kdskills.skills.selection import Granted, Refused

if TYPE_CHECKING:
    from kdskills.sources import SourcesPool


class PickerEntry(TypedDict):
    """What a person chooses a skill by."""

    id: str
    name: str
    description: str
    when_to_use: list[str]
    namespace: str


class SkillSet(list[str]):
    """Full ids in the order they are read: dependencies first.

    Attributes:
        refused: The references that were refused.
        diagnostics: Cycles, and imports left out.
    """

    def __init__(
        self, ids: Iterable[str] = (), refused: tuple[Refused, ...] = (), diagnostics: tuple[Diagnostic, ...] = ()
    ) -> None:
        super().__init__(ids)
        self.refused = refused
        self.diagnostics = diagnostics


class InstructionBlock(str):
    """The text of an instruction block, with what went into it.

    Attributes:
        pool: The pool given, with the sources of the skills merged in.
        sid_map: `{full id: {sid in the skill: sid in the pool}}`.
        granted: What was granted, in the order asked for.
        refused: What was refused.
        diagnostics: Findings about imports, texts and citations.
    """

    __slots__ = ("diagnostics", "granted", "pool", "refused", "sid_map")

    pool: SourcesPool
    sid_map: Mapping[str, Mapping[int, int]]
    granted: tuple[Granted, ...]
    refused: tuple[Refused, ...]
    diagnostics: tuple[Diagnostic, ...]

    @classmethod
    def of(
        cls,
        text: str,
        *,
        pool: SourcesPool,
        sid_map: Mapping[str, Mapping[int, int]],
        granted: tuple[Granted, ...],
        refused: tuple[Refused, ...],
        diagnostics: tuple[Diagnostic, ...],
    ) -> InstructionBlock:
        """Return *text* with its facts."""
        block = cls(text)
        block.pool = pool
        block.sid_map = MappingProxyType(dict(sid_map))
        block.granted = granted
        block.refused = refused
        block.diagnostics = diagnostics
        return block
