"""What is asked before something happens: policy plugins about loads, reads and runs, a person about runs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.errors import BadRequest, PluginFailed
from kdskills.session.codes import refuse
from kdskills.session.receipts import SessionEvent, send

if TYPE_CHECKING:
    from kdskills.session.receipts import Sink


Remember = Literal["call", "session", "always"]
MAX_REMEMBERED: Final = 4096
MAX_USER: Final = 200


@dataclass(frozen=True, slots=True)
class User:
    """Whom a turn is for, as the application knows them; only the id is ever written anywhere.

    Attributes:
        id: 1 to 200 printable characters.
        roles: Names of roles; rules of the descriptor under `"@name"` hold for users who have that role.
        claims: What else the application knows of them, for tools and policy plugins.

    Raises:
        BadRequest: A part that cannot be used; a single text is no collection of roles.
    """

    id: str
    roles: Collection[str] = field(default=(), repr=False)
    claims: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        user_id: object = self.id
        if not isinstance(user_id, str) or not (user_id.strip() and user_id.isprintable() and len(user_id) <= MAX_USER):
            raise _no_user("", f"'s id must be 1 to {MAX_USER} printable characters")
        if not isinstance(self.roles, (list, tuple, set, frozenset)) or not all(map(_is_role, self.roles)):
            raise _no_user("/roles", "'s roles must be a collection of names, none of them blank")
        if not isinstance(self.claims, Mapping):
            raise _no_user("/claims", "'s claims must be a mapping")
        object.__setattr__(self, "roles", frozenset(self.roles))
        object.__setattr__(self, "claims", MappingProxyType(dict(self.claims)))


def _is_role(role: object) -> bool:
    return isinstance(role, str) and bool(role.strip())


def _no_user(path: str, problem: str) -> BadRequest:
    return BadRequest(f"the user{problem}", errors=[{"path": f"/user{path}", "problem": problem.partition(" ")[2]}])


def user_of(given: object) -> User | None:
    """Return a user given as a `User`, or as an id alone, who then has no roles. Raises BadRequest for anything else."""
    if given is None or isinstance(given, User):
        return given
    if not isinstance(given, str):
        raise _no_user("", f" must be an id or a User, not a {type(given).__name__}")
    return User(given)


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What is about to run. `skill`, `origin`, `tree_digest` and `path` are None for generated code.

    `skill` is a full id, `origin` None for a local skill, `tree_digest` over the skill's files as they are just now;
    `argv` is as run, `env_names` are names without values, `executor` is the engine's name, `network` are the rules of hosts
    it may reach; `user` is the id of whom the turn is for.
    """

    session: str
    skill: str | None
    origin: str | None
    tree_digest: str | None
    path: str | None
    argv: tuple[str, ...]
    env_names: tuple[str, ...]
    executor: str
    network: tuple[str, ...] = ()
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Approval:
    """The answer: build it with `allow` or `deny`."""

    allowed: bool
    remember: Remember = "call"
    reason: str = ""


def allow(remember: Remember = "call") -> Approval:
    """Say yes, for this call, this session, or always."""
    return Approval(True, remember)


def deny(reason: str = "") -> Approval:
    """Say no."""
    return Approval(False, reason=reason)


Approver = Callable[[ApprovalRequest], Awaitable[Approval]]
Key = tuple[str | None, str | None, str | None, str | None, tuple[str, ...], str | None]


def origin_of(namespace: str) -> str | None:
    """Return `mcp:<label>` for the namespace of a remote root, else None: the skill is local."""
    return f"mcp:{namespace[4:]}" if namespace.startswith("mcp-") else None


class Approvals:
    """Asks, and remembers answers bound to (origin, id, tree digest, path, network, user), in this process."""

    def __init__(self, approve: Approver | None) -> None:
        self._approve = approve
        self._lock = threading.Lock()
        self._remembered: OrderedDict[tuple[str | None, Key], None] = OrderedDict()

    async def require(self, request: ApprovalRequest, sink: Sink | None, display_name: str | None = None) -> None:
        """Return once *request* is approved; raises `approval_unavailable` (nobody to ask) or `approval_denied`."""
        key: Key = (request.origin, request.skill, request.tree_digest, request.path, request.network, request.user)
        with self._lock:
            if (None, key) in self._remembered or (request.session, key) in self._remembered:
                return
        if self._approve is None:
            raise refuse("approval_unavailable", "this run needs approval, and nobody can be asked here")
        facts = {"skill": display_name or request.skill, "path": request.path, "executor": request.executor}
        asked = {**facts, "env_names": list(request.env_names), "network": list(request.network)}
        send(sink, SessionEvent("approval.requested", request.session, asked))
        answer = await self._approve(request)
        decision = {**facts, "allowed": answer.allowed, "remember": answer.remember}
        send(sink, SessionEvent("approval.decided", request.session, decision))
        if not answer.allowed:
            reason = f": {answer.reason}" if answer.reason else ""
            raise refuse("approval_denied", f"the run was not approved{reason}", reason=answer.reason)
        # Without a skill there is no digest to bind an answer to, so it holds for the call alone.
        if answer.remember != "call" and request.tree_digest is not None:
            with self._lock:
                self._remembered[(request.session if answer.remember == "session" else None, key)] = None
                while len(self._remembered) > MAX_REMEMBERED:
                    self._remembered.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """Forget what was approved for one session."""
        with self._lock:
            for entry in [entry for entry in self._remembered if entry[0] == session_id]:
                del self._remembered[entry]


AccessKind = Literal["load", "read", "run", "tool"]


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """A load, read, run or tool call about to happen, as `kdskills_deny` sees it.

    `skill` is None for a tool that belongs to none, `path` lies below the skill's root, `tool` is None when code asks.
    `arguments_digest` is `sha256:` over the canonical JSON of the arguments; values themselves are not shown. `user` and
    `deps` are those the turn was started with: keep roles, claims and dependencies out of whatever is written.
    """

    kind: AccessKind
    consumer: str | None
    session_id: str
    skill: str | None = None
    path: str | None = None
    tool: str | None = None
    arguments_digest: str = ""
    user: User | None = None
    deps: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Denial:
    """A refusal by a plugin: `reason` is for people and logs, `public` is what the model reads."""

    reason: str
    public: str = "not allowed here"


Deny = Callable[[AccessRequest], Denial | None]


def denial_of(deny: Deny, request: AccessRequest) -> Denial | None:
    """Return what *deny* answers; raises PluginFailed when it raised or answered neither a Denial nor None."""
    try:
        denial: object = deny(request)
    except PluginFailed:
        raise
    except Exception as error:
        message = f"the policy check failed: {type(error).__name__}: {error}"
        raise PluginFailed(message, hook="kdskills_deny", found=type(error).__name__) from error
    if denial is not None and not isinstance(denial, Denial):
        kind = type(denial).__name__
        message = f"the policy check answered a {kind}, expected Denial | None"
        raise PluginFailed(message, hook="kdskills_deny", found=kind)
    return denial


UNDECIDED: Final = "it could not be checked whether this is allowed, so nothing was done; no defect of the call"
"""What a model reads when a policy plugin failed; the reason goes to the operator."""


def arguments_digest(arguments: Mapping[str, Any]) -> str:
    """Return `sha256:` + hex over the canonical JSON (sorted keys, compact) of *arguments*."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
