"""Logical URIs and where they are on a host: the longest prefix by path components counts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from kdskills.errors import StrPath, path_argument

EXPORT_KEY = "SKILLS_DESCRIPTOR"


def split_uri(uri: str) -> tuple[str, tuple[str, ...]]:
    """Return scheme and path components of a logical URI such as `bundle://skills/acme/brief`."""
    scheme, _, path = uri.partition("://")
    return scheme, tuple(part for part in path.split("/") if part)


def below(uri: str, *parts: str) -> str:
    """Return the URI of something below *uri*."""
    path = "/".join(parts)
    return f"{uri.rstrip('/')}/{path}" if path and not uri.endswith("://") else f"{uri}{path}"


def locate(uri: str, mounts: Mapping[str, str]) -> Path | None:
    """Return where *uri* is on this host, or None when no mount covers it.

    A URI with `.` or `..` among its components is nowhere: it could lead out of its mount.
    """
    scheme, parts = split_uri(uri)
    if {".", ".."} & set(parts) or any("\0" in part for part in parts):
        return None
    best: tuple[int, str] | None = None
    for prefix, folder in mounts.items():
        prefix_scheme, start = split_uri(prefix)
        if prefix_scheme == scheme and parts[: len(start)] == start and (best is None or len(start) > best[0]):
            best = (len(start), folder)
    return None if best is None else Path(best[1], *parts[best[0] :])


def remap_mounts(export: Mapping[str, Any], mounts: Mapping[str, StrPath]) -> dict[str, Any]:
    """Return an export with other mounts; nothing else changes and nothing is looked at.

    Args:
        export: What `export_runtime_globals` gave, or its inner descriptor.
        mounts: `{URI prefix: folder}`, in place of the export's own, so that no path of this host goes along unasked.
            Give the prefix of a root, or of each skill: `bundle://skills/acme/brief` as in the export's `skills`.
    """
    copied = deepcopy(dict(export))
    inner: dict[str, Any] = copied.get(EXPORT_KEY, copied)
    inner["mounts"] = {
        prefix: str(path_argument(folder, f"the mount of {prefix}")) for prefix, folder in mounts.items()
    }
    return copied
