"""The proxy of one run without any network: what it does with descriptors, crowds and programs that say nothing."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kdskills.execution import EgressBounds
from kdskills.execution.egress import host_rules
from kdskills.execution.egress_proxy import MAX_ROWS, EgressConnection, EgressProxy


@pytest.fixture
def stack():
    """Return a stack that closes what a test opens."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack):
    """Return a function that starts a proxy, and gives it and the helper's end of its channel."""

    def make(rules=("granted.invalid",), resolver=lambda host, port: [], **bounds):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        proxy = EgressProxy(ours, host_rules(rules), EgressBounds(**bounds), resolver)
        stack.callback(proxy.close)
        return proxy, stack.enter_context(theirs)

    return make


@pytest.fixture
def connect(stack):
    """Return a function that gives the proxy a connection, and the program's end of it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def make(channel):
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        with accepted:
            socket.send_fds(channel, [b"c"], [accepted.fileno()])
        return client

    return make


def answer(client: socket.socket) -> bytes:
    """Read to the end."""
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def test_descriptors_that_are_no_connections_are_closed(start, connect, tmp_path):
    """Files, pipes, sockets of other kinds and listening ones are closed unused; the next connection is served."""
    proxy, channel = start()
    (tmp_path / "file").write_text("x")
    with ExitStack() as opened:
        pipes = os.pipe()
        for fd in pipes:
            opened.callback(os.close, fd)
        pair = socket.socketpair()
        plain = [
            socket.socket(),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            socket.create_server(("127.0.0.1", 0)),
        ]
        links = [opened.enter_context(link) for link in (*pair, *plain, socket.socket(socket.AF_INET6))]
        file = opened.enter_context((tmp_path / "file").open("rb"))
        for fd in (*pipes, file.fileno(), *(link.fileno() for link in links)):
            socket.send_fds(channel, [b"c"], [fd])
    channel.send(b"no descriptor")
    client = connect(channel)
    client.sendall(b"GET http://other.invalid/ HTTP/1.1\r\nHost: other.invalid\r\n\r\n")
    assert answer(client).startswith(b"HTTP/1.1 403 ")
    assert [row.outcome for row in proxy.close()] == ["bad_request"] * 9 + ["not_granted"]


def test_a_crowd_waits_outside(start, connect):
    """More connections than the bound are refused at once, in words, and later ones are served again."""
    proxy, channel = start(connections=2)
    idle = [connect(channel) for _ in range(2)]
    third = connect(channel)
    assert answer(third).startswith(b"HTTP/1.1 503 ")
    for client in idle:
        client.sendall(b"GET http://other.invalid/ HTTP/1.1\r\nHost: other.invalid\r\n\r\n")
        assert answer(client).startswith(b"HTTP/1.1 403 ")
    while threading.active_count() > 2 and any("egress-connection" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    later = connect(channel)
    later.sendall(b"x\n\n")
    assert answer(later).startswith(b"HTTP/1.1 400 ")
    assert sorted(row.outcome for row in proxy.close()) == ["bad_request", "not_granted", "not_granted", "too_many"]


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        (b"SSH-2.0-x\r\n", b"502", "bad_answer"),
        (b"HTTP/1.1 20", b"504", "too_slow"),
        (b"HTTP/1.1 200 OK\r\n", b"502", "bad_answer"),
        (b"HTTP/1.1 OK\r\n\r\n", b"502", "bad_answer"),
        (b"", b"502", "bad_answer"),
        (b"", b"502", "broken"),
        (b"HTTP/1.1 200 OK\r\n\r\nyes", b"200", "ok"),
    ],
)
def test_what_a_server_says_wrong_is_told(start, connect, stack, monkeypatch, said, status, outcome):
    """An answer that is no HTTP, or never whole, is refused with a status of ours; the program is never left with nothing."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve():
        link, _ = server.accept()
        with link:
            link.recv(65536)
            link.sendall(said)
            if outcome == "too_slow":
                link.recv(1)  # until the proxy gives up
            if outcome == "broken":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

    thread = threading.Thread(target=serve)
    thread.start()
    stack.callback(thread.join)
    # The one step that would leave this machine: a checked address is connected to.
    monkeypatch.setattr(EgressConnection, "_connected", lambda *_: socket.create_connection(server.getsockname()))
    proxy, channel = start(resolver=lambda host, port: ["203.0.113.7"], seconds=0.5 if outcome == "too_slow" else 30)
    client = connect(channel)
    client.sendall(b"GET http://granted.invalid/ HTTP/1.1\r\nHost: granted.invalid\r\n\r\n")
    assert answer(client).split(b" ")[1] == status
    assert [row.outcome for row in proxy.close()] == [outcome]


