"""How the states of work look, wherever they are shown."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

OVER: Final = frozenset({"succeeded", "failed", "canceled", "skipped"})
COLORS: Final[Mapping[str, str]] = MappingProxyType(
    {"succeeded": "green", "failed": "red", "canceled": "yellow", "running": "cyan", "starting": "cyan"}
)
