"""Logs of a service, one JSON object a line with the ids of request and trace and without secrets; names of processes."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from kdskills.errors.traces import Trace, current_trace

REQUEST: Final = "request_id"
NUMBER: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(slots=True)
class RequestRecord:
    """What is logged of one request when it is over: *facts* of one line, never an argument, a header or a body.

    Attributes:
        trace: The step of its trace, once that is known.
        words: The line's message; without any it is the operation and its code.
    """

    number: str
    trace: Trace | None = None
    words: str = ""
    level: int = logging.INFO
    facts: dict[str, Any] = field(default_factory=dict)


_CURRENT: Final[ContextVar[RequestRecord | None]] = ContextVar("kdskills_request", default=None)

MASK: Final = "***"
SECRETS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"kd_([0-9a-f]{16})_[A-Za-z0-9_-]{20,}"), rf"kd_\1_{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@"), rf"\1:{MASK}@"),
    (re.compile(r"(?i)((?:password|passwd|secret|api_?key|token)\"?\s*[=:]\s*\"?)[^\s\"'&,;]{4,}"), rf"\1{MASK}"),
)
"""What looks like a secret, and what is written instead. The public id of a token stays: it is what audit rows name."""


OURS: Final = ("kdskills", "uvicorn.error")
"""Loggers of which every line is written; of others, warnings and what is worse."""


class Sparingly:
    """Lets a thing be said at once, then once in an interval: what a peer or full disk causes comes a thousandfold."""

    def __init__(self, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def due(self, key: str) -> bool:
        """Whether *key* is to be said now; else it is counted."""
        now = self._clock()
        if now < self._next.get(key, now):
            self._unsaid[key] += 1
            return False
        self._next[key] = now + self._every_s
        return True

    def warn(self, log: logging.Logger, words: str) -> None:
        """Log *words* as a warning with how often that was left out before, if it is due."""
        if self.due(words):
            count = self._unsaid.pop(words, 0)
            log.warning("%s%s", words, f" ({count} more times since this was last said)" if count else "")


def number_of(text: str) -> str:
    """Return the number a caller gave a request, or a new one where it is none that a log or an audit row may hold."""
    return text if NUMBER.fullmatch(text) else secrets.token_hex(8)


@contextmanager
def in_request(number: str) -> Iterator[RequestRecord]:
    """Give every line that is logged in the block the request's id; what is noted in it lands in the record."""
    record = RequestRecord(number)
    mark = _CURRENT.set(record)
    try:
        yield record
    finally:
        _CURRENT.reset(mark)


def note_request(**facts: Any) -> None:
    """Note facts about the request that is being served, if one is; those that are None are left out."""
    record = _CURRENT.get()
    if record is not None:
        record.facts.update((name, value) for name, value in facts.items() if value is not None)


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
        record_of_request, trace = _CURRENT.get(), current_trace()
        if record_of_request is not None:
            line[REQUEST] = record_of_request.number
        if trace is not None:
            line["trace_id"] = trace.trace_id
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            for name, value in facts.items():
                line.setdefault(str(name), without_secrets(value) if isinstance(value, str) else value)
        if record.exc_info:
            line["error"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=True, default=str)


@contextmanager
def json_logs(stream: TextIO | None = None, level: int = logging.INFO) -> Iterator[None]:
    """Write what the service and its server log as JSON lines during the block; to standard error by default."""
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
    """Give this process a title, `kdskills: …`; without the library that does it, it keeps its command line."""
    try:
        from setproctitle import setproctitle
    except ImportError:  # of the extras for background work and the service; nothing but the sight of it depends on it
        return
    setproctitle(f"kdskills: {words}")
