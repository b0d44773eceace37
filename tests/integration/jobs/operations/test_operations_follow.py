"""Work in the background as operations: status, watches, logs, cancel, jobs and services."""

from __future__ import annotations

import asyncio
import base64
import urllib.request

import pytest

from kdskills.app import Host
from kdskills.errors import Conflict, NotFound

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(300), pytest.mark.xdist_group("operations")]

COUNT = "for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done"


async def test_a_task_from_queued_to_its_end(local) -> None:
    """A watch tells each state once with growing numbers, and returns the final snapshot once."""
    events = []
    task = await local.start(COUNT, session_id="watched")
    ended = await local("task_watch", task_id=task, poll_interval_sec=0.05, emit=events.append)
    assert (ended.status, ended.exit_code, ended.watch_timeout, ended.attempt) == ("succeeded", 0, False, 1)
    assert ended.stdout_tail == "".join(f"line {i}\n" for i in range(1, 6))
    states = [event.status for event in events if event.kind == "state"]
    assert states[-1] == "succeeded"
    assert states == sorted(states, key=["queued", "starting", "running", "succeeded"].index)
    seqs = [event.seq for event in events]
    assert seqs == sorted(set(seqs))
    assert {event.id for event in events} == {task}
    assert await local("task_status", task_id=task) == ended


async def test_a_watch_ends_and_its_task_goes_on(local) -> None:
    """At its timeout a watch returns what is known, and says so; the task was never touched."""
    task = await local.start("echo up; sleep 600", session_id="timeout")
    await local.until(task, lambda seen: seen.stdout_tail == "up\n")
    events = []
    found = await local("task_watch", task_id=task, timeout_sec=0.5, heartbeat_sec=0.1, emit=events.append)
    assert (found.status, found.watch_timeout, found.stdout_tail) == ("running", True, "up\n")
    assert "heartbeat" in {event.kind for event in events}
    assert (await local("task_status", task_id=task)).watch_timeout is False
    watching = asyncio.create_task(local("task_watch", task_id=task))
    assert (await local("task_cancel", task_id=task)).canceled is True
    assert (await watching).status == "canceled"


async def test_watches_with_one_key_are_one(local) -> None:
    """A repeated watch joins the first: same events, same answer; the key cannot be used for another task."""
    task = await local.start("echo up; sleep 600", session_id="joined")
    one, two = [], []
    first = asyncio.create_task(local("task_watch", task_id=task, dedupe_key="k", emit=one.append))
    await local.until(task, lambda seen: seen.status == "running")
    second = asyncio.create_task(local("task_watch", task_id=task, dedupe_key="k", emit=two.append))
    await local.until(task, lambda seen: bool(two))
    with pytest.raises(Conflict):
        await local("task_watch", task_id=await local.start("true", session_id="other-key"), dedupe_key="k")
    await local("task_cancel", task_id=task)
    answers = await asyncio.gather(first, second)
    assert answers[0] == answers[1]
    assert one[-1] == two[-1]


async def test_a_watch_is_taken_up_in_another_process(local, place) -> None:
    """A second Host goes on from the number the first one gave, without telling anything again."""
    task = await local.start("sleep 600", session_id="resumed")
    await local.until(task, lambda seen: seen.status == "running")
    events = []
    await local("task_watch", task_id=task, timeout_sec=0, emit=events.append)
    other, late = Host(place.settings), []
    await other.call("skills.task_watch", task_id=task, timeout_sec=0.2, after_seq=events[-1].seq, emit=late.append)
    assert late == []
    await local("task_cancel", task_id=task)
    ended = await other.call("skills.task_watch", task_id=task, after_seq=events[-1].seq, emit=late.append)
    assert (ended.status, [event.status for event in late if event.kind == "state"][-1]) == ("canceled", "canceled")
    assert min(event.seq for event in late) > events[-1].seq
    await other.work.aclose()
    await other.storage.aclose()


