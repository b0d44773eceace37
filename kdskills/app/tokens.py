"""Bearer tokens: made once, shown once, kept as a hash, looked up in constant time."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from kdskills.app.identity import LOCAL, SCOPES, Identity, Scope, TokenLimits, wider
from kdskills.errors import BadRequest, CallRefused, NotFound
from kdskills.projects.model import check_project
from kdskills.projects.records import ProjectRecords, ProjectTables
from kdskills.storage.database import Database, micros, moment_of, utc_now, word_type

if TYPE_CHECKING:
    import sqlalchemy as sa


class TokenTables:
    """The table, described once per database."""

    def __init__(self) -> None:
        import sqlalchemy as sa

        self.metadata = sa.MetaData()
        self.tokens = sa.Table(
            "kd_tokens",
            self.metadata,
            sa.Column("id", word_type(32), primary_key=True),
            sa.Column("secret_hash", sa.String(80), nullable=False),
            sa.Column("label", sa.String(200), nullable=False),
            sa.Column("project", word_type(64), nullable=False, index=True),
            sa.Column("agent", sa.String(128), nullable=False),
            sa.Column("scopes", sa.Text, nullable=False),
            sa.Column("allowed_tools", sa.Text),
            sa.Column("requests_per_minute", sa.Integer),
            sa.Column("concurrent_work", sa.Integer),
            sa.Column("body_bytes", sa.BigInteger),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("created_by", sa.String(200), nullable=False),
            sa.Column("expires_at", sa.BigInteger),
            sa.Column("revoked_at", sa.BigInteger),
            sa.Column("person", sa.Boolean, nullable=False, server_default=sa.false()),
            sa.Column("tools", sa.Text, nullable=False, server_default="[]"),
        )


TOKEN: Final = re.compile(r"kd_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
AGENT: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
NOBODY: Final = hashlib.sha256(b"").hexdigest()
"""Compared with when no token has the id, so that an unknown id takes as long as a wrong secret."""


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """What is known of a token; the secret is not.

    Attributes:
        id: Public id, for audit rows, limits and revoking.
        label: What it is for, in words.
        project: Everything it reaches belongs to this project.
        agent: The consumer the policy of skills is asked for.
        scopes: What it may do.
        allowed_tools: Operations it may run; None for all its scopes allow.
        limits: What it may use.
        created_at: When it was made.
        created_by: By whom.
        expires_at: When it ends by itself, or None.
        revoked_at: When it was revoked, or None.
        person: Whether a person starts skills with it; else a model does.
        tools: Ids of the tools its holder has, for skills that need some.
    """

    id: str
    label: str
    project: str
    agent: str
    scopes: frozenset[Scope]
    allowed_tools: frozenset[str] | None
    limits: TokenLimits
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    person: bool = False
    tools: frozenset[str] = frozenset()

    def valid(self, now: datetime) -> bool:
        """Whether the token opens anything at *now*."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    @property
    def identity(self) -> Identity:
        """Who a caller with this token is."""
        return Identity(
            project=self.project,
            agent=self.agent,
            scopes=self.scopes,
            allowed_tools=self.allowed_tools,
            token=self.id,
            limits=self.limits,
            person=self.person,
            tools=self.tools,
            expires_at=self.expires_at,
        )


