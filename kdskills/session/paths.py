"""Paths a model may name: pure text rules, checked before any file is touched."""

from __future__ import annotations

import re

from kdskills.session.codes import invalid, path_denied

_DRIVE = re.compile(r"[A-Za-z]:")


def clean_path(path: str) -> str:
    """Return *path* without a leading `./`, doubled and trailing slashes.

    The text is never URL-decoded: `%2e%2e` is a file name like any other.

    Raises:
        ToolCallRefused: `invalid_argument` for a blank path; `path_denied` with its reason for any form never
            followed, even where it would stay inside.
    """
    if not path.strip():
        raise invalid("the path is blank", ("/path", "must not be blank"))
    if "\0" in path:
        raise path_denied(path, "nul")
    if not path.isprintable() and any("\ud800" <= char <= "\udfff" for char in path):
        raise invalid("the path is not valid text", ("/path", "holds half of a surrogate pair"))
    if "\\" in path:
        raise path_denied(path, "backslash")
    if path.startswith("/"):
        raise path_denied(path, "absolute")
    if _DRIVE.match(path):
        raise path_denied(path, "drive")
    parts = path.split("/")
    if ".." in parts:
        raise path_denied(path, "dotdot")
    names = [part for part in parts if part not in {"", "."}]
    if not names:
        raise path_denied(path, "root")
    return "/".join(names)


def script_path(path: str) -> str:
    """Return the clean path of a script, which must lie below `scripts/`.

    Raises:
        ToolCallRefused: As `clean_path`, in that order, then `outside_scripts`.
    """
    clean = clean_path(path)
    first, _, inner = clean.partition("/")
    if first != "scripts" or not inner:
        raise path_denied(path, "outside_scripts")
    return clean


def suffix_of(path: str) -> str:
    """Return the lower-cased suffix of the last part with its dot, or `""`."""
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    return f".{suffix.lower()}" if dot and stem else ""
