"""`exec.python`: generated code behind the wall, with the skills of `solver.codegen` in force."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from kdskills.bundle.terms import CODEGEN
from kdskills.errors import ExecFailed, ExecRefused
from kdskills.execution import ExecRequest, ExecResult, Limits, Owner, SkillMount
from kdskills.session.approval import ApprovalRequest
from kdskills.session.codes import pathless, refuse
from kdskills.solver.events import (
    ApprovalDecided,
    ApprovalRequested,
    FileWritten,
    ScriptFinished,
    ScriptStarted,
    ToolOutput,
)
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext, ToolError

if TYPE_CHECKING:
    from kdskills.execution import Executor
    from kdskills.skills.selection import By
    from kdskills.solver.turn import Turn

DEFAULT_S = 60.0
MAX_S = 600.0
MARGIN_S = 10.0
MAX_OUTPUT_CHARS = 64 * 1024
_OPENS = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*")
_CLOSES = re.compile(r"```[ \t]*")

_TASK = """\
Write one Python 3 program for this task. Answer with the program alone, in one fenced code block.
It runs in an isolated folder holding the files of this turn; write results there. There is no network.

Task: {task}"""


class ExecPythonInput(BaseModel):
    """Arguments of `exec.python`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str = Field("", description="Python source to run. Give code or task.")
    task: str = Field("", description="What to do, in words; code is written for it. Give code or task.")
    skills: list[str] = Field(
        default_factory=list, max_length=64, description="Skills the code is written by; the active ones when omitted."
    )
    timeout_s: float = Field(
        DEFAULT_S, gt=0, le=MAX_S, allow_inf_nan=False, description="Seconds the program may take."
    )


async def _exec_python(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ExecPythonInput)
    turn = call.turn
    if bool(arguments.code.strip()) == bool(arguments.task.strip()):
        problem = [{"path": "/code", "problem": "give exactly one of code and task"}]
        raise refuse("invalid_argument", "give exactly one of code and task", errors=problem)
    executor = turn.parts.executor
    if executor is None:
        raise refuse("run_disabled", "generated code is switched off here")
    code = arguments.code or await write_code(turn, arguments.task, arguments.skills or None)
    request = build_request(turn, code, arguments.timeout_s)
    await _approve(turn, executor)
    result = await _run(turn, executor, request)
    collected = turn.workspace.collect(result.artifacts)
    for file in collected.files:
        turn.bus.emit(FileWritten, path=file.path, size=file.size, tool="exec.python")
    for stream, output in (("stdout", result.stdout), ("stderr", result.stderr)):
        if output.data:
            turn.bus.emit(ToolOutput, call_id=call.call_id, tool="exec.python", stream=stream, text=output.text)
    answer = describe(result)
    if arguments.task:
        answer["code"] = code
    answer["artifacts"] = [file.to_json() for file in collected.files]
    dropped_files = [*collected.dropped, *((item.path, item.message) for item in result.artifact_errors)]
    if dropped_files:
        answer["dropped"] = [{"path": path, "problem": problem} for path, problem in dropped_files]
    return ToolAnswer(answer, tuple(file.path for file in collected.files), changed=bool(collected.files))


async def write_code(turn: Turn, task: str, skills: list[str] | None) -> str:
    """Return a program for *task*, written by the role `solver.codegen`.

    Raises:
        ToolError: `no_code`: the model gave no program.
    """
    loaded_by: By = "code" if skills is None else "model"
    generated = await turn.generate(CODEGEN, _TASK.format(task=task), skills=skills, by=loaded_by)
    code = extract_code(generated.text)
    if not code.strip():
        raise ToolError("no program was written for the task; say it in other words, or give code", code="no_code")
    return code


def extract_code(text: str) -> str:
    """Return the longest fenced block of *text*, or all of it when there is none."""
    blocks: list[str] = []
    block_lines: list[str] | None = None
    for line in text.split("\n"):
        if block_lines is None:
            block_lines = [] if _OPENS.fullmatch(line) else None
        elif _CLOSES.fullmatch(line):
            blocks.append("".join(block_lines))
            block_lines = None
        else:
            block_lines.append(line + "\n")
    return max(blocks, key=len) if blocks else text


def build_request(turn: Turn, code: str, timeout_s: float) -> ExecRequest:
    """Return the request of a program: the turn's files, and the export of the codegen view with its skills mounted."""
    view = turn.codegen_view
    exported = for_program(view.export_runtime_globals())
    mounts = tuple(
        SkillMount(row["id"], folder, row["tree"])
        for row in exported["SKILLS_DESCRIPTOR"].get("skills", ())
        if (folder := turn.skill_folder(row["id"])) is not None
    )
    return ExecRequest(
        code=code,
        globals=exported,
        skills=mounts,
        inputs=turn.workspace.inputs(),
        outputs=("**",),
        limits=Limits(wall_s=timeout_s),
        profile=turn.parts.profile,
        owner=Owner(agent=turn.consumer, conversation=turn.session_id),
    )


