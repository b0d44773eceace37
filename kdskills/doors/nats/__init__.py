"""The door of the command bus: NATS with JetStream (spec service §3)."""

from kdskills.doors.nats.serving import serve

__all__ = ["serve"]
