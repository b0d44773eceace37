"""The HTTP door: routes and OpenAPI derived from the table of operations."""

from kdskills.doors.web.application import build_app, run

__all__ = ["build_app", "run"]