def for_program(exported: dict[str, Any]) -> dict[str, Any]:
    """Return an export without the names of refused skills: a model wrote the program and reads what it prints.

    Refused skills are not exported, so that inside the sandbox they are unknown. Rules are kept only where they may
    match an exported skill.
    """
    descriptor = exported["SKILLS_DESCRIPTOR"]
    skill_names = {str(row["id"]).rpartition(".")[2] for row in descriptor.get("skills", ())}
    rules = {
        consumer: _naming(consumer_rules, skill_names)
        for consumer, consumer_rules in descriptor.get("agents_config", {}).items()
    }
    activation = {**descriptor.get("activation", {}), "refused": {}}
    return {**exported, "SKILLS_DESCRIPTOR": {**descriptor, "agents_config": rules, "activation": activation}}


def _naming(rules: Mapping[str, Any], skill_names: set[str]) -> dict[str, Any]:
    """Return *rules* without entries for skills that are not among *skill_names*; patterns stay."""
    narrowed = dict(rules)
    for key in ("enabled", "disabled"):
        if isinstance(narrowed.get(key), list):
            entries = [rule for rule in narrowed[key] if "*" in rule or any(name in rule for name in skill_names)]
            # An allow-list that matches no exported skill allows nothing; an empty one would allow everything.
            narrowed[key] = entries if entries or key == "disabled" else False
    return narrowed


async def _approve(turn: Turn, executor: Executor) -> None:
    approve = turn.parts.approve
    if approve is None:
        if await _foreign(turn):
            raise refuse("approval_unavailable", "this run needs approval, and nobody can be asked here")
        return
    turn.bus.emit(ApprovalRequested, skill=None, path=None)
    request = ApprovalRequest(turn.session_id, None, None, None, None, ("python3", "<code>"), (), executor.name)
    answer = await approve(request)
    turn.bus.emit(ApprovalDecided, skill=None, path=None, allowed=answer.allowed, reason=answer.reason)
    if not answer.allowed:
        raise refuse("approval_denied", "the run was not approved", reason=answer.reason)


async def _foreign(turn: Turn) -> bool:
    """Whether a skill of a remote origin is loaded, directly or as an import: then every run needs approval."""
    receipts = [skill.receipt for skill in await turn.session.active()]
    imports = (name for receipt in receipts for name in receipt.imports)
    return any(receipt.origin for receipt in receipts) or any(name.startswith("mcp-") for name in imports)


async def _run(turn: Turn, executor: Executor, request: ExecRequest) -> ExecResult:
    turn.bus.emit(ScriptStarted, skill=None, path=None, engine=executor.name)
    try:
        result = await executor.run(request)
    except ExecRefused as error:
        message = f"the program was not run, no defect of it: {pathless(error.message)}"
        raise refuse("executor_unavailable", message, reason=error.code) from error
    except ExecFailed as error:
        message = f"the sandbox broke, no defect of the program: {pathless(error.message)}"
        raise refuse("executor_failed", message) from error
    turn.bus.emit(
        ScriptFinished,
        skill=None,
        path=None,
        engine=result.engine,
        level=result.level.name.lower(),
        status=result.status,
        exit_code=result.exit_code,
        duration_ms=round(result.duration_s * 1000),
        limits=tuple(sorted(result.limits_enforced)),
    )
    if result.status in {"infra_error", "refused"}:
        reason = result.error.message if result.error else "no reason given"
        raise refuse("executor_failed", f"the sandbox broke, no defect of the program: {pathless(reason)}")
    return result


def describe(result: ExecResult) -> dict[str, Any]:
    """Return a run's outcome as the model reads it; the tail of long output is kept."""
    answer: dict[str, Any] = {
        "status": result.status,
        "exit_code": 124 if result.status == "timeout" else result.exit_code,
        "stdout": result.stdout.text[-MAX_OUTPUT_CHARS:],
        "stderr": result.stderr.text[-MAX_OUTPUT_CHARS:],
        "stdout_truncated": result.stdout.truncated or len(result.stdout.text) > MAX_OUTPUT_CHARS,
        "stderr_truncated": result.stderr.truncated or len(result.stderr.text) > MAX_OUTPUT_CHARS,
        "duration_ms": round(result.duration_s * 1000),
        "engine": result.engine,
        "level": result.level.name.lower(),
    }
    if result.signal is not None:
        answer["signal"] = result.signal
        answer["exit_code"] = 128 + result.signal if result.exit_code is None else answer["exit_code"]
    if result.error is not None:
        answer["error"] = {"code": result.error.code, "message": result.error.message}
        if result.error.exception:
            answer["error"] |= {"exception": result.error.exception, "traceback": result.error.traceback}
    if result.value is not None:
        answer["value"] = result.value
    return answer


PYTHON = SolverTool(
    "exec.python",
    "Run Python in isolation on the files of this turn, or have it written for a task and run it.",
    ExecPythonInput,
    _exec_python,
    timeout_s=MAX_S + MARGIN_S,
)
