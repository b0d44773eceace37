"""`SqlJournal`: calls in a database, shared by every worker that opens it; the newest revision of its tables is made first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kdskills.errors import MissingExtra, OperatorMustAct
from kdskills.remote.journal.calls import IDENTIFYING, takeover
from kdskills.remote.ports import CallClaim, CallIdentity, JournalRow, StoredAnswer
from kdskills.skills.private_files import make_folder
from kdskills.storage.database import Database, lock_schema, run_revisions, sqlite_file, upsert

if TYPE_CHECKING:
    import sqlalchemy as sa


VERSION_TABLE: Final = "remote_schema"
MIGRATIONS: Final = Path(__file__).with_name("migrations")
NEWEST: Final = "0002"
"""The newest revision; they are one straight chain, numbered by their files."""


def upgrade(link: sa.Connection) -> None:
    """Bring the database behind *link* to the newest revision, in the transaction that is open there.

    Several processes may open a new database at once: on PostgreSQL an advisory lock makes them wait for one another, on
    SQLite the transaction itself does.
    """
    import sqlalchemy as sa

    lock_schema(link)
    if sa.inspect(link).has_table(VERSION_TABLE):
        revision: str | None = link.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()  # noqa: S608 - a constant
        if revision is not None and revision >= NEWEST:
            return  # at a later revision a newer kdskills was here: its tables have all of ours
    run_revisions(link, MIGRATIONS, "head", missing=MissingExtra("the journal of calls", "codex"))


T = TypeVar("T")

KEPT_S: Final = 7 * 86_400.0
PURGE_EVERY_S: Final = 3_600.0
MICRO: Final = 1_000_000


class JournalUnavailable(OperatorMustAct, code="journal_unavailable"):
    """The journal of calls does not answer, or its URL is no database URL."""


def journal_url(state: Path) -> str:
    """Return where the calls of a state folder are kept: `<state>/remote/calls.sqlite3`."""
    return f"sqlite:///{state / 'remote' / 'calls.sqlite3'}"


class SqlJournal:
    """Keeps calls for a week in SQLite (write-ahead log, every commit on the disk) or PostgreSQL.

    Leases are measured by the database's clock on PostgreSQL, by this machine's on SQLite: workers never compare their
    own.

    Args:
        url: `sqlite:///path` or `postgresql://…`; a SQLite file and its folder are made, for this user only.
        kept_s: How long calls and receipts are kept.
        clock: Gives seconds since 1970 for SQLite.

    Raises:
        MissingExtra: SQLAlchemy, Alembic or the driver is not installed.
        JournalUnavailable: The database cannot be opened.
    """

    shared = True

    def __init__(self, url: str, *, kept_s: float = KEPT_S, clock: Callable[[], float] = time.time) -> None:
        try:
            from kdskills.remote.journal import statements
        except ImportError:
            raise MissingExtra("the journal of calls", "codex") from None
        self._database = Database(url, label="the journal of calls", failure=JournalUnavailable)
        self.engine: sa.Engine = self._database.engine
        file = sqlite_file(url)
        try:
            if file is not None:
                make_folder(file.parent)  # for this user only
        except OSError as error:
            words = f"the journal of calls cannot be opened: {error.strerror}"
            raise JournalUnavailable(words, path=str(file)) from None
        self._tables = statements
        self._sql = statements.Statements(self._database.dialect)
        self._kept_s = kept_s
        self._clock = clock
        self._purged_at = 0.0
        self._sqlite = self._database.dialect == "sqlite"
        self._writer = threading.Lock()
        if self._sqlite:
            import sqlalchemy as sa

            # a committed answer must survive a power cut
            sa.event.listen(self.engine, "connect", lambda link, _: link.execute("PRAGMA synchronous=FULL").close())
        self._write(upgrade)
        self.purge()

    def claim(self, key: str, identity: CallIdentity, owner: str, lease_s: float, *, idempotent: bool) -> CallClaim:
        """As `CallJournal.claim`."""
        if time.monotonic() - self._purged_at > PURGE_EVERY_S:
            self.purge()
        lease = int(lease_s * MICRO)
        # Ids are stored as every database can keep them; the key already names the call exactly.
        words = {f"b_{name}": _word(getattr(identity, name)) for name in IDENTIFYING}

        def change(link: sa.Connection) -> CallClaim:
            inserted = {"b_key": key, "b_owner": owner, "b_idempotent": idempotent, "b_lease": lease, **words}
            new_row = self._first_row(link, self._sql.insert, **inserted)
            if new_row is not None:
                return CallClaim(new_row, mine=True)
            row = self._first_row(link, self._sql.row, b_key=key)
            if row is None:  # purged between two statements: a call older than a week was delivered again
                raise JournalUnavailable("the call's row was deleted while it was read", key=key)
            event = takeover(row, idempotent=idempotent)
            if event is None:
                return CallClaim(row, mine=False)
            names = {"b_key": key, "b_owner": row.owner, "b_new_owner": owner, "b_lease": lease}
            claimed_row = self._first_row(link, self._sql.moves[event], **names)
            return CallClaim(claimed_row or row, mine=claimed_row is not None)

        return self._write(change)

    def start(self, key: str, owner: str) -> bool:
        """As `CallJournal.start`."""
        start = self._sql.moves["start"]
        return self._write(lambda link: self._first_row(link, start, b_key=key, b_owner=owner) is not None)

    def finish(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """As `CallJournal.finish`."""
        return self._answer(key, owner, answer, self._sql.moves["answer"], self._sql.late)

    def overdue(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """As `CallJournal.overdue`."""
        return self._answer(key, owner, answer, self._sql.moves["deadline"])

    def lose(self, key: str, owner: str, answer: StoredAnswer, *, dead: bool = True) -> JournalRow | None:
        """As `CallJournal.lose`."""
        return self._answer(key, owner, answer, self._sql.lose_dead if dead else self._sql.moves["lose"])

    def get(self, key: str) -> JournalRow | None:
        """As `CallJournal.get`."""
        return self._database.ask(lambda link: self._first_row(link, self._sql.row, b_key=key))

    def renew(self, keys: Mapping[str, str], lease_s: float) -> None:
        """As `CallJournal.renew`."""

        def change(link: sa.Connection) -> None:
            for key, owner in keys.items():
                link.execute(self._sql.renew, self._bound(b_key=key, b_owner=owner, b_lease=int(lease_s * MICRO)))

        self._write(change)

    def running(self, session_id: str) -> Sequence[JournalRow]:
        """As `CallJournal.running`."""
        return self._rows(session_id, *self._sql.running)

    def calls(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """As `CallJournal.calls`."""
        return self._rows(session_id, *([] if turn_id is None else [self._tables.calls.c.turn_id == turn_id]))

    def outcomes(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """As `CallJournal.outcomes`."""
        other_turns = [] if turn_id is None else [self._tables.calls.c.turn_id.is_distinct_from(turn_id)]
        return self._rows(session_id, self._sql.untold, *other_turns)

    def tell(self, keys: Sequence[str]) -> None:
        """As `CallJournal.tell`."""
        calls = self._tables.calls
        if keys:
            self._tell(calls.c.key.in_(keys), late_told=calls.c.late_response.is_not(None))

    def settle(self, session_id: str, turn_id: str) -> None:
        """As `CallJournal.settle`."""
        calls = self._tables.calls
        self._tell(calls.c.session_id == session_id, calls.c.turn_id == turn_id)

    def purge(self) -> int:
        """Forget calls and receipts older than a week, unless a live worker still runs the call; returns how many calls."""
        calls, receipts, now = self._tables.calls, self._tables.receipts, self._sql.now

        def change(link: sa.Connection) -> int:
            before = now - int(self._kept_s * MICRO)
            link.execute(receipts.delete().where(receipts.c.created_at < before), self._bound())
            old = (calls.c.created_at < before, calls.c.lease_until < now)
            return link.execute(calls.delete().where(*old), self._bound()).rowcount

        self._purged_at = time.monotonic()
        return self._write(change)

    def keep_receipt(self, session_id: str, turn_id: str, body: str) -> None:
        """Keep the receipt of a turn; keeping another replaces it."""
        table = self._tables.receipts
        new = upsert(self._database.dialect, table).values(
            session_id=session_id, turn_id=turn_id, body=body, created_at=self._sql.now
        )
        insert = new.on_conflict_do_update(index_elements=["session_id", "turn_id"], set_={"body": new.excluded.body})
        self._write(lambda link: link.execute(insert, self._bound()))

    def receipts(self, session_id: str, turn_id: str | None = None) -> Sequence[str]:
        """Return the receipts kept of a session, or of one turn, oldest first."""
        table = self._tables.receipts
        query = table.select().with_only_columns(table.c.body).where(table.c.session_id == session_id)
        query = query.order_by(table.c.created_at, table.c.turn_id)
        query = query if turn_id is None else query.where(table.c.turn_id == turn_id)
        return self._database.ask(lambda link: list(link.execute(query).scalars()))

    def close(self) -> None:
        """Close the connections; a handler that still runs opens a new one to record its answer."""
        self._database.close()

    def _answer(self, key: str, owner: str, answer: StoredAnswer, *tries: sa.Executable) -> JournalRow | None:
        """Store an answer by the first statement that matches the row, and return the row afterwards."""
        facts = json.dumps({"payload": answer.payload, "handled": answer.handled, "error": answer.error})
        names = {"b_key": key, "b_owner": owner, "b_answer": facts}
        return self._write(lambda link: self._first_row(link, *tries, self._sql.row, **names))

    def _tell(self, *conditions: Any, **values: Any) -> None:
        calls = self._tables.calls
        answered = calls.update().where(*conditions, calls.c.state.in_(self._tables.ANSWERED_STATES))
        self._write(lambda link: link.execute(answered.values(told=True, **values)))

    def _first_row(self, link: sa.Connection, *statements: sa.Executable, **names: Any) -> JournalRow | None:
        """Execute statements until one returns a row."""
        for statement in statements:
            record = link.execute(statement, self._bound(**names)).mappings().first()
            if record is not None:
                return _row(record)
        return None

    def _rows(self, session_id: str, *conditions: Any) -> Sequence[JournalRow]:
        query = self._sql.select(self._tables.calls.c.session_id == session_id, *conditions)
        return self._database.ask(lambda link: [_row(row) for row in link.execute(query, self._bound()).mappings()])

    def _bound(self, **names: Any) -> dict[str, Any]:
        """Return values for a statement, with this moment where the database does not know it better."""
        return {**names, "b_now": int(self._clock() * MICRO)} if self._sqlite else names

    def _write(self, change: Callable[[sa.Connection], T]) -> T:
        # SQLite has one writer: threads of this process queue here instead of sleeping in the database's busy handler
        with self._writer if self._sqlite else nullcontext():
            return self._database.change(change)


def _word(text: str | None) -> str | None:
    return None if text is None else text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _row(record: Mapping[Any, Any]) -> JournalRow:
    names = ("key", "state", "owner", "idempotent", "alive", "told", *IDENTIFYING)
    answer, late = (text and StoredAnswer(**json.loads(text)) for text in (record["response"], record["late_response"]))
    return JournalRow(
        **{name: record[name] for name in names},
        lease_until=record["lease_until"] / MICRO,
        created_at=record["created_at"] / MICRO,
        answer=answer,
        late=late,
    )
