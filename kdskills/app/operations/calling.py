"""Before an operation runs: may this caller run it, are its arguments in shape, and are they the caller's to say?

Every door comes through here, so that a refusal has one code and one form wherever it is met. See
docs/reference/errors.md for who must act on each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import BaseModel, ValidationError

from kdskills.app.identity import PROFILES
from kdskills.errors import BadRequest, CallRefused, KdskillsError, ToolCallRefused

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.operations.table import Context, Operation

#: Halves of a surrogate pair: no database, no file and no transport can encode them.
HALF: Final = re.compile(r"[\ud800-\udfff]")
#: As `HALF`, without those that stand for the bytes of a file name that is no UTF-8.
HALF_OF_NO_NAME: Final = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
NUL: Final = re.compile("\0")
MAX_PROBLEMS: Final = 20
MAX_KEY: Final = 80

Right = Literal["view", "machine", "program"]

HOST_WORDS: Final[Mapping[str, Right]] = MappingProxyType(
    {
        "consumer": "view",
        "consumers": "view",
        "tools": "view",
        "roles": "view",
        "include_internal": "view",
        "by": "view",
        "executor": "machine",
        "model": "machine",
        "judge": "machine",
        "baseline": "machine",
        "binary": "program",
    }
)
"""Arguments by which a caller would choose its own gate, and who may say them; every path of the machine is one, too.

`view` is for the account of the machine and for administrators, who see everything; `machine` for that account; `program`
for that account at the command line and in the library, since it names what is executed.
"""


def host_words(operation: Operation) -> Mapping[str, Right]:
    """Return the arguments of *operation* that are not for callers elsewhere, and who may say them.

    Those that the operation judges by itself are none of them.
    """
    paths, fields = _paths(operation.input), operation.input.model_fields
    names = [name for name in fields if name not in operation.judged and (name in HOST_WORDS or name in paths)]
    return {name: HOST_WORDS.get(name, "machine") for name in names}


@cache
def _paths(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields of *model* that name files of this machine."""
    return frozenset(name for name, field in model.model_fields.items() if _names_a_path(field.annotation))


def _names_a_path(annotation: object) -> bool:
    return annotation is Path or any(_names_a_path(part) for part in get_args(annotation))


def require_own_words(operation: Operation, arguments: BaseModel, identity: Identity) -> None:
    """Refuse arguments that are the host's to say from others. Raises CallRefused, `not_yours_to_say`.

    What an argument is by itself may be said, and so may a caller's own agent, and who starts skills by its token.
    """
    rights: dict[Right, bool] = {"view": identity.sees_all, "machine": identity.local, "program": identity.account}
    caller_values = {"consumer": identity.agent, "consumers": (identity.agent,), "by": identity.starter}
    for name, right in host_words(operation).items():
        value = getattr(arguments, name)
        usual = type(arguments).model_fields[name].get_default(call_default_factory=True)
        if rights[right] or value == usual or value == caller_values.get(name, ...):
            continue
        message = f"{operation.name}: {name} is for the host to say, not for a caller elsewhere: leave it out"
        raise CallRefused(message, code="not_yours_to_say", operation=operation.name, argument=name)


def require_allowed(operation: Operation, identity: Identity) -> None:
    """Refuse a caller who may not run *operation*. Raises CallRefused, whose code says why."""
    reason = code = ""
    facts: dict[str, Any] = {}
    if identity.door == "console" and not operation.ui_allowed:
        code, reason = "ui_not_allowed", "is not for pages of the console"
    elif operation.local and not identity.local:
        code, reason = "local_only", "works on files of the machine kdskills runs on: call it there"
    elif not identity.may(operation.scope):
        code, reason, facts = "scope_missing", f"needs the scope {operation.scope}", {"scope": operation.scope}
    elif operation.sees_all and not identity.sees_all:
        code, reason, facts = (
            "scope_missing",
            "tells what no model may see: it needs the scope admin",
            {"scope": "admin"},
        )
    elif identity.allowed_tools is not None and operation.name not in identity.allowed_tools:
        code, reason = "tool_not_allowed", "is not among the tools this caller may run"
    elif PROFILES.index(operation.profile) > PROFILES.index(identity.profile):
        profiles = f"of the profile {identity.profile!r}, it is of {operation.profile!r}"
        code, reason, facts = "not_in_profile", f"is not among the tools {profiles}", {"profile": operation.profile}
    if code:
        raise CallRefused(f"{operation.name} {reason}", code=code, operation=operation.name, **facts)


def validated(operation: Operation, arguments: Mapping[str, Any]) -> BaseModel:
    """Return *arguments* as the operation's input model. Raises what `misshapen` returns, with the path of each."""
    problems = list(text_problems(operation.input, arguments))
    if problems:
        raise misshapen(operation, problems)
    try:
        return operation.input.model_validate(dict(arguments))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise misshapen(operation, [(pointer(item["loc"]), item["msg"]) for item in errors]) from None


def misshapen(operation: Operation, problems: Sequence[tuple[str, str]]) -> KdskillsError:
    """Return the refusal of arguments by path and problem: the model's to mend where it called, else the program's."""
    words = "; ".join(f"{path}: {problem}" for path, problem in problems[:MAX_PROBLEMS])
    errors = [{"path": path, "problem": problem} for path, problem in problems[:MAX_PROBLEMS]]
    kind = ToolCallRefused if operation.for_models else BadRequest
    return kind(f"{operation.name}: {words}", errors=errors)


def require_text(context: Context) -> None:
    """Refuse a call whose idempotency key nothing could keep: it holds half a character, or NUL. Raises BadRequest."""
    problem = _problem(context.idempotency_key or "", HALF, nul=False)
    if problem:
        raise BadRequest(f"the idempotency key {problem}", errors=[{"path": "/idempotency_key", "problem": problem}])


def pointer(loc: Sequence[int | str]) -> str:
    """Return the path of an argument as `/field/0`; names that callers made up are shortened and made printable."""
    return "/" + "/".join(UNPRINTABLE.sub("\ufffd", str(part))[:MAX_KEY] for part in loc)


def text_problems(model: type[BaseModel], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and problem of each text that no database, file or transport can take, before anything looks at it.

    Names of files may hold bytes that are no UTF-8, as the system gives them, in fields that are paths of this machine.
    NUL is allowed where the model lists the field in `MAY_HOLD_NUL`.
    """
    names = _paths(model)
    allowed: Sequence[str] = getattr(model, "MAY_HOLD_NUL", ())
    pending: list[tuple[tuple[int | str, ...], object]] = [((), arguments)]
    while pending:
        loc, value = pending.pop()
        if isinstance(value, str):
            path = pointer(loc)
            halves = HALF_OF_NO_NAME if len(loc) == 1 and loc[0] in names else HALF
            problem = _problem(value, halves, nul=any(fnmatchcase(path, pattern) for pattern in allowed))
            if problem:
                yield path, problem
        elif isinstance(value, Mapping):
            inner = [((*loc, str(key)), item) for key, item in value.items()]
            for halves, words in ((HALF, "has a name that is no text"), (NUL, "has a name that holds NUL")):
                yield from ((pointer(item_loc), words) for item_loc, _ in inner if halves.search(str(item_loc[-1])))
            pending += reversed(inner)
        elif isinstance(value, list | tuple):
            pending += reversed([((*loc, number), item) for number, item in enumerate(value)])


def _problem(text: str, halves: re.Pattern[str], *, nul: bool) -> str | None:
    if not text.isascii() and halves.search(text):
        return "holds half a character"
    return "holds NUL" if "\0" in text and not nul else None
