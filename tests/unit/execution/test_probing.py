"""Judging what the canary saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kdskills.execution.run import canary_argv, failed, judge

CANARY = Path(__file__).parents[3] / "runtime" / "kdskills_runtime" / "canary.py"
WALLED = {
    "uid": 10001,
    "host_uids": [10001],
    "readable": [],
    "core_pattern_writable": False,
    "cap_bounding": 0,
    "cap_effective": 0,
    "seccomp": 2,
    "no_new_privs": 1,
    "interfaces": ["lo"],
    "root_writable": False,
}


def test_a_wall_passes():
    """All is well when nothing of the host shows."""
    checks = judge(json.dumps(WALLED).encode())
    assert all(check.ok for check in checks)
    assert failed(checks) == ""


@pytest.mark.parametrize(
    ("fact", "value", "check"),
    [
        ("uid", 0, "uid"),
        ("readable", ["/etc/shadow"], "host_files"),
        ("core_pattern_writable", True, "core_pattern"),
        ("cap_bounding", 1, "capabilities"),
        ("seccomp", 0, "seccomp"),
        ("no_new_privs", 0, "no_new_privs"),
        ("interfaces", ["eth0", "lo"], "network"),
        ("interfaces", [], "network"),
        ("root_writable", True, "root_read_only"),
    ],
)
def test_each_hole_is_found(fact, value, check):
    """One fact out of order fails its own check, and only that."""
    checks = judge(json.dumps({**WALLED, fact: value}).encode())
    assert [item.name for item in checks if not item.ok] == [check]
    assert check in failed(checks)


@pytest.mark.parametrize("output", [b"", b"{}", b"[]", b"garbage", b"\xff"])
def test_a_canary_that_does_not_answer_fails(output):
    """Silence is no pass."""
    assert [check.ok for check in judge(output)] == [False]


def test_the_canary_on_a_bare_host():
    """The canary tells what it sees; without a wall it fails."""
    argv = canary_argv(sys.executable, str(CANARY.with_name("py_code_exec_entry.py")))
    done = subprocess.run(argv, capture_output=True, check=True)
    checks = {check.name: check.ok for check in judge(done.stdout)}
    assert checks["host_files"] is False
    assert checks["seccomp"] is False or checks["capabilities"] is False
