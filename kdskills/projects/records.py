"""Projects, skills and versions as values, the grammar of their names, their tables, and what is asked of these.

Importing this imports SQLAlchemy: nothing does before a database is opened.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from kdskills.errors import Conflict, Diagnostic, NotFound
from kdskills.skills.safe_open import TreeFile
from kdskills.storage.database import micros, moment_of, upsert, word_type


@dataclass(frozen=True, slots=True)
class Author:
    """Who changes something, as audit rows tell it: `who` names door and caller, `token` is the public id of a token."""

    who: str
    token: str | None = None
    agent: str = ""
    address: str = ""
    request_id: str = ""

    @classmethod
    def bounded(cls, author: Author | str) -> Author:
        """Return who it is, cut to what a row holds; a mere name is somebody who came through no door."""
        if isinstance(author, str):
            return cls(author[:200])
        return cls(author.who[:200], author.token, author.agent[:128], author.address[:64], author.request_id[:200])


@dataclass(frozen=True, slots=True)
class Project:
    """One project.

    `bundle` is a folder on the service's machine; `generation` grows with every change of what its agents see.
    """

    name: str
    bundle: str | None
    generation: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class SkillState:
    """An uploaded skill: `active` is the version in use, `description` that version's, else the latest one's.

    Uploading and activating never change `enabled`, without which the gate grants nothing.
    """

    name: str
    full_id: str
    enabled: bool
    active: str | None
    description: str
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class SkillVersion:
    """One version of an uploaded skill, `pins` times held by running work.

    `version` is the hash of the normalised tree, `tree_digest` that without execute bits, as exports and mounts compare
    it.
    """

    skill: str
    version: str
    full_id: str
    description: str
    files: tuple[TreeFile, ...]
    tree_digest: str
    active: bool
    pins: int
    created_at: datetime
    created_by: str
    diagnostics: tuple[Diagnostic, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What an upload came to: `created` tells whether the version is new, `active` whether it is in use now."""

    skill: str
    version: str
    diagnostics: tuple[Diagnostic, ...]
    created: bool
    active: bool
    enabled: bool


