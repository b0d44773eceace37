"""`skills.run_script`: checks in their order, one `ExecRequest`, its result as the model reads it.

The environment of a script is empty, then ours, then the operator's, then the call's.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kdskills.environments.codes import EnvironmentFailed
from kdskills.errors import ExecFailed, ExecRefused, FileRefused, ToolCallRefused
from kdskills.execution import (
    EnvironmentMount,
    ExecRequest,
    ExecResult,
    Executor,
    Limits,
    Owner,
    ScriptCall,
    SkillMount,
)
from kdskills.execution.check import env_problem
from kdskills.execution.egress import granted
from kdskills.execution.run import in_thread
from kdskills.models import MIN_TEXT
from kdskills.session.approval import ApprovalRequest, origin_of
from kdskills.session.codes import CODES, invalid, path_denied, pathless, refuse
from kdskills.session.config import MAX_ARG, MAX_ENV_NAME, MAX_ENV_TOTAL, MAX_ENV_VALUE
from kdskills.session.core import Call, Core
from kdskills.session.loading import public_id
from kdskills.session.reading import Target, check_script, entries_of, find_target, fresh_tree
from kdskills.session.receipts import ScriptResult, ScriptStatus
from kdskills.session.workspace import Collected, clean_path, script_path, suffix_of
from kdskills.skills.model import Skill
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import walk_shown

if TYPE_CHECKING:
    from kdskills.environments.scripts import ScriptPackages

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS: Final = frozenset({"PATH", "HOME", "PYTHONPATH", "PYTHONHOME"})


def call_env_problems(env: Mapping[str, str], max_count: int) -> list[tuple[str, str]]:
    """Return `(JSON pointer, problem)` for everything a call may not set; values are never repeated."""
    problems: list[tuple[str, str]] = []
    total = 0
    if len(env) > max_count:
        problems.append(("/env", f"holds more than {max_count} variables"))
    for name, value in env.items():
        pointer = "/env/" + name[:64].replace("~", "~0").replace("/", "~1")
        size = len(value.encode("utf-8", "surrogatepass"))
        total += len(name.encode("utf-8", "surrogatepass")) + size
        if not _NAME.fullmatch(name):
            problems.append((pointer, "is no variable name"))
        elif len(name) > MAX_ENV_NAME:
            problems.append((pointer, f"has a name longer than {MAX_ENV_NAME} bytes"))
        elif name in _OURS or name.startswith("KDSKILLS_") or env_problem(name):
            problems.append((pointer, "may not be set by a call"))
        if "\0" in value:
            problems.append((pointer, "holds NUL"))
        elif size > MAX_ENV_VALUE:
            problems.append((pointer, f"has a value longer than {MAX_ENV_VALUE} bytes"))
    if total > MAX_ENV_TOTAL:
        problems.append(("/env", f"has more than {MAX_ENV_TOTAL} bytes in all"))
    return problems


ENVIRONMENT: Final = {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Variables of every run. `PATH`, `HOME` and `TMPDIR` are the engine's own and added by it; nothing of the host process is."""
MISSING_PROGRAM: Final = frozenset({"program_not_found", "program_missing", "interpreter_missing", "not_found"})
"""Codes engines use when the interpreter is not inside the sandbox."""

PROGRAM_STATUSES: Final = frozenset({"ok", "nonzero", "timeout", "oom", "limit", "cancelled"})


