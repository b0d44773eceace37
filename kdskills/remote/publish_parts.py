"""Shared by both routes of publishing: the report, the texts of skills, and their entries in receipts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kdskills.remote.receipts import ReceiptSkillEntry
from kdskills.turn import Granted, instruction_block

if TYPE_CHECKING:
    from kdskills.errors import Diagnostic
    from kdskills.turn import SkillView

Route = Literal["tools", "roots"]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What was published.

    Attributes:
        route: `tools` or `roots`.
        digest: Digest of the view.
        names: `{name the model sees: full id}`: the reverse map.
        skills: Published skills with digests of their texts, by full id.
        folder: The root folder passed to the server, for route `roots`.
        diagnostics: Findings about the texts.
    """

    route: Route
    digest: str
    names: Mapping[str, str]
    skills: tuple[ReceiptSkillEntry, ...]
    folder: str | None = None
    diagnostics: tuple[Diagnostic, ...] = field(default=())


def receipts(texts: Mapping[str, tuple[str, tuple[Diagnostic, ...]]]) -> tuple[ReceiptSkillEntry, ...]:
    """Return the entries of published texts for a receipt."""
    return tuple(
        ReceiptSkillEntry(full_id, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest())
        for full_id, (text, _) in sorted(texts.items())
    )


def text_of(view: SkillView, full_id: str) -> tuple[str, tuple[Diagnostic, ...]]:
    """Return the text of a skill with what it imports, dependencies first; empty when it is refused."""
    resolution = view.resolve(full_id)
    if not isinstance(resolution, Granted):
        return "", ()
    block = instruction_block(view, (resolution,))
    return str(block), tuple(block.diagnostics)
