"""How much work a token may have at one time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.errors import CallerMustAct

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.host import Host
    from kdskills.app.identity import Identity
    from kdskills.jobs.model import Scope
    from kdskills.jobs.records import WorkRecords


class TooMuchWork(CallerMustAct):
    """The caller has as many tasks and jobs as its token allows; `details["limit"]` tells how many."""

    code = "too_much_work"


def limit_of(host: Host, identity: Identity) -> int:
    """Return how many tasks and jobs a caller may have at one time; 0 for any number."""
    if identity.token is None:
        return 0
    own = identity.limits.concurrent_work
    return host.settings.concurrent_work if own is None else own


def require_room(records: WorkRecords, link: sa.Connection, scope: Scope, limit: int, *, more: int) -> None:
    """Refuse an agent that has too much work; in the transaction that adds to it, the count is exact in every process.

    Work belongs to an agent: tokens of one agent share what they have.

    Args:
        records: Rows of tasks and jobs.
        link: The connection.
        scope: Whose work.
        limit: The most; 0 for any number.
        more: How many are to come: none in the transaction that has added one.

    Raises:
        TooMuchWork: There would be more than *limit*.
    """
    if not limit:
        return
    if link.dialect.name == "postgresql":  # SQLite has one writer anyway
        whose = "\n".join(("room", scope.tenant, scope.project, scope.agent))
        link.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (whose,))
    if records.open_work(link, scope, limit + 1) + more > limit:
        raise TooMuchWork(
            f"this token may have {limit} tasks and jobs at one time: wait until one is over",
            limit=limit,
            retry_after=1,
        )
