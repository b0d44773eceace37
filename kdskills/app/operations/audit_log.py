"""`audit_log.list`: who did what to which skill, token, project, task or job. No operation changes or removes a row."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from kdskills.app.operations.models import (
    Output,
    PageInput,
    PageOutput,
    ProjectInput,
    bound_project,
    decode_cursor,
    encode_cursor,
)
from kdskills.storage.database import micros

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context
    from kdskills.app.wiring import Storage

OF_THIS_MACHINE = frozenset({"bundle"})
"""Facts that name files of the machine, which are told to its own account alone."""


def _moment(text: str) -> str:
    """Return *text* when it is a time. Raises ValueError."""
    moment_of_text(text)
    return text


def moment_of_text(text: str) -> datetime:
    """Return the time of ISO 8601 text, which is UTC unless it says otherwise. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("is no time such as 2026-01-31 or 2026-01-31T12:00:00Z") from None


class AuditLogInput(ProjectInput, PageInput):
    """Which changes, the latest first."""

    who: str | None = Field(
        None, max_length=200, description="By this: a token's public id, an agent, or door and caller as rows tell it."
    )
    action: str | None = Field(
        None, max_length=80, description="Only this, such as `token.revoke`, or all of a kind, such as `token`."
    )
    subject: str | None = Field(None, max_length=256, description="Only what was done to this, by its name or id.")
    skill: str | None = Field(None, max_length=256, description="Only about this skill, by its full id or its name.")
    since: Annotated[str, AfterValidator(_moment)] | None = Field(
        None, max_length=40, description="Not before this time, such as `2026-01-31T12:00:00Z`; UTC unless it says."
    )


class AuditEvent(Output):
    """One change.

    Attributes:
        who: Door and caller: `http:token:` with a token's public id, else the door and the agent.
        token: Public id of the token; null for callers without one.
        agent: The agent that called; empty in rows of older releases, and for what the service does by itself.
        address: Where the call came from; empty where the door knows no address.
        action: Kind of subject and what was done to it, such as `skill.upload`.
        subject: Name or id of what was changed.
        skill: Full id of the skill it is about.
        facts: What changed; never a secret.
        request_id: As in the log and in the header X-Request-Id.
    """

    id: int
    at: datetime
    project: str
    who: str
    token: str | None
    agent: str
    address: str
    action: str
    subject: str
    skill: str | None
    facts: dict[str, Any]
    request_id: str


class AuditLogOut(PageOutput):
    """Changes, the latest first."""

    events: tuple[AuditEvent, ...]


async def list_audit_log(storage: Storage, arguments: AuditLogInput, context: Context) -> AuditLogOut:
    """List the changes of a project; the machine's own account sees all unless it names one."""
    project, before = bound_project(arguments, context), None
    if arguments.cursor is not None:
        (moment,) = decode_cursor(arguments.cursor, int)
        before = micros(moment)
    if not storage.present:  # reading makes no database
        return AuditLogOut(events=())
    from kdskills.projects.audit import AuditQuery

    query = AuditQuery(
        project=project,
        caller=arguments.who,
        action=arguments.action,
        subject=arguments.subject,
        skill=arguments.skill,
        since=None if arguments.since is None else moment_of_text(arguments.since),
        before=before,
        limit=arguments.limit + 1,
    )
    rows = await storage.projects.audit_rows(query)
    page = [AuditEvent.model_validate(row) for row in rows[: arguments.limit]]
    for event in page if not context.identity.local else ():
        for name in OF_THIS_MACHINE:
            event.facts.pop(name, None)
    following = encode_cursor(page[-1].id) if len(rows) > len(page) else None
    return AuditLogOut(events=tuple(page), next_cursor=following)
