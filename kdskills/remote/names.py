"""Names of remote skills: one normalisation, and the spellings of a qualified name."""

from __future__ import annotations


def clean_name(name: str) -> str:
    """Return the name without surrounding white space, the only normalisation there is.

    Raises:
        ValueError: Nothing is left.
        TypeError: The name is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"a remote skill's name is text, got {type(name).__name__}")
    cleaned = name.strip()
    if not cleaned:
        raise ValueError("remote skill name must be non-empty")
    return cleaned


def qualify(namespace: str | None, name: str) -> str:
    """Return `namespace.name`, or the name alone."""
    return f"{namespace}.{name}" if namespace else name


def flatten(namespace: str | None, name: str) -> str:
    """Return `ns__name` with `-` folded to `_`: what servers compare tools by."""
    return (f"{namespace}__{name}" if namespace else name).replace("-", "_")
