"""The one table of operations: CLI, and every later door, derive what they offer from it.

Rows say what doors need to list an operation and to refuse it; models and functions are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kdskills.app.operations.table import Context, Operation, Shipped

if TYPE_CHECKING:
    from kdskills.app.operations.models import Finding, Input, Output

_ROWS: Final = (
    Shipped(
        "skills.check",
        "Check a skill, a folder of skills or a bundle.",
        "checking:CHECK",
        profile="author",
        local=True,
        reads=True,
    ),
    Shipped("skills.fix", "Mend skill files without touching a body.", "checking:FIX", profile="author", local=True),
    Shipped(
        "skills.list",
        "List skills as a consumer sees them.",
        "showing:LIST",
        profile="skills",
        reads=True,
        ui_allowed=True,
    ),
    Shipped("skills.show", "Show one skill in full.", "showing:SHOW", profile="author", reads=True, ui_allowed=True),
    Shipped(
        "skills.render",
        "Render the prompt a solver sends, a catalog, or an instruction block.",
        "showing:RENDER",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "skills.why",
        "Explain why a skill is granted or refused.",
        "showing:WHY",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "solver.run",
        "Run one turn on a bundle.",
        "turns:RUN",
        profile="author",
        scope="work:run",
        local=True,
        input_source="turn_inputs:RunInput",
    ),
    Shipped(
        "turns.show",
        "Show what happened in a turn, from its transcript.",
        "turns:SHOW_TURN",
        input_source="turn_inputs:ShowTurnInput",
        profile="author",
        local=True,
        reads=True,
    ),
    Shipped(
        "doctor",
        "Run the self-checks of every part.",
        "machine:DOCTOR",
        profile="operator",
        scope="admin",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "image.build",
        "Build the tree sandboxes run in.",
        "machine:IMAGE",
        profile="operator",
        scope="admin",
        local=True,
    ),
    Shipped("skills.load", None, "conversation:LOAD", profile="skills", for_models=True),
    Shipped("skills.unload", None, "conversation:UNLOAD", profile="skills", for_models=True),
    Shipped("skills.read", None, "conversation:READ", profile="skills", reads=True, for_models=True),
    Shipped("skills.run_script", None, "conversation:RUN_SCRIPT", profile="skills", scope="work:run", for_models=True),
    Shipped(
        "new",
        "Make the files to begin a bundle, a skill or a plugin with.",
        "checking:NEW",
        profile="author",
        scope="skills:write",
        local=True,
    ),
    Shipped(
        "plugins",
        "List plugins and what they registered.",
        "checking:PLUGINS",
        profile="operator",
        scope="admin",
        reads=True,
    ),
    Shipped("projects.list", "List projects.", "projects:LIST_PROJECTS", profile="operator", scope="admin", reads=True),
    Shipped(
        "projects.create",
        "Make a project, or change the bundle of one.",
        "projects:CREATE_PROJECT",
        profile="operator",
        scope="admin",
        local=True,
    ),
    Shipped(
        "project_skills.upload",
        "Take a skill from a zip archive.",
        "projects:UPLOAD",
        profile="author",
        scope="skills:write",
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.list",
        "List uploaded skills.",
        "projects:LIST_SKILLS",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.get",
        "Show one uploaded skill.",
        "projects:GET_SKILL",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.patch",
        "Enable or disable a skill.",
        "projects:PATCH_SKILL",
        profile="author",
        scope="skills:write",
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.delete",
        "Delete a skill.",
        "projects:DELETE_SKILL",
        profile="author",
        scope="skills:write",
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.versions",
        "List a skill's versions.",
        "projects:LIST_VERSIONS",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.activate",
        "Put a version of a skill in use.",
        "projects:ACTIVATE",
        profile="author",
        scope="skills:write",
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.archive",
        "Give a version as a zip archive.",
        "projects:ARCHIVE",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "project_skills.file",
        "Give one file of a version.",
        "projects:FILE",
        profile="author",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "tokens.create",
        "Make a token; its text is shown this once.",
        "clients:CREATE_TOKEN",
        profile="operator",
        scope="admin",
    ),
    Shipped("tokens.list", "List tokens.", "clients:LIST_TOKENS", profile="operator", scope="admin", reads=True),
    Shipped("tokens.revoke", "End a token.", "clients:REVOKE_TOKEN", profile="operator", scope="admin"),
    Shipped(
        "db.upgrade",
        "Bring the service's tables up to date.",
        "machine:UPGRADE",
        profile="operator",
        scope="admin",
        local=True,
    ),
    Shipped(
        "skills.activate",
        "Make a skill's files ready where commands run.",
        "work_run:ACTIVATE",
        profile="skills",
        scope="work:run",
    ),
    Shipped(
        "skills.run_cmd",
        "Run a command of a skill in isolation and wait for it.",
        "work_run:RUN_CMD",
        profile="skills",
        scope="work:run",
    ),
    Shipped(
        "skills.run_cmd_async",
        "Start a command of a skill in the background.",
        "work_run:RUN_CMD_ASYNC",
        profile="skills",
        scope="work:run",
        ui_allowed=True,
    ),
    Shipped(
        "skills.run_service",
        "Start a program of a skill that stays up.",
        "work_run:RUN_SERVICE",
        profile="skills",
        scope="work:run",
    ),
    Shipped(
        "skills.start_job",
        "Start steps of a skill, in order or as a graph.",
        "work_run:START_JOB",
        profile="skills",
        scope="work:run",
        ui_allowed=True,
    ),
    Shipped(
        "skills.task_status",
        "Show how a task stands.",
        "work_follow:TASK_STATUS",
        profile="skills",
        scope="work:read",
        reads=True,
        ui_allowed=True,
        commands=("provider", "query_command", "skill_name", "env", "timeout_sec"),
    ),
    Shipped(
        "skills.job_status",
        "Show how a job and its steps stand.",
        "work_follow:JOB_STATUS",
        profile="skills",
        scope="work:read",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "skills.task_watch",
        "Tell a task's progress until it is over.",
        "work_follow:TASK_WATCH",
        profile="skills",
        scope="work:read",
        ui_allowed=True,
    ),
    Shipped(
        "skills.job_watch",
        "Tell a job's progress until it is over.",
        "work_follow:JOB_WATCH",
        profile="skills",
        scope="work:read",
        ui_allowed=True,
    ),
    Shipped(
        "skills.task_cancel",
        "End a task and everything it started.",
        "work_follow:TASK_CANCEL",
        profile="skills",
        scope="work:run",
        ui_allowed=True,
    ),
    Shipped(
        "skills.job_cancel",
        "End a job and its steps.",
        "work_follow:JOB_CANCEL",
        profile="skills",
        scope="work:run",
        ui_allowed=True,
    ),
    Shipped(
        "skills.task_logs",
        "Read a task's output by offset.",
        "work_follow:TASK_LOGS",
        profile="skills",
        scope="work:read",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "tasks.list",
        "List tasks, the newest first.",
        "work_follow:TASKS",
        profile="skills",
        scope="work:read",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "jobs.list",
        "List jobs, the newest first.",
        "work_follow:JOBS",
        profile="skills",
        scope="work:read",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "artifacts.get",
        "Read a file that work left behind.",
        "work_follow:ARTIFACT",
        profile="skills",
        scope="work:read",
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "mcp.published",
        "List what MCP clients see, and what is kept from them and why.",
        "clients:PUBLISHED",
        profile="operator",
        scope="admin",
        local=True,
        reads=True,
    ),
    Shipped(
        "mcp.accept",
        "Accept the files that skills of an MCP server have now.",
        "clients:ACCEPT",
        profile="operator",
        scope="admin",
        local=True,
    ),
    Shipped(
        "codex.probe",
        "Find out what a Codex app-server really does, without a login or tokens.",
        "clients:CODEX_PROBE",
        profile="operator",
        scope="admin",
    ),
    Shipped(
        "codex.receipts",
        "Show what each turn of a Codex session was run with.",
        "clients:CODEX_RECEIPTS",
        profile="operator",
        scope="admin",
        reads=True,
    ),
)

#: Every shipped operation by name; `ui_allowed` are those that pages of the console may call.
OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType({row.name: row for row in _ROWS})

_MODELS: Final = frozenset({"Finding", "Input", "Output"})

__all__ = ["OPERATIONS", "Context", "Finding", "Input", "Operation", "Output"]


def __getattr__(name: str) -> object:
    """Return one of the models that those of operations are made of; imported with the first of them."""
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kdskills.app.operations import models

    return getattr(models, name)
