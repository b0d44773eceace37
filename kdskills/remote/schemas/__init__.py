"""Schemas of handlers: annotations and docstrings become JSON Schemas, and JSON arguments become what annotations ask for.

`derive` reads handlers and converts arguments; `checks` refuses what is no schema, and checks values in time that grows with them.
"""

from kdskills.remote.schemas.checks import permissive_schema
from kdskills.remote.schemas.derive import ArgumentError, Derived, derive

__all__ = ["ArgumentError", "Derived", "derive", "permissive_schema"]
