"""Who calls from elsewhere, and what they get: `tokens.*`, `mcp.published` and `mcp.accept`, `codex.probe`, `codex.receipts`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, StringConstraints, model_validator

from kdskills.app.identity import TokenLimits, own_client
from kdskills.app.operations.calling import require_allowed
from kdskills.app.operations.models import (
    Finding,
    Input,
    Output,
    PageInput,
    PageOutput,
    ProjectInput,
    bound_project,
    page_by_time,
)
from kdskills.errors import BadRequest, Conflict, NotFound
from kdskills.skills.roots import ApprovedListing
from kdskills.skills.safe_open import rows_digest
from kdskills.storage.database import utc_now

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context, Operation
    from kdskills.app.plugins import HookAnswers
    from kdskills.app.publication import Publication
    from kdskills.app.settings import Settings
    from kdskills.app.tokens import IssuedToken, Tokens
    from kdskills.app.wiring import Storage


class ProbeInput(Input):
    """Which program, and whether to ask again."""

    binary: str | None = Field(
        None, description="Program to probe; the configured one otherwise. Callers elsewhere cannot choose it."
    )
    force: bool = Field(default=False, description="Ask again although an answer is kept.")


class ProbeFinding(Output):
    """One question of the probe."""

    name: str
    proven: bool
    seen: str


class ServerFacts(Output):
    """What follows from a probe for names and strategies."""

    name: str
    user_agent: str
    built_ins: tuple[str, ...]
    native: bool
    reload: bool
    namespaces: bool
    materialise: tuple[str, ...]
    rewind: str | None
    context: bool
    extra_roots: bool
    unsubscribe: bool
    probed: bool


class ProbeOutput(Output):
    """What the program does.

    Attributes:
        ok: Whether every question was asked.
        strategy: How catalogs will reach the model: the first proven way.
        binary: The program.
        fingerprint: SHA-256 over launcher, running executables and user agent.
        cached: Whether an earlier probe answered.
        seconds: How long it took.
        facts: What follows for names and strategies.
        findings: Each question and what was seen.
    """

    YES: ClassVar[str] = "ok"
    ok: bool
    strategy: str
    binary: str
    fingerprint: str
    cached: bool
    seconds: float
    facts: ServerFacts
    findings: tuple[ProbeFinding, ...]


class ReceiptsInput(Input):
    """Whose receipts."""

    session: str = Field(description="The session: the server's thread id.")


class ReceiptSkill(Output):
    """A published skill, by ref, with SHA-256 of the body the model could read."""

    ref: str
    body_digest: str


class ReceiptCall(Output):
    """A call of the turn."""

    key: str
    tool: str
    state: str
    response_digest: str | None


class TurnReceipt(Output):
    """What one turn was run with."""

    turn_id: str
    catalog_digest: str | None
    context_digest: str | None
    strategy: str | None
    strategy_asked: str | None
    visible_tools: tuple[str, ...]
    skills: tuple[ReceiptSkill, ...]
    calls: tuple[ReceiptCall, ...]


class ReceiptsOutput(Output):
    """The receipts kept of a session, oldest first."""

    YES: ClassVar[str] = "receipts"
    session: str
    receipts: tuple[TurnReceipt, ...]


async def probe_codex(settings: Settings, arguments: ProbeInput) -> ProbeOutput:
    """Probe a program with an empty home and a fake model."""
    from kdskills.remote.probe import probe

    report = await probe(arguments.binary or settings.codex_binary, state=settings.state_dir, force=arguments.force)
    strategy = "native" if report.profile.native else "reload" if report.profile.reload else "dispatcher"
    facts = report.to_json()
    return ProbeOutput.model_validate(facts | {"ok": report.complete, "strategy": strategy, "facts": facts["profile"]})


def show_receipts(settings: Settings, arguments: ReceiptsInput) -> ReceiptsOutput:
    """Read a session's receipts from the journal of this state folder."""
    from kdskills.remote.calls import Receipts
    from kdskills.remote.journal import SqlJournal, journal_url

    session, state = arguments.session, settings.state_dir
    if not (state / "remote" / "calls.sqlite3").exists():
        return ReceiptsOutput(session=session, receipts=())  # reading makes no database
    with closing(SqlJournal(journal_url(state))) as journal:
        return ReceiptsOutput.of(session=session, receipts=Receipts(journal).receipts(session))


class PublishedInput(Input):
    """Whose view is published."""

    project: str = Field("local", max_length=64, description="Project whose skills are served.")
    agent: str = Field("local", max_length=128, description="Consumer that the policy of skills is asked for.")
    profile: Literal["skills", "author"] = Field(
        "skills", description="Profile that is served on standard input, without a token."
    )
    tools: tuple[str, ...] | None = Field(
        None, description="Tools a client without a token holds; left out, no skill is asked what it needs."
    )
    token: str | None = Field(
        None, max_length=64, description="Public id of a client's token over HTTP; it says all the rest."
    )

    @model_validator(mode="after")
    def _token_says_all(self) -> Self:
        token_facts = (self.project, self.agent, self.profile, self.tools)
        if self.token is not None and token_facts != ("local", "local", "skills", None):
            raise ValueError("a token says its project, agent and tools, and its profile is skills")
        return self


