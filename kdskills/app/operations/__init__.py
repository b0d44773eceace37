"""The one table of operations: CLI, and every later door, derive what they offer from it."""

from kdskills.app.operations.checking import CHECK
from kdskills.app.operations.codex import CODEX_PROBE, CODEX_RECEIPTS
from kdskills.app.operations.conversation import LOAD, READ, RUN_SCRIPT, UNLOAD
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

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        *(CHECK, FIX, LIST, SHOW, RENDER, WHY, RUN, SHOW_TURN, DOCTOR, IMAGE),
        *(LOAD, UNLOAD, READ, RUN_SCRIPT, NEW, PLUGINS),
        *(LIST_PROJECTS, CREATE_PROJECT, UPLOAD, LIST_SKILLS, GET_SKILL, PATCH_SKILL, DELETE_SKILL),
        *(LIST_VERSIONS, ACTIVATE, ARCHIVE, FILE, CREATE_TOKEN, LIST_TOKENS, REVOKE_TOKEN),
        *WORK,
        *(CODEX_PROBE, CODEX_RECEIPTS),
    )
}

__all__ = ["OPERATIONS", "Context", "Finding", "Input", "Operation", "Output"]
