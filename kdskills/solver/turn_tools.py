"""The tools every turn offers: `react.read` and `react.write` for skills, sources and files, `exec.python` for programs.

Generated code runs behind the wall of the executor, with the skills of `solver.codegen` in force.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kdskills.bundle.descriptor import CODEGEN
from kdskills.errors import ExecFailed, ExecRefused, FileRefused, PluginFailed, ToolCallRefused
from kdskills.execution import ExecRequest, ExecResult, Limits, Owner, SkillMount
from kdskills.execution.egress import granted
from kdskills.session.advice import advised
from kdskills.session.approval import AccessKind, ApprovalRequest, denial_of
from kdskills.session.brief import BriefText
from kdskills.session.codes import pathless, refuse
from kdskills.session.scripts import packages_of
from kdskills.session.workspace import MAX_FILE, clean_path
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import read_file, walk_shown
from kdskills.solver.events import (
    ApprovalDecided,
    ApprovalRequested,
    FileWritten,
    ScriptConnected,
    ScriptFinished,
    ScriptStarted,
    SkillRefused,
    ToolOutput,
)
from kdskills.solver.history import earlier_file
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext, ToolError

if TYPE_CHECKING:
    from kdskills.execution import EnvironmentMount, Executor
    from kdskills.session.workspace import Collected
    from kdskills.skills.model import Skill
    from kdskills.skills.selection import By
    from kdskills.solver.turn import Turn


_SHORT = re.compile(r"SK[0-9]+\Z")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")
_LINES = re.compile(r"#L([0-9]{1,9})(?:-L?([0-9]{1,9}))?\Z")


@dataclass(frozen=True, slots=True)
class SkillRef:
    """A skill, or with `path` a file of it."""

    ref: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class SourceRef:
    """Sources by number, as ascending ranges: a huge one costs nothing until it meets the pool."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TurnFileRef:
    """A file of the turn, or its lines from `first` to `last`, both 1-based and included."""

    path: str
    first: int | None = None
    last: int | None = None


Ref = SkillRef | SourceRef | TurnFileRef


def parse_ref(text: str) -> Ref:
    """Return what *text* asks for; raises `invalid_ref`, saying which forms there are."""
    kind, colon, target = text.strip().partition(":")
    target = target.strip()
    if colon and kind == "src":
        matches = [_RANGE.match(item.strip()) for item in target.split(",")]
        pairs = [(int(match[1]), int(match[2] or match[1])) for match in matches if match is not None]
        if len(pairs) < len(matches):
            raise _invalid(text, "sources are numbers and ranges, such as src:1-3,5")
        return SourceRef(tuple((min(pair), max(pair)) for pair in pairs))
    if colon and kind == "turn" and target:
        match = _LINES.search(target)
        if match is None:
            return TurnFileRef(target)
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first or match.start() == 0:
            raise _invalid(text, "lines are counted from 1, such as turn:notes.md#L10-40")
        return TurnFileRef(target[: match.start()], first, last)
    by_prefix = colon and kind == "sk" and target
    ref, slash, path = (f"sk:{target}" if by_prefix else text.strip()).partition("/")
    if by_prefix or _SHORT.match(ref) or (ref.startswith("skills.") and len(ref) > len("skills.")):
        return SkillRef(ref, path if slash else None)
    raise _invalid(text, "it is none of the forms that can be read")


def _invalid(text: str, problem: str) -> ToolCallRefused:
    message = (
        f"cannot read {text[:200]!r}: {problem}. Forms: sk:<skill>, sk:<skill>/<path>, src:1-3,5, turn:<path>#L10-40"
    )
    return ToolCallRefused(message, code="invalid_ref", ref=text[:200])


TURN = "/work"
"""Where programs see the folder of the turn."""
SKILLS = "/skills/"
"""Where they see the folders of loaded skills."""
MAX_READ_CHARS = 100_000
"""Characters of a turn file given at once."""