async def test_tails_are_bounded_and_whole(local) -> None:
    """A tail has at most the bytes asked for and never begins within a character; offsets and totals are true."""
    task = await local.start(["python3", "-c", "print('ä' * 1000, end='')"])
    await local.over(task)
    for size in (0, 1, 2, 3, 100, 1999, 2000, 8192):
        found = await local("task_status", task_id=task, tail_bytes=size)
        assert found.stdout_tail == "ä" * (min(size, 2000) // 2)
        assert found.stdout_offset + len(found.stdout_tail.encode()) == 2000 == found.stdout_total
        assert found.stdout_truncated == (size < 2000)


async def test_logs_by_offset(local) -> None:
    """Pieces of any size join to the whole output, as text and as bytes, while it runs and afterwards."""
    script = "import sys\nfor n in range(200): sys.stdout.write(f'{n} ä€😀\\n')"
    task = await local.start(["python3", "-c", script])
    await local.over(task)
    expected = "".join(f"{n} ä€😀\n" for n in range(200))
    for encoding, limit in (("text", 7), ("text", 1000), ("base64", 7), ("base64", 100_000)):
        offset, got, ended = 0, b"", False
        while not ended:
            piece = await local("task_logs", task_id=task, offset=offset, limit=limit, encoding=encoding)
            assert piece.offset == offset
            got += piece.data.encode() if encoding == "text" else base64.b64decode(piece.data)
            offset, ended = piece.next_offset, piece.ended
        assert got.decode() == expected
        assert offset == piece.total == len(expected.encode())


async def test_logs_of_bytes_that_are_no_text(local) -> None:
    """Bytes come back as they were in base64, and as U+FFFD in text, with the same offsets."""
    task = await local.start(["python3", "-c", "import sys; sys.stdout.buffer.write(b'a\\0\\xff\\xc3')"])
    await local.over(task)
    raw = await local("task_logs", task_id=task, encoding="base64")
    text = await local("task_logs", task_id=task)
    assert base64.b64decode(raw.data) == b"a\0\xff\xc3"
    assert (text.data, text.next_offset, text.ended) == ("a\0\ufffd\ufffd", 4, True)


async def test_logs_from_odd_offsets(local) -> None:
    """A negative offset counts from the end, one beyond it is the end, a limit of nothing tells the total."""
    task = await local.start("printf 0123456789")
    await local.over(task)
    assert (await local("task_logs", task_id=task, offset=-3)).data == "789"
    assert (await local("task_logs", task_id=task, offset=-99)).data == "0123456789"
    beyond = await local("task_logs", task_id=task, offset=99)
    assert (beyond.data, beyond.offset, beyond.next_offset, beyond.ended) == ("", 10, 10, True)
    nothing = await local("task_logs", task_id=task, limit=0)
    assert (nothing.data, nothing.total, nothing.next_offset, nothing.ended) == ("", 10, 0, False)


async def test_following_logs(local) -> None:
    """Following waits for what is new, gives it, and says when there will be no more."""
    task = await local.start("echo one; sleep 1; echo two", session_id="followed")
    offset, got, ended = 0, "", False
    while not ended:
        piece = await local("task_logs", task_id=task, offset=offset, follow=True)
        got, offset, ended = got + piece.data, piece.next_offset, piece.ended
    assert got == "one\ntwo\n"
    quiet = await local.start("sleep 600", session_id="quiet")
    piece = await local("task_logs", task_id=quiet, follow=True, timeout_sec=0.2)
    assert (piece.data, piece.ended) == ("", False)
    await local("task_cancel", task_id=quiet)


async def test_cancel_ends_the_whole_tree_once(local) -> None:
    """A cancel ends it, keeps what was printed, and tells the second one that it came too late."""
    task = await local.start("echo up; (sleep 600 & sleep 600) & sleep 600", session_id="tree")
    await local.until(task, lambda seen: seen.stdout_tail == "up\n")
    first = await local("task_cancel", task_id=task, reason="enough")
    assert (first.id, first.canceled) == (task, True)
    ended = await local.over(task)
    assert (ended.status, ended.stdout_tail, ended.cancel_requested) == ("canceled", "up\n", True)
    second = await local("task_cancel", task_id=task)
    assert (second.status, second.canceled) == ("canceled", False)
    assert await local("task_status", task_id=task) == ended


async def test_cancel_of_what_waits(local) -> None:
    """A task that waits for its session is canceled without ever running."""
    holder = await local.start("sleep 600", session_id="queue")
    waiting = await local.start("echo ran", session_id="queue")
    assert (await local("task_cancel", task_id=waiting)).canceled is True
    ended = await local.over(waiting)
    assert (ended.status, ended.started_at, ended.stdout_total) == ("canceled", None, 0)
    await local("task_cancel", task_id=holder)


async def test_a_job_in_order(local) -> None:
    """Steps run one after another in one session; the job succeeds when they all did."""
    job = await local(
        "start_job",
        skill_name="tool",
        session_id="job",
        workdir="session",
        steps=[
            {"name": "make", "command": "echo made > f", "outputs": ["f"]},
            {"name": "use", "command": "cat f", "env": {"A": "b"}},
        ],
    )
    assert (job.status, job.session_id) == ("queued", "job")
    events = []
    ended = await local("job_watch", job_id=job.job_id, poll_interval_sec=0.05, emit=events.append)
    assert (ended.status, ended.current_step_index, ended.watch_timeout) == ("succeeded", 1, False)
    assert [(s.name, s.status, s.tries, s.exit_code, s.stdout_tail) for s in ended.steps] == [
        ("make", "succeeded", 1, 0, ""), ("use", "succeeded", 1, 0, "made\n"),
    ]  # fmt: skip
    assert ended.steps[0].artifacts[0].path == "f"
    seqs = [event.seq for event in events]
    assert seqs == sorted(set(seqs))
    assert await local("job_status", job_id=job.job_id) == ended
    step = await local("task_status", task_id=ended.steps[1].task_id)
    assert (step.job_id, step.stdout_tail) == (job.job_id, "made\n")


async def test_a_job_that_fails_skips_the_rest(local) -> None:
    """A failed step fails the job after its retries; what comes after it is skipped; continue_on_error goes on."""
    job = await local(
        "start_job",
        skill_name="tool",
        session_id="failing",
        workdir="session",
        steps=[
            {"name": "shrug", "command": "exit 3", "continue_on_error": True},
            {"name": "fail", "command": "echo try >> tries; exit 4", "retry": 2},
            {"name": "never", "command": "true"},
        ],
    )
    ended = await local.job_over(job.job_id)
    assert ended.status == "failed"
    assert [(s.status, s.tries, s.exit_code) for s in ended.steps] == [
        ("failed", 1, 3), ("failed", 3, 4), ("skipped", 0, None),
    ]  # fmt: skip
    assert (await local.cmd("wc -l < tries", session_id="failing")).stdout.strip() == "3"


async def test_cancel_of_a_job(local) -> None:
    """A canceled job is canceled, not failed: its running step ends, later ones never begin."""
    job = await local(
        "start_job",
        skill_name="tool",
        session_id="cancel-job",
        steps=[{"name": "long", "command": "echo up; sleep 600"}, {"name": "later", "command": "true"}],
    )
    watching = asyncio.create_task(local("job_watch", job_id=job.job_id, poll_interval_sec=0.05))
    while True:
        seen = await local("job_status", job_id=job.job_id)
        if seen.steps[0].stdout_tail == "up\n":
            break
        await asyncio.sleep(0.05)
    assert (await local("job_cancel", job_id=job.job_id, reason="enough")).canceled is True
    ended = await watching
    assert ended.status == "canceled"
    assert ended.steps[0].status == "canceled"
    assert ended.steps[1].task_id is None
    assert (await local("job_cancel", job_id=job.job_id)).canceled is False


async def test_a_service_and_its_endpoint(local) -> None:
    """A service runs once it is ready, is reached at the address it shows, and is gone after its cancel."""
    started = await local(
        "run_service",
        skill_name="tool",
        session_id="service",
        workdir="session",
        command="echo hi > index.html; echo starting; exec python3 -m http.server 8000",
        ready={"tcp_port": 8000},
        expose_ports=[8000],
    )
    assert (started.mode, started.status) == ("service", "queued")
    assert [(item.port, item.url) for item in started.exposed_endpoints] == [(8000, None)]
    seen = await local.until(started.task_id, lambda item: item.status == "running")
    assert (seen.startup_ready, seen.exposed_endpoints_active) == (True, True)
    (endpoint,) = seen.exposed_endpoints
    assert endpoint.url.startswith("http://127.0.0.1:")

    def get() -> bytes:
        with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    assert await asyncio.to_thread(get) == b"hi\n"
    await local("task_cancel", task_id=started.task_id)
    ended = await local.over(started.task_id)
    assert (ended.status, ended.exposed_endpoints_active, ended.exposed_endpoints[0].url) == ("canceled", False, None)
    with pytest.raises(OSError, match=r"refused|reset"):
        await asyncio.to_thread(get)


async def test_a_query_command_disturbs_nothing(local) -> None:
    """Provider cmd runs its question in a sandbox of its own; the running task and its session do not notice."""
    task = await local.start("echo mine > f; echo up; sleep 600", session_id="asked")
    await local.until(task, lambda seen: seen.stdout_tail == "up\n")
    found = await local("task_status", provider="cmd", task_id=task, query_command="ls; echo done; exit 5")
    assert (found.status, found.provider, found.task_id) == ("running", "cmd", task)
    assert (found.query.status, found.query.exit_code, found.query.stdout) == ("failed", 5, "SKILL.md\nscripts\ndone\n")
    alone = await local("task_status", provider="cmd", skill_name="tool", query_command=["echo", "idle"])
    assert (alone.task_id, alone.status, alone.query.stdout) == (None, "succeeded", "idle\n")
    with pytest.raises(NotFound):
        await local("task_status", provider="cmd", skill_name="no-such-skill", query_command="true")
    await local("task_cancel", task_id=task)


async def test_lists_show_the_newest_first(local) -> None:
    """Tasks and jobs are listed newest first, by status and session."""
    ids = [await local.start("true", session_id=f"list-{number}") for number in range(3)]
    for item in ids:
        await local.over(item)
    listed = [row.task_id for row in (await local.host.call("tasks.list", limit=3)).tasks]
    assert listed == ids[::-1]
    one = await local.host.call("tasks.list", session_id="list-1", status="succeeded")
    assert [(row.task_id, row.command) for row in one.tasks] == [(ids[1], ("/bin/sh", "-c", "true"))]
    assert (await local.host.call("tasks.list", session_id="list-1", status="failed")).tasks == ()
