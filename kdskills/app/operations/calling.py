"""Before an operation runs: may this caller run it, are its arguments in shape, and are they the caller's to say?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import BaseModel, ValidationError

from kdskills.app.identity import PROFILES
from kdskills.errors import BadRequest, CallRefused

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.operations.table import Operation

Right = Literal["view", "machine", "program"]

HOST_WORDS: Final[Mapping[str, Right]] = MappingProxyType(
    {
        "consumer": "view",
        "tools": "view",
        "include_internal": "view",
        "by": "view",
        "executor": "machine",
        "model": "machine",
        "binary": "program",
    }
)
"""Arguments by which a caller would choose its own gate, and who may say them; every path of the machine is one, too.

`view` is for the account of the machine and for administrators, who see everything; `machine` for that account; `program`
for that account at the command line and in the library, since it names what is executed.
"""


def host_words(operation: Operation) -> Mapping[str, Right]:
    """Return the arguments of *operation* that are not for callers elsewhere, and who may say them."""
    found: dict[str, Right] = {}
    for name, field in operation.input.model_fields.items():
        if name in HOST_WORDS:
            found[name] = HOST_WORDS[name]
        elif _names_a_path(field.annotation):
            found[name] = "machine"
    return found


def _names_a_path(annotation: object) -> bool:
    return annotation is Path or any(_names_a_path(part) for part in get_args(annotation))


def require_own_words(operation: Operation, given: BaseModel, identity: Identity) -> None:
    """Refuse arguments that are the host's to say, from a caller who is not the host.

    What an argument is by itself may be said, and so may a caller's own agent, and who starts skills by its token.

    Raises:
        CallRefused: `not_yours_to_say`; `details["argument"]` names it.
    """
    rights: dict[Right, bool] = {
        "view": identity.sees_all,
        "machine": identity.local,
        "program": identity.local and identity.door in {"library", "cli"},
    }
    own = {"consumer": identity.agent, "by": identity.starter}
    for name, right in host_words(operation).items():
        value = getattr(given, name)
        field = type(given).model_fields[name]
        if rights[right] or value == field.get_default(call_default_factory=True) or value == own.get(name, ...):
            continue
        raise CallRefused(
            f"{operation.name}: {name} is for the host to say, not for a caller elsewhere: leave it out",
            code="not_yours_to_say",
            operation=operation.name,
            argument=name,
        )


def require_allowed(operation: Operation, identity: Identity) -> None:
    """Refuse a caller who may not run *operation*.

    Raises:
        CallRefused: `local_only`, `ui_not_allowed`, `scope_missing`, `tool_not_allowed` or `not_in_profile`.
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
    if PROFILES.index(operation.profile) > PROFILES.index(identity.profile):
        raise CallRefused(
            f"{operation.name} is not among the tools of the profile {identity.profile!r}, it is of {operation.profile!r}",
            code="not_in_profile",
            operation=operation.name,
            profile=operation.profile,
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
