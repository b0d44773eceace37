"""The dicts that say what became of a catalog (spec remote §3)."""

from __future__ import annotations

from typing import Literal

from kdskills.remote.ports import JsonObject

Reason = Literal[
    "turn_active",
    "queued_turns",
    "held_open",
    "changed_underneath",
    "no_strategy",
    "ephemeral",
    "unknown_format",
    "not_local",
    "rejected",
    "client_refused",
]

_DEFERRED = frozenset({"turn_active", "queued_turns", "held_open", "changed_underneath"})


class NotApplied(Exception):
    """The old catalog stays in force; it never leaves this room, a report does.

    Args:
        reason: Why, one of the words of the report.
        error: The server's or the system's own words.
    """

    def __init__(self, reason: Reason, error: str = "") -> None:
        super().__init__(f"{reason}: {error}" if error else reason)
        self.reason = reason
        self.error = error


def noop(session_id: str) -> JsonObject:
    """Return the report of a thread nothing was ever pushed to."""
    return {"status": "noop", "sessionId": session_id}


def pushed(session_id: str, *, strategy: str, digest: str) -> JsonObject:
    """Return the report of a catalog that is in force already."""
    return {
        "status": "noop",
        "sessionId": session_id,
        "strategy": strategy,
        "digest": digest,
        "verified": True,
        "added": [],
        "removed": [],
        "duration_ms": 0.0,
        "materialized_now": False,
    }


def not_applied(session_id: str, problem: NotApplied, *, pending: bool) -> JsonObject:
    """Return the report of a catalog that did not change."""
    deferred = problem.reason in _DEFERRED
    report: JsonObject = {
        "status": "deferred" if deferred else "failed",
        "sessionId": session_id,
        "reason": problem.reason,
    }
    if deferred:
        report["pending"] = pending
    if problem.error:
        report["error"] = problem.error
    return report
