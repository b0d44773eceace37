"""A root's connection to a real server: kept, lost with the server, made again, and gone with the program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills.app import Host
from kdskills.builtin.roots.mcp.wire import SdkServer, ServerFailed, parse_address

URI = "skill://public/tidy/SKILL.md"
PROGRAM = Path(sys.executable).with_name("kdskills")
STARTER = '#!/bin/sh\necho $$ >> "$1"\nshift\nexec "$@"\n'


@pytest.fixture
def stdio(bundle, tmp_path):
    """Return the address of a server that is started as a program, and what tells the process ids of those started."""
    starter, started = tmp_path / "starter.sh", tmp_path / "started"
    starter.write_text(STARTER)
    starter.chmod(0o755)
    env = f"env KDSKILLS_BUNDLE={bundle.root} KDSKILLS_STATE_DIR={tmp_path / 'state'}"
    address = f"mcp+stdio:{starter} {started} {env} {PROGRAM} mcp#local"
    return address, lambda: [int(line) for line in started.read_text().split()] if started.exists() else []


def test_a_program_is_started_once(bundle, stdio):
    """All questions go to one process; when it is killed, the next question starts another and is answered."""
    bundle.skill("public/tidy", guide=b"the guide")
    address, started = stdio
    server = SdkServer(parse_address(address))
    for _ in range(3):
        assert [row["uri"] for row in server.entries()] == [URI]
        assert server.read(("skill://public/tidy/guide",)) == [b"the guide"]
    (first,) = started()
    os.kill(first, signal.SIGKILL)
    assert server.entry(URI)["uri"] == URI
    assert len(started()) == 2


def test_a_server_that_was_restarted_answers(bundle, tmp_path, serve):
    """A service that went away is a failure while it is away, and nothing is left of it once it is back."""
    bundle.skill("public/tidy")
    servers = []
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        servers.append(SdkServer(parse_address(f"mcp+{url}#far")))
        assert len(servers[0].entries()) == 1
    with pytest.raises(ServerFailed, match="far"):
        servers[0].entries()
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        again = SdkServer(parse_address(f"mcp+{url}#far"))
        assert len(again.entries()) == 1


def test_a_refusal_is_the_servers_answer(bundle, tmp_path, serve):
    """What the server does not have is told at once, over the same connection."""
    bundle.skill("public/tidy")
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        server = SdkServer(parse_address(f"mcp+{url}#far"))
        server.entries()
        kept = server._connection
        for _ in range(3):
            with pytest.raises(ServerFailed, match="no such skill"):
                server.entry("skill://public/none/SKILL.md")
        assert server.entry(URI)["uri"] == URI
        assert server._connection is kept


def test_a_program_that_ends_takes_its_server_along(bundle, stdio, tmp_path):
    """A command that asked a stdio server leaves no process behind."""
    bundle.skill("public/tidy")
    address, started = stdio
    done = subprocess.run(
        [str(PROGRAM), "list", str(bundle.root), "--json"],
        env={**os.environ, "KDSKILLS_SKILL_ROOTS": json.dumps([address]), "KDSKILLS_STATE_DIR": str(tmp_path / "own")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mcp-local.tidy" in done.stdout
    (process,) = started()
    end = time.monotonic() + 120
    while alive(process) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(process)


def alive(process):
    """Whether a process is there, and not only its number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
