"""Records of catalogs in the journal's database, shared by every worker that opens it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdskills.errors import Conflict
from kdskills.remote.catalog.store import CatalogRecord
from kdskills.remote.journal.sql import JournalUnavailable

if TYPE_CHECKING:
    import sqlalchemy as sa

_TRIES = 20


class SqlCatalogStore:
    """Records in table `remote_catalogs`.

    Args:
        engine: The journal's; its schema is up to date.
    """

    shared = True

    def __init__(self, engine: sa.Engine) -> None:
        import sqlalchemy as sa

        self._engine = engine
        self._sa = sa
        names = ("session_id", "strategy", "digest", "tools", "context_digest", "release", "release_by")
        columns = [sa.column(name, sa.String) for name in names]
        numbers = [sa.column(name, sa.BigInteger) for name in ("version", "updated_at")]
        self._table = sa.table("remote_catalogs", *columns, *numbers)

    def get(self, session_id: str) -> CatalogRecord | None:
        """Return a thread's record."""
        records = self._find(self._table.c.session_id == session_id)
        return records[0] if records else None

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change to the newest version by compare-and-swap.

        Raises:
            Conflict: Other workers changed the record at every attempt.
        """
        for _ in range(_TRIES):
            old = self.get(session_id)
            new = change(old or CatalogRecord(session_id))
            new = replace(new, session_id=session_id, version=(old.version if old else 0) + 1)
            if self._insert(new) if old is None else self._swap(old, new):
                return new
        raise Conflict(f"other workers keep changing the catalog record of {session_id}", session_id=session_id)

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        with self._transaction() as link:
            link.execute(self._sa.delete(self._table).where(self._table.c.session_id == session_id))

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return those of these threads that are being released, or were."""
        if not session_ids:
            return []
        return self._find(self._table.c.session_id.in_(list(session_ids)), self._table.c.release != "")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as link:
                yield link
        except self._sa.exc.IntegrityError:
            raise
        except self._sa.exc.SQLAlchemyError as problem:
            raise JournalUnavailable(f"the catalog records do not answer: {type(problem).__name__}") from problem

    def _find(self, *conditions: Any) -> list[CatalogRecord]:
        with self._transaction() as link:
            rows = link.execute(self._sa.select(self._table).where(*conditions)).mappings().all()
        return [
            CatalogRecord(
                row["session_id"],
                row["strategy"],
                row["digest"],
                json.loads(row["tools"]),
                row["context_digest"],
                row["release"],
                row["release_by"],
                row["version"],
            )
            for row in rows
        ]

    def _insert(self, record: CatalogRecord) -> bool:
        try:
            with self._transaction() as link:
                link.execute(self._sa.insert(self._table).values(**_values(record)))
        except self._sa.exc.IntegrityError:
            return False  # another worker inserted the record first; the next attempt reads it
        return True

    def _swap(self, old: CatalogRecord, new: CatalogRecord) -> bool:
        same_version = (self._table.c.session_id == old.session_id, self._table.c.version == old.version)
        with self._transaction() as link:
            return link.execute(self._sa.update(self._table).where(*same_version).values(**_values(new))).rowcount == 1


def _values(record: CatalogRecord) -> dict[str, object]:
    return {
        "session_id": record.session_id,
        "strategy": record.strategy,
        "digest": record.digest,
        "tools": json.dumps(record.tools, sort_keys=True),
        "context_digest": record.context_digest,
        "release": record.release,
        "release_by": record.release_by,
        "version": record.version,
        "updated_at": int(time.time() * 1_000_000),
    }
