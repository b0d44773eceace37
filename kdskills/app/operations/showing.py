"""Looking at a bundle: what a consumer sees, why, and what its prompts hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.app.project_skills import ProjectSkills
from kdskills.errors import BadRequest, CallRefused
from kdskills.skills.model import estimate_tokens
from kdskills.turn import Refused
from kdskills.turn.facade import build_skills_instruction_block

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem, SkillView

ANONYMOUS = "Consumer that asks, such as `solver.react.decision`; none means an anonymous consumer."


class ViewInput(Input):
    """Whose view of which skills."""

    bundle: Path | None = Field(None, description="A bundle's folder; none means the skills of the caller's project.")
    consumer: str | None = Field(None, description=ANONYMOUS)
    tools: tuple[str, ...] | None = Field(None, description="Tools the consumer has; none given means no tool gate.")
    include_internal: bool = Field(default=False, description="Whether skills of namespace `internal` may be granted.")

    async def skills(self, host: Host, context: Context) -> ProjectSkills:
        """Return the skills asked for.

        Raises:
            CallRefused: Somebody elsewhere named a folder of this machine, or another consumer than the own agent.
        """
        identity = context.identity
        if self.bundle is None:
            found = await host.project_skills(identity.project)
        elif identity.local:
            bundle = host.bundle(self.bundle)
            found = ProjectSkills(bundle.name, host.subsystem(bundle), bundle.diagnostics)
        else:
            raise CallRefused("folders of this machine are for its own account: leave out bundle", code="local_only")
        if self.consumer not in {None, identity.agent} and not identity.may("admin"):
            raise CallRefused(f"this caller is {identity.agent} and sees its own skills", code="consumer_not_yours")
        return found

    async def view(self, host: Host, context: Context) -> SkillView:
        """Return the view asked for. Raises as `skills`."""
        return self.view_of((await self.skills(host, context)).subsystem, context)

    def consumer_of(self, context: Context) -> str | None:
        """Return the consumer that asks: the one named, else the caller's agent."""
        return self.consumer if self.consumer is not None else context.identity.consumer

    def view_of(self, subsystem: SkillsSubsystem, context: Context) -> SkillView:
        """Return the view asked for of *subsystem*."""
        return subsystem.view(self.consumer_of(context), self.tools, include_internal=self.include_internal)


class SkillRow(Output):
    """One skill as a consumer sees it: `state` is `listed`, `hidden`, `refused` or `invalid`."""

    full_id: str
    state: Literal["listed", "hidden", "unlisted", "refused", "invalid"]
    short_id: str | None = None
    name: str = ""
    description: str = ""
    version: str | None = None
    layer: str = ""
    tokens: int = 0
    tools: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    code: str | None = None
    reason: str | None = None


class ListOutput(Output):
    """Every skill there is, sorted by full id, with what the consumer may do with it."""

    bundle: str
    consumer: str | None
    skills: tuple[SkillRow, ...]
    visible: tuple[str, ...]
    diagnostics: tuple[Finding, ...] = ()


def _row(view: SkillView, skill: Skill, numbers: dict[str, str]) -> SkillRow:
    answer = view.resolve(skill.full_id, by="code")
    facts: dict[str, Any] = {
        "full_id": skill.full_id,
        "name": skill.name,
        "description": skill.description,
        "version": skill.version,
        "layer": skill.layer,
        "tokens": skill.tokens,
        "tools": tuple(f"{tool.id}{' (required)' if tool.required else ''}" for tool in skill.tools),
        "imports": skill.imports,
    }
    if isinstance(answer, Refused):
        return SkillRow(state="refused", code=answer.code, reason=answer.reason, **facts)
    if skill.full_id in numbers:
        return SkillRow(state="listed", short_id=numbers[skill.full_id], **facts)
    return SkillRow(state="hidden" if skill.hidden else "unlisted", **facts)


async def list_skills(host: Host, given: ViewInput, context: Context) -> ListOutput:
    """List every skill of a bundle as one consumer sees it."""
    found = await given.skills(host, context)
    subsystem = found.subsystem
    view = given.view_of(subsystem, context)
    numbers = {full_id: short for short, full_id in view.short_ids.items()}
    rows = [_row(view, skill, numbers) for skill in subsystem.registry.values()]
    rows += [
        SkillRow(
            full_id=bad.full_id, state="invalid", code="skill_invalid", reason="; ".join(map(str, bad.diagnostics))
        )
        for bad in subsystem.snapshot.invalid.values()
    ]
    return ListOutput(
        bundle=found.name,
        consumer=given.consumer_of(context),
        skills=tuple(sorted(rows, key=lambda row: row.full_id)),
        visible=tuple(view.listed),
        diagnostics=tuple(
            Finding.of(d) for d in dict.fromkeys((*found.diagnostics, *subsystem.diagnostics, *view.diagnostics))
        ),
    )


class RefInput(ViewInput):
    """A reference within somebody's view."""

    ref: str = Field(description="Full id, bare id, `SK3`, or any of these behind `sk:`.")
    by: Literal["model", "user", "code"] = Field("code", description="Who starts the skill.")


