"""Digests of a skill file, a skill's whole tree and a root."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from kdskills.skills.safe_open import open_file, walk_tree

PREFIX = "sha256:"


def bytes_digest(data: bytes) -> str:
    """Return `sha256:` and 64 hex digits over *data*."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def rows_digest(rows: Iterable[Iterable[str | int]]) -> str:
    """Return the digest over compact UTF-8 JSON of *rows*; bytes of names that are no UTF-8 count as they are."""
    plain = [row if isinstance(row, tuple | list) else list(row) for row in rows]
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    return bytes_digest(text.encode("utf-8", "surrogateescape"))


def tree_digest(root: str | Path, below: str = "") -> str:
    """Return the digest over all files of a skill's folder.

    It is taken over `[[path, size, hex], ...]` in the order of path bytes; a link counts as
    `[path, 0, "link:" + target]`, anything else that is no regular file as `[path, 0, "other"]`.

    Args:
        root: The skill's folder, or a folder above it.
        below: The skill's folder as a posix path below *root*, reached without links.

    Raises:
        FileRefused: A file vanished, turned into something else, or cannot be read.
    """
    prefix = f"{below}/" if below else ""
    rows: list[tuple[str, int, str]] = []
    for entry in walk_tree(root, below):
        if entry.kind == "file":
            rows.append((entry.path, *file_digest(root, prefix + entry.path)))
        else:
            rows.append((entry.path, 0, f"link:{entry.target}" if entry.kind == "link" else "other"))
    return rows_digest(rows)


def file_digest(folder: str | Path, path: str) -> tuple[int, str]:
    """Return size and SHA-256 in hex of a file below a folder. Raises FileRefused."""
    with open_file(folder, path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest
