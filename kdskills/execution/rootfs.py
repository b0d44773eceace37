"""The tree a sandbox calls `/`: the host's Python and core tools, a few packages, and the ground floor of kdskills.

It is built offline from what is installed, with nothing of the host's own data. Trees are named by what went into them,
built aside under a lock and renamed into place, so a half-built tree is never used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import marshal
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

from kdskills.errors import ExecFailed
from kdskills.execution.dirs import cache_dir, locked, new_tree, private_dir, prune, write_note
from kdskills.execution.egress import TRUST_FILE
from kdskills.execution.payload import host_entry

_SKIPPED = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "tkinter"),
    *("turtledemo", "ensurepip", "lib2to3", "pydoc_data", "distutils"),
}
_DYNLOAD_SKIPPED = re.compile(r"^(_tkinter|_test|_ctypes_test|xx|_xx)")
_LDD = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$")
_PYTHON_NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGE = Path(__file__).parents[1]
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


def base_python() -> str:
    """Return the real path of the interpreter behind any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def site_packages() -> str:
    """Return site-packages relative to the tree."""
    return f"usr/local/lib/{_PYTHON_NAME}/site-packages"


def recipe(path: Path) -> list[tuple[str, bool]]:
    """Return (name, needed) of every line; `?` after a name says it may be missing."""
    lines = (line.split("#", 1)[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return [(words[0], "?" not in words[1:]) for words in lines if words]


class _CodeReader(SourceFileLoader):
    """Gives a module's code, the host's own bytecode where that is fresh; the host's folders stay as they are."""

    def set_data(self, *_: object, **__: object) -> None:
        pass


def place_module(source: Path, target: Path) -> None:
    """Copy one file; Python files get bytecode that is used without looking at the source's time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if source.suffix != ".py":
        shutil.copymode(source, target)
        return
    with suppress(SyntaxError, ValueError):  # a template or a module for another Python: the source alone is copied
        code = _CodeReader("module", str(source)).get_code("module")
        unchecked = (1).to_bytes(4, "little") + importlib.util.source_hash(source.read_bytes())
        cached = Path(importlib.util.cache_from_source(str(target), optimization=""))
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(importlib.util.MAGIC_NUMBER + unchecked + marshal.dumps(code))


def settle_modes(top: Path) -> None:
    """Make every folder 0755 and every file 0644 or 0755: readable by the sandbox's uid, never setuid."""
    for folder, _, files in os.walk(top):
        Path(folder).chmod(0o755)
        for name in files:
            path = Path(folder) / name
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)


class Copier:
    """Fills one tree; remembers every ELF file placed, so that `libraries` can close over what they need."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._elf: list[Path] = []

    def merge_usr(self) -> None:
        """Give the tree the host's shape of /bin, /lib, /lib64 and /sbin: links into /usr, or folders."""
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            host = Path("/") / name
            if host.is_symlink():
                target = os.readlink(host).lstrip("/")  # noqa: PTH115 - the text of the link, as it is
                (self._top / target).mkdir(parents=True, exist_ok=True)
                (self._top / name).symlink_to(target)
            elif host.is_dir():
                (self._top / name).mkdir(exist_ok=True)

    def tools(self, names: list[tuple[str, bool]]) -> None:
        """Copy programs from the host's system folders into /usr/bin."""
        folder = self._top / "usr/bin"
        folder.mkdir(parents=True, exist_ok=True)
        for name, needed in names:
            program = shutil.which(name, path=_PATH)
            if program is None:
                if needed:
                    raise ExecFailed(f"the offline image needs the program {name}, which is not installed", tool=name)
                continue
            real = Path(program).resolve()
            shutil.copyfile(real, folder / name)
            (folder / name).chmod(0o755)
            self._note(real)
        for name in ("sh", "bash", "env"):  # scripts name them in both places
            alias = self._top / "bin" / name
            if not alias.exists() and (self._top / "bin").is_dir():
                alias.symlink_to(f"../usr/bin/{name}")

    def python(self) -> None:
        """Copy the interpreter and its standard library below /usr/local, without tests and toolkits."""
        binary = Path(base_python())
        folder = self._top / "usr/local/bin"
        folder.mkdir(parents=True)
        shutil.copyfile(binary, folder / _PYTHON_NAME)
        (folder / _PYTHON_NAME).chmod(0o755)
        for alias in ("python3", "python"):
            (folder / alias).symlink_to(_PYTHON_NAME)
        self._note(binary)
        stdlib = Path(sysconfig.get_path("stdlib"))
        target = self._top / "usr/local" / sys.platlibdir / _PYTHON_NAME
        for top, names, files in os.walk(stdlib):
            names[:] = sorted(n for n in names if n not in _SKIPPED and not n.startswith(("config-", "lib-dynload")))
            for file in sorted(files):
                if not file.endswith((".pyc", ".exe", ".a", ".so")):
                    source = Path(top, file)
                    place_module(source, target / source.relative_to(stdlib))
        dynload = stdlib / "lib-dynload"
        if not dynload.is_dir():
            dynload = Path(sys.base_exec_prefix) / sys.platlibdir / _PYTHON_NAME / "lib-dynload"
        for source in sorted(dynload.glob("*.so")):
            if not _DYNLOAD_SKIPPED.match(source.name):
                place_module(source, target / "lib-dynload" / source.name)
                self._note(source)
        site = self._top / site_packages()
        site.mkdir(parents=True, exist_ok=True)
        (site.parent / "dist-packages").symlink_to("site-packages")  # where Debian's own Python looks

    def distribution(self, name: str) -> None:
        """Copy the files of an installed distribution, as its RECORD lists them."""
        distribution = importlib.metadata.distribution(name)
        if distribution.files is None:
            raise ExecFailed(f"the package {name} does not list its files; install it by pip", package=name)
        site = self._top / site_packages()
        for item in distribution.files:
            parts = item.parts
            if ".." in parts or item.is_absolute() or {"__pycache__", "tests", "test"} & set(parts):
                continue
            source = Path(str(distribution.locate_file(item)))
            if source.is_file():
                place_module(source, site / Path(*parts))
                if ".so" in source.suffixes:
                    self._note(source)

    def libraries(self) -> None:
        """Copy every shared library the noted files need, and the loader, where the loader will find them."""
        command, env = ["ldd", *map(str, self._elf)], {**os.environ, "LC_ALL": "C"}
        lists = subprocess.run(command, capture_output=True, text=True, check=False, env=env).stdout
        matches = filter(None, map(_LDD.match, lists.splitlines()))
        libraries = {match[1] or match[2]: Path(match[2]) for match in matches}
        if "not found" in lists:
            missing = sorted({line.split()[0] for line in lists.splitlines() if line.endswith("not found")})
            raise ExecFailed(f"shared libraries are missing on this host: {', '.join(missing)}")
        libc = next((path for name, path in libraries.items() if name.startswith(("libc.so", "libc.musl"))), None)
        if libc is None:
            raise ExecFailed("ldd names no C library for this Python")
        for name, path in libraries.items():
            if "site-packages" in path.parts or "dist-packages" in path.parts:
                continue  # came with its package, which finds it by its own rpath
            system = path.parts[1] in {"lib", "lib64", "usr"} and path.parts[1:3] != ("usr", "local")
            location = (path if system else libc.parent / path.name) if "/" not in name else Path(name)
            target = self._top / str(location).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copyfile(path.resolve(), target)
                target.chmod(0o755)

    def _note(self, path: Path) -> None:
        with path.open("rb") as stream:
            if stream.read(4) == b"\x7fELF":
                self._elf.append(path)


BUILDER = 4
"""Raised whenever the layout of the tree changes."""

GROUND_FLOOR = ("errors", "models", "skills", "bundle", "sources", "prompts", "search", "turn")
PYTHON = "/usr/local/bin/python3"
KEEP_S = 3 * 3600.0
"""Trees nobody has used for so long are removed; every run touches the one it uses, and none lasts that long."""

_FILES = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nsandbox:x:10001:10001:sandbox:/work:/bin/sh\n",
    "etc/group": "root:x:0:\nsandbox:x:10001:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
_FOLDERS = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "work", "skills", "env", "home", "root", "opt")


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A prepared tree, to mount read-only as `/`; `entry`, which runs generated code, and `python` are paths inside."""

    path: Path
    key: str  # hex name of everything that went into it
    entry: str
    python: str = PYTHON

    def on_host(self) -> tuple[str, str]:
        """Return interpreter and entry by their paths on this host."""
        return f"{self.path}{self.python}", f"{self.path}{self.entry}"

    def beside_entry(self, name: str) -> str:
        """Return the path, inside, of another program of ours."""
        return f"{self.entry.rpartition('/')[0]}/{name}"


def image_recipe_dir() -> Path:
    """Return the folder of the image's recipe: beside the installed package, or `runtime/images` of a checkout."""
    installed = _PACKAGE / "_images"
    return installed if installed.is_dir() else _PACKAGE.parent / "runtime" / "images"