class Tokens:
    """The tokens of one installation.

    Args:
        database: Where rows are kept; its tables must be there (`kdskills.storage.database`, part `service`).
        clock: Gives the time.
    """

    def __init__(self, database: Database, *, clock: Callable[[], datetime] = utc_now) -> None:
        import sqlalchemy as sa

        self._database = database
        self._clock = clock
        self._tables = TokenTables()
        self._records = ProjectRecords(ProjectTables(), clock)
        table = self._tables.tokens
        self._by_id = table.select().where(table.c.id == sa.bindparam("token_id"))  # asked by every request

    async def create(
        self,
        project: str,
        agent: str,
        scopes: Collection[str],
        *,
        label: str = "",
        allowed_tools: Collection[str] | None = None,
        limits: TokenLimits | None = None,
        expires_at: datetime | None = None,
        person: bool = False,
        tools: Collection[str] = (),
        who: str,
        request_id: str = "",
        maker: Identity = LOCAL,
    ) -> tuple[IssuedToken, str]:
        """Make a token, and its project if that is not there.

        Args:
            project: As at `IssuedToken`.
            agent: As there, and so all up to `tools`.
            scopes: What it may do.
            label: What it is for.
            allowed_tools: Operations it may run; None for all its scopes allow.
            limits: What it may use.
            expires_at: When it ends.
            person: Whether a person starts skills with it.
            tools: Tools its holder has.
            who: For the audit row.
            request_id: For the audit row.
            maker: Who makes it; the token may do nothing its maker may not.

        Returns:
            What is known of it, and its text, which is shown this once and kept nowhere.

        Raises:
            BadRequest: `project_invalid`, `agent_invalid`, `scope_unknown`, or a limit below one.
            CallRefused: `tool_not_allowed` or `token_wider`; the token would do what its maker may not.
        """
        bounds = limits or TokenLimits()
        _check(project, agent, scopes, bounds)
        token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        values = _origin_columns(token_id, secret, self._clock(), who) | {
            "label": label[:200],
            "project": project,
            "agent": agent,
            **_powers(scopes, allowed_tools, bounds, expires_at, person, tools),
        }
        _require_not_wider(_token(values), maker)

        def change(link: sa.Connection) -> None:
            self._records.ensure_project(link, project)
            link.execute(self._tables.tokens.insert().values(values))
            facts = {"agent": agent, "scopes": " ".join(sorted(set(scopes)))}
            self._records.note(link, project, who, "token.create", token_id, request_id, **facts)

        await self._database.write(change)
        return _token(values), f"kd_{token_id}_{secret}"

    async def list(self, project: str | None = None) -> Sequence[IssuedToken]:
        """Return the tokens of a project, or of all, the latest first; revoked and expired ones too."""
        table = self._tables.tokens
        query = table.select().order_by(table.c.created_at.desc(), table.c.id)
        if project is not None:
            query = query.where(table.c.project == project)
        return await self._database.read(lambda link: [_token(row) for row in link.execute(query).mappings()])

    async def revoke(self, token_id: str, *, project: str | None = None, who: str, request_id: str = "") -> IssuedToken:
        """End a token, from the next request on; ending it twice changes nothing.

        Args:
            token_id: Its public id.
            project: Only if it belongs to this project; None for any.
            who: For the audit row.
            request_id: For the audit row.

        Raises:
            NotFound: There is none, or it belongs to another project.
        """
        table = self._tables.tokens
        mine = table.c.id == token_id
        if project is not None:
            mine &= table.c.project == project

        def change(link: sa.Connection) -> IssuedToken:
            now = micros(self._clock())
            fresh = link.execute(table.update().where(mine, table.c.revoked_at.is_(None)).values(revoked_at=now))
            row = link.execute(table.select().where(mine)).mappings().first()
            if row is None:
                raise NotFound(f"there is no token {token_id!r}", token=token_id)
            if fresh.rowcount:
                self._records.note(link, row["project"], who, "token.revoke", token_id, request_id)
            return _token(row)

        return await self._database.write(change)

    async def find(self, text: str) -> IssuedToken | None:
        """Return the token whose text this is, if it opens anything now; else None, whatever is wrong with it."""
        parts = TOKEN.fullmatch(text)
        token_id, secret = parts.groups() if parts else ("", "")
        row = await self._row(token_id)
        fits = hmac.compare_digest(_hash(secret), NOBODY if row is None else row["secret_hash"])
        if row is None or not fits:
            return None
        token = _token(row)
        return token if token.valid(self._clock()) else None

    async def client(self, token_id: str) -> Identity:
        """Return who a caller with the token of this public id is. Raises NotFound when it opens nothing."""
        row = await self._row(token_id)
        token = None if row is None else _token(row)
        if token is None or not token.valid(self._clock()):
            raise NotFound(f"no token {token_id!r} opens anything", token=token_id)
        return token.identity

    async def going(self, token_id: str) -> bool:
        """Whether the token with this public id opens anything now; for what goes on long after its request was let in."""
        row = await self._row(token_id)
        return row is not None and _token(row).valid(self._clock())

    async def _row(self, token_id: str) -> Mapping[Any, Any] | None:
        def ask(link: sa.Connection) -> Mapping[Any, Any] | None:
            return link.execute(self._by_id, {"token_id": token_id}).mappings().first()

        return await self._database.read(ask)

    async def authenticate(self, text: str) -> Identity | None:
        """Return who a caller with this token is; None for a token that is unknown, wrong, expired or revoked."""
        token = await self.find(text)
        return None if token is None else token.identity


