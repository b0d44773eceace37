"""Which way a thread's catalog takes; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kdskills.remote.catalog.digest import flat_tools, wire_tools
from kdskills.remote.lint import DISPATCHER_TOOL
from kdskills.remote.ports import JsonObject, ServerProfile

Way = Literal["native", "reload", "dispatcher", "successor"]

DISPATCHER: JsonObject = {
    "type": "function",
    "name": DISPATCHER_TOOL,
    "description": (
        "Call one remote skill of this conversation's catalog. `skill` is its name as the newest catalog writes it, "
        "`arguments` an object of its input_schema."
    ),
    "inputSchema": {
        "type": "object",
        "properties": {"skill": {"type": "string"}, "arguments": {"type": "object"}},
        "required": ["skill", "arguments"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What a new thread starts with.

    Attributes:
        wire: The value of `dynamicTools`, or None for none.
        way: How its catalog will reach the model; empty when the caller's own wire tools stay as they are.
        tools: The catalog, flat.
    """

    wire: list[JsonObject] | None
    way: Way | Literal[""]
    tools: list[JsonObject]


def way_at_start(profile: ServerProfile, wanted: str, *, local: bool, ephemeral: bool) -> Way:
    """Return the first proven way of a thread that is about to start.

    Args:
        profile: What the probe proved.
        wanted: The client's `strategy`.
        local: Whether rollout files can be reached.
        ephemeral: Whether the thread will have none.
    """
    if profile.native and wanted in ("auto", "native"):
        return "native"
    if profile.reload and wanted in ("auto", "reload") and local and not ephemeral:
        return "reload"
    return "successor" if wanted == "successor" else "dispatcher"


def way_of_old(profile: ServerProfile, wanted: str, *, local: bool, successor: bool) -> Way | None:
    """Return the way of a thread that was not started here, or None when nothing is proven for it."""
    if profile.native and wanted in ("auto", "native"):
        return "native"
    if profile.reload and wanted in ("auto", "reload") and local:
        return "reload"
    return "successor" if successor and wanted in ("auto", "successor") else None


def start_plan(
    tools: Sequence[JsonObject] | None,
    profile: ServerProfile,
    wanted: str,
    *,
    local: bool,
    ephemeral: bool,
) -> StartPlan:
    """Decide what a new thread starts with."""
    way = way_at_start(profile, wanted, local=local, ephemeral=ephemeral)
    given = list(tools or [])
    if given and all("type" in tool for tool in given):
        return StartPlan(given, "" if way == "dispatcher" else way, flat_tools(given))
    flat = flat_tools(given)
    if way == "dispatcher":
        return StartPlan(_old_shape([DISPATCHER], profile), way, flat)
    return StartPlan(wire_tools(flat, namespaces=profile.namespaces) if flat else None, way, flat)


def _old_shape(tools: list[JsonObject], profile: ServerProfile) -> list[JsonObject]:
    return tools if profile.namespaces else wire_tools(tools, namespaces=False)
