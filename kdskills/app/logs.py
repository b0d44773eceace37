"""Logs of a service, one JSON object a line with the request's id and without secrets; names of processes in `ps`."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from kdskills.errors import KdskillsError


REQUEST: Final = "request_id"
NUMBER: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_CURRENT: Final[ContextVar[str]] = ContextVar("kdskills_request_id")

MASK: Final = "***"
SECRETS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"kd_([0-9a-f]{16})_[A-Za-z0-9_-]{20,}"), rf"kd_\1_{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@"), rf"\1:{MASK}@"),
    (
        re.compile(r"(?i)((?:password|passwd|secret|api_?key|token)\"?\s*[=:]\s*\"?)[^\s\"'&,;]{4,}"),
        rf"\1{MASK}",
    ),
)
"""What looks like a secret, and what is written instead. The public id of a token stays: it is what audit rows name."""


OURS: Final = ("kdskills", "uvicorn.error")
"""Loggers of which every line is written; of others, warnings and what is worse."""


class OperatorLog:
    """Logs what the operator must mend, once in a while: a full disk refuses every upload there is.

    Args:
        every_s: Seconds in which one code is logged once.
    """

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._logged: dict[str, float] = {}

    def __call__(self, error: KdskillsError) -> None:
        """Log *error* unless somebody else must act, or its code was logged a while ago."""
        now = time.monotonic()
        if error.who == "operator" and now - self._logged.get(error.code, float("-inf")) >= self._every_s:
            self._logged[error.code] = now
            logging.getLogger("kdskills.service").error("%s: %s", error.code, error.message)


def number_of(text: str) -> str:
    """Return the number a caller gave a request, or a new one where it is none that a log or an audit row may hold."""
    return text if NUMBER.fullmatch(text) else secrets.token_hex(8)


@contextmanager
def in_request(number: str) -> Iterator[None]:
    """Give every line that is logged in the block the request's id."""
    mark = _CURRENT.set(number)
    try:
        yield
    finally:
        _CURRENT.reset(mark)


def without_secrets(text: str) -> str:
    """Return *text* with everything masked that looks like a token, a password or a key."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


class JsonLines(logging.Formatter):
    """Writes a record as one line: time, level, logger, message, the request's id, facts and where an error was raised."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        number = _CURRENT.get("")
        if number:
            line[REQUEST] = number
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            for name, value in facts.items():
                line.setdefault(str(name), without_secrets(value) if isinstance(value, str) else value)
        if record.exc_info:
            line["error"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=True, default=str)


@contextmanager
def json_logs(stream: TextIO | None = None, level: int = logging.INFO) -> Iterator[None]:
    """Write what the service and its server log as JSON lines, for the length of the block.

    Args:
        stream: Where to; standard error when omitted.
        level: The lowest level that is written.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root, before = logging.getLogger(), {name: logging.getLogger(name).level for name in OURS}
    root.addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for name, was in before.items():
            logging.getLogger(name).setLevel(was)


def be_called(words: str) -> None:
    """Give this process a title, `kdskills: …`; without the library that does it, it keeps the words it was started with.

    Args:
        words: What it is, such as `worker 0`.
    """
    try:
        from setproctitle import setproctitle
    except ImportError:  # of the extras for background work and the service; nothing but the sight of it depends on it
        return
    setproctitle(f"kdskills: {words}")
