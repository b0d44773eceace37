"""Packages of Node, as a `package-lock.json` has them: fetched from the operator's registry, checked and unpacked.

None of their code runs: install scripts are passed over. ES modules, which do not look at `NODE_PATH`, find the packages by a
hook that lies beside them.
"""

from __future__ import annotations

import base64
import binascii
import errno
import gzip
import json
import platform
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any, Final, cast

from kdskills.environments.codes import EnvironmentFailed, without_credentials
from kdskills.environments.model import LockedPackage, NodeSpec
from kdskills.environments.needs import NPM_REGISTRY
from kdskills.environments.resolve import PackageIndex, fetch_wheel
from kdskills.environments.wheels import TAKEN_PROGRAMS, WHEEL_LIMITS, new_file
from kdskills.execution.payload import MODULE_HOOK

MIB: Final = 1024 * 1024
MAX_PACKAGES: Final = 5_000
MAX_UNPACKED: Final = 1024 * MIB
"""Bytes one package may unpack to, and no more than a hundred times its size."""
MAX_TOTAL: Final = 4096 * MIB
"""Bytes that all packages of a lock may unpack to."""
MAX_HEADER: Final = MIB
"""Bytes between two files of an archive; tarfile keeps long names and extended headers in memory."""
MAX_PART: Final = 255
"""Bytes of one part of a path."""

LOCK_COMMAND: Final = "npm install --package-lock-only"
_HOOK_TEXT: Final = """"use strict";
const { register } = require("module");
const parentURL = String(require("url").pathToFileURL(__filename));
const hook = `export async function resolve(name, context, next) {
  try {
    return await next(name, context);
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND" || /^[./]|^[a-z]+:/i.test(name)) throw error;
    return next(name, { ...context, parentURL: ${JSON.stringify(parentURL)} }).catch(() => { throw error; });
  }
}`;
if (register && require("worker_threads").isMainThread) register("data:text/javascript," + encodeURIComponent(hook));
"""

