"""Callers that stop halfway, come twice, read slowly, or lose their token meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from kdskills.app.identity import LOCAL
from kdskills.app.work import scope_of
from kdskills.jobs.model import TaskHead

BEGIN = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.zip"\r\nContent-Type: application/zip\r\n\r\n'
END = b"\r\n--b--\r\n"


def connect(service):
    """Return a bare connection to the service."""
    parts = urlsplit(service.url)
    return socket.create_connection((parts.hostname, parts.port), 120)


def first_line(connection):
    """Return the first line of what is answered."""
    with connection.makefile("rb") as answer:
        return answer.readline()


def upload_request(token, body, *, length=None):
    """Return the bytes of an upload, its head telling *length* or the true one."""
    head = (
        "POST /projects/local/skills:upload HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {token}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def until(condition, seconds=120):
    """Wait for a condition, with patience for a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def left(service):
    """Return what uploads left below the folder of projects."""
    top = service.host.settings.state_dir / "projects"
    return sorted(path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()) if top.exists() else []


def test_uploads_cut_off_anywhere_leave_nothing(service, archive):
    """Wherever the connection ends, in head, form, archive or last boundary, there is neither row nor file of it."""
    token = service.token()
    whole = upload_request(
        token, BEGIN + archive("brief", **{"a.txt": " ".join(map(str, range(1500)))}).read_bytes() + END
    )
    points = sorted({1, 40, 200, *range(250, len(whole), max(1, len(whole) // 25)), len(whole) - 1})
    for point in points:
        with connect(service) as cut:
            cut.sendall(whole[:point])
    with service.client(token) as client:
        until(lambda: service.app.state.drain.idle)
        assert client.get("/projects/local/skills").json()["skills"] == []
        until(lambda: left(service) == [])
        with connect(service) as last:
            last.sendall(whole)
            assert first_line(last) == b"HTTP/1.1 201 Created\r\n"
        assert len(client.get("/projects/local/skills").json()["skills"]) == 1
        assert client.get("/projects/local/skills/brief").status_code == 200


def test_a_body_shorter_or_longer_than_told(service, archive):
    """What comes is what is counted: a body that ends early is no upload, and one that goes on is cut at what was told."""
    token = service.token()
    body = BEGIN + archive("brief").read_bytes() + END
    with connect(service) as short:
        short.sendall(upload_request(token, body, length=len(body) + 1000))
        short.shutdown(socket.SHUT_WR)
        assert b"201" not in first_line(short)
    with connect(service) as long:
        long.sendall(upload_request(token, body, length=len(body) - 20))
        assert first_line(long).split()[1] == b"400"
    until(lambda: service.app.state.drain.idle)
    with service.client(token) as client:
        assert client.get("/projects/local/skills").json()["skills"] == []
    assert left(service) == []


def test_a_slow_upload_holds_up_nobody(service, archive):
    """While a body comes byte by byte, others are answered, and it is taken in the end."""
    token = service.token()
    whole = upload_request(token, BEGIN + archive("brief").read_bytes() + END)
    with connect(service) as slow, service.client(token) as client:
        for number in range(0, len(whole), 1 + len(whole) // 10):
            slow.sendall(whole[number : number + 1 + len(whole) // 10])
            assert client.get("/projects/local/skills").status_code == 200
        assert first_line(slow) == b"HTTP/1.1 201 Created\r\n"


def test_uploads_of_one_skill_at_once(service, archive):
    """Twelve uploads of one skill, four contents, at one moment: four versions, one in use, all files there."""
    token = service.token()
    archives = [archive("brief", body=f"Version {number % 4}.") for number in range(12)]
    met = threading.Barrier(12)

    def send(place):
        met.wait(120)
        with service.client(token) as client, place.open("rb") as zipped:
            return client.post("/projects/local/skills:upload", files={"file": zipped})

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(send, archives))
    assert {answer.status_code for answer in answers} == {201}
    with service.client(token) as client:
        versions = client.get("/projects/local/skills/brief/versions").json()["versions"]
        assert len(versions) == 4
        assert {row["version"] for row in versions} == {answer.json()["version"] for answer in answers}
        assert [row["active"] for row in versions].count(True) == 1
        shown = client.get("/projects/local/skills/brief/files/SKILL.md")
        assert (shown.status_code, shown.text.count("Version")) == (200, 1)
        for row in versions:
            found = client.get("/projects/local/skills/brief/archive", params={"version": row["version"]})
            assert found.status_code == 200


def test_an_upload_and_a_deletion_at_once(service, archive):
    """Whatever comes first, the skill is there whole or not at all."""
    token = service.token()
    for _ in range(5):
        place = archive("brief")
        met = threading.Barrier(2)

        def send(place=place, met=met):
            met.wait(120)
            with service.client(token) as client, place.open("rb") as zipped:
                return client.post("/projects/local/skills:upload", files={"file": zipped}).status_code

        def delete(met=met):
            met.wait(120)
            with service.client(token) as client:
                return client.delete("/projects/local/skills/brief").status_code

        with ThreadPoolExecutor(2) as pool:
            sent, deleted = pool.submit(send), pool.submit(delete)
            assert sent.result(120) == 201
            assert deleted.result(120) in {200, 404}
        with service.client(token) as client:
            there = client.get("/projects/local/skills/brief").status_code
            assert client.get("/projects/local/skills/brief/files/SKILL.md").status_code == there
            assert there in {200, 404}


@pytest.mark.parametrize("name", ["a", "0", "a-b_c", "a" * 64, "9" + "_" * 63])
def test_names_of_projects_at_their_limits(service, archive, name):
    """The shortest and the longest names are projects like any other."""
    with service.client(service.token(project=name)) as client, archive("brief").open("rb") as zipped:
        assert client.post(f"/projects/{name}/skills:upload", files={"file": zipped}).status_code == 201
        assert client.get(f"/projects/{name}/skills/brief").status_code == 200


@pytest.mark.parametrize(
    "name", ["A", "-a", "_a", "a" * 65, "a.b", "a%2Fb", "%2e%2e", "ä", "a%00", "a%20", "%E2%80%AE", "a\u0301"]
)
def test_names_that_are_no_projects(service, name):
    """Anything else is nothing, with and without a token, and never a server's error."""
    with service.client(service.token()) as client:
        answer = client.get(f"/projects/{name}/skills")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    with service.client() as client:
        assert client.get(f"/projects/{name}/skills").status_code in {401, 404}


@pytest.fixture
def running(service, archive):
    """A task that goes on until the test is over; gives a token and the task's id."""
    token = service.token()
    with service.client(token) as client:
        with archive("brief").open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
        body = {"skill_name": "public.brief", "command": ["sleep", "600"], "session_id": "s1"}
        task = client.post("/projects/local/tools/skills.run_cmd_async", json=body).json()["task_id"]
    yield token, task
    service.run(service.host.work.client.cancel(TaskHead, scope_of(LOCAL), task, "the test is over"))


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("what", ["events", "logs"])
def test_a_revoked_token_ends_its_streams(service, running, what):
    """Whoever reads a stream when the token is revoked is told so, and reads no more; another token reads on."""
    token, task = running
    listed = service.run(service.host.tokens.list())
    with (
        service.client(token) as mine,
        mine.stream("GET", f"/projects/local/tasks/{task}/{what}", headers={"Accept": "text/event-stream"}) as stream,
    ):
        reading = stream.iter_lines()
        assert next(reading).startswith("retry:")
        service.run(service.host.tokens.revoke(listed[0].id, who="test"))
        rest = list(reading)
    errors = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith('data: {"error"')]
    assert [error["error"]["code"] for error in errors] == ["unauthenticated"]
    assert service.run(service.host.tokens.going(listed[0].id)) is False
    with service.client(token) as mine:
        assert mine.get(f"/projects/local/tasks/{task}/events").status_code == 401


@pytest.mark.needs("bubblewrap")
def test_many_watchers_of_one_task(service, running):
    """Sixty readers of one task are told of it, others are answered meanwhile, and nothing is left when they leave."""
    token, task = running
    lines = [
        f"GET /projects/local/tasks/{task}/events HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {token}",
        "",
        "",
    ]
    readers = [connect(service) for _ in range(60)]
    try:
        for reader in readers:
            reader.sendall("\r\n".join(lines).encode())
        for reader in readers:
            said = b""
            while b"event: state" not in said:
                piece = reader.recv(65536)
                assert piece, said
                said += piece
        with service.client(token) as client:
            assert client.get(f"/projects/local/tasks/{task}").status_code == 200
    finally:
        for reader in readers:
            reader.close()
    until(lambda: service.app.state.drain.idle)
