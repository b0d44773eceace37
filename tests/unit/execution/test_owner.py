"""Telling leftovers of dead owners from runs of living ones."""

from __future__ import annotations

import os
import subprocess
import sys

from kdskills.execution import Owner
from kdskills.execution.owner import boot_id, is_leftover, owner_labels, process_start

MINE = owner_labels(Owner("t", "p", "a", "c"), "r1")


def test_labels_say_whose_run_it_is():
    """Owner, request, boot and watching process are named."""
    assert (MINE["kdskills.run"], MINE["kdskills.tenant"], MINE["kdskills.conversation"]) == ("r1", "t", "c")
    assert (MINE["kdskills.boot"], MINE["kdskills.pid"]) == (boot_id(), str(os.getpid()))


def test_own_runs_are_no_leftovers():
    """What this process watches is in use."""
    assert is_leftover(MINE) is False


def test_runs_of_dead_owners_are():
    """A process that is gone, or whose number another process has now, watches nothing."""
    gone = subprocess.Popen([sys.executable, "-I", "-c", "pass"])
    gone.wait()
    assert is_leftover({**MINE, "kdskills.pid": str(gone.pid)}) is True
    assert is_leftover({**MINE, "kdskills.started": "1"}) is True
    assert is_leftover({**MINE, "kdskills.pid": "x"}) is True


def test_runs_of_another_boot_are():
    """After a restart nothing is watched any more."""
    assert is_leftover({**MINE, "kdskills.boot": "another"}) is True


def test_what_cannot_be_judged_is_left_alone():
    """Runs of another pid namespace, and things that are not runs, are not ours to end."""
    assert is_leftover({**MINE, "kdskills.pidns": "pid:[1]", "kdskills.pid": "999999"}) is False
    assert is_leftover({"some": "label"}) is False


def test_a_zombie_watches_nothing():
    """A process that waits to be reaped is gone."""
    child = subprocess.Popen([sys.executable, "-I", "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None
    child.wait()
    assert process_start(child.pid) is None