def image_versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the distributions that the tree has, and *packages*, with their versions. Raises ExecFailed."""
    versions = {}
    for name, needed in (*recipe(image_recipe_dir() / "packages.txt"), *((name, True) for name in sorted(packages))):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                raise ExecFailed(f"the offline image needs the package {name}, which is not installed") from None
    return versions


def image_programs() -> frozenset[str]:
    """Return the names of the programs that the tree has on its path."""
    tools = recipe(image_recipe_dir() / "tools.txt")
    return frozenset(name for name, needed in tools if needed or shutil.which(name, path=_PATH)) | {"python3", "python"}


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
    versions = image_versions(packages)
    python = Path(base_python())
    info, tools = python.stat(), image_recipe_dir() / "tools.txt"
    facts = [sys.version, str(python), info.st_size, info.st_mtime_ns, platform.machine(), platform.libc_ver()]
    trusted = trusted_certificates()
    facts += [] if trusted is None else [_file_digest(trusted)]
    base_key, ours = _digest([BUILDER, facts, versions, tools.read_text(encoding="utf-8")]), ground_floor_files()
    key = _digest([base_key, [(str(inside), _file_digest(source)) for inside, source in ours]])
    final = top / key[:40]
    entry = f"/{site_packages()}/kdskills_runtime/py_code_exec_entry.py"
    if not final.is_dir():
        with locked(top / ".lock"):
            if not final.is_dir():
                base = top / f"base-{base_key[:40]}"
                if base.is_dir():
                    os.utime(base)
                else:
                    with new_tree(base) as work:
                        _build_base(work, list(versions))
                with new_tree(final) as work:
                    # Hard links: both are read-only artifacts.
                    shutil.copytree(base, work, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
                    site = work / site_packages()
                    for inside, source in ours:
                        place_module(source, site / inside)
                    settle_modes(site / "kdskills")
                    settle_modes(site / "kdskills_runtime")
                prune(top, KEEP_S, final.name, base.name)
    os.utime(final)
    return Rootfs(final, key, entry)


def rootfs_for_image(cache: Path | None = None, *, packages: tuple[str, ...] = ()) -> tuple[Path, str]:
    """Return (tar file, digest) of the prepared tree, for `docker import`. The tar is reproducible: entries sorted,
    owned by root, without times. The digest is `sha256:` over its bytes.
    """
    tree = build_rootfs(cache, packages=packages)
    final = tree.path.parent / f"{tree.path.name}.tar"
    note = final.with_suffix(".sha256")
    if not note.is_file():
        with locked(final.parent / ".tar.lock"):
            if not note.is_file():
                digest = _write_tar(tree.path, final)
                write_note(note, digest)
                note.chmod(0o644)
    return final, note.read_text(encoding="ascii")


def trusted_certificates() -> Path | None:
    """Return this host's file of certificate authorities; None when it has none."""
    import ssl  # not worth its time at every start

    paths = ssl.get_default_verify_paths()
    return next((Path(path) for path in (paths.cafile, f"/{TRUST_FILE}") if path and Path(path).is_file()), None)


