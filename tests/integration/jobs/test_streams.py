"""What one host has is answered by the doors of another: logs, artifacts and services, over the stream of the first."""

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import sqlalchemy as sa
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from kdskills.app import Host
from kdskills.app.connections import BoundedServer, Crowd, serve, server_config
from kdskills.doors.web import build_app, services
from kdskills.errors import KdskillsError
from kdskills.errors.traces import Trace
from kdskills.jobs import stream
from kdskills.jobs.model import OnPort, Placement, ServiceSpec, TaskHead
from kdskills.jobs.settings import FleetSettings
from kdskills.jobs.stream import FarHosts, HostUnreachable, LogQuestion, StreamRefused
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
    """Another key, ids that are none, paths, and work of others are refused; no log, error or look at the fleet has the key."""
    one, door = two
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
    fleet = await door.call("fleet.show")
    assert fleet.hosts[0].workers[0].address == row.address
    with pytest.raises(HostUnreachable, match="not TLS") as refused:
        await FarHosts(work, FleetSettings(authority="/nowhere")).log(
            await one.client.head(TaskHead, one.scope, head.id), "stdout", 0, 9
        )
    error = json.dumps(refused.value.to_json())
    for text in (fleet.model_dump_json(), one.said(), error, repr(stream.HostStream(work, None, None))):
        assert row.stream_key not in text
        assert "key=" not in text
    tasks = work.tables.tasks
    await work.database.write(lambda link: link.execute(tasks.update().values(host="other")))
    assert await ask(row, good) == "not_here"
    later = sa.func.replace(tasks.c.spec, '{"scope"', '{"of_tomorrow":1,"scope"')
    await work.database.write(lambda link: link.execute(tasks.update().values(spec=later, host=work.host)))
    assert await ask(row, good) == "work_unreadable"
    await one.until(lambda: "a question of another host is not answered" in one.said())


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


