"""Work holds the uploaded versions it uses: deleting or activating changes nothing for what runs (spec service §1)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.execution.request import SkillMount

_LOG = logging.getLogger("kdskills.service")


async def hold(host: Host, project: str, holder: str, mounts: Sequence[SkillMount]) -> int:
    """Hold the versions of uploaded skills among *mounts* for a task or job; `upkeep` lets go of them when it is over.

    The work is submitted already, so what cannot be held is logged: retention keeps what was active lately anyway.

    Args:
        host: Whose projects.
        project: Whose skills.
        holder: Id of the work.
        mounts: What the work sees.
    """
    if not host.storage.present or not await host.projects.known(project):
        return 0
    held, trees = 0, {mount.id: mount.tree for mount in mounts}
    for state in await host.projects.list(project):
        tree = trees.get(state.full_id)
        if tree is None:
            continue
        try:
            versions = await host.projects.versions(project, state.name)
            version = next((found.version for found in versions if found.tree_digest == tree), None)
            if version is not None:
                await host.projects.pin(project, state.name, holder, version=version)
                held += 1
        except KdskillsError as error:
            _LOG.warning("%s does not hold %s: %s", holder, state.name, error.code)
    return held