class PublishedSkill(Output):
    """A skill as MCP clients see it."""

    uri: str
    full_id: str
    files: int
    size: int


class PublishedOut(Output):
    """What is published, sorted by uri; each diagnostic is a skill the consumer may use that is not, and why."""

    project: str
    agent: str
    published: tuple[PublishedSkill, ...]
    diagnostics: tuple[Finding, ...]


async def list_published(
    storage: Storage,
    operations: Mapping[str, Operation],
    publication: Callable[..., Awaitable[Publication]],
    arguments: PublishedInput,
) -> PublishedOut:
    """Tell what a client of this project and agent is offered."""
    if arguments.token is not None:
        client = replace(await storage.tokens.client(arguments.token), door="mcp", profile="skills")
    else:
        tools = None if arguments.tools is None else frozenset(arguments.tools)
        client = replace(own_client(arguments.profile, arguments.project, arguments.agent, tools), door="mcp")
    require_allowed(operations["skills.list"], client)
    entries, notes = await asyncio.to_thread((await publication(client, {})).entries)
    rows = [
        PublishedSkill.of(entry, files=len(entry.files), size=sum(each.size for each in entry.files))
        for entry in entries
    ]
    return PublishedOut.of(client, published=rows, diagnostics=sorted(notes, key=lambda note: note.ref or ""))


class AcceptInput(Input):
    """Which server, and whether to say yes."""

    server: str = Field(max_length=64, description="Label of the server in the setting `skill_roots`.")
    dry_run: bool = Field(False, description="Only show what changed; accept nothing.")
    digest: str | None = Field(
        None, max_length=80, description="Accept only if this is the digest of all that waits, as a dry run showed it."
    )


class ChangedSkill(Output):
    """A skill that waits for approval; paths are empty where the accepted files are not known one by one."""

    full_id: str
    uri: str
    digest: str
    known: bool
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


class AcceptOut(Output):
    """What was accepted, or what waits; `digest` is that of all of it."""

    server: str
    digest: str
    dry_run: bool
    skills: tuple[ChangedSkill, ...]


def accept(answers: HookAnswers, settings: Settings, arguments: AcceptInput) -> AcceptOut:
    """Ask the server what it lists now, show what is not as it was accepted, and accept it unless told not to."""
    listing = _listing(answers, settings, arguments.server)
    changes = listing.changes()
    digest = rows_digest([(change.uri, change.digest) for change in sorted(changes, key=lambda one: one.uri)])
    if arguments.digest is not None and arguments.digest != digest:
        message = f"what {arguments.server} changed is not what you looked at: look again"
        raise Conflict(message, code="mcp_set_changed")
    if changes and not arguments.dry_run:
        listing.accept(changes)
    skills = [ChangedSkill.of(change, known=change.files_known) for change in changes]
    return AcceptOut.of(arguments, digest=digest, skills=skills)


def _listing(answers: HookAnswers, settings: Settings, label: str) -> ApprovedListing:
    """Return the listing of a server, opened anew. Raises NotFound."""
    labels: list[str] = []
    for uri in settings.skill_roots:
        root = answers.open_skill_root(uri, settings.state_dir)
        if root is not None and isinstance(root.listing, ApprovedListing):
            if root.listing.label == label:
                return root.listing
            labels.append(root.listing.label)
    choice = f"there are {', '.join(sorted(labels))}" if labels else "the setting skill_roots names none"
    raise NotFound(f"no server is called {label!r}: {choice}", code="mcp_server_unknown", server=label)


ToolId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class CreateToken(ProjectInput):
    """Whose token, and what it may do."""

    agent: str = Field(max_length=128, description="Consumer the policy of skills is asked for.")
    scopes: tuple[str, ...] = Field(
        max_length=16, description="Among `skills:read`, `skills:write`, `work:run`, `work:read`, `admin`."
    )
    allowed_tools: tuple[str, ...] | None = Field(
        None, max_length=256, description="Operations it may run; none given means all its scopes allow."
    )
    person: bool = Field(
        default=False, description="Whether a person starts skills with it, and may start what only people start."
    )
    tools: tuple[ToolId, ...] = Field(
        (), max_length=256, description="Ids of the tools its holder has; skills that need others are refused to it."
    )
    label: str = Field("", max_length=200, description="What it is for, in words.")
    expires_in_days: float | None = Field(None, gt=0, le=36500, description="Days until it ends by itself.")
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="Requests it may make in a minute.")
    concurrent_work: int | None = Field(None, ge=1, le=10**6, description="Tasks and jobs it may have at one time.")
    body_bytes: int | None = Field(None, ge=1, le=2**40, description="Bytes a request of it may have.")