@dataclass(frozen=True, slots=True)
class Run:
    """One call of `skills.run_script`, its shape checked."""

    path: str
    skill: str | None
    args: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    timeout_s: float
    stdin: bytes = b""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run about to be handed to the executor."""

    run: Run
    target: Target
    clean: str
    command: tuple[str, ...]
    workdir: str
    executor: Executor


def check_shape(core: Core, run: Run) -> None:
    """Raise `invalid_argument` with everything that is wrong with the shape of a call."""
    limits = core.config.limits
    problems: list[tuple[str, str]] = []
    if not run.path.strip():
        problems.append(("/path", "must not be blank"))
    if "\0" in run.workdir:
        problems.append(("/workdir", "holds NUL"))
    if len(run.args) > limits.max_args:
        problems.append(("/args", f"holds more than {limits.max_args} arguments"))
    for number, word in enumerate(run.args):
        if "\0" in word:
            problems.append((f"/args/{number}", "holds NUL"))
        elif len(word.encode("utf-8", "surrogatepass")) > MAX_ARG:
            problems.append((f"/args/{number}", f"has more than {MAX_ARG} bytes"))
    if not 0 < run.timeout_s <= limits.script_timeout_s:
        problems.append(("/timeout_s", f"must be above 0 and at most {limits.script_timeout_s:g}"))
    if problems:
        raise invalid("invalid arguments: " + "; ".join(f"{p} {t}" for p, t in problems[:5]), *problems)
    forbidden = call_env_problems(run.env, limits.max_env)
    if forbidden:
        listed_problems = "; ".join(f"{path} {text}" for path, text in forbidden[:5])
        raise invalid(f"the env of this call is not allowed: {listed_problems}", *forbidden)


async def run_script(core: Core, call: Call, run: Run) -> ScriptResult:
    """Run a script of a loaded skill.

    Refused in the order session, enabled, shape, active, skill, path, existence, suffix, deny hook, approval, executor.
    """
    await core.record(call.session_id)
    executor = core.config.executor
    if not core.config.run_scripts or executor is None:
        raise refuse("run_disabled", "scripts are switched off here")
    check_shape(core, run)
    target = await find_target(core, call, run.skill)
    run, note = await asyncio.to_thread(_split_command_line, core, target.skill, run)
    try:
        clean = script_path(run.path)
    except ToolCallRefused as error:
        error.details["siblings"] = await asyncio.to_thread(_script_of_name, core, target.skill, run.path)
        raise
    await asyncio.to_thread(check_script, target.skill, clean, core.config.limits.max_read_bytes)
    workdir = await asyncio.to_thread(_workdir, call, target.skill, run.workdir)
    command = core.config.interpreters.get(suffix_of(clean))
    if command is None:
        suffixes = ", ".join(core.config.interpreters)
        raise refuse("extension_not_allowed", f"no interpreter for {clean!r}; known suffixes: {suffixes}", path=clean)
    arguments = {"path": clean, "args": list(run.args), "env": sorted(run.env), "workdir": run.workdir}
    core.ask(call, target.session.record, "run", target.skill, arguments, clean)
    prepared = PreparedRun(run, target, clean, command, workdir, executor)
    # What is mounted is digested first: the digest that is approved then is of the same files, or the run is refused.
    mounted = await asyncio.to_thread(fresh_tree, target.skill, shown=True)
    await _approve(core, call, prepared, await asyncio.to_thread(fresh_tree, target.skill))
    async with skill_on_host(target.skill, clean) as folder:
        result = await _execute(core, call, prepared, mounted, folder)
    return replace(result, note=note) if note else result


_SHELL: Final = re.compile(r"[|&;<>]|\d?>")


def _split_command_line(core: Core, skill: Skill, run: Run) -> tuple[Run, str]:
    """Split a command line in `path`, as models write it, into script and arguments, and return a note that says so.

    The run stays as it is unless the first word alone names a script; shell operators are refused.
    """
    limit = core.config.limits.max_read_bytes
    if not any(char.isspace() for char in run.path.strip()) or _is_script(skill, run.path, limit):
        return run, ""
    try:
        words = shlex.split(run.path)
    except ValueError:  # a quote that is not closed: refused later as a file that does not exist
        return run, ""
    if len(words) < 2 or not _is_script(skill, words[0], limit):
        return run, ""
    if any(_SHELL.match(word) for word in words[1:]):
        message = f"no shell reads the path; give path {words[0]!r} and the arguments as args"
        raise invalid(message, ("/path", "holds a command line with shell operators"))
    split = replace(run, path=words[0], args=(*words[1:], *run.args))
    check_shape(core, split)
    args = json.dumps(list(split.args), ensure_ascii=False)
    return split, f"path held a command line: ran {words[0]} with args {args}"


def _script_of_name(core: Core, skill: Skill, path: str) -> list[str]:
    """Return the script below `scripts/` that *path* may mean, or nothing."""
    script_path = f"scripts/{path.rpartition('/')[2]}"
    return [script_path] if _is_script(skill, script_path, core.config.limits.max_read_bytes) else []


def _is_script(skill: Skill, path: str, limit: int) -> bool:
    try:
        check_script(skill, script_path(path), limit)
    except ToolCallRefused:
        return False
    return True


SKILL_DIR: Final = re.compile(r"\$(?:SKILL_DIR|\{SKILL_DIR\})(?:/|\Z)")
"""How a path begins that lies in the skill's own folder, or, in a solver, in that of the skill loaded last."""


