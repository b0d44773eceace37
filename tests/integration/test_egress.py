"""A program that is granted some hosts reaches these and nothing else; both networks of the test are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.execution import ExecRequest, ExecutionOptions, IsolationLevel
from kdskills.testing.abuse import CASES, abuse, run_case
from kdskills.testing.executors import conformance
from tests.integration.egress_world import (
    ATTEMPTS,
    FORBIDDEN,
    FORBIDDEN6,
    GRANTED,
    LITERALS,
    OTHER,
    PASSED,
    PUBLIC,
    PUBLIC6,
    SMALL,
)

pytestmark = [
    pytest.mark.needs("bubblewrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own are root's to make"),
]
HELPERS = {"bubblewrap": "1", "pool": "1", "docker": "2"}
"""Processes beside the program and the first one, by engine: the helper, and in a container its init."""
ENGINES = ("bubblewrap", "pool", pytest.param("docker", marks=pytest.mark.needs("docker")))
WORLD = Path(__file__).with_name("egress_world.py")


@pytest.fixture(scope="module", params=ENGINES)
def world(request):
    """Run every attempt in one sandbox of an engine, and return the answers, the rows and who was visited."""
    command = ["unshare", "--net", "--mount", sys.executable, str(WORLD), request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout) | {"engine": request.param}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_is_not_granted_is_refused(world, attempt):
    """A request for anything but a granted host, or one that could be read in two ways, is answered by the proxy alone."""
    answer = world["answers"][attempt]
    assert answer.startswith(("HTTP/1.1 400 ", "HTTP/1.1 403 ", "HTTP/1.1 502 ")), answer
    assert "REACHED" not in answer


@pytest.mark.parametrize("attempt", PASSED)
def test_what_is_granted_is_reached(world, attempt):
    """Granted hosts are reached, whatever the case of their names; one request a connection."""
    answer = world["answers"][attempt]
    assert answer.startswith("HTTP/1.1 200 "), answer
    assert answer.count("REACHED") == 1


DIRECT = (
    *(
        "direct",
        "direct_ipv6",
        "direct_host",
        "direct_dns",
        "direct_udp",
        "direct_metadata",
        "raw",
        "packet",
        "loopback_of_host",
    ),
    *("unix_abstract", "unix_path", "resolver", "no_proxy", "other_proxy", "proxy_of_host", "helper_by_udp"),
    *("helper_descriptors", "helper_memory"),
)
"""Ways past the proxy."""


def test_there_are_many_attempts():
    """Attempts to reach what is not granted are no less than they were, and each is another."""
    assert len(set(ATTEMPTS.values())) == len(ATTEMPTS) >= 130
    assert len(DIRECT) >= 18


@pytest.mark.parametrize("attempt", DIRECT)
def test_there_is_no_other_way_out(world, attempt):
    """There is no route, no name server, no socket of the host, and the helper's memory and descriptors are closed."""
    assert world["answers"]["helpers"] == HELPERS[world["engine"]]
    assert world["answers"][attempt].startswith("OSError"), world["answers"][attempt]


def test_the_program_does_not_inherit_the_socket(world):
    """No descriptor of the program is a socket."""
    assert world["answers"]["own_descriptors"] == "none"


def test_redirects_are_new_requests(world):
    """A granted host may send a program on to granted hosts only."""
    answers = world["answers"]
    assert answers["redirect_granted"].startswith("REACHED")
    assert [answers[name][:23] for name in ("redirect", "redirect_private")] == ["refused HTTP Error 403:"] * 2


def test_a_name_that_moves_is_checked_each_time(world):
    """A name that leads to a private address the second time is reached once, at the address that was checked."""
    first, *later = json.loads(world["answers"]["rebind"])
    assert first.startswith("REACHED")
    assert {answer[:23] for answer in later} == {"refused HTTP Error 403:"}


def test_servers_saw_granted_requests_only(world):
    """Of all servers at all addresses only granted ones were visited, each for a granted name; no name but granted ones was asked for."""
    visits = [visit for visit in world["visits"] if "port" in visit]
    assert {(visit["address"], visit["port"]) for visit in visits} == {
        (PUBLIC, 80), (PUBLIC, 443), (PUBLIC6, 80), (OTHER, 8080),
    }  # fmt: skip
    assert not {visit["address"] for visit in visits} & {*FORBIDDEN, *FORBIDDEN6}
    assert all(visit["port"] == 8080 or "other.example" not in visit["head"].partition("\r\n")[2] for visit in visits)
    plain = [visit["head"].lower() for visit in visits if visit["port"] == 80]
    assert not [head for head in plain if "\r\nupgrade:" in head or "\r\nproxy-" in head or "\r\nte:" in head]
    names = {visit["name"] for visit in world["visits"] if "name" in visit}
    assert not names & {rule.strip("[]") for rule in LITERALS}
    assert names <= {rule.partition(":")[0] for rule in GRANTED} | {"a.b.wild.example", "nowhere.wild.example"}


