"""Schemas of handlers: annotations and docstrings become JSON Schemas, and JSON arguments become what annotations ask for.

`derive` is the way in. `hints` resolves annotations, `shapes` reads classes, `infer` writes schemas, `convert` goes the other
way, `docstrings` reads Google docstrings, `checks` refuses given schemas that are none.
"""

from kdskills.remote.schemas.convert import ArgumentError
from kdskills.remote.schemas.derive import Derived, derive, permissive_schema

__all__ = ["ArgumentError", "Derived", "derive", "permissive_schema"]