PROGRAM = Path(__file__).with_name("service_program.py").read_text()
PORT = 8080
SENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def certificate(folder, name):
    """Make a certificate for localhost that is its own authority; return its file and that of its key."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    about = ("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost")
    command = ["openssl", "req", "-x509", *kind, *about, "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


async def test_the_stream_is_tls_where_it_is_asked_for(two, tmp_path, monkeypatch):
    """Logs come over TLS when the certificate is trusted; one of somebody else, or a question without TLS, gets nothing.

    What is trusted is read once, in a thread, and again after a certificate that was not.
    """
    one, _ = two
    mine, theirs = certificate(tmp_path, "mine"), certificate(tmp_path, "theirs")
    head = await one.client.submit(one.task("echo secret"))
    head = await one.client.wait(TaskHead, one.scope, head.id, 60)
    work = await one.client.work()
    fleet = FleetSettings(listen="127.0.0.1:0", address="localhost:0", certificate=mine[0], key=mine[1])
    serving_host = stream.HostStream(work, None, fleet)
    server = await serving_host.listen(0)
    assert serving_host.address.startswith("tls://localhost:")

    def asking(address=serving_host.address, **settings):
        far = FarHosts(work, FleetSettings(**settings))
        worker = SimpleNamespace(host=head.host, address=address, stream_key=serving_host.key)
        far._workers[head.host] = (float("inf"), worker, "")
        return far

    async def read(*args, **settings):
        return (await asking(*args, **settings).log(head, "stdout", 0, 100)).data

    built, build = [], ssl.create_default_context

    def building(**options):
        built.append(threading.current_thread())
        return build(**options)

    assert await read(authority=mine[0]) == b"secret\n"
    for authority in (theirs[0], None):
        with pytest.raises(HostUnreachable, match="its certificate is not trusted"):
            await read(authority=authority)
    with pytest.raises(HostUnreachable, match="cannot be asked"):
        await read(serving_host.address.replace("tls", "tcp"))
    monkeypatch.setattr(ssl, "create_default_context", building)
    shutil.copy(theirs[0], tmp_path / "renewed.pem")
    far = asking(authority=tmp_path / "renewed.pem")
    known = dict(far._workers)
    with pytest.raises(HostUnreachable, match="its certificate is not trusted"):
        await far.log(head, "stdout", 0, 100)
    shutil.copy(mine[0], tmp_path / "renewed.pem")
    for _ in range(3):
        far._workers.update(known)
        assert (await far.log(head, "stdout", 0, 100)).data == b"secret\n"
    assert len(built) == 2
    assert threading.main_thread() not in built
    await serving_host.close(server)
    with pytest.raises(StreamRefused):
        await stream.HostStream(work, None, FleetSettings(listen="127.0.0.1:0", certificate=tmp_path / "none")).listen(
            0
        )


@contextlib.asynccontextmanager
async def serving(host):
    """Serve *host* as `kdskills serve` does, and give its address."""
    crowd = Crowd()
    app = build_app(host, listen="127.0.0.1")
    server = BoundedServer(server_config(app, "127.0.0.1", 0, crowd, ws="websockets-sansio"))
    running = asyncio.ensure_future(serve(server, crowd))
    async with asyncio.timeout(30):
        while not server.started:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
    yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    app.state.drain.start()
    server.should_exit = True
    await running
    assert crowd._all == set()


@pytest.fixture
async def web(two):
    """The service of the tests on the first host, the doors of both over HTTP, and a token."""
    one, door = two
    spec = one.task(
        'exec python3 -c "$PROGRAM" 8080', service=ServiceSpec(ready=OnPort(tcp_port=PORT), expose_ports=(PORT,))
    )
    command = spec.command.model_copy(update={"env": {"PROGRAM": PROGRAM}})
    placement = Placement(engine="bubblewrap", skill_name="x", version_hash="0")
    head = await one.client.submit(spec.model_copy(update={"command": command, "placement": placement}))
    await one.running(head.id)
    own = Host(one.settings, entry_points=False)
    own.work.__dict__["client"] = one.client
    _, token = await door.tokens.create("local", "local", {"work:run", "work:read"}, who="test")
    async with serving(own) as first, serving(door) as second:
        yield one, door, head, (first, second), token
    await own.storage.aclose()


async def test_a_service_is_reached_through_every_door(web, monkeypatch):
    """Over HTTP and by WebSocket, with bodies, paths as they were written, and streams as they come, until its token is revoked."""
    monkeypatch.setattr(services, "CHECK_S", 0.05)
    _, host, head, doors, token = web
    for door in doors:
        place = f"{door}/services/{head.id}/{PORT}"
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=30
        ) as client:
            hop = {"Cookie": "a=b", "X-Forwarded-For": "9.9.9.9", "Connection": "X-Mine", "X-Mine": "1", "X-Kept": "1"}
            hop |= {"traceparent": SENT, "tracestate": "mine=1", "X-Request-Id": "r 1"}
            answer = await client.post(f"http://{place}/a%2Fb/%C3%A4?q=%20x", content=b"x" * 300_000, headers=hop)
            told = answer.json()
            assert (told["method"], told["target"], told["body"]) == ("POST", "/a%2Fb/%C3%A4?q=%20x", 300_000)
            assert (told["headers"]["host"], told["headers"]["x-forwarded-prefix"]) == (
                f"localhost:{PORT}",
                f"/services/{head.id}/{PORT}",
            )
            assert told["headers"]["x-kept"] == "1"
            assert told["headers"]["x-request-id"] == answer.headers["x-request-id"] != "r 1"
            assert told["headers"]["traceparent"] == answer.headers["traceresponse"]
            assert SENT[:36] in answer.headers["traceresponse"] != SENT
            assert (
                not {"authorization", "cookie", "tracestate", "x-forwarded-for", "x-mine", "origin"}
                & told["headers"].keys()
            )
            assert token not in answer.text
            assert not {"set-cookie", "clear-site-data", "service-worker-allowed", "x-hop"} & answer.headers.keys()
            assert answer.headers["content-security-policy"] == "sandbox"

            async def pieces():
                for _ in range(3):
                    yield b"12345"

            assert (await client.put(f"http://{place}/", content=pieces())).json()["body"] == 15
            away = await client.get(f"http://{place}/away")
            assert away.headers["location"] == f"/services/{head.id}/{PORT}/login?x=1"
            async with client.stream("GET", f"http://{place}/stream") as stream_answer:
                assert await anext(stream_answer.aiter_bytes()) == b"one\n"
        async with connect(
            f"ws://{place}/ws", additional_headers={"Authorization": f"Bearer {token}"}, proxy=None
        ) as ws:
            assert Trace.read(ws.response.headers["traceresponse"])
            await ws.send("hello")
            assert await ws.recv() == "hello"
            await ws.send(b"\x00" * 5000)
            assert await ws.recv() == b"\x00" * 5000
            await ws.send("bye")
            with pytest.raises(ConnectionClosed):
                await ws.recv()
            assert ws.close_code == 4000
    words = {"Authorization": f"Bearer {token}"}
    async with connect(f"ws://{doors[1]}/services/{head.id}/{PORT}/ws", additional_headers=words, proxy=None) as ws:
        await ws.send("hello")
        assert await ws.recv() == "hello"
        await host.tokens.revoke(token.split("_")[1], who="test")
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(ws.recv(), 30)


async def test_whoever_may_not_and_what_is_down_is_told_so(web):
    """No token, a token of others or for less, another site's page, ports that are not declared, and a service that is gone."""
    one, door, head, (_, second), token = web
    place = f"{second}/services/{head.id}/{PORT}"
    stranger = (await door.tokens.create("local", "other", {"work:run"}, who="test"))[1]
    reader = (await door.tokens.create("local", "local", {"work:read"}, who="test"))[1]

    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:

        async def get(url, token=token, **headers):
            headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
            answer = await client.get(f"http://{url}", headers=headers)
            return answer.status_code, answer.json()["code"]

        assert await get(place, None) == (401, "unauthenticated")
        assert await get(place, None, Cookie=f"kdskills={token}") == (401, "unauthenticated")
        assert await get(place, stranger) == (404, "not_found")
        assert await get(place, reader) == (403, "scope_missing")
        assert await get(place, Origin="https://evil.example") == (403, "origin_refused")
        for tail in (f"{head.id}/22", f"{head.id}/99999", f"{head.id}/x", head.id, "..%2F..%2Fx/80", "task_none/80"):
            assert await get(f"{second}/services/{tail}") == (404, "not_found"), tail
        assert await get(f"{place}/noise") == (502, "service_down")
        with pytest.raises(httpx.RemoteProtocolError):
            await get(f"{place}/cut")
        for headers in (
            {},
            {"Authorization": f"Bearer {reader}"},
            {"Authorization": f"Bearer {token}", "Origin": "https://evil.example"},
        ):
            with pytest.raises(InvalidStatus):
                await connect(f"ws://{place}/ws", additional_headers=headers, proxy=None)
        one.kill()
        assert await get(place) == (502, "host_unreachable")
        one.start()
        await one.client.cancel(TaskHead, one.scope, head.id)
        await one.client.wait(TaskHead, one.scope, head.id, 60)
        assert await get(place) == (502, "service_down")
