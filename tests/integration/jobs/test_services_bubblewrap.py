"""Services on bubblewrap: readiness, ports from the host, and endpoints that tell the truth."""

import asyncio
import os
import random
import signal
import socket
import urllib.error
import urllib.request

import pytest

from kdskills.jobs.model import OnHttp, OnPattern, OnPort, ServiceSpec

pytestmark = pytest.mark.needs("bubblewrap")

WEB = ["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1"]


def get(endpoint):
    """Return the status of a GET of the endpoint's top."""
    with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
        return answer.status


async def test_service_is_ready_by_http_and_reached_from_the_host(lab):
    """A web server with no network but its own answers on a port of 127.0.0.1 once its attempt is running."""
    service = ServiceSpec(ready=OnHttp(port=8000), expose_ports=(8000,))
    attempt = await lab.attempts.start(lab.order(WEB, service=service))
    facts = await attempt.until_running()
    assert facts is not None, (attempt.verdict(), lab.log(attempt))
    assert [item.port for item in facts.endpoints] == [8000]
    assert await asyncio.to_thread(get, facts.endpoints[0]) == 200
    assert attempt.endpoints_active()
    attempt.cancel()
    verdict = await attempt.wait()
    assert (verdict.status, attempt.endpoints_active()) == ("cancelled", False)
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(get, facts.endpoints[0])


ECHO = (
    "import socketserver\n"
    "class H(socketserver.BaseRequestHandler):\n"
    "    def handle(self):\n"
    "        while data := self.request.recv(65536): self.request.sendall(data.upper())\n"
    "S = socketserver.ThreadingTCPServer\n"
    "S.allow_reuse_address = S.daemon_threads = True\n"
    "S(('127.0.0.1', 7000), H).serve_forever()"
)


async def started(lab, script, service, **more):
    """Start a service and wait until it runs."""
    attempt = await lab.attempts.start(lab.order(script, service=service, **more))
    facts = await attempt.until_running()
    assert facts is not None, (attempt.verdict(), lab.log(attempt))
    return attempt, facts


async def test_service_is_ready_by_port_and_carries_megabytes(lab):
    """Connections, several at once, carry every byte both ways and pass on that a side has finished."""
    attempt, facts = await started(
        lab, ["python3", "-c", ECHO], ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,))
    )
    words = b"kdskills " * 200_000
    answers = await asyncio.gather(*(lab.ask(facts.endpoints[0].host_port, words) for _ in range(3)))
    assert [answer == words.upper() for answer in answers] == [True] * 3
    attempt.cancel()
    assert (await attempt.wait()).status == "cancelled"


async def test_service_is_ready_by_a_line_of_its_output(lab):
    """A service is running only once its line was printed, on either stream, and not before."""
    service = ServiceSpec(ready=OnPattern(pattern=r"^ready \d+$"))
    attempt = await lab.attempts.start(lab.order("echo ready soon; echo not ready 1", service=service))
    assert await attempt.until_running() is None
    assert (await attempt.wait()).status == "ok"  # it ended by itself and never was ready
    attempt, facts = await started(lab, "echo ready soon; sleep 0.3; echo ready 1 >&2; sleep 600", service)
    assert facts.ready_at >= facts.started_at
    assert attempt.logs("stderr").data == b"ready 1\n"
    attempt.cancel()
    await attempt.wait()


async def test_service_that_is_not_ready_in_time_is_ended(lab):
    """Nobody listens within the startup time: the program is ended, its output kept, the code says why."""
    for ready in (OnPort(tcp_port=9), OnHttp(port=9), OnPattern(pattern="never")):
        service = ServiceSpec(ready=ready, startup_timeout_s=4.0)
        attempt, verdict = await lab.run("echo begun; sleep 600", service=service)
        assert (verdict.status, verdict.error_code) == ("startup_timeout", "startup_timeout"), lab.log(attempt)
        assert attempt.logs("stdout").data == b"begun\n"


async def test_pattern_that_never_ends_holds_up_no_one(lab):
    """A pattern that takes for ever to match ends with the startup time all the same."""
    service = ServiceSpec(ready=OnPattern(pattern="(a+)+$"), startup_timeout_s=2.0)
    _, verdict = await lab.run("echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!; sleep 600", service=service)
    assert verdict.status == "startup_timeout"


