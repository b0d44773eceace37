"""Before an operation runs: may this caller run it, and are its arguments in shape? (spec service §2, spec work §2)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from kdskills.errors import BadRequest, CallRefused

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.operations.table import Operation


def require_allowed(operation: Operation, identity: Identity) -> None:
    """Refuse a caller who may not run *operation*.

    Raises:
        CallRefused: `local_only`, `ui_not_allowed`, `scope_missing` or `tool_not_allowed`.
    """
    if identity.door == "console" and not operation.ui_allowed:
        raise CallRefused(
            f"{operation.name} is not for pages of the console", code="ui_not_allowed", operation=operation.name
        )
    if operation.local and not identity.local:
        raise CallRefused(
            f"{operation.name} works on files of the machine kdskills runs on: call it there",
            code="local_only",
            operation=operation.name,
        )
    if not identity.may(operation.scope):
        raise CallRefused(
            f"{operation.name} needs the scope {operation.scope}",
            code="scope_missing",
            operation=operation.name,
            scope=operation.scope,
        )
    if identity.allowed_tools is not None and operation.name not in identity.allowed_tools:
        raise CallRefused(
            f"{operation.name} is not among the tools this caller may run",
            code="tool_not_allowed",
            operation=operation.name,
        )


def validated(operation: Operation, arguments: Mapping[str, Any]) -> BaseModel:
    """Return *arguments* as the operation's input model.

    Raises:
        BadRequest: Some are out of shape; `details["errors"]` has the path of each.
    """
    try:
        return operation.input.model_validate(dict(arguments))
    except ValidationError as error:
        problems = [
            {"path": "/" + "/".join(map(str, item["loc"])), "problem": item["msg"]}
            for item in error.errors(include_url=False, include_input=False)
        ]
        words = "; ".join(f"{p['path']}: {p['problem']}" for p in problems)
        raise BadRequest(f"{operation.name}: {words}", errors=problems) from None
