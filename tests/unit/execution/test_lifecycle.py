"""Telling leftovers of dead owners from what living ones use."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from kdskills.execution.owner import Cgroup, RunRecords, leaf_is_leftover, leaf_name, process_start, reap
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
    report = reap(RunRecords(tmp_path / "state"), Cgroup(tmp_path, tmp_path, 2))
    assert report.ended == (f"cgroup {dead} with 0 processes",)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, "other"])


def test_looking_for_leftovers_never_meets_half_a_record(tmp_path):
    """Records that come and go beside a reap are neither taken for broken ones nor removed."""
    records, over = RunRecords(tmp_path), threading.Event()
    told, missing = [], []

    def look():
        while not over.is_set():
            report = reap(records, None)
            told.extend((*report.ended, *report.failed))

    def work():
        for _ in range(150):
            path = records.write(ExecRequest(argv=("x",), request_id="r" * 200), os.getpid())
            if not path.exists():
                missing.append(path)
            path.unlink(missing_ok=True)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    workers = [threading.Thread(target=work) for _ in range(3)]
    for thread in (*lookers, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in lookers:
        thread.join()
    assert (told, missing) == ([], [])


def test_a_record_is_written_aside_until_it_is_whole(tmp_path):
    """What is being written is left alone; what a dead process left half-written goes after an hour."""
    (tmp_path / "runs").mkdir()
    being, dead = tmp_path / "runs/a.json.0.new", tmp_path / "runs/b.json.0.new"
    for path in (being, dead):
        path.write_text('{"labels"')
    os.utime(dead, (1, 1))
    assert reap(RunRecords(tmp_path), None).ended == ("run b.json.0: its record",)
    assert (being.exists(), dead.exists()) == (True, False)