class TokenOut(Output):
    """What is known of a token; the secret is not. It was `last_used_at` then or within a minute after; null for never."""

    id: str
    label: str
    project: str
    agent: str
    scopes: tuple[str, ...]
    allowed_tools: tuple[str, ...] | None
    requests_per_minute: int | None
    concurrent_work: int | None
    body_bytes: int | None
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    person: bool
    tools: tuple[str, ...]


class NewTokenOut(TokenOut):
    """A new token; `token` is its text, shown this once."""

    token: str


class TokensOut(PageOutput):
    """Tokens, the latest first; revoked and expired ones too."""

    tokens: tuple[TokenOut, ...]


class TokenListInput(PageInput, ProjectInput):
    """Which page of the tokens."""


class ChangeToken(ProjectInput):
    """What of a token is to be less; what is left out stays as it is."""

    id: str = Field(min_length=1, max_length=64, description="The token's public id.")
    scopes: tuple[str, ...] | None = Field(None, max_length=16, description="Those it keeps.")
    allowed_tools: tuple[str, ...] | None = Field(None, max_length=256, description="Operations it may still run.")
    label: str | None = Field(None, max_length=200, description="What it is for, in words.")
    expires_in_days: float | None = Field(
        None, gt=0, le=36500, description="Days from now until it ends by itself; not later than it ends already."
    )
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="Requests it may make in a minute.")
    concurrent_work: int | None = Field(None, ge=1, le=10**6, description="Tasks and jobs it may have at one time.")
    body_bytes: int | None = Field(None, ge=1, le=2**40, description="Bytes a request of it may have.")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_dump(exclude={"id", "project"}, exclude_none=True):
            raise ValueError("say what is to change")
        return self


class RevokeToken(ProjectInput):
    """Which token ends."""

    id: str = Field(min_length=1, max_length=64, description="The token's public id.")


TokenModel = TypeVar("TokenModel", bound=TokenOut)


def _token_out(model: type[TokenModel], issued: IssuedToken, **facts: str) -> TokenModel:
    identity = issued.identity
    allowed = None if identity.allowed_tools is None else sorted(identity.allowed_tools)
    scopes, tools = sorted(identity.scopes), sorted(identity.tools or ())
    return model.of(issued, identity, identity.limits, scopes=scopes, allowed_tools=allowed, tools=tools, **facts)


def _require_known(names: tuple[str, ...] | None, operations: Mapping[str, Operation]) -> None:
    """Refuse names of no operation: such a token would open less than its maker thinks. Raises BadRequest."""
    unknown = [name for name in names or () if name not in operations]
    if unknown:
        matches = {name: get_close_matches(name, operations, 1) for name in unknown[:5]}
        words = ", ".join(f"{name!r}" + "".join(f" (near: {match})" for match in matches[name]) for name in matches)
        raise BadRequest(f"there is no operation {words}", code="tool_unknown", unknown=unknown)


def _end(days: float | None) -> datetime | None:
    return None if days is None else utc_now() + timedelta(days=days)


async def create_token(
    tokens: Tokens, operations: Mapping[str, Operation], arguments: CreateToken, context: Context
) -> NewTokenOut:
    """Make a token, and its project if that is not there."""
    project = arguments.project_of(context)
    _require_known(arguments.allowed_tools, operations)
    facts = arguments.model_dump(include={"label", "allowed_tools", "person", "tools"})
    token, text = await tokens.create(
        project,
        arguments.agent,
        arguments.scopes,
        limits=TokenLimits(arguments.requests_per_minute, arguments.concurrent_work, arguments.body_bytes),
        expires_at=_end(arguments.expires_in_days),
        **facts,
        who=context.author,
        maker=context.identity,
    )
    return _token_out(NewTokenOut, token, token=text)


async def list_tokens(tokens: Tokens, arguments: TokenListInput, context: Context) -> TokensOut:
    """List the tokens of a project; the machine's own account sees all unless it names one."""
    rows = await tokens.list(bound_project(arguments, context))
    page, following = page_by_time(rows, arguments, lambda token: (token.created_at, token.id))
    return TokensOut(tokens=tuple(_token_out(TokenOut, token) for token in page), next_cursor=following)


async def change_token(
    tokens: Tokens, operations: Mapping[str, Operation], arguments: ChangeToken, context: Context
) -> TokenOut:
    """Narrow a token, end it sooner, or say in other words what it is for; nothing widens one."""
    _require_known(arguments.allowed_tools, operations)
    token = await tokens.change(
        arguments.id,
        project=bound_project(arguments, context),
        label=arguments.label,
        scopes=arguments.scopes,
        allowed_tools=arguments.allowed_tools,
        limits=TokenLimits(arguments.requests_per_minute, arguments.concurrent_work, arguments.body_bytes),
        expires_at=_end(arguments.expires_in_days),
        author=context.author,
    )
    return _token_out(TokenOut, token)


async def revoke_token(tokens: Tokens, arguments: RevokeToken, context: Context) -> TokenOut:
    """End a token, from the next request on."""
    token = await tokens.revoke(arguments.id, project=bound_project(arguments, context), who=context.author)
    return _token_out(TokenOut, token)
