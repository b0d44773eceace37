"""Bearer tokens: made once, shown once, kept as a hash, looked up in constant time."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, cast

import sqlalchemy as sa

from kdskills.app.identity import LOCAL, SCOPES, Identity, Scope, TokenLimits, wider
from kdskills.errors import BadRequest, CallRefused, Conflict, NotFound
from kdskills.projects.records import Author, ProjectRows
from kdskills.projects.views import check_project
from kdskills.storage.database import Database, DatabaseUnavailable, micros, moment_of, utc_now, word_type

TOKENS: Final = sa.Table(
    "kd_tokens",
    sa.MetaData(),
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
    sa.Column("last_used_at", sa.BigInteger),
)
_BY_ID: Final = TOKENS.select().where(TOKENS.c.id == sa.bindparam("token_id"))  # asked by every request

TOKEN: Final = re.compile(r"kd_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
AGENT: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
NOBODY: Final = hashlib.sha256(b"").hexdigest()
"""Compared with when no token has the id, so that an unknown id takes as long as a wrong secret."""
USE_TOLD: Final = timedelta(minutes=1)
"""How often at most a token's row says when it was used: requests are many, and each write keeps others waiting."""
_LOG = logging.getLogger("kdskills.service")


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """What is known of a token; the secret is not. `id` is public, for audit rows, limits and revoking.

    It was `last_used_at` then, or within a minute after; None for never.
    """

    id: str
    label: str
    identity: Identity
    created_at: datetime
    created_by: str
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None

    def valid(self, now: datetime) -> bool:
        """Whether the token opens anything at *now*."""
        end = self.identity.expires_at
        return self.revoked_at is None and (end is None or now < end)


