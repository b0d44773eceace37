"""Packages of Node, as a `package-lock.json` has them: fetched from the operator's registry, checked and unpacked.

None of their code runs: install scripts are passed over. ES modules, which do not look at `NODE_PATH`, find the packages by a
hook that lies beside them.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import platform
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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

_NAME = r"[A-Za-z0-9_~-][A-Za-z0-9_.~-]*"
_FOLDER = re.compile(rf"node_modules/((?:@{_NAME}/)?{_NAME})(?:/node_modules/((?:@{_NAME}/)?{_NAME}))*")
_TAIL = re.compile(rf"(?:@{_NAME}(?:/|%2[fF]))?{_NAME}/-/(?:@{_NAME}/)?{_NAME}\.tgz")
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
    if node.lock is None:
        raise lock_missing()
    rows = json.loads(node.lock).get("packages")
    wanted = json.loads(node.manifest).get("dependencies") or {}
    if not isinstance(rows, dict) or not isinstance(rows.get("", {}), dict) or len(rows) > MAX_PACKAGES:
        raise _invalid(f"package-lock.json has no `packages`, or more than {MAX_PACKAGES}")
    if (rows.get("", {}).get("dependencies") or {}) != wanted:
        raise _invalid(f"package-lock.json is not what package.json asks for: `{LOCK_COMMAND}` writes it anew")
    packages = []
    for folder in sorted(rows):
        row = rows[folder]
        if folder and not (isinstance(row, dict) and (row.get("dev") or row.get("inBundle") or row.get("extraneous"))):
            if not isinstance(row, dict) or row.get("link"):
                raise _invalid(f"{folder[:200]!r} of package-lock.json is no package of a registry")
            if _is_for_here(folder, row):
                packages.append(_package(folder, row, registry))
    return packages


def lock_missing() -> EnvironmentFailed:
    """Return the error for packages of Node without a lock."""
    return _invalid(f"packages of Node need a package-lock.json beside package.json: `{LOCK_COMMAND}` writes it")


def _is_for_here(folder: str, row: Mapping[str, Any]) -> bool:
    libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
    machine = platform.machine()
    for key, here in (("os", "linux"), ("cpu", _CPU.get(machine, machine)), ("libc", libc)):
        value = row.get(key) or ()
        names = [value] if isinstance(value, str) else [name for name in value if isinstance(name, str)]
        chosen = [name for name in names if not name.startswith("!")]
        if f"!{here}" in names or (chosen and not {here, "any"} & set(chosen)):
            if row.get("optional"):
                return False
            message = f"{folder[:200]} is not for this platform ({key}: {', '.join(names)[:200]})"
            raise EnvironmentFailed(message, code="environment_platform")
    return True


def _package(folder: str, row: Mapping[str, Any], registry: str) -> NodePackage:
    name = str(row.get("name") or folder.rpartition("node_modules/")[2])
    version = str(row.get("version", ""))
    usual = f"{NPM_REGISTRY}{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    resolved = str(row.get("resolved") or usual)  # npm may be told to leave it out
    tail, digest = resolved.removeprefix(NPM_REGISTRY), _INTEGRITY.search(str(row.get("integrity", "")))
    if not _FOLDER.fullmatch(folder) or tail == resolved or not _TAIL.fullmatch(tail):
        raise _invalid(f"{folder[:200]!r} of package-lock.json is no package of a registry")
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
    indexes = (PackageIndex("npm", registry),)

    def bring(package: NodePackage) -> int:
        with tempfile.TemporaryDirectory(prefix="kdskills-node-") as name:
            archive = Path(name) / "file"
            size = fetch_wheel(package.file, indexes, archive, package.integrity)
            unpack_package(archive, package.file.file, work / package.folder)
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
                new_file(work / "bin" / name, 0o755, [text.encode()])
    new_file(work / MODULE_HOOK, 0o644, [_HOOK_TEXT.encode()])


def unpack_package(archive: Path, file: str, into: Path) -> None:
    """Unpack the tarball *archive*, which is called *file*, to the folder *into*, which is made; its own top folder is left out.

    Files are 0644, or 0755 where the archive says so. Raises PackageRefused.
    """
    bound = min(MAX_UNPACKED, WHEEL_LIMITS.ratio * archive.stat().st_size + MIB)
    count = 0
    try:
        with (
            gzip.open(archive) as raw,
            tarfile.open(fileobj=cast("IO[bytes]", _Bounded(raw, bound, file)), mode="r|") as tar,
        ):
            for entry in tar:
                count += 1
                parts = _parts(entry, file)
                if count > WHEEL_LIMITS.files:
                    raise PackageRefused(file, f"it has more than {WHEEL_LIMITS.files} entries")
                if entry.isdir():
                    continue
                stream = tar.extractfile(entry)
                if not entry.isreg() or len(parts) < 2 or stream is None:
                    raise PackageRefused(
                        file, "it is a link, no regular file, or beside the package's folder", entry.name
                    )
                new_file(into.joinpath(*parts[1:]), 0o755 if entry.mode & 0o111 else 0o644, _blocks(stream))
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError):
        raise PackageRefused(file, "it cannot be read as a gzipped tar archive") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise PackageRefused(file, "two of its files would have one path") from None


def _parts(entry: tarfile.TarInfo, file: str) -> tuple[str, ...]:
    parts = PurePosixPath(entry.name).parts
    hostile = re.search(r"[\\\x00-\x1f\x7f\ud800-\udfff]", entry.name) or entry.name.startswith("/") or ".." in parts
    limits = WHEEL_LIMITS
    if hostile or len(parts) > limits.depth or len(entry.name.encode("utf-8", "replace")) > limits.path_bytes:
        raise PackageRefused(
            file, "its path leads outside, is too long or too deep, or holds what no path should", entry.name
        )
    return parts


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: stream.read(MIB), b"")


class _Bounded:
    """Reads a stream up to a number of bytes, whatever its headers promise."""

    def __init__(self, stream: gzip.GzipFile, bound: int, file: str) -> None:
        self._stream, self._remaining, self._file, self._bound = stream, bound, file, bound

    def read(self, size: int) -> bytes:
        """Return the next bytes. Raises PackageRefused beyond the bound."""
        data = self._stream.read(size)
        self._remaining -= len(data)
        if self._remaining < 0:
            raise PackageRefused(self._file, f"it unpacks to more than {self._bound} bytes")
        return data


def _invalid(message: str) -> EnvironmentFailed:
    return EnvironmentFailed(message, code="environment_invalid", who="author")
