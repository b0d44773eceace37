"""Looking at a bundle: what a consumer sees, why, and what its prompts hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, cast, get_args

from pydantic import Field

from kdskills.app.operations.bundles import demo_consumers, demo_of, visible_skills
from kdskills.app.operations.models import (
    MAX_PAGE,
    Finding,
    Input,
    Output,
    PageOutput,
    decode_cursor,
    encode_cursor,
)
from kdskills.bundle.descriptor import DECISION
from kdskills.bundle.lock_file import lock_of
from kdskills.environments.script_report import ImageContent, SkillScripts
from kdskills.errors import BadRequest, CallRefused
from kdskills.execution.egress import asked_network, describe_secrets, granted
from kdskills.session.config import INTERPRETERS
from kdskills.skills.model import estimate_tokens
from kdskills.supply.lock import LockedSkill, LockStanding, compare_folder, read_skills
from kdskills.turn import Granted, Refused
from kdskills.turn.facade import build_skills_instruction_block
from kdskills.turn.near_names import asker_findings, meant_id, suggestions

if TYPE_CHECKING:
    from kdskills.app.environments import Environments
    from kdskills.app.identity import Starter
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.environments.scripts import ScriptPackages
    from kdskills.errors import Diagnostic
    from kdskills.skills import Skill
    from kdskills.solver.parts import Wiring
    from kdskills.turn import SkillsSubsystem, SkillView

MAX_TEXT: Final = 1024 * 1024
"""Characters a query may have."""

MAX_FILTER: Final = 4000
"""Characters the words of a filter may have."""

MOST_TOKENS: Final = 10**15
"""More than any body has."""

FORM = (
    "`prompt`, what a solver sends; or a catalog alone: `gallery`, `xml` or `json`. None means the prompt of a bundle "
    "named by its folder, and a gallery where a budget or tools are given."
)


class ViewInput(Input):
    """Whose view of which skills."""

    bundle: Path | None = Field(None, description="A bundle's folder; none means the skills of the caller's project.")
    consumer: str | None = Field(
        None, description="Consumer that asks, such as `solver.react.decision`; none means an anonymous consumer."
    )
    tools: tuple[str, ...] | None = Field(None, description="Tools the consumer has; none given means no tool gate.")
    roles: tuple[str, ...] = Field(
        (), max_length=64, description="Roles of the user the consumer works for: rules of `@role` hold."
    )
    include_internal: bool = Field(default=False, description="Grant skills of namespace `internal`, too.")

    def asker_findings(self, subsystem: SkillsSubsystem, context: Context) -> tuple[Diagnostic, ...]:
        """Return a warning when the consumer named in the call is one that nothing of the skills or rules names."""
        local = context.identity.local and self.bundle is not None and self.consumer is not None
        return asker_findings(subsystem, self.consumer, demo_consumers(demo_of(self.bundle))) if local else ()

    def consumer_of(self, context: Context) -> str | None:
        """Return the consumer that asks: the one named, else the caller's agent."""
        identity = context.identity
        return identity.consumer if self.consumer in {None, identity.agent} else self.consumer

    def tools_of(self, context: Context) -> Collection[str] | None:
        """Return the tools the gate is asked with: those named, else those the caller holds; administrators see all."""
        if self.tools is not None or context.identity.sees_all:
            return self.tools
        return context.identity.held_tools

    def view_of(self, subsystem: SkillsSubsystem, context: Context) -> SkillView:
        """Return the view asked for of *subsystem*."""
        tools = self.tools_of(context)
        subsystem = subsystem.overlay(groups=self.roles) if self.roles else subsystem
        return subsystem.view(self.consumer_of(context), tools, include_internal=self.include_internal)


State = Literal["listed", "hidden", "unlisted", "refused", "invalid"]


