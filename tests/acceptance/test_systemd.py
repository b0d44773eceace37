"""The units of `deploy/systemd` under systemd itself, installed as the page on deployment says."""

from __future__ import annotations

import base64
import io
import json
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.systemd_host import SystemdHost

pytestmark = [pytest.mark.needs("systemd", "bubblewrap"), pytest.mark.timeout(300), pytest.mark.xdist_group("chaos")]

SETTINGS = 'state_dir = "/var/lib/kdskills/state"\nlisten = "127.0.0.1:8765"\n'
TOKEN = '-H "Authorization: Bearer $(cat /var/lib/kdskills/state/first-token)"'
UNITS = "kdskills-serve kdskills-worker@0"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdHost]:
    """Return a host on which a door and a worker run, with one skill uploaded."""
    with SystemdHost(tmp_path_factory.mktemp("systemd") / "host") as one:
        one.shell("deploy/systemd/install")
        one.shell("cat > /etc/kdskills/config.toml", stdin=SETTINGS)
        one.shell(f"systemctl start {UNITS}")
        until(one, lambda: one.shell("curl -sf 127.0.0.1:8765/readyz", check=False).returncode == 0)
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as out:
            out.writestr("brief/SKILL.md", "---\nname: brief\ndescription: Makes one page.\n---\nRead.\n")
        one.shell("base64 -d > /root/brief.zip", stdin=base64.b64encode(archive.getvalue()).decode())
        assert ask(one, "skills:upload", "-F file=@/root/brief.zip")["created"] is True
        yield one


def until(host: SystemdHost, true: Any, seconds: float = 60) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, host.journal()
        time.sleep(0.1)


def ask(host: SystemdHost, path: str, words: str = "", body: object = None) -> Any:
    """Ask the door, and return what it answers."""
    sent = "" if body is None else "-H 'Content-Type: application/json' --data-binary @-"
    url = f"http://127.0.0.1:8765/projects/local/{path}"
    return json.loads(
        host.shell(f"curl -s {TOKEN} {words} {sent} '{url}'", stdin="" if body is None else json.dumps(body)).stdout
    )


def test_a_program_runs_behind_its_wall_in_both_units(host: SystemdHost) -> None:
    """The door runs a command itself, and the worker one in the background: what a unit takes away, no wall is made of."""
    command = {"skill_name": "brief", "command": ["sh", "-c", "id -u; wc -l < SKILL.md"]}
    told = ask(host, "tools/skills.run_cmd", body=command)
    assert (told["status"], told["stdout"]) == ("succeeded", "10001\n5\n"), (told, host.journal())
    task = ask(host, "tools/skills.run_cmd_async", body=command)["task_id"]
    until(host, lambda: ask(host, f"tasks/{task}")["status"] in {"succeeded", "failed"})
    ended = ask(host, f"tasks/{task}")
    assert (ended["status"], ended["stdout_tail"]) == ("succeeded", "10001\n5\n"), (ended, host.journal())


def test_a_program_outlives_its_worker(host: SystemdHost) -> None:
    """A worker that is started anew takes a running program over: it runs once, to its end."""
    command = ["sh", "-c", "echo begun; sleep 5"]
    task = ask(host, "tools/skills.run_cmd_async", body={"skill_name": "brief", "command": command})["task_id"]
    until(host, lambda: ask(host, f"tasks/{task}")["stdout_tail"] == "begun\n")
    host.shell("touch /run/kdskills/socket; systemctl restart kdskills-worker@0; test -e /run/kdskills/socket")
    first = host.shell("systemctl show -P MainPID kdskills-worker@0").stdout.strip()
    assert "TMPDIR=/run/kdskills" in host.shell(f"tr '\\0' '\\n' < /proc/{first}/environ").stdout.split()
    until(host, lambda: ask(host, f"tasks/{task}")["status"] in {"succeeded", "failed", "lost"})
    ended = ask(host, f"tasks/{task}")
    assert (ended["status"], ended["attempt"], ended["stdout_tail"]) == ("succeeded", 1, "begun\n"), (
        ended,
        host.journal(),
    )


def test_units_end_and_nobody_else_reads_what_they_keep(host: SystemdHost) -> None:
    """Each unit ends by itself when it is told to, and what it kept belongs to its account alone."""
    host.shell(f"systemctl stop {UNITS}")
    for unit in UNITS.split():
        assert host.shell(f"systemctl show -P Result {unit}").stdout == "success\n", host.journal()
    wide = host.shell(
        "find /var/lib/kdskills/state ! -type l ( -perm /077 -o ! -user kdskills )".replace("(", r"\(").replace(
            ")", r"\)"
        )
    )
    assert wide.stdout == ""
    assert host.shell("stat -c '%a %U %G' /etc/kdskills/config.toml").stdout == "640 root kdskills\n"
