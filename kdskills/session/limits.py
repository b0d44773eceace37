"""Bounds of the runtime tools, each with a hard maximum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from kdskills.errors import BadRequest

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_ENV_NAME: Final = 256
MAX_ENV_VALUE: Final = 32 * KIB
MAX_ENV_TOTAL: Final = 256 * KIB
MAX_ARG: Final = 16 * KIB

BOUNDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "max_read_bytes": (1, 64 * MIB),
        "read_window_chars": (1, 1_000_000),
        "max_body_bytes": (1, 2 * MIB),
        "max_names": (1, 64),
        "max_args": (1, 256),
        "max_env": (1, 256),
        "script_timeout_s": (0.001, 600.0),
        "max_output_bytes": (KIB, 4 * MIB),
    }
)
"""Smallest and largest value of each limit."""


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Bounds of the runtime tools; sizes in bytes, times in seconds.

    Attributes:
        max_read_bytes: Largest file `skills.read` opens, in either encoding.
        read_window_chars: Characters of one text window.
        max_body_bytes: Largest `SKILL.md` that loads.
        max_names: Names in one load or unload.
        max_args: Arguments of one script, of 16 KiB each.
        max_env: Variables of one call, 256 KiB in all.
        script_timeout_s: Wall time of one script, the default and the most a call may ask for.
        max_output_bytes: Bytes kept of each output stream, the last ones.
    """

    max_read_bytes: int = 16 * MIB
    read_window_chars: int = 100_000
    max_body_bytes: int = 2 * MIB
    max_names: int = 64
    max_args: int = 256
    max_env: int = 256
    script_timeout_s: float = 60.0
    max_output_bytes: int = 256 * KIB

    def check(self) -> RuntimeLimits:
        """Return self when every limit lies within its bounds.

        Raises:
            BadRequest: `config_invalid`, naming the limit and its bounds.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            low, high = BOUNDS[item.name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise BadRequest(
                    f"limit {item.name} must lie between {low:g} and {high:g}, not {value!r}",
                    code="config_invalid",
                    limit=item.name,
                    low=low,
                    high=high,
                )
        return self
