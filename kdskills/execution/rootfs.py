"""The tree a sandbox calls `/`: the host's Python and core tools, a few packages, and the ground floor of kdskills.

One artifact serves bubblewrap as its read-only root and docker as its image. It is built offline
from what is already installed, and never contains anything of the host's own data. Trees are named by what went into
them, built aside under a lock and renamed into place, so a half-built tree is never used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kdskills.errors import ExecFailed
from kdskills.execution import rootfs_copy
from kdskills.execution.dirs import cache_dir, discard_tree, private_dir
from kdskills.execution.stage import locked

BUILDER = 3
"""Raised whenever the layout of the tree changes."""

GROUND_FLOOR = ("errors", "models", "skills", "bundle", "sources", "prompts", "turn")
PYTHON = "/usr/local/bin/python3"
SANDBOX_UID = 10001
KEEP_S = 3 * 3600.0

_FILES = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nsandbox:x:10001:10001:sandbox:/work:/bin/sh\n",
    "etc/group": "root:x:0:\nsandbox:x:10001:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
_FOLDERS = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "work", "skills", "home", "root", "opt")


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A prepared tree.

    Attributes:
        path: Folder to mount read-only as `/`.
        key: Hex name of everything that went into it.
        entry: Absolute path, inside, of the entry that runs generated code.
        python: Absolute path, inside, of the interpreter.
    """

    path: Path
    key: str
    entry: str
    python: str = PYTHON


def image_recipe_dir() -> Path:
    """Return the folder of the image's recipe: beside the installed package, or `runtime/images` of a checkout."""
    package = _package_dir()
    installed = package / "_images"
    return installed if installed.is_dir() else package.parent / "runtime" / "images"


def build_rootfs(cache: Path | None = None, *, packages: tuple[str, ...] = ()) -> Rootfs:
    """Return the prepared tree for this interpreter and these sources, building it when it is not there yet.

    Args:
        cache: Folder to build in; `cache_dir()` when None.
        packages: Further installed distributions to copy, beside those of `packages.txt`.

    Raises:
        ExecFailed: A tool or package the recipe demands is not installed on this host.
        ExecRefused: The cache folder is not ours alone.
    """
    passable = os.geteuid() == 0  # then programs have a uid of their own, and some engines reach the tree by this path
    top = private_dir(private_dir(cache or cache_dir(), passable=passable) / "rootfs", passable=passable)
    distributions = [
        *rootfs_copy.recipe(image_recipe_dir() / "packages.txt"),
        *((name, True) for name in sorted(packages)),
    ]
    base_key, ours = _base_key(distributions), _our_files()
    key = _digest([base_key, [(str(inside), _file_digest(source)) for inside, source in ours]])
    final = top / key[:40]
    entry = f"/{rootfs_copy.site_packages()}/kdskills_runtime/py_code_exec_entry.py"
    if not final.is_dir():
        with locked(top / ".lock"):
            if not final.is_dir():
                base = _build_once(top, f"base-{base_key[:40]}", lambda work: _build_base(work, distributions))
                _build_once(top, final.name, lambda work: _build_ours(base, work, ours))
                _prune(top, final.name, base.name)
    os.utime(final)
    return Rootfs(final, key, entry)


def rootfs_for_image(cache: Path | None = None, *, packages: tuple[str, ...] = ()) -> tuple[Path, str]:
    """Return (tar file, digest) of the prepared tree, for `docker import`.

    The tar is reproducible: entries sorted, owned by root, without times. The digest is `sha256:` over its bytes.
    """
    tree = build_rootfs(cache, packages=packages)
    final = tree.path.parent / f"{tree.path.name}.tar"
    note = final.with_suffix(".sha256")
    if not note.is_file():
        with locked(final.parent / ".tar.lock"):
            if not note.is_file():
                digest = _write_tar(tree.path, final)
                _write_atomic(note, digest.encode())
    return final, note.read_text(encoding="ascii")


