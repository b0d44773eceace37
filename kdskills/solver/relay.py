"""Turns the events of a session into those of the turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdskills.errors import Diagnostic
from kdskills.solver import events as ev

if TYPE_CHECKING:
    from kdskills.session.events import SessionEvent
    from kdskills.solver.bus import EventBus

Build = Callable[[Mapping[str, Any]], tuple[type[ev.Event], dict[str, Any]]]


def relay_to(bus: EventBus) -> Callable[[SessionEvent], None]:
    """Return a listener for a session that emits the same as events of the turn."""

    def listen(event: SessionEvent) -> None:
        build = _BUILDERS.get(event.type)
        if build is None:
            data = event.data
            code = str(data.get("code", event.type))
            message = str(data.get("message") or f"{event.type}: {code}")
            bus.diagnose(Diagnostic(code, "warning", message, ref=data.get("id")))
            return
        kind, fields = build(event.data)
        bus.emit(kind, **fields)

    return listen


def _loaded(data: Mapping[str, Any]) -> tuple[type[ev.Event], dict[str, Any]]:
    full_id = str(data["id"])
    name = str(data.get("name") or full_id)
    return ev.SkillLoaded, {"skill": full_id, "name": name, "digest": data.get("digest", ""), "by": data.get("by", "")}


def _refused(data: Mapping[str, Any]) -> tuple[type[ev.Event], dict[str, Any]]:
    return ev.SkillRefused, {"ref": str(data["ref"]), "code": data["code"], "reason": str(data.get("reason", ""))}


def _finished(data: Mapping[str, Any]) -> tuple[type[ev.Event], dict[str, Any]]:
    names = ("skill", "path", "engine", "status", "exit_code", "duration_ms")
    fields = {name: data.get(name) for name in names}
    limits = tuple(sorted(data.get("limits", ())))
    return ev.ScriptFinished, {**fields, "level": str(data.get("level", "")), "limits": limits}


def _decided(data: Mapping[str, Any]) -> tuple[type[ev.Event], dict[str, Any]]:
    fields = {name: data.get(name) for name in ("skill", "path")}
    return ev.ApprovalDecided, {**fields, "allowed": bool(data.get("allowed")), "reason": str(data.get("reason", ""))}


_BUILDERS: Mapping[str, Build] = {
    "skill.loaded": _loaded,
    "skill.unloaded": lambda data: (ev.SkillUnloaded, {"skill": data["id"]}),
    "skill.stale": lambda data: (ev.SkillStale, {"skill": data["id"]}),
    "skill.pruned": lambda data: (ev.SkillPruned, {"skill": data["id"]}),
    "skill.refused": _refused,
    "catalog.truncated": lambda data: (ev.CatalogTruncated, {"level": data["level"]}),
    "approval.requested": lambda data: (ev.ApprovalRequested, {n: data.get(n) for n in ("skill", "path")}),
    "approval.decided": _decided,
    "script.started": lambda data: (ev.ScriptStarted, {n: data.get(n) for n in ("skill", "path", "engine")}),
    "script.finished": _finished,
}
