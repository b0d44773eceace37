"""Background work as a Host offers it: room for each token, callers that go away, and one store of artifacts."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import shutil
import threading
from collections.abc import Callable
from functools import partial

import pytest

from kdskills.app import Host
from kdskills.app.identity import LOCAL, Identity, TokenLimits
from kdskills.app.operations import Context
from kdskills.app.work import TooMuchWork, scope_of
from kdskills.errors import Conflict, NotFound
from kdskills.jobs.attempts import AttemptOrder
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, FromArtifact, Inline, JobHead, JobSpec, Placement, StepSpec, TaskHead, TaskSpec

PLACEMENT = Placement(engine="wall", skill_name="acme.main", version_hash="0")


def caller(limit: int | None = 1, agent: str = "reader") -> Identity:
    """Return a caller with a token and room for so much work."""
    return Identity(
        agent=agent,
        scopes=frozenset({"work:run"}),
        token="kd_1",
        limits=TokenLimits(concurrent_work=limit),
    )


def task(who: Identity, session: str | None = None) -> TaskSpec:
    """Return a task of *who*."""
    command = Command(argv=("true",), timeout_s=10)
    return TaskSpec(scope=scope_of(who), session_id=session, command=command, placement=PLACEMENT)


def job(who: Identity) -> JobSpec:
    """Return a job of *who*."""
    steps = (StepSpec(name="a", command=Command(argv=("true",), timeout_s=10)),)
    return JobSpec(scope=scope_of(who), session_id="s", steps=steps, placement=PLACEMENT)


@pytest.fixture
async def host(make_host):
    """A Host whose work nobody runs."""
    made = make_host()
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def test_a_token_has_so_much_room(host: Host) -> None:
    """One more than the token allows is refused, be it a task or a job; another agent has room of its own."""
    who = caller()
    await host.work.submit(Context(who), task(who), None, "")
    for submit in (
        host.work.submit(Context(who), task(who), None, ""),
        host.work.submit(Context(who), job(who), None, ""),
    ):
        with pytest.raises(TooMuchWork) as refused:
            await submit
        assert refused.value.details["limit"] == 1
    other = caller(agent="writer")
    await host.work.submit(Context(other), job(other), None, "")


async def test_a_repeated_call_needs_no_more_room(host: Host) -> None:
    """The same key gives the first result though the token has no room left; with another body it is a conflict."""
    who = caller()
    first = await host.work.submit(Context(who), task(who), "k", "b")
    assert (await host.work.submit(Context(who), task(who), "k", "b")).id == first.id
    with pytest.raises(Conflict):
        await host.work.submit(Context(who), task(who), "k", "other")
    with pytest.raises(TooMuchWork):
        await host.work.submit(Context(who), task(who), "new", "b")
    await host.work.client.cancel(TaskHead, scope_of(who), first.id, "")
    started = await host.work.submit(Context(who), job(who), "k", "b")
    assert (await host.work.submit(Context(who), job(who), "k", "b")).id == started.id
    with pytest.raises(TooMuchWork):
        await host.work.submit(Context(who), task(who), "new", "b")


@pytest.mark.parametrize("limit", [0, None], ids=["no-limit", "the-settings"])
async def test_without_a_limit_there_is_room(host: Host, limit: int | None) -> None:
    """Zero means as much as wanted; a token that says nothing has what the settings say."""
    who = caller(limit)
    for _ in range(3):
        await host.work.submit(Context(who), task(who), None, "")


async def test_the_last_place_is_given_once(host: Host) -> None:
    """Many calls at one time get exactly as many places as there are."""
    who = caller(3)
    said = await asyncio.gather(
        *(host.work.submit(Context(who), task(who), None, "") for _ in range(10)), return_exceptions=True
    )
    assert sum(isinstance(one, TooMuchWork) for one in said) == 7


@pytest.mark.parametrize("key", [None, "k"], ids=["for-good", "may-come-back"])
async def test_a_caller_may_go_away_while_it_submits(host: Host, key: str | None) -> None:
    """A task that is being submitted when its caller goes away is canceled, unless the caller has a key to come back."""
    work = await host.work.client.work()
    entered, leave = threading.Event(), threading.Event()
    announce = work.queue.announce

    def slowly(*given: object) -> None:
        entered.set()
        assert leave.wait(60)
        announce(*given)  # type: ignore[arg-type]

    work.queue.announce = slowly  # type: ignore[method-assign]
    running = asyncio.ensure_future(host.work.run(Context(), task(LOCAL), key, ""))
    assert await asyncio.to_thread(entered.wait, 60)
    running.cancel()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    (head,) = await host.work.client.heads(TaskHead, scope_of(LOCAL))
    assert (head.status, head.cancel_reason) == (
        ("canceled", "the caller went away") if key is None else ("queued", None)
    )


async def test_a_submission_that_fails_after_its_caller_went_away_is_no_stray(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """What goes wrong when nobody waits any more is no error nobody looked at."""
    work = await host.work.client.work()
    entered, leave = threading.Event(), threading.Event()

    def breaks(*given: object) -> None:
        entered.set()
        assert leave.wait(60)
        raise RuntimeError("the power went")

    work.queue.announce = breaks  # type: ignore[method-assign]
    running = asyncio.ensure_future(host.work.run(Context(), task(LOCAL), None, ""))
    assert await asyncio.to_thread(entered.wait, 60)
    running.cancel()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    gc.collect()
    assert [record for record in caplog.records if "never retrieved" in record.getMessage()] == []
    assert await host.work.client.heads(TaskHead, scope_of(LOCAL)) == []


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))], indirect=True
)
async def test_the_last_place_is_given_once_by_several_services(make_host: Callable[..., Host], database: str) -> None:
    """Services over one database give an agent exactly as many places as there are."""
    hosts = [make_host(database_url=database) for _ in range(3)]
    for made in hosts:
        settings = made.settings
        made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
        await made.work.client.work()
    try:
        who = caller(3)
        answers = await asyncio.gather(
            *(made.work.submit(Context(who), task(who), None, "") for made in hosts for _ in range(8)),
            return_exceptions=True,
        )
        assert sum(isinstance(answer, TooMuchWork) for answer in answers) == 21
        assert len(await hosts[0].work.client.heads(TaskHead, scope_of(who))) == 3
    finally:
        for made in hosts:
            await made.work.aclose()
            await made.storage.aclose()


async def test_large_inputs_of_refused_work_are_not_kept(host: Host) -> None:
    """A caller without room leaves nothing in the store of artifacts; a call that is repeated is answered all the same."""
    who = caller()
    data = base64.b64encode(bytes(200_000)).decode()
    command = Command(argv=("true",), timeout_s=10, inputs=(Inline(path="big", content_base64=data),))
    spec = task(who).model_copy(update={"command": command})
    first = await host.work.submit(Context(who), spec, "k", "b")
    assert (await host.work.submit(Context(who), spec, "k", "b")).id == first.id
    kept = await kept_artifacts(host)
    with pytest.raises(TooMuchWork):
        await host.work.submit(Context(who), spec, None, "b")
    assert await kept_artifacts(host) == kept


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("shared", [False, True])
async def test_large_inputs_reach_whichever_host_runs_them(make_host, database: str, tmp_path, shared: bool) -> None:
    """They lie in the store, unless another host of the pool may run the work and has a store of its own: then they go with it."""
    made = make_host(database_url=database, artifacts=str(tmp_path / "shared") if shared else None)
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    try:
        data = base64.b64encode(bytes(200_000)).decode()
        command = Command(argv=("true",), timeout_s=10, inputs=(Inline(path="big", content_base64=data),))
        spec = task(LOCAL).model_copy(update={"command": command})
        alone = await made.work.submit(Context(), spec, None, "b")
        work = await made.work.client.work()
        row = {"executor": "w", "host": "far", "slot": 0, "pid": 1, "name": "far", "state": "dead", "started_at": 1}
        await work.database.write(lambda link: link.execute(work.tables.workers.insert().values(**row, beat_at=1)))
        pooled = await made.work.submit(Context(), spec, None, "b")
        kinds = [type(head.spec.command.inputs[0]) for head in (alone, pooled)]
        assert kinds == [FromArtifact, FromArtifact if shared else Inline]
    finally:
        await made.work.aclose()
        await made.storage.aclose()


async def kept_artifacts(host: Host) -> int:
    """Return how many artifacts there are rows of."""
    work = await host.work.client.work()
    return await work.database.read(lambda link: len(link.execute(work.tables.artifacts.select()).all()))


async def test_what_is_answered_is_what_is_kept(host: Host) -> None:
    """The heads a submission returns are those that are read back."""
    client = host.work.client
    submitted = await host.work.submit(Context(), task(LOCAL, "s"), None, "")
    assert await client.head(TaskHead, scope_of(LOCAL), submitted.id) == submitted
    started = await host.work.submit(Context(), job(LOCAL), None, "")
    assert await client.head(JobHead, scope_of(LOCAL), started.id) == started


async def test_artifacts_have_one_store(host: Host) -> None:
    """Calls at one time share what keeps artifacts; none leaves a second one open."""
    keepers = await asyncio.gather(*(host.work.keeper() for _ in range(10)))
    assert len({id(keeper) for keeper in keepers}) == 1


def printed(work, item: str, data: bytes) -> None:
    """Let a task run here, with output."""
    head = work.database.ask(lambda link: work.records.head(link, TaskHead, item))
    folder = work.state_dir / "runs" / item / "1"
    folder.mkdir(parents=True, mode=0o700)
    order = AttemptOrder(task_id=item, attempt=1, spec=head.spec)
    (folder / "order.json").write_text(json.dumps(order.to_json()))
    (folder / "exit.json").write_text("{}")
    (folder / "stdout.log").write_bytes(data)
    set_columns(work, item, status="running", attempt=1, host=work.host)


def set_columns(work, item: str, **values: object) -> None:
    """Change a task's row."""
    table = work.tables.tasks
    work.database.change(lambda link: link.execute(table.update().where(table.c.id == item).values(values)))


