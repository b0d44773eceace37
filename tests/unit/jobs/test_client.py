"""The client: heads that are whole or not there, ids nobody guesses, owners, cancels, waits."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import BadRequest, Conflict, NotFound
from kdskills.jobs.client import JobsClient, new_id, tail_piece
from kdskills.jobs.model import JobHead, Scope, TaskHead
from kdskills.jobs.queue import Capacity, Roster, hold_slot
from kdskills.storage.database import DatabaseUnavailable


def claimable(work):
    """Return ids of what a worker of this host would take."""
    Roster(work).enter("looks", 9)
    claim = work.database.change(lambda link: work.queue.claim(link, "looks", Capacity(9, 9, 9), ()))
    return [head.id for head in claim.tasks] + list(claim.jobs)


async def test_a_task_is_queued(client, make):
    """Submitting writes the head, and that is what a worker takes."""
    head = await client.submit(make.task())
    work = await client.work()
    assert (head.status, head.attempt, head.home, head.executor) == ("queued", 0, work.host, None)
    assert await client.head(TaskHead, make.scope, head.id) == head
    assert claimable(work) == [head.id]


async def test_a_submission_is_one_transaction(client, make, monkeypatch):
    """When the workers cannot be told there is no head either."""
    work = await client.work()

    def refuse(*_):
        raise RuntimeError("the power went")

    monkeypatch.setattr(work.queue, "announce", refuse)
    with pytest.raises(RuntimeError):
        await client.submit(make.task())
    with pytest.raises(RuntimeError):
        await client.submit(make.job("a"))
    assert await client.heads(TaskHead, make.scope) == []
    assert await client.heads(JobHead, make.scope) == []


async def test_a_key_gives_the_first_result_again(client, make):
    """The same key and body is the same task, submitted once."""
    one = await client.submit(make.task(), key="k", body_hash="b")
    two = await client.submit(make.task(), key="k", body_hash="b")
    assert one == two
    assert len(await client.heads(TaskHead, make.scope)) == 1


async def test_a_key_at_once_is_one_task(client, make):
    """Ten submissions of one key at the same time make one task."""
    heads = await asyncio.gather(*(client.submit(make.task(), key="k") for _ in range(10)))
    assert len({head.id for head in heads}) == 1


async def test_a_key_with_another_body_is_a_conflict(client, make):
    """A key belongs to its first body, of a task and of a job alike."""
    await client.submit(make.task(), key="k", body_hash="b")
    with pytest.raises(Conflict) as caught:
        await client.submit(make.task(), key="k", body_hash="c")
    assert (caught.value.code, caught.value.details) == ("conflict", {"reason": "idempotency_key"})
    await client.submit(make.job("a"), key="k", body_hash="b")
    with pytest.raises(Conflict):
        await client.submit(make.job("a"), key="k", body_hash="c")


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4)), min_size=2, unique=True))
def test_keys_of_projects_never_meet(parts):
    """Tenant, project and key are told apart wherever one ends and the other begins."""
    ids = {new_id("task", Scope(tenant=tenant, project=project), key) for tenant, project, key in parts}
    assert len(ids) == len(parts)


def test_ids_are_random_without_a_key():
    """128 bits nobody can guess, in characters a folder name may have."""
    ids = {new_id("task", Scope(), None) for _ in range(200)}
    assert len(ids) == 200
    assert all(one.startswith("task_") and len(one) == 31 and one[5:].isalnum() for one in ids)


@pytest.mark.parametrize(
    "stranger",
    [Scope(project="other"), Scope(tenant="other"), Scope(agent="other")],
    ids=["project", "tenant", "agent"],
)
async def test_what_is_not_yours_is_not_there(client, make, stranger):
    """Another project's, tenant's or agent's ids read the same as none."""
    task, job = await client.submit(make.task()), await client.submit(make.job("a"))
    for call in (
        client.head(TaskHead, stranger, task.id),
        client.head(JobHead, stranger, job.id),
        client.cancel(TaskHead, stranger, task.id),
        client.cancel(JobHead, stranger, job.id),
        client.logs(stranger, task.id),
        client.wait(TaskHead, stranger, task.id, 0),
        client.wait(JobHead, stranger, job.id, 0),
    ):
        with pytest.raises(NotFound):
            await call
    assert await client.heads(TaskHead, stranger) == []
    assert await client.heads(JobHead, stranger) == []
    assert (await client.head(TaskHead, make.scope, task.id)).status == "queued"