@dataclass(frozen=True)
class Tokens:
    """The tokens of one installation; the tables of `database` must be there (`kdskills.storage`, part `service`)."""

    database: Database
    clock: Callable[[], datetime] = utc_now
    _uses: dict[str, datetime] = field(default_factory=dict)

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
        who: Author | str,
        maker: Identity = LOCAL,
    ) -> tuple[IssuedToken, str]:
        """Make a token, and its project if that is not there; return it with its text, which is kept nowhere.

        All up to *tools* is what `Identity` has of a caller with it; *who* is for the audit row. The token may do nothing
        that *maker* may not.

        Raises:
            BadRequest: `project_invalid`, `agent_invalid`, `scope_unknown`, or a limit below one.
            CallRefused: `tool_not_allowed` or `token_wider`; the token would do what its maker may not.
        """
        token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        identity = Identity(
            project=project,
            agent=agent,
            scopes=cast("frozenset[Scope]", frozenset(scopes)),
            allowed_tools=None if allowed_tools is None else frozenset(allowed_tools),
            token=token_id,
            limits=limits or TokenLimits(),
            person=person,
            tools=frozenset(tools),
            expires_at=expires_at,
        )
        _check(identity, maker)
        token = IssuedToken(token_id, label[:200], identity, self.clock(), Author.bounded(who).who)

        def change(link: sa.Connection) -> None:
            rows = ProjectRows(link, project, self.clock())
            rows.ensure()
            link.execute(TOKENS.insert().values(_row(token, secret)))
            rows.note(who, "token.create", token_id, agent=agent, scopes=" ".join(sorted(set(scopes))))

        await self.database.write(change)
        return token, f"kd_{token_id}_{secret}"

    async def list(self, project: str | None = None) -> Sequence[IssuedToken]:
        """Return the tokens of a project, or of all, the latest first; revoked and expired ones too."""
        query = TOKENS.select().order_by(TOKENS.c.created_at.desc(), TOKENS.c.id)
        if project is not None:
            query = query.where(TOKENS.c.project == project)
        return await self.database.read(lambda link: [_token(row) for row in link.execute(query)])

    async def revoke(self, token_id: str, *, project: str | None = None, who: Author | str) -> IssuedToken:
        """End a token, from the next request on; ending it twice changes nothing. Raises NotFound outside *project*."""
        mine = TOKENS.c.id == token_id
        if project is not None:
            mine &= TOKENS.c.project == project

        def change(link: sa.Connection) -> IssuedToken:
            now = micros(self.clock())
            fresh = link.execute(TOKENS.update().where(mine, TOKENS.c.revoked_at.is_(None)).values(revoked_at=now))
            row = link.execute(TOKENS.select().where(mine)).first()
            if row is None:
                raise NotFound(f"there is no token {token_id!r}", token=token_id)
            if fresh.rowcount:
                ProjectRows(link, row.project, self.clock()).note(who, "token.revoke", token_id)
            return _token(row)

        return await self.database.write(change)

    async def change(
        self,
        token_id: str,
        *,
        project: str | None = None,
        label: str | None = None,
        scopes: Collection[str] | None = None,
        allowed_tools: Collection[str] | None = None,
        limits: TokenLimits | None = None,
        expires_at: datetime | None = None,
        author: Author,
    ) -> IssuedToken:
        """Narrow a token, from the next request on; what is None stays, as does a limit that is.

        Raises NotFound outside *project*; Conflict for a token that is revoked; BadRequest as `create`; CallRefused,
        `token_wider`, when it would do what it may not do now.
        """
        mine = TOKENS.c.id == token_id
        if project is not None:
            mine &= TOKENS.c.project == project
        bounds = {name: most for name, most in asdict(limits or TokenLimits()).items() if most is not None}

        def narrow(link: sa.Connection) -> IssuedToken:
            row = link.execute(TOKENS.select().where(mine).with_for_update()).first()
            if row is None:
                raise NotFound(f"there is no token {token_id!r}", token=token_id)
            token = _token(row)
            if token.revoked_at is not None:
                raise Conflict(f"the token {token_id!r} is revoked, and opens nothing any more", token=token_id)
            before = token.identity
            after = replace(
                before,
                scopes=before.scopes if scopes is None else cast("frozenset[Scope]", frozenset(scopes)),
                allowed_tools=before.allowed_tools if allowed_tools is None else frozenset(allowed_tools),
                limits=replace(before.limits, **bounds),
                expires_at=before.expires_at if expires_at is None else expires_at,
            )
            _check_shape(after)
            beyond = wider(after, before)
            if beyond:
                words = f"a token is never widened, and this one would be in {', '.join(beyond)}: make another"
                raise CallRefused(words, code="token_wider", fields=list(beyond))
            narrowed = replace(token, identity=after, label=token.label if label is None else label[:200])
            values = _facts(narrowed)
            changed = sorted(name for name, value in values.items() if value != getattr(row, name))
            if changed:
                link.execute(TOKENS.update().where(mine).values({name: values[name] for name in changed}))
                ProjectRows(link, row.project, self.clock()).note(author, "token.change", token_id, changed=changed)
            return narrowed

        return await self.database.write(narrow)

    async def authenticate(self, text: str) -> Identity | None:
        """Return who a caller with this token is; None for a token that is unknown, wrong, expired or revoked."""
        parts = TOKEN.fullmatch(text)
        token_id, secret = parts.groups() if parts else ("", "")
        row = await self._row(token_id)
        fits = hmac.compare_digest(_hash(secret), NOBODY if row is None else row.secret_hash)
        identity = self._opens(row) if fits else None
        if identity is not None:
            await self._used(token_id, row.last_used_at)
        return identity

    async def _used(self, token_id: str, last_use: int | None) -> None:
        """Keep that a token was used now, unless its row says so already; whoever called is let in all the same."""
        now = self.clock()
        latest = now - USE_TOLD
        if (last_use is not None and last_use > micros(latest)) or self._uses.get(token_id, latest) > latest:
            return
        self._uses[token_id] = now  # requests that come meanwhile need not tell it, too
        old = sa.or_(TOKENS.c.last_used_at.is_(None), TOKENS.c.last_used_at <= micros(latest))
        use = TOKENS.update().where(TOKENS.c.id == token_id, old).values(last_used_at=micros(now))
        try:
            await self.database.write(lambda link: link.execute(use))
        except (
            DatabaseUnavailable
        ) as error:  # it was read a moment ago: a full disk must keep nobody out who only reads
            _LOG.warning("the use of token %s is not kept: %s", token_id, error.message)

    async def client(self, token_id: str) -> Identity:
        """Return who a caller with the token of this public id is. Raises NotFound when it opens nothing."""
        identity = self._opens(await self._row(token_id))
        if identity is None:
            raise NotFound(f"no token {token_id!r} opens anything", token=token_id)
        return identity

    async def going(self, token_id: str) -> bool:
        """Whether the token with this public id opens anything now; for what goes on long after its request was let in."""
        return self._opens(await self._row(token_id)) is not None

    async def _row(self, token_id: str) -> Any:
        return await self.database.read(lambda link: link.execute(_BY_ID, {"token_id": token_id}).first())

    def _opens(self, row: Any) -> Identity | None:
        """Return who the token of *row* lets in now."""
        token = None if row is None else _token(row)
        return token.identity if token is not None and token.valid(self.clock()) else None


