"""The tables of projects and their skills, and what is asked of them, each within a transaction the caller holds.

Nothing of SQLAlchemy is imported before a database is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kdskills.errors import Conflict, Diagnostic, NotFound
from kdskills.projects.model import AuditRow, Project, SkillState, SkillVersion
from kdskills.skills.archives import TreeFile
from kdskills.storage.database import micros, moment_of, upsert, word_type

if TYPE_CHECKING:
    import sqlalchemy as sa


class ProjectTables:
    """The tables, described once per database."""

    def __init__(self) -> None:
        import sqlalchemy as sa

        self.metadata = sa.MetaData()
        self.projects = sa.Table(
            "kd_projects",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("bundle", sa.Text),
            sa.Column("generation", sa.BigInteger, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
        )
        self.skills = self._skills()
        self.versions = self._versions()
        self.pins = self._pins()
        self.audit = self._audit()

    def _key_columns(self) -> tuple[sa.Column[str], sa.Column[str]]:
        import sqlalchemy as sa

        return (
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("name", word_type(256), primary_key=True),
        )

    def _skills(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_project_skills",
            self.metadata,
            *self._key_columns(),
            sa.Column("full_id", word_type(256), nullable=False),
            sa.Column("enabled", sa.Boolean, nullable=False),
            sa.Column("active", sa.String(80)),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("changed_at", sa.BigInteger, nullable=False),
            sa.Column("deleted_at", sa.BigInteger),
        )

    def _versions(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_skill_versions",
            self.metadata,
            *self._key_columns(),
            sa.Column("version", sa.String(80), primary_key=True),
            sa.Column("full_id", word_type(256), nullable=False),
            sa.Column("description", sa.Text, nullable=False),
            sa.Column("tree_digest", sa.String(80), nullable=False),
            sa.Column("files", sa.Text, nullable=False),
            sa.Column("diagnostics", sa.Text, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("created_by", sa.String(200), nullable=False),
            sa.Column("unused_since", sa.BigInteger),
        )

    def _pins(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_skill_pins",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("holder", word_type(200), primary_key=True),
            sa.Column("name", word_type(256), primary_key=True),
            sa.Column("version", sa.String(80), primary_key=True),
            sa.Column("pinned_at", sa.BigInteger, nullable=False),
        )

    def _audit(self) -> sa.Table:
        import sqlalchemy as sa

        number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
        return sa.Table(
            "kd_audit",
            self.metadata,
            sa.Column("id", number, primary_key=True, autoincrement=True),
            sa.Column("at", sa.BigInteger, nullable=False),
            sa.Column("project", word_type(64), nullable=False, index=True),
            sa.Column("who", sa.String(200), nullable=False),
            sa.Column("action", sa.String(80), nullable=False),
            sa.Column("subject", sa.Text, nullable=False),
            sa.Column("facts", sa.Text, nullable=False),
            sa.Column("request_id", sa.String(200), nullable=False),
        )


class SkillsInUse(NamedTuple):
    """A project's bundle and generation, and its uploaded skills, sorted by name.

    Attributes:
        bundle: Folder of its bundle, if its row names one.
        generation: Grows with each change.
        skills: Name, full id, active version and whether it is enabled, of each.
    """

    bundle: str | None
    generation: int
    skills: tuple[tuple[str, str, str | None, bool], ...]


class ProjectRecords:
    """Reads and writes rows; every method runs in the caller's transaction.

    Args:
        tables: The tables.
        clock: Gives the time of changes.
    """

    def __init__(self, tables: ProjectTables, clock: Callable[[], datetime]) -> None:
        self._tables = tables
        self._clock = clock
        self._new_pin: Any = None
        self._new_hold: Any = None

    # Statements that every request asks are made once: making one costs more than what SQLite does for it.

    @cached_property
    def _in_use(self) -> sa.Select[Any]:
        import sqlalchemy as sa

        projects, skills = self._tables.projects, self._tables.skills
        its_own = (skills.c.project == projects.c.project) & skills.c.deleted_at.is_(None)
        columns = (projects.c.bundle, projects.c.generation)
        query = sa.select(*columns, skills.c.name, skills.c.full_id, skills.c.active, skills.c.enabled)
        query = query.select_from(projects.outerjoin(skills, its_own)).where(projects.c.project == sa.bindparam("of"))
        return query.order_by(skills.c.name)

    @cached_property
    def _one_project(self) -> sa.Select[Any]:
        import sqlalchemy as sa

        return self._tables.projects.select().where(self._tables.projects.c.project == sa.bindparam("of"))

    @cached_property
    def _held_version(self) -> sa.Select[Any]:
        import sqlalchemy as sa

        table = self._tables.versions
        mine = self._mine(*(sa.bindparam(f"of_{name}") for name in ("project", "name", "version")))
        return table.select().with_only_columns(table.c.version).where(mine).with_for_update()

    def now(self) -> int:
        """Return the time of a change."""
        return micros(self._clock())

    # ---- projects ------------------------------------------------------------------------------------------------

    def ensure_project(self, link: sa.Connection, project: str) -> None:
        """Make the project if it is not there, and hold its row until the transaction ends."""
        table = self._tables.projects
        new = upsert(link.dialect.name, table).values(project=project, generation=0, created_at=self.now())
        link.execute(new.on_conflict_do_nothing())
        link.execute(table.select().where(table.c.project == project).with_for_update())

    def set_bundle(self, link: sa.Connection, project: str, bundle: str | None) -> None:
        """Set the project's bundle."""
        table = self._tables.projects
        link.execute(table.update().where(table.c.project == project).values(bundle=bundle))

    def projects(self, link: sa.Connection, project: str | None = None) -> list[Project]:
        """Return all projects, or the one asked for, sorted by name."""
        query = self._tables.projects.select().order_by(self._tables.projects.c.project)
        rows = link.execute(query) if project is None else link.execute(self._one_project, {"of": project})
        return [
            Project(row["project"], row["bundle"], row["generation"], moment_of(row["created_at"]))
            for row in rows.mappings()
        ]

    def changed(self, link: sa.Connection, project: str) -> None:
        """Say that what the project's agents see has changed."""
        table = self._tables.projects
        link.execute(table.update().where(table.c.project == project).values(generation=table.c.generation + 1))

    # ---- skills --------------------------------------------------------------------------------------------------

    def skill_row(self, link: sa.Connection, project: str, name: str, *, deleted: bool = False) -> Mapping[str, Any]:
        """Return a skill's row.

        Raises:
            NotFound: There is none, or it was deleted and *deleted* is not asked for.
        """
        table = self._tables.skills
        mine = (table.c.project == project) & (table.c.name == name)
        row = link.execute(table.select().where(mine)).mappings().first()
        if row is None or (row["deleted_at"] is not None and not deleted):
            raise NotFound(f"there is no skill {name!r} in project {project!r}", skill=name, project=project)
        return dict(row)

    def skills(self, link: sa.Connection, project: str, name: str | None = None) -> list[SkillState]:
        """Return the project's skills, or the one asked for, sorted by name."""
        table = self._tables.skills
        query = table.select().where(table.c.project == project, table.c.deleted_at.is_(None)).order_by(table.c.name)
        if name is not None:
            query = query.where(table.c.name == name)
        descriptions = self._descriptions(link, project)
        return [
            SkillState(
                row["name"],
                row["full_id"],
                row["enabled"],
                row["active"],
                descriptions.get((row["name"], row["active"]), descriptions.get((row["name"], None), "")),
                moment_of(row["created_at"]),
                moment_of(row["changed_at"]),
            )
            for row in link.execute(query).mappings()
        ]

    def in_use(self, link: sa.Connection, project: str) -> SkillsInUse | None:
        """Return what a project has now, or None for one that was never made; one question, since every call asks it."""
        rows = link.execute(self._in_use, {"of": project}).all()
        if not rows:
            return None
        skills = tuple(
            (name, full_id, active, enabled) for _, _, name, full_id, active, enabled in rows if name is not None
        )
        return SkillsInUse(rows[0][0], rows[0][1], skills)

    def _descriptions(self, link: sa.Connection, project: str) -> dict[tuple[str, str | None], str]:
        """Return what each version says it does; under None what the latest of a skill says."""
        table = self._tables.versions
        query = table.select().with_only_columns(table.c.name, table.c.version, table.c.description)
        descriptions: dict[tuple[str, str | None], str] = {}
        for name, version, text in link.execute(query.where(table.c.project == project).order_by(table.c.created_at)):
            descriptions[name, version] = descriptions[name, None] = text
        return descriptions

    def claim_skill(self, link: sa.Connection, project: str, name: str, full_id: str) -> Mapping[str, Any]:
        """Make the skill's row, or take it up again if it was deleted; what was said about `enabled` stays.

        Raises:
            Conflict: `id_taken`; another skill of the project has this full id.
        """
        table = self._tables.skills
        query = table.select().where(
            table.c.project == project, table.c.full_id == full_id, table.c.name != name, table.c.deleted_at.is_(None)
        )
        holder = link.execute(query).mappings().first()
        if holder is not None:
            message = f"the skill {holder['name']!r} of project {project!r} has the id {full_id!r} already"
            raise Conflict(message, code="id_taken", skill=holder["name"], full_id=full_id)
        now = self.now()
        fresh = {"created_at": now, "changed_at": now, "enabled": True}
        new = upsert(link.dialect.name, table).values(project=project, name=name, full_id=full_id, **fresh)
        change = {"changed_at": now, "deleted_at": None}  # the id is that of the active version
        link.execute(new.on_conflict_do_update(index_elements=["project", "name"], set_=change))
        return self.skill_row(link, project, name)

    def set_skill(self, link: sa.Connection, project: str, name: str, **values: Any) -> None:
        """Change a skill's row."""
        table = self._tables.skills
        mine = (table.c.project == project) & (table.c.name == name)
        link.execute(table.update().where(mine).values(changed_at=self.now(), **values))

    # ---- versions ------------------------------------------------------------------------------------------------

    def add_version(self, link: sa.Connection, project: str, version: SkillVersion) -> bool:
        """Keep a version; False when it is there already, which then counts as in use again."""
        table = self._tables.versions
        values = {
            "full_id": version.full_id,
            "description": version.description,
            "tree_digest": version.tree_digest,
            "files": json.dumps([list(file) for file in version.files], ensure_ascii=False),
            "diagnostics": json.dumps([finding.to_json() for finding in version.diagnostics], ensure_ascii=False),
            "created_at": micros(version.created_at),
            "created_by": version.created_by,
        }
        new = upsert(link.dialect.name, table).values(
            project=project, name=version.skill, version=version.version, **values
        )
        done = link.execute(new.on_conflict_do_nothing().returning(table.c.version)).first()
        if done is None:
            mine = self._mine(project, version.skill, version.version)
            link.execute(table.update().where(mine).values(unused_since=None))
        return done is not None

    def version_row(
        self, link: sa.Connection, project: str, name: str, version: str, *, hold: bool = False
    ) -> Mapping[str, Any]:
        """Return a version's row; with *hold* nobody else changes it until the transaction ends.

        Raises:
            NotFound: There is none.
        """
        query = self._tables.versions.select().where(self._mine(project, name, version))
        row = link.execute(query.with_for_update() if hold else query).mappings().first()
        if row is None:
            message = f"skill {name!r} of project {project!r} has no version {version!r}"
            raise NotFound(message, skill=name, project=project, version=version)
        return dict(row)

    def versions(self, link: sa.Connection, project: str, name: str) -> list[SkillVersion]:
        """Return a skill's versions, the latest first."""
        active = self.skill_row(link, project, name)["active"]
        pins = self.pin_counts(link, project, name)
        table = self._tables.versions
        query = table.select().where(table.c.project == project, table.c.name == name)
        rows = link.execute(query.order_by(table.c.created_at.desc(), table.c.version)).mappings()
        return [version_of_row(row, row["version"] == active, pins.get(row["version"], 0)) for row in rows]

    def mark_unused(self, link: sa.Connection, project: str, name: str, keep: str | None) -> None:
        """Let the clock of retention begin for every version but *keep*, and stop it for that one."""
        table = self._tables.versions
        mine = (table.c.project == project) & (table.c.name == name)
        idle = mine & table.c.unused_since.is_(None)
        link.execute(table.update().where(idle & (table.c.version != (keep or ""))).values(unused_since=self.now()))
        if keep is not None:
            link.execute(table.update().where(mine & (table.c.version == keep)).values(unused_since=None))

    def unused(self, link: sa.Connection, before: int) -> list[tuple[str, str, str, bool]]:
        """Return `(project, name, version, deleted)` of versions unused since before *before*, the latest first."""
        versions, skills = self._tables.versions, self._tables.skills
        query = (
            versions.select()
            .join(skills, (skills.c.project == versions.c.project) & (skills.c.name == versions.c.name))
            .with_only_columns(versions.c.project, versions.c.name, versions.c.version, skills.c.deleted_at)
            .where(versions.c.unused_since.is_not(None), versions.c.unused_since < before)
            .order_by(versions.c.project, versions.c.name, versions.c.unused_since.desc(), versions.c.version)
        )
        return [(row[0], row[1], row[2], row[3] is not None) for row in link.execute(query)]

    def all_versions(self, link: sa.Connection) -> list[tuple[str, str, str]]:
        """Return `(project, name, version)` of every row."""
        table = self._tables.versions
        query = table.select().with_only_columns(table.c.project, table.c.name, table.c.version)
        return [(row[0], row[1], row[2]) for row in link.execute(query)]

    def forget_version(self, link: sa.Connection, project: str, name: str, version: str) -> None:
        """Remove a version's row."""
        table = self._tables.versions
        link.execute(table.delete().where(self._mine(project, name, version)))

    def _mine(self, project: Any, name: Any, version: Any) -> Any:
        table = self._tables.versions
        return (table.c.project == project) & (table.c.name == name) & (table.c.version == version)

    # ---- pins and audit ------------------------------------------------------------------------------------------

    def pin(self, link: sa.Connection, project: str, name: str, version: str, holder: str) -> None:
        """Let *holder* hold the version; holding it twice is holding it once."""
        values = {"project": project, "holder": holder, "name": name, "version": version, "pinned_at": self.now()}
        if self._new_pin is None:
            self._new_pin = upsert(link.dialect.name, self._tables.pins).on_conflict_do_nothing()
        link.execute(self._new_pin, values)

    def hold(self, link: sa.Connection, project: str, name: str, version: str, holder: str) -> bool:
        """As `pin`, for a version nobody else changes until the transaction ends; False when there is none."""
        key = {"of_project": project, "of_name": name, "of_version": version}
        if self._new_hold is None:
            self._new_hold = self._pin_of_version(link.dialect.name)
        if link.execute(self._new_hold, {**key, "of_holder": holder, "now": self.now()}).first() is not None:
            return True
        return link.execute(self._held_version, key).first() is not None  # it is there, and was held already

    def _pin_of_version(self, dialect: str) -> Any:
        """Return the statement that pins a version if there is one, and returns nothing where it was pinned before."""
        import sqlalchemy as sa

        table, pins = self._tables.versions, self._tables.pins
        holder, now = (
            sa.bindparam("of_holder", type_=pins.c.holder.type),
            sa.bindparam("now", type_=pins.c.pinned_at.type),
        )
        row = self._held_version.with_only_columns(table.c.project, holder, table.c.name, table.c.version, now)
        add = upsert(dialect, pins).from_select(["project", "holder", "name", "version", "pinned_at"], row)
        return add.on_conflict_do_nothing().returning(pins.c.version)

    def unpin(self, link: sa.Connection, project: str, holder: str) -> int:
        """Let *holder* go of everything; return how much that was."""
        table = self._tables.pins
        mine = (table.c.project == project) & (table.c.holder == holder)
        return link.execute(table.delete().where(mine)).rowcount

    def pin_counts(self, link: sa.Connection, project: str, name: str) -> dict[str, int]:
        """Return how many hold each version of a skill."""
        import sqlalchemy as sa

        table = self._tables.pins
        query = sa.select(table.c.version, sa.func.count()).where(table.c.project == project, table.c.name == name)
        return {row[0]: row[1] for row in link.execute(query.group_by(table.c.version))}

    def note(
        self, link: sa.Connection, project: str, author: str, action: str, subject: str, request_id: str, **facts: Any
    ) -> None:
        """Write an audit row, in the same transaction as the change it tells of."""
        values = {"at": self.now(), "project": project, "who": author[:200], "action": action, "subject": subject}
        text = json.dumps(facts, ensure_ascii=False, sort_keys=True)
        link.execute(self._tables.audit.insert().values(facts=text, request_id=request_id[:200], **values))

    def audit(self, link: sa.Connection, project: str, limit: int) -> list[AuditRow]:
        """Return the latest audit rows of a project, the latest first."""
        table = self._tables.audit
        query = table.select().where(table.c.project == project).order_by(table.c.id.desc()).limit(limit)
        return [
            AuditRow(
                moment_of(row["at"]),
                row["project"],
                row["who"],
                row["action"],
                row["subject"],
                json.loads(row["facts"]),
                row["request_id"],
            )
            for row in link.execute(query).mappings()
        ]


def version_of_row(row: Mapping[Any, Any], active: bool, pins: int) -> SkillVersion:
    """Return the version a row holds."""
    return SkillVersion(
        skill=row["name"],
        version=row["version"],
        full_id=row["full_id"],
        description=row["description"],
        files=tuple(TreeFile(*file) for file in json.loads(row["files"])),
        tree_digest=row["tree_digest"],
        active=active,
        pins=pins,
        created_at=moment_of(row["created_at"]),
        created_by=row["created_by"],
        diagnostics=tuple(Diagnostic(**finding) for finding in json.loads(row["diagnostics"])),
    )