class NarrowedViewInput(ViewInput):
    """Which skills to list, in which order."""

    sort: Literal["id", "name", "state", "tokens"] = Field(
        "id", description="Order of the skills, equal ones by full id; `tokens` has the most expensive first."
    )
    filter: str = Field(
        "",
        max_length=MAX_FILTER,
        description="Only skills in whose id, name and description all of these words or parts of words stand, in any case.",
    )
    state: State | None = Field(None, description="Only skills in this state.")
    sources: bool = Field(default=False, description="Tell where skills came from, by the lock of a bundle's folder.")
    limit: int | None = Field(None, ge=1, le=MAX_PAGE, description="How many at most; none means all.")
    cursor: str | None = Field(
        None,
        max_length=2048,
        description="`next_cursor` of the page before, of the same order; none means the first page.",
    )

    def _sort_key(self, row: SkillRow) -> tuple[str, str]:
        """Return what a row is sorted by, all of it as text, so that it goes into a cursor as it is."""
        keys: dict[str, Callable[[SkillRow], str]] = {
            "id": lambda row: "",
            "name": lambda row: row.name.casefold().encode("utf-8", "surrogatepass").hex(),
            "state": lambda row: str(get_args(State).index(row.state)),
            "tokens": lambda row: f"{MOST_TOKENS - row.tokens:016}",
        }
        return keys[self.sort](row), row.full_id

    def page(self, rows: list[SkillRow]) -> tuple[list[SkillRow], str | None]:
        """Return a page of *rows*, which are `chosen`, and the cursor of the page after it. Raises BadRequest."""
        if self.cursor is not None:
            sort, *position = decode_cursor(self.cursor, str, str, str)
            if sort != self.sort:
                problem = f"is of a list in another order, by {sort}"
                raise BadRequest(f"/cursor: {problem}", errors=[{"path": "/cursor", "problem": problem}])
            rows = [row for row in rows if self._sort_key(row) > tuple(position)]
        page = rows[: self.limit]
        return page, encode_cursor(self.sort, *self._sort_key(page[-1])) if len(page) < len(rows) else None

    def chosen(self, rows: Iterable[SkillRow]) -> list[SkillRow]:
        """Return those of *rows* that are asked for, in the order asked for."""
        words = set(self.filter.casefold().split())

        def fits(row: SkillRow) -> bool:
            text = f"{row.full_id}\n{row.name}\n{row.description}".casefold()
            return self.state in {None, row.state} and all(word in text for word in words)

        return sorted(filter(fits, rows), key=self._sort_key)


class SkillRow(Output):
    """One skill as a consumer sees it.

    `state` is `listed`, in its catalog; `hidden`, usable by its exact id; `unlisted`, for people to start; `refused` by the
    gate; or `invalid`, refused at load. What is refused or invalid has `code` and `reason`. Of a skill from
    elsewhere `lock` tells how its files stand to the lock, where that was asked.
    """

    full_id: str
    state: State
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
    source: str = ""
    resolved: str = ""
    lock: LockStanding | None = None


class ListOutput(PageOutput):
    """Every skill there is, or those asked for, with what the consumer may do with each; `visible` are the ids of those it
    may use, sorted. `total` counts those that are asked for, on all pages.

    Callers elsewhere are told of what they may use and of nothing else; administrators of everything.
    """

    bundle: str
    consumer: str | None
    skills: tuple[SkillRow, ...]
    visible: tuple[str, ...]
    total: int
    diagnostics: tuple[Finding, ...] = ()


def _row(view: SkillView, skill: Skill, numbers: dict[str, str], visible: Collection[str] | None = None) -> SkillRow:
    answer = view.resolve(skill.full_id, by="code")
    facts: dict[str, Any] = {"tools": _tool_texts(skill), "imports": _visible_ids(skill.imports, visible)}
    if isinstance(answer, Refused):
        return SkillRow.of(skill, state="refused", code=answer.code, reason=answer.reason, **facts)
    if skill.full_id in numbers:
        return SkillRow.of(skill, state="listed", short_id=numbers[skill.full_id], **facts)
    return SkillRow.of(skill, state="hidden" if skill.hidden else "unlisted", **facts)