async def test_a_project_reads_its_agents(client, make):
    """With `any_agent` a reader sees the project's other agents, never other projects."""
    head = await client.submit(make.task(scope=Scope(agent="writer")))
    assert (await client.head(TaskHead, Scope(), head.id, any_agent=True)).id == head.id
    assert [one.id for one in await client.heads(TaskHead, Scope(), any_agent=True)] == [head.id]
    with pytest.raises(NotFound):
        await client.head(TaskHead, Scope(project="other"), head.id, any_agent=True)


async def test_unknown_ids_are_not_found(client, make):
    """No such task, and none with a job's id."""
    job = await client.submit(make.job("a"))
    for item in ("task_x", job.id, "", "x" * 5000, "a\0b"):
        with pytest.raises(NotFound):
            await client.head(TaskHead, make.scope, item)


async def test_a_queued_task_is_canceled_at_once(client, make):
    """Without a worker a cancel is done when the call returns, and no worker takes it any more."""
    head = await client.submit(make.task())
    assert await client.cancel(TaskHead, make.scope, head.id, "changed my mind")
    over = await client.head(TaskHead, make.scope, head.id)
    assert (over.status, over.cancel_reason, over.finished_at is not None) == ("canceled", "changed my mind", True)
    work = await client.work()
    assert claimable(work) == []


async def test_a_second_cancel_changes_nothing(client, make):
    """What is over stays as it is: the call says so."""
    head = await client.submit(make.task())
    await client.cancel(TaskHead, make.scope, head.id, "first")
    before = await client.head(TaskHead, make.scope, head.id)
    assert not await client.cancel(TaskHead, make.scope, head.id, "second")
    assert await client.head(TaskHead, make.scope, head.id) == before


async def test_a_queued_job_is_canceled_with_its_steps(client, make):
    """A job that never began ends canceled, its steps skipped."""
    head = await client.submit(make.job("a", "b"))
    assert await client.cancel(JobHead, make.scope, head.id)
    over = await client.head(JobHead, make.scope, head.id)
    assert (over.status, [step.status for step in over.steps]) == ("canceled", ["skipped", "skipped"])
    assert over.current_step_index == -1


async def test_a_busy_session_refuses(client, make):
    """`on_busy="refuse"` names the task or job that holds the session; other sessions are free."""
    first = await client.submit(make.task("s"))
    for submit in (
        client.submit(make.task("s", on_busy="refuse")),
        client.submit(make.job("a", session="s", on_busy="refuse")),
    ):
        with pytest.raises(Conflict) as caught:
            await submit
        assert (caught.value.code, caught.value.details) == (
            "conflict",
            {"reason": "session_busy", "holder": first.id},
        )
    await client.submit(make.task("t", on_busy="refuse"))
    await client.submit(make.task("s", on_busy="refuse", scope=Scope(alias="other")))
    await client.cancel(TaskHead, make.scope, first.id)
    job = await client.submit(make.job("a", session="s", on_busy="refuse"))
    with pytest.raises(Conflict, match=job.id):
        await client.submit(make.task("s", on_busy="refuse"))


async def test_two_that_refuse_to_wait(client, make):
    """Of several at once, one gets the session."""
    said = await asyncio.gather(
        *(client.submit(make.task("s", on_busy="refuse")) for _ in range(6)), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in said) == ["Conflict"] * 5 + ["TaskHead"]


