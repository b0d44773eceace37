"""Chooses the strategy by which a thread's catalog reaches the model; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kdskills.remote.catalog.digest import flat_tools, wire_tools
from kdskills.remote.lint import DISPATCHER_TOOL
from kdskills.remote.ports import JsonObject, ServerProfile

CatalogStrategy = Literal["native", "reload", "dispatcher", "successor"]

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
    """The tools and strategy of a new thread.

    Attributes:
        wire: The value of `dynamicTools`, or None for none.
        strategy: How its catalog will reach the model; empty when the caller's own wire tools stay as they are.
        tools: The catalog, flat.
    """

    wire: list[JsonObject] | None
    strategy: CatalogStrategy | Literal[""]
    tools: list[JsonObject]


def strategy_at_start(profile: ServerProfile, preference: str, *, local: bool, ephemeral: bool) -> CatalogStrategy:
    """Return the first proven strategy for a thread that is about to start.

    Args:
        profile: What the probe proved.
        preference: The client's `strategy`.
        local: Whether rollout files can be reached.
        ephemeral: Whether the thread will have no rollout file.
    """
    if profile.native and preference in ("auto", "native"):
        return "native"
    if profile.reload and preference in ("auto", "reload") and local and not ephemeral:
        return "reload"
    return "successor" if preference == "successor" else "dispatcher"


def strategy_of_old(profile: ServerProfile, preference: str, *, local: bool, successor: bool) -> CatalogStrategy | None:
    """Return the strategy for a thread that another client started, or None when none is proven for it."""
    if profile.native and preference in ("auto", "native"):
        return "native"
    if profile.reload and preference in ("auto", "reload") and local:
        return "reload"
    return "successor" if successor and preference in ("auto", "successor") else None


def start_plan(
    tools: Sequence[JsonObject] | None,
    profile: ServerProfile,
    preference: str,
    *,
    local: bool,
    ephemeral: bool,
) -> StartPlan:
    """Decide what a new thread starts with."""
    strategy = strategy_at_start(profile, preference, local=local, ephemeral=ephemeral)
    start_tools = list(tools or [])
    if start_tools and all("type" in tool for tool in start_tools):
        return StartPlan(start_tools, "" if strategy == "dispatcher" else strategy, flat_tools(start_tools))
    flat = flat_tools(start_tools)
    if strategy == "dispatcher":
        return StartPlan(_old_shape([DISPATCHER], profile), strategy, flat)
    return StartPlan(wire_tools(flat, namespaces=profile.namespaces) if flat else None, strategy, flat)


def _old_shape(tools: list[JsonObject], profile: ServerProfile) -> list[JsonObject]:
    return tools if profile.namespaces else wire_tools(tools, namespaces=False)
