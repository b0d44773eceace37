"""What a reference probably means, for the author of skills, who may see all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.app.operations.consumers import LEAST, nearest
from kdskills.skills.refs import parse_ref
from kdskills.turn import Refused

if TYPE_CHECKING:
    from kdskills.turn import SkillsSubsystem, SkillView

MOST_SUGGESTED = 3


def meant_id(subsystem: SkillsSubsystem, view: SkillView, ref: str) -> str:
    """Return the full id a reference means: *ref* itself, but the one skill of a bare id that the view does not know.

    A bare id means a skill of namespace `public` where nothing else is said. To people it means the only skill of that
    id, whatever its namespace and whether it is granted or not.
    """
    answer = view.resolve(ref, by="code")
    if not isinstance(answer, Refused) or answer.code != "unknown_skill" or parse_ref(ref).kind != "bare":
        return ref
    full_ids = _of_id(subsystem, parse_ref(ref).value)
    return full_ids[0] if len(full_ids) == 1 else ref


def suggestions(subsystem: SkillsSubsystem, ref: str) -> tuple[str, ...]:
    """Return full ids that *ref* may have been meant for: those of its id, else those of a name like it."""
    parsed = parse_ref(ref)
    if parsed.kind not in {"bare", "full"}:
        return ()
    full_ids = _of_id(subsystem, parsed.value.rpartition(".")[2])
    if full_ids:
        return tuple(full_ids[:MOST_SUGGESTED])
    candidates = _all(subsystem)
    rated = [(nearest(parsed.value, (full_id, full_id.partition(".")[2]))[1], full_id) for full_id in candidates]
    similar = sorted((-ratio, full_id) for ratio, full_id in rated if ratio >= LEAST)
    return tuple(full_id for _, full_id in similar[:MOST_SUGGESTED])


def _of_id(subsystem: SkillsSubsystem, bare: str) -> list[str]:
    return [full_id for full_id in _all(subsystem) if full_id.partition(".")[2] == bare]


def _all(subsystem: SkillsSubsystem) -> list[str]:
    """Return every full id there is, those refused at load among them."""
    return sorted({*subsystem.registry, *subsystem.snapshot.invalid})