async def test_refusing_twice_with_one_key_is_no_conflict(client, make):
    """A repeated call is not refused because of itself."""
    one = await client.submit(make.task("s", on_busy="refuse"), key="k")
    assert await client.submit(make.task("s", on_busy="refuse"), key="k") == one


async def test_a_repeated_call_is_answered_though_the_session_is_busy(client, make):
    """The first result comes back also when somebody else has the session by now."""
    one = await client.submit(make.task("s", on_busy="refuse"), key="k")
    await client.cancel(TaskHead, make.scope, one.id)
    job = await client.submit(make.job("a", session="s", on_busy="refuse"), key="k")
    again = await client.submit(make.task("s", on_busy="refuse"), key="k")
    assert (again.id, again.status) == (one.id, "canceled")
    assert await client.submit(make.job("a", session="s", on_busy="refuse"), key="k") == job
    with pytest.raises(Conflict, match=job.id):
        await client.submit(make.task("s", on_busy="refuse"), key="other")


async def test_what_was_refused_leaves_nothing(client, make):
    """A refused task or job has no head, and its key is free."""
    first = await client.submit(make.task("s"))
    for submit in (
        client.submit(make.task("s", on_busy="refuse"), key="k"),
        client.submit(make.job("a", session="s", on_busy="refuse"), key="k"),
    ):
        with pytest.raises(Conflict):
            await submit
    assert (await client.heads(JobHead, make.scope), len(await client.heads(TaskHead, make.scope))) == ([], 1)
    await client.cancel(TaskHead, make.scope, first.id)
    assert (await client.submit(make.task("s", on_busy="refuse"), key="k")).status == "queued"


@pytest.mark.timeout(300)
def test_clients_of_many_threads_agree(place, make):
    """Eight threads with a loop and a client each: one key is one task, and one of those that refuse to wait is served."""
    start = threading.Barrier(8)

    def one(_):
        async def submit():
            client = JobsClient(f"sqlite:///{place / 'work.db'}", place)
            try:
                start.wait(200)
                head = await client.submit(make.task(), key="k", body_hash="b")
                try:
                    held = (await client.submit(make.task("s", on_busy="refuse"))).id
                except Conflict as error:
                    held = error.details["holder"]
                return head.id, held
            finally:
                await client.aclose()

        return asyncio.run(submit())

    with ThreadPoolExecutor(8) as pool:
        said = set(pool.map(one, range(8)))
    assert len(said) == 1


@pytest.mark.timeout(300)
def test_clients_of_many_processes_agree(place, make):
    """Three processes that open a new place and submit the same key at once make one task, each told the same id."""
    fresh = place.parent / "fresh"
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from kdskills.jobs.client import JobsClient\n"
        "from kdskills.jobs.model import TaskHead, TaskSpec\n"
        "spec = TaskSpec.model_validate_json(sys.argv[2])\n"
        "async def main():\n"
        "    top = Path(sys.argv[1])\n"
        "    client = JobsClient(f'sqlite:///{top / chr(119)}.db', top)\n"
        "    head = await client.submit(spec, key='k', body_hash='b')\n"
        "    found = await client.heads(TaskHead, spec.scope)\n"
        "    await client.aclose()\n"
        "    return head.id, len(found)\n"
        "sys.stdin.read()\n"
        "print(*asyncio.run(main()))\n"
    )
    command = [sys.executable, "-c", code, str(fresh), make.task().model_dump_json()]
    with contextlib.ExitStack() as all_of_them:
        started = [
            all_of_them.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(3)
        ]
        for process in started:
            all_of_them.callback(process.kill)
        for process in started:
            process.stdin.close()  # now, all of them
        said = {process.stdout.read() for process in started}
        assert [process.wait(200) for process in started] == [0] * 3
    assert len(said) == 1
    assert said.pop().split()[1] == b"1"


