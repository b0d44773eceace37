"""`sqlite:` and `postgresql:`: sessions in a database, shared by processes and, with PostgreSQL, by machines.

One implementation on SQLAlchemy Core. Every change is a compare-and-set on the record's version, in one transaction with
the references to the texts it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kdskills.hooks import Register, hookimpl
from kdskills.session.store import (
    ImportedSkill,
    LoadedSkill,
    SessionHead,
    SessionRecord,
    SessionStore,
    StoreConflict,
    StoreUnavailable,
)
from kdskills.storage.database import Database, LazyModule, micros, moment_of, upsert, utc_now, word_type

if TYPE_CHECKING:
    import sqlalchemy as sa
else:
    sa = LazyModule("sqlalchemy")

STORE_NAME = "the session store"


def entries_to_text(record: SessionRecord) -> str:
    """Return the record's entries as JSON text."""
    rows = [
        {
            "id": entry.id,
            "digest": entry.digest,
            "tree": entry.tree_digest,
            "at": micros(entry.loaded_at),
            "by": entry.loaded_by,
            "imports": [[item.id, item.digest, item.tree_digest] for item in entry.imports],
        }
        for entry in record.active
    ]
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=False)


def entries_of_text(text: str) -> tuple[LoadedSkill, ...]:
    """Return the entries written by `entries_to_text`."""

    def entry(row: dict[str, Any]) -> LoadedSkill:
        imports = tuple(ImportedSkill(*item) for item in row["imports"])
        return LoadedSkill(row["id"], row["digest"], row["tree"], moment_of(row["at"]), row["by"], imports)

    return tuple(map(entry, json.loads(text)))


