"""Wheels, unpacked by the rules of archives and those of wheels: nothing lies outside, unlisted, or over Python's own modules.

A wheel becomes a folder of `python/` (what is imported), `bin/` (programs), and rarely `data/` and `include/`. Names, kinds
and amounts are decided by the archive's directory alone; every file must have the digest its RECORD tells.
"""

from __future__ import annotations

import base64
import binascii
import configparser
import csv
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO, Final

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kdskills.environments.codes import EnvironmentFailed
from kdskills.skills.archives import (
    EXECUTABLE,
    MIB,
    ArchiveLimits,
    ArchiveRefused,
    ZipEntry,
    check_distinct,
    entry_path,
    pieces,
    read_directory,
)

WHEEL_LIMITS: Final = ArchiveLimits(
    archive_bytes=1024 * MIB,
    directory_bytes=32 * MIB,
    entries=100_000,
    files=100_000,
    unpacked_bytes=4096 * MIB,
    ratio=100,
    depth=40,
    path_bytes=1024,
)
"""Bounds of a wheel; the ratio is that of all files together."""

MAX_FILE: Final = 2048 * MIB
MAX_METADATA: Final = 16 * MIB
"""Bytes of RECORD, and of other files that are read as a whole."""

PYTHON: Final = "python"
PROGRAMS: Final = "bin"
FOLDERS: Final[Mapping[str, str]] = {"purelib": PYTHON, "platlib": PYTHON, "scripts": PROGRAMS, "data": "data"}
SHEBANG: Final = b"#!/usr/bin/env python3\n"

#: Modules that a package must not bring, for they would stand in for those of Python, or of what runs in a sandbox.
TAKEN_MODULES: Final = frozenset({*sys.stdlib_module_names, "kdskills", "kdskills_runtime"})
TAKEN_PROGRAMS: Final = re.compile(r"(python[\d.]*|sh|bash|env)", re.IGNORECASE)

_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TARGET = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)\s*:\s*([^\W\d]\w*(?:\.[^\W\d]\w*)*)\s*(?:\[[^]]*\])?")
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")


class WheelRefused(EnvironmentFailed, code="environment_wheel_refused"):
    """A wheel breaks a rule and nothing of it was kept; `details` has `file`, `entry` and `reason`."""

    def __init__(self, file: str, reason: str, *, entry: str | None = None, rule: str = "wheel") -> None:
        subject = f"the wheel {file}" if entry is None else f"entry {entry!r} of the wheel {file}"
        super().__init__(f"{subject} is refused: {reason}", file=file, entry=entry, reason=reason, rule=rule)


@dataclass(frozen=True, slots=True)
class _WheelPlan:
    """Where each file of a wheel goes, and the entries that say what it is."""

    targets: Mapping[str, tuple[str, ZipEntry]]  # path in the wheel: path in the tree, entry
    info: str

    def metadata(self, stream: BinaryIO, name: str) -> str:
        """Return the text of a file of the wheel's `.dist-info`; empty when it has none."""
        entry = self.targets.get(f"{self.info}/{name}", ("", None))[1]
        if entry is None:
            return ""
        if entry.size > MAX_METADATA:
            raise entry.refused("archive_unpacked_too_large", f"it has more than {MAX_METADATA} bytes")
        return b"".join(pieces(stream, entry)).decode("utf-8")


