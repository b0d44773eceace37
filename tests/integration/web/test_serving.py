"""`kdskills serve` as a process: its first token, its logs, and how it stops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from kdskills.doors.web.events import Drain

KDSKILLS = Path(sys.executable).with_name("kdskills")
TOKEN = re.compile(r"kd_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")


class Process:
    """A service in a process of its own; its standard error is a file."""

    def __init__(self, folder, *words, **variables):
        self.log = folder / f"log-{time.monotonic_ns()}"
        self.state = folder / "state"
        env = {**os.environ, "KDSKILLS_STATE_DIR": str(self.state), "KDSKILLS_INDEX_DIR": str(folder / "index")}
        with self.log.open("wb") as out:
            command = [KDSKILLS, "serve", "--listen", "127.0.0.1:0", *words]
            self.process = subprocess.Popen(command, env={**env, **variables}, stderr=out, stdout=out)
        self.url = self._url()

    @property
    def said(self):
        """Everything it wrote."""
        return self.log.read_text(encoding="utf-8")

    @property
    def token(self):
        """The first token, from its file."""
        return (self.state / "first-token").read_text().strip()

    def _url(self):
        for _ in range(600):
            found = re.search(r"Uvicorn running on (http://\S+)", self.said)
            if found:
                return found.group(1)
            assert self.process.poll() is None, self.said
            time.sleep(0.1)
        raise AssertionError(self.said)

    @property
    def address(self):
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def stop(self):
        """Stop it in order and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def start(tmp_path):
    """Start services that end with the test."""
    made = []

    def begin(*words, **variables):
        made.append(Process(tmp_path, *words, **variables))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(60)


def until(condition):
    """Wait for a condition, with patience for a busy machine."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that")


def test_the_first_token_is_in_a_private_file(start):
    """A clean machine is one command and one token away from an answer; no log has it, and the next start makes none."""
    service = start()
    assert TOKEN.findall(service.said) == []
    file = service.state / "first-token"
    assert str(file) in service.said
    assert (stat.S_IMODE(file.stat().st_mode), bool(TOKEN.fullmatch(service.token))) == (0o600, True)
    headers = {"Authorization": f"Bearer {service.token}"}
    assert httpx.get(f"{service.url}/projects/local/skills", headers=headers).status_code == 200
    assert httpx.get(f"{service.url}/projects/local/skills").status_code == 401
    assert service.stop() == 0
    file.unlink()
    again = start()
    assert (TOKEN.findall(again.said), file.exists()) == ([], False)
    assert httpx.get(f"{again.url}/projects/local/skills", headers=headers).status_code == 200


def test_the_service_has_its_title(start):
    """`ps` shows the service and where it listens."""
    service = start("--no-auth")
    assert Path(f"/proc/{service.process.pid}/cmdline").read_bytes().startswith(b"kdskills: serve 127.0.0.1:")


def test_the_first_token_is_shown_to_a_terminal(tmp_path):
    """Where somebody looks at standard error, the token is shown there and written nowhere."""
    env = {**os.environ, "KDSKILLS_STATE_DIR": str(tmp_path / "state"), "KDSKILLS_INDEX_DIR": str(tmp_path / "index")}
    ours, theirs = os.openpty()
    process = subprocess.Popen([KDSKILLS, "serve", "--listen", "127.0.0.1:0"], env=env, stderr=theirs, stdout=theirs)
    os.close(theirs)
    said = b""
    try:
        while b"Uvicorn running" not in said:
            said += os.read(ours, 65536)
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)
    assert len(TOKEN.findall(said.decode())) == 1
    assert not (tmp_path / "state" / "first-token").exists()


def test_logs_are_json_without_secrets(start):
    """Every line but the first token's is JSON; a request has one line with its id, and no token is in any."""
    service = start()
    token = service.token
    asked = {"Authorization": f"Bearer {token}", "X-Request-Id": "abc-1"}
    httpx.get(f"{service.url}/projects/local/skills", params={"password": "hunter22"}, headers=asked)
    until(lambda: "abc-1" in service.said)
    assert service.stop() == 0
    lines = [line for line in service.said.splitlines() if not line.startswith("kdskills: ")]
    found = [json.loads(line) for line in lines]
    mine = [line for line in found if line.get("request_id") == "abc-1"]
    assert [(line["method"], line["path"], line["status"]) for line in mine] == [("GET", "/projects/local/skills", 200)]
    assert token not in "".join(lines)
    assert "hunter22" not in "".join(lines)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:80", "nonsense"])