async def test_closing_what_could_not_be_opened(tmp_path):
    """A database that cannot be opened is complained of by the call, and not once more at the end."""
    client = JobsClient("postgresql://kd@127.0.0.1:1/none", tmp_path / "state")
    with pytest.raises(DatabaseUnavailable):
        await client.heads(TaskHead, Scope())
    await client.aclose()
    await client.aclose()


def test_a_client_outlives_the_loop_that_opened_it(place, make):
    """Calls from one event loop after the other share the opened place, and the last may close it."""
    client = JobsClient(f"sqlite:///{place / 'work.db'}", place)
    head = asyncio.run(client.submit(make.task()))
    assert asyncio.run(client.head(TaskHead, make.scope, head.id)) == head
    asyncio.run(client.aclose())
    assert asyncio.run(client.head(TaskHead, make.scope, head.id)) == head
    asyncio.run(client.aclose())


async def test_a_job_is_checked_before_it_is_kept(client, make):
    """Steps that are no graph leave nothing behind."""
    with pytest.raises(BadRequest):
        await client.submit(make.job(make.step("a", ["a"])))
    assert await client.heads(JobHead, make.scope) == []


async def test_listings_page_from_the_newest(client, make):
    """Pages by time and id show everything once."""
    ids = [(await client.submit(make.task())).id for _ in range(7)]
    seen, before = [], None
    while page := await client.heads(TaskHead, make.scope, limit=3, before=before):
        seen += [head.id for head in page]
        before = (page[-1].created_at, page[-1].id)
    assert seen == ids[::-1]


async def test_listings_filter(client, make):
    """By state, by job and by session, however few are wanted; steps of jobs on request only."""
    one, two = await client.submit(make.task()), await client.submit(make.task())
    await client.cancel(TaskHead, make.scope, one.id)
    assert [head.id for head in await client.heads(TaskHead, make.scope, status=["queued"])] == [two.id]
    assert await client.heads(TaskHead, make.scope, job_id="job_x") == []
    job = await client.submit(make.job("a"))
    assert [head.id for head in await client.heads(JobHead, make.scope, status=["queued"])] == [job.id]
    three = await client.submit(make.task("wanted"))
    for _ in range(3):
        await client.submit(make.task("other"))
    assert [head.id for head in await client.heads(TaskHead, make.scope, session_id="wanted", limit=1)] == [three.id]
    assert [head.id for head in await client.heads(JobHead, make.scope, session_id="s", limit=1)] == [job.id]
    assert await client.heads(JobHead, make.scope, session_id="wanted") == []


async def test_waiting_returns_at_the_timeout(client, make):
    """A wait gives what is known when its time is over, and the end when there is one."""
    head = await client.submit(make.task())
    assert (await client.wait(TaskHead, make.scope, head.id, 0.05)).status == "queued"
    waiting = asyncio.ensure_future(client.wait(TaskHead, make.scope, head.id))
    await client.cancel(TaskHead, make.scope, head.id)
    assert (await asyncio.wait_for(waiting, 60)).status == "canceled"


async def test_a_worker_is_started_once(place, make):
    """The first submission starts a worker; others do not while it has time to start."""
    calls = []
    made = JobsClient(f"sqlite:///{place / 'work.db'}", place, spawn=lambda: calls.append(1))
    for _ in range(3):
        await made.submit(make.task())
    assert calls == [1]
    await made.aclose()


async def test_a_worker_that_died_is_replaced(place, make):
    """Once a worker was seen, a free slot means it died: the next call starts another at once."""
    calls = []
    made = JobsClient(f"sqlite:///{place / 'work.db'}", place, spawn=lambda: calls.append(1))
    head = await made.submit(make.task())
    with hold_slot(place, 0) as held:
        assert held
        await made.ensure_worker()
    await made.wait(TaskHead, make.scope, head.id, 0.05)
    assert calls == [1, 1]
    await made.aclose()


