"""What a Host keeps: its database, its projects and its tokens, opened when they are first used."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.identity import LOCAL
from kdskills.storage.database import Database, sqlite_file, upgrade
from kdskills.storage.folder import database_folder

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.tokens import Tokens
    from kdskills.projects.service import Projects


class Storage:
    """The database of *host* and what is kept in it. Nothing is made on disk before something is asked or written."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._present = False

    @property
    def present(self) -> bool:
        """Whether there may be anything to read: reading must not make a database nobody asked for."""
        if not self._present:  # every call asks; once there is a database it stays
            file = sqlite_file(self._host.settings.work_database)
            self._present = file is None or file.exists()
        return self._present

    @cached_property
    def database(self) -> Database:
        """The database.

        Raises:
            MissingExtra: What it needs is not installed.
        """
        return Database(self._host.settings.work_database, label="the service's database", prepare=self._prepare)

    @cached_property
    def projects(self) -> Projects:
        """Projects, their skills and versions. Raises as `database`."""
        from kdskills.jobs.artifacts.store import open_blobs
        from kdskills.projects.service import Projects
        from kdskills.projects.views import ProjectViews

        views = ProjectViews(self._host.subsystem, self._host.bundle)
        settings = self._host.settings
        blobs = None if settings.artifacts is None else open_blobs(settings.artifacts)
        return Projects(self.database, settings.state_dir, views, bundle_of=self._bundle_of, blobs=blobs)

    @cached_property
    def tokens(self) -> Tokens:
        """Tokens. Raises as `database`."""
        from kdskills.app.tokens import Tokens

        return Tokens(self.database)

    async def aclose(self) -> None:
        """Close the connections, if any were opened."""
        if "database" in self.__dict__:
            await self.database.aclose()

    def _bundle_of(self, project: str) -> Path | None:
        return self._host.settings.bundle if project == LOCAL.project else None

    def _prepare(self, database: Database) -> None:
        database_folder(self._host.settings.work_database, self._host.settings.state_dir)
        upgrade(database, "service")
