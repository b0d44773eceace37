"""Arguments that may be written in more than one way, brought into one."""

from __future__ import annotations

import os
from pathlib import Path

StrPath = str | os.PathLike[str]
"""A path as callers give it."""


def path_argument(value: object, name: str) -> Path:
    """Return a path argument as a `Path`.

    Args:
        value: Text, or anything with `__fspath__` that gives text.
        name: Name of the argument, for the error.

    Raises:
        TypeError: It is neither; one sentence that names the argument.
    """
    if isinstance(value, Path):
        return value
    text = value if isinstance(value, str) else _fspath(value)
    if text is None:
        raise TypeError(f"{name} must be a path, as text or os.PathLike, not {type(value).__name__}")
    return Path(text)


def _fspath(value: object) -> str | None:
    path_text = os.fspath(value) if isinstance(value, os.PathLike) else None
    return path_text if isinstance(path_text, str) else None