def _tool_texts(skill: Skill) -> tuple[str, ...]:
    return tuple(f"{tool.id}{' (required)' if tool.required else ''}" for tool in skill.tools)


def _visible_ids(full_ids: Iterable[str], visible: Collection[str] | None) -> tuple[str, ...]:
    """Return the ids a caller is told of; all of them when *visible* is None."""
    return tuple(each for each in full_ids if visible is None or each in visible)


async def list_skills(bundles: BundleLoader, arguments: NarrowedViewInput, context: Context) -> ListOutput:
    """List every skill of a bundle as one consumer sees it."""
    skills = await bundles.skills(arguments.bundle, context)
    subsystem = skills.subsystem
    view = arguments.view_of(subsystem, context)
    numbers = {full_id: short for short, full_id in view.short_ids.items()}
    findings: dict[Diagnostic, None] = {}
    if context.identity.sees_all:
        shown: Collection[str] = view.listed
        rows = [_row(view, skill, numbers) for skill in subsystem.registry.values()]
        for bad in subsystem.snapshot.invalid.values():
            reason = "; ".join(map(str, bad.diagnostics))
            rows.append(SkillRow(full_id=bad.full_id, state="invalid", code="skill_invalid", reason=reason))
        asker = arguments.asker_findings(subsystem, context)
        findings = dict.fromkeys((*skills.diagnostics, *subsystem.diagnostics, *view.diagnostics, *asker))
    else:
        visible = visible_skills(view, context.identity)
        shown, rows = visible, [_row(view, skill, numbers, visible) for skill in visible.values()]
    chosen = arguments.chosen(rows)
    page, following = arguments.page(chosen)
    page_ids = {row.full_id for row in page}
    if arguments.sources and arguments.bundle is not None and subsystem.bundle_root is not None:
        entries, folders = read_skills(lock_of(Path(subsystem.bundle_root))), subsystem.registry
        page = [_sourced(row, entries.get(row.full_id.replace(".", "/", 1)), folders.get(row.full_id)) for row in page]
    return ListOutput.of(
        bundle=skills.name,
        consumer=arguments.consumer_of(context),
        skills=page,
        visible=tuple(full_id for full_id in shown if full_id in page_ids),
        total=len(chosen),
        next_cursor=following,
        diagnostics=tuple(findings),
    )


def _sourced(row: SkillRow, entry: LockedSkill | None, skill: Skill | None) -> SkillRow:
    if entry is None or skill is None or skill.folder is None:
        return row
    standing = compare_folder(skill.folder, entry).standing
    return row.model_copy(update={"source": entry.source, "resolved": entry.resolved, "lock": standing})


def _is_visible(answer: Granted | Refused) -> bool:
    """Whether a caller elsewhere is told of the skill."""
    return isinstance(answer, Granted) and not answer.skill.hidden


class SearchInput(ViewInput):
    """What to look for among the skills a consumer is shown."""

    query: str = Field(
        max_length=MAX_TEXT,
        description="What is to be done, in plain words; nothing in them is a command, and the first 4,000 characters count.",
    )
    limit: int = Field(10, ge=1, le=100, description="Most hits in one answer.")
    offset: int = Field(0, ge=0, le=1_000_000, description="Hits to pass over, to read on where an answer ended.")
    namespace: str | None = Field(
        None, description="Only skills of this namespace; scores stay as they are without it."
    )

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/query",)


class SearchRow(Output):
    """A skill that fits. `score` compares with others of the same answer only; `why` is `{field: words of the query in it}`.

    Fields are `name`, `description`, `keywords` (aliases, tags, keywords, triggers), `body`, and `files` (names and first
    lines of scripts, titles of references).
    """

    full_id: str
    short_id: str
    name: str
    description: str
    tokens: int
    score: float
    why: dict[str, tuple[str, ...]]