class SqlStore:
    """Keeps sessions in the database at *url*; tables are made when they are not there.

    *url* is `sqlite:///path` or `postgresql://…`. A text no session refers to goes with the next purge, once it is older
    than what the purge forgets.

    Raises:
        MissingExtra: SQLAlchemy or the database's driver is not installed.
        StoreUnavailable: The database cannot be opened.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = clock
        self._database = Database(url, label=STORE_NAME, failure=StoreUnavailable)
        word, metadata = word_type(200), sa.MetaData()
        self._sessions = sa.Table(
            "kd_sessions",
            metadata,
            sa.Column("session_id", word, primary_key=True),
            sa.Column("consumer", sa.String(500), nullable=False, index=True),
            sa.Column("version", sa.Integer, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("touched_at", sa.BigInteger, nullable=False, index=True),
            sa.Column("max_active", sa.Integer),
            sa.Column("active", sa.Text, nullable=False),
        )
        # A table of its own, so that databases made before there was one go on working.
        self._shown = sa.Table(
            "kd_session_shown",
            metadata,
            sa.Column("session_id", word, primary_key=True),
            sa.Column("shown", sa.Text, nullable=False),
        )
        self._uses = sa.Table(
            "kd_session_texts",
            metadata,
            sa.Column("session_id", word, primary_key=True),
            sa.Column("digest", sa.String(80), primary_key=True, index=True),
        )
        self._texts = sa.Table(
            "kd_skill_texts",
            metadata,
            sa.Column("digest", sa.String(80), primary_key=True),
            sa.Column("body", sa.Text, nullable=False),
            sa.Column("kept_at", sa.BigInteger, nullable=False),
        )
        self._database.create(metadata)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._database.aclose()

    async def get(self, session_id: str) -> SessionRecord | None:
        """Return the record, or None."""
        return await self._database.read(lambda link: self._record(link, session_id))

    async def put(self, record: SessionRecord, *, expect: int | None) -> None:
        """Keep *record* if the kept version is *expect*; raises StoreConflict otherwise."""
        await self._database.write(lambda link: self._write(link, record, expect))

    async def touch(self, session_id: str, at: datetime) -> bool:
        """Renew the idle clock, never backwards; False for an unknown id."""
        table = self._sessions

        def change(link: sa.Connection) -> bool:
            is_session = table.c.session_id == session_id
            older = table.c.touched_at < micros(at)
            link.execute(table.update().where(is_session, older).values(touched_at=micros(at)))
            return link.execute(table.select().with_only_columns(table.c.version).where(is_session)).first() is not None

        return await self._database.write(change)

    async def delete(self, session_id: str) -> bool:
        """Forget the session; False for an unknown id."""

        def change(link: sa.Connection) -> bool:
            for table in (self._uses, self._shown):
                link.execute(table.delete().where(table.c.session_id == session_id))
            table = self._sessions
            return link.execute(table.delete().where(table.c.session_id == session_id)).rowcount > 0

        return await self._database.write(change)

    async def page(self, *, consumer: str | None, after: str | None, limit: int) -> list[SessionHead]:
        """Return up to *limit* heads sorted by id."""
        table = self._sessions
        query = table.select().order_by(table.c.session_id).limit(limit)
        if consumer is not None:
            query = query.where(table.c.consumer == consumer)
        if after is not None:
            query = query.where(table.c.session_id > after)
        rows = await self._database.read(lambda link: link.execute(query).mappings().all())
        return [record_of(row).head() for row in rows]

    async def purge(self, idle_before: datetime) -> int:
        """Forget every session touched before *idle_before*, and texts nobody refers to any longer."""
        sessions, uses, texts, shown = self._sessions, self._uses, self._texts, self._shown
        idle = sessions.c.touched_at < micros(idle_before)

        def change(link: sa.Connection) -> int:
            idle_sessions = sa.select(sessions.c.session_id).where(idle)
            link.execute(uses.delete().where(uses.c.session_id.in_(idle_sessions)))
            link.execute(shown.delete().where(shown.c.session_id.in_(idle_sessions)))
            count = link.execute(sessions.delete().where(idle)).rowcount
            unused = texts.c.digest.not_in(sa.select(uses.c.digest))
            link.execute(texts.delete().where(unused, texts.c.kept_at < micros(idle_before)))
            return count

        return await self._database.write(change)

    async def put_body(self, digest: str, text: str) -> None:
        """Keep the SKILL.md text of *digest*; keeping it again renews how long it stays unused."""
        table = self._texts
        values = {"digest": digest, "body": text, "kept_at": micros(self._clock())}

        def change(link: sa.Connection) -> None:
            statement = upsert(link.dialect.name, table).values(values)
            renewal = {"kept_at": statement.excluded.kept_at}
            link.execute(statement.on_conflict_do_update(index_elements=["digest"], set_=renewal))

        await self._database.write(change)

    async def get_body(self, digest: str) -> str | None:
        """Return the SKILL.md text of *digest*, or None."""
        table = self._texts
        query = table.select().with_only_columns(table.c.body).where(table.c.digest == digest)
        return await self._database.read(lambda link: link.execute(query).scalar())

    def _record(self, link: sa.Connection, session_id: str) -> SessionRecord | None:
        table, shown = self._sessions, self._shown
        both = table.outerjoin(shown, table.c.session_id == shown.c.session_id)
        query = sa.select(table, shown.c.shown).select_from(both).where(table.c.session_id == session_id)
        row = link.execute(query).mappings().first()
        return None if row is None else record_of(row)

    def _write(self, link: sa.Connection, record: SessionRecord, expect: int | None) -> None:
        table = self._sessions
        values = {
            "consumer": record.consumer,
            "version": record.version,
            "created_at": micros(record.created_at),
            "touched_at": micros(record.touched_at),
            "max_active": record.max_active,
            "active": entries_to_text(record),
        }
        is_session = table.c.session_id == record.session_id
        if expect is None:
            new = upsert(link.dialect.name, table).values(session_id=record.session_id, **values)
            written_row = link.execute(new.on_conflict_do_nothing().returning(table.c.version)).first()
        else:
            change = table.update().where(is_session, table.c.version == expect).values(values)
            written_row = link.execute(change.returning(table.c.version)).first()
        if written_row is None:
            stored = self._record(link, record.session_id)
            stored_version = None if stored is None else stored.version
            words = f"session {record.session_id} is at version {stored_version}, not {expect}"
            raise StoreConflict(words, expected=expect, found=stored_version)
        link.execute(self._uses.delete().where(self._uses.c.session_id == record.session_id))
        self._write_shown(link, record)
        rows = [{"session_id": record.session_id, "digest": digest} for digest in sorted(record.digests)]
        if rows:
            link.execute(self._uses.insert(), rows)

    def _write_shown(self, link: sa.Connection, record: SessionRecord) -> None:
        """Write what the session was shown; a session that never was shown less than all has no row."""
        if record.listed or record.located:
            text = json.dumps([record.listed, record.located], separators=(",", ":"))
            new = upsert(link.dialect.name, self._shown).values(session_id=record.session_id, shown=text)
            renewal = {"shown": new.excluded.shown}
            link.execute(new.on_conflict_do_update(index_elements=["session_id"], set_=renewal))


def record_of(row: Mapping[Any, Any]) -> SessionRecord:
    """Return the record a row holds."""
    return SessionRecord(
        row["session_id"],
        row["consumer"],
        row["version"],
        moment_of(row["created_at"]),
        moment_of(row["touched_at"]),
        row["max_active"],
        entries_of_text(row["active"]),
        *map(tuple, json.loads(row.get("shown") or "[[],[]]")),
    )


@hookimpl
def kdskills_register_stores(register: Register[Callable[[str], SessionStore]]) -> None:
    """Add the schemes `sqlite` and `postgresql`."""
    register("sqlite", SqlStore)
    register("postgresql", SqlStore)
