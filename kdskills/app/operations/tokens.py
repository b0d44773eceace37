"""`tokens.*`: make, list and revoke the tokens of a project."""

from __future__ import annotations

from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field, StringConstraints

from kdskills.app.operations.models import Output
from kdskills.app.operations.paging import PageInput, PageOutput, page_by_time
from kdskills.app.operations.scoped import ProjectInput, audit_name
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest
from kdskills.storage.database import utc_now

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.tokens import IssuedToken

ERRORS: Final = ("not_found", "project_invalid", "database_unavailable")

ToolId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class CreateToken(ProjectInput):
    """Whose token, and what it may do."""

    agent: str = Field(max_length=128, description="The consumer the policy of skills is asked for.")
    scopes: tuple[str, ...] = Field(
        max_length=16, description="Among `skills:read`, `skills:write`, `work:run`, `work:read`, `admin`."
    )
    label: str = Field("", max_length=200, description="What it is for, in words.")
    allowed_tools: tuple[str, ...] | None = Field(
        None, max_length=256, description="Operations it may run; none given means all its scopes allow."
    )
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="Requests it may make in a minute.")
    concurrent_work: int | None = Field(None, ge=1, le=10**6, description="Tasks and jobs it may have at one time.")
    body_bytes: int | None = Field(None, ge=1, le=2**40, description="Bytes a request of it may have.")
    expires_in_days: float | None = Field(None, gt=0, le=36500, description="Days until it ends by itself.")
    person: bool = Field(
        default=False, description="Whether a person starts skills with it, and may start what only people start."
    )
    tools: tuple[ToolId, ...] = Field(
        (), max_length=256, description="Ids of the tools its holder has; skills that need others are refused to it."
    )


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


class TokenListInput(ProjectInput, PageInput):
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
