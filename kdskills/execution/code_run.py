"""Turn the entry's report and the engine's own facts into the result of a `code` request."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from kdskills.execution.request import ExecError, ExecResult

MAX_REPORT: Final = 2 * 1024 * 1024
"""An engine keeps at most this many bytes of the report, from its beginning."""

_TEXT = 64 * 1024

Start = Literal["started", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class CodeReport:
    """What the entry and the program reported. The program writes everything after `started`, so none of it is trusted.

    Attributes:
        start: First line of the report, or None when there was none: the entry itself did not run.
        error: Why the program did not start, or the exception it ended with.
        value: What the program handed back.
        ended: Whether the last line came; a program killed or left by `os._exit` has none.
    """

    start: Start | None = None
    error: ExecError | None = None
    value: Any = None
    ended: bool = False


def read_report(data: bytes) -> CodeReport:
    """Read the report lines and check their form; never raises."""
    lines = [_line(raw) for raw in data[:MAX_REPORT].split(b"\n") if raw]
    first = lines[0] if lines else {}
    match first.get("event"):
        case "failed":
            stage, code = _text(first, "stage") or "entry", _text(first, "code") or "entry_failed"
            return CodeReport(start="failed", error=ExecError(stage, code, _text(first, "message")))
        case "refused":
            code = _text(first, "code") or "skills_mismatch"
            return CodeReport(start="refused", error=ExecError("skills", code, _text(first, "message")))
        case "started":
            return _read_end(next((line for line in lines[1:] if line.get("event") == "ended"), None))
        case _:
            return CodeReport()


def apply_report(result: ExecResult, data: bytes) -> ExecResult:
    """Return the engine's *result* with what the report adds to it.

    * Started: status and exit code are the engine's; an exception becomes `error`, a reported value `value`.
    * `skills_mismatch` and other refusals: status `refused`, and no exit code, as no program ran.
    * The entry failed, or reported nothing although the engine saw it exit: `infra_error`.
    """
    report = read_report(data)
    if report.start == "started":
        return replace(result, error=result.error or report.error, value=report.value)
    if result.status not in {"ok", "nonzero"}:
        return result
    if report.start == "refused":
        return replace(result, status="refused", exit_code=None, signal=None, error=report.error)
    error = report.error or ExecError("entry", "entry_failed", _last_words(result))
    return replace(result, status="infra_error", exit_code=None, signal=None, error=error)


def _read_end(line: dict[str, Any] | None) -> CodeReport:
    """Read the last line of a program that was started."""
    if line is None:
        return CodeReport(start="started")
    error = None
    if line.get("outcome") == "exception":
        error = ExecError(
            stage="program",
            code="exception",
            message=_text(line, "message"),
            exception=_text(line, "exception"),
            traceback=_text(line, "traceback"),
        )
    return CodeReport(start="started", error=error, value=line.get("value"), ended=True)


def _line(raw: bytes) -> dict[str, Any]:
    """Parse one line; a line that is not a JSON object counts as an empty one."""
    try:
        line = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are not JSON and would not survive the way to the caller."""
    raise ValueError(name)


def _text(line: dict[str, Any], key: str) -> str:
    """Return the text under *key*, bounded and free of lone surrogates."""
    value = line.get(key)
    return value[:_TEXT].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _last_words(result: ExecResult) -> str:
    """Return why the entry reported nothing, with the end of its standard error."""
    words = result.stderr.text.strip()[-500:]
    return (
        f"the entry ended before the program started: {words}"
        if words
        else "the entry ended before the program started"
    )
