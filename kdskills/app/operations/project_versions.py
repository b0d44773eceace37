"""`project_skills.diff` and `project_skills.inspect`: what a version of an uploaded skill is, before it counts.

Texts of strangers are compared within bounds: what is long is told as changed, without its lines.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pydantic import Field

from kdskills.app.operations.checking import CheckInput, SkillChecker
from kdskills.app.operations.matrix import named_consumers
from kdskills.app.operations.models import Finding, Output
from kdskills.app.operations.projects import SkillInput, VersionInput, readable_skill
from kdskills.app.operations.showing import State
from kdskills.app.operations.supply import AuditedSkill
from kdskills.errors import FileRefused
from kdskills.skills import parse_skill
from kdskills.skills.model import estimate_tokens
from kdskills.skills.roots import KIND_ORDER, SkillRoot
from kdskills.skills.safe_open import is_withheld, read_file
from kdskills.skills.selection import import_refusal, refuse, refuse_by
from kdskills.supply.audit import audit_folder
from kdskills.turn import SkillsSubsystem, build_skills_instruction_block

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.plugins import HookAnswers, Registers
    from kdskills.projects.records import SkillVersion
    from kdskills.projects.service import Projects
    from kdskills.skills import Skill
    from kdskills.skills.safe_open import TreeFile
    from kdskills.turn import SkillView

MAX_TEXT_BYTES: Final = 256 * 1024
"""Largest file whose lines are compared."""
MAX_LINES: Final = 2000
MAX_COMPARED: Final = 40_000
"""Most lines that are compared for one answer: some texts take long for each."""
MAX_DIFF: Final = 512 * 1024
"""Most characters of all diffs in one answer."""


class DiffInput(SkillInput):
    """Which two versions."""

    version: str | None = Field(None, max_length=80, description="Hash of a version; none means the latest one.")
    base: str | None = Field(
        None, max_length=80, description="Hash of the version it is compared with; none means the active one."
    )


class FileDiff(Output):
    """One file that differs. `diff` is a unified diff; without one `omitted` says why: `binary`, `large`, `withheld`."""

    path: str
    change: Literal["added", "removed", "changed", "mode"]
    size_before: int | None = None
    size_after: int | None = None
    diff: str | None = None
    omitted: str | None = None


class DiffOutput(Output):
    """What differs between two versions: files by path, keys of the frontmatter as `[before, after]`, and the prompt.

    `block` is the unified diff of the instruction block that each version alone renders to, its tokens before and after beside it.
    """

    skill: str
    base: str
    version: str
    same: bool
    files: tuple[FileDiff, ...]
    frontmatter: dict[str, tuple[Any, Any]]
    block: str
    tokens_before: int
    tokens_after: int


class _Side(NamedTuple):
    """One version with its folder."""

    version: SkillVersion
    folder: Path

    @property
    def files(self) -> Mapping[str, TreeFile]:
        return {file.path: file for file in self.version.files}

    def skill(self) -> Skill | None:
        return parse_skill(self.folder).skill

    def block(self) -> str:
        """Return what the version alone renders to in a prompt."""
        root = SkillRoot("uploaded://version", self.folder.parent, "uploaded", "project")
        subsystem = SkillsSubsystem(roots=[root], index_dir=None, auto_refresh=None)
        with subsystem.activate():
            return str(build_skills_instruction_block((self.version.full_id,), by="code"))

    def text(self, path: str) -> str | None:
        """Return a file as text, "" for none; None for what is no text. Raises FileRefused."""
        if path not in self.files:
            return ""
        try:
            text = read_file(self.folder, path, limit=MAX_TEXT_BYTES).data.decode("utf-8")
        except UnicodeDecodeError:
            return None
        return None if "\0" in text else text


def _unified(before: str, after: str, path: str) -> str | None:
    """Return a unified diff of two texts; None for those too long to compare."""
    was, will = before.splitlines(), after.splitlines()
    if max(len(was), len(will)) > MAX_LINES:
        return None
    lines = difflib.unified_diff(was, will, f"a/{path}", f"b/{path}", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _file_diffs(base: _Side, later: _Side, *, evaluations: bool) -> Iterator[FileDiff]:
    room, lines = MAX_DIFF, MAX_COMPARED
    old, new = base.files, later.files
    for path in sorted({*old, *new}):
        before, after = old.get(path), new.get(path)
        if before == after:
            continue
        change: Literal["added", "removed", "changed", "mode"] = "changed"
        if before is None or after is None:
            change = "added" if before is None else "removed"
        elif before.sha256 == after.sha256:
            change = "mode"
        diff = omitted = None
        if is_withheld(path) and not evaluations:
            omitted = "withheld"
        elif change != "mode":
            diff, omitted, compared = _lines_of(base, later, path, room, lines)
            room, lines = room - len(diff or ""), lines - compared
        sizes = {"size_before": before and before.size, "size_after": after and after.size}
        yield FileDiff(path=path, change=change, diff=diff, omitted=omitted, **sizes)


def _lines_of(base: _Side, later: _Side, path: str, room: int, lines: int) -> tuple[str | None, str | None, int]:
    """Return the diff of a file's lines, or why there is none, and how many lines were compared."""
    try:
        before, after = base.text(path), later.text(path)
    except FileRefused:  # larger than what is compared
        return None, "large", 0
    if before is None or after is None:
        return None, "binary", 0
    count = before.count("\n") + after.count("\n")
    diff = _unified(before, after, path) if count <= lines else None
    return (diff, None, count) if diff is not None and len(diff) <= room else (None, "large", count)


