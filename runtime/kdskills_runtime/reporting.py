"""Write the report: JSON lines on a descriptor of its own."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

MAX_VALUE = 1024 * 1024
MAX_TEXT = 32 * 1024


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return *text* with its middle left out when it is longer than *limit* characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


class Reporter:
    """Owns the report descriptor in the process that was started; forked children write nothing.

    Args:
        fd: Where the lines go. It is not inherited by programs started later.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._pid = os.getpid()
        self._value: tuple[Any] | None = None

    def value(self, value: Any) -> None:
        """Keep *value* for the last line, as it is now. Raises TypeError or ValueError when it is not JSON."""
        text = json.dumps(value, allow_nan=False)
        if len(text) > MAX_VALUE:
            raise ValueError(f"a reported value may take {MAX_VALUE} bytes as JSON; this one takes {len(text)}")
        self._value = (json.loads(text),)

    def failed(self, stage: str, code: str, message: str) -> None:
        """Report that the program could not be started."""
        self._line({"event": "failed", "stage": stage, "code": code, "message": shorten(message)})

    def refused(self, code: str, message: str) -> None:
        """Report that the skills here are not those of the descriptor."""
        self._line({"event": "refused", "code": code, "message": shorten(message)})

    def started(self) -> None:
        """Report that the program runs next."""
        self._line({"event": "started"})

    def ended(self, outcome: str, **facts: Any) -> None:
        """Report how the program ended."""
        line = {"event": "ended", "outcome": outcome, **facts}
        if self._value is not None:
            line["value"] = self._value[0]
        self._line(line)

    def _line(self, line: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return
        data = memoryview(json.dumps(line).encode("ascii") + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]
