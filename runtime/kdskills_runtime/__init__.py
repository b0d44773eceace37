"""The part of kdskills that runs inside the sandbox: the entry that runs generated code, and what such code may call.

Stage 0 (everything here) is standard library only. Generated code needs nothing from here; it may call
`report` to return a JSON value with the result of the run.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

    from kdskills_runtime.stage0 import Reporter

__all__ = ["report"]


def report(value: Any) -> None:
    """Return *value* as the result's `value`; the last call counts.

    Args:
        value: Anything `json.dumps` accepts without NaN or infinity, at most 1 MiB as JSON.

    Raises:
        TypeError: *value* is not JSON.
        ValueError: *value* holds NaN or infinity, is circular, or is too large.
        RuntimeError: This process was not started as generated code.
    """
    reporter: Reporter | None = getattr(sys.modules.get("__main__"), "__kdskills_reporter__", None)
    if reporter is None:
        raise RuntimeError("kdskills_runtime.report works in the program kdskills started, not in its children")
    reporter.value(value)