def _check_shape(identity: Identity) -> None:
    """Refuse what no token can have. Raises as `Tokens.create`."""
    check_project(identity.project)
    if not AGENT.fullmatch(identity.agent):
        raise BadRequest(f"{identity.agent!r} is no agent: letters, digits and ._:-, at most 128", code="agent_invalid")
    unknown = sorted(identity.scopes - SCOPES)
    if unknown or not identity.scopes:
        message = f"scopes are {', '.join(sorted(SCOPES))}" + (f"; not {', '.join(unknown)}" if unknown else "")
        raise BadRequest(message, code="scope_unknown", unknown=unknown)
    if any(most is not None and most < 1 for most in asdict(identity.limits).values()):
        raise BadRequest("a limit of a token is at least 1")


def _check(identity: Identity, maker: Identity) -> None:
    """Refuse what no token can have, and one that may do what its maker may not. Raises as `Tokens.create`."""
    _check_shape(identity)
    beyond = wider(identity, maker)
    if "allowed_tools" in beyond:
        allowed = identity.allowed_tools
        names = sorted(allowed - (maker.allowed_tools or set())) if allowed else ["all others"]
        message = f"this caller may not run {', '.join(names)}, so a token it makes may not either"
        raise CallRefused(message, code="tool_not_allowed", tools=names)
    if beyond:
        message = f"a token may do nothing its maker may not; this one is wider in {', '.join(beyond)}"
        raise CallRefused(message, code="token_wider", fields=list(beyond))


def _hash(secret: str) -> str:
    """Return the hash a secret is kept as; the secret has 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


def _row(token: IssuedToken, secret: str) -> dict[str, Any]:
    created = {"created_at": micros(token.created_at), "created_by": token.created_by}
    return {"id": token.id, "secret_hash": _hash(secret), **_facts(token), **created}


def _facts(token: IssuedToken) -> dict[str, Any]:
    """Return the columns that say what a token may do."""
    identity = token.identity
    allowed, expires_at = identity.allowed_tools, identity.expires_at
    return {
        "label": token.label,
        "project": identity.project,
        "agent": identity.agent,
        "scopes": json.dumps(sorted(identity.scopes)),
        "allowed_tools": None if allowed is None else json.dumps(sorted(allowed)),
        **asdict(identity.limits),
        "expires_at": None if expires_at is None else micros(expires_at),
        "person": identity.person,
        "tools": json.dumps(sorted(identity.tools or ())),
    }


def _token(row: Any) -> IssuedToken:
    identity = Identity(
        project=row.project,
        agent=row.agent,
        scopes=frozenset(cast("list[Scope]", json.loads(row.scopes))),
        allowed_tools=None if row.allowed_tools is None else frozenset(json.loads(row.allowed_tools)),
        token=row.id,
        limits=TokenLimits(row.requests_per_minute, row.concurrent_work, row.body_bytes),
        person=bool(row.person),
        tools=frozenset(json.loads(row.tools)),
        expires_at=None if row.expires_at is None else moment_of(row.expires_at),
    )
    revoked_at = None if row.revoked_at is None else moment_of(row.revoked_at)
    last_used_at = None if row.last_used_at is None else moment_of(row.last_used_at)
    return IssuedToken(row.id, row.label, identity, moment_of(row.created_at), row.created_by, revoked_at, last_used_at)
