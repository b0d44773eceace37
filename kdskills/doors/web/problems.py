"""Errors as RFC 9457 problems, with the stable code of the error tree."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, cast

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from kdskills.app.wire import as_text, json_text
from kdskills.errors import (
    AuthorMustAct,
    BadRequest,
    CallRefused,
    Conflict,
    KdskillsError,
    NotFound,
    OperatorMustAct,
    UserMustAct,
)

MEDIA_TYPE: Final = "application/problem+json"

#: Codes whose status says more than their class does.
STATUS: Final[Mapping[str, int]] = {
    "body_too_large": 413,
    "host_refused": 421,
    "conflict": 409,
    "internal_error": 500,
    "method_not_allowed": 405,
    "missing_extra": 501,
    "rate_limited": 429,
    "too_much_work": 429,
    "storage_full": 507,
    "unauthenticated": 401,
    "unknown_operation": 404,
    "unsupported_media_type": 415,
}

#: Classes, the most special first. What a caller or model must change is a 4xx, what the operator must mend a 503.
BY_CLASS: Final[tuple[tuple[type[KdskillsError], int], ...]] = (
    (NotFound, 404),
    (Conflict, 409),
    (CallRefused, 403),
    (BadRequest, 400),
    (UserMustAct, 403),
    (AuthorMustAct, 422),
    (OperatorMustAct, 503),
)


class Problem(BaseModel):
    """A problem of RFC 9457; `code` and `who` are those of the error, the same at every door."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field("about:blank", description="Always `about:blank`: `code` tells problems apart.")
    title: str = Field(description="What the status means.")
    status: int
    detail: str = Field(description="One sentence for the person named by `who`.")
    code: str = Field(description="Stable code, listed in the reference of errors.")
    who: str = Field(description="Who must act: model, caller, author, operator or user.")
    details: dict[str, Any] = Field(default_factory=dict, description="Facts about the problem.")
    request_id: str = Field("", description="As in the header X-Request-Id and in the log.")


#: Answers any route may give instead of its own, as OpenAPI documents them.
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for status, words in {
        400: "Arguments out of shape, or an archive that breaks a rule.",
        401: "No token, or one that is not known.",
        403: "The caller may not do this.",
        404: "Nothing of that name in this project.",
        409: "The state of things does not allow it now.",
        413: "The body is larger than the token allows.",
        415: "The body is not of the kind the route takes.",
        422: "A skill or bundle is not in order.",
        421: "The service is not called by the name in the header Host.",
        429: "More than the token allows; see Retry-After.",
        500: "Something broke that nobody foresaw; the log has it under the request's id.",
        501: "An optional part is not installed.",
        503: "The machine is not set up for it, or the service is being stopped.",
        507: "There is no room left where the service keeps its files.",
    }.items()
}


def status_of(error: KdskillsError) -> int:
    """Return the HTTP status of an error."""
    if error.code in STATUS:
        return STATUS[error.code]
    return next((status for kind, status in BY_CLASS if isinstance(error, kind)), 400)


def problem_of(error: KdskillsError, request_id: str) -> Problem:
    """Return an error as a problem."""
    status = status_of(error)
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        code=error.code,
        who=error.who,
        details=cast("dict[str, Any]", as_text(error.details)),
        request_id=request_id,
    )


def response_of(error: KdskillsError, request: Request) -> Response:
    """Answer with an error."""
    problem = problem_of(error, getattr(request.state, "request_id", ""))
    headers = {}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if "retry_after" in error.details:
        headers["Retry-After"] = str(error.details["retry_after"])
    return Response(json_text(problem), problem.status, media_type=MEDIA_TYPE, headers=headers)
