"""`skills.fix`: mend what can be mended in skill files without touching a body (spec skills §1.5)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kdskills.app.operations.checking import skill_folders
from kdskills.app.operations.table import Input, Operation, Output
from kdskills.errors import BadRequest
from kdskills.skills.fix import apply_fix, plan_fix

if TYPE_CHECKING:
    from kdskills.app.host import Emit, Host


class FixInput(Input):
    """What to mend."""

    path: Path = Field(description="A skill folder, or a folder of skills.")
    rename: bool = Field(default=False, description="Fit folder names to skill names.")
    dry_run: bool = Field(default=False, description="Say what would be done, change nothing.")


class Change(Output):
    """What is mended in one skill, with its diff, and what cannot be."""

    path: str
    done: tuple[str, ...]
    skipped: tuple[str, ...]
    diff: str


class FixOutput(Output):
    """The changes, made or, in a dry run, planned."""

    dry_run: bool
    changes: tuple[Change, ...]


async def fix(host: Host, given: FixInput, emit: Emit | None = None) -> FixOutput:
    """Mend skill files."""
    top = given.path
    if not top.is_dir():
        raise BadRequest(f"{top} is no folder", code="path_missing", path=str(top))
    changes = []
    for folder in skill_folders(top):
        plan = plan_fix(folder, rename=given.rename)
        if plan is None or not (plan.changed or plan.skipped):
            continue
        changes.append(Change(path=str(folder), done=plan.done, skipped=plan.skipped, diff=plan.diff))
        if plan.changed and not given.dry_run:
            apply_fix(plan)
    return FixOutput(dry_run=given.dry_run, changes=tuple(changes))


FIX = Operation("skills.fix", "Mend skill files without touching a body.", FixInput, FixOutput, ("path_missing",), fix)
