"""Packages and indexes that mean harm, or fail midway: told, bounded, and nothing half-used."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.environments import resolve as room
from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.model import EnvironmentSpec
from kdskills.environments.resolve import resolve
from kdskills.environments.store import EnvironmentStore
from kdskills.environments.wheels import WHEEL_LIMITS


@pytest.fixture
def environments(tmp_path):
    """A store of the test's own."""
    return EnvironmentStore(tmp_path / "cache")


def refused(environments, locked, index):
    """Return the code of a build's error, after checking that nothing of it is used or half there."""
    with pytest.raises(EnvironmentFailed) as caught:
        environments.build(locked, index.indexes)
    assert environments.built(locked) is None
    return caught.value.code


def leftovers(tmp_path):
    """Return what killed or failed builds left in the store."""
    top = tmp_path / "cache/environments"
    return [
        path.name
        for folder in (top, top / "wheels")
        for path in folder.iterdir()
        if path.name[:5] in {".new-", ".old-"}
    ]


def test_requirements_may_go_in_a_circle(index, environments):
    """Packages that require each other, and one that requires itself, are each there once."""
    index.add("one", requires=("two",))
    index.add("two", requires=("three", "two"))
    index.add("three", requires=("one",))
    locked = index.locked("one")
    assert [package.name for package in locked.packages] == ["one", "three", "two"]
    assert (environments.build(locked, index.indexes).root / "python/three.py").is_file()


@pytest.mark.parametrize(
    "path", ["json.py", "JSON.py", "json/__init__.py", "json/x", "json.abi3.so", "kdskills_runtime/__init__.py"]
)
def test_a_package_named_like_a_module_of_python_is_refused(index, environments, path):
    """A distribution may be called `json`; what would be imported in place of Python's own, or of ours, may not be in it."""
    index.add("json", files={path: b""})
    assert refused(environments, index.locked("json"), index) == "environment_wheel_refused"
    index.add("json", "2.0", files={"json_of_ours.py": b""})
    assert environments.build(index.locked("json"), index.indexes)


def test_a_wheel_that_says_it_is_huge_is_not_asked_for(index, environments):
    """Two gigabytes by the lock are refused before the index is asked for anything."""
    index.add("one")
    locked = index.locked("one")
    locked = replace(locked, packages=(replace(locked.packages[0], size=2 << 30),))
    index.asked.clear()
    assert refused(environments, locked, index) == "environment_wheel_refused"
    assert index.asked.total() == 0


def test_a_wheel_that_does_not_end_is_given_up(index, environments, monkeypatch, tmp_path):
    """Where nobody said a size, a download ends at the bound of wheels, and its bytes are gone."""
    file = index.add("one")
    locked = index.locked("one")
    monkeypatch.setattr(room, "WHEEL_LIMITS", replace(WHEEL_LIMITS, archive_bytes=1 << 20))
    index.lies[file] = b"x" * (16 << 20)
    assert refused(environments, replace(locked, packages=(replace(locked.packages[0], size=0),)), index) == (
        "environment_hash_mismatch"
    )
    assert leftovers(tmp_path) == []


def test_an_index_that_goes_away_midway_is_told_and_taken_up_again(index, environments, monkeypatch, tmp_path):
    """A connection that ends within a file is told; what came whole before is not downloaded again."""
    monkeypatch.setattr(room, "PAUSE_S", 0.01)
    whole, broken = index.add("one"), index.add("two")
    locked = index.locked("one", "two")
    index.cut.add(broken)
    index.asked.clear()
    assert refused(environments, locked, index) == "environment_index_unreachable"
    assert (index.asked[f"files/{broken}"], leftovers(tmp_path)) == (room.TRIES, [])
    index.cut.clear()
    index.asked.clear()
    assert (environments.build(locked, index.indexes).root / "python/two.py").is_file()
    assert index.asked[f"files/{whole}"] == 0


def test_a_version_that_was_yanked_is_not_locked_again(index):
    """What was locked before its version was yanked stays installable; a new lock takes another, or says that there is none."""
    file = index.add("one", "2.0")
    index.add("one", "1.0")
    assert index.locked("one").packages[0].version == "2.0"
    index.yanked.add(file)
    assert index.locked("one").packages[0].version == "1.0"
    with pytest.raises(EnvironmentFailed) as caught:
        resolve(EnvironmentSpec(("one>1",)), index.indexes)
    assert caught.value.code == "environment_unavailable"


def test_two_builds_killed_at_once_leave_nothing(index, tmp_path):
    """Two processes that build the same, both killed, one of them waiting: the next build makes it, and removes the rest."""
    for number in range(6):
        index.add(f"one{number}")
    locked, cache = index.locked(*(f"one{number}" for number in range(6))), tmp_path / "cache"
    for pause in (0.0, 0.1, 0.4):
        children = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    EnvironmentStore(cache).build(locked, index.indexes)
                finally:
                    os._exit(0)
            children.append(pid)
        started = time.monotonic()
        while not list(cache.glob("environments/.new-*")) and time.monotonic() - started < 20:
            time.sleep(0.001)
        time.sleep(pause)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        store = EnvironmentStore(cache)
        mount = store.build(locked, index.indexes)
        assert len(list((mount.root / "python").glob("one*.py"))) == 6
        store.remove([locked])
        assert leftovers(tmp_path) == []


def test_a_lock_of_another_machine_brings_nothing(index, environments, tmp_path):
    """Wheels of another platform are told with both platforms, before the index is asked for anything."""
    index.add("one")
    locked = index.locked("one")
    other = replace(locked.packages[0], file="one-1.0-cp311-cp311-macosx_11_0_arm64.whl")
    index.asked.clear()
    with pytest.raises(EnvironmentFailed) as caught:
        environments.build(replace(locked, platform="cp311-macosx_11_0_arm64", packages=(other,)), index.indexes)
    assert caught.value.code == "environment_platform"
    assert "cp311-macosx_11_0_arm64" in caught.value.message
    assert room.platform_name() in caught.value.message
    assert (index.asked.total(), list(Path(tmp_path / "cache/environments/wheels").iterdir())) == (0, [])
