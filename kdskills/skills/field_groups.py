"""Fields with structure: metadata, allowed tools, arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kdskills.skills.findings import Findings
from kdskills.skills.model import SkillArgument
from kdskills.skills.yaml_core import Fields, Items, Node, Scalar, to_python

MAX_ARGUMENTS = 64
HINT_ARGUMENT = "ARGUMENTS"

_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOOL_NAME = re.compile(r"(?:[^\s(]|\([^)]*(?:\)|$))+")
_SEPARATORS = re.compile(r"[,\s]+")
_NOTHING: Mapping[str, str] = MappingProxyType({})

Place = tuple[int, int] | None


def read_metadata(node: Node | None, findings: Findings, place: Place) -> Mapping[str, str]:
    """Return metadata as texts; nested values keep their parsed form, no mapping gives {} (`metadata_type`)."""
    if node is None:
        return _NOTHING
    if not isinstance(node, Fields):
        findings.add("metadata_type", "`metadata` is no mapping; it is left out.", place=place, ref="metadata")
        return _NOTHING
    text_only = findings.verdict == "skills-ref"
    found: dict[str, str] = {}
    odd: list[str] = []
    for key, item in node.items.items():
        if isinstance(item, Scalar):
            found[key] = item.text
            if not text_only and not isinstance(item.value, str):
                odd.append(key)
        else:
            found[key] = to_python(item, text_only=text_only)
            odd.append(key)
    if odd:
        names = ", ".join(f"`{key}`" for key in odd)
        findings.add("metadata_type", f"Values of `metadata` are no texts: {names}.", place=place, ref="metadata")
    return found


def read_allowed_tools(node: Node | None, findings: Findings, place: Place) -> str | None:
    """Return `allowed-tools` as one text; a list is joined by blanks (`allowed_tools_type`)."""
    if node is None:
        return None
    if isinstance(node, Scalar):
        if findings.verdict != "skills-ref" and not isinstance(node.value, str):
            findings.add("allowed_tools_type", "`allowed-tools` is no text.", place=place, ref="allowed-tools")
        return node.text.strip() or None
    if isinstance(node, Items):
        message = "`allowed-tools` is a list; its items are joined by blanks."
        findings.add("allowed_tools_type", message, place=place, ref="allowed-tools")
        texts = [item.text.strip() for item in node.items if isinstance(item, Scalar)]
        return " ".join(text for text in texts if text) or None
    findings.add(
        "allowed_tools_type", "`allowed-tools` is a mapping; it is left out.", place=place, ref="allowed-tools"
    )
    return None


def tool_names(allowed: str | None) -> tuple[str, ...]:
    """Return the names in `allowed-tools`: split at blanks outside parentheses, commas at their edges dropped."""
    if allowed is None:
        return ()
    names = (name.strip(",") for name in _TOOL_NAME.findall(allowed))
    return tuple(name for name in names if name)


def read_arguments(node: Node | None, hint: str | None, findings: Findings, place: Place) -> tuple[SkillArgument, ...]:
    """Return declared arguments: names or mappings in a list, names in a text, or a mapping of names.

    A hint declares `ARGUMENTS` behind them.
    """

    def odd(message: str) -> None:
        findings.add("field_type", message, place=place, ref="arguments")

    found: dict[str, SkillArgument] = {}
    for argument in _declared(node, odd):
        if not _ARGUMENT.fullmatch(argument.name):
            odd(f"`{argument.name}` cannot be the name of an argument and is left out.")
        elif argument.name in found:
            odd(f"The argument `{argument.name}` is declared twice; the first one counts.")
        elif len(found) == MAX_ARGUMENTS:
            odd(f"There are more than {MAX_ARGUMENTS} arguments; the others are left out.")
            break
        else:
            found[argument.name] = argument
    if hint is not None and HINT_ARGUMENT not in found and len(found) < MAX_ARGUMENTS:
        found[HINT_ARGUMENT] = SkillArgument(HINT_ARGUMENT, hint)
    return tuple(found.values())


def _declared(node: Node | None, odd: Callable[[str], None]) -> Iterator[SkillArgument]:
    if isinstance(node, Scalar):
        yield from (SkillArgument(name) for name in _SEPARATORS.split(node.text) if name)
    elif isinstance(node, Fields):
        yield from (_argument(name, item) for name, item in node.items.items())
    elif isinstance(node, Items):
        for item in node.items:
            name = item.items.get("name") if isinstance(item, Fields) else item
            if isinstance(name, Scalar):
                yield _argument(name.text.strip(), item if isinstance(item, Fields) else None)
            else:
                odd("An item of `arguments` is neither a name nor a mapping with one; it is left out.")


def _argument(name: str, node: Node | None) -> SkillArgument:
    if isinstance(node, Scalar):
        return SkillArgument(name, "" if node.null else node.text.strip())
    if not isinstance(node, Fields):
        return SkillArgument(name)
    described, default = node.items.get("description"), node.items.get("default")
    return SkillArgument(
        name,
        described.text.strip() if isinstance(described, Scalar) and not described.null else "",
        default.text if isinstance(default, Scalar) and not default.null else None,
    )
