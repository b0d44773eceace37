"""`exec.shell`: bash behind the wall of the executor, on the turn's folder and the loaded skills.

Each command runs in a sandbox of its own. Files it writes, changes or removes are those of the turn; nothing else
outlives it: no process, no variable, no folder without a file. One in the background ends with its turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field

from kdskills.errors import ToolCallRefused
from kdskills.execution import ExecRequest, ExecResult, InputFile, Limits, Owner, SkillMount, Stream
from kdskills.session.brief import BriefText
from kdskills.session.codes import invalid, refuse
from kdskills.session.config import MIB, Budget
from kdskills.session.reading import fresh_tree
from kdskills.session.scripts import ENVIRONMENT, MISSING_PROGRAM, packages_of, skill_on_host
from kdskills.session.workspace import Collected, clean_path
from kdskills.solver.allowed import approving_skill, require_own_home
from kdskills.solver.dispatch import cut_middle
from kdskills.solver.events import ScriptStarted, ToolOutput
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext
from kdskills.solver.turn_tools import (
    DEFAULT_PROGRAM_S,
    MAX_PROGRAM_S,
    PROGRAM_GRACE_S,
    SKILLS,
    TURN,
    ToolArguments,
    approve_run,
    describe,
    engine_failures,
    file_facts,
    judged,
    run_program,
    shared_skills,
    tell_files,
    turn_path,
    with_network,
)

if TYPE_CHECKING:
    from kdskills.execution import Executor, Handle
    from kdskills.skills.model import Skill
    from kdskills.solver.turn import Turn

MAX_COMMAND: Final = 64 * 1024
"""Bytes of one command; the system takes no argument of twice as many."""
OUTPUT_BYTES: Final = 4 * MIB
"""Bytes of each stream that are kept: the last ones."""
SHOWN_CHARS: Final = 16_000
"""Characters of each stream that an answer holds; of a small window fewer."""
MAX_BACKGROUND: Final = 4
"""Commands of a turn that run in the background at once."""
MAX_WAIT_S: Final = 120.0
_LOST: Final = frozenset({"too_many", "too_large", "too_deep", "unreadable"})
"""Codes of outputs that were there and were not collected: what is missing then may not have been removed."""


class ShellInput(ToolArguments):
    """Arguments of `exec.shell`."""

    command: str = Field(
        min_length=1, description="What bash runs, such as: python3 $SKILL_DIR/scripts/sum.py a.csv | head"
    )
    workdir: str = Field(".", description="Folder to start in: one of the turn's, or /skills/<id> of a loaded skill.")
    skill: str = Field("", description="Loaded skill whose folder is $SKILL_DIR; the one loaded last when omitted.")
    timeout_s: float = Field(
        DEFAULT_PROGRAM_S, gt=0, le=MAX_PROGRAM_S, allow_inf_nan=False, description="Seconds the command may take."
    )
    background: bool = Field(False, description="Return at once with a handle for exec.shell_output.")


async def _exec_shell(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ShellInput)
    turn, executor = call.turn, call.turn.parts.executor
    if executor is None:
        raise refuse("run_disabled", "commands are switched off here")
    _check_command(arguments.command)
    async with AsyncExitStack() as stack:
        request = await shell_request(turn, arguments, stack)
        await require_own_home(turn, request)
        await approve_run(turn, executor, request, await approving_skill(turn, request))
        if arguments.background:
            return await _start(turn, executor, request, stack)
        result = await run_program(turn, executor, request)
    return shell_answer(call, result, removed_files(request.inputs, result))


def _check_command(command: str) -> None:
    problem = ""
    if "\0" in command:
        problem = "holds NUL"
    elif not command.strip():
        problem = "is blank"
    elif len(command.encode("utf-8", "surrogatepass")) > MAX_COMMAND:
        problem = f"has more than {MAX_COMMAND} bytes; write a script with react.write and run that"
    if problem:
        raise invalid(f"the command {problem}", ("/command", problem))


async def shell_request(turn: Turn, arguments: ShellInput, stack: AsyncExitStack) -> ExecRequest:
    """Return the request of a command: the turn's files, the loaded skills, their variables.

    Files of far skills are fetched for as long as *stack* is open. Raises `skill_not_active`, `path_denied`,
    `resource_not_found`, `too_large` or `skill_unreadable`.
    """
    skills = await shared_skills(turn, "exec.shell")
    home = _home(turn, arguments.skill, skills)
    mounts = [
        SkillMount(
            skill.full_id,
            await stack.enter_async_context(skill_on_host(skill, "")),
            await asyncio.to_thread(fresh_tree, skill, shown=True),
        )
        for skill in skills.values()
    ]
    used = [] if home is None else [skills[home]]
    environment = await packages_of(turn.parts.packages, lambda packages: packages.of_skills(used))
    folder = {} if home is None else {"SKILL_DIR": SKILLS + home, "KDSKILLS_SKILL_DIR": SKILLS + home}
    request = ExecRequest(
        argv=("bash", "-c", arguments.command),
        env={**ENVIRONMENT, "KDSKILLS_TURN_DIR": TURN, **folder},
        skills=tuple(mounts),
        environment=environment,
        inputs=await asyncio.to_thread(turn.workspace.inputs),
        outputs=("**",),
        workdir=_workdir(turn, arguments.workdir, mounts),
        limits=Limits(wall_s=arguments.timeout_s, stdout=OUTPUT_BYTES, stderr=OUTPUT_BYTES),
        profile=turn.parts.profile,
        owner=Owner(agent=turn.consumer, conversation=turn.session_id),
    )
    return await with_network(turn, request, skills)


def _home(turn: Turn, ref: str, skills: dict[str, Skill]) -> str | None:
    """Return the full id of the skill that `$SKILL_DIR` means."""
    if not ref.strip():
        return next(reversed(skills), None)
    target = ref.strip().removeprefix("sk:").removeprefix("skills.")
    full_id = turn.view.names.get(target, turn.view.short_ids.get(target, target))
    if full_id not in skills:
        raise refuse("skill_not_active", f"the skill {ref!r} is not loaded; load it first", name=ref)
    return full_id


def _workdir(turn: Turn, workdir: str, mounts: Sequence[SkillMount]) -> str:
    if workdir.startswith(SKILLS):
        full_id, _, below = workdir.removeprefix(SKILLS).partition("/")
        if full_id not in {mount.id for mount in mounts}:
            raise refuse("resource_not_found", f"there is no folder {workdir!r}", path=workdir, siblings=[])
        clean = f"/{clean_path(below)}" if below.strip("/") else ""
        return f"{SKILLS}{full_id}{clean}"
    clean = turn_path(workdir)
    if clean != "." and not turn.workspace.has_folder(clean):
        raise refuse("resource_not_found", f"there is no folder {workdir!r}", path=workdir, siblings=[])
    return clean


# ---- what came of it ----


def shell_answer(call: ToolContext, result: ExecResult, removals: Iterable[str] = ()) -> ToolAnswer:
    """Return what the model reads of a command that ended; its files are the turn's from now on, without those *removals*."""
    turn, error = call.turn, result.error
    if error is not None and error.code in MISSING_PROGRAM and error.stage != "program":
        raise refuse("interpreter_missing", "there is no bash in the executor, no defect of the command")
    collected = turn.workspace.collect(result.artifacts)
    removed = turn.workspace.remove(removals)
    answer = describe(result) | file_facts(result, collected)
    if removed:
        answer["removed"] = list(removed)
    for name, stream in (("stdout", result.stdout), ("stderr", result.stderr)):
        answer |= dict(_stream_facts(call, name, stream))
    tell_files(turn, collected, "exec.shell")
    return ToolAnswer(answer, tuple(file.path for file in collected.files), bool(collected.files or removed))


