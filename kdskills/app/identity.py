"""Who calls an operation, and what the caller may do; `docs/reference/doors.md` has the table."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final, Literal, get_args

Scope = Literal["skills:read", "skills:write", "work:run", "work:read", "admin"]
Door = Literal["library", "cli", "http", "nats", "mcp", "console"]
Profile = Literal["skills", "author", "operator"]
Starter = Literal["model", "user", "code"]

SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))
OPEN_SCOPES: Final[frozenset[Scope]] = SCOPES - {"admin"}
"""What callers without a token may do where none is asked for: nothing of the operator's."""
PROFILES: Final[tuple[Profile, ...]] = get_args(Profile)
"""What a list of tools is for, the narrowest first; each has the tools of those before it."""

SCOPES_OF: Final[dict[Profile, frozenset[Scope]]] = {
    "skills": frozenset({"skills:read", "work:run", "work:read"}),
    "author": frozenset({"skills:read", "skills:write", "work:run", "work:read"}),
    "operator": frozenset(),
}
"""What a client of MCP without a token may do, by profile; the operator's needs one."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What one token may use; None leaves it to the service's settings."""

    requests_per_minute: int | None = None
    concurrent_work: int | None = None
    body_bytes: int | None = None


UNLIMITED: Final = TokenLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller, as the transport knows it: from a token, a subject or the account itself, never from arguments.

    Attributes:
        project: Every record and skill the caller may reach belongs to it.
        agent: Who asks; as a consumer it is what the policy of skills knows.
        alias: Tells conversations of one agent apart.
        scopes: What the caller may do; `admin` includes the others.
        allowed_tools: Operations the caller may run; None for all its scopes allow.
        local: Whether this is the account kdskills runs as, which may name files of this machine.
        token: Public id of the token, for audit rows and limits; None without one.
        limits: What the token may use.
        person: Whether a person starts skills through this caller; else a model does.
        tools: Ids of the tools the caller holds, as the gate of skills asks for them; None where that is not asked, for
            the account itself.
        expires_at: When the token ends by itself; None for never.
        profile: The widest profile of operations the caller may run here; doors narrow it.
    """

    tenant: str = "local"
    project: str = "local"
    agent: str = "local"
    alias: str = ""
    scopes: frozenset[Scope] = frozenset()
    allowed_tools: frozenset[str] | None = None
    local: bool = False
    door: Door = "library"
    token: str | None = None
    limits: TokenLimits = UNLIMITED
    person: bool = False
    tools: frozenset[str] | None = frozenset()
    expires_at: datetime | None = None
    profile: Profile = "operator"

    def may(self, scope: Scope) -> bool:
        """Whether the caller has *scope*."""
        return scope in self.scopes or "admin" in self.scopes

    @property
    def consumer(self) -> str | None:
        """The consumer the policy of skills is asked for; None for the local account, which is anonymous."""
        return None if self.agent == "local" else self.agent

    @property
    def account(self) -> bool:
        """Whether this is the account of the machine itself, which no token, project or agent bounds.

        A client that it starts on standard input works on its files, and still within one project.
        """
        return self.local and self.token is None and self.door in {"library", "cli"}

    @property
    def sees_all(self) -> bool:
        """Whether refused and hidden skills are told to this caller; to others they do not exist."""
        return self.local or self.may("admin")

    @property
    def starter(self) -> Starter:
        """Who starts a skill when this caller names it."""
        return "user" if self.person else "model"

    @property
    def held_tools(self) -> frozenset[str] | None:
        """The tools the gate of skills is asked with: those held, and the runtime's own that the caller may run."""
        if self.tools is None:
            return None
        runtime_tools = {name for name, scope in RUNTIME_TOOLS.items() if self.may(scope)}
        return self.tools | (runtime_tools if self.allowed_tools is None else runtime_tools & self.allowed_tools)


RUNTIME_TOOLS: Final[dict[str, Scope]] = {
    "skills.load": "skills:read",
    "skills.unload": "skills:read",
    "skills.read": "skills:read",
    "skills.run_script": "work:run",
}
"""Tools that every caller with the scope holds, since the service itself is what runs them."""

LOCAL: Final = Identity(scopes=SCOPES, local=True, tools=None)
"""The account kdskills runs as: the library and the command line."""

#: Fields of an identity that say where and for whom a call is made, and open nothing by themselves.
NO_POWER: Final = frozenset({"tenant", "alias", "door", "token", "agent", "profile"})


def wider(new: Identity, maker: Identity) -> tuple[str, ...]:
    """Return what *new* may do that *maker* may not, as names of fields, sorted; nothing is as well as less.

    The agent is no bound: whoever may make tokens administers every agent of the project.
    """
    if maker.account:
        return ()
    maker_scopes = SCOPES if "admin" in maker.scopes else maker.scopes
    beyond = {
        "project": new.project != maker.project,
        "scopes": not new.scopes <= maker_scopes,
        "allowed_tools": not _within(new.allowed_tools, maker.allowed_tools),
        "tools": not _within(new.tools, maker.tools),
        "person": new.person and not maker.person,
        "local": new.local and not maker.local,
        "expires_at": maker.expires_at is not None and (new.expires_at is None or new.expires_at > maker.expires_at),
    }
    for limit in fields(TokenLimits):
        least, most = getattr(new.limits, limit.name), getattr(maker.limits, limit.name)
        beyond[limit.name] = most is not None and (least is None or least > most)
    return tuple(sorted(name for name, is_so in beyond.items() if is_so))


def _within(new: frozenset[str] | None, maker: frozenset[str] | None) -> bool:
    """Whether a set of names is part of another; None is all names."""
    return maker is None or (new is not None and new <= maker)


def own_client(profile: Profile, project: str, agent: str, tools: frozenset[str] | None) -> Identity:
    """Return who a client of MCP is that this account starts without a token, for one project and agent.

    An author's client works on files of this machine. *tools* are those it holds; None when that is not asked for.
    """
    return Identity(
        project=project, agent=agent, scopes=SCOPES_OF[profile], local=profile != "skills", tools=tools, profile=profile
    )
