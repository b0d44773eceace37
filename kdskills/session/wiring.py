"""What a policy plugin sees before something happens, and what it answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kdskills.errors import PluginFailed

AccessKind = Literal["load", "read", "run", "tool"]


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """A load, read, run or tool call about to happen, as `kdskills_deny` sees it.

    Attributes:
        kind: What is about to happen.
        consumer: The agent that asks.
        session_id: Its session.
        skill: Full id of the skill, or None for a tool that belongs to none.
        path: Path below the skill's root, of reads and runs.
        tool: Dotted id of the tool, or None when code asks.
        arguments_digest: `sha256:` over the canonical JSON of the arguments; values themselves are not shown.
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
    """Return what *deny* answers; one that cannot answer refuses.

    Raises:
        PluginFailed: It raised, or answered neither a Denial nor None.
    """
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
