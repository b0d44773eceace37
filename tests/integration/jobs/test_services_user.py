"""Attempts and services of an ordinary user, who must enter a sandbox's user namespace to reach its network."""

import json
import subprocess
from pathlib import Path

import pytest

from kdskills.jobs.model import OnHttp, OnPattern, OnPort, ServiceSpec

pytestmark = pytest.mark.needs("bubblewrap")


def test_ordinary_user_reaches_a_service_and_leaves_nothing(ordinary_user):
    """Ports, cancel and the end of a killed attempt work without root and without cgroups."""
    script = Path(__file__).with_name("service_as_user.py")
    done = subprocess.run(
        [*ordinary_user.command, str(script), str(ordinary_user.home / "state")],
        env=ordinary_user.env,
        capture_output=True,
        text=True,
        cwd=ordinary_user.home,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "log": "",
        "answer": 200,
        "cancelled": "cancelled",
        "killed": "lost",
        "left": [],
    }


@pytest.mark.parametrize(
    ("engine", "service"),
    [
        pytest.param(engine, service, marks=marks, id=f"{engine}-{kind}")
        for engine, marks in (
            ("subprocess", ()),
            ("landlock", pytest.mark.needs("landlock")),
            ("srt", pytest.mark.needs("srt")),
        )
        for kind, service in (
            ("ports", ServiceSpec(expose_ports=(8000,))),
            ("tcp", ServiceSpec(ready=OnPort(tcp_port=8000))),
            ("http", ServiceSpec(ready=OnHttp(port=8000))),
        )
    ],
)
async def test_ports_are_refused_where_they_cannot_be_reached(make_lab, engine, service, generous):
    """Engines whose networks cannot be entered refuse ports and answers with one code, and end the program."""
    attempt, verdict = await make_lab(engine, generous).run("echo begun; sleep 600", service=service, unsafe=True)
    assert (verdict.status, verdict.error_code) == ("refused", "ports_not_supported"), attempt


@pytest.mark.parametrize("engine", ["subprocess", pytest.param("landlock", marks=pytest.mark.needs("landlock"))])
async def test_patterns_work_on_every_engine(make_lab, engine, generous):
    """A service that tells by its output when it is ready runs on any engine."""
    lab = make_lab(engine, generous)
    service = ServiceSpec(ready=OnPattern(pattern="^up$"))
    attempt = await lab.attempts.start(lab.order("echo up; sleep 600", service=service, unsafe=True))
    facts = await attempt.until_running()
    assert facts is not None, (attempt.verdict(), lab.log(attempt))
    attempt.cancel()
    assert (await attempt.wait()).status == "cancelled"
