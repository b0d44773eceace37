"""What one host has is answered by the doors of another: logs, artifacts and services, over the stream of the first."""

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from kdskills.app import Host
from kdskills.errors import KdskillsError
from kdskills.jobs import stream
from kdskills.jobs.model import TaskHead
from kdskills.jobs.settings import FleetSettings
from kdskills.jobs.stream import FarHosts, HostUnreachable, LogQuestion
from kdskills.testing.work import WorkLab

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("pool"), pytest.mark.timeout(120)]


@pytest.fixture
async def two(cluster, monkeypatch):
    """Two hosts on one database: the first serves its files and runs work, the second has a door and no worker."""
    monkeypatch.setattr(stream, "KNOWN_S", 0.0)
    url = await asyncio.to_thread(cluster.create, f"streams_{Path(tempfile.mktemp()).name.lower()}")
    with tempfile.TemporaryDirectory(prefix="kdskills-streams-") as top:
        labs = [
            WorkLab(Path(top), url, host=name, engine_settings={"fleet": FleetSettings(listen=listen)})
            for name, listen in (("a", "127.0.0.1:0"), ("b", None))
        ]
        labs[0].start()
        door = Host(labs[1].settings, entry_points=False)
        door.work.__dict__["client"] = labs[1].client
        yield labs[0], door
        await door.work.aclose()
        await door.storage.aclose()
        for lab in labs:
            await lab.aclose()


async def served(lab):
    """Return the row of the first host's worker, once it is in the roster."""
    work = await lab.client.work()
    return (await lab.until(lambda: work.database.ask(work.roster.live)))[0]


async def ask(row, text, key=None):
    """Send *text* as a question with the signature of *key* and return the first line of the answer."""
    name, port = row.address.removeprefix("tcp://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(name, int(port))
    chance = (await reader.readline())[:-1]
    writer.write(stream._signature(key or row.stream_key, chance, text) + b" " + text + b"\n")
    line = await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    return json.loads(line)["code"] if line else "closed"


async def test_a_log_is_followed_from_another_door_until_its_host_dies(two):
    """While the task prints, the other door has what it printed; when the host is gone the answer names it, and says why."""
    one, door = two
    head = await one.client.submit(
        one.task(f"echo one; until [ -e {one.ledger.path}.go ]; do sleep 0.05; done; echo two; sleep 600")
    )
    await one.running(head.id)

    async def piece(offset, **more):
        return await door.call("skills.task_logs", task_id=head.id, offset=offset, **more)

    first = await piece(0, follow=True)
    assert (first.data, first.elsewhere, first.ended) == ("one\n", None, False)
    waiting = asyncio.ensure_future(piece(first.next_offset, follow=True, timeout_sec=60))
    one.ledger.let_go()
    assert (await waiting).data == "two\n"
    assert (await piece(-4)).data == "two\n"
    status = await door.call("skills.task_status", task_id=head.id)
    assert (status.stdout_tail, status.stdout_total, status.logs_elsewhere) == ("one\ntwo\n", 8, None)
    one.kill()
    gone = await piece(0)
    assert (gone.elsewhere, gone.data, gone.ended) == ((await one.client.work()).host, "", False)
    assert gone.elsewhere_reason
    assert (await door.call("skills.task_status", task_id=head.id)).logs_elsewhere == gone.elsewhere


async def test_only_what_the_database_says_is_this_hosts_is_given(two):
    """Another key, ids that are none, paths, and work of others are refused, and the listener goes on."""
    one, _ = two
    row = await served(one)
    head = await one.client.submit(one.task("echo secret"))
    await one.client.wait(TaskHead, one.scope, head.id, 60)
    log = LogQuestion(id=head.id, stream="stdout", offset=0, limit=100)
    good = log.model_dump_json().encode()
    assert await ask(row, good) == "ok"
    assert await ask(row, good, key="0" * 64) == "key_refused"
    for item in ("../../etc", "task_none", "task_\x00", "täsk", "a" * 128):
        for kind in (
            {"ask": "log", "stream": "stdout", "offset": 0, "limit": 9},
            {"ask": "artifact", "begin": 0, "end": 9},
            {"ask": "port", "port": 22},
        ):
            assert await ask(row, json.dumps({"id": item, **kind}).encode()) == "not_here", (item, kind)
    assert await ask(row, json.dumps({"ask": "port", "id": head.id, "port": 22}).encode()) == "not_here"
    for bad in (
        b"",
        b"[]",
        b"{}",
        b'{"ask": "file", "path": "/etc/passwd"}',
        good[:-1] + b', "path": "/etc"}',
        b"x" * 9000,
    ):
        assert await ask(row, bad) == "closed", bad
    work = await one.client.work()
    tasks = work.tables.tasks
    await work.database.write(lambda link: link.execute(tasks.update().values(host="other")))
    assert await ask(row, good) == "not_here"


async def test_the_key_is_shown_nowhere(two):
    """Neither the fleet, nor the log of the worker, nor an error has it; the fleet says where a worker is asked."""
    one, door = two
    row = await served(one)
    fleet = await door.call("fleet.show")
    assert fleet.hosts[0].workers[0].address == row.address
    work = await door.work.client.work()
    far = FarHosts(work, FleetSettings(authority="/nowhere"))
    head = await one.client.submit(one.task("true"))
    head = await one.client.wait(TaskHead, one.scope, head.id, 60)
    with pytest.raises(HostUnreachable, match="not TLS") as refused:
        await far.log(head, "stdout", 0, 9)
    for text in (
        fleet.model_dump_json(),
        one.said(),
        json.dumps(refused.value.to_json()),
        repr(stream.HostStream(work, None, None)),
    ):
        assert row.stream_key not in text
        assert "key=" not in text


async def test_an_artifact_is_read_where_it_does_not_lie(two):
    """Without a store that hosts share, the other door reads an artifact over the stream, whole and by range."""
    one, door = two
    spec = one.task("head -c 1500000 /dev/zero | tr '\\0' x > out.bin")
    spec = spec.model_copy(update={"command": spec.command.model_copy(update={"outputs": ("out.bin",)})})
    head = await one.client.submit(spec)
    head = await one.client.wait(TaskHead, one.scope, head.id, 60)
    (kept,) = head.artifacts
    piece = await door.call("artifacts.get", artifact_id=kept.artifact_id, offset=1_499_990, limit=100)
    assert (piece.size, piece.next_offset, piece.data_base64) == (1_500_000, 1_500_000, "eHh4eHh4eHh4eA==")
    one.kill()
    with pytest.raises(KdskillsError) as missing:
        await door.call("artifacts.get", artifact_id=kept.artifact_id, limit=1)
    assert missing.value.code == "host_unreachable"
