"""Attempts on docker: adoption by another process, cancel, and no container left when everything was killed."""

import os
import signal

import docker
import pytest

from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts
from kdskills.jobs.model import OnPort, ServiceSpec

pytestmark = pytest.mark.needs("docker")


@pytest.fixture
def lab(make_lab):
    """Attempts on docker."""
    return make_lab("docker")


@pytest.fixture
def containers():
    """Return a counter of the containers of one attempt."""
    client = docker.from_env(timeout=60)

    def count(attempt):
        run = f"{attempt.order.task_id}.{attempt.order.attempt}"
        wanted = {"label": f"kdskills.run={run}"}
        return len(client.containers.list(all=True, filters=wanted, ignore_removed=True))

    yield count
    client.close()


async def begun(lab, task, script="echo begun; sleep 600"):
    """Start a program and wait for its first words, and for its attempt's."""
    attempt = await lab.attempts.start(lab.order(script, task=task))
    await lab.until(lambda: attempt.logs("stdout").total or attempt.verdict())
    assert await attempt.until_running() is not None, (attempt.verdict(), lab.log(attempt))
    return attempt


async def test_attempt_in_a_container_is_adopted(lab, containers, tmp_path):
    """A process that did not start it follows, cancels and judges it; the container is gone by then."""
    attempt = await begun(lab, f"adopt-{tmp_path.name}")
    lab.starter.close()
    other = Attempts(lab.state, lab.starter).find(attempt.order.task_id, 1)
    assert (other.state(), other.logs("stdout").data, containers(other)) == ("running", b"begun\n", 1)
    other.cancel()
    verdict = await other.wait()
    assert (verdict.status, containers(other)) == ("cancelled", 0), lab.log(attempt)


async def test_container_of_a_killed_attempt_is_reaped(lab, containers, tmp_path):
    """With shim and runner killed, the container is gone when the attempt is said to be lost."""
    attempt = await begun(lab, f"killed-{tmp_path.name}")
    facts = attempt.facts()
    shim_pid = shim.read_identity(attempt.folder)["pid"]
    for pid, number in ((shim_pid, signal.SIGSTOP), (facts.runner.pid, signal.SIGKILL), (shim_pid, signal.SIGKILL)):
        os.kill(pid, number)
    assert (await attempt.wait()).status == "lost"
    assert containers(attempt) == 0


async def test_container_of_a_killed_runner_is_reaped_by_its_shim(lab, containers, tmp_path):
    """With the runner alone killed, the shim reaps before it gives the verdict."""
    attempt = await begun(lab, f"runner-{tmp_path.name}")
    os.kill(attempt.facts().runner.pid, signal.SIGKILL)
    assert (await attempt.wait()).status == "lost"
    assert containers(attempt) == 0


async def test_session_files_survive_on_docker(lab, tmp_path):
    """What one command of a session leaves in its container, the next container has."""
    await lab.run("mkdir d; echo one > d/notes", session="s", task=f"first-{tmp_path.name}")
    attempt, verdict = await lab.run("cat d/notes", session="s", task=f"second-{tmp_path.name}")
    assert (verdict.status, attempt.logs("stdout").data) == ("ok", b"one\n"), lab.log(attempt)


async def test_port_of_a_container_without_network_is_reached(lab, tmp_path):
    """A service in a container that has no network answers on a port of this host."""
    service = ServiceSpec(ready=OnPort(tcp_port=7000), expose_ports=(7000,), startup_timeout_s=90)
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 7000))\n"
        "while True: c, _ = s.accept(); c.sendall(c.recv(99).upper()); c.close()"
    )
    attempt = await lab.attempts.start(lab.order(["python3", "-c", code], service=service, task=f"p-{tmp_path.name}"))
    facts = await attempt.until_running()
    assert facts is not None, (attempt.verdict(), lab.log(attempt))
    assert await lab.ask(facts.endpoints[0].host_port, b"hello") == b"HELLO"
    attempt.cancel()
    assert (await attempt.wait()).status == "cancelled"
