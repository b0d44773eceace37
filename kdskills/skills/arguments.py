"""Fill the declared arguments into a body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdskills.errors import Diagnostic
from kdskills.skills.model import RenderedBody, SkillArgument

_PLACEHOLDER = re.compile(r"\\\$|\$([A-Za-z_][A-Za-z0-9_]*)|\{\{[ \t]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*\}\}")


def render_body(
    body: str, arguments: Sequence[SkillArgument | Mapping[str, Any]], values: Mapping[str, str]
) -> RenderedBody:
    r"""Return *body* with its arguments filled in, in one pass from left to right.

    `$name` and `{{ name }}` of a declared argument become its value, else its default, else nothing; `\$` gives `$`.
    Inserted values are not looked at again. Without arguments the body comes back as it is.

    Args:
        body: The text.
        arguments: What is declared: values, or mappings with `name` and perhaps `default`.
        values: What the caller gives; names that are not declared count for nothing.

    Returns:
        The text, with `unknown_placeholder` once for each undeclared name, which stays as it is.

    Raises:
        TypeError: An argument is of the wrong type.
    """
    _check(body, arguments, values)
    defaults = dict(reversed([_declared(argument) for argument in arguments]))
    if not defaults:
        return RenderedBody(body)
    unknown: dict[str, int] = {}

    def fill(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return "$"
        if name not in defaults:
            unknown.setdefault(name, match.start())
            return match[0]
        value = values.get(name)
        return str(value) if value is not None else defaults[name]

    text = _PLACEHOLDER.sub(fill, body)
    return RenderedBody(text, tuple(_unknown(unknown, body)))


def _check(body: object, arguments: object, values: object) -> None:
    if not isinstance(body, str):
        raise TypeError(f"body must be str, not {type(body).__name__}")
    if isinstance(arguments, str | bytes) or not isinstance(arguments, Sequence):
        raise TypeError("arguments must be a sequence")
    if not isinstance(values, Mapping):
        raise TypeError("values must be a mapping")


def _declared(argument: object) -> tuple[str, str]:
    if isinstance(argument, SkillArgument):
        return argument.name, argument.default or ""
    name = argument.get("name") if isinstance(argument, Mapping) else None
    if not isinstance(argument, Mapping) or not isinstance(name, str):
        raise TypeError("an argument is a SkillArgument or a mapping with a name")
    default = argument.get("default")
    return name, "" if default is None else str(default)


def _unknown(names: Mapping[str, int], body: str) -> Iterator[Diagnostic]:
    """Yield a finding for each name, given where each stands in *body*, in ascending order."""
    line, begins, counted = 1, 0, 0
    for name, offset in names.items():  # each looks only at what is new, so that many names cost no more than one
        line += body.count("\n", counted, offset)
        begins = max(begins, body.rfind("\n", counted, offset) + 1)
        counted = offset
        yield Diagnostic(
            "unknown_placeholder",
            "warning",
            f"`{name}` stands in the body like an argument, but is not declared.",
            line=line,
            column=offset - begins + 1,
            ref=name,
            fix="Declare it under `arguments`, or write `\\$`.",
        )
