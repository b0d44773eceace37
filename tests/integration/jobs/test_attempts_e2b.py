"""Attempts on E2B, against the local server: adoption, cancel, and no sandbox left when everything was killed."""

import os
import signal

import pytest

from kdskills.app.settings import Settings
from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts
from kdskills.jobs.model import OnPattern, OnPort, ServiceSpec
from kdskills.testing.e2b_server import E2bServer

pytestmark = pytest.mark.needs("e2b")


@pytest.fixture
def server():
    """A server of this test's own."""
    with E2bServer() as server:
        yield server


@pytest.fixture
def lab(server, make_lab):
    """Attempts on the server's machines."""
    options = server.options()
    settings = Settings(
        e2b_api_key=options.api_key,
        e2b_template=options.template,
        e2b_api_url=options.api_url,
        e2b_sandbox_url=options.sandbox_url,
    )
    return make_lab("e2b", settings)


async def begun(lab, script="echo begun; sleep 600", **more):
    """Start a program and wait for its first words, and for its attempt's."""
    attempt = await lab.attempts.start(lab.order(script, **more))
    await lab.until(lambda: attempt.logs("stdout").total or attempt.verdict())
    assert await attempt.until_running() is not None, (attempt.verdict(), lab.log(attempt))
    return attempt


async def test_attempt_in_a_remote_sandbox_is_adopted(lab):
    """A process that did not start it follows it, cancels it and reads its verdict and its output."""
    attempt = await begun(lab)
    lab.starter.close()
    other = Attempts(lab.state, lab.starter).find(attempt.order.task_id, 1)
    assert (other.state(), other.logs("stdout").data) == ("running", b"begun\n")
    other.cancel()
    assert (await other.wait()).status == "cancelled", lab.log(attempt)


async def test_sandbox_of_a_killed_attempt_is_reaped(lab, server):
    """With shim and runner killed, the remote sandbox is gone when the attempt is said to be lost."""
    attempt = await begun(lab)
    shim_pid = shim.read_identity(attempt.folder)["pid"]
    victims = ((shim_pid, signal.SIGSTOP), (attempt.facts().runner.pid, signal.SIGKILL), (shim_pid, signal.SIGKILL))
    for pid, number in victims:
        os.kill(pid, number)
    assert (await attempt.wait()).status == "lost"
    assert server.sandboxes == {}, lab.log(attempt)


async def test_outputs_and_session_come_back(lab):
    """Declared outputs of a remote program are files here, and its session's files go back and forth."""
    await lab.run("printf one > a", session="s")
    attempt, verdict = await lab.run("printf two >> a; cat a", session="s", outputs=("a",))
    assert (verdict.status, attempt.logs("stdout").data) == ("ok", b"onetwo"), lab.log(attempt)
    assert [(attempt.folder / item.file).read_bytes() for item in verdict.artifacts] == [b"onetwo"]


async def test_ports_are_refused_and_patterns_are_not(lab):
    """A remote service is ready by a pattern; ports of it are refused with their code, and nothing runs on."""
    ready = ServiceSpec(ready=OnPattern(pattern="^up$"), startup_timeout_s=90)
    attempt = await begun(lab, "echo up; sleep 600", service=ready)
    assert (await attempt.until_running()).ready_at is not None
    attempt.cancel()
    assert (await attempt.wait()).status == "cancelled"
    for service in (ServiceSpec(expose_ports=(80,)), ServiceSpec(ready=OnPort(tcp_port=80))):
        _, verdict = await lab.run("sleep 600", service=service)
        assert (verdict.status, verdict.error_code) == ("refused", "ports_not_supported")
