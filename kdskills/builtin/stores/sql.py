"""`sqlite:` and `postgresql:`: sessions in a database, shared by processes and, with PostgreSQL, by machines.

One implementation on SQLAlchemy Core. Every change is a compare-and-set on the record's version, in one transaction with
the references to the texts it needs. Conversations have tables of their own beside those of sessions; a turn is a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kdskills.errors import BadRequest
from kdskills.hooks import Register, hookimpl
from kdskills.session.conversations import Conversation, ConversationHead, ConversationTurn, busy
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
    than what the purge forgets. `conversations` keeps what was said in them.

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
        self.conversations = SqlConversations(self._database, metadata)
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


class SqlConversations:
    """Keeps conversations in the *database* of a session store; adds its tables to *metadata*."""

    def __init__(self, database: Database, metadata: sa.MetaData) -> None:
        self._database = database
        word = word_type(200)
        self._heads = sa.Table(
            "kd_conversations",
            metadata,
            sa.Column("conversation_id", word, primary_key=True),
            sa.Column("consumer", sa.String(500), nullable=False),
            sa.Column("user_id", word, index=True),
            sa.Column("number", sa.Integer, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("touched_at", sa.BigInteger, nullable=False, index=True),
            sa.Column("state", sa.Text, nullable=False),
        )
        self._head = [column for column in self._heads.c if column.name != "state"]
        self._turns = sa.Table(
            "kd_conversation_turns",
            metadata,
            sa.Column("conversation_id", word, primary_key=True),
            sa.Column("number", sa.Integer, primary_key=True),
            sa.Column("turn", sa.Text, nullable=False),
        )

    async def get(self, conversation_id: str) -> Conversation | None:
        """Return the conversation, or None. Raises StoreUnavailable when its rows cannot be read."""
        heads, turns = self._heads, self._turns

        def question(link: sa.Connection) -> tuple[Mapping[Any, Any] | None, list[str]]:
            # one question: turns that are added between two would not fit their head
            state = sa.case((turns.c.number == 1, heads.c.state)).label("state")  # large, so it is sent once
            turn_rows = sa.select(*self._head, state, turns.c.turn).join_from(
                heads, turns, heads.c.conversation_id == turns.c.conversation_id
            )
            query = turn_rows.where(heads.c.conversation_id == conversation_id).order_by(turns.c.number)
            rows = link.execute(query).mappings().all()
            return (rows[0] if rows else None), [row["turn"] for row in rows]

        row, texts = await self._database.read(question)
        if row is None:
            return None
        try:
            conversation = Conversation.of_state(head_of(row), json.loads(row["state"]), [*map(_turn_of, texts)])
        except (BadRequest, ValueError, KeyError, TypeError) as error:
            raise StoreUnavailable(f"a conversation in {STORE_NAME} cannot be read: {type(error).__name__}") from error
        if len(texts) != conversation.head.number:
            raise StoreUnavailable(f"a conversation in {STORE_NAME} cannot be read: a turn is missing")
        return conversation

    async def add(self, conversation: Conversation) -> None:
        """Keep the last turn and the pool, in one transaction; raises ConversationBusy unless the turns before it are kept."""
        heads, head = self._heads, conversation.head
        turn = {"number": head.number, "turn": _json_text(conversation.turns[-1].to_json())}
        values = {
            "number": head.number,
            "touched_at": micros(head.touched_at),
            "state": _json_text(conversation.state()),
        }
        identity = {"conversation_id": head.conversation_id}
        origin = {"consumer": head.consumer, "user_id": head.user, "created_at": micros(head.created_at)}

        def change(link: sa.Connection) -> None:
            if head.number == 1:
                new = upsert(link.dialect.name, heads).values(**identity, **origin, **values)
                statement: Any = new.on_conflict_do_nothing()
            else:
                is_before = heads.c.number == head.number - 1, heads.c.created_at == micros(head.created_at)
                statement = (
                    heads.update().where(heads.c.conversation_id == head.conversation_id, *is_before).values(values)
                )
            if link.execute(statement.returning(heads.c.number)).first() is None:
                raise busy(conversation)
            link.execute(self._turns.insert().values(**identity, **turn))

        await self._database.write(change)

    async def take_back(self, conversation: Conversation) -> Conversation:
        """Forget the last turn, in one transaction, if *conversation* is what is kept; raises ConversationBusy otherwise."""
        heads, turns, head, shorter = self._heads, self._turns, conversation.head, conversation.without_last()
        same_head = (
            heads.c.conversation_id == head.conversation_id,
            heads.c.number == head.number,
            heads.c.created_at == micros(head.created_at),
        )
        moments = {"created_at": micros(shorter.head.created_at), "touched_at": micros(shorter.head.touched_at)}
        values = {"number": shorter.head.number, "state": _json_text(shorter.state()), **moments}
        last_turn = turns.c.conversation_id == head.conversation_id, turns.c.number == head.number

        def change(link: sa.Connection) -> None:
            statement: Any = (
                heads.update().where(*same_head).values(values) if shorter.turns else heads.delete().where(*same_head)
            )
            if link.execute(statement.returning(heads.c.number)).first() is None:
                raise busy(conversation)
            link.execute(turns.delete().where(*last_turn))

        await self._database.write(change)
        return shorter

    async def delete(self, conversation_id: str) -> bool:
        """Forget the conversation; False for an unknown id."""
        return await self._forget(self._heads.c.conversation_id == conversation_id) > 0

    async def page(self, *, user: str | None, after: str | None, limit: int) -> list[ConversationHead]:
        """Return up to *limit* heads sorted by id."""
        table = self._heads
        query = sa.select(*self._head).order_by(table.c.conversation_id).limit(limit)
        if user is not None:
            query = query.where(table.c.user_id == user)
        if after is not None:
            query = query.where(table.c.conversation_id > after)
        rows = await self._database.read(lambda link: link.execute(query).mappings().all())
        return [head_of(row) for row in rows]

    async def purge(self, idle_before: datetime) -> int:
        """Forget every conversation whose last turn ended before *idle_before*."""
        return await self._forget(self._heads.c.touched_at < micros(idle_before))

    async def erase(self, user: str) -> int:
        """Forget every conversation of *user*."""
        return await self._forget(self._heads.c.user_id == user)

    async def _forget(self, condition: sa.ColumnElement[bool]) -> int:
        """Delete the conversations of *condition*, turns and all: none that is added meanwhile stays without its head."""
        heads, turns = self._heads, self._turns

        def change(link: sa.Connection) -> int:
            ids = link.execute(heads.delete().where(condition).returning(heads.c.conversation_id)).scalars().all()
            for conversation_id in ids:
                link.execute(turns.delete().where(turns.c.conversation_id == conversation_id))
            return len(ids)

        return await self._database.write(change)


def _turn_of(text: str) -> ConversationTurn:
    return ConversationTurn.from_json(json.loads(text))


def head_of(row: Mapping[Any, Any]) -> ConversationHead:
    """Return the head a row holds."""
    moments = moment_of(row["created_at"]), moment_of(row["touched_at"])
    return ConversationHead(row["conversation_id"], row["consumer"], row["user_id"], row["number"], *moments)


def _json_text(value: object) -> str:
    """Return *value* as JSON of ASCII alone: PostgreSQL takes no NUL, and no database half a character."""
    return json.dumps(value, separators=(",", ":"))


@hookimpl
def kdskills_register_stores(register: Register[Callable[[str], SessionStore]]) -> None:
    """Add the schemes `sqlite` and `postgresql`."""
    register("sqlite", SqlStore)
    register("postgresql", SqlStore)
