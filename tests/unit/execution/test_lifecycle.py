"""Telling leftovers of dead owners from what living ones use (spec execution §5)."""

import json
import os
import time
from pathlib import Path

import pytest

from kdskills.execution.cgroup import CgroupParent
from kdskills.execution.lifecycle import RunRecords, leaf_is_leftover, leaf_name, reap
from kdskills.execution.owner import process_start
from kdskills.execution.request import ExecRequest

NAMESPACE = Path("/proc/self/ns/pid").stat().st_ino


def test_our_own_leaves_are_in_use():
    """Names differ, and the process that made them lives."""
    first, second = leaf_name(), leaf_name()
    assert first != second
    assert not leaf_is_leftover(first)


@pytest.mark.parametrize(
    ("name", "leftover"),
    [
        (f"{NAMESPACE}-{os.getpid()}-1-0123456789abcdef", True),  # a reused pid
        (f"{NAMESPACE}-4194999-5-0123456789abcdef", True),  # nobody
        ("1-4194999-5-0123456789abcdef", False),  # another pid namespace
        (f"{NAMESPACE}-{os.getpid()}-{process_start(os.getpid())}-0123456789abcdef", False),
        ("systemd.slice", False),
        ("../../etc", False),
        ("", False),
    ],
    ids=["reused pid", "nobody", "another namespace", "ourselves", "a slice", "a path", "nothing"],
)
def test_leaves_of_others(name, leftover):
    """Only names in our own form, of this namespace, whose process is gone are leftovers."""
    assert leaf_is_leftover(name) == leftover


def test_forgotten_probe_leaves_are_leftovers():
    """A leaf that was made to see whether leaves can be made is there for moments only."""
    now = time.monotonic_ns()
    assert leaf_is_leftover(f"probe-{os.getpid()}-{now - 11 * 10**9}")
    assert leaf_is_leftover("probe-4194999-1")
    assert not leaf_is_leftover(f"probe-4194999-{now}")


def test_a_record_of_a_living_owner_stays(tmp_path):
    """Our own runs are not reaped."""
    records = RunRecords(tmp_path)
    path = records.write(ExecRequest(argv=("x",), request_id="r"), os.getpid())
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert list(records.leftovers()) == []
    report = reap(records, None)
    assert (report.ended, report.failed, path.exists()) == ((), (), True)


def test_a_record_of_a_dead_owner_goes(tmp_path):
    """A launcher whose pid was reused since is not touched; the record goes."""
    records = RunRecords(tmp_path)
    path = records.write(ExecRequest(argv=("x",), request_id="r"), os.getpid())
    facts = json.loads(path.read_text())
    facts["labels"]["kdskills.started"] = "1"
    facts["started"] = "2"
    path.write_text(json.dumps(facts))
    assert reap(records, None).ended == ("run r: its record",)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"labels": 3}', "\xff"])
def test_broken_records_are_cleared(tmp_path, text):
    """What cannot be read is named and removed."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/x.json").write_text(text)
    assert reap(RunRecords(tmp_path), None).ended == ("run x: its record",)


def test_leaves_of_the_dead_are_removed(tmp_path):
    """A dead owner's leaf goes, others stay."""
    dead, alive = f"{NAMESPACE}-4194999-5-0123456789abcdef", leaf_name()
    for name in (dead, alive, "other"):
        (tmp_path / name).mkdir()
    report = reap(RunRecords(tmp_path / "state"), CgroupParent(tmp_path, tmp_path, 2))
    assert report.ended == (f"cgroup {dead} with 0 processes",)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, "other"])
