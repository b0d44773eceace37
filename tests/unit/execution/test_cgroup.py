"""Cgroup leaves over a plain folder that looks like a hierarchy."""

import os
from pathlib import Path

import pytest

from kdskills.execution import owner
from kdskills.execution.owner import Cgroup, find_parent

V2_FILES = ("memory.max", "memory.swap.max", "pids.max", "cgroup.procs", "cgroup.subtree_control")
V1_FILES = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max", "cgroup.procs")


@pytest.fixture
def kernel(monkeypatch):
    """Make every new folder hold the files a hierarchy gives it, and let folders with files be removed."""
    real_mkdir, real_rmdir = Path.mkdir, Path.rmdir

    def mkdir(self, *args, **kwargs):
        real_mkdir(self, *args, **kwargs)
        for name in {*V2_FILES, *V1_FILES}:
            (self / name).touch()

    def rmdir(self):
        for child in self.iterdir():
            if child.is_file():
                child.unlink()
        real_rmdir(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)


def test_version_2(tmp_path, kernel):
    """One folder serves both controllers, with swap off."""
    top = tmp_path / "cg"
    top.mkdir()
    (top / "cgroup.controllers").write_text("memory pids")
    parent = find_parent(top, own_cgroups="0::/user.slice/me\n")
    assert parent == Cgroup(top / "kdskills", top / "kdskills", 2)
    leaf = parent.leaf("x", 1000, 5)
    assert (leaf.memory / "memory.max").read_text() == "1000"
    assert (leaf.memory / "memory.swap.max").read_text() == "0"
    assert leaf.bounds() == {"memory": 1000, "pids": 5}
    leaf.join(4242)
    assert leaf.members() == [4242]


def test_version_2_falls_back_to_a_delegated_folder(tmp_path, kernel, monkeypatch):
    """Where the top is closed, the highest writable folder above us is used."""
    top = tmp_path / "cg"
    for path in (top, top / "user.slice", top / "user.slice/svc", top / "user.slice/svc/me"):
        path.mkdir()
    (top / "cgroup.controllers").write_text("memory pids")
    usable = owner._usable
    monkeypatch.setattr(owner, "_usable", lambda parent: parent.memory.parent != top and usable(parent))
    parent = find_parent(top, own_cgroups="0::/user.slice/svc/me\n")
    assert parent.memory == top / "user.slice/kdskills"


def test_version_1(tmp_path, kernel):
    """Two folders, one per controller; memory with swap is bounded as memory is."""
    for name in ("memory", "pids"):
        (tmp_path / name).mkdir()
    parent = find_parent(tmp_path)
    assert parent.version == 1
    leaf = parent.leaf("x", 1000, 5)
    assert leaf.folders == (tmp_path / "memory/kdskills/x", tmp_path / "pids/kdskills/x")
    assert (leaf.memory / "memory.memsw.limit_in_bytes").read_text() == "1000"
    leaf.join(77)
    assert (leaf.memory / "cgroup.procs").read_text() == (leaf.pids / "cgroup.procs").read_text() == "77"
    assert [found.memory.name for found in parent.leaves()] == ["x"]


def test_no_hierarchy(tmp_path):
    """A host without one, or with one we may not write, has no parent."""
    assert find_parent(tmp_path / "none") is None
    (tmp_path / "cgroup.controllers").write_text("")
    assert find_parent(tmp_path, own_cgroups="0::/\n") is None


@pytest.mark.parametrize(("version", "name"), [(2, "memory.events"), (1, "memory.oom_control")])
def test_kills_for_memory_are_counted(tmp_path, version, name):
    """The kernel's own count decides what is `oom`."""
    (tmp_path / name).write_text("low 0\noom 3\noom_kill 2\noom_kill_disable 0\n")
    assert Cgroup(tmp_path, tmp_path, version).oom_kills() == 2
    assert Cgroup(tmp_path / "gone", tmp_path, version).oom_kills() == 0


def test_removing_twice_is_fine(tmp_path):
    """A leaf that is gone is removed."""
    leaf = Cgroup(tmp_path / "a", tmp_path / "b", 1)
    (tmp_path / "a").mkdir()
    assert leaf.remove()
    assert leaf.remove()


def test_a_leaf_that_stays_is_reported(tmp_path):
    """When the kernel will not let go in time, the caller hears so."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/busy").touch()
    assert not Cgroup(tmp_path / "a", tmp_path / "a", 2).remove(0.02)


def test_real_leaves():
    """On a host with a writable hierarchy the bounds hold in the kernel's own files."""
    parent = find_parent()
    if parent is None:
        pytest.skip("no cgroup is writable here")
    leaf = parent.leaf("unit-test", 64 << 20, 7)
    try:
        assert leaf.bounds() == {"memory": 64 << 20, "pids": 7}
        assert (leaf.members(), leaf.oom_kills()) == ([], 0)
    finally:
        assert leaf.remove()
    assert not leaf.memory.exists()


def test_a_real_leaf_takes_other_bounds():
    """Bounds can be widened and narrowed as long as the leaf is empty."""
    parent = find_parent()
    if parent is None:
        pytest.skip("no cgroup is writable here")
    leaf = parent.leaf(f"probe-bounds-{os.getpid()}", 64 << 20, 8)
    try:
        for memory, pids in ((256 << 20, 66), (32 << 20, 4), (64 << 20, 8)):
            leaf.bound(memory, pids)
            assert leaf.bounds() == {"memory": memory, "pids": pids}
    finally:
        assert leaf.remove()
