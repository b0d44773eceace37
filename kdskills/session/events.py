"""What a session tells about itself: `skill.*`, `script.*`, `approval.*` and `catalog.truncated`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_LOG = logging.getLogger("kdskills.session")


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One thing that happened in a session; a turn adds its number, time and ids.

    Attributes:
        type: `skill.loaded`, `skill.unloaded`, `skill.stale`, `skill.pruned`, `skill.refused`, `catalog.truncated`,
            `approval.requested`, `approval.decided`, `script.started`, `script.finished`, `diagnostic`.
        session_id: The session it happened in.
        data: JSON-able facts; hidden skills appear under their alias, values of `env` never.
    """

    type: str
    session_id: str
    data: Mapping[str, Any] = field(default_factory=dict)


Sink = Callable[[SessionEvent], None]


def send(sink: Sink | None, event: SessionEvent) -> None:
    """Hand *event* to *sink*; a sink that fails is logged and never undoes what happened."""
    if sink is None:
        return
    try:
        sink(event)
    except Exception:  # noqa: BLE001 - a listener may fail in any way; what happened stays, and the log says so
        _LOG.exception("an event sink failed on %s", event.type)
