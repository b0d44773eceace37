"""`skills.findings`: what a page about one skill says beside its text: findings, costs, imports, tools, lock and signature."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.operations.bundles import visible_skills
from kdskills.app.operations.checking import CheckInput, SkillChecker
from kdskills.app.operations.models import Finding, Output
from kdskills.app.operations.showing import AskedSkill, RefInput, asked_skill
from kdskills.app.operations.supply import VerifiedRow
from kdskills.errors import BundleError, Diagnostic, FileRefused
from kdskills.session.codes import refuse
from kdskills.skills.folder import shown_digest
from kdskills.skills.model import estimate_tokens
from kdskills.skills.safe_open import is_withheld
from kdskills.skills.selection import Refused, dependency, dependency_id
from kdskills.skills.tool_names import tool_id

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.plugins import HookAnswers, Registers
    from kdskills.bundle import Bundle
    from kdskills.skills import Skill
    from kdskills.supply.verification import TrustJudge


class ImportEdge(Output):
    """One import: who imports what, and the code of a refusal; `imported` is the text of a reference that names no skill."""

    importer: str
    imported: str
    code: str | None = None


class GatedTool(Output):
    """A tool that a skill names; `present` tells whether the consumer has it, null where no tool gate holds."""

    id: str
    role: str = ""
    why: str = ""
    required: bool = False
    present: bool | None = None


class FindingsOutput(Output):
    """What is known of one skill.

    `findings` are those of `check`, by path in the skill's folder and line. `tokens` are estimates by variant, `full` and
    `compact`. `edges` are the imports of its closure, and `importers` who imports it directly. `standing` is how it stands to
    lock and signature, told to who is told of everything. `shown_digest` is that of the files without evaluations.
    """

    full_id: str
    errors: int
    warnings: int
    findings: tuple[Finding, ...]
    tokens: dict[str, int]
    edges: tuple[ImportEdge, ...]
    importers: tuple[str, ...]
    tools: tuple[GatedTool, ...]
    digest: str
    tree_digest: str
    shown_digest: str
    standing: VerifiedRow | None = None


def _edges(grant: AskedSkill, visible: dict[str, Skill] | None) -> Iterator[ImportEdge]:
    """Yield the imports of a skill's closure; who is not told of everything is told of what is *visible*."""
    for member in grant.answer.closure:
        for ref in member.imports:
            outcome = dependency(grant.view.index, grant.view.rules, member, ref)
            code = outcome.code if isinstance(outcome, Refused) else None
            imported = outcome.full_id or ref
            if visible is None or (code is None and member.full_id in visible and imported in visible):
                yield ImportEdge(importer=member.full_id, imported=imported, code=code)


def _importers(grant: AskedSkill, visible: dict[str, Skill] | None) -> Iterator[str]:
    """Yield the skills that import a skill directly, whoever may use them."""
    for skill in (grant.view.index.skills if visible is None else visible).values():
        if any(dependency_id(grant.view.index, skill, ref) == grant.skill.full_id for ref in skill.imports):
            yield skill.full_id


def _bundle_of(bundles: BundleLoader, grant: AskedSkill) -> Bundle | None:
    """Return the bundle whose terms hold, read as data; None without one, or for one that cannot be read so."""
    try:
        root = grant.subsystem.bundle_root
        return None if root is None else bundles.load(Path(root), python="read")
    except BundleError:
        return None


def _answer(
    bundles: BundleLoader,
    answers: HookAnswers,
    registers: Registers,
    skills_judge: Callable[..., TrustJudge],
    grant: AskedSkill,
    context: Context,
) -> FindingsOutput:
    skill, identity, view = grant.skill, context.identity, grant.view
    visible = None if identity.sees_all else visible_skills(view, identity)
    findings: list[Diagnostic] = [*skill.diagnostics]
    standing = None
    if skill.folder is not None:
        checker = SkillChecker.of(bundles, answers, registers, _bundle_of(bundles, grant))
        judged = CheckInput(path=skill.folder)
        catalog = None if skill.full_id in view.listed else ()
        findings = checker.selected(checker.findings(skill.folder, judged, catalog)[1], judged)
        findings = [finding for finding in findings if not is_withheld(finding.path or "")]
        if identity.sees_all:
            root = grant.subsystem.bundle_root
            judge = skills_judge(grant.subsystem.descriptor, root, always=True)
            standing = VerifiedRow.of(judge.verify(skill))
    present = view.rules.tool_ids
    try:
        digests = {"tree_digest": skill.tree_digest(), "shown_digest": shown_digest(skill)}
    except FileRefused as error:
        message = "the files of this skill cannot be read"
        raise refuse("skill_unreadable", message, path=".", reason=error.code) from error
    return FindingsOutput.of(
        full_id=skill.full_id,
        errors=sum(finding.severity == "error" for finding in findings),
        warnings=sum(finding.severity == "warning" for finding in findings),
        findings=findings,
        tokens={"full": skill.tokens} | ({} if skill.compact is None else {"compact": estimate_tokens(skill.compact)}),
        edges=tuple(_edges(grant, visible)),
        importers=tuple(_importers(grant, visible)),
        tools=[
            GatedTool.of(tool, present=None if view.tools is None else tool_id(tool.id) in present)
            for tool in skill.tools
        ],
        digest=skill.digest,
        standing=standing,
        **digests,
    )


async def show_findings(
    bundles: BundleLoader,
    answers: HookAnswers,
    registers: Registers,
    skills_judge: Callable[..., TrustJudge],
    arguments: RefInput,
    context: Context,
) -> FindingsOutput:
    """Show what is wrong with one skill, what it costs and needs, if the consumer may have it."""
    grant = await asked_skill(bundles, arguments, context)
    return await asyncio.to_thread(_answer, bundles, answers, registers, skills_judge, grant, context)
