"""Schemas of handlers: annotations and docstrings become JSON Schemas, and JSON arguments become what annotations ask for.

`docstrings` reads what is said, `derive` reads annotations and classes, writes schemas and converts arguments, `checks` refuses
explicit schemas that are none, and checks values in time
that grows with them.
"""

from kdskills.remote.schemas.checks import permissive_schema
from kdskills.remote.schemas.derive import ArgumentError, Derived, derive

__all__ = ["ArgumentError", "Derived", "derive", "permissive_schema"]
