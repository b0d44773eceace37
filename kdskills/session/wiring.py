"""What a policy plugin sees before something happens, and what it answers (spec runtime §2 `skill_denied`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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


def arguments_digest(arguments: Mapping[str, Any]) -> str:
    """Return `sha256:` + hex over the canonical JSON (sorted keys, compact) of *arguments*."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
