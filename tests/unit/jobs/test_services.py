"""The companion of a service: finding a line that matches, and the delays between restarts."""

import asyncio
import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import BadRequest
from kdskills.jobs import companion, exchange
from kdskills.jobs.attempts import AttemptFacts
from kdskills.jobs.exchange import check_service, needs_network
from kdskills.jobs.model import OnHttp, OnPattern, OnPort, ServiceSpec
from kdskills.jobs.runs import restart_delay_s


@given(st.text("ab\n", max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_line_is_found_however_it_is_cut(text, cuts):
    """A match within a line is found in any pieces, and nothing else."""
    data = text.encode() + b"\n"
    finder = companion.LineFinder("a+b")
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    assert any(finder.feed(data[start:end]) for start, end in itertools.pairwise(edges)) == ("ab" in text)


def test_unfinished_line_counts():
    """A prompt without a newline makes a service ready."""
    finder = companion.LineFinder("ready> $")
    assert [finder.feed(b"rea"), finder.feed(b"dy> ")] == [False, True]


def test_endless_line_takes_no_memory():
    """Of a line without end only the first 64 KiB are looked at, and the lines after it again."""
    finder = companion.LineFinder("needle")
    for _ in range(40):
        assert not finder.feed(b"x" * 60_000)
    assert len(finder._rest) <= 2 * companion.MAX_LINE
    assert not finder.feed(b"needle of the endless line\n")
    assert finder.feed(b"needle\n")


def test_bytes_that_are_no_text_are_looked_through():
    """NUL and bad UTF-8 around it do not hide a match."""
    assert companion.LineFinder("up").feed(b"\x00\xff up \xfe\n")


@pytest.mark.parametrize(
    ("service", "needs"),
    [
        (ServiceSpec(), False),
        (ServiceSpec(ready=OnPattern(pattern="x")), False),
        (ServiceSpec(ready=OnPort(tcp_port=1)), True),
        (ServiceSpec(ready=OnHttp(port=1)), True),
        (ServiceSpec(expose_ports=(1,)), True),
    ],
    ids=["nothing", "pattern", "tcp", "http", "ports"],
)
def test_ports_need_the_network(service, needs):
    """The network is entered for ports and answers, not for words."""
    assert needs_network(service) is needs


@pytest.mark.parametrize(
    "service",
    [
        ServiceSpec(ready=OnPattern(pattern="(")),
        ServiceSpec(ready=OnPattern(pattern="x" * 1001)),
        ServiceSpec(ready=OnHttp(port=1, path="/a b")),
        ServiceSpec(ready=OnHttp(port=1, path="/\r\nHost: evil")),
        ServiceSpec(ready=OnHttp(port=1, path="relative")),
        ServiceSpec(expose_ports=(0,)),
        ServiceSpec(expose_ports=(65536,)),
        ServiceSpec(expose_ports=(80, 80)),
        ServiceSpec(expose_ports=tuple(range(1, 40))),
    ],
    ids=["pattern", "long", "space", "lines", "relative", "low", "high", "twice", "many"],
)
def test_services_that_cannot_be_are_refused(service):
    """Patterns, paths and ports that mean nothing are bad requests before anything runs."""
    with pytest.raises(BadRequest):
        check_service(service)


def test_service_that_can_be_is_not_refused():
    """An ordinary service passes."""
    check_service(ServiceSpec(ready=OnHttp(port=80, path="/health?x=1"), expose_ports=(80, 443)))


def test_looking_for_what_cannot_be_found_ends_the_companion(beside):
    """A companion that cannot look for readiness dies with its words rather than wait."""
    assert beside(ready={"pattern": "("}).wait(60) == 1


def test_delays_double_to_their_bound():
    """Restarts wait longer each time, never longer than the bound, and never overflow."""
    assert [restart_delay_s(count) for count in (0, 1, 2, 5, 6, 10_000)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


@pytest.fixture
def beside():
    """Return a starter of companions in this network; they end with their standard input."""
    started = []

    def start(ports=None, ready=None, logs=("/nonexistent", "/nonexistent"), exact=False):
        order = {"network": None, "ports": ports or {}, "exact": exact, "ready": ready or {}, "logs": list(logs)}
        process = subprocess.Popen(
            [sys.executable, "-I", companion.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.communicate(timeout=60)


def test_wanted_port_is_taken_when_free_and_another_when_not(beside):
    """A service gets the host port it had; when that is taken, any, unless only that one will do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        other = json.loads(beside({"80": busy}).stdout.readline())["ports"]["80"]
        assert other not in {0, busy}
        strict = beside({"80": busy}, exact=True)
        assert (strict.stdout.readline(), strict.wait(60)) == (b"", 1)


def test_pattern_is_found_in_a_log_that_comes_later(beside, tmp_path):
    """The log need not be there yet; what is appended to it is seen."""
    log = tmp_path / "stdout.log"
    process = beside(ready={"pattern": "listening on [0-9]+"}, logs=[str(log), str(tmp_path / "none")])
    assert json.loads(process.stdout.readline()) == {"ports": {}}
    log.write_bytes(b"starting\n" + os.urandom(300_000).replace(b"l", b"") + b"\nlistening on ")
    with log.open("ab") as sink:
        sink.write(b"80\n")
    assert json.loads(process.stdout.readline()) == {"ready": True}


def test_connection_nobody_takes_is_broken_off(beside):
    """A host port whose service does not listen breaks connections off rather than hold them."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # taken, so that nobody else listens there, and not listening
        number = str(silent.getsockname()[1])
        port = json.loads(beside({number: 0}).stdout.readline())["ports"][number]
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as client,
            contextlib.suppress(ConnectionResetError),
        ):
            assert client.recv(10) == b""


async def test_a_service_outlives_a_machine_without_processes(monkeypatch, tmp_path):
    """A forwarder that cannot be started again for a while costs the service its ports meanwhile, and not its life."""
    told, make = asyncio.Queue(), asyncio.create_subprocess_exec
    refusals = [OSError(errno.EAGAIN, "no process"), OSError(errno.EMFILE, "no descriptor")]

    async def own_network(handle, engine):
        return None

    async def start(*args, **options):
        if refusals and facts is not None:
            raise refusals.pop(0)
        return await make(*args, **options)

    facts = None
    monkeypatch.setattr(exchange, "network_of", own_network)
    monkeypatch.setattr(exchange, "AGAIN_S", 0.01)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    service, log = ServiceSpec(ready=OnPattern(pattern="up"), expose_ports=(80,)), tmp_path / "stdout.log"
    log.write_bytes(b"up\n")
    first = AttemptFacts(started_at=0.0, engine="none", runner=exchange.ProcessIdentity(pid=1, started="1", boot="b"))
    running = asyncio.ensure_future(exchange.supervise(service, None, (log,), {}, first, told.put_nowait))
    try:
        async with asyncio.timeout(60):
            facts = await told.get()
            os.kill(facts.forwarder.pid, signal.SIGKILL)
            again = await told.get()
    finally:
        running.cancel()
        (end,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(end, asyncio.CancelledError)
    assert refusals == []
    assert (again.endpoints, again.forwarder == facts.forwarder) == (facts.endpoints, False)
