"""`skills.fix`: mend what can be mended in skill files without touching a body."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kdskills.app.operations.checking import CheckInput, CheckOutput, check_path, checked_bundle, skill_folders
from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest, FileRefused
from kdskills.skills.fix import apply_fix, plan_fix
from kdskills.skills.listing import printable_path
from kdskills.skills.safe_open import is_folder

if TYPE_CHECKING:
    from kdskills.app.host import Host


class FixInput(Input):
    """What to mend."""

    path: Path = Field(description="A skill folder or file, a folder of skills, or a bundle.")
    rename: bool = Field(default=False, description="Fit folder names to skill names.")
    dry_run: bool = Field(default=False, description="Say what would be done, change nothing.")
    verdict: Literal["lenient", "spec", "skills-ref"] = Field("lenient", description="Rules to judge what is left by.")


class Change(Output):
    """What is mended in one skill, with its diff, and what cannot be."""

    path: str
    done: tuple[str, ...]
    skipped: tuple[str, ...]
    diff: str


class FixOutput(Output):
    """The changes, made or, in a dry run, planned; `path` is where it all lies now, `left` what is found there now."""

    path: str
    dry_run: bool
    changes: tuple[Change, ...]
    left: CheckOutput


def _mend(path: Path, arguments: FixInput) -> tuple[Change | None, Path]:
    """Mend one skill; return what was done, if anything, and where the skill file lies now."""
    plan = plan_fix(path, rename=arguments.rename)
    if plan is None:
        return None, path
    done, skipped, file = plan.done, plan.skipped, plan.folder / plan.file_name
    if plan.changed and not arguments.dry_run:
        try:
            file = apply_fix(plan)
        except FileRefused as refusal:
            done, skipped = (), (*skipped, f"{refusal.message}.")
    if not (done or skipped):
        return None, file
    return Change(path=printable_path(str(path)), done=done, skipped=skipped, diff=plan.diff if done else ""), file


async def fix(host: Host, arguments: FixInput, context: Context) -> FixOutput:
    """Mend skill files; one that cannot be mended costs only itself."""
    return await asyncio.to_thread(_fix, host, arguments, context.trust)


def _fix(host: Host, arguments: FixInput, trust: bool) -> FixOutput:
    top = arguments.path
    if not os.path.lexists(top):
        raise BadRequest(f"{top} is not there", code="path_missing", path=str(top))
    checked_bundle(host, top, trust=trust)  # what cannot be judged afterwards is not mended
    is_directory = is_folder(top)
    changes = []
    for path in skill_folders(top) if is_directory else [top]:
        change, file = _mend(path, arguments)
        changes += [] if change is None else [change]
        if path == top and not arguments.dry_run and file != path:  # it may have another name now
            top = file.parent if is_directory else file
    report = check_path(host, CheckInput(path=top, verdict=arguments.verdict), trust=trust)
    return FixOutput(path=printable_path(str(top)), dry_run=arguments.dry_run, changes=tuple(changes), left=report)


FIX = Implementation(FixInput, FixOutput, ("path_missing", "bundle_untrusted"), fix)
