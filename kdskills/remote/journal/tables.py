"""The tables of remote skills, as SQLAlchemy Core sees them; the migrations beside it make them."""

from __future__ import annotations

import sqlalchemy as sa

metadata: sa.MetaData = sa.MetaData()
"""Describes the tables; nothing is opened by reading it."""

calls: sa.Table = sa.Table(
    "remote_calls",
    metadata,
    sa.Column("key", sa.String(80), primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("thread_id", sa.Text),
    sa.Column("turn_id", sa.Text),
    sa.Column("call_id", sa.Text),
    sa.Column("namespace", sa.Text),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("idempotent", sa.Boolean, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("lease_until", sa.BigInteger, nullable=False),
    sa.Column("response", sa.Text),
    sa.Column("late_response", sa.Text),
    sa.Column("told", sa.Boolean, nullable=False),
    sa.Column("late_told", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger),
    sa.Column("answered_at", sa.BigInteger),
    sa.Column("late_at", sa.BigInteger),
    sa.Index("remote_calls_by_session", "session_id", "created_at"),
    sa.Index("remote_calls_by_age", "created_at"),
)

receipts: sa.Table = sa.Table(
    "remote_receipts",
    metadata,
    sa.Column("session_id", sa.String(200), primary_key=True),
    sa.Column("turn_id", sa.String(200), primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False, index=True),
)
