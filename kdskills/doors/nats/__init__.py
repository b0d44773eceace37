"""The door of the command bus: NATS with JetStream."""

from kdskills.doors.nats.gateway import serve

__all__ = ["serve"]
