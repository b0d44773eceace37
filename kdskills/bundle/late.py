"""Models that are completed when they are first used, because most programs that import them never do."""

from __future__ import annotations

import threading
from typing import Any

from pydantic import BaseModel, ConfigDict

_COMPLETING = threading.RLock()


class LateModel(BaseModel):
    """A frozen model without further keys, whose validator is built at its first use."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Complete the model, one thread at a time: pydantic before 2.14 lets two of them get into each other's way."""
        with _COMPLETING:
            return super().model_rebuild(**options)
