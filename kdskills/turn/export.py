"""Handing the skills in force to another process: logical URIs, digests, decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from kdskills.bundle.terms import EVERYONE
from kdskills.skills.model import Skill
from kdskills.skills.roots import far_content
from kdskills.skills.snapshot import RootState
from kdskills.turn.mounts import EXPORT_KEY, below
from kdskills.turn.state import SubsystemState

VERSION = 1


def export_view(
    subsystem_state: SubsystemState,
    skills: Mapping[str, Skill],
    *,
    consumer: str | None,
    tools: frozenset[str] | None,
    include_internal: bool,
    refused: Mapping[str, str],
) -> dict[str, Any]:
    """Return the export of one consumer's view.

    Args:
        subsystem_state: The moment the view was taken at.
        skills: What the view grants, with private dependencies.
        consumer: Whose view it is.
        tools: The consumer's tools.
        include_internal: Whether the internal namespace is open.
        refused: `{full id: code}` of everything else.
    """
    config = subsystem_state.terms.agents_config
    rules_in_force = {name: rules.to_json() for name, rules in config.items() if name in {EVERYONE, consumer}}
    activation = {
        "consumer": consumer,
        "tools": None if tools is None else sorted(tools),
        "include_internal": include_internal,
        "refused": dict(sorted(refused.items())),
    }
    return _export(subsystem_state, skills, rules_in_force, "view", activation)


def export_whole(subsystem_state: SubsystemState) -> dict[str, Any]:
    """Return the export of all skills, for any consumer."""
    config = {name: rules.to_json() for name, rules in subsystem_state.terms.agents_config.items()}
    refused = dict.fromkeys(subsystem_state.snapshot.invalid, "skill_invalid")
    if subsystem_state.exported is not None:
        refused |= subsystem_state.exported.refused
    activation = {"consumer": None, "tools": None, "include_internal": False, "refused": dict(sorted(refused.items()))}
    return _export(subsystem_state, subsystem_state.snapshot.skills, config, "subsystem", activation)


def _export(
    subsystem_state: SubsystemState,
    skills: Mapping[str, Skill],
    config: dict[str, Any],
    scope: str,
    activation: dict[str, Any],
) -> dict[str, Any]:
    # Skills of remote servers are not exported: the other process could not fetch and check their files.
    present = [state for state in subsystem_state.snapshot.roots if state.present and state.root.listing is None]
    rows = [
        {"id": full_id, "uri": skill_uri(subsystem_state, skill), "digest": skill.digest, "tree": skill.tree_digest()}
        for full_id, skill in sorted(skills.items())
        if far_content(skill) is None
    ]
    custom = next((state.root.uri for state in reversed(present) if state.root.kind == "bundle"), None)
    return {
        EXPORT_KEY: {
            "version": VERSION,
            "scope": scope,
            "custom_skills_root": custom,
            "agents_config": config,
            "roots": [_root(state) for state in present],
            "mounts": dict(subsystem_state.mounts),
            "skills": rows,
            "activation": activation,
            "content_hash": subsystem_state.content_hash,
            "fingerprint": subsystem_state.fingerprint,
        }
    }


def _root(state: RootState) -> dict[str, Any]:
    """Return one root; what is unusual about it stands only where it is."""
    root = state.root
    row: dict[str, Any] = {"label": root.label, "kind": root.kind, "uri": root.uri, "digest": state.digest}
    if root.namespace is not None:
        row["namespace"] = root.namespace
    if root.nested:
        row["nested"] = True
    return row


def skill_uri(subsystem_state: SubsystemState, skill: Skill) -> str:
    """Return the logical URI of a skill's folder: its root's, and the path below it."""
    if subsystem_state.exported is not None:
        return subsystem_state.exported.uris[skill.full_id]
    root = subsystem_state.snapshot.origins[skill.full_id]
    assert skill.folder is not None  # a skill of a root has a folder
    relative = skill.folder.relative_to(root.path.resolve())
    return below(root.uri, *PurePosixPath(relative.as_posix()).parts)


__all__ = ["EXPORT_KEY", "export_view", "export_whole", "skill_uri"]
