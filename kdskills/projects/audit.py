"""The audit log of a database: who changed what. Rows are written where the change is (`ProjectRows.note`) and never changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from kdskills.projects.records import AUDIT
from kdskills.storage.database import micros, moment_of


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which rows are asked for; None asks for all.

    Attributes:
        caller: A token's public id, an agent, or door and caller as rows tell it.
        action: One action, or a family of them, such as `token`.
        skill: A skill's full id, or the name of an uploaded one.
        before: Only rows before the one with this id.
    """

    project: str | None = None
    caller: str | None = None
    action: str | None = None
    subject: str | None = None
    skill: str | None = None
    since: datetime | None = None
    before: int | None = None
    limit: int = 100


def audit_rows(link: sa.Connection, query: AuditQuery) -> list[dict[str, Any]]:
    """Return rows by column, the latest first."""
    column, statement = AUDIT.c, AUDIT.select().order_by(AUDIT.c.id.desc()).limit(query.limit)
    if query.project is not None:
        statement = statement.where(column.project == query.project)
    if query.caller is not None:
        statement = statement.where(
            sa.or_(column.who == query.caller, column.token == query.caller, column.agent == query.caller)
        )
    if query.action is not None:
        family = column.action.startswith(f"{query.action}.", autoescape=True)
        statement = statement.where(sa.or_(column.action == query.action, family))
    if query.subject is not None:
        statement = statement.where(column.subject == query.subject)
    if query.skill is not None:
        same_name = (column.subject == query.skill) & column.skill.is_not(None)
        statement = statement.where(sa.or_(column.skill == query.skill, same_name))
    if query.since is not None:
        statement = statement.where(column.at >= micros(query.since))
    if query.before is not None:
        statement = statement.where(column.id < query.before)
    rows = link.execute(statement).mappings()
    return [{**row, "at": moment_of(row["at"]), "facts": json.loads(row["facts"])} for row in rows]


def forget_audit(link: sa.Connection, before: datetime) -> int:
    """Remove rows that are older than *before*; return how many."""
    return link.execute(AUDIT.delete().where(AUDIT.c.at < micros(before))).rowcount
