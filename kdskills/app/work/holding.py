"""Work holds the uploaded versions it uses: deleting or activating changes nothing for what runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from kdskills.app.host import Host

_LOG = logging.getLogger("kdskills.service")


async def hold(host: Host, project: str, holder: str, versions: Mapping[str, str]) -> int:
    """Hold versions of uploaded skills for a task or job; `upkeep` lets go of them when it is over.

    The work is submitted already, so what cannot be held is logged: retention keeps what was active lately anyway.

    Args:
        host: Whose projects.
        project: Whose skills.
        holder: Id of the work.
        versions: What the work uses, by the skill's name.

    Returns:
        How many are held.
    """
    held = 0
    for name, version in versions.items():
        try:
            await host.projects.pin(project, name, holder, version=version)
            held += 1
        except KdskillsError as error:
            _LOG.warning("%s does not hold %s: %s", holder, name, error.code)
    return held
