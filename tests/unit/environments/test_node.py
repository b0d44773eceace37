"""Packages of Node come from the operator's registry as their lock has them, are unpacked by the rules of archives, and never run."""

from __future__ import annotations

import errno
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.environments.codes import ENVIRONMENT_CODES, EnvironmentFailed
from kdskills.environments.model import NodeSpec
from kdskills.environments.node import (
    MAX_TOTAL,
    PackageRefused,
    UnpackTotal,
    fill_tree,
    locked_packages,
    named_packages,
    unpack_package,
)
from tests.unit.environments.conftest import LoopIndex, tarball

Row = dict[str, object]


def node_spec(packages: dict[str, Row], dependencies: dict[str, str] | None = None) -> NodeSpec:
    """Return a manifest and a lock with rows by folder; what the manifest asks for is what lies at the top."""
    wanted = dependencies or {folder.removeprefix("node_modules/"): "*" for folder in packages}
    rows = {"": {"dependencies": wanted}, **packages}
    lock = {"lockfileVersion": 3, "packages": rows}
    return NodeSpec(json.dumps({"dependencies": wanted}).encode(), json.dumps(lock).encode())


@pytest.fixture
def filled(index: LoopIndex, tmp_path: Path) -> Callable[[NodeSpec], Path]:
    """Return what brings packages of the loopback registry into a folder."""

    def fill(spec: NodeSpec) -> Path:
        work = tmp_path / "work"
        work.mkdir()
        fill_tree(spec, f"{index.url}/npm", work, lambda *_: None)
        return work

    return fill


def failing(code: str, spec: NodeSpec, do: Callable[[NodeSpec], Any] = locked_packages) -> EnvironmentFailed:
    """Return the error of a lock, after checking its code."""
    with pytest.raises(EnvironmentFailed) as caught:
        do(spec)
    assert (caught.value.code, caught.value.code in ENVIRONMENT_CODES) == (code, True), caught.value
    return caught.value


def test_packages_lie_where_the_lock_has_them(index: LoopIndex, filled: Callable[[NodeSpec], Path]) -> None:
    """Scoped and nested packages go to their folders, programs of the top ones to `bin`; what is for development, for another
    platform or within another's archive is not asked for.
    """
    rows = {
        "node_modules/one": index.add_node(
            "one", {"index.js": "1"}, bin={"say-one": "./cli.js", "node": "x.js", "../x": "y"}
        ),
        "node_modules/@acme/two": index.add_node("@acme/two", {"lib/a.js": "2"}),
        "node_modules/one/node_modules/three": index.add_node("three", {"a.js": "3"}, bin={"say-three": "a.js"}),
        "node_modules/dev": index.add_node("dev", {}, dev=True),
        "node_modules/far": index.add_node("far", {}, optional=True, os=["win32"]),
        "node_modules/one/node_modules/in": {"inBundle": True},
    }
    work = filled(node_spec(rows, {"one": "*", "@acme/two": "*"}))
    files = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
    assert {"node_modules/one/index.js", "node_modules/@acme/two/lib/a.js"} <= files
    assert "node_modules/one/node_modules/three/a.js" in files
    assert {path for path in files if path.startswith("bin/")} == {"bin/say-one"}
    assert not index.asked["npm/dev-1.0.0.tgz"] + index.asked["npm/far-1.0.0.tgz"]


def test_a_lock_without_addresses_is_taken_from_the_registry(
    index: LoopIndex, filled: Callable[[NodeSpec], Path]
) -> None:
    """Npm may be told to leave addresses out of its locks, and a package may lie under another name."""
    row = index.add_node("@acme/one", {"index.js": "1"}, name="@acme/one")
    del row["resolved"]
    assert (filled(node_spec({"node_modules/other": row})) / "node_modules/other/index.js").read_text() == "1"