_NAME = r"[A-Za-z0-9_~-][A-Za-z0-9_.~-]{0,213}"
_FOLDER = re.compile(rf"node_modules/((?:@{_NAME}/)?{_NAME})(?:/node_modules/((?:@{_NAME}/)?{_NAME}))*")
_FULL_NAME = re.compile(rf"(?:@{_NAME}/)?{_NAME}")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]{0,99}")
_PROGRAM_PATH = re.compile(rf"(?:\./)?({_NAME}(?:/{_NAME})*)")
_INTEGRITY = re.compile(r"(sha512|sha384|sha256)-([A-Za-z0-9+/=]+)")
_TAKEN = re.compile(rf"{TAKEN_PROGRAMS.pattern}|node|npm|npx|corepack", re.IGNORECASE)
_CPU: Final = {"x86_64": "x64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class NodePackage:
    """One package of a lock.

    Attributes:
        folder: Where it goes, `node_modules/…`.
        file: Name, version, and the tarball at the operator's registry.
        integrity: Algorithm and hex digest of the tarball.
        programs: Its programs, by name, with their paths in it; those of packages of packages are nobody's.
    """

    folder: str
    file: LockedPackage
    integrity: tuple[str, str]
    programs: Mapping[str, object]


class PackageRefused(EnvironmentFailed, code="environment_package_refused"):
    """A package of Node breaks a rule of archives, and nothing of it was kept."""

    def __init__(self, file: str, reason: str, entry: str | None = None) -> None:
        subject = f"the package {file}" if entry is None else f"entry {entry[:200]!r} of the package {file}"
        super().__init__(f"{subject} is refused: {reason}", file=file, entry=entry, reason=reason)


def locked_packages(node: NodeSpec, registry: str = NPM_REGISTRY) -> list[NodePackage]:
    """Return what programs need of a lock on this platform, sorted by folder; what is for development alone is left out.

    Raises EnvironmentFailed: `environment_invalid` without a lock, for one that is another manifest's, and for a package
    without a digest, or from elsewhere than a registry; `environment_platform` for one that is not for this platform.
    """
    packages = []
    for folder, row in _rows(node):
        if not isinstance(row, dict):
            raise _no_package(folder)
        if _is_for_here(folder, row):
            packages.append(_package(folder, row, registry))
    return packages


def named_packages(node: NodeSpec) -> Iterator[tuple[str, str]]:
    """Yield names and versions of a lock's packages, those for other platforms too, but for what a build refuses."""
    with suppress(EnvironmentFailed):
        for folder, row in _rows(node):
            with suppress(EnvironmentFailed):
                file = _package(folder, row if isinstance(row, dict) else {}, NPM_REGISTRY).file
                yield file.name, file.version


def _rows(node: NodeSpec) -> Iterator[tuple[str, object]]:
    """Yield folders and rows of what programs need, sorted by folder. Raises EnvironmentFailed."""
    if node.lock is None:
        raise lock_missing()
    rows = json.loads(node.lock).get("packages")
    wanted = json.loads(node.manifest).get("dependencies") or {}
    if not isinstance(rows, dict) or not isinstance(rows.get("", {}), dict) or len(rows) > MAX_PACKAGES:
        raise _invalid(f"package-lock.json has no `packages`, or more than {MAX_PACKAGES}")
    if (rows.get("", {}).get("dependencies") or {}) != wanted:
        raise _invalid(f"package-lock.json is not what package.json asks for: `{LOCK_COMMAND}` writes it anew")
    for folder in sorted(rows):
        row = rows[folder]
        if folder and not (isinstance(row, dict) and (row.get("dev") or row.get("inBundle") or row.get("extraneous"))):
            yield folder, row


def lock_missing() -> EnvironmentFailed:
    """Return the error for packages of Node without a lock."""
    return _invalid(f"packages of Node need a package-lock.json beside package.json: `{LOCK_COMMAND}` writes it")


def _is_for_here(folder: str, row: Mapping[str, Any]) -> bool:
    libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
    machine = platform.machine()
    for key, here in (("os", "linux"), ("cpu", _CPU.get(machine, machine)), ("libc", libc)):
        value = row.get(key) or []
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _invalid(f"`{key}` of {folder[:200]!r} of package-lock.json is no list of names")
        chosen = [name for name in names if not name.startswith("!")]
        if f"!{here}" in names or (chosen and not {here, "any"} & set(chosen)):
            if row.get("optional"):
                return False
            message = f"{folder[:200]} is not for this platform ({key}: {', '.join(names)[:200]})"
            raise EnvironmentFailed(message, code="environment_platform")
    return True


def _package(folder: str, row: Mapping[str, Any], registry: str) -> NodePackage:
    name, version = str(row.get("name") or folder.rpartition("node_modules/")[2]), str(row.get("version", ""))
    digest = _INTEGRITY.search(str(row.get("integrity", "")))
    tail = f"{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    resolved = str(row.get("resolved") or NPM_REGISTRY + tail)  # npm may be told to leave it out
    named = _FOLDER.fullmatch(folder) and _FULL_NAME.fullmatch(name) and _VERSION.fullmatch(version)
    # what is fetched is what advisories are asked about: the address may not tell of another package or version
    if not named or row.get("link") or re.sub("%2f", "/", resolved, flags=re.IGNORECASE) != NPM_REGISTRY + tail:
        raise _no_package(folder)
    try:
        hexadecimal = base64.b64decode(digest[2], validate=True).hex() if digest else ""
    except binascii.Error:
        hexadecimal = ""
    if digest is None or len(hexadecimal) * 4 != int(digest[1].removeprefix("sha")):
        raise _invalid(f"{folder[:200]!r} of package-lock.json has no digest of SHA-256 or better")
    nested = folder.count("node_modules/") > 1
    file = LockedPackage(
        name, version, tail.rpartition("/")[2], f"{without_credentials(registry).rstrip('/')}/{tail}", "", index="npm"
    )
    programs = row.get("bin") if not nested and isinstance(row.get("bin"), dict) else {}
    return NodePackage(folder, file, (digest[1], hexadecimal), cast("dict[str, object]", programs))


def fill_tree(node: NodeSpec, registry: str, work: Path, tell: Callable[[str, str, int], None]) -> None:
    """Fetch and unpack the packages of *node* into *work*, an empty folder, beside their programs and the hook of modules.

    Raises EnvironmentFailed: as `locked_packages`; `environment_hash_mismatch`, `environment_index_unreachable`,
    `environment_package_refused`.
    """
    packages = locked_packages(node, registry)
    tell("find", ", ".join(f"{package.file.name} {package.file.version}" for package in packages), 0)
    indexes, total = (PackageIndex("npm", registry),), UnpackTotal(MAX_TOTAL)

    def bring(package: NodePackage) -> int:
        with tempfile.TemporaryDirectory(prefix=".new-", dir=work.parent) as name:
            archive = Path(name) / "file"
            size = fetch_wheel(package.file, indexes, archive, package.integrity)
            unpack_package(archive, package.file.file, work / package.folder, total)
        return size

    pool = ThreadPoolExecutor(4)
    try:
        for package, size in zip(packages, pool.map(bring, packages), strict=True):
            tell("download", package.file.file, size)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for package in packages:
        for name, path in package.programs.items():
            match = _PROGRAM_PATH.fullmatch(path) if isinstance(path, str) else None
            if match and re.fullmatch(_NAME, name) and not _TAKEN.fullmatch(name):
                target = f"{package.folder}/{match[1]}"
                text = f'#!/bin/sh\nexec node "${{0%/*}}/../{target}" "$@"\n'
                with suppress(FileExistsError):  # the first has the name
                    new_file(work / "bin" / name, 0o755, [text.encode()])
    new_file(work / MODULE_HOOK, 0o644, [_HOOK_TEXT.encode()])


class UnpackTotal:
    """Bytes that several packages may unpack to together. Safe from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = self._remaining = limit
        self._lock = Lock()

    def spend(self, size: int, file: str) -> None:
        """Take *size* bytes for the package *file*. Raises PackageRefused when so many are not left."""
        with self._lock:
            self._remaining -= size
            if self._remaining < 0:
                raise PackageRefused(file, f"the packages of the lock unpack to more than {self._limit} bytes")


def unpack_package(archive: Path, file: str, into: Path, total: UnpackTotal) -> None:
    """Unpack the tarball *archive*, which is called *file*, to the folder *into*, which is made; its own top folder is left out.

    Files are 0644, or 0755 where the archive says so; all its bytes count for *total*. Raises PackageRefused.
    """
    bound = min(MAX_UNPACKED, WHEEL_LIMITS.ratio * archive.stat().st_size + MIB)
    try:
        with gzip.open(archive) as raw:
            _unpack(_Bounded(raw, bound, file, total), file, into)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError):
        raise PackageRefused(file, "it cannot be read as a gzipped tar archive") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise PackageRefused(file, "two of its files would have one path") from None
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise PackageRefused(file, f"it cannot be written ({error.strerror})") from None


def _unpack(stream: _Bounded, file: str, into: Path) -> None:
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
        for count, entry in enumerate(tar, 1):
            parts = _parts(entry, file)
            if count > WHEEL_LIMITS.files:
                raise PackageRefused(file, f"it has more than {WHEEL_LIMITS.files} entries")
            if not entry.isdir():
                # a sparse file writes more than was read; and a link's target is looked for by `extractfile`
                content = tar.extractfile(entry) if entry.isreg() and not entry.issparse() else None
                if content is None or len(parts) < 2:
                    reason = "it is a link, no regular file, sparse, or beside the package's folder"
                    raise PackageRefused(file, reason, entry.name)
                stream.header = stream.bound
                mode = 0o755 if entry.mode & 0o111 else 0o644
                new_file(into.joinpath(*parts[1:]), mode, iter(partial(content.read, MIB), b""))
            stream.header = MAX_HEADER
            tar.members.clear()  # type: ignore[attr-defined]  # it keeps every entry with its headers
            tar.pax_headers = {}


def _parts(entry: tarfile.TarInfo, file: str) -> tuple[str, ...]:
    parts = PurePosixPath(entry.name).parts
    hostile = re.search(r"[\\\x00-\x1f\x7f\ud800-\udfff]", entry.name) or entry.name.startswith("/") or ".." in parts
    limits = WHEEL_LIMITS
    sizes = [len(part.encode("utf-8", "replace")) for part in parts]
    if hostile or len(parts) > limits.depth or max(sizes, default=0) > MAX_PART or sum(sizes) > limits.path_bytes:
        raise PackageRefused(
            file, "its path leads outside, is too long or too deep, or holds what no path should", entry.name
        )
    return parts


class _Bounded:
    """Reads a stream up to a number of bytes, whatever its headers promise, and up to `header` bytes from where that was set."""

    def __init__(self, stream: gzip.GzipFile, bound: int, file: str, total: UnpackTotal) -> None:
        self._stream, self._remaining, self._file, self._total = stream, bound, file, total
        self.bound, self.header = bound, MAX_HEADER

    def read(self, size: int) -> bytes:
        """Return the next bytes. Raises PackageRefused beyond a bound."""
        data = self._stream.read(size)
        self._remaining -= len(data)
        self.header -= len(data)
        self._total.spend(len(data), self._file)
        if self._remaining < 0:
            raise PackageRefused(self._file, f"it unpacks to more than {self.bound} bytes")
        if self.header < 0:
            raise PackageRefused(self._file, f"it has more than {MAX_HEADER} bytes of headers for one file")
        return data


def _no_package(folder: str) -> EnvironmentFailed:
    return _invalid(f"{folder[:200]!r} of package-lock.json is no package of a registry")


def _invalid(message: str) -> EnvironmentFailed:
    return EnvironmentFailed(message, code="environment_invalid", who="author")
