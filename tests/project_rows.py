"""What tests look up in the rows of a project: versions that are held, and the trail of changes, which no door tells."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from kdskills.errors import NotFound
from kdskills.projects.records import AUDIT, ProjectRows
from kdskills.projects.service import Projects
from kdskills.storage.database import utc_now


class Held(NamedTuple):
    """A version that stays until its holder lets go, and the skill's folder."""

    version: str
    folder: Path


async def pin(projects: Projects, project: str, name: str, holder: str, *, version: str | None = None) -> Held:
    """Hold a version as running work does, the active one unless *version* names another. Raises NotFound."""
    row = await projects.version(project, name, version)

    def hold(link) -> bool:
        return ProjectRows(link, project, utc_now()).hold(name, row.version, holder)

    if not await projects._database.write(hold):
        raise NotFound("it is gone")
    return Held(row.version, await projects._folders.ensure(project, row))


async def audit(projects: Projects, project: str, *, limit: int = 100) -> list[SimpleNamespace]:
    """Return the latest changes of a project, the latest first."""
    query = AUDIT.select().where(AUDIT.c.project == project).order_by(AUDIT.c.id.desc()).limit(limit)
    rows = await projects._database.read(lambda link: link.execute(query).mappings().all())
    return [SimpleNamespace(**{**row, "facts": json.loads(row["facts"])}) for row in rows]
