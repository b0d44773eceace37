"""Whose work it is (spec work §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.jobs.model import Scope

if TYPE_CHECKING:
    from kdskills.app.identity import Identity


def scope_of(identity: Identity) -> Scope:
    """Return whose work it is that *identity* starts and sees (spec work §5)."""
    return Scope(tenant=identity.tenant, project=identity.project, agent=identity.agent, alias=identity.alias)