async def until_waiting(host: Host, item: str, count: int) -> None:
    """Return once so many wait for more of a task's output."""
    for _ in range(6000):
        follow = host.work.follows.get(item)
        if follow is not None and follow.waiting == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nobody waits")


@pytest.fixture
async def followed(make_host):
    """A Host without a worker, its opened work, and a task that runs here and has printed `up`."""
    host = make_host()
    settings = host.settings
    host.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    item = (await host.call("skills.run_cmd_async", skill_name="lone", command="true")).task_id
    work = await host.work.client.work()
    printed(work, item, b"up\n")
    yield host, work, item
    await host.work.aclose()
    await host.storage.aclose()


async def test_many_followers_of_one_log_are_one_look(followed) -> None:
    """However many follow, one looks for all; each gets the bytes after its own offset, and nothing goes on afterwards."""
    host, work, item = followed
    reads = []
    read = host.work.client.head

    async def counted(*words, **more):
        reads.append(words)
        return await read(*words, **more)

    host.work.client.head = counted
    ask = partial(host.call, "skills.task_logs", task_id=item, follow=True, timeout_sec=60)
    waiting = [asyncio.ensure_future(ask(offset=3)) for _ in range(40)]
    await until_waiting(host, item, 40)
    before = len(reads)
    assert (await ask(offset=1)).data == "p\n"
    with (work.state_dir / "runs" / item / "1" / "stdout.log").open("ab") as log:
        log.write(b"more\n")
    assert {(await each).data for each in waiting} == {"more\n"}
    assert len(reads) - before < 20
    assert host.work.follows == {}


