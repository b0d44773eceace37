"""Who calls from elsewhere, and what they get: `tokens.*`, `mcp.published` and `mcp.accept`, `codex.probe`, `codex.receipts`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kdskills.app.identity import Identity, own_client
from kdskills.app.operations.calling import require_allowed
from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.paging import PageInput, PageOutput, page_by_time
from kdskills.app.operations.scoped import ProjectInput, audit_name
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest, Conflict, NotFound
from kdskills.skills.digest import rows_digest
from kdskills.skills.roots import ApprovedListing, SetChange
from kdskills.storage.database import utc_now

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.tokens import IssuedToken


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

    ok: bool
    strategy: str
    binary: str
    fingerprint: str
    cached: bool
    seconds: float
    facts: ServerFacts
    findings: tuple[ProbeFinding, ...]

    @property
    def negative(self) -> bool:
        """Whether the probe was not finished."""
        return not self.ok


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

    session: str
    receipts: tuple[TurnReceipt, ...]

    @property
    def negative(self) -> bool:
        """Whether no receipt is kept of the session."""
        return not self.receipts


async def probe_codex(host: Host, arguments: ProbeInput, context: Context) -> ProbeOutput:
    """Probe a program with an empty home and a fake model."""
    from kdskills.remote.probe import probe

    binary = arguments.binary or host.settings.codex_binary
    report = await probe(binary, state=host.settings.state_dir, force=arguments.force)
    strategy = next(
        (strategy_name for strategy_name in ("native", "reload") if getattr(report.profile, strategy_name)),
        "dispatcher",
    )
    facts = report.to_json()
    return ProbeOutput(
        ok=report.complete,
        strategy=strategy,
        binary=facts["binary"],
        fingerprint=report.fingerprint,
        cached=report.cached,
        seconds=facts["seconds"],
        facts=ServerFacts.model_validate(facts["profile"]),
        findings=tuple(ProbeFinding.model_validate(finding) for finding in facts["findings"]),
    )


async def show_receipts(host: Host, arguments: ReceiptsInput, context: Context) -> ReceiptsOutput:
    """Read a session's receipts from the journal of this state folder."""
    receipts = await asyncio.to_thread(_read, host.settings.state_dir, arguments.session)
    return ReceiptsOutput(session=arguments.session, receipts=receipts)


def _read(state: Path, session: str) -> tuple[TurnReceipt, ...]:
    from kdskills.remote.journal import SqlJournal, journal_url
    from kdskills.remote.receipts import Receipts

    if not (state / "remote" / "calls.sqlite3").exists():
        return ()  # reading makes no database
    journal = SqlJournal(journal_url(state))
    try:
        return tuple(TurnReceipt.model_validate(receipt.to_json()) for receipt in Receipts(journal).receipts(session))
    finally:
        journal.close()


CODEX_PROBE = Implementation(
    ProbeInput, ProbeOutput, ("not_yours_to_say", "codex_missing", "app_server_gone"), probe_codex
)
CODEX_RECEIPTS = Implementation(ReceiptsInput, ReceiptsOutput, ("journal_unavailable", "missing_extra"), show_receipts)


CHANGED: Final = "mcp_set_changed"


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


async def published(host: Host, arguments: PublishedInput, context: Context) -> PublishedOut:
    """Tell what a client of this project and agent is offered."""
    client = await _client(host, arguments)
    require_allowed(host.operations["skills.list"], client)
    publication = await host.publication(client, {})
    entries, notes = await asyncio.to_thread(publication.entries)
    return PublishedOut(
        project=client.project,
        agent=client.agent,
        published=tuple(
            PublishedSkill(
                uri=entry.uri,
                full_id=entry.full_id,
                files=len(entry.files),
                size=sum(file.size for file in entry.files),
            )
            for entry in entries
        ),
        diagnostics=tuple(Finding.of(note) for note in sorted(notes, key=lambda note: note.ref or "")),
    )


async def _client(host: Host, arguments: PublishedInput) -> Identity:
    """Return the client that is asked about. Raises NotFound for a token that opens nothing."""
    if arguments.token is not None:
        return replace(await host.tokens.client(arguments.token), door="mcp", profile="skills")
    tools = None if arguments.tools is None else frozenset(arguments.tools)
    return replace(own_client(arguments.profile, arguments.project, arguments.agent, tools), door="mcp")


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


async def accept(host: Host, arguments: AcceptInput, context: Context) -> AcceptOut:
    """Ask the server what it lists now, show what is not as it was accepted, and accept it unless told not to."""
    return await asyncio.to_thread(_accept, host, arguments)


def _accept(host: Host, arguments: AcceptInput) -> AcceptOut:
    listing = _listing(host, arguments.server)
    changes = listing.changes()
    digest = rows_digest([(change.uri, change.digest) for change in sorted(changes, key=lambda one: one.uri)])
    if arguments.digest is not None and arguments.digest != digest:
        raise Conflict(f"what {arguments.server} changed is not what you looked at: look again", code=CHANGED)
    if changes and not arguments.dry_run:
        listing.accept(changes)
    return AcceptOut(
        server=arguments.server, digest=digest, dry_run=arguments.dry_run, skills=tuple(map(_changed_skill, changes))
    )