@pytest.mark.parametrize("look", ["head", "logs", "heads"])
@pytest.mark.parametrize("kind", [TaskHead, JobHead])
async def test_every_look_at_unfinished_work_replaces_a_dead_worker(place, make, kind, look):
    """Reading what is not over starts a worker where its own died; reading what is over starts none."""
    calls = []
    made = JobsClient(f"sqlite:///{place / 'work.db'}", place, spawn=lambda: calls.append(1))
    head = await made.submit(make.job("a") if kind is JobHead else make.task())
    with hold_slot(place, 0):
        await made.ensure_worker()
    calls.clear()
    looks = {
        "head": lambda: made.head(kind, make.scope, head.id),
        "logs": lambda: made.logs(make.scope, head.id) if kind is TaskHead else made.head(kind, make.scope, head.id),
        "heads": lambda: made.heads(kind, make.scope),
    }
    await looks[look]()
    assert calls == [1]
    await made.cancel(kind, make.scope, head.id)
    with hold_slot(place, 0):
        await made.ensure_worker()
    calls.clear()
    await looks[look]()
    assert calls == []
    await made.aclose()


async def test_a_look_is_answered_though_no_worker_can_be_started(place, make, caplog):
    """Whoever looks is told what is known, and the log why the work waits."""

    def fail():
        raise DatabaseUnavailable("no more processes")

    plain = JobsClient(f"sqlite:///{place / 'work.db'}", place)
    made = JobsClient(f"sqlite:///{place / 'work.db'}", place, spawn=fail)
    head = await plain.submit(make.task())
    assert (await made.head(TaskHead, make.scope, head.id)).status == "queued"
    assert "work waits for a worker: no more processes" in caplog.text
    await made.aclose()
    await plain.aclose()


async def test_opening_at_once_opens_once(place, make):
    """Calls before the database is open share one opening."""
    made = JobsClient(f"sqlite:///{place / 'work.db'}", place)
    works = await asyncio.gather(*(made.work() for _ in range(5)))
    assert len({id(work) for work in works}) == 1
    await made.aclose()


@pytest.mark.parametrize(
    ("status", "total", "whole"),
    [
        ("succeeded", 0, True),
        ("succeeded", 3, True),
        ("failed", 9, False),
        ("canceled", None, False),
        ("running", 3, False),
    ],
)
async def test_what_a_head_has_whole_is_asked_of_no_host(client, make, status, total, whole):
    """A task of another host that printed nothing, or no more than its head keeps, is read as such; else its host is named."""
    head, work = await client.submit(make.task()), await client.work()
    values = {
        "status": status,
        "attempt": 1,
        "host": "far",
        "stdout_tail": b"abc" if total else b"",
        "stdout_total": total,
    }
    table = work.tables.tasks
    work.database.change(lambda link: link.execute(table.update().values(**values)))
    piece = await client.piece(await client.head(TaskHead, make.scope, head.id), "stdout", 0, 100)
    assert piece.elsewhere == (None if whole else "far")
    assert piece.log.data == values["stdout_tail"]


def test_the_kept_tail_is_read_by_offset(make):
    """Offsets are of the whole output, also where only its end was kept."""
    head = TaskHead(
        id="t",
        spec=make.task(),
        status="succeeded",
        mode="batch",
        session_key="k",
        created_at=datetime.now(UTC),
        stdout_tail=b"56789",
        stdout_total=10,
    )
    whole = tail_piece(head, "stdout", 0, 100)
    assert (whole.offset, whole.data, whole.total, whole.truncated) == (5, b"56789", 10, True)
    assert tail_piece(head, "stdout", 7, 2).data == b"78"
    assert tail_piece(head, "stdout", -3, 100).data == b"789"
    assert tail_piece(head, "stdout", 99, 5).data == b""
    assert tail_piece(head, "stderr", 0, 5).total == 0