class ShowOutput(Output):
    """One skill in full: its facts, its text and its companions."""

    full_id: str
    name: str
    description: str
    layer: str
    location: str
    path: str | None
    digest: str
    tree_digest: str
    size: int
    tokens: int
    disclosure: str
    imports: tuple[str, ...]
    closure: tuple[str, ...]
    tools: tuple[str, ...]
    frontmatter: dict[str, Any]
    body: str
    compact: str | None
    sources: tuple[dict[str, Any], ...]
    diagnostics: tuple[Finding, ...]


async def show_skill(host: Host, given: RefInput, context: Context) -> ShowOutput:
    """Show one skill in full, if the consumer may have it."""
    answer = (await given.view(host, context)).resolve(given.ref, by=given.by)
    if isinstance(answer, Refused):
        raise BadRequest(f"{given.ref}: {answer.reason}", code=answer.code, ref=given.ref, full_id=answer.full_id)
    skill = answer.skill
    return ShowOutput(
        full_id=skill.full_id,
        name=skill.name,
        description=skill.description,
        layer=skill.layer,
        location=skill.location,
        path=str(skill.path) if skill.path is not None and context.identity.local else None,
        digest=skill.digest,
        tree_digest=skill.tree_digest(),
        size=skill.size,
        tokens=skill.tokens,
        disclosure=skill.disclosure,
        imports=skill.imports,
        closure=tuple(s.full_id for s in answer.closure),
        tools=tuple(f"{tool.id}{' (required)' if tool.required else ''}" for tool in skill.tools),
        frontmatter=dict(skill.frontmatter),
        body=skill.body,
        compact=skill.compact,
        sources=tuple(dict(row) for row in skill.sources),
        diagnostics=tuple(Finding.of(d) for d in (*skill.diagnostics, *answer.diagnostics)),
    )


class RenderInput(ViewInput):
    """What to render for a prompt."""

    refs: tuple[str, ...] = Field((), description="Skills of the instruction block; none means the catalog.")
    form: Literal["gallery", "xml", "json"] = Field("gallery", description="Form of the catalog.")
    variant: Literal["full", "compact"] = Field("full", description="Which text of a skill goes into the block.")
    budget: int | None = Field(None, ge=0, description="Tokens the catalog may take.")


class RenderOutput(Output):
    """Text as it stands in a prompt, and what it costs."""

    text: str
    tokens: int
    level: int | None = None
    shown: int | None = None
    total: int | None = None
    granted: tuple[str, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict)
    sources: tuple[dict[str, Any], ...] = ()
    diagnostics: tuple[Finding, ...] = ()


async def render(host: Host, given: RenderInput, context: Context) -> RenderOutput:
    """Render a consumer's catalog, or the instruction block of some skills."""
    subsystem = (await given.skills(host, context)).subsystem
    if not given.refs:
        view = given.view_of(subsystem, context)
        catalog = view.catalog(given.form, budget=given.budget)
        return RenderOutput(
            text=catalog.text,
            tokens=catalog.tokens,
            level=catalog.level,
            shown=catalog.shown,
            total=catalog.total,
            diagnostics=tuple(Finding.of(d) for d in catalog.diagnostics),
        )
    with subsystem.activate(given.consumer_of(context), given.tools, include_internal=given.include_internal):
        block = build_skills_instruction_block(given.refs, variant=given.variant)
    return RenderOutput(
        text=str(block),
        tokens=estimate_tokens(str(block)),
        granted=tuple(granted.full_id for granted in block.granted),
        refused={refused.ref: refused.code for refused in block.refused},
        sources=tuple(dict(row) for row in block.pool.to_json()["rows"]),
        diagnostics=tuple(Finding.of(d) for d in block.diagnostics),
    )


class WhyStep(Output):
    """One step of the gate."""

    step: int
    title: str
    result: str
    reason: str
    code: str | None = None
    rule: str | None = None
    source: str | None = None


class WhyOutput(Output):
    """All steps of the gate about one reference; the first that refuses gives the code."""

    ref: str
    consumer: str | None
    full_id: str | None
    granted: bool
    code: str
    reason: str | None
    steps: tuple[WhyStep, ...]
    notes: tuple[str, ...] = ()


async def why(host: Host, given: RefInput, context: Context) -> WhyOutput:
    """Explain, rule by rule, why a skill is granted or refused."""
    found = (await given.view(host, context)).explain(given.ref, by=given.by).to_json()
    return WhyOutput.model_validate({name: found[name] for name in WhyOutput.model_fields})


ASKED = ("no_bundle", "local_only", "consumer_not_yours")
LIST = Implementation(ViewInput, ListOutput, ASKED, list_skills)
SHOW = Implementation(RefInput, ShowOutput, ("unknown_skill", "denied", *ASKED), show_skill)
RENDER = Implementation(RenderInput, RenderOutput, ASKED, render)
WHY = Implementation(RefInput, WhyOutput, ASKED, why)