def _workdir(call: Call, skill: Skill, workdir: str) -> str:
    """Return the folder to start in, inside the sandbox: of the turn's files first, else of the skill."""
    match = SKILL_DIR.match(workdir)
    inner = workdir.removeprefix("turn:") if match is None else workdir[match.end() :]
    clean = "." if inner in {"", ".", "./"} else clean_path(inner)
    if match is None and call.scope.workspace is not None and call.scope.workspace.has_folder(clean):
        return clean
    if workdir.startswith("turn:"):
        raise refuse("resource_not_found", f"there is no folder {workdir!r}", path=workdir, siblings=[])
    if clean == ".":
        return f"/skills/{skill.full_id}"
    if skill.folder is None:
        raise refuse("resource_not_found", f"there is no folder {workdir!r}", path=workdir, siblings=[])
    try:
        below = walk_shown(skill.folder)
    except FileRefused as error:
        message = f"the files of this skill cannot be read: {error.message}"
        raise refuse("skill_unreadable", message, path=workdir) from error
    parts = clean.split("/")
    prefixes = {"/".join(parts[: number + 1]) for number in range(len(parts))}
    if any(entry.kind == "link" and entry.path in prefixes for entry in below):
        raise path_denied(workdir, "symlink")
    if not any(entry.path.startswith(clean + "/") for entry in below):
        siblings = entries_of(skill.folder, clean.rpartition("/")[0])[:20]
        raise refuse("resource_not_found", f"there is no folder {workdir!r}", path=workdir, siblings=siblings)
    return f"/skills/{skill.full_id}/{clean}"


async def _approve(core: Core, call: Call, prepared: PreparedRun, tree: str) -> None:
    mode = core.config.script_approval
    if mode == "deny":
        raise refuse("approval_denied", "scripts are not approved here", reason="script_approval is deny")
    foreign = any(origin_of(skill.namespace) is not None for skill in prepared.target.session.skills.values())
    if mode == "allow" and not foreign:
        return
    network = granted(core.config.network, (prepared.target.skill.full_id,))
    await core.approvals.require(
        ApprovalRequest(
            session=call.session_id,
            skill=prepared.target.skill.full_id,
            origin=origin_of(prepared.target.skill.namespace),
            tree_digest=tree,
            path=prepared.clean,
            argv=(*prepared.command, *prepared.run.args),
            env_names=tuple(sorted(prepared.run.env)),
            executor=prepared.executor.name,
            network=() if network == "none" else network,
            user=call.scope.user_id,
        ),
        call.scope.events or core.config.events,
        public_id(prepared.target.skill),
    )
    if await asyncio.to_thread(fresh_tree, prepared.target.skill) != tree:
        raise refuse("approval_denied", "the skill's files changed while the run was being approved", reason="changed")


@asynccontextmanager
async def skill_on_host(skill: Skill, path: str) -> AsyncIterator[Path]:
    """Give the skill's folder on this host; the files of a far skill are fetched for as long as the block lasts."""
    content = far_content(skill)
    if content is None:
        if skill.folder is None:
            raise refuse("resource_not_found", "this skill has no files", path=path, siblings=[])
        yield skill.folder
        return
    files = content.materialized()
    try:
        folder = await in_thread(files.__enter__, undo=lambda _: asyncio.to_thread(files.__exit__, None, None, None))
    except FileRefused as error:
        reason = error.details.get("reason", error.code)
        raise refuse("skill_unreadable", error.message, path=path, reason=reason) from error
    try:
        yield folder
    finally:
        await asyncio.to_thread(files.__exit__, None, None, None)


async def _execute(core: Core, call: Call, prepared: PreparedRun, tree: str, folder: Path) -> ScriptResult:
    skill = prepared.target.skill
    workspace = call.scope.workspace
    try:
        inputs = () if workspace is None else await asyncio.to_thread(workspace.inputs)
    except FileRefused as error:
        raise refuse("executor_failed", _blameless(f"the turn's files cannot be read: {error.message}")) from error
    operator = {} if core.config.script_env is None else {
        name: secret.get_secret_value() for name, secret in core.config.script_env(skill).items()
    }  # fmt: skip
    if call.scope.secrets is not None:
        # Shorter ones (`1`, `info`) are in any text: masking them would spoil all that a turn tells.
        call.scope.secrets(value for value in operator.values() if len(value) >= MIN_TEXT)
    own = ENVIRONMENT | dict.fromkeys(("SKILL_DIR", "KDSKILLS_SKILL_DIR"), f"/skills/{skill.full_id}")
    turn = {} if workspace is None else {"KDSKILLS_TURN_DIR": "/work"}
    output_bytes = core.config.limits.max_output_bytes
    environment = await packages_of(
        core.config.packages, lambda packages: packages.of_script(skill, prepared.clean, folder)
    )
    request = ExecRequest(
        script=ScriptCall(skill.full_id, prepared.clean, prepared.run.args),
        interpreter=prepared.command,
        stdin=prepared.run.stdin,
        env={**own, **turn, **operator, **prepared.run.env},
        skills=(SkillMount(skill.full_id, folder, tree),),
        environment=environment,
        inputs=inputs,
        outputs=() if workspace is None else ("**",),
        workdir=prepared.workdir,
        limits=Limits(wall_s=prepared.run.timeout_s, stdout=output_bytes, stderr=output_bytes),
        network=granted(core.config.network, (skill.full_id,)),
        network_skills=(skill.full_id,),
        profile=core.config.profile,
        owner=Owner(agent=prepared.target.session.record.consumer[:256], conversation=call.session_id),
    )
    core.emit(call, "script.started", skill=public_id(skill), path=prepared.clean, engine=prepared.executor.name)
    try:
        result = await run_request(prepared.executor, request)
    except asyncio.CancelledError:
        core.emit(call, "script.finished", skill=public_id(skill), path=prepared.clean, status="cancelled")
        raise
    collected = Collected()
    if workspace is not None:
        collected = await asyncio.to_thread(workspace.collect, result.artifacts)
    answer = _answer(prepared, result, collected)
    for row in result.connections:
        core.emit(call, "script.connection", skill=public_id(skill), path=prepared.clean, **asdict(row))
    core.emit(
        call, "script.finished", skill=public_id(skill), path=prepared.clean, status=answer.status,
        exit_code=answer.exit_code, duration_ms=answer.duration_ms, engine=answer.engine, level=answer.level,
        limits=sorted(result.limits_enforced), files=[item.path for item in answer.artifacts],
    )  # fmt: skip
    return answer


