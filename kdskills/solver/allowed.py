"""What `allowed-tools` of the active skills does in a turn: approval beforehand, or a restriction that holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import ToolCallRefused
from kdskills.execution.check import compile_glob, path_problem
from kdskills.execution.egress import granted
from kdskills.session.scripts import SKILL_DIR
from kdskills.skills.tool_names import AllowedTool, AllowedToolsMode, allowed_tools, allows_command
from kdskills.solver.tools import ToolError
from kdskills.solver.turn_tools import SKILLS, TURN, TurnFileRef, parse_ref, turn_path

if TYPE_CHECKING:
    from kdskills.execution import ExecRequest
    from kdskills.skills.model import Skill
    from kdskills.solver.turn import Turn

_FREE: Final = frozenset({"skills.load", "skills.unload", "skills.search", "skills.read", "exec.shell_output"})
"""Tools no skill restricts: loading skills, reading what they bring, and asking about commands that were allowed."""
_PROGRAMS: Final = frozenset({"exec.python", "skills.run_script"})
"""Tools that whoever may run any command may use."""
_FILES: Final = frozenset({"files.read", "files.edit", "files.grep", "files.glob", "react.write"})
_HOME: Final = "SKILL_DIR"
"""The variable of the skill's folder, and what a command holds that uses it or `KDSKILLS_SKILL_DIR`."""


async def approving_skill(turn: Turn, request: ExecRequest) -> str | None:
    """Return the full id of an active skill that approves a command beforehand, with all that *request* gives it, or None."""
    async for skill, rules in _active_rules(turn, "approve"):
        own = granted(turn.parts.settings.network, (skill.full_id,))
        reaches = request.network != "none" and not set(request.network).issubset(() if own == "none" else own)
        if allows_command(rules, _command_of(request)) and is_at_home(request, skill.full_id) and not reaches:
            return skill.full_id
    return None


async def require_own_home(turn: Turn, request: ExecRequest) -> None:
    """Raise ToolError `tool_denied` when a command that an active skill restricts gets another skill's folder or packages."""
    async for skill, rules in _active_rules(turn, "restrict"):
        if not (AllowedTool("exec.shell") in rules or is_at_home(request, skill.full_id)):
            message = f"while the skill {skill.id} is active this command may only run with skill {skill.full_id!r}"
            raise ToolError(message, code="tool_denied", who="operator")


def _command_of(request: ExecRequest) -> str:
    return (request.argv or ("",))[-1]


def is_at_home(request: ExecRequest, skill: str) -> bool:
    """Whether no other skill than this one, by full id, gives a command the folder that it names by a variable, or packages."""
    depends = _HOME in _command_of(request) or request.environment is not None
    return not depends or request.env.get(_HOME) == f"{SKILLS}{skill}"


async def check_restrictions(turn: Turn, tool: str, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError `tool_denied` when an active skill that restricts does not allow a call."""
    async for skill, rules in _active_rules(turn, "restrict"):
        if not allows_call(rules, tool, arguments):
            words = ", ".join(skill.allowed_tool_names)
            message = f"while the skill {skill.id} is active only these tools may be used: {words}"
            raise ToolError(message, code="tool_denied", who="operator")


async def _active_rules(turn: Turn, mode: AllowedToolsMode) -> AsyncIterator[tuple[Skill, tuple[AllowedTool, ...]]]:
    """Give the active skills of a mode with their rules; what restricts an agent restricts those it hands over to."""
    descriptor = turn.view.state.descriptor
    if mode not in {*descriptor.allowed_tools.values(), descriptor.allowed_tools_mode("*")}:
        return
    for each in turn.lineage if mode == "restrict" else (turn,):
        for active in await each.session.active():
            skill = turn.subsystem.registry.get(active.full_id)
            if (
                skill is not None
                and skill.allowed_tool_names
                and descriptor.allowed_tools_mode(skill.namespace, skill.layer) == mode
            ):
                yield skill, allowed_tools(skill.allowed_tool_names)


def allows_call(rules: Sequence[AllowedTool], tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether *rules* allow a call of *tool*; what is not understood is not allowed."""
    if tool in _FREE or any(rule.tool == tool and rule.only is None for rule in rules):
        return True
    if tool == "exec.shell":
        return allows_command(rules, str(arguments.get("command", "")))
    if tool in _PROGRAMS:
        return AllowedTool("exec.shell") in rules
    if tool == "react.read":
        return all(_allows_path(rules, "files.read", path) for path in _turn_refs(arguments.get("refs", ())))
    if tool == "files.glob" and str(arguments.get("pattern", "")).startswith(("/", "$")):
        return _is_skill_file(str(arguments["pattern"]))
    path = str(arguments.get("path", "."))
    return tool in _FILES and ((tool != "react.write" and _is_skill_file(path)) or _allows_path(rules, tool, path))


def _turn_refs(refs: Sequence[str]) -> Iterator[str]:
    """Give the turn's files among *refs*; reading what skills bring, and sources, is free."""
    for ref in refs:
        try:
            parsed = parse_ref(ref)
        except ToolCallRefused:
            continue
        if isinstance(parsed, TurnFileRef):
            yield parsed.path


def _is_skill_file(path: str) -> bool:
    return path.startswith(SKILLS) or SKILL_DIR.match(path) is not None


def _allows_path(rules: Sequence[AllowedTool], tool: str, text: str) -> bool:
    try:
        parts = tuple(turn_path(text).split("/"))
    except ToolCallRefused:
        return False
    patterns = (
        rule.only.removeprefix("./").removeprefix(f"{TURN}/") for rule in rules if rule.tool == tool and rule.only
    )
    return any(
        compile_glob(pattern).matches(parts if "/" in pattern else parts[-1:])
        for pattern in patterns
        if path_problem(pattern) is None
    )
