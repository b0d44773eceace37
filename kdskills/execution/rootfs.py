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
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path

from kdskills.errors import ExecFailed
from kdskills.execution.dirs import cache_dir, locked, new_tree, private_dir, prune, write_note
from kdskills.execution.egress import TRUST_FILE
from kdskills.execution.payload import host_entry

_SKIPPED = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "tkinter"),
    *("turtledemo", "ensurepip", "lib2to3", "pydoc_data"),
}
_DYNLOAD_SKIPPED = re.compile(r"^(_tkinter|_test|_ctypes_test|xx|_xx)")
_LDD = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$")
_OF_WHEELS = (
    *("libutil.so.1", "libnsl.so.1", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libresolv.so.2", "libm.so.6"),
    *("libgcc_s.so.1", "libstdc++.so.6", "libz.so.1", "libexpat.so.1", "libGL.so.1", "libX11.so.6", "libXext.so.6"),
    *("libXrender.so.1", "libSM.so.6", "libICE.so.6", "libglib-2.0.so.0", "libgthread-2.0.so.0", "libgobject-2.0.so.0"),
)
"""Libraries that wheels built for many Linuxes may take for given; those that this host has."""
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
        self._optional_elf: list[Path] = []

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

    def tools(self, names: Iterable[tuple[str, bool]]) -> None:
        """Copy programs from the host's system folders into /usr/bin; one that lies in a folder of the tree is linked there."""
        folder = self._top / "usr/bin"
        folder.mkdir(parents=True, exist_ok=True)
        for name, needed in names:
            program = shutil.which(name, path=_PATH)
            if program is None:
                if needed:
                    raise ExecFailed(f"the offline image needs the program {name}, which is not installed", tool=name)
                continue
            real = Path(program).resolve()
            if self._inside(real).is_file():
                if self._inside(real) != folder / name:
                    (folder / name).symlink_to(os.path.relpath(real, "/usr/bin"))
                continue
            shutil.copyfile(real, folder / name)
            (folder / name).chmod(0o755)
            self._note(real)
        for name in ("sh", "bash", "env"):  # scripts name them in both places
            alias = self._top / "bin" / name
            if not alias.exists() and (self._top / "bin").is_dir():
                alias.symlink_to(f"../usr/bin/{name}")

    def folders(self, paths: Iterable[str]) -> None:
        """Copy folders of the host as they are, links as links; what some program in them lacks is no fault of the tree."""
        for path in filter(os.path.isdir, paths):
            shutil.copytree(path, self._inside(Path(path)), symlinks=True)
            files = (Path(top, name) for top, _, names in os.walk(path) for name in names)
            self._optional_elf += [file for file in files if not file.is_symlink() and _is_elf(file)]

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
        """Copy every shared library the noted files need, what wheels count on, and the loader, where the loader will find them."""
        lists = _library_lists(self._elf)
        libraries = _libraries(lists)
        if "not found" in lists:
            missing = sorted({line.split()[0] for line in lists.splitlines() if line.endswith("not found")})
            raise ExecFailed(f"shared libraries are missing on this host: {', '.join(missing)}")
        libc = next((path for name, path in libraries.items() if name.startswith(("libc.so", "libc.musl"))), None)
        if libc is None:
            raise ExecFailed("ldd names no C library for this Python")
        assumed = {name: path for name in _OF_WHEELS if (path := libc.parent / name).is_file()}
        libraries |= assumed | _libraries(_library_lists([*assumed.values(), *self._optional_elf]))
        for name, path in libraries.items():
            if "site-packages" in path.parts or "dist-packages" in path.parts:
                continue  # came with its package, which finds it by its own rpath
            system = path.parts[1] in {"lib", "lib64", "usr"} and path.parts[1:3] != ("usr", "local")
            location = (path if system else libc.parent / path.name) if "/" not in name else Path(name)
            target = self._inside(location)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copyfile(path.resolve(), target)
                target.chmod(0o755)

    def _note(self, path: Path) -> None:
        if _is_elf(path):
            self._elf.append(path)

    def _inside(self, path: Path) -> Path:
        return self._top / str(path).lstrip("/")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


def _libraries(lists: str) -> dict[str, Path]:
    """Return the libraries of what `ldd` says, by the names they are asked for."""
    matches = filter(None, map(_LDD.match, lists.splitlines()))
    return {match[1] or match[2]: Path(match[2]) for match in matches}


def _library_lists(files: list[Path]) -> str:
    """Return what `ldd` says of *files*."""
    command, env = ["ldd", *map(str, files)], {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env).stdout if files else ""


BUILDER = 6
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


@dataclass(frozen=True, slots=True)
class ImageProfile:
    """What a profile adds to the image, of what this host has: programs, folders that they read, and distributions with all they
    require. `debian` are the packages of Debian that bring the programs.
    """

    programs: tuple[str, ...]
    folders: tuple[str, ...]
    packages: tuple[str, ...]
    debian: tuple[str, ...]

    def absent(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the programs and the distributions of it that this host does not have."""
        programs = (name for name in self.programs if shutil.which(name, path=_PATH) is None)
        return tuple(programs), tuple(name for name in self.packages if _installed_version(name) is None)


@cache
def image_profiles() -> Mapping[str, ImageProfile]:
    """Return the kept profiles by name."""
    tables = tomllib.loads((image_recipe_dir() / "profiles.toml").read_text(encoding="utf-8"))
    return {name: ImageProfile(**{key: tuple(words) for key, words in table.items()}) for name, table in tables.items()}


def chosen_profiles(names: Iterable[str]) -> list[ImageProfile]:
    """Return the profiles of *names*. Raises ExecFailed for one that is not kept."""
    kept = image_profiles()
    if unknown := sorted(set(names) - set(kept)):
        raise ExecFailed(f"there is no image profile {', '.join(unknown)}; there are {', '.join(kept)}")
    return [kept[name] for name in names]


def image_versions(packages: Iterable[str] = (), profiles: Iterable[str] = ()) -> dict[str, str]:
    """Return the distributions that the tree has with their versions, *packages* and what these require too; of *profiles* what is
    installed. Raises ExecFailed.
    """
    from packaging.requirements import Requirement  # not worth their time at every start
    from packaging.utils import canonicalize_name

    versions: dict[str, str] = {}
    for name, needed in (*recipe(image_recipe_dir() / "packages.txt"), *((name, True) for name in sorted(packages))):
        if (version := _installed_version(name)) is not None:
            versions[canonicalize_name(name)] = version
        elif needed:
            raise ExecFailed(f"the offline image needs the package {name}, which is not installed")
    waiting = [*packages, *(name for profile in chosen_profiles(profiles) for name in profile.packages)]
    seen = set()
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if (name, *wanted.extras) in seen or (version := _installed_version(name)) is None:
            continue
        seen.add((name, *wanted.extras))
        versions[name] = version
        for text in importlib.metadata.requires(name) or ():
            marker = Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(text)
    return versions


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tools(profiles: Iterable[str]) -> list[tuple[str, bool]]:
    """Return (name, needed) of every program of the tree, each once."""
    further = ((name, False) for profile in chosen_profiles(profiles) for name in profile.programs)
    return [*{**dict(further), **dict(recipe(image_recipe_dir() / "tools.txt"))}.items()]


def image_programs(profiles: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of the programs that the tree has on its path."""
    present = (name for name, needed in _tools(profiles) if needed or shutil.which(name, path=_PATH))
    return frozenset(present) | {"python3", "python"}


def build_rootfs(
    cache: Path | None = None, *, packages: tuple[str, ...] = (), profiles: tuple[str, ...] = ()
) -> Rootfs:
    """Return the prepared tree for this interpreter and these sources, building it when it is not there yet.

    Args:
        cache: Folder to build in; `cache_dir()` when None.
        packages: Further installed distributions to copy with what they require, beside those of `packages.txt`.
        profiles: Further programs, their folders and distributions, as far as this host has them.

    Raises:
        ExecFailed: A tool or package the recipe demands is not installed on this host.
        ExecRefused: The cache folder is not ours alone.
    """
    passable = os.geteuid() == 0  # then programs have a uid of their own, and some engines reach the tree by this path
    top = private_dir(private_dir(cache or cache_dir(), passable=passable) / "rootfs", passable=passable)
    versions, profiles = image_versions(packages, profiles), tuple(sorted(set(profiles)))
    python, tools = Path(base_python()), _tools(profiles)
    info, programs = python.stat(), [(name, shutil.which(name, path=_PATH)) for name, _ in tools]
    facts = [sys.version, str(python), info.st_size, info.st_mtime_ns, platform.machine(), platform.libc_ver()]
    trusted = trusted_certificates()
    facts += [] if trusted is None else [_file_digest(trusted)]
    facts += [(name, Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for name, path in programs if path]
    base_key, ours = _digest([BUILDER, facts, versions, tools]), ground_floor_files()
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
                        _build_base(work, list(versions), profiles)
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


def rootfs_for_image(
    cache: Path | None = None, *, packages: tuple[str, ...] = (), profiles: tuple[str, ...] = ()
) -> tuple[Path, str]:
    """Return (tar file, digest) of the prepared tree, for `docker import`. The tar is reproducible: entries sorted,
    owned by root, without times. The digest is `sha256:` over its bytes. Arguments and errors as of `build_rootfs`.
    """
    tree = build_rootfs(cache, packages=packages, profiles=profiles)
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


def _build_base(work: Path, distributions: Iterable[str], profiles: Iterable[str]) -> None:
    for name in _FOLDERS:
        (work / name).mkdir(parents=True)
    copier = Copier(work)
    copier.merge_usr()
    copier.folders({folder: None for profile in chosen_profiles(profiles) for folder in profile.folders})
    copier.tools(_tools(profiles))
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
    info.uid = info.gid = info.mtime = 0  # `TarInfo.replace` is missing in Debian 12's Python, 3.11.2
    info.uname, info.gname, info.mode = "", "", mode
    return info


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