async def packages_of(
    packages: ScriptPackages | None, ask: Callable[[ScriptPackages], EnvironmentMount | None]
) -> EnvironmentMount | None:
    """Return what *ask* answers of *packages*; None without any. Raises `environment_missing` and its neighbours in `CODES`."""
    if packages is None:
        return None
    try:
        return await asyncio.to_thread(ask, packages)
    except EnvironmentFailed as error:
        code = error.code if error.code in CODES else "environment_unusable"
        raise refuse(code, _blameless(error.message), reason=error.code) from error


async def run_request(executor: Executor, request: ExecRequest) -> ExecResult:
    """Run *request*; a failure that is no fault of the program is refused and says so.

    Raises `environment_missing`, `executor_unavailable`, `executor_failed` or `interpreter_missing`.
    """
    try:
        result = await executor.run(request)
    except ExecRefused as error:
        if error.code == "bad_request":
            message = _blameless(f"the run could not be set up: {error.message}")
            raise refuse("executor_failed", message, engine=executor.name) from error
        message = _blameless(error.message)
        code = error.code if error.code == "environment_missing" else "executor_unavailable"
        raise refuse(code, message, engine=executor.name, reason=error.code) from error
    except ExecFailed as error:
        raise refuse("executor_failed", _blameless(error.message), engine=executor.name) from error
    failure = result.error
    if failure is not None and failure.code in MISSING_PROGRAM and failure.stage != "program":
        message = _blameless("the interpreter is not installed in the executor")
        raise refuse("interpreter_missing", message, engine=executor.name)
    if result.status not in PROGRAM_STATUSES:
        code = "executor_unavailable" if result.status == "refused" else "executor_failed"
        message = _blameless(failure.message if failure else "the executor gave no reason")
        raise refuse(code, message, engine=executor.name)
    return result


def _blameless(message: str) -> str:
    return f"{pathless(message).rstrip('.')}. This is no defect of the script"


def tail_text(data: bytes, truncated: bool) -> str:
    """Return the kept tail as text: minus a character cut in front, bad UTF-8 as U+FFFD."""
    if truncated:
        cut = 0
        while cut < min(3, len(data)) and data[cut] & 0xC0 == 0x80:
            cut += 1
        data = data[cut:]
    return data.decode("utf-8", "replace")


def _answer(prepared: PreparedRun, result: ExecResult, collected: Collected) -> ScriptResult:
    skill = prepared.target.skill
    folder = f"/skills/{skill.full_id}"
    skill_dir = "$SKILL_DIR" if skill.hidden else folder  # the name of a hidden skill is not told
    uncollected = tuple((item.path, item.message) for item in result.artifact_errors)
    timed_out = result.status == "timeout"
    code = 128 + result.signal if result.signal else result.exit_code  # never 0 for a killed program
    return ScriptResult(
        skill=prepared.target.name,
        path=prepared.clean,
        workdir=posixpath.normpath(posixpath.join("/work", prepared.workdir)).replace(folder, skill_dir, 1),
        skill_dir=skill_dir,
        status=cast(ScriptStatus, result.status),
        exit_code=124 if timed_out else code,
        signal=result.signal,
        stdout=tail_text(result.stdout.data, result.stdout.truncated),
        stderr=tail_text(result.stderr.data, result.stderr.truncated),
        stdout_truncated=result.stdout.truncated,
        stderr_truncated=result.stderr.truncated,
        timed_out=timed_out,
        duration_ms=round(result.duration_s * 1000),
        engine=result.engine,
        level=result.level.name.lower(),
        artifacts=collected.files,
        dropped=(*collected.dropped, *uncollected),
    )