def unpack_wheel(wheel: Path, file: str, into: Path) -> None:
    """Unpack the wheel in *wheel*, which is called *file*, to the folder *into*, which is there and empty.

    Files are 0644, or 0755 where the wheel says so or they are programs; folders are 0755. Bytecode that it brings is left
    out. Raises WheelRefused.
    """
    try:
        with wheel.open("rb") as stream:
            plan = _plan(stream, file)
            digests = _record(plan.metadata(stream, "RECORD"), plan, file)
            _check_format(plan.metadata(stream, "WHEEL"), file)
            for path, (target, entry) in plan.targets.items():
                if "__pycache__" not in path.split("/"):
                    _write(stream, into / target, entry, digests.get(path), program=target.startswith(f"{PROGRAMS}/"))
            for name, source in _entry_points(plan.metadata(stream, "entry_points.txt"), file).items():
                new_file(into / PROGRAMS / name, 0o755, [source])
    except ArchiveRefused as error:
        raise WheelRefused(file, error.details["reason"], entry=error.details["entry"], rule=error.code) from None
    except UnicodeDecodeError:
        raise WheelRefused(file, "its metadata is not UTF-8") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise WheelRefused(file, "two of its files would have one path") from None


def _plan(stream: BinaryIO, file: str) -> _WheelPlan:
    limits = WHEEL_LIMITS
    entries = [(*entry_path(entry, limits), entry) for entry in read_directory(stream, limits)]
    files = [(parts, entry) for parts, folder, entry in entries if not folder]
    folders = {entry.offset for _, folder, entry in entries if folder}
    check_distinct([(parts, entry) for parts, _, entry in entries], folders)
    _check_amounts([entry for _, entry in files], file)
    info = _info_folder(file, {parts[0] for parts, _ in files if len(parts) > 1})
    targets = {"/".join(parts): (_target(parts, info, file), entry) for parts, entry in files}
    for target, entry in targets.values():
        _check_target(target, entry)
    if len({target.casefold() for target, _ in targets.values()}) < len(targets):
        raise WheelRefused(file, "two of its files would have one path")
    return _WheelPlan(targets, info)


def _check_amounts(entries: list[ZipEntry], file: str) -> None:
    total, packed = sum(entry.size for entry in entries), sum(entry.packed for entry in entries)
    for entry in entries:
        if entry.size > MAX_FILE:
            raise entry.refused("archive_unpacked_too_large", f"it has more than {MAX_FILE} bytes")
    if total > WHEEL_LIMITS.unpacked_bytes:
        reason = f"it unpacks to {total} bytes, more than {WHEEL_LIMITS.unpacked_bytes}"
        raise WheelRefused(file, reason, rule="archive_unpacked_too_large")
    if total > max(WHEEL_LIMITS.ratio * packed, MIB):
        raise WheelRefused(file, f"it unpacks to more than {WHEEL_LIMITS.ratio} times its size", rule="archive_ratio")


def _info_folder(file: str, tops: Iterable[str]) -> str:
    """Return the one `.dist-info` folder, whose name says what the file's name says."""
    info_folders = [top for top in tops if top.endswith(".dist-info")]
    if len(info_folders) != 1:
        raise WheelRefused(file, f"it has {len(info_folders)} folders .dist-info, and must have one")
    name, _, version = info_folders[0].removesuffix(".dist-info").rpartition("-")
    try:
        file_name, file_version, _, _ = parse_wheel_filename(file)
        agrees = canonicalize_name(name) == file_name and Version(version) == file_version
    except (InvalidWheelFilename, InvalidVersion):
        agrees = False
    if not agrees:
        raise WheelRefused(file, f"its folder {info_folders[0][:200]!r} is of another package or version")
    return info_folders[0]


def _target(parts: tuple[str, ...], info: str, file: str) -> str:
    """Return where a file of the wheel goes, relative to the tree."""
    if parts[0] != info.removesuffix(".dist-info") + ".data":
        return "/".join((PYTHON, *parts))
    kind, below = parts[1] if len(parts) > 2 else "", parts[2:]
    if kind == "headers":
        return "/".join(("include", *below))
    if kind not in FOLDERS:
        raise WheelRefused(file, f"its data has no folder {kind[:200]!r}", entry="/".join(parts)[:300])
    if kind == "data" and below[0] == PROGRAMS and len(below) == 2:
        return "/".join(below)
    return "/".join((FOLDERS[kind], *below))