def _check(project: str, agent: str, scopes: Collection[str], limits: TokenLimits) -> None:
    """Refuse what no token can have.

    Raises:
        BadRequest: `project_invalid`, `agent_invalid`, `scope_unknown`, or a limit below one.
    """
    check_project(project)
    if not AGENT.fullmatch(agent):
        raise BadRequest(f"{agent!r} is no agent: letters, digits and ._:-, at most 128", code="agent_invalid")
    unknown = sorted(set(scopes) - SCOPES)
    if unknown or not scopes:
        message = f"scopes are {', '.join(sorted(SCOPES))}" + (f"; not {', '.join(unknown)}" if unknown else "")
        raise BadRequest(message, code="scope_unknown", unknown=unknown)
    if any(most is not None and most < 1 for most in _limit_values(limits).values()):
        raise BadRequest("a limit of a token is at least 1")


def _hash(secret: str) -> str:
    """Return the hash a secret is kept as; the secret has 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


def _limit_values(limits: TokenLimits) -> dict[str, int | None]:
    return {
        "requests_per_minute": limits.requests_per_minute,
        "concurrent_work": limits.concurrent_work,
        "body_bytes": limits.body_bytes,
    }


def _origin_columns(token_id: str, secret: str, created_at: datetime, author: str) -> dict[str, Any]:
    """Return who made a token and when, as its row has it, with its id and the hash of its secret."""
    return {
        "id": token_id,
        "secret_hash": _hash(secret),
        "created_at": micros(created_at),
        "created_by": author[:200],
        "revoked_at": None,
    }


def _powers(
    scopes: Collection[str],
    allowed_tools: Collection[str] | None,
    limits: TokenLimits,
    expires_at: datetime | None,
    person: bool,
    tools: Collection[str],
) -> dict[str, Any]:
    """Return what a token may do, as its row has it."""
    return {
        "scopes": json.dumps(sorted(set(scopes))),
        "allowed_tools": None if allowed_tools is None else json.dumps(sorted(set(allowed_tools))),
        "expires_at": None if expires_at is None else micros(expires_at),
        "person": person,
        "tools": json.dumps(sorted(set(tools))),
        **_limit_values(limits),
    }


def _require_not_wider(token: IssuedToken, maker: Identity) -> None:
    """Refuse a token that may do what its maker may not.

    Raises:
        CallRefused: `tool_not_allowed` when it could run other operations, else `token_wider`.
    """
    beyond = wider(token.identity, maker)
    if "allowed_tools" in beyond:
        names = sorted(token.allowed_tools - (maker.allowed_tools or set())) if token.allowed_tools else ["all others"]
        message = f"this caller may not run {', '.join(names)}, so a token it makes may not either"
        raise CallRefused(message, code="tool_not_allowed", tools=names)
    if beyond:
        message = f"a token may do nothing its maker may not; this one is wider in {', '.join(beyond)}"
        raise CallRefused(message, code="token_wider", fields=list(beyond))


def _token(row: Mapping[Any, Any]) -> IssuedToken:
    allowed = row["allowed_tools"]
    return IssuedToken(
        id=row["id"],
        label=row["label"],
        project=row["project"],
        agent=row["agent"],
        scopes=frozenset(cast("list[Scope]", json.loads(row["scopes"]))),
        allowed_tools=None if allowed is None else frozenset(json.loads(allowed)),
        limits=TokenLimits(row["requests_per_minute"], row["concurrent_work"], row["body_bytes"]),
        created_at=moment_of(row["created_at"]),
        created_by=row["created_by"],
        expires_at=None if row["expires_at"] is None else moment_of(row["expires_at"]),
        revoked_at=None if row["revoked_at"] is None else moment_of(row["revoked_at"]),
        person=bool(row["person"]),
        tools=frozenset(json.loads(row["tools"])),
    )
