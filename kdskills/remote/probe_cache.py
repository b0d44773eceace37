"""The cache of probes: one file per program, identified by the executables that really run.

npm's `codex` is a launcher around a native child, so a hash of the launcher alone would miss updates of the child. The fingerprint
covers the launcher and every executable of the started process group, with the user agent the server gave.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from kdskills.remote.ports import JsonObject, ServerProfile
from kdskills.skills.private_files import private_folder

_CHUNK: Final = 4 * 2**20
_NATIVE: Final = "node_modules/@openai/*/vendor/**/codex"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Digests:
    """File digests, remembered as long as a file stays the same: a native executable has hundreds of megabytes.

    Args:
        folder: Where they are remembered.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "digests.json"

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file, computed only when size, times or inode changed."""
        status = path.stat()
        mark = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entries = read_object(self._path) or {}
        entry = entries.get(str(path))
        if isinstance(entry, dict) and entry.get("mark") == mark and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
        digest = file_digest(path)
        write_object(self._path, {**entries, str(path): {"mark": mark, "sha256": digest}})
        return digest


def running_programs(group: int) -> Iterator[Path]:
    """Give the executables of a process group, where the system tells them (`/proc`)."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # a process that has ended, or belongs to another user
            if os.getpgid(int(entry.name)) == group:
                yield (entry / "exe").resolve(strict=True)


def installed_programs(launcher: Path) -> Iterator[Path]:
    """Give the native programs an npm launcher may start, from where npm puts them."""
    for parent in launcher.parents:
        if parent.name == "node_modules":
            yield from sorted(path for path in parent.parent.glob(_NATIVE) if path.is_file())


def fingerprint(launcher: Path, group: int | None, user_agent: str, folder: Path) -> str:
    """Return the fingerprint of a program.

    Args:
        launcher: What is started.
        group: The process group of a server that runs now, if there is one.
        user_agent: What the server calls itself.
        folder: Where digests are remembered.
    """
    digests = Digests(folder)
    real = launcher.resolve()
    programs = {real, *installed_programs(real), *(running_programs(group) if group is not None else ())}
    program_digests = sorted(digests.digest(path) for path in programs)
    return hashlib.sha256(json.dumps([program_digests, user_agent]).encode()).hexdigest()


def read_object(path: Path) -> JsonObject | None:
    """Return the JSON object in a file; None when there is none, or the file is damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_object(path: Path, value: JsonObject) -> None:
    """Write a JSON object so that readers see the old file or the new one, never half of one."""
    private_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
        Path(name).replace(path)
    except BaseException:  # raised again: nothing half-written stays
        Path(name).unlink(missing_ok=True)
        raise


def profile_to_json(profile: ServerProfile) -> JsonObject:
    """Return a profile as JSON."""
    return {**asdict(profile), "built_ins": sorted(profile.built_ins), "materialise": list(profile.materialise)}


def profile_from_json(value: Any) -> ServerProfile | None:
    """Return the profile of a cached probe; None when the file is of another version or damaged."""
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(ServerProfile)}:
        return None
    plain = ServerProfile()
    for name, field_value in value.items():
        expected = getattr(plain, name)
        listed = name in {"built_ins", "materialise"}
        if listed and not (isinstance(field_value, list) and all(isinstance(item, str) for item in field_value)):
            return None
        if isinstance(expected, bool) and not isinstance(field_value, bool):
            return None
    if value["rewind"] not in {"revert", "rollback", None} or not isinstance(value["name"], str):
        return None
    keywords = {**value, "built_ins": frozenset(value["built_ins"]), "materialise": tuple(value["materialise"])}
    return ServerProfile(**keywords)
