"""The HTTP door: routes and OpenAPI derived from the table of operations (spec service §3)."""

from kdskills.doors.web.application import build_app

__all__ = ["build_app"]