def removed_files(inputs: Sequence[InputFile], result: ExecResult) -> list[str]:
    """Return the inputs that were not there any more at the end; none where that is not certain."""
    if not (result.artifacts or result.artifact_errors) or any(e.code in _LOST for e in result.artifact_errors):
        return []
    remaining = {item.path for item in result.artifacts} | {item.path for item in result.artifact_errors}
    return [item.path for item in inputs if item.path not in remaining]


def shown_chars(turn: Turn) -> int:
    """Return how many characters of each stream an answer holds."""
    return min(SHOWN_CHARS, max(500, Budget.of(turn.window).result))


def _stream_facts(call: ToolContext, name: str, stream: Stream) -> Iterator[tuple[str, Any]]:
    """Give the fields of a stream: its head and tail where it is long, and the turn's file with all that was kept."""
    turn = call.turn
    room = shown_chars(turn)
    text = cut_middle(stream.text, room)
    yield name, text
    yield f"{name}_truncated", stream.truncated or len(stream.text) > room
    if text:
        turn.bus.emit(ToolOutput, call_id=call.call_id, tool="exec.shell", stream=name, text=text)
    if len(stream.text) <= room:
        return
    turn.shell_outputs += 1
    try:
        file = turn.workspace.write(f"shell/{turn.shell_outputs}.{name}.txt", stream.data, "replace")
    except ToolCallRefused as error:
        yield f"{name}_file_problem", error.message
        return
    tell_files(turn, Collected((file,)), "exec.shell")
    yield f"{name}_file", file.path
    if stream.truncated:
        yield f"{name}_file_note", f"holds the last {len(stream.data)} of {stream.total} bytes"