@dataclass(frozen=True, slots=True)
class SkillFile:
    """One file of a version, on this machine."""

    path: Path
    file: TreeFile


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What retention removed: `skill@version` texts, and leftovers of processes that died."""

    versions: tuple[str, ...]
    leftovers: int


METADATA: Final = sa.MetaData()


def _key(*names: str) -> list[sa.Column[str]]:
    lengths = {"project": 64, "holder": 200, "name": 256}
    return [sa.Column(name, word_type(lengths[name]), primary_key=True) for name in names]


PROJECTS: Final = sa.Table(
    "kd_projects",
    METADATA,
    *_key("project"),
    sa.Column("bundle", sa.Text),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
)
SKILLS: Final = sa.Table(
    "kd_project_skills",
    METADATA,
    *_key("project", "name"),
    sa.Column("full_id", word_type(256), nullable=False),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("active", sa.String(80)),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("changed_at", sa.BigInteger, nullable=False),
    sa.Column("deleted_at", sa.BigInteger),
)
VERSIONS: Final = sa.Table(
    "kd_skill_versions",
    METADATA,
    *_key("project", "name"),
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
PINS: Final = sa.Table(
    "kd_skill_pins",
    METADATA,
    *_key("project", "holder", "name"),
    sa.Column("version", sa.String(80), primary_key=True),
    sa.Column("pinned_at", sa.BigInteger, nullable=False),
)
AUDIT: Final = sa.Table(
    "kd_audit",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("project", word_type(64), nullable=False),
    sa.Column("who", sa.String(200), nullable=False),
    sa.Column("action", sa.String(80), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("request_id", sa.String(200), nullable=False),
    sa.Column("token", word_type(32)),
    sa.Column("agent", word_type(128), nullable=False, server_default=""),
    sa.Column("address", sa.String(64), nullable=False, server_default=""),
    sa.Column("skill", word_type(256)),
    sa.Index("kd_audit_listing", "project", "id"),
)

# Statements that every request asks are made once: making one costs more than what SQLite does for it.
_IN_USE: Final = (
    sa.select(
        PROJECTS.c.bundle, PROJECTS.c.generation, SKILLS.c.name, SKILLS.c.full_id, SKILLS.c.active, SKILLS.c.enabled
    )
    .select_from(PROJECTS.outerjoin(SKILLS, (SKILLS.c.project == PROJECTS.c.project) & SKILLS.c.deleted_at.is_(None)))
    .where(PROJECTS.c.project == sa.bindparam("of"))
    .order_by(SKILLS.c.name)
)
_HELD_VERSION: Final = (
    sa.select(VERSIONS.c.version)
    .where(*(VERSIONS.c[name] == sa.bindparam(f"of_{name}") for name in ("project", "name", "version")))
    .with_for_update()
)


@cache
def _new_pin(dialect: str) -> Any:
    """Return the statement that pins a version if there is one, and returns nothing where it was pinned before."""
    holder = sa.bindparam("of_holder", type_=PINS.c.holder.type)
    now = sa.bindparam("now", type_=PINS.c.pinned_at.type)
    row = _HELD_VERSION.with_only_columns(VERSIONS.c.project, holder, VERSIONS.c.name, VERSIONS.c.version, now)
    add = upsert(dialect, PINS).from_select(["project", "holder", "name", "version", "pinned_at"], row)
    return add.on_conflict_do_nothing().returning(PINS.c.version)


def all_projects(link: sa.Connection) -> list[Project]:
    """Return all projects, sorted by name."""
    return [_project(row) for row in link.execute(PROJECTS.select().order_by(PROJECTS.c.project))]


def all_versions(link: sa.Connection) -> list[tuple[str, str, str]]:
    """Return `(project, name, version)` of every row."""
    query = sa.select(VERSIONS.c.project, VERSIONS.c.name, VERSIONS.c.version)
    return [(project, name, version) for project, name, version in link.execute(query)]


def all_holders(link: sa.Connection) -> list[tuple[str, str]]:
    """Return every `(project, holder)` that holds a version."""
    query = sa.select(PINS.c.project, PINS.c.holder).distinct()
    return [(project, holder) for project, holder in link.execute(query)]


def unused(link: sa.Connection, before: int) -> list[tuple[str, str, str, bool]]:
    """Return `(project, name, version, deleted)` of versions unused since before *before*, the latest first."""
    query = (
        sa.select(VERSIONS.c.project, VERSIONS.c.name, VERSIONS.c.version, SKILLS.c.deleted_at.is_not(None))
        .join(SKILLS, (SKILLS.c.project == VERSIONS.c.project) & (SKILLS.c.name == VERSIONS.c.name))
        .where(VERSIONS.c.unused_since.is_not(None), VERSIONS.c.unused_since < before)
        .order_by(VERSIONS.c.project, VERSIONS.c.name, VERSIONS.c.unused_since.desc(), VERSIONS.c.version)
    )
    return [(project, name, version, bool(deleted)) for project, name, version, deleted in link.execute(query)]


class ProjectRows:
    """The rows of one project, within a transaction the caller holds; *now* is the time of changes."""

    def __init__(self, link: sa.Connection, project: str, now: datetime) -> None:
        self._link = link
        self._project = project
        self.now = micros(now)

    def ensure(self) -> None:
        """Make the project if it is not there, and hold its row until the transaction ends."""
        new = upsert(self._link.dialect.name, PROJECTS).values(project=self._project, generation=0, created_at=self.now)
        self._link.execute(new.on_conflict_do_nothing())
        self._link.execute(PROJECTS.select().where(PROJECTS.c.project == self._project).with_for_update())

    def change(self, **values: Any) -> None:
        """Change the project's row, and say that what its agents see has changed."""
        update = PROJECTS.update().where(PROJECTS.c.project == self._project)
        self._link.execute(update.values(generation=PROJECTS.c.generation + 1, **values))

    def get(self) -> Project | None:
        """Return the project, or None for one that was never made."""
        row = self._link.execute(PROJECTS.select().where(PROJECTS.c.project == self._project)).first()
        return None if row is None else _project(row)

    def in_use(self) -> list[Any]:
        """Return bundle, generation, name, full id, active version and whether it is enabled, a row a skill, sorted by name.

        Every call asks this, so it is one question: a project without skills has one row without a name, one that was
        never made has none.
        """
        return list(self._link.execute(_IN_USE, {"of": self._project}))

    def skill(self, name: str) -> Any:
        """Return a skill's row. Raises NotFound: There is none, or it was deleted."""
        row = self._link.execute(SKILLS.select().where(self._of(SKILLS, name))).first()
        if row is None or row.deleted_at is not None:
            message = f"there is no skill {name!r} in project {self._project!r}"
            raise NotFound(message, skill=name, project=self._project)
        return row

    def skills(self, name: str | None = None) -> list[SkillState]:
        """Return the project's skills, or the one asked for, sorted by name."""
        query = SKILLS.select().where(self._of(SKILLS, name), SKILLS.c.deleted_at.is_(None)).order_by(SKILLS.c.name)
        texts: dict[tuple[str, str | None], str] = {}  # under None what the latest version of a skill says
        described = sa.select(VERSIONS.c.name, VERSIONS.c.version, VERSIONS.c.description)
        described = described.where(self._of(VERSIONS, name)).order_by(VERSIONS.c.created_at)
        for skill, version, text in self._link.execute(described):
            texts[skill, version] = texts[skill, None] = text
        return [
            SkillState(
                name=row.name,
                full_id=row.full_id,
                enabled=row.enabled,
                active=row.active,
                description=texts.get((row.name, row.active), texts.get((row.name, None), "")),
                created_at=moment_of(row.created_at),
                changed_at=moment_of(row.changed_at),
            )
            for row in self._link.execute(query)
        ]

    def claim_skill(self, name: str, full_id: str) -> Any:
        """Make the skill's row, or take it up again if it was deleted; what was said about `enabled` stays.

        Raises Conflict, `id_taken`, when another skill of the project has this full id.
        """
        others = self._of(SKILLS) & (SKILLS.c.full_id == full_id) & (SKILLS.c.name != name)
        holder = self._link.execute(SKILLS.select().where(others, SKILLS.c.deleted_at.is_(None))).first()
        if holder is not None:
            message = f"the skill {holder.name!r} of project {self._project!r} has the id {full_id!r} already"
            raise Conflict(message, code="id_taken", skill=holder.name, full_id=full_id)
        fresh = {"created_at": self.now, "changed_at": self.now, "enabled": True}
        new = upsert(self._link.dialect.name, SKILLS).values(project=self._project, name=name, full_id=full_id, **fresh)
        change = {"changed_at": self.now, "deleted_at": None}  # the id is that of the active version
        self._link.execute(new.on_conflict_do_update(index_elements=["project", "name"], set_=change))
        return self.skill(name)

    def set_skill(self, name: str, **values: Any) -> None:
        """Change a skill's row."""
        self._link.execute(SKILLS.update().where(self._of(SKILLS, name)).values(changed_at=self.now, **values))

    def add_version(self, version: SkillVersion) -> bool:
        """Keep a version; False when it is there already, which then counts as in use again."""
        new = upsert(self._link.dialect.name, VERSIONS).values(
            project=self._project,
            name=version.skill,
            version=version.version,
            full_id=version.full_id,
            description=version.description,
            tree_digest=version.tree_digest,
            files=json.dumps([list(file) for file in version.files], ensure_ascii=False),
            diagnostics=json.dumps([finding.to_json() for finding in version.diagnostics], ensure_ascii=False),
            created_at=micros(version.created_at),
            created_by=version.created_by,
        )
        if self._link.execute(new.on_conflict_do_nothing().returning(VERSIONS.c.version)).first() is not None:
            return True
        mine = self._of(VERSIONS, version.skill, version.version)
        self._link.execute(VERSIONS.update().where(mine).values(unused_since=None))
        return False

    def version_row(self, name: str, version: str, *, hold: bool = False) -> Any:
        """Return a version's row; with *hold* nobody else changes it until the transaction ends. Raises NotFound."""
        query = VERSIONS.select().where(self._of(VERSIONS, name, version))
        row = self._link.execute(query.with_for_update() if hold else query).first()
        if row is None:
            message = f"skill {name!r} of project {self._project!r} has no version {version!r}"
            raise NotFound(message, skill=name, project=self._project, version=version)
        return row

    def versions(self, name: str) -> list[SkillVersion]:
        """Return a skill's versions, the latest first. Raises NotFound."""
        active, pins = self.skill(name).active, self.pin_counts(name)
        query = VERSIONS.select().where(self._of(VERSIONS, name))
        rows = self._link.execute(query.order_by(VERSIONS.c.created_at.desc(), VERSIONS.c.version))
        return [version_of_row(row, row.version == active, pins.get(row.version, 0)) for row in rows]

    def version(self, name: str, version: str | None) -> SkillVersion:
        """Return one version of a skill, the active one unless *version* names another. Raises NotFound."""
        active = self.skill(name).active
        if version is None and active is None:
            message = f"skill {name!r} of project {self._project!r} has no active version"
            raise NotFound(message, skill=name, project=self._project)
        row = self.version_row(name, version or active)
        return version_of_row(row, row.version == active, self.pin_counts(name).get(row.version, 0))

    def use(self, name: str, version: str | None, **values: Any) -> None:
        """Make *version* the active one of a skill, or none, and let the clock of retention begin for the others."""
        self.set_skill(name, active=version, **values)
        self.mark_unused(name, version)
        self.change()

    def mark_unused(self, name: str, keep: str | None) -> None:
        """Let the clock of retention begin for every version but *keep*, and stop it for that one."""
        mine = self._of(VERSIONS, name)
        others = mine & VERSIONS.c.unused_since.is_(None) & (VERSIONS.c.version != (keep or ""))
        self._link.execute(VERSIONS.update().where(others).values(unused_since=self.now))
        if keep is not None:
            self._link.execute(VERSIONS.update().where(mine, VERSIONS.c.version == keep).values(unused_since=None))

    def forget_version(self, name: str, version: str) -> None:
        """Remove a version's row."""
        self._link.execute(VERSIONS.delete().where(self._of(VERSIONS, name, version)))

    def hold(self, name: str, version: str, holder: str) -> bool:
        """Let *holder* hold a version, which nobody else changes until the transaction ends; False when there is none.

        Holding it twice is holding it once.
        """
        key = {"of_project": self._project, "of_name": name, "of_version": version}
        pin = _new_pin(self._link.dialect.name)
        if self._link.execute(pin, {**key, "of_holder": holder, "now": self.now}).first() is not None:
            return True
        return self._link.execute(_HELD_VERSION, key).first() is not None  # it is there, and was held already

    def unpin(self, holder: str) -> int:
        """Let *holder* go of everything; return how much that was."""
        return self._link.execute(PINS.delete().where(self._of(PINS), PINS.c.holder == holder)).rowcount

    def pin_counts(self, name: str) -> dict[str, int]:
        """Return how many hold each version of a skill."""
        query = sa.select(PINS.c.version, sa.func.count()).where(self._of(PINS, name)).group_by(PINS.c.version)
        return {row[0]: row[1] for row in self._link.execute(query)}

    def note(self, author: Author | str, action: str, subject: str, *, skill: str | None = None, **facts: Any) -> None:
        """Write an audit row, in the same transaction as the change it tells of; *skill* is the one it is about."""
        row = {"at": self.now, "project": self._project, "action": action, "subject": subject, "skill": skill}
        text = json.dumps(facts, ensure_ascii=False, sort_keys=True)
        self._link.execute(AUDIT.insert().values(facts=text, **row, **asdict(Author.bounded(author))))

    def _of(self, table: sa.Table, name: str | None = None, version: str | None = None) -> sa.ColumnElement[bool]:
        """Return the condition that a row of *table* is this project's, of that skill and of that version."""
        parts = {"project": self._project, "name": name, "version": version}
        return sa.and_(*(table.c[column] == value for column, value in parts.items() if value is not None))


def _project(row: Any) -> Project:
    return Project(row.project, row.bundle, row.generation, moment_of(row.created_at))


def version_of_row(row: Any, active: bool, pins: int) -> SkillVersion:
    """Return the version a row holds."""
    return SkillVersion(
        skill=row.name,
        version=row.version,
        full_id=row.full_id,
        description=row.description,
        files=tuple(TreeFile(*file) for file in json.loads(row.files)),
        tree_digest=row.tree_digest,
        active=active,
        pins=pins,
        created_at=moment_of(row.created_at),
        created_by=row.created_by,
        diagnostics=tuple(Diagnostic(**finding) for finding in json.loads(row.diagnostics)),
    )