class SearchOutput(Output):
    """The skills that fit, the best first.

    `total` counts those in which any word of the query stands, and `more` says whether some come after these. `abstained`
    means that words stand somewhere, but nothing fits well enough to be an answer; there are no hits then, and no total.
    """

    bundle: str
    consumer: str | None
    hits: tuple[SearchRow, ...]
    offset: int
    total: int
    more: bool
    abstained: bool
    diagnostics: tuple[Finding, ...] = ()

    YES: ClassVar[str] = "hits"


async def search(bundles: BundleLoader, arguments: SearchInput, context: Context) -> SearchOutput:
    """Find the skills that fit a task, among those the consumer is shown."""
    skills = await bundles.skills(arguments.bundle, context)
    view = arguments.view_of(skills.subsystem, context)
    by = "model" if context.identity.sees_all else context.identity.starter
    facts = arguments.model_dump(include={"limit", "offset", "namespace"})
    result = await asyncio.to_thread(view.search, arguments.query, by=by, **facts)  # the first one reads all skills
    asker = arguments.asker_findings(skills.subsystem, context)
    return SearchOutput.of(
        result,
        bundle=skills.name,
        consumer=arguments.consumer_of(context),
        offset=arguments.offset,
        diagnostics=(*result.diagnostics, *asker) if context.identity.sees_all else (),
    )


class RefInput(ViewInput):
    """A reference within somebody's view."""

    ref: str = Field(description="Full id, bare id, `SK3`, or any of these behind `sk:`.")
    by: Literal["model", "user", "code"] | None = Field(
        None, description="Who starts the skill; none means who the caller's token says, a model or a person."
    )

    def starter(self, context: Context) -> Starter:
        """Return who starts the skill."""
        return context.identity.starter if self.by is None else self.by

    def answer(self, view: SkillView, context: Context, subsystem: SkillsSubsystem) -> Granted | Refused:
        """Return what the gate says, and to callers elsewhere that what it keeps from them does not exist."""
        if context.identity.sees_all:
            return view.resolve(meant_id(subsystem, view, self.ref), by=self.starter(context))
        answer = view.resolve(self.ref, by=self.starter(context))
        return answer if _is_visible(answer) else Refused("unknown_skill", "", self.ref).public()


class ScriptNeeds(Output):
    """What one script needs: declared, in which files (`origins`), and what else it seems to need (`suggested`, guesses with `?`).

    `missing` are the packages and programs of both that the sandbox's image does not have; an environment brings packages.
    `packages` is `built`, the code that a run would be refused with, or empty where it has none of its own. `starts` tells whether nothing
    but programs it calls is missing then.
    """

    path: str
    requirements: tuple[str, ...]
    requires_python: str
    node: tuple[str, ...]
    programs: tuple[str, ...]
    origins: tuple[str, ...]
    suggested: tuple[str, ...]
    missing: tuple[str, ...]
    packages: str = ""
    starts: bool = True


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
    scripts: tuple[ScriptNeeds, ...] = ()
    diagnostics: tuple[Finding, ...]


class AskedSkill(NamedTuple):
    """A skill that the caller may have, and the view that granted it."""

    subsystem: SkillsSubsystem
    view: SkillView
    answer: Granted

    @property
    def skill(self) -> Skill:
        """The skill."""
        return self.answer.skill


async def asked_skill(bundles: BundleLoader, arguments: RefInput, context: Context) -> AskedSkill:
    """Return the skill a reference means, if the consumer may have it. Raises BadRequest with the code of the refusal."""
    subsystem = (await bundles.skills(arguments.bundle, context)).subsystem
    view = arguments.view_of(subsystem, context)
    answer = arguments.answer(view, context, subsystem)
    if isinstance(answer, Granted):
        return AskedSkill(subsystem, view, answer)
    similar: tuple[str, ...] = ()
    if context.identity.sees_all and answer.code == "unknown_skill":
        similar = suggestions(subsystem, arguments.ref)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    message = f"{arguments.ref}: {answer.reason}{hint}"
    raise BadRequest(message, code=answer.code, ref=arguments.ref, full_id=answer.full_id)


