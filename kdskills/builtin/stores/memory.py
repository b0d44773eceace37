"""`memory:`: sessions in this process, gone with it."""

from __future__ import annotations

from collections.abc import Callable

from kdskills.hooks import Register, hookimpl
from kdskills.session.store import MemoryStore, SessionStore


@hookimpl
def kdskills_register_stores(register: Register[Callable[[str], SessionStore]]) -> None:
    """Add the scheme `memory`."""
    register("memory", lambda url: MemoryStore())
