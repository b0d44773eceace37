"""Whose work it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.jobs.model import Scope

if TYPE_CHECKING:
    from kdskills.app.identity import Identity


def scope_of(identity: Identity) -> Scope:
    """Return whose work it is that *identity* starts and sees."""
    return Scope(tenant=identity.tenant, project=identity.project, agent=identity.agent, alias=identity.alias)
