"""The one table of operations: CLI, and every later door, derive what they offer from it."""

from dataclasses import replace
from typing import Final

from kdskills.app.operations.checking import CHECK
from kdskills.app.operations.codex import CODEX_PROBE, CODEX_RECEIPTS
from kdskills.app.operations.conversation import LOAD, READ, RUN_SCRIPT, UNLOAD
from kdskills.app.operations.database import UPGRADE
from kdskills.app.operations.health import DOCTOR
from kdskills.app.operations.images import IMAGE
from kdskills.app.operations.mending import FIX
from kdskills.app.operations.project_files import ARCHIVE, FILE
from kdskills.app.operations.projects import (
    ACTIVATE,
    CREATE_PROJECT,
    DELETE_SKILL,
    GET_SKILL,
    LIST_PROJECTS,
    LIST_SKILLS,
    LIST_VERSIONS,
    PATCH_SKILL,
    UPLOAD,
)
from kdskills.app.operations.scaffold import NEW, PLUGINS
from kdskills.app.operations.showing import LIST, RENDER, SHOW, WHY
from kdskills.app.operations.table import Context, Finding, Input, Operation, Output
from kdskills.app.operations.tokens import CREATE_TOKEN, LIST_TOKENS, REVOKE_TOKEN
from kdskills.app.operations.transcripts import SHOW_TURN
from kdskills.app.operations.turns import RUN
from kdskills.app.operations.work import WORK

#: What pages of the console may call (spec service §2); nobody else is asked for it.
UI_ALLOWED: Final = frozenset(
    (
        *(op.name for op in (LIST, SHOW, RENDER, WHY, DOCTOR, UPLOAD, LIST_SKILLS, GET_SKILL, PATCH_SKILL)),
        *(op.name for op in (DELETE_SKILL, LIST_VERSIONS, ACTIVATE, ARCHIVE, FILE)),
        *("skills.run_cmd_async", "skills.start_job", "skills.task_status", "skills.job_status", "skills.task_watch"),
        *("skills.job_watch", "skills.task_logs", "skills.task_cancel", "skills.job_cancel"),
        *("tasks.list", "jobs.list", "artifacts.get"),
    )
)

OPERATIONS: dict[str, Operation] = {
    operation.name: replace(operation, ui_allowed=operation.name in UI_ALLOWED)
    for operation in (
        *(CHECK, FIX, LIST, SHOW, RENDER, WHY, RUN, SHOW_TURN, DOCTOR, IMAGE),
        *(LOAD, UNLOAD, READ, RUN_SCRIPT, NEW, PLUGINS),
        *(LIST_PROJECTS, CREATE_PROJECT, UPLOAD, LIST_SKILLS, GET_SKILL, PATCH_SKILL, DELETE_SKILL),
        *(LIST_VERSIONS, ACTIVATE, ARCHIVE, FILE, CREATE_TOKEN, LIST_TOKENS, REVOKE_TOKEN, UPGRADE),
        *WORK,
        *(CODEX_PROBE, CODEX_RECEIPTS),
    )
}

__all__ = ["OPERATIONS", "Context", "Finding", "Input", "Operation", "Output"]