def test_install_scripts_do_not_run(index: LoopIndex, filled: Callable[[NodeSpec], Path], tmp_path: Path) -> None:
    """A package whose manifest asks for commands at its installation gets none."""
    proof = tmp_path / "ran"
    manifest = {"name": "one", "scripts": dict.fromkeys(("preinstall", "install", "postinstall"), f"touch {proof}")}
    row = index.add_node("one", {"package.json": json.dumps(manifest), "binding.gyp": "{}"}, hasInstallScript=True)
    filled(node_spec({"node_modules/one": row}))
    assert not proof.exists()


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("node_modules/../one", {}),
        ("node_modules/.bin", {}),
        ("packages/one", {}),
        ("node_modules/one/../../x", {}),
        ("node_modules/one", {"resolved": "https://evil.example/one/-/one-1.0.0.tgz"}),
        ("node_modules/one", {"resolved": "git+ssh://git@example.net/one.git"}),
        ("node_modules/one", {"resolved": "https://registry.npmjs.org/../../x.tgz"}),
        ("node_modules/one", {"resolved": "https://registry.npmjs.org/one/-/one.tgz?x=https://evil.example"}),
        ("node_modules/one", {"resolved": "https://registry.npmjs.org.evil.example/one/-/one.tgz"}),
        ("node_modules/one", {"integrity": "sha1-2jmj7l5rSw0yVb/vlWAYkK/YBwk="}),
        ("node_modules/one", {"integrity": "sha512-c2hvcnQ="}),
        ("node_modules/one", {"integrity": 7}),
        ("node_modules/one", {"link": True}),
        ("node_modules/one", {"name": "good"}),
        ("node_modules/one", {"version": "2.0.0"}),
        ("node_modules/one", {"version": "1" * 5000, "resolved": ""}),
        ("node_modules/one", {"resolved": "https://registry.npmjs.org/evil/-/one-1.0.0.tgz"}),
        ("node_modules/one", {"resolved": "https://registry.npmjs.org/one/-/one-0.9.0.tgz"}),
        ("node_modules/" + "o" * 300, {"name": "one"}),
        ("node_modules/one", {"os": 5}),
        ("node_modules/one", {"cpu": {"x64": 1}}),
        ("node_modules/one", {"libc": [["glibc"]]}),
    ],
)
def test_a_lock_names_folders_digests_and_files_of_the_registry_alone(
    index: LoopIndex, folder: str, change: Row
) -> None:
    """Folders that lead elsewhere, names and versions that are not the address's, addresses of others, digests that prove nothing and
    platforms that are no names are `environment_invalid`.
    """
    row = {**index.add_node("one", {}), **change}
    failing("environment_invalid", node_spec({folder: row}, {"one": "*"}))


def test_a_lock_is_there_and_its_manifests(index: LoopIndex) -> None:
    """Without a lock, with one that has no packages, or another manifest's, the command that writes it is named."""
    spec = node_spec({"node_modules/one": index.add_node("one", {})})
    other = json.dumps({"dependencies": {"one": "^2"}}).encode()
    for broken in (NodeSpec(spec.manifest), NodeSpec(other, spec.lock)):
        assert "npm install --package-lock-only" in failing("environment_invalid", broken).message
    failing("environment_invalid", NodeSpec(spec.manifest, b"{}"))
    row = index.add_node("one", {}, cpu=["!x64", "!arm64"])
    failing("environment_platform", node_spec({"node_modules/one": row}))


def test_other_bytes_and_an_absent_file_are_told(index: LoopIndex, filled: Callable[[NodeSpec], Path]) -> None:
    """What has not the digest of the lock, and what the registry has not, are told by their codes."""
    spec = node_spec({"node_modules/one": index.add_node("one", {})})
    index.lies["one-1.0.0.tgz"] = tarball({"package/index.js": "evil"})
    failing("environment_hash_mismatch", spec, filled)


def link(kind: bytes, name: str, target: str) -> tarfile.TarInfo:
    """Return an entry that is no file."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def endless() -> bytes:
    """Return an archive whose extended header has 3 MB of nothing, before a file that lets it have so many."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * 3_000_000}
    ) as archive:
        archive.addfile(link(tarfile.REGTYPE, "package/a", ""), io.BytesIO())
        entry = link(tarfile.REGTYPE, "package/b", "")
        entry.size = 100_000
        archive.addfile(entry, io.BytesIO(random.Random(1).randbytes(100_000)))
    return out.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        b"no archive",
        tarball({"package/a": "x"})[:-20],
        tarball({"package/../../a": "x"}),
        tarball({"/package/a": "x"}),
        tarball({"package/a\\b": "x"}),
        tarball({"package/a\nb": "x"}),
        tarball({"beside": "x"}),
        tarball({"package/a": "x", "other/a": "y"}),
        tarball({"package/a": "x", "package/a/b": "y"}),
        tarball({"package/" + "a/" * 50 + "b": "x"}),
        tarball({"package/zeros": bytes(200 * 1024 * 1024)}),
        tarball({}, link(tarfile.SYMTYPE, "package/a", "/etc/passwd")),
        tarball({"package/a": "x"}, link(tarfile.LNKTYPE, "package/b", "package/a")),
        tarball({}, link(tarfile.CHRTYPE, "package/a", "")),
        tarball({}, link(tarfile.FIFOTYPE, "package/a", "")),
        tarball({"package/" + "a" * 256: "x"}),
        tarball({"package/" + "é" * 128: "x"}),
        tarball({}, *[link(tarfile.XHDTYPE, "package/a", "")] * 1500),
    ],
    ids=range(18),
)
def test_hostile_archives_are_refused(tmp_path: Path, archive: bytes) -> None:
    """Paths that lead outside, links, devices, bombs, broken and doubled entries: nothing lies outside the folder."""
    file, into = tmp_path / "file", tmp_path / "into"
    file.write_bytes(archive)
    with pytest.raises(PackageRefused):
        unpack_package(file, "one-1.0.0.tgz", into, UnpackTotal(MAX_TOTAL))
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "into"}


