"""Copying an interpreter, tools, packages and their shared libraries out of the host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from kdskills.errors import ExecFailed

Build = Callable[[Path], None]

_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "tkinter"} | {
    *("turtledemo", "ensurepip", "lib2to3", "pydoc_data", "distutils")
}
_DYNLOAD_SKIPPED = re.compile(r"^(_tkinter|_test|_ctypes_test|xx|_xx)")
_LDD = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$")
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


def base_python() -> str:
    """Return the real path of the interpreter behind any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def version() -> str:
    """Return `3.11`-like."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def site_packages() -> str:
    """Return site-packages relative to the tree."""
    return f"usr/local/lib/python{version()}/site-packages"


def recipe(path: Path) -> list[tuple[str, bool]]:
    """Return (name, needed) of every line; `?` after a name says it may be missing."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split("#", 1)[0].split()
        if words:
            entries.append((words[0], "?" not in words[1:]))
    return entries


def place_module(source: Path, target: Path) -> None:
    """Copy one file; Python files get bytecode that is used without looking at the source's time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if source.suffix != ".py":
        shutil.copymode(source, target)
        return
    data = _bytecode(source)
    if data is not None:
        cached = Path(importlib.util.cache_from_source(str(target), optimization=""))
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(data)


def link_tree(source: Path, target: Path) -> None:
    """Fill the empty folder *target* with hard links to the files of *source*; both are read-only artifacts."""
    for entry in os.scandir(source):
        target_path = target / entry.name
        if entry.is_symlink():
            target_path.symlink_to(os.readlink(entry.path))  # noqa: PTH115 - scandir entries are strings
        elif entry.is_dir():
            target_path.mkdir()
            target_path.chmod(0o755)
            link_tree(Path(entry.path), target_path)
        else:
            os.link(entry.path, target_path)


def settle_modes(top: Path) -> None:
    """Make every folder 0755 and every file 0644 or 0755: readable by the sandbox's uid, never setuid."""
    for folder, _, files in os.walk(top):
        Path(folder).chmod(0o755)
        for name in files:
            path = Path(folder) / name
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)


def _bytecode(source: Path) -> bytes | None:
    """Return an unchecked-hash pyc: the host's own when it is fresh, else compiled now; None when it has no code."""
    data = source.read_bytes()
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(data)
    cached = Path(importlib.util.cache_from_source(str(source), optimization=""))
    try:
        pyc = cached.read_bytes()
        info = source.stat()
    except OSError:
        pyc, info = b"", source.stat()
    stamp = (int(info.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + (info.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    if pyc[:16] == importlib.util.MAGIC_NUMBER + bytes(4) + stamp:
        return head + pyc[16:]
    import marshal

    try:
        code = compile(data, str(source), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None  # a template or a module for another Python; the source alone is copied
    return head + marshal.dumps(code)


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
        name = f"python{version()}"
        shutil.copyfile(binary, folder / name)
        (folder / name).chmod(0o755)
        for alias in ("python3", "python"):
            (folder / alias).symlink_to(name)
        self._note(binary)
        stdlib = Path(sysconfig.get_path("stdlib"))
        target = self._top / "usr/local" / sys.platlibdir / name
        for source in self._library(stdlib):
            place_module(source, target / source.relative_to(stdlib))
        dynload = stdlib / "lib-dynload"
        if not dynload.is_dir():
            dynload = Path(sys.base_exec_prefix) / sys.platlibdir / name / "lib-dynload"
        for source in sorted(dynload.glob("*.so")):
            if not _DYNLOAD_SKIPPED.match(source.name):
                place_module(source, target / "lib-dynload" / source.name)
                self._note(source)
        site = self._top / site_packages()
        site.mkdir(parents=True, exist_ok=True)
        (site.parent / "dist-packages").symlink_to("site-packages")  # where Debian's own Python looks

    def distribution(self, name: str, *, needed: bool) -> None:
        """Copy the files of an installed distribution, as its RECORD lists them."""
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                raise ExecFailed(f"the offline image needs the package {name}, which is not installed") from None
            return
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
        env = {**os.environ, "LC_ALL": "C"}
        lists = subprocess.run(
            ["ldd", *map(str, self._elf)], capture_output=True, text=True, check=False, env=env
        ).stdout
        libraries: dict[str, Path] = {}
        for line in lists.splitlines():
            match = _LDD.match(line)
            if match:
                libraries[match[1] or match[2]] = Path(match[2])
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

    def _library(self, stdlib: Path) -> Iterator[Path]:
        for folder, names, files in os.walk(stdlib):
            names[:] = sorted(
                name for name in names if name not in _SKIPPED and not name.startswith(("config-", "lib-dynload"))
            )
            for name in sorted(files):
                if not name.endswith((".pyc", ".exe", ".a", ".so")):
                    yield Path(folder) / name

    def _note(self, path: Path) -> None:
        with path.open("rb") as stream:
            if stream.read(4) == b"\x7fELF":
                self._elf.append(path)