class ToolArguments(BaseModel):
    """Arguments of a tool of the solver: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ReactReadInput(ToolArguments):
    """Arguments of `react.read`."""

    refs: list[str] = Field(
        min_length=1,
        max_length=32,
        description="What to read: sk:<skill>, sk:<skill>/<path>, src:1-3,5, turn:<path> or turn:<path>#L10-40.",
    )


class ReactWriteInput(ToolArguments):
    """Arguments of `react.write`."""

    path: str = Field(description="File of the turn to write, such as notes/plan.md.")
    text: str = Field("", description="The text to write.")
    b64: str = Field("", description="Bytes to write, in base64, instead of text.")
    mode: Literal["create", "replace", "append"] = Field(
        "create", description="create: the file must not exist. replace: put this in its place. append: add to its end."
    )


async def _skill(turn: Turn, ref: str) -> ToolAnswer:
    before = {skill.full_id for skill in await turn.session.active()}
    loaded = (await turn.session.load([ref], mode="add", by="model")).bodies[-1]
    changed = loaded.full_id not in before
    turn.note_active(await turn.session.active())
    status = "loaded" if changed else "already_active"
    facts: dict[str, Any] = {"status": status, "skill": loaded.name, "tokens": loaded.tokens}
    text, origin = turn.rewritten(loaded), loaded.receipt.origin
    if origin is None:
        return ToolAnswer(facts | {"note": "its instructions stand in <active_skills>"}, changed=changed)
    # Text of third parties does not stand in the prompt, so a compactor must keep it here.
    pin = f"skill:{loaded.receipt.id}@{loaded.receipt.digest}"
    return ToolAnswer(facts | {"origin": origin, "text": text}, changed=changed, pin=pin)


async def _skill_file(turn: Turn, ref: str, path: str) -> ToolAnswer:
    resource = await turn.session.read(path, skill=ref)
    facts: dict[str, Any] = {"skill": resource.skill, "path": resource.path, "size": resource.size}
    if resource.truncated:
        facts["next_offset"] = resource.next_offset
    return ToolAnswer(facts if resource.text is None else facts | {"text": resource.text})


def _sources(turn: Turn, text: str, ref: SourceRef) -> ToolAnswer:
    rows = [row.to_json() for sid, row in turn.pool.rows.items() if any(low <= sid <= high for low, high in ref.ranges)]
    if not rows:
        known_sids = ", ".join(map(str, list(turn.pool.rows)[:20])) or "none"
        raise ToolCallRefused(f"no such source; known: {known_sids}", code="source_not_found", ref=text)
    return ToolAnswer({"sources": rows})


def turn_path(path: str) -> str:
    """Return *path* as one of the turn's folder: `/work/a` and `turn:a` mean `a`, and `/work` itself is `.`."""
    below = path.removeprefix("turn:")
    below = "." if below.rstrip("/") == TURN else below.removeprefix(f"{TURN}/")
    return "." if below.rstrip("/") in {"", "."} else clean_path(below)


def turn_bytes(turn: Turn, path: str, *, earlier: bool = False) -> bytes:
    """Return the bytes of a file of the turn; with *earlier*, `<turn id>/path` is one of that turn of the conversation.

    Raises `resource_not_found`, `path_denied`, `too_large` or `not_a_file`.
    """
    source = earlier_file(turn, path) if earlier else None
    try:
        if source is not None:
            return read_file(source[0], clean_path(source[1]), limit=MAX_FILE).data
        return turn.workspace.read(path)
    except FileRefused as error:
        code = {"file_missing": "resource_not_found", "symlink": "path_denied", "too_large": "too_large"}
        details = {"path": path, "reason": error.code}
        raise refuse(code.get(error.code, "not_a_file"), f"cannot read turn:{path}", **details) from error


def decoded(data: bytes, path: str) -> str:
    """Return text by the rules of `skills.read`: strict UTF-8 without NUL, a leading BOM dropped. Raises `not_text`."""
    try:
        content = None if b"\0" in data else data.decode("utf-8-sig")
    except UnicodeDecodeError:
        content = None
    if content is None:
        raise refuse("not_text", f"{path} is not UTF-8 text", path=path, size=len(data))
    return content


def _turn_file(turn: Turn, ref: TurnFileRef) -> ToolAnswer:
    data = turn_bytes(turn, ref.path, earlier=True)
    content = decoded(data, f"turn:{ref.path}")
    lines = content.splitlines(keepends=True)
    facts: dict[str, Any] = {"path": ref.path, "size": len(data), "lines": len(lines)}
    if ref.first is not None:
        content = "".join(lines[ref.first - 1 : ref.last])
        facts["shown"] = [ref.first, min(ref.last or ref.first, len(lines))]
    if len(content) > MAX_READ_CHARS:
        content, facts["truncated"] = content[:MAX_READ_CHARS], True
    return ToolAnswer(facts | {"text": content})


