"""What every kind of storage of artifacts does, keep bytes under a key; and the keys, ids and media types themselves."""

from __future__ import annotations

import base64
import hashlib
import re
import string
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from kdskills.errors import OperatorMustAct

CHUNK: Final = 1024 * 1024
NO_BUCKET: Final = "the bucket of artifacts is not there: make it, or let the setting artifacts name another"


class ArtifactStoreUnavailable(OperatorMustAct):
    """The place artifacts are kept in does not answer, or its URL is not understood."""

    code = "artifact_store_unavailable"


class ArtifactCorrupt(OperatorMustAct):
    """What is kept of an artifact is not what was stored."""

    code = "artifact_corrupt"


class Blobs(Protocol):
    """Keeps files under keys; a key's bytes never change."""

    async def check(self) -> None:
        """Ask whether the storage is there. Raises ArtifactStoreUnavailable."""
        ...

    async def save(self, key: str, source: Path) -> None:
        """Keep the file *source* under *key*; all of it or nothing."""
        ...

    async def size(self, key: str) -> int | None:
        """Return how many bytes *key* has, or None when there is no such key."""
        ...

    def read(self, key: str) -> AsyncIterator[bytes]:
        """Stream the bytes of *key*.

        Raises:
            NotFound: `artifact_missing`.
        """
        ...

    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes *begin* to *end* of *key*. Raises as `read`."""
        ...

    async def delete(self, key: str) -> None:
        """Forget *key*; one that is not there is forgotten already."""
        ...

    async def sign(self, key: str, expires: timedelta) -> str | None:
        """Return a link anybody may read *key* with until it expires, or None where there is no such thing."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


OCTETS: Final = "application/octet-stream"

MIMES: Final = {
    "bmp": "image/bmp", "bz2": "application/x-bzip2", "css": "text/css", "csv": "text/csv", "doc": "application/msword",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document", "gif": "image/gif",
    "gz": "application/gzip", "htm": "text/html", "html": "text/html", "ipynb": "application/x-ipynb+json",
    "jpeg": "image/jpeg", "jpg": "image/jpeg", "js": "text/javascript", "json": "application/json",
    "jsonl": "application/jsonl", "log": "text/plain", "md": "text/markdown", "mp3": "audio/mpeg", "mp4": "video/mp4",
    "parquet": "application/vnd.apache.parquet", "pdf": "application/pdf", "png": "image/png",
    "pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation", "py": "text/x-python",
    "rtf": "application/rtf", "sh": "application/x-sh", "sqlite": "application/vnd.sqlite3", "svg": "image/svg+xml",
    "tar": "application/x-tar", "toml": "application/toml", "tsv": "text/tab-separated-values", "txt": "text/plain",
    "wav": "audio/wav", "webp": "image/webp", "xls": "application/vnd.ms-excel",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", "xml": "application/xml",
    "yaml": "application/yaml", "yml": "application/yaml", "zip": "application/zip",
}  # fmt: skip
"""Media types by suffix: a table of our own, because the one of the machine differs from host to host."""

_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "_.-")
_HEX: Final = re.compile(r"[0-9a-f]{64}")


def mime_of(path: str) -> str:
    """Return the media type a file's suffix stands for; nothing looks into the file."""
    name = path.rpartition("/")[2]
    _, dot, suffix = name.rpartition(".")
    return MIMES.get(suffix.lower(), OCTETS) if dot else OCTETS


def artifact_id(task_id: str, path: str) -> str:
    """Return the id of what a task left at *path*: the same however often a worker stores it."""
    parts = b"".join(
        f"{len(part)}:".encode() + part for part in (task_id.encode(), path.encode("utf-8", "surrogatepass"))
    )
    digest = hashlib.sha256(parts).digest()[:16]
    return "art_" + base64.b32encode(digest).decode().rstrip("=").lower()


def blob_key(project: str, sha256: str) -> str:
    """Return where the bytes of a digest are kept for a project.

    Raises:
        ValueError: *sha256* is no digest in lower-case hex, or the project has no name.
    """
    if not _HEX.fullmatch(sha256):
        raise ValueError(f"{sha256[:80]!r} is no sha256 in lower-case hex")
    if not project:
        raise ValueError("the project has no name")
    return f"artifacts/{_folder(project)}/sha256/{sha256[:2]}/{sha256[2:]}"


def _folder(project: str) -> str:
    """Return *project* as one component of a key; no two projects share one, and none means something else in a path.

    Marked by `~` and not by `%`, which some servers of object storage decode once more than they should.
    """
    plain = _PLAIN if set(project) != {"."} else _PLAIN - {"."}
    return "".join(
        letter if letter in plain else "".join(f"~{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))
        for letter in project
    )
