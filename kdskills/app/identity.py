"""Who calls an operation, and what the caller may do (spec service §2, spec work §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Scope = Literal["skills:read", "skills:write", "work:run", "work:read", "admin"]
Door = Literal["library", "cli", "http", "nats", "mcp", "console"]

SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What one token may use; None leaves it to the service's settings (spec service §2).

    Attributes:
        requests_per_minute: Requests.
        concurrent_work: Tasks and jobs that run at one time.
        body_bytes: Size of one request.
    """

    requests_per_minute: int | None = None
    concurrent_work: int | None = None
    body_bytes: int | None = None


UNLIMITED: Final = TokenLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller, as the transport knows it: from a token, a subject or the account itself, never from arguments.

    Attributes:
        tenant: Whose installation.
        project: Every record and skill the caller may reach belongs to it.
        agent: Who asks; as a consumer it is what the policy of skills knows.
        alias: Tells conversations of one agent apart.
        scopes: What the caller may do; `admin` includes the others.
        allowed_tools: Operations the caller may run; None for all its scopes allow.
        local: Whether this is the account kdskills runs as, which may name files of this machine.
        door: The way in.
        token: Public id of the token, for audit rows and limits; None without one.
        limits: What the token may use.
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

    def may(self, scope: Scope) -> bool:
        """Whether the caller has *scope*."""
        return scope in self.scopes or "admin" in self.scopes

    @property
    def consumer(self) -> str | None:
        """The consumer the policy of skills is asked for; None for the local account, which is anonymous."""
        return None if self.agent == "local" else self.agent


LOCAL: Final = Identity(scopes=SCOPES, local=True)
"""The account kdskills runs as: the library and the command line."""
