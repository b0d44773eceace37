"""What is asked before something happens: policy plugins about loads, reads and runs, a person about runs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.errors import PluginFailed
from kdskills.session.codes import refuse
from kdskills.session.receipts import SessionEvent, send

if TYPE_CHECKING:
    from kdskills.session.receipts import Sink


Remember = Literal["call", "session", "always"]
MAX_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What is about to run. `skill`, `origin`, `tree_digest` and `path` are None for generated code.

    `skill` is a full id, `origin` None for a local skill, `tree_digest` over the skill's files as they are just now;
    `argv` is as run, `env_names` are names without values, `executor` is the engine's name, `network` are the rules of hosts
    it may reach.
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
Key = tuple[str | None, str | None, str | None, str | None, tuple[str, ...]]


def origin_of(namespace: str) -> str | None:
    """Return `mcp:<label>` for the namespace of a remote root, else None: the skill is local."""
    return f"mcp:{namespace[4:]}" if namespace.startswith("mcp-") else None


class Approvals:
    """Asks, and remembers answers bound to (origin, id, tree digest, path, network), in this process."""

    def __init__(self, approve: Approver | None) -> None:
        self._approve = approve
        self._lock = threading.Lock()
        self._remembered: OrderedDict[tuple[str | None, Key], None] = OrderedDict()

    async def require(self, request: ApprovalRequest, sink: Sink | None, display_name: str | None = None) -> None:
        """Return once *request* is approved; raises `approval_unavailable` (nobody to ask) or `approval_denied`."""
        key: Key = (request.origin, request.skill, request.tree_digest, request.path, request.network)
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
    `arguments_digest` is `sha256:` over the canonical JSON of the arguments; values themselves are not shown.
    """

    kind: AccessKind
    consumer: str | None
    session_id: str
    skill: str | None = None
    path: str | None = None
    tool: str | None = None
    arguments_digest: str = ""


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
