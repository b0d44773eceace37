"""Journals of calls record the state and answer of each call, so that effects happen once.

`MemoryJournal` serves one process, `SqlJournal` every worker that opens the same SQLite file or PostgreSQL database.
"""

from kdskills.exports import tell_homes
from kdskills.remote.journal.calls import MemoryJournal, arguments_digest, strong_key
from kdskills.remote.journal.sql import JournalUnavailable, SqlJournal, journal_url

__all__ = ["JournalUnavailable", "MemoryJournal", "SqlJournal", "arguments_digest", "journal_url", "strong_key"]

tell_homes(__name__)
