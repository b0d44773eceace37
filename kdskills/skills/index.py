"""The persisted index: one file per root, trusted only when it is certainly our own and whole.

A file is one line of JSON that says what it is for, then the lines of `rows.scan_lines`. It is written aside and renamed, so other
processes see the old one or the new one. It holds no bodies.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any

from kdskills.errors import Diagnostic
from kdskills.errors.arguments import StrPath, path_argument
from kdskills.skills.marks import RootScan
from kdskills.skills.private_files import private_folder
from kdskills.skills.roots import SkillRoot
from kdskills.skills.rows import ContentMaker, json_text, scan_from, scan_lines

FORMAT = 2
"""Shape of the file."""

PARSER = 1
"""Raised whenever the same skill file means something else than before, so that old indexes are not believed."""

MAX_BYTES = 256 * 1024 * 1024


class IndexIgnored(Exception):
    """Why an index file is not used; it never leaves this room."""


def default_index_dir() -> Path | None:
    """Return the user's cache folder for indexes: `$XDG_CACHE_HOME/kdskills/index`, else `~/.cache/kdskills/index`.

    None, and so no index, for a user without a home.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if cache_home.startswith("/") else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - no raise
    return base / "kdskills" / "index" if base.is_absolute() else None


class IndexStore:
    """Reads and writes the index of each root in one folder.

    Args:
        folder: Where the files are; None keeps none. `"default"` is the user's cache.
    """

    def __init__(self, folder: StrPath | None) -> None:
        own_folder = folder is not None and folder != "default"
        self.folder = path_argument(folder, "index_dir") if own_folder else default_index_dir() if folder else None

    def file(self, root: SkillRoot, base: str) -> Path | None:
        """Return where the index of a root is kept, or None."""
        if self.folder is None:
            return None
        key = json_text(_identity(root, base)).encode()
        return self.folder / f"{hashlib.sha256(key).hexdigest()[:32]}.json"

    def load(self, root: SkillRoot, base: str, content: ContentMaker) -> tuple[RootScan | None, Diagnostic | None]:
        """Return the scan kept for a root; None when there is none, with `index_ignored` when there was a file.

        Args:
            root: The root.
            base: Its resolved folder.
            content: Makes the source of each skill's long texts.
        """
        path = self.file(root, base)
        if path is None:
            return None, None
        try:
            data = _read(path)
            return (None, None) if data is None else (_decode(data, root, base, content), None)
        except IndexIgnored as ignored:
            message = f"The index of the root {root.label} is not used and will be rebuilt: {ignored}."
            return None, Diagnostic("index_ignored", "info", message, ref=root.label)

    def save(self, root: SkillRoot, base: str, scan: RootScan) -> Diagnostic | None:
        """Write the index of a root; an unwritable folder is a finding, not an error."""
        path = self.file(root, base)
        if path is None or not scan.present:
            return None
        try:
            private_folder(path.parent)
            _replace(path, _encode(root, base, scan))
        except OSError as error:
            reason = error.strerror or "the system refused"
            message = f"The index of the root {root.label} cannot be kept: {reason}; each start reads all skills."
            return Diagnostic("index_not_written", "info", message, ref=root.label)
        return None


def _identity(root: SkillRoot, base: str) -> dict[str, Any]:
    """Return everything that decides how the root's files are read."""
    return {
        "format": FORMAT,
        "parser": PARSER,
        "unicode": unicodedata.unidata_version,
        "root": base,
        "kind": root.kind,
        "namespace": root.namespace,
        "nested": root.nested,
    }


def _encode(root: SkillRoot, base: str, scan: RootScan) -> bytes:
    body = "\n".join(scan_lines(scan)).encode("ascii")
    header = {**_identity(root, base), "checksum": hashlib.sha256(body).hexdigest()}
    return json_text(header).encode("ascii") + b"\n" + body


def _decode(data: bytes, root: SkillRoot, base: str, content: ContentMaker) -> RootScan:
    head, _, body = data.partition(b"\n")
    try:
        header: dict[str, Any] = dict(json.loads(head))
        checksum = header.pop("checksum")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise IndexIgnored("its first line is damaged") from error
    if header != _identity(root, base):
        raise IndexIgnored("another version wrote it")
    if checksum != hashlib.sha256(body).hexdigest():
        raise IndexIgnored("its checksum does not fit")
    try:
        return scan_from(body.decode("ascii").split("\n"), root, base, content)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise IndexIgnored("it has another shape") from error


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IndexIgnored(f"it cannot be opened ({error.strerror})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)  # a folder would not even become a stream
        raise IndexIgnored("it is not a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_uid != os.geteuid():
            raise IndexIgnored("it belongs to another user")
        if status.st_mode & 0o022:
            raise IndexIgnored("others may write to it")
        if status.st_size > MAX_BYTES:
            raise IndexIgnored("it is too large")
        try:
            return stream.read(MAX_BYTES)
        except OSError as error:
            raise IndexIgnored(f"it cannot be read ({error.strerror})") from error


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