def _listing(host: Host, label: str) -> ApprovedListing:
    """Return the listing of a server, opened anew. Raises NotFound."""
    labels: list[str] = []
    for uri in host.settings.skill_roots:
        root = host.answers.open_skill_root(uri, host.settings.state_dir)
        if root is not None and isinstance(root.listing, ApprovedListing):
            if root.listing.label == label:
                return root.listing
            labels.append(root.listing.label)
    choice = f"there are {', '.join(sorted(labels))}" if labels else "the setting skill_roots names none"
    raise NotFound(f"no server is called {label!r}: {choice}", code="mcp_server_unknown", server=label)


def _changed_skill(change: SetChange) -> ChangedSkill:
    return ChangedSkill(
        full_id=change.full_id,
        uri=change.uri,
        digest=change.digest,
        known=change.files_known,
        added=change.added,
        removed=change.removed,
        changed=change.changed,
    )


PUBLISHED = Implementation(PublishedInput, PublishedOut, ("no_bundle", "not_found", "database_unavailable"), published)
ACCEPT = Implementation(
    AcceptInput, AcceptOut, ("mcp_server_unknown", "mcp_server_failed", CHANGED, "missing_extra"), accept
)


ERRORS: Final = ("not_found", "project_invalid", "database_unavailable")

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
    """What is known of a token; the secret is not."""

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


class RevokeToken(ProjectInput):
    """Which token ends."""

    id: str = Field(min_length=1, max_length=64, description="The token's public id.")


def _facts(token: IssuedToken) -> dict[str, object]:
    return {
        "id": token.id,
        "label": token.label,
        "project": token.project,
        "agent": token.agent,
        "scopes": tuple(sorted(token.scopes)),
        "allowed_tools": None if token.allowed_tools is None else tuple(sorted(token.allowed_tools)),
        "requests_per_minute": token.limits.requests_per_minute,
        "concurrent_work": token.limits.concurrent_work,
        "body_bytes": token.limits.body_bytes,
        "created_at": token.created_at,
        "created_by": token.created_by,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
        "person": token.person,
        "tools": tuple(sorted(token.tools)),
    }


def _check_tools(host: Host, allowed: tuple[str, ...] | None) -> None:
    """Refuse names of no operation: such a token would open less than its maker thinks."""
    unknown = [name for name in allowed or () if name not in host.operations]
    if unknown:
        matches = {name: get_close_matches(name, host.operations, 1) for name in unknown[:5]}
        words = ", ".join(f"{name!r}" + "".join(f" (near: {match})" for match in matches[name]) for name in matches)
        raise BadRequest(f"there is no operation {words}", code="tool_unknown", unknown=unknown)


async def create(host: Host, arguments: CreateToken, context: Context) -> NewTokenOut:
    """Make a token, and its project if that is not there."""
    from kdskills.app.identity import TokenLimits

    project = arguments.project_of(context)
    _check_tools(host, arguments.allowed_tools)
    days = arguments.expires_in_days
    token, text = await host.tokens.create(
        project,
        arguments.agent,
        arguments.scopes,
        label=arguments.label,
        allowed_tools=arguments.allowed_tools,
        limits=TokenLimits(arguments.requests_per_minute, arguments.concurrent_work, arguments.body_bytes),
        expires_at=None if days is None else utc_now() + timedelta(days=days),
        person=arguments.person,
        tools=arguments.tools,
        who=audit_name(context),
        request_id=context.request_id,
        maker=context.identity,
    )
    return NewTokenOut.model_validate({**_facts(token), "token": text})


async def list_tokens(host: Host, arguments: TokenListInput, context: Context) -> TokensOut:
    """List the tokens of a project; the machine's own account sees all unless it names one."""
    everything = context.identity.account and arguments.project is None
    tokens = await host.tokens.list(None if everything else arguments.project_of(context))
    page, following = page_by_time(tokens, arguments, lambda token: (token.created_at, token.id))
    return TokensOut(tokens=tuple(TokenOut.model_validate(_facts(token)) for token in page), next_cursor=following)


async def revoke(host: Host, arguments: RevokeToken, context: Context) -> TokenOut:
    """End a token, from the next request on."""
    anywhere = context.identity.account and arguments.project is None
    project = None if anywhere else arguments.project_of(context)
    done = await host.tokens.revoke(
        arguments.id, project=project, who=audit_name(context), request_id=context.request_id
    )
    return TokenOut.model_validate(_facts(done))


CREATE_TOKEN = Implementation(
    CreateToken,
    NewTokenOut,
    ("agent_invalid", "scope_unknown", "tool_unknown", "tool_not_allowed", "token_wider", *ERRORS),
    create,
)
LIST_TOKENS = Implementation(TokenListInput, TokensOut, ERRORS, list_tokens)
REVOKE_TOKEN = Implementation(RevokeToken, TokenOut, ERRORS, revoke)
