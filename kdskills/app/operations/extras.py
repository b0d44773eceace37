"""Optional parts that a turn can do without, and the package each is known by."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Final

EXTRAS: Final[Mapping[str, str]] = MappingProxyType(
    {"models": "pydantic-ai-slim", "documents": "fpdf2", "otel": "opentelemetry-api"}
)


def installed(distribution: str) -> bool:
    """Whether a package is installed here."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
