"""Who calls over the bus: project and channel of the subject, and what the operator's settings give them."""

from __future__ import annotations

from kdskills.app.identity import LOCAL, Identity
from kdskills.app.settings import BusSettings
from kdskills.doors.nats.subjects import CallAddress
from kdskills.errors import CallRefused


def identity_of(address: CallAddress, settings: BusSettings) -> Identity:
    """Return the caller a subject names.

    Raises:
        CallRefused: The bus is not open to the project, or to the channel. A channel that happens to be called like the
            account kdskills runs as is not that account: only a setting of its own makes it so.
    """
    if address.project not in settings.projects:
        raise CallRefused(f"the bus is not open to project {address.project!r}", code="project_not_open")
    agent = settings.channels.get(address.channel, settings.channels.get("*"))
    if agent is None or (address.channel == LOCAL.agent and agent == "*"):
        raise CallRefused(f"no agent is set for channel {address.channel!r}", code="channel_not_open")
    return Identity(
        project=address.project,
        agent=address.channel if agent == "*" else agent,
        alias=address.channel,
        scopes=frozenset(settings.scopes),
        person=settings.person,
        tools=frozenset(settings.tools),
        door="nats",
    )