def _package_dir() -> Path:
    return Path(__file__).parents[1]


def _runtime_dir() -> Path:
    # The host never imports the far side; it only needs to know where its files are.
    spec = importlib.util.find_spec("kdskills_runtime")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return _package_dir().parent / "runtime" / "kdskills_runtime"


def ground_floor_files() -> list[tuple[Path, Path]]:
    """Return (path below a folder of packages, host file) of everything of kdskills that runs behind a wall, sorted."""
    return _our_files()


def _our_files() -> list[tuple[Path, Path]]:
    """Return (path below site-packages, host file) of the ground floor and the entry, sorted."""
    package, runtime = _package_dir(), _runtime_dir()
    files = [(Path("kdskills") / name, package / name) for name in ("__init__.py", "py.typed")]
    for room in GROUND_FLOOR:
        files += [(Path("kdskills") / path.relative_to(package), path) for path in _files(package / room)]
    files += [(Path("kdskills_runtime") / path.relative_to(runtime), path) for path in _files(runtime)]
    return sorted(files)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _base_key(distributions: list[tuple[str, bool]]) -> str:
    python = Path(rootfs_copy.base_python())
    info = python.stat()
    packages = {}
    for name, needed in distributions:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                raise ExecFailed(f"the offline image needs the package {name}, which is not installed") from None
    recipe = (image_recipe_dir() / "tools.txt").read_text(encoding="utf-8")
    facts = [sys.version, str(python), info.st_size, info.st_mtime_ns, platform.machine(), platform.libc_ver()]
    return _digest([BUILDER, facts, packages, recipe])


def _build_once(top: Path, name: str, build: rootfs_copy.Build) -> Path:
    final = top / name
    if final.is_dir():
        os.utime(final)
        return final
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=top))
    try:
        build(work)
        work.chmod(0o755)
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _build_base(work: Path, distributions: list[tuple[str, bool]]) -> None:
    for name in _FOLDERS:
        (work / name).mkdir(parents=True)
    copier = rootfs_copy.Copier(work)
    copier.merge_usr()
    copier.tools(rootfs_copy.recipe(image_recipe_dir() / "tools.txt"))
    copier.python()
    for name, needed in distributions:
        copier.distribution(name, needed=needed)
    copier.libraries()
    for name, text in _FILES.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    rootfs_copy.settle_modes(work)


def _build_ours(base: Path, work: Path, ours: list[tuple[Path, Path]]) -> None:
    rootfs_copy.link_tree(base, work)
    site = work / rootfs_copy.site_packages()
    for inside, source in ours:
        rootfs_copy.place_module(source, site / inside)
    rootfs_copy.settle_modes(site / "kdskills")
    rootfs_copy.settle_modes(site / "kdskills_runtime")


def _prune(top: Path, *keep: str) -> None:
    """Remove trees nobody has used for three hours; every run touches the one it uses, and none lasts that long."""
    oldest = time.time() - KEEP_S
    for path in top.iterdir():
        if path.name in keep or path.name.endswith(".lock") or path.lstat().st_mtime > oldest:
            continue
        discard_tree(path)


def _write_tar(tree: Path, final: Path) -> str:
    fd, name = tempfile.mkstemp(prefix=".new-", dir=final.parent)
    try:
        with os.fdopen(fd, "wb") as sink, tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(tree.rglob("*")):
                tar.add(path, arcname=str(path.relative_to(tree)), recursive=False, filter=_plain)
        digest = "sha256:" + _file_digest(Path(name))
        Path(name).chmod(0o644)
        Path(name).rename(final)
    finally:
        Path(name).unlink(missing_ok=True)
    return digest


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    if info.name == "tmp":
        info.mode = 0o1777
    return info


def _write_atomic(path: Path, data: bytes) -> None:
    fd, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with os.fdopen(fd, "wb") as sink:
        sink.write(data)
    Path(name).chmod(0o644)
    Path(name).rename(path)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