def test_who_says_nothing_is_answered_in_time(start, connect):
    """A connection lasts no longer than the bound, even when its head never ends."""
    proxy, channel = start(seconds=0.3)
    client = connect(channel)
    client.sendall(b"GET http://granted.invalid/ HTTP/1.1\r\n")
    assert answer(client).startswith(b"HTTP/1.1 504 ")
    assert proxy.close()[0].outcome == "too_slow"


def test_the_end_of_a_run_ends_its_connections(start, connect):
    """A proxy that is closed lets go of everything at once, threads and sockets too, and serves nothing any more."""
    proxy, channel = start()
    client = connect(channel)
    client.sendall(b"GET http://granted.invalid/ HTTP/1.1\r\n")
    time.sleep(0.05)
    began = time.monotonic()
    assert [row.outcome for row in proxy.close()] == ["run_over"]
    assert time.monotonic() - began < 1
    assert answer(client) == b""
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kdskills-egress")]
    with pytest.raises(BrokenPipeError):
        channel.send(b"c")


def test_a_name_server_that_hangs_holds_nobody_up(start, connect, monkeypatch):
    """A run ends although a name is still being asked for, and nothing is connected to when the answer comes."""
    asked, answered, connected = threading.Event(), threading.Event(), []
    monkeypatch.setattr(EgressConnection, "_connected", lambda *arguments: connected.append(arguments))

    def slow(host, port):
        asked.set()
        answered.wait(20)
        return ["203.0.113.9"]

    proxy, channel = start(resolver=slow)
    client = connect(channel)
    client.sendall(b"GET http://granted.invalid/ HTTP/1.1\r\nHost: granted.invalid\r\n\r\n")
    assert asked.wait(20)
    began = time.monotonic()
    assert proxy.close() == ()
    assert time.monotonic() - began < 3
    answered.set()
    assert answer(client) == b""
    while any(thread.name.startswith("kdskills-egress") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert connected == []


def test_rows_are_bounded(start, connect, monkeypatch, caplog):
    """A program that is refused for ever fills no memory and no disk: rows and lines of the log stop at their bounds."""
    monkeypatch.setattr("kdskills.execution.egress_proxy.MAX_LINES", 100)
    caplog.set_level("INFO", "kdskills.execution.egress")
    proxy, channel = start()
    with open(os.devnull, "rb") as null:  # noqa: PTH123 - a descriptor is all that is wanted
        for _ in range(MAX_ROWS + 20):
            socket.send_fds(channel, [b"c"], [null.fileno()])
    client = connect(channel)
    client.sendall(b"x\n\n")
    answer(client)
    assert len(proxy.close()) == MAX_ROWS
    assert len(caplog.records) == 100


def test_ten_thousand_connections_leave_nothing(start, connect):
    """A crowd far beyond every bound leaves no descriptor, no thread and no more rows than the bound; later ones are served."""
    proxy, channel = start(connections=2)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(10_000):
        connect(channel).close()
    said = b""
    while not said.startswith(b"HTTP/1.1 400 "):  # until the last of the crowd is gone
        with connect(channel) as client, suppress(OSError):
            client.sendall(b"x\n\n")
            said = answer(client)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + 4
    assert len(proxy.close()) == MAX_ROWS


def test_a_connection_that_breaks_in_any_way_has_its_row(start, connect):
    """What nobody foresaw is told as `broken`, to the program, too."""

    def resolver(host, port):
        raise OverflowError

    proxy, channel = start(resolver=resolver)
    client = connect(channel)
    client.sendall(b"GET http://granted.invalid/ HTTP/1.1\r\nHost: granted.invalid\r\n\r\n")
    assert answer(client).startswith(b"HTTP/1.1 502 ")
    assert [(row.host, row.outcome) for row in proxy.close()] == [("granted.invalid", "broken")]
