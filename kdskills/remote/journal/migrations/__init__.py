"""Alembic's migrations of the tables of remote skills; run by `kdskills.remote.journal.sql`."""