def test_without_tokens_on_loopback_only(listen, tmp_path):
    """`--no-auth` on an address that others reach is refused before anything listens."""
    env = {**os.environ, "KDSKILLS_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        [KDSKILLS, "serve", "--no-auth", "--listen", listen], env=env, capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, "listen_refused" in done.stderr) == (4, True)


def test_a_taken_address_is_one_sentence(tmp_path):
    """An address in use is told in words, with the exit code for the operator."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {**os.environ, "KDSKILLS_STATE_DIR": str(tmp_path / "state")}
        words = [KDSKILLS, "serve", "--no-auth", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 4
    assert "listen_refused" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "variables"),
    [(("--nats", "nats://127.0.0.1:1"), {}), ((), {"KDSKILLS_BUS__URL": "nats://127.0.0.1:1"})],
    ids=["option", "setting"],
)
def test_a_bus_that_is_away_is_a_warning(start, words, variables):
    """HTTP answers although the bus does not; the log says so, and the service stops in order."""
    service = start("--no-auth", *words, **variables)
    until(lambda: '"logger": "kdskills.nats"' in service.said)
    assert httpx.get(f"{service.url}/healthz").status_code == 200
    assert service.stop() == 0
    assert "Traceback" not in service.said


def test_one_error_of_ours_is_told_alone():
    """What the operator must mend is told in its own words; anything else with all that went wrong."""
    from kdskills.doors.web.application import _first
    from kdskills.errors import OperatorMustAct

    ours = OperatorMustAct("no bus")
    assert _first(BaseExceptionGroup("", [ExceptionGroup("", [ours])])) is ours
    mixed = ExceptionGroup("", [ours, ValueError("x")])
    assert _first(mixed) is mixed


def test_term_lets_running_requests_finish(start, archive):
    """After TERM health says no, nothing new begins, and an upload that runs is answered before the process ends."""
    service = start("--no-auth", KDSKILLS_DRAIN_S="60")
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.zip"\r\n\r\n'
    body += archive("brief").read_bytes() + b"\r\n--b--\r\n"
    head = (
        "POST /projects/local/skills:upload HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(service.address, 60) as slow:
        slow.sendall(head + body[:200])
        with httpx.Client(base_url=service.url, timeout=60) as client:
            assert client.get("/readyz").json()["draining"] is False
            service.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/readyz").json()["draining"])
            assert client.get("/readyz").status_code == 503
            assert client.get("/healthz").status_code == 200
            refused = client.get("/projects/local/skills")
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert service.process.poll() is None
        slow.sendall(body[200:])
        answered = slow.makefile("rb").readline()
    assert answered == b"HTTP/1.1 201 Created\r\n"
    assert service.process.wait(60) == 0


def test_a_drain_has_an_end(start):
    """A request that never finishes is cut off when its time is over."""
    service = start("--no-auth", KDSKILLS_DRAIN_S="1")
    head = b"POST /projects/local/tools/skills.list HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
    with socket.create_connection(service.address, 60) as slow:
        slow.sendall(head)
        until(lambda: httpx.get(f"{service.url}/healthz").status_code == 200)
        assert service.stop() == 0


def test_a_database_that_is_away_is_not_ready(settings, serve, tmp_path):
    """`/readyz` fails when the database does, and says which part in one word; `/healthz` goes on."""
    from kdskills.app import Host

    (tmp_path / "blocked").write_text("a file where a folder should be", encoding="utf-8")
    broken = settings.model_copy(update={"database_url": f"sqlite:///{tmp_path}/blocked/work.db"})
    with serve(Host(broken, entry_points=False), open_on_loopback=True) as service, service.client() as client:
        found = client.get("/readyz")
        assert found.status_code == 503
        assert found.json()["checks"]["database"] != "ok"
        assert str(tmp_path) not in found.text
        assert client.get("/healthz").status_code == 200


def test_no_engine_is_not_ready(settings, serve):
    """`/readyz` fails when no engine may be used."""
    from kdskills.app import Host

    weak = settings.model_copy(update={"executor": "nothing"})
    with serve(Host(weak, entry_points=False), open_on_loopback=True) as service, service.client() as client:
        found = client.get("/readyz")
        assert (found.status_code, found.json()["checks"]["database"]) == (503, "ok")
        assert found.json()["checks"]["engine"] != "ok"


# ---- work --------------------------------------------------------------------------------------------------------


def events_of(lines, most=10_000):
    """Return the events of a stream as (id, event, data)."""
    found, now = [], {}
    for line in lines:
        if line == "" and "data" in now:
            found.append((now.get("id"), now.get("event"), json.loads(now["data"])))
            now = {}
            if len(found) >= most:
                break
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            now[name] = value
    return found


@pytest.mark.needs("bubblewrap")
def test_work_is_followed_and_resumed(service, archive):
    """A task's events come in order under growing numbers; a reader who comes back hears only what is new."""
    with service.client(service.token()) as client:
        with archive("brief").open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
        script = ["sh", "-c", "for n in 1 2 3; do echo line $n; sleep 0.4; done"]
        body = {"skill_name": "public.brief", "command": script, "session_id": "s1"}
        started = client.post("/projects/local/tools/skills.run_cmd_async", json=body)
        assert started.status_code == 200, started.text
        task = started.json()["task_id"]
        with client.stream("GET", f"/projects/local/tasks/{task}/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            first = events_of(stream.iter_lines(), most=1)
        with client.stream(
            "GET", f"/projects/local/tasks/{task}/events", headers={"Last-Event-ID": first[0][0]}
        ) as stream:
            rest = events_of(stream.iter_lines())
        numbers = [int(number) for number, event, _ in [*first, *rest] if event in {"state", "output"}]
        assert numbers == sorted(set(numbers))
        assert rest[-1][1] == "end"
        assert rest[-1][2]["status"] == "succeeded"
        with client.stream(
            "GET", f"/projects/local/tasks/{task}/logs", headers={"Accept": "text/event-stream"}
        ) as stream:
            pieces = events_of(stream.iter_lines())
        assert "".join(data["data"] for _, event, data in pieces if event == "output") == "line 1\nline 2\nline 3\n"
        resumed = {"Accept": "text/event-stream", "Last-Event-ID": "7"}
        with client.stream("GET", f"/projects/local/tasks/{task}/logs", headers=resumed) as stream:
            again = events_of(stream.iter_lines())
        assert "".join(data["data"] for _, event, data in again if event == "output") == "line 2\nline 3\n"
        assert client.get(f"/projects/local/tasks/{task}/logs").json()["data"] == "line 1\nline 2\nline 3\n"
        assert client.get(f"/projects/local/tasks/{task}").json()["exit_code"] == 0
        assert task in {row["task_id"] for row in client.get("/projects/local/tasks").json()["tasks"]}
        # The version was held while the task could run, and is let go of now that it is over.
        assert service.run(service.host.projects.holders()) == [("local", task)]
        assert service.run(service.host.upkeep.release()) == 1
        assert service.run(service.host.projects.holders()) == []


@pytest.mark.needs("bubblewrap")
def test_jobs_are_followed_too(service, archive):
    """A job has the same routes; its logs are those of a step."""
    with service.client(service.token()) as client:
        with archive("brief").open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
        steps = [{"name": name, "command": ["echo", name]} for name in ("one", "two")]
        body = {"skill_name": "public.brief", "session_id": "s1", "steps": steps}
        started = client.post("/projects/local/tools/skills.start_job", json=body)
        assert started.status_code == 200, started.text
        job = started.json()["job_id"]
        with client.stream("GET", f"/projects/local/jobs/{job}/events") as stream:
            told = events_of(stream.iter_lines())
        assert (told[-1][1], told[-1][2]["status"]) == ("end", "succeeded")
        assert client.get(f"/projects/local/jobs/{job}/logs").json()["data"] == "two\n"
        assert client.get(f"/projects/local/jobs/{job}/logs", params={"step": 0}).json()["data"] == "one\n"
        assert client.get(f"/projects/local/jobs/{job}/logs", params={"step": 7}).status_code == 404
        assert [row["job_id"] for row in client.get("/projects/local/jobs").json()["jobs"]] == [job]


@pytest.mark.needs("bubblewrap")
def test_a_token_has_as_much_work_as_it_may(service, archive):
    """What is beyond a token's limit is refused, however many ask at one time, until something is over."""
    from kdskills.app.identity import TokenLimits

    token = service.token(limits=TokenLimits(concurrent_work=2))
    with service.client(token) as client:
        with archive("brief").open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
        answers = []

        def submit(number):
            body = {"skill_name": "public.brief", "command": ["sleep", "600"], "session_id": f"s{number}"}
            answers.append(client.post("/projects/local/tools/skills.run_cmd_async", json=body))

        threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found.status_code for found in answers) == [200, 200, 429, 429, 429, 429]
        assert {found.json()["code"] for found in answers if found.status_code == 429} == {"too_much_work"}
        for found in answers:
            if found.status_code == 200:
                done = client.post(
                    "/projects/local/tools/skills.task_cancel", json={"task_id": found.json()["task_id"]}
                )
                assert done.status_code == 200
        until(lambda: all(row["status"] == "canceled" for row in client.get("/projects/local/tasks").json()["tasks"]))


@pytest.mark.needs("bubblewrap")
def test_streams_end_when_the_service_stops(service, archive):
    """A drain ends streams, so that they never hold it up."""
    drain: Drain = service.app.state.drain
    with service.client(service.token()) as client:
        with archive("brief").open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
        body = {"skill_name": "public.brief", "command": ["sleep", "600"], "session_id": "s1"}
        task = client.post("/projects/local/tools/skills.run_cmd_async", json=body).json()["task_id"]
        try:
            with (
                client.stream("GET", f"/projects/local/tasks/{task}/events") as events,
                client.stream(
                    "GET", f"/projects/local/tasks/{task}/logs", headers={"Accept": "text/event-stream"}
                ) as logs,
            ):
                reading = events.iter_lines()
                assert next(reading).startswith("retry:")
                service.loop.call_soon_threadsafe(drain.start)
                assert "event: end" not in list(reading)
                assert "event: end" not in list(logs.iter_lines())
            until(lambda: drain.idle)
        finally:
            from kdskills.app.identity import LOCAL
            from kdskills.app.work import scope_of
            from kdskills.jobs.model import TaskHead

            service.run(service.host.work.client.cancel(TaskHead, scope_of(LOCAL), task, "the test is over"))


def test_questions_to_the_database_are_asked_off_the_loop(service, archive):
    """The event loop never waits for the database."""
    import sqlalchemy as sa

    loop_thread = service.run(_thread())
    seen, wrong = [], []

    def watch(*_):
        (wrong if threading.get_ident() == loop_thread else seen).append(1)

    sa.event.listen(sa.Engine, "before_cursor_execute", watch)
    try:
        with service.client(service.token()) as client, archive("brief").open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
            for path in ("skills", "skills/brief", "skills/brief/versions", "tasks", "jobs", "tasks/task_1"):
                client.get(f"/projects/local/{path}")
            client.post("/projects/local/tools/skills.list", json={})
            client.get("/readyz")
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", watch)
    assert (bool(seen), wrong) == (True, [])


async def _thread():
    await asyncio.sleep(0)
    return threading.get_ident()
