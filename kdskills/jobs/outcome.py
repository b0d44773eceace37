"""What an attempt's end means for the head of its task; the same words whoever writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.jobs.database import micros, utc_now
from kdskills.jobs.records import dump

if TYPE_CHECKING:
    from kdskills.jobs.attempts import Attempt, AttemptFacts, Verdict
    from kdskills.jobs.heads import TaskHead

Repetition = Literal["no", "retry", "restart"]

LOST_TRIES: Final = 3
"""How often a task that may be repeated is tried again after it was lost."""
WORDS: Final = 2000
"""Characters of an error's message in a head."""
BY_ITSELF: Final = frozenset({"ok", "nonzero", "timeout", "limit", "startup_timeout"})
"""Verdicts of programs that no cancel ended."""


def canceled(head: TaskHead, verdict: Verdict) -> bool:
    """Whether a cancel ended the task: it ended the program, or kept a service from being restarted."""
    if verdict.status == "cancelled":
        return True
    if head.cancel_at is None or verdict.status == "ok":
        return False
    service = head.spec.service
    return verdict.status not in BY_ITSELF or (service is not None and head.restarts < service.restart)


def ending(head: TaskHead, verdict: Verdict) -> tuple[str, dict[str, Any]]:
    """Return the terminal state and columns a verdict means. A cancel counts only where it ended the program."""
    if canceled(head, verdict):
        status, code = "canceled", "canceled"
    elif verdict.status == "ok":
        status, code = "succeeded", None
    else:
        status, code = "failed", verdict.error_code
    message = None if code is None else (verdict.error_message or None)
    values: dict[str, Any] = {
        "exit_code": verdict.exit_code,
        "signal": verdict.signal,
        "error_code": code,
        "error_message": None if message is None else message.replace("\0", "\N{REPLACEMENT CHARACTER}")[:WORDS],
        "finished_at": moment(verdict.finished_at) or micros(utc_now()),
        "stdout_total": verdict.stdout_total,
        "stderr_total": verdict.stderr_total,
    }
    if verdict.started_at is not None and head.started_at is None:
        values["started_at"] = moment(verdict.started_at)
    return status, values


def printed(attempt: Attempt, size: int) -> dict[str, Any]:
    """Return the columns of what an attempt printed: the last *size* bytes of each stream. Blocks."""
    values: dict[str, Any] = {}
    for stream in ("stdout", "stderr"):
        piece = attempt.tail(stream, size)
        values |= {f"{stream}_tail": piece.data, f"{stream}_total": piece.total}
    return values


def readiness(facts: AttemptFacts | None) -> dict[str, Any]:
    """Return the columns that say that a program is ready, and where it is reached; none of one that never was."""
    if facts is None or facts.ready_at is None:
        return {}
    reached = {"endpoints": dump(facts.endpoints)} if facts.endpoints else {}
    return {"ready_at": moment(facts.ready_at), **reached}


def began(head: TaskHead, facts: AttemptFacts | None) -> dict[str, Any]:
    """Return the column that says when the task's first program was started, unless the head has it."""
    return {} if facts is None or head.started_at is not None else {"started_at": moment(facts.started_at)}


def moment(seconds: float | None) -> int | None:
    """Return the column of a time in seconds since the epoch."""
    return None if not seconds else round(seconds * 1_000_000)


def follows(head: TaskHead, verdict: Verdict) -> Repetition:
    """Return whether another attempt follows: of what was lost and may be repeated, or of a service that is restarted.

    How often something was lost is told by the head alone, so that a worker that dies with its programs forgets nothing.
    """
    if head.cancel_at is not None or verdict.status in ("ok", "cancelled", "refused"):
        return "no"
    lost = head.attempt - 1 - head.restarts
    if verdict.status == "lost" and head.spec.retry_on_lost and lost < LOST_TRIES:
        return "retry"
    service = head.spec.service
    return "restart" if service is not None and head.restarts < service.restart else "no"