def ground_floor_files() -> list[tuple[Path, Path]]:
    """Return (path below a folder of packages, host file) of everything of kdskills that runs behind a wall, sorted."""
    package, runtime = _PACKAGE, host_entry().parent
    files = [(Path("kdskills") / name, package / name) for name in ("__init__.py", "exports.py", "py.typed")]
    for top, folder in (*((package, package / room) for room in GROUND_FLOOR), (runtime, runtime)):
        name = "kdskills" if top is package else "kdskills_runtime"
        paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        files += [(Path(name) / path.relative_to(top), path) for path in paths]
    return sorted(files)


def _build_base(work: Path, distributions: list[str]) -> None:
    for name in _FOLDERS:
        (work / name).mkdir(parents=True)
    copier = Copier(work)
    copier.merge_usr()
    copier.tools(recipe(image_recipe_dir() / "tools.txt"))
    copier.python()
    for name in distributions:
        copier.distribution(name)
    copier.libraries()
    for name, text in _FILES.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if (trusted := trusted_certificates()) is not None:
        (work / TRUST_FILE).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(trusted, work / TRUST_FILE)
    settle_modes(work)


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
    mode = 0o1777 if info.name == "tmp" else info.mode
    return info.replace(uid=0, gid=0, uname="", gname="", mtime=0, mode=mode, deep=False)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
