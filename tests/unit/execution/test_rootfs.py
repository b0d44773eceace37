"""The prepared tree: what goes in, under which name, and what never does."""

import importlib.util
import os
import stat
import subprocess
import tarfile

import pytest

from kdskills.errors import ExecFailed
from kdskills.execution import rootfs
from kdskills.execution.dirs import prune
from kdskills.execution.rootfs import (
    GROUND_FLOOR,
    build_rootfs,
    image_profiles,
    image_programs,
    image_recipe_dir,
    image_versions,
    rootfs_for_image,
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A tree built from scratch in a folder of its own."""
    return build_rootfs(tmp_path_factory.mktemp("cache"))


def test_the_tree_is_complete(tree):
    """Interpreter, shell, ground floor and entry are there; the rooms above are not."""
    for name in ("usr/local/bin/python3", "usr/bin/sh", "usr/bin/grep", "etc/passwd", tree.entry.lstrip("/")):
        assert (tree.path / name).exists(), name
    package = tree.path / rootfs.site_packages() / "kdskills"
    assert {path.name for path in package.iterdir()} - {"__pycache__"} == {
        "__init__.py",
        "exports.py",
        "py.typed",
        *GROUND_FLOOR,
    }


def test_its_python_runs_in_a_changed_root(tree):
    """Every library the interpreter and the packages need is inside."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root; the engine's own tests run this Python too")
    program = "import pydantic, yaml, jinja2, sqlite3, ssl, ctypes, lzma, bz2; from yaml import CSafeLoader; import kdskills; print('ok')"
    command = ["chroot", "--userspec=10001:10001", str(tree.path), "/usr/local/bin/python3", "-I", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "ok\n"


def test_everything_is_readable_and_nothing_setuid(tree):
    """The sandbox's uid can read all of it; no bit gives more rights; only we may write."""
    for folder, names, files in os.walk(tree.path):
        for name in [*names, *files]:
            info = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - thousands of files
            if not stat.S_ISLNK(info.st_mode):
                assert info.st_mode & 0o7022 == 0, name
                assert info.st_mode & 0o444 == 0o444, name


def test_a_second_build_finds_the_first(tree):
    """The same sources give the same tree, without building."""
    inode = tree.path.stat().st_ino
    again = build_rootfs(tree.path.parents[1])
    assert (again, again.path.stat().st_ino) == (tree, inode)
    assert [path.name for path in tree.path.parent.iterdir() if path.name.startswith(".new-")] == []


def test_the_tar_is_reproducible(tree):
    """No times and no owners: the digest names the content; a second call reads it back."""
    first, digest = rootfs_for_image(tree.path.parents[1])
    assert rootfs_for_image(tree.path.parents[1]) == (first, digest)
    with tarfile.open(first) as tar:
        members = tar.getmembers()
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}
    assert all(member.isfile() or member.isdir() or member.issym() or member.islnk() for member in members)


def test_bytecode_is_used_without_looking_at_times(tmp_path):
    """Modules are compiled as unchecked hashes, so an image without times still starts fast."""
    source = tmp_path / "mod.py"
    source.write_text("x = 1\n")
    rootfs.place_module(source, tmp_path / "out/mod.py")
    data = (tmp_path / "out/__pycache__" / f"mod.{os.sys.implementation.cache_tag}.pyc").read_bytes()
    assert data[:8] == importlib.util.MAGIC_NUMBER + b"\x01\0\0\0"
    assert data[8:16] == importlib.util.source_hash(b"x = 1\n")


def test_stale_bytecode_of_the_host_is_not_taken(tmp_path):
    """A cached file that does not fit its source is compiled anew."""
    source = tmp_path / "mod.py"
    source.write_text("x = 1\n")
    cached = tmp_path / "__pycache__" / f"mod.{os.sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir()
    cached.write_bytes(importlib.util.MAGIC_NUMBER + bytes(12) + b"forged")
    rootfs.place_module(source, tmp_path / "out/mod.py")
    assert b"forged" not in (tmp_path / "out/__pycache__" / cached.name).read_bytes()


def test_code_for_another_python_is_copied_as_it_is(tmp_path):
    """A template that does not compile is no reason to fail."""
    (tmp_path / "t.py").write_text("def (:\n")
    rootfs.place_module(tmp_path / "t.py", tmp_path / "out/t.py")
    assert (tmp_path / "out/t.py").read_text() == "def (:\n"


def test_recipes_say_what_may_be_missing(tmp_path):
    """`?` marks what a host need not have; the rest is demanded by name."""
    (tmp_path / "r").write_text("# note\nsh\nfile ? # maybe\n\n")
    assert rootfs.recipe(tmp_path / "r") == [("sh", True), ("file", False)]
    copier = rootfs.Copier(tmp_path / "top")
    with pytest.raises(ExecFailed, match="no-such-tool"):
        copier.tools([("no-such-tool", True)])


def test_a_further_package_is_demanded(tmp_path):
    """What the operator adds must be installed."""
    with pytest.raises(ExecFailed, match="no-such-package"):
        build_rootfs(tmp_path / "cache", packages=("no-such-package",))


def test_what_a_further_package_requires_comes_along():
    """Its requirements, theirs too, and none of extras that nobody asked for."""
    versions = image_versions(("requests",))
    assert {"requests", "urllib3", "certifi", "idna", "pydantic"} <= set(versions)
    assert "pysocks" not in versions


def test_a_profile_brings_what_the_host_has(tmp_path):
    """Programs with the folders they read, as links where they lie in one, never out of the tree; what is absent is told."""
    with pytest.raises(ExecFailed, match="no image profile x; there are documents, data, web, node"):
        build_rootfs(tmp_path / "cache", profiles=("x",))
    profiles = image_profiles()
    tree = build_rootfs(tmp_path / "cache", profiles=("web", "node"))
    names = {*profiles["web"].programs, *profiles["node"].programs}
    absent = {name for profile in ("web", "node") for name in profiles[profile].absent()[0]}
    assert {name for name in names if (tree.path / "usr/bin" / name).exists()} == names - absent
    assert names - absent <= image_programs(("node", "web"))
    assert not absent & image_programs(("node", "web"))
    for path in (tree.path / "usr/bin").iterdir():
        assert path.resolve().is_relative_to(tree.path), path
    assert tree != build_rootfs(tmp_path / "cache")


def test_the_recipe_is_shipped():
    """The recipe's files are found beside the code."""
    names = {path.name for path in image_recipe_dir().iterdir()}
    assert {"tools.txt", "packages.txt", "profiles.toml", "seccomp.json", "Dockerfile"} <= names


def test_trees_nobody_uses_are_removed(tmp_path):
    """Old trees and archives go when a new one is built; fresh ones and locks stay."""
    top = tmp_path / "rootfs"
    for name in ("old", "fresh", "kept"):
        (top / name).mkdir(parents=True)
    for name in ("old.tar", ".lock"):
        (top / name).touch()
    for name in ("old", "kept", "old.tar", ".lock"):
        os.utime(top / name, (1, 1))
    prune(top, rootfs.KEEP_S, "kept")
    assert sorted(path.name for path in top.iterdir()) == [".lock", "fresh", "kept"]