async def show_skill(
    bundles: BundleLoader, environments: Environments, arguments: RefInput, context: Context
) -> ShowOutput:
    """Show one skill in full, if the consumer may have it."""
    subsystem, view, answer = await asked_skill(bundles, arguments, context)
    sees_all = context.identity.sees_all
    skill = answer.skill
    visible = None if sees_all else visible_skills(view, context.identity)
    granting = answer.diagnostics if sees_all else ()
    return ShowOutput.of(
        skill,
        path=str(skill.path) if skill.path is not None and context.identity.local else None,
        tree_digest=skill.tree_digest(),
        imports=_visible_ids(skill.imports, visible),
        closure=_visible_ids((member.full_id for member in answer.closure), visible),
        tools=_tool_texts(skill),
        frontmatter=dict(skill.frontmatter),
        sources=tuple(dict(row) for row in skill.sources),
        scripts=await asyncio.to_thread(_script_needs, bundles, environments.standing_of(subsystem), skill),
        diagnostics=(*skill.diagnostics, *granting, *arguments.asker_findings(subsystem, context)),
    )


def _script_needs(bundles: BundleLoader, packages: ScriptPackages, skill: Skill) -> tuple[ScriptNeeds, ...]:
    scripts, rows = _skill_scripts(bundles, skill), []
    for path, report in zip(scripts.scripts, scripts.rows(), strict=True):
        state, names = packages.standing(skill, path, skill.folder) if skill.folder else ("", frozenset[str]())
        # Of programs it needs its interpreter to start; others it may never call.
        calls = set(report.programs) - {scripts.image.runs[Path(path).suffix.lower()]}
        starts = state in {"", "built"} and not set(report.missing) - calls - names
        rows.append(ScriptNeeds.of(report, packages=state, starts=starts))
    return tuple(rows)


def _skill_scripts(bundles: BundleLoader, skill: Skill) -> SkillScripts:
    return SkillScripts(skill, ImageContent.collect(bundles.settings.execution_options().image, INTERPRETERS))


class RenderInput(ViewInput):
    """What to render for a prompt."""

    refs: tuple[str, ...] = Field((), description="Skills of a generator's instruction block; none means no block.")
    form: Literal["prompt", "gallery", "xml", "json"] | None = Field(None, description=FORM)
    skills_loaded: tuple[str, ...] = Field((), description="Skills loaded before the first decision of a prompt.")
    model: str | None = Field(None, description="Model whose window bounds a prompt; none means the setting.")
    request: str | None = Field(
        None,
        max_length=MAX_TEXT,
        description="What the user asks in a prompt; catalogs that do not fit are ranked for it.",
    )
    variant: Literal["full", "compact"] = Field("full", description="Which text of a skill goes into the block.")
    budget: int | None = Field(None, ge=0, description="Tokens the catalog may take.")

    @property
    def whole_prompt(self) -> bool:
        """Whether the prompt of a solver is asked for, rather than a part of one."""
        if self.form is not None or self.refs:
            return self.form == "prompt"
        of_catalogs = self.budget is not None or self.tools is not None or self.include_internal
        return self.bundle is not None and not of_catalogs


class PromptPartOut(Output):
    """A part of a prompt: its text, the tokens it takes, and what was cut of it and why.

    `name` is `instructions`, `base` (the bundle's own text), `catalog`, `skill:NAME` for each loaded one, `tools` (their JSON),
    `history` or `request`. Those before `tools` make the text of the prompt, joined. `estimated` tells that the model has no
    counter of its own.
    """

    name: str
    text: str
    tokens: int
    estimated: bool
    cut: str = ""