async def _react_read(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    """Read each ref in order; one that fails spoils no other."""
    assert isinstance(arguments, ReactReadInput)
    answers = [await _read_ref(call.turn, ref) for ref in arguments.refs]
    return ToolAnswer(
        {"items": [answer.value for answer in answers]},
        changed=any(answer.changed for answer in answers),
        pin=" ".join(answer.pin for answer in answers if answer.pin) or None,
        ok=any(answer.ok for answer in answers),
    )


async def _read_ref(turn: Turn, text: str) -> ToolAnswer:
    try:
        ref = parse_ref(text)
        if isinstance(ref, SourceRef):
            answer = _sources(turn, text, ref)
        elif isinstance(ref, TurnFileRef):
            answer = _turn_file(turn, ref)
        else:
            answer = await (_skill(turn, ref.ref) if ref.path is None else _skill_file(turn, ref.ref, ref.path))
    except ToolCallRefused as error:
        facts = advised({name: getattr(error, name) for name in ("code", "who", "message", "details")})
        answer = ToolAnswer({"status": "error", "error": facts}, ok=False)
    return replace(answer, value={"ref": text, "status": "ok", **answer.value})


def _loads_skill(arguments: BaseModel) -> bool:
    """Whether a `react.read` changes the session: it does when it reads a skill itself."""
    for ref in getattr(arguments, "refs", ()):
        try:
            parsed = parse_ref(ref)
        except ToolCallRefused:
            continue
        if isinstance(parsed, SkillRef) and parsed.path is None:
            return True
    return False


async def _react_write(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ReactWriteInput)
    if arguments.text and arguments.b64:
        raise _misused("/b64", "give text or b64, not both")
    try:
        data = base64.b64decode(arguments.b64, validate=True) or arguments.text.encode("utf-8", "backslashreplace")
    except ValueError:
        raise _misused("/b64", "is not base64", "b64 is not base64") from None
    written = call.turn.workspace.write(arguments.path.removeprefix(f"{TURN}/"), data, arguments.mode)
    call.turn.bus.emit(FileWritten, path=written.path, size=written.size, tool="react.write")
    return ToolAnswer(written.to_json(), (written.path,), changed=True)


def _misused(path: str, problem: str, message: str = "") -> ToolCallRefused:
    return refuse("invalid_argument", message or problem, errors=[{"path": path, "problem": problem}])


READ = SolverTool(
    "react.read",
    "Read skills (which loads them), files of loaded skills, sources by number, and files of this turn.",
    ReactReadInput,
    _react_read,
    barrier=_loads_skill,
    brief=BriefText("Read sources and files of this turn.", {"refs": "such as src:1-3 or turn:notes.md"}),
)
WRITE = SolverTool(
    "react.write",
    "Write a file of this turn: what skills call Write. Files handed in and data/ are read-only.",
    ReactWriteInput,
    _react_write,
    barrier=lambda _arguments: True,
    brief=BriefText("Write a file.", {"text": "", "mode": ""}),
)


DEFAULT_PROGRAM_S = 60.0
MAX_PROGRAM_S = 600.0
PROGRAM_GRACE_S = 10.0
MAX_PROGRAM_OUTPUT_CHARS = 64 * 1024
_OPENS = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*")
_CLOSES = re.compile(r"```[ \t]*")

_TASK = """\
Write one Python 3 program for this task. Answer with the program alone, in one fenced code block.
It runs in an isolated folder holding the files of this turn; write results there. There is {hosts}.

Task: {task}"""


class ExecPythonInput(ToolArguments):
    """Arguments of `exec.python`."""

    code: str = Field("", description="Python source to run. Give code or task.")
    task: str = Field("", description="What to do, in words; code is written for it. Give code or task.")
    skills: list[str] = Field(
        default_factory=list, max_length=64, description="Skills the code is written by; the active ones when omitted."
    )
    timeout_s: float = Field(
        DEFAULT_PROGRAM_S, gt=0, le=MAX_PROGRAM_S, allow_inf_nan=False, description="Seconds the program may take."
    )


async def _exec_python(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ExecPythonInput)
    turn = call.turn
    if bool(arguments.code.strip()) == bool(arguments.task.strip()):
        raise _misused("/code", "give exactly one of code and task")
    executor = turn.parts.executor
    if executor is None:
        raise refuse("run_disabled", "generated code is switched off here")
    shared = await shared_skills(turn, "exec.python")
    network = await turn_network(turn, shared)
    code = arguments.code
    if not code.strip():
        by: By = "model" if arguments.skills else "code"
        hosts = (
            "no network" if network == "none" else f"no network but {', '.join(network)}, by the proxy in its variables"
        )
        prompt = _TASK.format(task=arguments.task, hosts=hosts)
        generated = await turn.generate(CODEGEN, prompt, skills=arguments.skills or None, by=by)
        code = extract_code(generated.text)
    if not code.strip():
        raise ToolError("no program was written for the task; say it in other words, or give code", code="no_code")
    skills = await loaded_skills(turn)
    environment = await packages_of(turn.parts.packages, lambda packages: packages.of_skills(skills.values()))
    request = await with_network(turn, build_request(turn, code, arguments.timeout_s, environment), shared)
    await approve_run(turn, executor, request)
    result = await run_program(turn, executor, request)
    collected = turn.workspace.collect(result.artifacts)
    tell_files(turn, collected, "exec.python")
    for stream, output in (("stdout", result.stdout), ("stderr", result.stderr)):
        if output.data:
            turn.bus.emit(ToolOutput, call_id=call.call_id, tool="exec.python", stream=stream, text=output.text)
    answer = describe(result)
    if arguments.task:
        answer["code"] = code
    answer |= file_facts(result, collected)
    return ToolAnswer(answer, tuple(file.path for file in collected.files), changed=bool(collected.files))


def tell_files(turn: Turn, collected: Collected, tool: str) -> None:
    """Tell which files a tool wrote."""
    for file in collected.files:
        turn.bus.emit(FileWritten, path=file.path, size=file.size, tool=tool)


def file_facts(result: ExecResult, collected: Collected) -> dict[str, Any]:
    """Return what a model reads of the files a program left."""
    facts: dict[str, Any] = {"artifacts": [file.to_json() for file in collected.files]}
    dropped_files = [*collected.dropped, *((item.path, item.message) for item in result.artifact_errors)]
    if dropped_files:
        facts["dropped"] = [{"path": path, "problem": problem} for path, problem in dropped_files]
    return facts


async def turn_network(turn: Turn, shared: Collection[str]) -> Literal["none"] | tuple[str, ...]:
    """Return what those of the loaded skills are granted that are *shared* with a run; naming a skill gives nothing."""
    return granted(turn.parts.settings.network, await _networked(turn, shared))


async def with_network(turn: Turn, request: ExecRequest, shared: Collection[str]) -> ExecRequest:
    """Return *request* with what those of the loaded skills are granted that are *shared* with it, by full id."""
    skills = await _networked(turn, shared)
    return replace(request, network=granted(turn.parts.settings.network, skills), network_skills=skills)


async def _networked(turn: Turn, shared: Collection[str]) -> tuple[str, ...]:
    return tuple(skill.full_id for skill in await turn.session.active() if skill.full_id in shared)


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


async def loaded_skills(turn: Turn) -> dict[str, Skill]:
    """Return the loaded skills with files, and what they import, by full id; the one loaded last stands last."""
    skills: dict[str, Skill] = {}
    for active in await turn.session.active():
        names = [turn.view.names.get(name, name) for name in active.receipt.imports]
        for full_id in (*names, active.full_id):
            skill = turn.subsystem.registry.get(full_id)
            if skill is not None and (skill.folder is not None or far_content(skill) is not None):
                skills.pop(full_id, None)
                skills[full_id] = skill
    return skills


async def shared_skills(turn: Turn, tool: str) -> dict[str, Skill]:
    """Return the loaded skills that a program which *tool* runs may see.

    A skill of which a policy plugin refuses any file is left out: inside, nobody asks about single files.
    """
    skills = await loaded_skills(turn)
    paths = {full_id: await asyncio.to_thread(skill_paths, skill) for full_id, skill in skills.items()}
    return {full_id: skill for full_id, skill in skills.items() if not _is_denied(turn, tool, skill, paths[full_id])}


def _is_denied(turn: Turn, tool: str, skill: Skill, paths: Sequence[str]) -> bool:
    kinds: tuple[AccessKind, ...] = ("read", "run")
    for path in (None, *paths):
        for kind in kinds if path is None or path.startswith("scripts/") else kinds[:1]:
            access = turn.access(kind, skill=skill.full_id, path=path, tool=tool)
            try:
                denial = denial_of(turn.parts.deny, access)
            except PluginFailed as error:
                turn.bus.emit(SkillRefused, ref=skill.full_id, code=error.code, reason=error.message)
                return True
            if denial is not None:
                turn.bus.emit(SkillRefused, ref=skill.full_id, code="skill_denied", reason=denial.reason)
                return True
    return False


def skill_paths(skill: Skill) -> tuple[str, ...]:
    """Return the paths of a skill's files that models see, links left out. Raises `skill_unreadable`."""
    content = far_content(skill)
    if content is not None:
        return tuple(content.paths)
    try:
        entries = walk_shown(skill.folder) if skill.folder is not None else []
    except FileRefused as error:
        raise refuse("skill_unreadable", f"the files of {skill.full_id} cannot be read: {error.message}") from error
    return tuple(entry.path for entry in entries if entry.kind == "file")


def build_request(turn: Turn, code: str, timeout_s: float, environment: EnvironmentMount | None = None) -> ExecRequest:
    """Return the request of a program: the turn's files, and the export of the codegen view with its skills mounted."""
    view = turn.role_view(CODEGEN)
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
        environment=environment,
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


async def approve_run(turn: Turn, executor: Executor, request: ExecRequest, approving: str | None = None) -> None:
    """Ask whether *request* may run, unless the skill *approving* allows it and no skill of a remote origin is loaded.

    Raises `approval_unavailable` (nobody to ask) or `approval_denied`.
    """
    approve = turn.parts.approve
    # A skill of a remote origin is loaded, directly or as an import: then every run needs approval.
    receipts = [skill.receipt for skill in await turn.session.active()]
    foreign = any(r.origin or any(name.startswith("mcp-") for name in r.imports) for r in receipts)
    if approve is None:
        if foreign:
            raise refuse("approval_unavailable", "this run needs approval, and nobody can be asked here")
        return
    if approving is not None and not foreign:
        turn.bus.emit(ApprovalDecided, skill=approving, path=None, allowed=True, reason="allowed-tools")
        return
    turn.bus.emit(ApprovalRequested, skill=None, path=None)
    argv = ("python3", "<code>") if request.argv is None else request.argv
    network = () if request.network == "none" else request.network
    asked = ApprovalRequest(turn.session_id, None, None, None, None, argv, (), executor.name, network, turn.user_id)
    answer = await approve(asked)
    turn.bus.emit(ApprovalDecided, skill=None, path=None, allowed=answer.allowed, reason=answer.reason)
    if not answer.allowed:
        raise refuse("approval_denied", "the run was not approved", reason=answer.reason)


async def run_program(turn: Turn, executor: Executor, request: ExecRequest) -> ExecResult:
    """Run *request* and tell of it. Raises `executor_unavailable` or `executor_failed` where the program is not to blame."""
    turn.bus.emit(ScriptStarted, skill=None, path=None, engine=executor.name)
    with engine_failures():
        result = await executor.run(request)
    return judged(turn, result)


@contextmanager
def engine_failures() -> Iterator[None]:
    """Refuse in words for the model what an engine refuses or breaks at."""
    try:
        yield
    except ExecRefused as error:
        message = f"the program was not run, no defect of it: {pathless(error.message)}"
        raise refuse("executor_unavailable", message, reason=error.code) from error
    except ExecFailed as error:
        message = f"the sandbox broke, no defect of the program: {pathless(error.message)}"
        raise refuse("executor_failed", message) from error


def judged(turn: Turn, result: ExecResult) -> ExecResult:
    """Tell that a program ended, and return its result. Raises `executor_failed`: the program never ran."""
    for row in result.connections:
        turn.bus.emit(ScriptConnected, skill=None, path=None, **asdict(row))
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
        "stdout": result.stdout.text[-MAX_PROGRAM_OUTPUT_CHARS:],
        "stderr": result.stderr.text[-MAX_PROGRAM_OUTPUT_CHARS:],
        "stdout_truncated": result.stdout.truncated or len(result.stdout.text) > MAX_PROGRAM_OUTPUT_CHARS,
        "stderr_truncated": result.stderr.truncated or len(result.stderr.text) > MAX_PROGRAM_OUTPUT_CHARS,
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
    timeout_s=MAX_PROGRAM_S + PROGRAM_GRACE_S,
    brief=BriefText("Run a Python program on the files.", {"code": ""}),
)