async def test_service_that_cannot_be_is_refused(lab):
    """A pattern nobody can compile ends the service as a bad request, rather than leave it waiting."""
    attempt, verdict = await lab.run("sleep 600", service=ServiceSpec(ready=OnPattern(pattern="(")))
    assert (verdict.status, verdict.error_code) == ("refused", "bad_request"), lab.log(attempt)


async def test_cancel_while_starting_ends_the_service(lab):
    """A service that is not ready yet is cancelled like any other, and was never running."""
    attempt = await lab.attempts.start(
        lab.order("echo begun; sleep 600", service=ServiceSpec(ready=OnPort(tcp_port=9)))
    )
    await lab.until(lambda: attempt.logs("stdout").total)
    assert attempt.state() == "starting"
    attempt.cancel()
    assert (await attempt.wait()).status == "cancelled"


async def test_endpoints_tell_the_truth_when_a_forwarder_dies(lab):
    """A dead forwarder's endpoints are down, and up again at the same port once another took its place."""
    service = ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,))
    attempt, facts = await started(lab, ["python3", "-c", ECHO], service)
    os.kill(facts.forwarder.pid, signal.SIGKILL)
    await lab.until(lambda: not attempt.endpoints_active() or attempt.facts().forwarder != facts.forwarder)
    await lab.until(attempt.endpoints_active)
    again = attempt.facts()
    assert (again.endpoints, again.forwarder == facts.forwarder) == (facts.endpoints, False)
    assert await lab.ask(again.endpoints[0].host_port, b"still") == b"STILL"
    attempt.cancel()
    await attempt.wait()


async def test_service_outlives_whoever_started_it(lab):
    """With the launcher gone, every request goes on to be answered."""
    service = ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,))
    attempt, facts = await started(lab, ["python3", "-c", ECHO], service)
    lab.starter.close()
    for _ in range(20):
        assert await lab.ask(facts.endpoints[0].host_port, b"here") == b"HERE"
    assert attempt.state() == "running"
    attempt.cancel()
    await attempt.wait()


async def test_next_attempt_gets_the_host_port_of_the_one_before(lab):
    """A restarted service is reached where it was; a host port that is taken is replaced by another."""
    service = ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,))
    wanted = {7000: random.randrange(20_000, 30_000)}  # below the ports this machine gives to connections
    asked = lab.order(["python3", "-c", ECHO], service=service).model_copy(update={"host_ports": wanted})
    first = await lab.attempts.start(asked)
    port = (await first.until_running()).endpoints[0].host_port
    order = first.order.model_copy(update={"attempt": 3, "host_ports": {7000: port}})
    beside = await lab.attempts.start(order.model_copy(update={"attempt": 2}))
    assert (await beside.until_running()).endpoints[0].host_port != port
    first.cancel()
    await first.wait()
    second = await lab.attempts.start(order)
    assert (await second.until_running()).endpoints[0].host_port == port
    assert lab.attempts.latest(order.task_id).order.attempt == 3
    for attempt in (second, beside):
        attempt.cancel()
        await attempt.wait()


async def test_service_that_fails_says_so(lab):
    """A service that ends before it is ready has the program's own verdict."""
    _, verdict = await lab.run("echo no >&2; exit 7", service=ServiceSpec(ready=OnPort(tcp_port=9)))
    assert (verdict.status, verdict.exit_code) == ("nonzero", 7)


async def test_service_without_conditions_runs_at_once(lab):
    """With nothing to wait for, a service is running when its program is, and has no timeout."""
    attempt, facts = await started(lab, "sleep 600", ServiceSpec())
    assert (facts.endpoints, attempt.endpoints_active(), attempt.order.to_json()["backstop_s"]) == ((), False, None)
    attempt.cancel()
    await attempt.wait()


async def test_services_on_one_port_do_not_meet(lab):
    """Two sandboxes may use the same port: each host port leads into its own."""
    service = ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,))
    pair = [
        await started(lab, ["python3", "-c", ECHO.replace("upper()", word)], service) for word in ("upper()", "title()")
    ]
    answers = [await lab.ask(facts.endpoints[0].host_port, b"who") for _, facts in pair]
    assert answers == [b"WHO", b"Who"]
    for attempt, _ in pair:
        attempt.cancel()
        await attempt.wait()


async def test_host_port_is_closed_to_other_machines(lab):
    """The forwarder listens on 127.0.0.1 and nowhere else."""
    service = ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,))
    attempt, facts = await started(lab, ["python3", "-c", ECHO], service)
    port = facts.endpoints[0].host_port
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free, as the forwarder did not take every address
    attempt.cancel()
    await attempt.wait()
