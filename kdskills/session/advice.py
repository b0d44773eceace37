"""What a model is answered to a refused call: first the one thing to do next, with the corrected call where it is certain.

A corrected call is never sent by itself. It is certain when the mistake has one remedy that fits the tool's own check: a list for
a single value, a number within its bounds, another spelling of a name that is there, the skill that must be loaded first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from kdskills.errors import ToolCallRefused, Who
from kdskills.models import parse_object
from kdskills.session.codes import CODES

TURN_NEXT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "repeated_call": "Do not send this call again. Use the answer you have: do something else, or answer the user.",
        "budget_exceeded": "Answer the user now, with what you have.",
        "tool_timeout": "Ask for less at once, or go on without it.",
        "tool_failed": "Go on without this tool, and say so.",
        "tool_denied": "Do not try this again; go on without it, and say so.",
        "tool_error": "Read the message, and send the call again with other arguments, or go on without it.",
        "no_code": "Give the program itself as code.",
        "invalid_ref": "Send the call again with refs such as sk:NAME, src:1-3 or turn:FILE.",
        "source_not_found": "Ask only for sources with the numbers that are known.",
        "agent_budget": "Ask for less in one call, or do it yourself.",
        "agent_stuck": "Ask in other words, with all that must be known, or do it yourself.",
        "agent_failed": "Do it yourself, or say what is missing.",
        "agent_cancelled": "Do it yourself, or say what is missing.",
    }
)
"""What to do next for the codes that the tools of a solver add to `CODES`."""

_BY_WHO: Final[Mapping[Who, str]] = MappingProxyType(
    {
        "model": "Read the message, and send the call again with other arguments.",
        "caller": "Answer with what you have, and say what could not be done.",
        "author": "Go on without it, and say what could not be done.",
        "operator": "Do not try this again; go on without it, and say so.",
        "user": "Do not try this again; go on without it, and say so.",
    }
)


MAX_CALL: Final = 4_000
"""Characters of a corrected call: a longer one costs more to read than to make anew, and may be cut on its way."""


def next_of(code: str, who: Who) -> str:
    """Return the one thing a model does next after an error of *code*."""
    return CODES[code].next if code in CODES else TURN_NEXT.get(code, _BY_WHO[who])


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that was refused, as a correction needs it.

    `tool` and `arguments` are as the model gave them, arguments as text where they are no object; `schema` is that of the
    arguments; `check` raises ToolCallRefused for arguments that a tool does not take; `tools` are spellings of those
    offered, `skills` the names of skills that may be loaded.
    """

    tool: str
    arguments: Mapping[str, Any] | str
    schema: Mapping[str, Any]
    check: Callable[[str, Mapping[str, Any]], object]
    tools: Collection[str] = ()
    skills: Collection[str] = ()


def advised(error: Mapping[str, Any], refused: RefusedCall | None = None) -> dict[str, Any]:
    """Return the wire form of *error* with `next` before everything else, and `call` where a corrected one is certain."""
    code, words = str(error["code"]), next_of(error["code"], error["who"])
    if refused is None:
        return {"next": words, **error}
    call = (
        None if isinstance(refused.arguments, str) else _corrected(code, error["details"], refused.arguments, refused)
    )
    if call is not None and _taken(refused, call):
        return {"next": "Send the call that stands in `call`.", "call": call, **error}
    if code == "invalid_argument":
        words = f"{words} {_shape_words(refused)}".rstrip()
    return {"next": words, **error}


def _shape_words(refused: RefusedCall) -> str:
    """Return what the arguments of a call out of shape look like."""
    sent, (fields, required) = refused.arguments, _parts(refused.schema)
    if isinstance(sent, str):
        begun = sent.lstrip().startswith("{") and parse_object(sent) is None
        shapes: Mapping[str, Any] = {"array": ["..."], "integer": 1, "number": 1, "boolean": True, "object": {}}
        example = {name: shapes.get(str(fields[name].get("type")), "...") for name in required}
        shortened = "It was cut off: make it shorter. " if begun else ""
        return f"{shortened}They look like {json.dumps(example)}."
    if fields:
        return f"There are: {', '.join(fields)}." if set(sent) - set(fields) else ""
    return "It takes no arguments." if refused.schema.get("properties") == {} else ""