# ---- in the background ----


class BackgroundCommand:
    """A command that runs on a copy of the turn's files while the turn goes on."""

    def __init__(self, turn: Turn, handle: Handle, before: Mapping[str, str], stack: AsyncExitStack) -> None:
        self.handle = handle
        self.waiting = asyncio.ensure_future(handle.wait())
        self._turn, self._before, self._stack = turn, before, stack
        self.concluded = False

    async def conclude(self) -> ExecResult:
        """Return the result of a command that ended, without files that are as they were when it began."""
        self.concluded = True
        async with self._stack:
            with engine_failures():
                result = await self.waiting
            changed = (item for item in result.artifacts if self._before.get(item.path) != item.sha256)
            return judged(self._turn, replace(result, artifacts=tuple(changed)))

    async def end(self) -> None:
        """End it with its turn; files of one that ended by itself are the turn's."""
        if self.concluded:
            return
        ended = self.waiting.done()
        if not ended:
            await self.handle.cancel()
        with suppress(ToolCallRefused):
            result = await self.conclude()
            if ended:
                tell_files(self._turn, self._turn.workspace.collect(result.artifacts), "exec.shell")


async def _start(turn: Turn, executor: Executor, request: ExecRequest, stack: AsyncExitStack) -> ToolAnswer:
    if sum(not command.waiting.done() for command in turn.commands.values()) >= MAX_BACKGROUND:
        message = f"{MAX_BACKGROUND} commands run in the background already; end one with exec.shell_output"
        raise invalid(message, ("/background", "too many commands run"))
    before = await asyncio.to_thread(_digests, request.inputs)
    turn.bus.emit(ScriptStarted, skill=None, path=None, engine=executor.name)
    with engine_failures():
        handle = await executor.start(request)
    name = f"sh{len(turn.commands) + 1}"
    turn.commands[name] = BackgroundCommand(turn, handle, before, stack.pop_all())
    turn.closing.push_async_callback(turn.commands[name].end)
    note = "exec.shell_output tells what it wrote; its files come back when it has ended and is asked about"
    return ToolAnswer({"handle": name, "status": "running", "note": note}, changed=True)


def _digests(inputs: Iterable[InputFile]) -> dict[str, str]:
    contents = ((item.path, item.content) for item in inputs)
    return {
        path: hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).hexdigest()
        for path, content in contents
    }


class ShellOutputInput(ToolArguments):
    """Arguments of `exec.shell_output`."""

    handle: str = Field(description="What exec.shell gave for a command in the background.")
    wait_s: float = Field(5.0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for its end.")
    end: bool = Field(False, description="End the command now.")


async def _shell_output(arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    assert isinstance(arguments, ShellOutputInput)
    turn, command = call.turn, call.turn.commands.get(arguments.handle)
    if command is None or command.concluded:
        running = ", ".join(name for name, item in turn.commands.items() if not item.concluded) or "none"
        raise invalid(f"no command has this handle, or it was told of; there are: {running}", ("/handle", "is unknown"))
    if arguments.end:
        await command.handle.cancel()
    else:
        await asyncio.wait({command.waiting}, timeout=arguments.wait_s)
    if arguments.end or command.waiting.done():
        return shell_answer(call, await command.conclude())
    room = shown_chars(turn)
    stdout, stderr = (data.decode("utf-8", "replace") for data in command.handle.tail(room))
    # It may say something else the next time: asking again is no repetition.
    return ToolAnswer(
        {"handle": arguments.handle, "status": "running", "stdout": stdout, "stderr": stderr}, changed=True
    )


SHELL = SolverTool(
    "exec.shell",
    "Run a bash command in isolation: what skills call Bash. It starts in /work, the folder of this turn, whose files "
    "last from call to call; loaded skills are at /skills/<id>, read-only, and $SKILL_DIR is the one loaded last. "
    "There is no network unless a loaded skill was granted some, and processes end with the command.",
    ShellInput,
    _exec_shell,
    barrier=lambda _arguments: True,
    timeout_s=MAX_PROGRAM_S + PROGRAM_GRACE_S,
    brief=BriefText("Run a bash command on the files; $SKILL_DIR is the loaded skill.", {}),
)
SHELL_OUTPUT = SolverTool(
    "exec.shell_output",
    "Tell what a command in the background wrote last, or its result once it has ended; end it.",
    ShellOutputInput,
    _shell_output,
    barrier=lambda _arguments: True,
    timeout_s=MAX_WAIT_S + PROGRAM_GRACE_S,
    brief=None,
)
