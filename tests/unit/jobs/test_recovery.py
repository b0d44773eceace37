"""Recovery puts back what dead workers held, again on every round, and mends heads whose workflow is gone."""

import pytest

from kdskills.jobs.queues import POOL, POOL_STEPS, host_of_queue, host_queue, same_kind, steps_queue
from kdskills.jobs.roster import Roster, hold_slot
from kdskills.jobs.worker.recovery import Recovery


@pytest.fixture
def beside(work):
    """Return a recovery by a worker that holds slot 0."""
    Roster(work).enter("me", 0)
    with hold_slot(work.state_dir, 0):
        yield Recovery(work, "me")


def take(work, item, executor):
    """Let a worker take a row, as the queue does."""
    from dbos._schemas.system_database import SystemSchema

    table = SystemSchema.workflow_status
    with work.queue_engine.execution_options(schema_translate_map={"dbos": None}).begin() as link:
        link.exec_driver_sql(
            f"UPDATE {table.name} SET status='PENDING', executor_id=? WHERE workflow_uuid=?", (executor, item)
        )
    work.database.change(
        lambda link: link.execute(
            work.tables.tasks.update().where(work.tables.tasks.c.id == item).values(executor=executor)
        )
    )


def spoil(work, item, status):
    """Let something else than kdskills end a workflow."""
    with work.queue_engine.begin() as link:
        link.exec_driver_sql("UPDATE workflow_status SET status=? WHERE workflow_uuid=?", (status, item))


async def test_what_the_dead_held_goes_back(client, make, work, beside):
    """A row of an executor that is not alive waits in the host's queue again, every time."""
    head = await client.submit_task(make.task())
    for executor in ("ghost", "ghost of a ghost"):
        take(work, head.id, executor)
        assert beside.round() == 1
        assert [row.id for row in work.queues.waiting([host_queue(work.host)])] == [head.id]
    assert beside.round() == 0


async def test_what_the_living_hold_stays(client, make, work, beside):
    """Rows of live workers are not touched."""
    head = await client.submit_task(make.task())
    take(work, head.id, "me")
    assert beside.round() == 0
    assert [row.executor for row in work.queues.pending()] == ["me"]


async def test_one_recovers_at_a_time(client, make, work, beside):
    """While somebody else puts work back, this worker leaves it to them."""
    head = await client.submit_task(make.task())
    take(work, head.id, "ghost")
    with beside._alone() as first:
        assert first
        assert beside.round() == 0
    assert beside.round() == 1


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [("ERROR", "failed", "infra_error"), ("CANCELLED", "canceled", "canceled"), ("SUCCESS", "failed", "infra_error")],
    ids=["error", "cancelled", "success"],
)
async def test_a_head_without_a_workflow_is_mended(client, make, work, beside, state, status, code):
    """A head that waits for a workflow that is over is ended, and says why."""
    head = await client.submit_task(make.task())
    take(work, head.id, "ghost")
    spoil(work, head.id, state)
    table = work.tables.tasks
    work.database.change(lambda link: link.execute(table.update().values(created_at=1)))
    assert beside.mend() == 1
    over = await client.task(make.scope, head.id)
    assert (over.status, over.error_code) == (status, code)
    assert beside.mend() == 0


async def test_what_just_came_is_not_mended(client, make, work, beside):
    """A head is given time: its workflow may be on its way."""
    await client.submit_task(make.task())
    assert beside.mend() == 0


async def test_work_of_the_pool_goes_to_the_pool(client, make, work, beside):
    """Work not pinned goes back to its host while that lives, else to the pool; pinned work stays with its host."""
    hosts = {"near"}
    assert beside._target("x", POOL, hosts, "near") == host_queue("near")
    pinned = await client.submit_task(make.task())
    assert beside._target(pinned.id, host_queue("far"), hosts, "far") == host_queue(work.host)
    table = work.tables.tasks
    work.database.change(lambda link: link.execute(table.update().values(home=None)))
    assert beside._target(pinned.id, host_queue("far"), hosts, "far") == POOL
    assert beside._target(pinned.id, steps_queue("far"), hosts, "far") == POOL_STEPS


def test_queues_are_named_after_hosts():
    """The name of a queue tells its host and its kind."""
    assert host_of_queue(host_queue("h")) == host_of_queue(steps_queue("h")) == "h"
    assert host_of_queue(POOL) is host_of_queue(POOL_STEPS) is None
    assert [same_kind(queue, "x") for queue in (POOL, POOL_STEPS)] == [host_queue("x"), steps_queue("x")]
    assert [same_kind(queue, None) for queue in (host_queue("x"), steps_queue("x"))] == [POOL, POOL_STEPS]
