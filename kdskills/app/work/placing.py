"""Where a caller's command runs and with which skills: the policy gate first, then the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdskills.app.projects.folders import VersionFolders
from kdskills.app.projects.views import UPLOADED
from kdskills.errors import CallRefused, Conflict, ExecRefused, FileRefused, NotFound
from kdskills.execution.dirs import cache_dir
from kdskills.execution.request import IsolationLevel, Limits, SkillMount
from kdskills.execution.stage import stage_skill
from kdskills.jobs.model import Placement
from kdskills.session.approval import AccessRequest, arguments_digest, denial_of
from kdskills.turn import Refused

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.identity import Identity
    from kdskills.skills.model import Skill


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A skill a caller may run commands of, and where they run.

    Attributes:
        placement: What travels with the work.
        level: How strong the engine's wall is.
        has_files: Whether the skill has a folder to start in.
    """

    placement: Placement
    level: IsolationLevel
    has_files: bool


@dataclass(frozen=True, slots=True)
class SkillCall:
    """What is about to be done with a skill, as policy plugins see it."""

    tool: str
    session_id: str | None
    arguments: Mapping[str, Any]


async def run_place(host: Host, identity: Identity, skill_name: str, call: SkillCall) -> RunPlace:
    """Return where commands of a skill run for this caller.

    Raises:
        NotFound: `unknown_skill`; there is none, or the caller may not have it.
        CallRefused: `skill_denied`; a policy plugin said no.
        PluginFailed: A policy plugin could not say.
        ExecRefused: No engine may be used.
        Conflict: `skill_changed`; its files cannot be read as they are.
    """
    skills = await host.project_skills(identity.project)
    view = skills.subsystem.view(identity.consumer, identity.held_tools)
    answer = view.resolve(skill_name, by="code" if identity.local else identity.starter)
    if isinstance(answer, Refused):
        raise NotFound(answer.public().reason, code="unknown_skill", skill_name=skill_name)
    request = AccessRequest(
        "run",
        identity.consumer,
        call.session_id or "",
        answer.full_id,
        None,
        call.tool,
        arguments_digest(call.arguments),
    )
    denial = denial_of(host.answers.deny, request)
    if denial is not None:
        raise CallRefused(denial.public, code="skill_denied", skill_name=skill_name)
    engine = await host.wiring.executor(host.settings.executor)
    if engine.level == IsolationLevel.NONE:
        raise ExecRefused(
            f"background work needs an engine that isolates; {engine.name} does not",
            code="isolation_too_weak",
            engine=engine.name,
        )
    shared = not host.settings.work_database.startswith("sqlite")
    mounts, tree = await asyncio.to_thread(_pinned, answer.skill, answer.closure, shared=shared)
    uploaded = _uploaded(answer.closure)
    output_bytes = host.settings.jobs.result_bytes
    return RunPlace(
        placement=Placement(
            engine=engine.name,
            skill_name=answer.full_id,
            version_hash=next(iter(_uploaded((answer.skill,)).values()), tree),
            tree_digest=tree,
            uploaded=uploaded,
            skills=mounts,
            limits=Limits(stdout=output_bytes, stderr=output_bytes),
        ),
        level=engine.level,
        has_files=answer.skill.folder is not None,
    )


def _mounts(skills: tuple[Skill, ...], *, shared: bool) -> tuple[SkillMount, ...]:
    """Return the skills' folders, pinned as they are now.

    On one host the copies are mounted from, so that later edits change nothing; a pool of hosts shares the originals only,
    and a command whose skill was edited meanwhile is refused there.
    """
    mounts = []
    for skill in skills:
        if skill.folder is None:
            continue
        mount = SkillMount(skill.full_id, skill.folder, _digest(skill))
        mounts.append(mount if shared else SkillMount(mount.id, stage_skill(mount, cache_dir()), mount.tree))
    return tuple(mounts)


def _pinned(skill: Skill, closure: tuple[Skill, ...], *, shared: bool) -> tuple[tuple[SkillMount, ...], str]:
    """Return the mounts of a skill with what it imports, and the digest of its own files."""
    mounts = _mounts(closure, shared=shared)
    return mounts, next((mount.tree for mount in mounts if mount.id == skill.full_id), None) or _digest(skill)


def _uploaded(skills: tuple[Skill, ...]) -> dict[str, str]:
    """Return the versions of the uploaded skills among *skills*, by name."""
    folders = [skill.folder for skill in skills if skill.layer == UPLOADED and skill.folder is not None]
    return {folder.name: VersionFolders.version_in(folder) for folder in folders}


def _digest(skill: Skill) -> str:
    try:
        return skill.tree_digest()
    except FileRefused as error:
        raise Conflict(
            f"the files of skill {skill.full_id} cannot be read: {error.message}", code="skill_changed"
        ) from error