class PromptMessage(Output):
    """A message that is sent after the text of a prompt."""

    role: str
    text: str


class RenderOutput(Output):
    """Text as it stands in a prompt, and what it costs; numbers of tokens are estimates, but for `parts` that say otherwise.

    `tokens` counts all of it: of a prompt `instruction_tokens` for the text, and `tool_tokens` for the tools sent beside it.
    Of a prompt `messages` are sent after the text, and `parts` are all of it, in order.
    """

    form: str
    text: str
    tokens: int
    instruction_tokens: int | None = None
    tool_tokens: int | None = None
    offered: tuple[dict[str, Any], ...] = ()
    messages: tuple[PromptMessage, ...] = ()
    parts: tuple[PromptPartOut, ...] = ()
    level: int | None = None
    shown: int | None = None
    total: int | None = None
    granted: tuple[str, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict)
    sources: tuple[dict[str, Any], ...] = ()
    diagnostics: tuple[Finding, ...] = ()

    @property
    def negative(self) -> bool:
        """Whether a skill was refused."""
        return bool(self.refused)


async def render(
    bundles: BundleLoader, wiring: Wiring, settings: Settings, arguments: RenderInput, context: Context
) -> RenderOutput:
    """Render the prompt a solver would send, a consumer's catalog, or the instruction block of some skills."""
    if arguments.whole_prompt:
        return await _prompt(bundles, wiring, settings, arguments, context)
    if arguments.skills_loaded or arguments.request is not None:
        message = "skills_loaded and request belong to prompts, which take no refs"
        raise BadRequest(message, code="form_mixed")
    subsystem = (await bundles.skills(arguments.bundle, context)).subsystem
    asker = arguments.asker_findings(subsystem, context)
    if not arguments.refs:
        form = arguments.form if arguments.form is not None and arguments.form != "prompt" else "gallery"
        catalog = arguments.view_of(subsystem, context).catalog(form, budget=arguments.budget)
        return RenderOutput.of(catalog, form=form, diagnostics=(*catalog.diagnostics, *asker))
    tools, identity = arguments.tools_of(context), context.identity
    with subsystem.activate(arguments.consumer_of(context), tools, include_internal=arguments.include_internal) as view:
        answers = {ref: view.resolve(ref, by=identity.starter) for ref in arguments.refs}
        invisible = [ref for ref, answer in answers.items() if not (identity.sees_all or _is_visible(answer))]
        refs = tuple(ref for ref in arguments.refs if ref not in invisible)
        block = build_skills_instruction_block(refs, variant=arguments.variant, by=identity.starter)
    return RenderOutput.of(
        form="block",
        text=str(block),
        tokens=estimate_tokens(str(block)),
        granted=tuple(granted.full_id for granted in block.granted),
        refused={each.ref: each.code for each in block.refused} | dict.fromkeys(invisible, "unknown_skill"),
        sources=tuple(dict(row) for row in block.pool.to_json()["rows"]),
        diagnostics=(*block.diagnostics, *asker) if identity.sees_all else (),
    )


