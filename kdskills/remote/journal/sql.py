"""`SqlJournal`: calls in a database, shared by every worker that opens it (spec remote §4 Journal)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kdskills.errors import MissingExtra, OperatorMustAct
from kdskills.jobs.database import Database, upsert
from kdskills.remote.journal.schema import upgrade
from kdskills.remote.journal.states import ANSWERED, KEEPS_LATE, Event, after, sources, takeover
from kdskills.remote.ports import CallIdentity, Claim, JournalRow, StoredAnswer

if TYPE_CHECKING:
    import sqlalchemy as sa

T = TypeVar("T")

KEPT_S: Final = 7 * 86_400.0
PURGE_EVERY_S: Final = 3_600.0
MICRO: Final = 1_000_000


class JournalUnavailable(OperatorMustAct):
    """The journal of calls does not answer, or its URL is no database URL (spec remote §4)."""

    code = "journal_unavailable"


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
            from kdskills.remote.journal import tables
        except ImportError:
            raise MissingExtra("the journal of calls", "codex") from None
        _make_private(url)
        self._database = Database(url, what="the journal of calls", failure=JournalUnavailable)
        self.engine: sa.Engine = self._database.engine
        self._tables = tables
        self._kept_s = kept_s
        self._clock = clock
        self._purged_at = 0.0
        self._sqlite = self._database.dialect == "sqlite"
        self._writer = threading.Lock()
        if self._sqlite:
            import sqlalchemy as sa

            sa.event.listen(self.engine, "connect", _durable)
        self._write(upgrade)
        self.purge()

    def claim(self, key: str, identity: CallIdentity, owner: str, lease_s: float, *, idempotent: bool) -> Claim:
        """As `CallJournal.claim`."""
        self._purge_sometimes()

        def change(link: sa.Connection) -> Claim:
            if self._insert(link, key, identity, owner, lease_s, idempotent):
                return Claim(self._found(link, key), mine=True)
            row = self._found(link, key)
            event = takeover(row, idempotent=idempotent)
            if event is None:
                return Claim(row, mine=False)
            taken = {"owner": owner, "lease_until": self._now() + int(lease_s * MICRO)}
            dead = self._tables.calls.c.lease_until <= self._now()
            mine = self._move(link, key, row.owner, event, taken, dead)
            return Claim(self._found(link, key), mine=mine)

        return self._write(change)

    def start(self, key: str, owner: str) -> bool:
        """As `CallJournal.start`."""
        return self._write(lambda link: self._move(link, key, owner, "start", {"started_at": self._now()}))

    def finish(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """As `CallJournal.finish`."""
        table, text = self._tables.calls, _text(answer)

        def change(link: sa.Connection) -> JournalRow | None:
            if not self._move(link, key, owner, "answer", {"response": text, "answered_at": self._now()}):
                late = (table.c.key == key, table.c.owner == owner, table.c.state.in_(sorted(KEEPS_LATE)))
                values = {"late_response": text, "late_at": self._now()}
                link.execute(table.update().where(*late, table.c.late_response.is_(None)).values(values))
            return self._row(link, key)

        return self._write(change)

    def overdue(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """As `CallJournal.overdue`."""
        return self._write(lambda link: self._given(link, key, owner, "deadline", answer))

    def lose(self, key: str, owner: str, answer: StoredAnswer, *, dead: bool = True) -> JournalRow | None:
        """As `CallJournal.lose`."""

        def change(link: sa.Connection) -> JournalRow | None:
            also = [self._tables.calls.c.lease_until <= self._now()] if dead else []
            return self._given(link, key, owner, "lose", answer, *also)

        return self._write(change)

    def get(self, key: str) -> JournalRow | None:
        """As `CallJournal.get`."""
        return self._database.ask(lambda link: self._row(link, key))

    def renew(self, keys: Mapping[str, str], lease_s: float) -> None:
        """As `CallJournal.renew`."""
        table = self._tables.calls
        open_states = table.c.state.not_in(sorted(ANSWERED))

        def change(link: sa.Connection) -> None:
            for key, owner in keys.items():
                until = {"lease_until": self._now() + int(lease_s * MICRO)}
                link.execute(
                    table.update().where(table.c.key == key, table.c.owner == owner, open_states).values(until)
                )

        self._write(change)

    def running(self, session_id: str) -> Sequence[JournalRow]:
        """As `CallJournal.running`."""
        table = self._tables.calls
        return self._rows(
            table.c.session_id == session_id,
            table.c.state.not_in(sorted(ANSWERED)),
            table.c.lease_until > self._now(),
        )

    def calls(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """As `CallJournal.calls`."""
        table = self._tables.calls
        turn = [] if turn_id is None else [table.c.turn_id == turn_id]
        return self._rows(table.c.session_id == session_id, *turn)

    def outcomes(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """As `CallJournal.outcomes`."""
        import sqlalchemy as sa

        table = self._tables.calls
        other = [] if turn_id is None else [sa.or_(table.c.turn_id.is_(None), table.c.turn_id != turn_id)]
        lost = sa.and_(table.c.state == "running", table.c.lease_until <= self._now())
        answered = sa.and_(table.c.state.in_(sorted(ANSWERED)), sa.not_(table.c.told))
        late = sa.and_(table.c.late_response.is_not(None), sa.not_(table.c.late_told))
        return self._rows(table.c.session_id == session_id, sa.or_(lost, answered, late), *other)

    def tell(self, keys: Sequence[str]) -> None:
        """As `CallJournal.tell`."""
        table = self._tables.calls

        def change(link: sa.Connection) -> None:
            for key in keys:
                mine = (table.c.key == key, table.c.state.in_(sorted(ANSWERED)))
                link.execute(
                    table.update().where(*mine).values(told=True, late_told=table.c.late_response.is_not(None))
                )

        if keys:
            self._write(change)

    def settle(self, session_id: str, turn_id: str) -> None:
        """As `CallJournal.settle`."""
        table = self._tables.calls
        seen = (table.c.session_id == session_id, table.c.turn_id == turn_id, table.c.state.in_(sorted(ANSWERED)))
        self._write(lambda link: link.execute(table.update().where(*seen).values(told=True)))

    def purge(self) -> int:
        """Forget calls and receipts older than a week, unless a live worker still runs the call; returns how many calls."""
        calls, receipts = self._tables.calls, self._tables.receipts

        def change(link: sa.Connection) -> int:
            before = self._now() - int(self._kept_s * MICRO)
            link.execute(receipts.delete().where(receipts.c.created_at < before))
            old = (calls.c.created_at < before, calls.c.lease_until < self._now())
            return link.execute(calls.delete().where(*old)).rowcount

        self._purged_at = time.monotonic()
        return self._write(change)

    def keep_receipt(self, session_id: str, turn_id: str, body: str) -> None:
        """Keep the receipt of a turn; keeping another replaces it."""
        table = self._tables.receipts

        def change(link: sa.Connection) -> None:
            values = {"session_id": session_id, "turn_id": turn_id, "body": body, "created_at": self._now()}
            statement = upsert(self._database.dialect, table).values(values)
            changed = {"body": statement.excluded.body}
            link.execute(statement.on_conflict_do_update(index_elements=["session_id", "turn_id"], set_=changed))

        self._write(change)

    def receipts(self, session_id: str, turn_id: str | None = None) -> Sequence[str]:
        """Return the receipts kept of a session, or of one turn, oldest first."""
        table = self._tables.receipts
        turn = [] if turn_id is None else [table.c.turn_id == turn_id]
        query = table.select().with_only_columns(table.c.body).where(table.c.session_id == session_id, *turn)
        query = query.order_by(table.c.created_at, table.c.turn_id)
        return self._database.ask(lambda link: list(link.execute(query).scalars()))

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    def _insert(
        self, link: sa.Connection, key: str, identity: CallIdentity, owner: str, lease_s: float, idempotent: bool
    ) -> bool:
        state = after(None, "claim")
        values = {
            "key": key,
            "session_id": identity.session_id,
            "thread_id": identity.thread_id,
            "turn_id": identity.turn_id,
            "call_id": identity.call_id,
            "namespace": identity.namespace,
            "tool": identity.tool,
            "owner": owner,
            "idempotent": idempotent,
            "state": state,
            "lease_until": self._now() + int(lease_s * MICRO),
            "told": False,
            "late_told": False,
            "created_at": self._now(),
        }
        table = self._tables.calls
        new = upsert(self._database.dialect, table).values(values)
        return link.execute(new.on_conflict_do_nothing().returning(table.c.key)).first() is not None

    def _given(
        self, link: sa.Connection, key: str, owner: str, event: Event, answer: StoredAnswer, *also: Any
    ) -> JournalRow | None:
        self._move(link, key, owner, event, {"response": _text(answer), "answered_at": self._now()}, *also)
        return self._row(link, key)

    def _move(
        self, link: sa.Connection, key: str, owner: str, event: Event, values: dict[str, Any], *also: Any
    ) -> bool:
        """Do one move of the table as one compare-and-swap; False when the row is not there to be moved."""
        table = self._tables.calls
        for state in sources(event):
            mine = (table.c.key == key, table.c.owner == owner, table.c.state == state, *also)
            change = table.update().where(*mine).values(state=after(state, event), **values)
            if link.execute(change).rowcount:
                return True
        return False

    def _rows(self, *where: Any) -> Sequence[JournalRow]:
        table = self._tables.calls

        def question(link: sa.Connection) -> list[JournalRow]:
            query = self._select().where(*where).order_by(table.c.created_at, table.c.key)
            return [_row(found) for found in link.execute(query).mappings()]

        return self._database.ask(question)

    def _row(self, link: sa.Connection, key: str) -> JournalRow | None:
        found = link.execute(self._select().where(self._tables.calls.c.key == key)).mappings().first()
        return None if found is None else _row(found)

    def _found(self, link: sa.Connection, key: str) -> JournalRow:
        row = self._row(link, key)
        if row is None:  # purged by another worker between two statements: older than a week, and asked for again
            raise JournalUnavailable("the call's row went away while it was read", key=key)
        return row

    def _select(self) -> sa.Select[Any]:
        table = self._tables.calls
        return table.select().add_columns((table.c.lease_until > self._now()).label("alive"))

    def _now(self) -> Any:
        """Return this moment in microseconds: a number, or PostgreSQL's own clock as an expression."""
        if self._sqlite:
            return int(self._clock() * MICRO)
        import sqlalchemy as sa

        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * MICRO, sa.BigInteger)

    def _write(self, change: Callable[[sa.Connection], T]) -> T:
        # SQLite has one writer: threads of this process queue here instead of sleeping in the database's busy handler
        with self._writer if self._sqlite else nullcontext():
            return self._database.change(change)

    def _purge_sometimes(self) -> None:
        if time.monotonic() - self._purged_at > PURGE_EVERY_S:
            self.purge()