def test_each_connection_is_a_row(world):
    """The result tells of every connection: its host, what came of it, and the address that was checked."""
    rows = {tuple(row) for row in world["rows"]}
    assert {
        ("www.example.net", 443, "ok", PUBLIC), ("other.example", 80, "not_granted", ""),
        ("f3.example.net", 80, "address_refused", ""), ("nowhere.wild.example", 80, "name_unknown", ""),
        ("", 0, "bad_request", ""), ("10.0.0.5", 80, "address_refused", ""), ("::1", 80, "address_refused", ""),
        ("169.254.169.254", 80, "address_refused", ""), ("64:ff9b::a00:5", 80, "address_refused", ""),
    } <= rows  # fmt: skip
    assert len(world["rows"]) >= len(ATTEMPTS) + len(PASSED)
    assert "network" in world["limits"]


def test_a_granted_skill_reaches_its_host(world):
    """The script of a skill that settings grant a host reaches it; the same script of another skill does not."""
    assert world["skills"]["fetch"].startswith(f"REACHED ::ffff:{PUBLIC}")
    assert world["skills"]["other"].startswith("failed")


def test_time_and_bytes_are_bounded(world):
    """An idle tunnel ends in its time; a run moves its bytes and no more, and is then refused."""
    head, rest, seconds, big, later = world["bounded"]
    assert head.startswith("HTTP/1.1 200 ")
    assert (rest, seconds < 5) == (0, True)
    assert big.startswith("cut after ")
    assert "403" in later
    (slow, _), (cut, received), (refused, _) = world["bounded_rows"]
    assert (slow, cut, refused) == ("too_slow", "bytes_exceeded", "bytes_exceeded")
    assert received < SMALL["size"] + 70_000


class GrantedEngine:
    """An engine whose every request is granted a host that nobody asks for."""

    def __init__(self, engine):
        self.engine, self.name, self.level = engine, engine.name, engine.level

    def __getattr__(self, name):
        """Everything else is the engine's own."""
        return getattr(self.engine, name)

    def _granted(self, request):
        return replace(request, network=("granted.invalid",)) if request.network == "none" else request

    async def run(self, request):
        """Run it."""
        return await self.engine.run(self._granted(request))

    async def start(self, request, **further):
        """Start it."""
        return await self.engine.start(self._granted(request), **further)


@pytest.fixture(scope="module")
def granted():
    """Return bubblewrap with a host granted."""
    from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor

    return GrantedEngine(BubblewrapExecutor(ExecutionOptions()))


@pytest.fixture(scope="module")
def granted_docker():
    """Return docker with a host granted."""
    from kdskills.builtin.executors.docker import DockerExecutor

    return GrantedEngine(DockerExecutor(ExecutionOptions()))


OF_THE_HELPER = {
    "sockets_of_others": "0100007F:0C38",
    "leftovers_processes": "process",
    "environment": "HTTPS_PROXY",
    "environment_is_exact": "HTTPS_PROXY",
}
"""What programs see of the helper, by the case that finds it: where it listens, its process, the variables that name it."""


@abuse(IsolationLevel.NAMESPACE)
async def test_abuse_with_a_network(granted, case):
    """What must be true of a hostile program is true when it is granted a host, too."""
    verdict = await run_case(granted, case)
    assert verdict is not None
    if case.name in OF_THE_HELPER:
        assert len(verdict.problems) == 1
        assert OF_THE_HELPER[case.name] in verdict.problems[0]
    else:
        assert verdict.problems == (), f"{case.must}: {verdict.problems}"


@pytest.mark.needs("docker")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.area in {"network", "processes"}], ids=lambda case: case.name
)
async def test_abuse_of_containers_with_a_network(granted_docker, case):
    """The same is true of containers, of what a helper could have to do with."""
    verdict = await run_case(granted_docker, case)
    assert verdict is not None
    if case.name == "sockets_of_others":
        lists = {problem.partition(" has ")[0] for problem in verdict.problems}
        assert lists == {"ESCAPED: /proc/net/tcp", "ESCAPED: /proc/net/unix"}  # where it listens, and its socket
    else:
        assert verdict.problems == (), f"{case.must}: {verdict.problems}"


@conformance(IsolationLevel.NAMESPACE)
async def test_promises_with_a_network(granted, promise):
    """Every promise of the executor suite holds with a host granted."""
    if promise.name in OF_THE_HELPER:
        with pytest.raises(AssertionError, match=OF_THE_HELPER[promise.name]):
            await promise.check(granted)
    else:
        await promise.check(granted)


async def test_the_canary_sees_no_more(granted):
    """The probe's canary finds the same wall with a host granted."""
    from kdskills.execution.run import canary_argv, judge

    python, entry = granted.interpreter()
    result = await granted.run(ExecRequest(argv=canary_argv(python, entry)))
    assert [check.name for check in judge(result.stdout.data) if not check.ok] == []
