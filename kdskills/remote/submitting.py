"""Submits answers to the server, and interprets the server's reaction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kdskills.remote.core import Driver
from kdskills.remote.ports import JsonObject

RETRIED = frozenset({"error", "exception", "malformed"})


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """How often and how patiently an answer is submitted; odd values are clamped.

    Attributes:
        max_submit_attempts: At least one.
        retry_delay_seconds: Pause after the n-th attempt is n times this.
    """

    max_submit_attempts: int = 3
    retry_delay_seconds: float = 0.05

    @property
    def attempts(self) -> int:
        """Attempts, at least one."""
        return max(1, int(self.max_submit_attempts))

    def pause(self, attempt: int) -> float:
        """Seconds to wait after this attempt, never negative."""
        return max(0.0, float(self.retry_delay_seconds)) * attempt


@dataclass(frozen=True, slots=True)
class Submission:
    """The result of a submission.

    Attributes:
        accepted: Whether the server has the answer.
        status: The server's status, or `exception`, `malformed`, `no_request_id`, `local_duplicate`.
        code: The server's code.
        attempts: How often the answer was sent.
        idempotent: Whether the server had an answer already.
        error: What went wrong.
    """

    accepted: bool
    status: str
    code: str | None = None
    attempts: int = 0
    idempotent: bool = False
    error: str | None = None


NO_REQUEST_ID = Submission(accepted=False, status="no_request_id")
LOCAL_DUPLICATE = Submission(accepted=True, status="local_duplicate", idempotent=True)


def judge(answer: object, attempts: int) -> Submission:
    """Return what a server's answer to a submission means."""
    status = answer.get("status") if isinstance(answer, Mapping) else None
    if not isinstance(answer, Mapping) or not isinstance(status, str) or not status.strip():
        fault = "no status" if isinstance(answer, Mapping) else f"{type(answer).__name__}, not an object"
        return Submission(
            accepted=False,
            status="malformed",
            attempts=attempts,
            error=f"tool call response submit failed: malformed answer: {fault}",
        )
    code = answer.get("code")
    code = None if code is None else str(code)
    if status == "ok":
        return Submission(accepted=True, status=status, code=code, attempts=attempts)
    if status == "not_found" or (status == "conflict" and code == "in_flight"):
        return Submission(accepted=True, status=status, code=code, attempts=attempts, idempotent=True)
    words = f"status={status}, code={code}, message={answer.get('message')}"
    return Submission(accepted=False, status=status, code=code, attempts=attempts, error=words)


async def submit(
    driver: Driver, respond: Callable[..., Any], request_id: str, payload: JsonObject, options: SubmitOptions
) -> Submission:
    """Submit an answer, again after errors and unreadable answers; exceptions of the client become results."""
    attempt = 0
    while True:
        attempt += 1
        try:
            answer = await driver.call(respond, request_id=request_id, response=copy.deepcopy(payload))
            submission = judge(answer, attempt)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is told in the dispatch
            submission = Submission(
                accepted=False,
                status="exception",
                attempts=attempt,
                error=f"tool call response submit failed: {error}",
            )
        if submission.status not in RETRIED or attempt >= options.attempts:
            return submission
        await driver.sleep(options.pause(attempt))
