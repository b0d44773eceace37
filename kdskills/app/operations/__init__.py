"""The one table of operations: CLI, and every later door, derive what they offer from it.

Rows say what doors need to list an operation and to refuse it; models and functions are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kdskills.app.operations.table import Context, Operation, Shipped
from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.app.operations.models import Finding, Input, Output
else:  # imported with the first operation
    __getattr__, _ = lazy_exports(__name__, {".models": "Finding Input Output"})

_FILES: Final = ("path_missing", "bundle_untrusted")
_CHECK: Final = ("check_code_unknown", *_FILES)
_VIEW: Final = ("no_bundle", "bundle_untrusted", "not_yours_to_say")
_FILE: Final = (
    *("unknown_skill", "denied", "invalid_argument", "path_denied", "resource_not_found"),
    *("not_a_file", "not_text", "too_large", "skill_unreadable"),
)
_READ: Final = ("not_found", "project_invalid", "database_unavailable")
_TOKEN: Final = ("agent_invalid", "scope_unknown", "tool_unknown", "tool_not_allowed", "token_wider", *_READ)
_NARROW: Final = ("scope_unknown", "tool_unknown", "token_wider", "conflict")
_WORK: Final = ("not_found", "database_unavailable", "missing_extra")
_START: Final = (
    *("unknown_skill", "skill_denied", "skill_changed", "no_bundle", "conflict"),
    *("engine_unavailable", "isolation_too_weak", "too_much_work", "quota_exceeded", *_WORK),
)
_AGAIN: Final = ("work_not_over", "version_gone", "inputs_gone", *_START)
_ARTIFACT: Final = (*_WORK, "artifact_missing", "artifact_corrupt", "artifact_store_unavailable")
_TOOL: Final = (
    *("invalid_argument", "skill_not_found", "skill_unreadable", "path_not_found"),
    *("policy_denied", "session_not_found", "no_bundle"),
)
_SCRIPT: Final = (*_TOOL, "run_disabled", "engine_unavailable")
_TURN: Final = ("replay_diverged", "replay_exhausted", "model_failed", "engine_unavailable")
_STARTED: Final = ("model_not_allowed", "too_many_turns", "turns_not_kept", "not_yours_to_say")
_MCP: Final = ("mcp_server_unknown", "mcp_server_failed", "mcp_set_changed", "missing_extra")
_ENVIRONMENT: Final = (
    *("unknown_skill", "environment_lock_invalid", "environment_off", "environment_no_space", "missing_extra"),
    *("environment_advisories_invalid", *_FILES),
)
_CONVERSATION: Final = ("session_store_missing", "conversation_not_found", "store_unavailable")
_TRUST: Final = ("anchor_invalid", "anchors_unreadable", "missing_extra")
_ANCHOR: Final = (
    *("anchor_taken", "anchor_unreadable", "key_invalid", "certificate_invalid", "certificate_expired", *_TRUST),
)
_EVALS: Final = (
    *(
        "evals_missing",
        "eval_duplicate",
        "check_invalid",
        "model_missing",
        "side_invalid",
        "descriptions_invalid",
        "bundle_untrusted",
    ),
    *("evals_invalid", "evals_running", "evals_plan_changed", "evals_none", "workspace_inside", "engine_unavailable"),
)
_KEEP: Final = ("path_missing", "storage_full", "database_unavailable", "artifact_store_unavailable", "missing_extra")
_BACKUP: Final = ("path_exists", "backup_nothing", *_KEEP)
_RESTORE: Final = (
    *("backup_damaged", "backup_hostile", "backup_newer", "backup_unknown_table"),
    *("restore_not_empty", "restore_no_rows", "restore_no_session_store", "restore_running", *_KEEP),
)
_PROBE: Final = ("not_yours_to_say", "codex_missing", "app_server_gone")


def _upload_errors() -> tuple[str, ...]:
    from kdskills.skills.archives import RULES

    return "not_yours_to_say", "id_taken", "audit_refused", *_READ, *RULES


def _audit_errors() -> tuple[str, ...]:
    from kdskills.skills.archives import RULES

    return "path_missing", "path_unwritable", "audit_review_invalid", "source_empty", *RULES


def _supply_errors() -> tuple[str, ...]:
    from kdskills.supply.install import SUPPLY_CODES

    return (*SUPPLY_CODES, "missing_extra", *_FILES)


# Families of operations: a kind shares who may call it, and from where.
_local = partial(Shipped, profile="author", local=True)
_look = partial(Shipped, profile="author", reads=True, ui_allowed=True)
_change = partial(Shipped, profile="author", scope="skills:write", ui_allowed=True)
_operate = partial(Shipped, profile="operator", scope="admin")
_environment = partial(Shipped, errors=_ENVIRONMENT, profile="operator", scope="admin", local=True)
_author = partial(
    Shipped,
    errors=("bundle_untrusted", "path_missing", "path_exists", "unknown_skill", *_SCRIPT),
    profile="author",
    scope="work:run",
    local=True,
)
_conversation = partial(Shipped, errors=_CONVERSATION, profile="operator", scope="admin", local=True)
_supply = partial(Shipped, errors=_supply_errors, profile="author", scope="skills:write", local=True)
# What is expected of skills is for those who look after them: models could read the answers there.
_evals = partial(Shipped, profile="operator", scope="admin", reads=True, ui_allowed=True)
_tool = partial(Shipped, profile="skills", for_models=True)
_start = partial(Shipped, errors=_START, profile="skills", scope="work:run")
_again = partial(Shipped, errors=_AGAIN, profile="author", scope="work:run", ui_allowed=True)
_eval_jobs = partial(
    Shipped, errors=("evals_invalid", *_WORK), profile="author", scope="work:read", sees_all=True, ui_allowed=True
)
_work = partial(Shipped, errors=_WORK, profile="skills", scope="work:read", ui_allowed=True)
_turn = partial(
    Shipped,
    errors=("not_found", "project_invalid", "transcript_invalid"),
    profile="author",
    scope="work:read",
    ui_allowed=True,
)

_ROWS: Final = (
    _local("skills.check", "Check a skill, a folder of skills or a bundle.", "checking:check", _CHECK, reads=True),
    _local(
        "skills.audit",
        "Look for what is wrong with skills, without running anything of them.",
        "supply:audit",
        _audit_errors,
    ),
    _local("skills.fix", "Mend skill files without touching a body.", "checking:fix", _CHECK),
    _supply("skills.add", "Add skills from elsewhere to a bundle.", "supply:add"),
    _supply("skills.remove", "Remove skills that came from elsewhere.", "supply:remove"),
    _supply("skills.update", "Bring skills from elsewhere up to date.", "supply:update"),
    _supply("skills.outdated", "Tell which skills are newer at their sources.", "supply:outdated", reads=True),
    _supply("skills.sync", "Make a bundle's skills those of its lock.", "supply:sync"),
    _look("skills.list", "List skills as a consumer sees them.", "showing:list_skills", _VIEW, profile="skills"),
    _look("skills.matrix", "Show what each consumer may do with each skill.", "matrix:matrix", _VIEW),
    _look("skills.search", "Find the skills that fit a task.", "showing:search", _VIEW, profile="skills"),
    _look("skills.show", "Show one skill in full.", "showing:show_skill", ("unknown_skill", "denied", *_VIEW)),
    _look(
        "skills.findings",
        "Show what is wrong with one skill, what it costs, imports and needs, and whether it is what was locked.",
        "skill_findings:show_findings",
        ("unknown_skill", "denied", "skill_unreadable", *_VIEW),
    ),
    _look("skills.files", "Show which files a skill has.", "skill_files:list_files", (*_FILE, *_VIEW)),
    _look("skills.file", "Give a piece of a skill's file.", "skill_files:read_piece", (*_FILE, *_VIEW)),
    _look(
        "skills.render",
        "Render the prompt a solver sends, a catalog, or an instruction block.",
        "showing:render",
        ("form_mixed", "local_only", *_VIEW),
    ),
    _look("skills.why", "Explain why a skill is granted or refused.", "showing:why", _VIEW),
    _local(
        "solver.run",
        "Run one turn on a bundle.",
        "turns:run",
        ("request_missing", "bundle_untrusted", "path_missing", "path_exists", *_TURN),
        scope="work:run",
        input_source="models:RunInput",
    ),
    _local(
        "turns.show",
        "Show what happened in a turn, from its transcript.",
        "turns:show_turn",
        ("transcript_missing", "transcript_invalid"),
        reads=True,
        input_source="models:ShowTurnInput",
    ),
    _turn(
        "turns.list",
        "List turns that were kept, the newest first.",
        "turn_archive:list_turns",
        errors=("project_invalid", "unreadable"),
        reads=True,
    ),
    _turn("turns.get", "Show a turn that was kept, with the prompt of each step.", "turn_archive:get_turn", reads=True),
    _turn(
        "turns.file",
        "Give a piece of a file that a turn made.",
        "turn_archive:read_turn_file",
        errors=("path_not_found", "not_found", "project_invalid", "transcript_invalid"),
        reads=True,
    ),
    _turn("turns.compare", "Tell what is not alike in two turns.", "turn_archive:compare_turns", reads=True),
    _turn(
        "turns.start",
        "Start a turn in the background.",
        "turn_runs:start_turn",
        errors=(*_FILES, "request_missing", "no_bundle", "unknown_skill", *_STARTED, *_TURN),
        scope="work:run",
        judged=("model",),
    ),
    _turn("turns.watch", "Tell what happens in a turn until it is over.", "turn_runs:watch_turn"),
    _turn(
        "turns.stop",
        "End a turn that runs in the background.",
        "turn_runs:stop_turn",
        errors=("not_found", "turn_elsewhere"),
        scope="work:run",
    ),
    _local(
        "evals.add",
        "Add an evaluation to a skill or bundle.",
        "evals:add_eval",
        ("path_missing", "eval_file_broken", "eval_id_taken", "symlink", "too_large"),
        scope="skills:write",
        input_source="evals:AddEvalInput",
    ),
    _local(
        "evals.judge",
        "Judge again what an iteration of evaluations kept.",
        "evals:judge_evals",
        (
            *("path_missing", "evals_missing", "check_invalid", "evals_invalid", "evals_other_kind", "evals_running"),
            *("evals_plan_changed", "evals_none", "engine_unavailable"),
        ),
        scope="work:run",
        input_source="evals:JudgeInput",
    ),
    _local(
        "evals.report",
        "Report on an iteration of evaluations.",
        "evals:report_evals",
        ("evals_invalid",),
        scope="work:run",
        input_source="evals:ReportInput",
    ),
    _evals("evals.list", "List what evaluations of a bundle came to.", "eval_results:list_evals", _VIEW),
    _evals(
        "evals.get",
        "Show one iteration of evaluations.",
        "eval_results:get_evals",
        ("evals_invalid", "not_found", *_VIEW),
    ),
    _local("evals.run", "Run evaluations of a bundle.", "evals:run_evals", _EVALS, scope="work:run"),
    _eval_jobs(
        "evals.start",
        "Start evaluations of a bundle that go on in the background.",
        "eval_jobs:start_evals",
        errors=("script_eval_invalid", "unknown_skill", "no_bundle", "too_much_work", "conflict", *_EVALS, *_WORK),
        scope="work:run",
    ),
    _eval_jobs("evals.status", "Show how they stand, row by row.", "eval_jobs:evals_status", reads=True),
    _eval_jobs("evals.cancel", "End them; what has ended stays.", "eval_jobs:cancel_evals", scope="work:run"),
    _local("skills.verify", "Compare skills with lock and signatures.", "supply:verify", _FILES, reads=True),
    _local(
        "skills.sign",
        "Sign a skill's folder.",
        "supply:sign",
        ("path_missing", "path_unwritable", "anchor_unreadable", "signing_failed", "missing_extra"),
        scope="skills:write",
    ),
    _operate("trust.add", "Trust what somebody signs.", "supply:add_anchor", _ANCHOR, local=True),
    _operate("trust.list", "Tell whose signatures are trusted.", "supply:list_anchors", _TRUST, local=True, reads=True),
    _operate(
        "trust.remove",
        "Trust somebody no longer.",
        "supply:remove_anchor",
        ("anchor_unknown", "anchors_unreadable"),
        local=True,
    ),
    _conversation("conversations.list", "List conversations.", "conversation:list_conversations", reads=True),
    _conversation(
        "conversations.get", "Show what was asked and answered.", "conversation:get_conversation", reads=True
    ),
    _conversation(
        "conversations.export", "Give every message of a conversation.", "conversation:export_conversation", reads=True
    ),
    _conversation(
        "conversations.undo",
        "Take back the last turn of a conversation.",
        "conversation:undo",
        errors=(*_CONVERSATION, "undo_unsupported", "conversation_busy"),
    ),
    _conversation(
        "conversations.delete",
        "Forget a conversation, those of a user, or those nobody went on with.",
        "conversation:delete_conversations",
    ),
    _operate(
        "skills.publish",
        "Tell which skills anybody may fetch, and write them as a site.",
        "supply:publish",
        (
            "no_bundle",
            "path_unwritable",
            "site_in_bundle",
            "conflict",
            "bundle_untrusted",
            "not_found",
            "database_unavailable",
        ),
    ),
    _operate("doctor", "Run the self-checks of every part.", "machine:doctor", reads=True, ui_allowed=True),
    _operate(
        "image.build", "Build the tree sandboxes run in.", "machine:build_image", ("engine_unavailable",), local=True
    ),
    _environment("environments.plan", "Find the packages that skills need, and change nothing.", "environments:plan"),
    _environment("environments.lock", "Lock the packages that skills need to exact files.", "environments:lock"),
    _environment("environments.build", "Download and unpack what is locked.", "environments:build"),
    _environment("environments.show", "Tell how environments of skills stand.", "environments:show", reads=True),
    _environment(
        "environments.suggest", "Tell which image profiles have what skills need.", "environments:suggest", reads=True
    ),
    _environment("environments.clean", "Remove what is built for skills.", "environments:clean"),
    _author("scripts.run", "Run a script of a bundle behind the wall, without a model.", "scripts:run"),
    _author("scripts.probe", "Start every script of a bundle with `--help`.", "scripts:probe"),
    _author("evals.scripts", "Run the rows of `evals/scripts.yaml`, without a model.", "evals:run_scripts"),
    _tool("skills.load", None, "conversation:load", _TOOL),
    _tool("skills.unload", None, "conversation:unload", _TOOL),
    _tool("skills.read", None, "conversation:read", _TOOL, reads=True),
    _tool("skills.run_script", None, "conversation:run_script", _SCRIPT, scope="work:run"),
    _local(
        "new",
        "Make the files to begin a bundle, a skill or a plugin with.",
        "checking:new",
        ("path_missing", "path_exists"),
        scope="skills:write",
    ),
    _look(
        "schemas.show",
        "Give the JSON Schema of a file that authors write.",
        "checking:show_schema",
        ("schema_unknown",),
    ),
    _operate("plugins", "List plugins and what they registered.", "checking:list_plugins", reads=True),
    _operate("projects.list", "List projects.", "projects:list_projects", ("database_unavailable",), reads=True),
    _operate(
        "projects.create",
        "Make a project, or change the bundle of one.",
        "projects:create_project",
        ("project_invalid", "bundle_path_relative", "database_unavailable"),
        local=True,
    ),
    _change("project_skills.upload", "Take a skill from a zip archive.", "projects:upload", _upload_errors),
    _look("project_skills.list", "List uploaded skills.", "projects:list_skills", _READ),
    _look("project_skills.get", "Show one uploaded skill.", "projects:get_skill", _READ),
    _change("project_skills.patch", "Enable or disable a skill.", "projects:patch_skill", _READ),
    _change("project_skills.delete", "Delete a skill.", "projects:delete_skill", _READ),
    _look("project_skills.versions", "List a skill's versions.", "projects:list_versions", _READ),
    _change(
        "project_skills.activate", "Put a version of a skill in use.", "projects:activate_version", ("id_taken", *_READ)
    ),
    _look("project_skills.archive", "Give a version as a zip archive.", "projects:archive", _READ),
    _look("project_skills.file", "Give one file of a version.", "projects:file", _READ),
    _look("project_skills.diff", "Show what differs between two versions.", "project_versions:diff", _READ),
    _look(
        "project_skills.inspect",
        "Show what is found in a version, and what it would change for which consumer.",
        "project_versions:inspect",
        ("no_bundle", *_READ),
    ),
    _operate(
        "audit_log.list",
        "Tell who changed what, the latest first.",
        "audit_log:list_audit_log",
        _READ,
        reads=True,
        ui_allowed=True,
    ),
    _operate(
        "tokens.create", "Make a token; its text is shown this once.", "clients:create_token", _TOKEN, ui_allowed=True
    ),
    _operate("tokens.list", "List tokens.", "clients:list_tokens", _READ, reads=True, ui_allowed=True),
    _operate("tokens.change", "Narrow a token.", "clients:change_token", (*_NARROW, *_READ), ui_allowed=True),
    _operate("tokens.revoke", "End a token.", "clients:revoke_token", _READ, ui_allowed=True),
    _operate(
        "db.upgrade",
        "Bring the service's tables up to date.",
        "machine:upgrade_database",
        ("database_unavailable", "missing_extra"),
        local=True,
    ),
    _operate(
        "db.check",
        "Look for rows, objects and folders that do not fit one another.",
        "backups:check_database",
        ("path_missing", "database_unavailable", "artifact_store_unavailable", "missing_extra"),
        local=True,
        reads=True,
    ),
    _operate(
        "backup.create",
        "Write everything that is kept into one file, while the system runs.",
        "backups:create_backup",
        _BACKUP,
        local=True,
    ),
    _operate(
        "backup.restore",
        "Put a backup in place where nothing is, or check it.",
        "backups:restore",
        _RESTORE,
        local=True,
    ),
    _operate(
        "fleet.show",
        "Show hosts, workers and what waits for them.",
        "fleet:show_fleet",
        ("database_unavailable", "missing_extra"),
        reads=True,
        ui_allowed=True,
    ),
    Shipped(
        "quota.show",
        "Show what a project may use of background work, and uses.",
        "fleet:show_quota",
        ("not_found", "database_unavailable", "missing_extra"),
        profile="author",
        scope="work:read",
        reads=True,
    ),
    _operate(
        "fleet.drain", "Let a host take nothing new.", "fleet:drain", ("not_yours_to_say", *_WORK), ui_allowed=True
    ),
    _operate(
        "fleet.undrain", "Let a host take work again.", "fleet:undrain", ("not_yours_to_say", *_WORK), ui_allowed=True
    ),
    _operate(
        "fleet.evict",
        "Take a host's work for lost now.",
        "fleet:evict",
        ("not_yours_to_say", "host_alive", "host_pinned", *_WORK),
    ),
    _operate(
        "metrics.show",
        "Tell what is measured, as Prometheus reads it.",
        "fleet:show_metrics",
        ("missing_extra",),
        reads=True,
    ),
    _start("skills.activate", "Make a skill's files ready where commands run.", "work_run:activate"),
    _start("skills.run_cmd", "Run a command of a skill in isolation and wait for it.", "work_run:run_cmd"),
    _start(
        "skills.run_cmd_async",
        "Start a command of a skill in the background.",
        "work_run:run_cmd_async",
        ui_allowed=True,
    ),
    _start("skills.run_service", "Start a program of a skill that stays up.", "work_run:run_service"),
    _start(
        "skills.start_job", "Start steps of a skill, in order or as a graph.", "work_run:start_job", ui_allowed=True
    ),
    _again("tasks.again", "Start the command of a task that is over again.", "work_again:task_again"),
    _again("jobs.again", "Start the steps of a job that is over again.", "work_again:job_again"),
    _work(
        "skills.task_status",
        "Show how a task stands.",
        "work_follow:task_status",
        reads=True,
        commands=("provider", "query_command", "skill_name", "env", "timeout_sec"),
    ),
    _work("skills.job_status", "Show how a job and its steps stand.", "work_follow:job_status", reads=True),
    _work("skills.task_watch", "Tell a task's progress until it is over.", "work_follow:task_watch"),
    _work("skills.job_watch", "Tell a job's progress until it is over.", "work_follow:job_watch"),
    _work("skills.task_cancel", "End a task and everything it started.", "work_follow:task_cancel", scope="work:run"),
    _work("skills.job_cancel", "End a job and its steps.", "work_follow:job_cancel", scope="work:run"),
    _work("skills.task_logs", "Read a task's output by offset.", "work_follow:task_logs", reads=True),
    _work("tasks.list", "List tasks, the newest first.", "work_follow:list_tasks", reads=True),
    _work("jobs.list", "List jobs, the newest first.", "work_follow:list_jobs", reads=True),
    _work(
        "artifacts.get", "Read a file that work left behind.", "work_follow:get_artifact", errors=_ARTIFACT, reads=True
    ),
    _operate(
        "mcp.published",
        "List what MCP clients see, and what is kept from them and why.",
        "clients:list_published",
        ("no_bundle", "not_found", "database_unavailable"),
        local=True,
        reads=True,
    ),
    _operate(
        "mcp.accept", "Accept the files that skills of an MCP server have now.", "clients:accept", _MCP, local=True
    ),
    _operate(
        "codex.probe",
        "Find out what a Codex app-server really does, without a login or tokens.",
        "clients:probe_codex",
        _PROBE,
    ),
    _operate(
        "codex.receipts",
        "Show what each turn of a Codex session was run with.",
        "clients:show_receipts",
        ("journal_unavailable", "missing_extra"),
        reads=True,
    ),
)

#: Every shipped operation by name; `ui_allowed` are those that pages of the console may call.
OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType({row.name: row for row in _ROWS})

__all__ = ["OPERATIONS", "Context", "Finding", "Input", "Operation", "Output"]
