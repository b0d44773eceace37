"""Operations about a project: which one, and what of it the caller may look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from kdskills.app.operations.models import Input
from kdskills.app.operations.table import Context
from kdskills.errors import NotFound
from kdskills.skills.selection import refuse_by

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.identity import Identity
    from kdskills.projects.model import SkillState
    from kdskills.skills import Skill
    from kdskills.turn import SkillView


class ProjectInput(Input):
    """Which project; callers elsewhere have the one of their token."""

    project: str | None = Field(None, max_length=64, description="The project; none means the caller's own.")

    def project_of(self, context: Context) -> str:
        """Return the project.

        Raises:
            NotFound: It is not the caller's; whether it is there stays unknown.
        """
        identity = context.identity
        if self.project in {None, identity.project}:
            return identity.project
        if not identity.account:
            raise NotFound(f"there is no project {self.project!r}", project=self.project)
        assert self.project is not None  # else it was the caller's own
        return self.project


def audit_name(context: Context) -> str:
    """Return the caller as audit rows name it."""
    identity = context.identity
    name = f"token:{identity.token}" if identity.token else identity.agent
    return f"{identity.door}:{name}"


async def readable(host: Host, context: Context, project: str, states: list[SkillState]) -> list[SkillState]:
    """Return those of *states* the caller may read: all for who may change them, else what the policy grants."""
    identity = context.identity
    if identity.may("skills:write") or not states:
        return states
    view = await host.projects.view(project, identity.consumer, identity.held_tools)
    visible = visible_skills(view, identity)
    return [state for state in states if state.full_id in visible and visible[state.full_id].layer == "project"]


def visible_skills(view: SkillView, identity: Identity) -> dict[str, Skill]:
    """Return the skills a caller elsewhere is told of: those it may start, without hidden ones; all others do not exist."""
    return {
        full_id: skill
        for full_id, skill in view.skills.items()
        if not skill.hidden and refuse_by(skill, identity.starter) is None
    }


async def readable_skill(host: Host, context: Context, project: str, name: str) -> SkillState:
    """Return one skill the caller may read.

    Raises:
        NotFound: There is none, or the policy refuses it to this caller; both read the same.
    """
    state = await host.projects.get(project, name)
    if not await readable(host, context, project, [state]):
        raise NotFound(f"there is no skill {name!r} in project {project!r}", skill=name, project=project)
    return state