async def test_a_follower_hears_of_the_end_and_of_its_patience(followed) -> None:
    """One that waits is answered when the task is over, at its timeout with nothing new, and may be cancelled."""
    host, work, item = followed
    ask = partial(host.call, "skills.task_logs", task_id=item, follow=True, offset=3)
    piece = await ask(timeout_sec=0.2)
    assert (piece.data, piece.ended, piece.next_offset) == ("", False, 3)
    gone = asyncio.ensure_future(ask(timeout_sec=60))
    waiting = asyncio.ensure_future(ask(timeout_sec=60))
    await until_waiting(host, item, 2)
    gone.cancel()
    set_columns(work, item, status="failed", finished_at=1)
    piece = await waiting
    assert (piece.data, piece.ended, piece.status) == ("", True, "failed")
    assert host.work.follows == {}


async def test_a_follower_hears_of_a_task_that_is_forgotten(followed) -> None:
    """When there is no such task any more, whoever follows is told so, and does not wait."""
    host, work, item = followed
    waiting = asyncio.ensure_future(host.call("skills.task_logs", task_id=item, follow=True, offset=3, timeout_sec=60))
    await until_waiting(host, item, 1)
    work.database.change(lambda link: link.execute(work.tables.tasks.delete()))
    with pytest.raises(NotFound):
        await waiting
    assert host.work.follows == {}


async def test_a_log_of_another_host_is_elsewhere(followed) -> None:
    """While the task runs the answer names the host instead of seeming empty; once it is over its end is here, and says so."""
    host, work, item = followed
    ask = partial(host.call, "skills.task_logs", task_id=item)
    assert (await ask()).elsewhere is None
    set_columns(work, item, host="far")
    piece = await ask()
    assert (piece.elsewhere, piece.data, piece.ended) == ("far", "", False)
    assert (await host.call("skills.task_status", task_id=item)).logs_elsewhere == "far"
    set_columns(work, item, status="succeeded", stdout_tail=b"the end\n", stdout_total=100_000)
    piece = await ask(offset=-4)
    assert (piece.elsewhere, piece.data, piece.total, piece.ended) == ("far", "end\n", 100_000, True)
    assert (await ask()).truncated is True


async def test_a_large_log_is_read_by_pieces_from_both_ends(followed) -> None:
    """What is kept of 300 MB is read where it is asked for, without reading the rest of it."""
    host, work, item = followed
    path = work.state_dir / "runs" / item / "1" / "stdout.log"
    with path.open("r+b") as log:
        log.truncate(300_000_000)
        log.seek(0, 2)
        log.write(b"last\n")
    total = 300_000_005
    ask = partial(host.call, "skills.task_logs", task_id=item, limit=1024)
    assert (await ask(offset=-5)).data == "last\n"
    first = await ask(offset=0)
    assert (first.truncated, first.total, first.next_offset - first.offset) == (True, total, 1024)
    assert total - first.offset >= 64 * 1024 * 1024
    assert (await ask(offset=total - 100)).next_offset == total
    shutil.rmtree(path.parent)
    assert (await ask(offset=0)).total == 0  # its folder is gone, and the row keeps nothing yet