def _parts(schema: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Return the arguments of *schema*, which others may have written, and the names of those required."""
    properties, required = schema.get("properties"), schema.get("required")
    fields = properties if isinstance(properties, Mapping) else {}
    by_name = {str(name): field if isinstance(field, Mapping) else {} for name, field in fields.items()}
    return by_name, [name for name in by_name if isinstance(required, list | tuple) and name in required]


def _names(value: object) -> list[str]:
    """Return the texts of a detail that tools of others may fill with anything."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []


def _taken(refused: RefusedCall, call: Mapping[str, Any]) -> bool:
    if len(json.dumps(call)) > MAX_CALL:
        return False
    try:
        refused.check(call["tool"], call["arguments"])
    except ToolCallRefused:
        return False
    return bool(call["arguments"] != refused.arguments or call["tool"] != refused.tool)


def _corrected(
    code: str, details: Mapping[str, Any], sent: Mapping[str, Any], refused: RefusedCall
) -> dict[str, Any] | None:
    load = _only(tool for tool in refused.tools if tool in {"skills_load", "skills.load"})
    if code == "skill_not_active" and load:
        return _call(load, {"names": [details.get("name")], "mode": "add"})
    if code == "tool_not_found":
        skill = _only(name for name in refused.skills if _folded(name) == _folded(refused.tool))
        if skill and load:
            return _call(load, {"names": [skill], "mode": "add"})
        name = _folded(refused.tool)  # with or without what stands before a tool's own name
        tool = _only(each for each in refused.tools if name in {_folded(each), _folded(_PREFIX.sub("", each))})
        return _call(tool, sent) if tool else None
    glob = _only(tool for tool in refused.tools if tool in {"files_glob", "files.glob"})
    if glob and _folded(refused.tool) == "filesgrep" and str(sent.get("pattern")).startswith("*"):
        return _call(glob, {"pattern": sent["pattern"]})
    arguments: Mapping[str, Any] | None = None
    if code == "invalid_argument":
        arguments = _in_shape(sent, refused.schema)
    elif code == "skill_not_found":
        arguments = _named_alike(sent, _names(details.get("names")), _names(details.get("near")))
    elif code in {"resource_not_found", "path_denied"}:
        arguments = _path_alike(sent, _names(details.get("siblings")))
    return None if arguments is None else _call(refused.tool, arguments)


def _only(candidates: Iterable[str]) -> str | None:
    """Return the one candidate, or None where there are none or several."""
    distinct = sorted(set(candidates))
    return distinct[0] if len(distinct) == 1 else None


def _call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool": tool, "arguments": dict(arguments)}


_PREFIX: Final = re.compile(r"^[A-Za-z]+[._]")


def _folded(name: str) -> str:
    """Return a name without what models add to it or spell in other ways."""
    plain = re.sub(r"^(?:skill://|sk:)|/?SKILL\.md$", "", name.strip())
    return re.sub(r"[^a-z0-9]", "", plain.casefold())


def _named_alike(sent: Mapping[str, Any], wrong: Sequence[str], near: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments with each wrong name of a skill replaced by the one near name spelt alike."""
    right: dict[str, str] = {}
    for name in wrong:
        alike = _only(candidate for candidate in near if _folded(candidate) == _folded(name))
        if alike is None:
            return None
        right[name] = alike
    mended = dict(sent)
    if isinstance(sent.get("names"), list):
        mended["names"] = list(dict.fromkeys(right.get(str(name), name) for name in sent["names"]))
    if isinstance(sent.get("skill"), str):
        mended["skill"] = right.get(sent["skill"], sent["skill"])
    return mended


def _path_alike(sent: Mapping[str, Any], siblings: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments with the one path beside the wrong one that differs from it in spelling only."""
    folder, _, name = str(sent.get("path", "")).rpartition("/")
    alike = _only(sibling for sibling in siblings if _folded(sibling.rpartition("/")[2]) == _folded(name))
    if alike is None:
        return None
    return {**sent, "path": alike if "/" in alike or not folder else f"{folder}/{alike}"}


def _in_shape(sent: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments with lists, bounds and one name as *schema* wants them; None with names that mean nothing."""
    (fields, required), mended = _parts(schema), dict(sent)
    if schema.get("properties") == {}:  # a tool that takes none
        return {}
    unknown = [name for name in sent if name not in fields]
    missing = [name for name in required if name not in sent]
    if len(unknown) == len(missing) == 1:  # one argument under another name
        mended[missing[0]] = mended.pop(unknown[0])
    elif unknown:
        return None
    return {name: _fitted(value, fields[name]) for name, value in mended.items()}


def _fitted(value: Any, field: Mapping[str, Any]) -> Any:
    kind = field.get("type")
    if kind == "array" and isinstance(value, str) and not re.search(r"\s", value):  # with spaces it may be several
        return [value]
    if kind == "string" and isinstance(value, list) and len(value) == 1:
        return value[0]
    if kind not in {"integer", "number"} or not _is_number(value):
        return value
    low, high = field.get("minimum"), field.get("maximum")
    bounded = min(value, high) if _is_number(high) else value
    return max(bounded, low) if _is_number(low) else bounded


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