def _difference(base: _Side, later: _Side, *, evaluations: bool) -> DiffOutput:
    facts = [{} if skill is None else dict(skill.frontmatter) for skill in (base.skill(), later.skill())]
    blocks = base.block(), later.block()
    keys = sorted({*facts[0], *facts[1]}, key=str)
    return DiffOutput.of(
        skill=later.version.skill,
        base=base.version.version,
        version=later.version.version,
        same=base.version.version == later.version.version,
        files=tuple(_file_diffs(base, later, evaluations=evaluations)),
        frontmatter={
            str(key): (facts[0].get(key), facts[1].get(key)) for key in keys if facts[0].get(key) != facts[1].get(key)
        },
        block=_unified(*blocks, "block") or "",
        tokens_before=estimate_tokens(blocks[0]),
        tokens_after=estimate_tokens(blocks[1]),
    )


async def diff(projects: Projects, arguments: DiffInput, context: Context) -> DiffOutput:
    """Show what differs between two versions of an uploaded skill: files, frontmatter, and what a prompt has of it."""
    project, state = await readable_skill(projects, arguments, context)
    versions = await projects.versions(project, state.name)
    latest = versions[0].version if versions else None
    later = _Side(*await projects.version_folder(project, state.name, arguments.version or latest))
    base = _Side(*await projects.version_folder(project, state.name, arguments.base or state.active or latest))
    return await asyncio.to_thread(_difference, base, later, evaluations=context.identity.may("skills:write"))


class ConsumerChange(Output):
    """What a version in use would be for one consumer: the state of its id now, null where there is none, and then."""

    consumer: str | None
    before: State | None
    after: State
    code: str | None = None


class InspectOutput(Output):
    """A version before it counts: findings of `check`, the whole report of the audit, and what it would change.

    `replaced_by` is the layer of a stronger skill with the same id, which stays the one that agents get. `consumers` are those
    that the project's bundle names, for who is told of everything; for others their own agent.
    """

    skill: str
    version: str
    full_id: str
    active: bool
    enabled: bool
    findings: tuple[Finding, ...]
    audit: AuditedSkill
    replaced_by: str | None = None
    consumers: tuple[ConsumerChange, ...]


def _state_then(view: SkillView, skill: Skill) -> tuple[State, str | None]:
    """Return what the gate would say of *skill* in a view it is not in yet."""
    refusal = refuse(view.rules, skill)
    if refusal is None and view.rules.imports == "strict":
        refusal = import_refusal(view.index, view.rules, skill, skill.full_id)
    if refusal is not None:
        return "refused", refusal.code
    if skill.hidden:
        return "hidden", None
    return ("listed" if refuse_by(skill, "model") is None else "unlisted"), None


def _state_now(view: SkillView, full_id: str) -> tuple[State | None, str | None]:
    if full_id in view.listed:
        return "listed", None
    if full_id in view.skills:
        return ("hidden" if view.skills[full_id].hidden else "unlisted"), None
    code = view.codes.get(full_id)
    return (None if code is None else "invalid" if code == "skill_invalid" else "refused"), code


def _changes(subsystem: SkillsSubsystem, skill: Skill, context: Context, *, replaced: bool) -> Iterator[ConsumerChange]:
    identity = context.identity
    own_agent = (identity.consumer,)
    for consumer in (named_consumers(subsystem) or own_agent) if identity.sees_all else own_agent:
        view = subsystem.view(consumer, None if identity.sees_all else identity.held_tools)
        before, code = _state_now(view, skill.full_id)
        after, code = (before or "refused", code) if replaced else _state_then(view, skill)
        yield ConsumerChange(consumer=consumer, before=before, after=after, code=code)


async def inspect(
    projects: Projects,
    bundles: BundleLoader,
    answers: HookAnswers,
    registers: Registers,
    arguments: VersionInput,
    context: Context,
) -> InspectOutput:
    """Show what is found in a version of an uploaded skill, and what it would change for which consumer."""
    project, state = await readable_skill(projects, arguments, context)
    version, folder = await projects.version_folder(project, state.name, arguments.version)
    subsystem = (await projects.skills(project)).subsystem

    def look() -> InspectOutput:
        parsed = parse_skill(folder).skill
        checker, judged = SkillChecker.of(bundles, answers, registers, None), CheckInput(path=folder)
        findings = checker.selected(checker.findings(folder, judged, None)[1], judged)
        winner = subsystem.registry.get(version.full_id)
        stronger = KIND_ORDER[KIND_ORDER.index("project") + 1 :]
        layer = winner.layer if winner is not None and winner.layer in stronger else None
        changes: Iterator[ConsumerChange] = iter(())
        if parsed is not None:
            changes = _changes(subsystem, replace(parsed, layer="project"), context, replaced=layer is not None)
        return InspectOutput.of(
            version,
            enabled=state.enabled,
            findings=findings,
            audit=AuditedSkill.of(audit_folder(folder, skill=version.full_id.replace(".", "/", 1)), below=""),
            replaced_by=layer,
            consumers=tuple(changes),
        )

    return await asyncio.to_thread(look)