async def _prompt(
    bundles: BundleLoader, wiring: Wiring, settings: Settings, arguments: RenderInput, context: Context
) -> RenderOutput:
    """Render what a solver would send first, as `run` with the same bundle, consumer and skills does."""
    from kdskills.app.turn_runs import ProjectWiring, project_bundle
    from kdskills.solver.preview import (  # nothing else here needs a solver
        REQUEST,
        PromptChoices,
        offered_tools,
        preview,
    )

    if arguments.refs or arguments.include_internal:
        raise BadRequest(
            "a prompt is what the solver makes of it: it takes no refs and no include_internal", code="form_mixed"
        )
    if not context.identity.sees_all:
        raise CallRefused("prompts are for this machine's account and for administrators", code="local_only")
    skills = await bundles.skills(None, context) if arguments.bundle is None else None
    if skills is None:
        assert arguments.bundle is not None
        bundle = bundles.open(arguments.bundle, context, tools=True)
    else:
        bundle = await asyncio.to_thread(project_bundle, skills)
        wiring = cast("Wiring", ProjectWiring(wiring, skills.subsystem))
    choices = PromptChoices(
        consumer=arguments.consumer_of(context) or DECISION,
        model=arguments.model or settings.model,
        executor=settings.executor,
        request=REQUEST if arguments.request is None else arguments.request,
        skills=arguments.skills_loaded,
        tools=arguments.tools,
        budget=arguments.budget,
    )
    prompt = await preview(wiring, bundle, choices)
    offered = offered_tools(prompt.request)
    text_tokens = estimate_tokens(prompt.request.instructions)
    # Servers put the tools before the text, as JSON.
    tool_tokens = estimate_tokens(json.dumps(offered, ensure_ascii=False)) if offered else 0
    subsystem = bundles.subsystem(bundle) if skills is None else skills.subsystem
    return RenderOutput.of(
        form="prompt",
        text=prompt.request.instructions,
        tokens=text_tokens + tool_tokens,
        instruction_tokens=text_tokens,
        tool_tokens=tool_tokens,
        offered=offered,
        messages=prompt.request.messages,
        parts=prompt.parts,
        diagnostics=(*prompt.diagnostics, *arguments.asker_findings(subsystem, context)),
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

    YES: ClassVar[str] = "granted"
    ref: str
    consumer: str | None
    full_id: str | None
    granted: bool
    code: str
    reason: str | None
    steps: tuple[WhyStep, ...]
    notes: tuple[str, ...] = ()


def _network_notes(skill: Skill | None, settings: Settings) -> Iterator[str]:
    """Give what a skill asks of the network, and what of it the settings grant."""
    hosts = () if skill is None else asked_network(skill.metadata)
    rules = "none" if skill is None else granted(settings.network, (skill.full_id,))
    if hosts:
        yield f"it asks for the network: {', '.join(hosts)}; only the setting network grants it"
    if rules != "none":
        yield f"its programs may reach {', '.join(rules)}, by the setting network"
    for line in () if skill is None else describe_secrets(settings.network_secrets, skill.full_id):
        yield f"its requests get headers outside the sandbox, by the setting network_secrets: {line}"


async def why(bundles: BundleLoader, settings: Settings, arguments: RefInput, context: Context) -> WhyOutput:
    """Explain, rule by rule, why a skill is granted or refused; the rules are told to administrators alone."""
    subsystem = (await bundles.skills(arguments.bundle, context)).subsystem
    view = arguments.view_of(subsystem, context)
    if not context.identity.sees_all:
        answer = arguments.answer(view, context, subsystem)
        code, reason = ("granted", None) if isinstance(answer, Granted) else (answer.code, answer.reason)
        facts = {"granted": code == "granted", "code": code, "reason": reason, "steps": ()}
        return WhyOutput.of(answer, ref=arguments.ref, consumer=arguments.consumer_of(context), **facts)
    ref = meant_id(subsystem, view, arguments.ref)
    explained = view.explain(ref, by=arguments.starter(context))
    notes = [*explained.notes]
    if ref != arguments.ref:
        notes.append(f"{arguments.ref} was read as {ref}, the only skill of that id")
    if explained.code == "unknown_skill" and (similar := suggestions(subsystem, arguments.ref)):
        notes.append(f"did you mean {' or '.join(similar)}?")
    skill = subsystem.registry.get(explained.full_id or "")
    rows = () if skill is None else await asyncio.to_thread(_skill_scripts(bundles, skill).rows)
    notes += [row.note for row in rows if row.note]
    notes += [f"{finding.message}; {finding.fix}" for finding in arguments.asker_findings(subsystem, context)]
    notes += _network_notes(skill, settings)
    return WhyOutput.model_validate(explained.to_json() | {"notes": notes})
