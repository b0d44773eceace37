"""A server that many or slow peers connect to: bounded connections, deadlines, health, and few words in the log."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kdskills.app.connections import most_connections
from kdskills.app.logs import Sparingly

KDSKILLS = Path(sys.executable).with_name("kdskills")
TOKEN = re.compile(r"kd_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")
PATIENT = {"trust_env": False, "timeout": 60}


class Server:
    """A service in a process of its own."""

    def __init__(self, folder, files, variables):
        self.log = folder / "log"
        env = {**os.environ, "KDSKILLS_STATE_DIR": str(folder / "state"), "KDSKILLS_INDEX_DIR": str(folder / "index")}
        made = subprocess.run(
            [KDSKILLS, "token", "create", "--scope", "skills:read"], env=env, capture_output=True, text=True, check=True
        )
        self.token = TOKEN.search(made.stdout).group()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", f'ulimit -n {files}; exec "$0" serve --listen 127.0.0.1:0', KDSKILLS],
                env=env | variables,
                stderr=out,
                stdout=out,
            )
        while not (found := re.search(r"running on (http://([0-9.]+):(\d+))", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        self.url, self.address = found.group(1), (found.group(2), int(found.group(3)))

    def connect(self, data=b""):
        """Open a connection and send *data* on it."""
        made = socket.create_connection(self.address, timeout=60)
        made.sendall(data)
        return made

    def head(self, size):
        """Return the head of a call with a body of *size* bytes."""
        lines = ["POST /projects/local/tools/skills.list HTTP/1.1", "Host: localhost", f"Content-Length: {size}"]
        lines += [f"Authorization: Bearer {self.token}", "Content-Type: application/json"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.fixture
def start(tmp_path):
    """Start a server that ends with the test."""
    with ExitStack() as stack:

        def begin(files=1024, **variables):
            made = Server(tmp_path, files, variables)
            stack.callback(made.process.wait, 60)
            stack.callback(made.process.kill)
            return made

        yield begin


def until_closed(connection):
    """Return what comes on a connection until the other side closes it."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_half_open_connections_do_not_end_the_service(start):
    """More half-open connections than files: health and calls are answered, and the log says it once."""
    server = start(files=256, KDSKILLS_HEADER_TIMEOUT_S="600")
    with ExitStack() as stack:
        for number in range(400):
            data = b"" if number % 2 else b"GET /healthz HTTP/1.1\r\nHost: "
            stack.enter_context(server.connect(data))
        for _ in range(3):
            assert httpx.get(f"{server.url}/healthz", **PATIENT).status_code == 200
            assert httpx.get(f"{server.url}/readyz", **PATIENT).json()["checks"]["database"] == "ok"
            listed = httpx.post(
                f"{server.url}/projects/local/tools/plugins",
                headers={"Authorization": f"Bearer {server.token}"},
                json={},
                **PATIENT,
            )
            assert listed.json()["code"] == "scope_missing"
    said = server.log.read_text()
    assert said.count("those that send no request are closed") == 1
    assert len(said) < 20_000
    assert "Traceback" not in said


def test_half_a_head_has_a_deadline(start):
    """A connection that never finishes a head is told so and closed, the second request on it, too; a silent one is closed."""
    server = start(KDSKILLS_HEADER_TIMEOUT_S="1")
    with server.connect(b"GET /healthz HTTP/1.1\r\n") as half, server.connect() as silent:
        assert until_closed(half).startswith(b"HTTP/1.1 408 ")
        assert until_closed(silent) == b""
    with server.connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as second:
        assert b"200 OK" in second.recv(65536)
        second.sendall(b"GET /healthz HTTP/1.1\r\n")
        until_closed(second)
    assert server.log.read_text().count("no whole request in time") == 1


def test_a_stuck_body_has_a_deadline(start):
    """A body that stands still, or trickles, is given up with 408."""
    server = start(KDSKILLS_BODY_TIMEOUT_S="1")
    with server.connect(server.head(100) + b"{") as stuck:
        assert until_closed(stuck).startswith(b"HTTP/1.1 408 ")
    with server.connect(server.head(1000) + b"{") as trickling:
        trickling.settimeout(0.1)
        data = b""
        while not data:
            try:
                data = trickling.recv(100)
            except TimeoutError:
                trickling.sendall(b" ")
        assert data.startswith(b"HTTP/1.1 408 ")
    assert server.process.poll() is None


def test_a_body_that_moves_is_taken(start):
    """A body that takes longer than the deadline, but moves, is read to its end."""
    server = start(KDSKILLS_BODY_TIMEOUT_S="6")
    with server.connect(server.head(40_000)) as moving:
        for piece in [b"{" + b" " * 9999, *[b" " * 10_000] * 2, b" " * 9999 + b"}"]:
            moving.sendall(piece)
            time.sleep(2)
        assert moving.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_health_has_room_when_requests_take_every_connection(start):
    """With a request on every connection, health is answered and everything else is asked to come again."""
    server = start(KDSKILLS_CONNECTIONS="4", KDSKILLS_BODY_TIMEOUT_S="600")
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.connect(server.head(100) + b"{"))
        for _ in range(200):
            full = httpx.get(f"{server.url}/openapi.json", **PATIENT)
            if full.status_code == 503:
                break
            time.sleep(0.1)
        assert (full.json()["code"], full.headers["retry-after"]) == ("too_many_connections", "1")
        assert httpx.get(f"{server.url}/healthz", **PATIENT).status_code == 200
    for _ in range(200):
        if httpx.get(f"{server.url}/openapi.json", **PATIENT).status_code == 401:
            break
        time.sleep(0.1)
    else:
        raise AssertionError(server.log.read_text())


def test_noise_of_peers_is_logged_once(start):
    """What is no HTTP at all makes one line, however often it comes."""
    server = start()
    for _ in range(50):
        with server.connect(b"\x16\x03\x01 nonsense\r\n\r\n") as one:
            assert b"400" in until_closed(one)
    assert server.log.read_text().count("Invalid HTTP request received") == 1


def test_a_word_in_an_interval(caplog):
    """The first time is told at once, the rest as a number after the interval."""
    import logging

    now = [0.0]
    say = Sparingly(clock=lambda: now[0])
    for _ in range(5):
        say.warn(logging.getLogger("kdskills.http"), "late")
    now[0] = 61.0
    say.warn(logging.getLogger("kdskills.http"), "late")
    assert [record.message for record in caplog.records] == ["late", "late (4 more times since this was last said)"]


def test_connections_leave_files_for_the_rest():
    """The bound that open files allow leaves a quarter of them, and is never nothing."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 8 <= most_connections() <= max(8, files * 3 // 4)