def _text(answer: StoredAnswer) -> str:
    return json.dumps({"payload": answer.payload, "handled": answer.handled, "error": answer.error})


def _answer(text: str | None) -> StoredAnswer | None:
    if text is None:
        return None
    kept = json.loads(text)
    return StoredAnswer(kept["payload"], kept["handled"], kept["error"])


def _row(found: Mapping[Any, Any]) -> JournalRow:
    return JournalRow(
        found["key"],
        found["state"],
        found["owner"],
        bool(found["idempotent"]),
        found["lease_until"] / MICRO,
        bool(found["alive"]),
        found["session_id"],
        found["thread_id"],
        found["turn_id"],
        found["call_id"],
        found["namespace"],
        found["tool"],
        _answer(found["response"]),
        _answer(found["late_response"]),
        bool(found["told"]),
        found["created_at"] / MICRO,
    )


def _durable(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA synchronous=FULL").close()  # an answer that is given must be there after a power cut


def _make_private(url: str) -> None:
    """Make the file of a SQLite database and its folder for this user only: answers may hold anything."""
    if not url.startswith("sqlite:///") or url in {"sqlite:///", "sqlite:///:memory:"}:
        return
    path = Path(url.removeprefix("sqlite:///").partition("?")[0])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise JournalUnavailable(f"the journal of calls cannot be opened: {error.strerror}", path=str(path)) from None
