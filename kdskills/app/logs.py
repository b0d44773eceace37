"""Logs of a service, one JSON object a line with the request's id and without secrets; names of processes; telemetry.

Metrics and traces go through the OpenTelemetry API: nothing comes of them unless the process configures an SDK.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TextIO

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from kdskills.app.upkeep import Pulse

REQUEST: Final = "request_id"
NUMBER: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_CURRENT: Final[ContextVar[str]] = ContextVar("kdskills_request_id")

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


NAME: Final = "kdskills"
DEPTH: Final = "kdskills.queue.depth"
LEASE: Final = "kdskills.lease.age"
WORKERS: Final = "kdskills.workers"
RUNS: Final = "kdskills.run.duration"
CALLS: Final = "kdskills.operation.duration"
REFUSALS: Final = "kdskills.refusals"


class Telemetry:
    """The instruments of one Host. Names and attributes are promised in docs/how-to/run-the-service.md."""

    @cached_property
    def _meter(self) -> Meter | None:
        try:
            from opentelemetry import metrics
        except ImportError:
            return None
        return metrics.get_meter(NAME)

    @cached_property
    def _instruments(self) -> dict[str, Callable[[float, dict[str, str]], None]]:
        if (meter := self._meter) is None:
            return {}
        return {
            DEPTH: meter.create_gauge(DEPTH, "{item}", "Tasks and jobs that wait or run, by state.").set,
            LEASE: meter.create_gauge(LEASE, "s", "Seconds since the worker that was silent longest was heard of.").set,
            WORKERS: meter.create_gauge(WORKERS, "{worker}", "Workers that are heard of.").set,
            RUNS: meter.create_histogram(RUNS, "s", "How long commands ran, by engine and status.").record,
            CALLS: meter.create_histogram(CALLS, "s", "How long operations took, by name, door and outcome.").record,
            REFUSALS: meter.create_counter(REFUSALS, "{refusal}", "Operations that were refused, by code.").add,
        }

    def _tell(self, instrument: str, value: float, **facts: str) -> None:
        if instrument in self._instruments:
            self._instruments[instrument](value, facts)

    @contextmanager
    def operation(self, name: str, door: str) -> Iterator[None]:
        """Measure one operation; a refusal is counted by its code, and its words are told to nobody."""
        try:
            from opentelemetry import trace
        except ImportError:
            opened: AbstractContextManager[Any] = nullcontext()
        else:
            facts = {"kdskills.operation": name, "kdskills.door": door}
            opened = trace.get_tracer(NAME).start_as_current_span(
                f"operation {name}", attributes=facts, record_exception=False, set_status_on_exception=False
            )
        began, outcome = time.monotonic(), "ok"
        with opened as span:
            try:
                yield
            except BaseException as error:
                outcome = error.code if isinstance(error, KdskillsError) else type(error).__name__
                if span is not None:
                    span.set_attribute("error.type", outcome)
                    span.set_status(trace.Status(trace.StatusCode.ERROR))
                if isinstance(error, KdskillsError):
                    self._tell(REFUSALS, 1, operation=name, code=outcome, door=door)
                raise
            finally:
                self._tell(CALLS, time.monotonic() - began, operation=name, door=door, outcome=outcome)

    def ran(self, engine: str, status: str, seconds: float) -> None:
        """Record how long a command ran."""
        self._tell(RUNS, seconds, engine=engine, status=status)

    def pulse(self, measurement: Pulse) -> None:
        """Record how the work stands, and what ended."""
        for state, count in measurement.depth.items():
            self._tell(DEPTH, count, state=state)
        self._tell(WORKERS, measurement.workers)
        self._tell(LEASE, measurement.lease_age_s)
        for run in measurement.ran:
            self.ran(*run)
