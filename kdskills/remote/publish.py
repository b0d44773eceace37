"""Publishes skills of bundles in a Codex session: as tools, or as folders that the server itself lists.

Route `tools`: each granted skill is a tool that returns its text, and any reference of it. Route `roots`: the granted skills are
written into a folder of their own, and the server gets its path. Either way the policy decides which skills are published. With
tools it is asked again at each call: a skill that was revoked meanwhile is answered like an unknown one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kdskills.remote.dispatch import NotRegistered
from kdskills.remote.lint import check_neighbours
from kdskills.remote.ports import JsonObject
from kdskills.remote.publish_names import tool_names
from kdskills.remote.publish_parts import PublishReport, receipts, text_of
from kdskills.remote.publish_roots import ROOTS, check_same_view, other_sessions, publish_roots, take_roots_away
from kdskills.session.paths import clean_path
from kdskills.session.reading import skill_file
from kdskills.turn import Granted

if TYPE_CHECKING:
    from kdskills.remote.core_session import SessionCore
    from kdskills.remote.registry import RemoteSkill
    from kdskills.skills.model import Skill
    from kdskills.turn import SkillView

__all__ = ["PublishReport", "Renew", "publish", "publish_tools"]

Renew = Callable[[], "SkillView"]

MAX_PART: Final = 1024 * 1024
"""Bytes of a reference a tool returns."""

_PART: Final[JsonObject] = {
    "type": "object",
    "properties": {
        "part": {"type": "string", "description": "Path of one reference of the skill; without it, its instructions."}
    },
    "additionalProperties": False,
}


async def publish(
    core: SessionCore,
    view: SkillView,
    *,
    route: str = "tools",
    python_tools: Mapping[str, Callable[..., Any]] | None = None,
    renew: Renew | None = None,
) -> PublishReport:
    """Publish the skills of a view in a session; they replace those of an earlier call.

    Args:
        core: The session.
        view: The view whose listed skills are published.
        route: `tools` or `roots`.
        python_tools: Python functions by tool id; those a skill names become `<skill>__<tool>`.
        renew: Returns the current view, at each call; without it *view* stays in use.

    Raises:
        ValueError: There is no such route.
        CatalogError: Names collide or do not fit, or this server cannot have roots.
    """
    if route not in ("tools", "roots"):
        raise ValueError(f"route is tools or roots, not {route!r}")
    async with core.owner.turnstile.turn(ROOTS):  # one at a time: each is compared with what other sessions published
        if route == "roots":
            report = await publish_roots(core, view)
            _withdraw(core, keep=())
            return report
        report = publish_tools(core, view, python_tools=python_tools or {}, renew=renew)
        await take_roots_away(core)
        return report


def _withdraw(core: SessionCore, keep: Iterable[str]) -> None:
    """Unregister the skills published as tools, except those named in *keep*."""
    for name in _published_names(core) - set(keep):
        core.registry.unregister(name)
    core.published_tools = {}


def _published_names(core: SessionCore) -> set[str]:
    """Return the names whose base is a published skill; the program may have registered its own function instead."""
    return {_name(skill) for skill in core.registry.bases() if core.published_tools.get(_name(skill)) is skill}


def publish_tools(
    core: SessionCore,
    view: SkillView,
    *,
    python_tools: Mapping[str, Callable[..., Any]],
    renew: Renew | None,
) -> PublishReport:
    """Publish by route `tools`; see `publish`."""
    check_same_view(view, (session.roots_digest for session in other_sessions(core)))
    names = tool_names(view, python_tools)
    texts = {full_id: text_of(view, full_id) for full_id in view.listed}
    look = renew or (lambda: view)
    new_skills = []
    for name, (full_id, tool_id) in names.items():
        skill = view.listed[full_id]
        if tool_id is None:
            options: dict[str, Any] = {"description": _description(skill), "input_schema": _PART, "idempotent": True}
            handler: Callable[..., Any] = _reader(look, name, full_id)
        else:
            options = {"description": _tool_reason(skill, tool_id)}
            handler = _guarded(look, name, full_id, python_tools[tool_id])
        namespace, _, tool = name.rpartition(".")
        new_skills.append(core.build_skill(tool, handler, namespace=namespace, **options))
    published = _published_names(core)
    neighbours = [(entry.namespace, entry.name) for entry in core.registry.skills() if _name(entry) not in published]
    # All are checked before the first change, so that all are published or none.
    for entry in new_skills:
        check_neighbours(entry.namespace, entry.name, neighbours)
    _withdraw(core, keep=names)
    core.published_tools = {_name(entry): core.registry.register(entry) for entry in new_skills}
    core.published = receipts(texts)
    core.view_digest = view.digest
    diagnostics = tuple(note for _, notes in texts.values() for note in notes)
    reverse = {name: full_id for name, (full_id, _) in names.items()}
    return PublishReport("tools", view.digest, MappingProxyType(reverse), core.published, None, diagnostics)


def _name(skill: RemoteSkill) -> str:
    return f"{skill.namespace}.{skill.name}" if skill.namespace else skill.name


def _reader(look: Renew, name: str, full_id: str) -> Callable[..., Any]:
    def read(part: str | None = None) -> str:
        view = look()
        resolution = view.resolve(full_id)
        if not isinstance(resolution, Granted):
            raise NotRegistered(name)
        if part is None or not part.strip():
            return text_of(view, full_id)[0]
        data = skill_file(resolution.skill, clean_path(part), MAX_PART)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{part!r} is no text") from error

    return read


def _guarded(look: Renew, name: str, full_id: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(look().resolve(full_id), Granted):
            raise NotRegistered(name)
        return handler(*args, **kwargs)

    return call


def _description(skill: Skill) -> str:
    return f"Instructions of the skill {skill.name}: {skill.description}"


def _tool_reason(skill: Skill, tool_id: str) -> str | None:
    skill_tool = next((tool for tool in skill.tools if tool.id == tool_id), None)
    return skill_tool.why or None if skill_tool is not None else None
