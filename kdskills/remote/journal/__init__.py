"""Journals of calls: they record the state and answer of each call, so that effects happen once.

`calls` names calls and is the table of their moves, `MemoryJournal` serves one process, `SqlJournal` every worker that opens the
same SQLite file or PostgreSQL database; its tables are made by the Alembic migrations beside it.
"""

from kdskills.remote.journal.calls import MemoryJournal, arguments_digest, strong_key
from kdskills.remote.journal.sql import JournalUnavailable, SqlJournal, journal_url

__all__ = ["JournalUnavailable", "MemoryJournal", "SqlJournal", "arguments_digest", "journal_url", "strong_key"]