def refusal(tmp_path: Path, archive: bytes) -> str:
    """Return why an archive is refused, after checking that little was written."""
    (tmp_path / "file").write_bytes(archive)
    with pytest.raises(PackageRefused) as caught:
        unpack_package(tmp_path / "file", "one-1.0.0.tgz", tmp_path / "into", UnpackTotal(MAX_TOTAL))
    assert sum(path.stat().st_size for path in tmp_path.rglob("into/**/*")) < 1_000_000
    return caught.value.message


def test_an_endless_header_is_not_read(tmp_path: Path) -> None:
    """Of an extended header no more is read than any needs, however much the package may unpack to."""
    assert "headers" in refusal(tmp_path, endless())


def test_sparse_files_and_links_are_named_as_such(tmp_path: Path) -> None:
    """A file that is short in the archive and endless on the disk is refused before it is written, and a link as a link."""
    sparse = link(tarfile.REGTYPE, "package/a", "")
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 22)}
    assert "sparse" in refusal(tmp_path, tarball({}, sparse))
    assert "it is a link" in refusal(tmp_path, tarball({}, link(tarfile.SYMTYPE, "package/a", "b")))


def test_all_packages_of_a_lock_have_one_bound(
    index: LoopIndex, filled: Callable[[NodeSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that are each small enough are refused where they are too much together."""
    monkeypatch.setattr("kdskills.environments.node.MAX_TOTAL", 150_000)
    rows = {f"node_modules/{name}": index.add_node(name, {"a": "x" * 100_000}) for name in ("one", "two")}
    assert "packages of the lock" in failing("environment_package_refused", node_spec(rows), filled).message


def test_of_two_programs_of_one_name_the_first_stays(index: LoopIndex, filled: Callable[[NodeSpec], Path]) -> None:
    """Two packages may name a program alike; that of the first folder is the one."""
    rows = {f"node_modules/{name}": index.add_node(name, {}, bin={"run": f"{name}.js"}) for name in ("one", "two")}
    assert "/one/one.js" in (filled(node_spec(rows)) / "bin/run").read_text()


def test_what_the_system_refuses_is_told_but_for_a_full_disk(
    index: LoopIndex, filled: Callable[[NodeSpec], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An error of the system is the package's, and a full disk stays what it is, for the store to tell."""
    (tmp_path / "file").write_bytes(tarball({"package/a": "x"}))
    for number, kind in ((errno.EIO, PackageRefused), (errno.ENOSPC, OSError)):

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr("kdskills.environments.node.new_file", refuse)
        with pytest.raises(kind):
            unpack_package(tmp_path / "file", "one-1.0.0.tgz", tmp_path / "into", UnpackTotal(MAX_TOTAL))


def test_an_audit_sees_every_package_by_its_address(index: LoopIndex) -> None:
    """Packages for other platforms, and those beside one that a build refuses, are named; a row cannot call itself another."""
    rows: dict[str, Any] = {
        "node_modules/bad": {"version": "1.0.0"},
        "node_modules/far": index.add_node("far", {}, os=["win32"]),
        "node_modules/lies": {**index.add_node("evil", {}), "name": "good"},
        "node_modules/one": index.add_node("one", {}, "1.2.3"),
        "node_modules/text": "no row",
    }
    spec = node_spec(rows)
    assert list(named_packages(spec)) == [("far", "1.0.0"), ("one", "1.2.3")]
    assert list(named_packages(NodeSpec(spec.manifest, b"{}"))) == []


def test_archives_on_their_way_lie_beside_what_is_built(
    index: LoopIndex, filled: Callable[[NodeSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is put into the system's temporary folder, where nobody would remove what a killed build leaves."""
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    filled(node_spec({"node_modules/one": index.add_node("one", {})}))