def _check_target(target: str, entry: ZipEntry) -> None:
    """Refuse modules and programs that would stand in for those of the sandbox."""
    top, name, *below = target.split("/")
    module = name.split(".", 1)[0].casefold()
    if top == PYTHON and module in TAKEN_MODULES and (below or name.endswith((".py", ".pyc", ".so"))):
        raise entry.refused("wheel_shadows", f"it would stand in for the module {module} of the sandbox")
    if top == PROGRAMS and TAKEN_PROGRAMS.fullmatch(name):
        raise entry.refused("wheel_shadows", f"it would stand in for the program {name} of the sandbox")


def _record(text: str, plan: _WheelPlan, file: str) -> dict[str, tuple[str, str]]:
    """Return (algorithm, hex digest) by path; every file but RECORD itself and its signatures must have one."""
    digests = {}
    try:
        for row in csv.reader(text.splitlines(), strict=True):
            path, digest, *_ = (*row, "", "")
            algorithm, _, value = digest.partition("=")
            if algorithm in {"sha256", "sha384", "sha512"} and path not in digests:
                digests[path] = algorithm, base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (csv.Error, binascii.Error, ValueError):
        raise WheelRefused(file, "its RECORD cannot be read") from None
    exempt = {f"{plan.info}/{name}" for name in ("RECORD", *_SIGNATURES)}
    unlisted = sorted(plan.targets.keys() - digests.keys() - exempt)
    if unlisted:
        reason = "its RECORD does not list it with a digest" if text else "the wheel has no RECORD"
        raise WheelRefused(file, reason, entry=unlisted[0])
    return digests


def _check_format(text: str, file: str) -> None:
    version = str(HeaderParser().parsestr(text).get("Wheel-Version", "")).strip()
    if version.partition(".")[0] != "1":
        raise WheelRefused(file, f"its format has version {version[:20]!r}, and 1 is read")


def _write(stream: BinaryIO, target: Path, entry: ZipEntry, digest: tuple[str, str] | None, *, program: bool) -> None:
    """Write a file in pieces, and compare it with its digest; a program of Python begins with our line."""
    hasher = hashlib.new(digest[0]) if digest else None

    def hashed() -> Iterable[bytes]:
        for number, piece in enumerate(pieces(stream, entry)):
            if hasher is not None:
                hasher.update(piece)
            if number == 0 and program and piece.startswith(b"#!python"):
                piece = SHEBANG + piece.partition(b"\n")[2]
            yield piece

    mode = 0o755 if program or entry.mode & EXECUTABLE else 0o644
    new_file(target, mode, hashed())
    if digest is not None and hasher is not None and hasher.hexdigest() != digest[1]:
        raise entry.refused("wheel_record", "its digest is not the one of RECORD")


def new_file(target: Path, mode: int, content: Iterable[bytes]) -> None:
    """Write a file of an archive, and the folders it is in; never over another, nor through a link. Raises FileExistsError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(target, flags, 0o600), "wb") as out:
        for piece in content:
            out.write(piece)
        os.fchmod(out.fileno(), mode)


def _entry_points(text: str, file: str) -> dict[str, bytes]:
    """Return the programs that a wheel names by modules and functions."""
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    try:
        parser.read_string(text)
    except configparser.Error:
        raise WheelRefused(file, "its entry_points.txt cannot be read") from None
    programs = {}
    for section in ("gui_scripts", "console_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            target = _TARGET.fullmatch(value.strip())
            if not _PROGRAM.fullmatch(name) or target is None or TAKEN_PROGRAMS.fullmatch(name):
                raise WheelRefused(file, f"its entry point {name[:100]!r} is none that can be made")
            module, function = target.groups()
            lines = (
                f"from {module} import {function.partition('.')[0]}\nfrom sys import exit as end_program\n",
                f'if __name__ == "__main__":\n    end_program({function}())\n',
            )
            programs[name] = SHEBANG + "\n".join(lines).encode()
    return programs
