"""`db.upgrade`: bring the service's tables up to date."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.jobs.database import Database
from kdskills.jobs.folder import database_folder
from kdskills.jobs.migrate import HEADS, current, upgrade

if TYPE_CHECKING:
    from kdskills.app.host import Host


class UpgradeInput(Input):
    """Which database is a setting."""


class UpgradedPart(Output):
    """One part's tables: the revision they are at, and whether they were changed just now."""

    part: str
    revision: str
    changed: bool


class UpgradeOut(Output):
    """What was done; parts sorted by name."""

    parts: tuple[UpgradedPart, ...]


async def upgrade_all(host: Host, arguments: UpgradeInput, context: Context) -> UpgradeOut:
    """Upgrade every part, one after the other; what is up to date stays as it is."""
    return await asyncio.to_thread(_upgrade, host.settings.work_database, host.settings.state_dir)


def _upgrade(url: str, state_dir: Path) -> UpgradeOut:
    database_folder(url, state_dir)
    database = Database(url, label="the service's database")
    try:
        done = {part: upgrade(database, part) for part in sorted(HEADS)}
        revisions = database.ask(current)
    finally:
        database.close()
    return UpgradeOut(
        parts=tuple(
            UpgradedPart(part=part, revision=HEADS[part] if HEADS[part] in revisions else "", changed=changed)
            for part, changed in done.items()
        )
    )


UPGRADE = Implementation(UpgradeInput, UpgradeOut, ("database_unavailable", "missing_extra"), upgrade_all)
