"""The reports of catalog changes, as dicts."""

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
    """The old catalog stays in force; callers get a report, never this exception.

    Args:
        reason: Why, one of the words of the report.
        error: The server's or the system's own words.
        goes_on: Whether the change is still under way.
    """

    def __init__(self, reason: Reason, error: str = "", *, goes_on: bool = False) -> None:
        super().__init__(f"{reason}: {error}" if error else reason)
        self.reason = reason
        self.error = error
        self.goes_on = goes_on


def noop(session_id: str) -> JsonObject:
    """Return the report of a thread that never had a catalog."""
    return {"status": "noop", "sessionId": session_id}


def in_force(session_id: str, *, strategy: str, digest: str, duration_ms: float) -> JsonObject:
    """Return the entries every report has: the catalog in force, and that nothing changed."""
    return {
        "sessionId": session_id,
        "strategy": strategy,
        "digest": digest,
        "verified": True,
        "added": [],
        "removed": [],
        "duration_ms": duration_ms,
        "materialized_now": False,
    }


def not_applied(facts: JsonObject, problem: NotApplied, *, pending: bool) -> JsonObject:
    """Return the report of a catalog that did not change.

    Args:
        facts: Further entries of the report, at least `sessionId`.
        problem: Why it did not change.
        pending: Whether the change will be made later by itself.
    """
    deferred = problem.reason in _DEFERRED
    report: JsonObject = {"status": "deferred" if deferred else "failed", **facts, "reason": problem.reason}
    if deferred:
        report["pending"] = pending
    if problem.error:
        report["error"] = problem.error
    return report
