"""Metrics, traces and one line of the log for each request: one place tells OpenTelemetry, Prometheus and the log.

OpenTelemetry's API does nothing unless the process configures an SDK; Prometheus reads a registry of the Host's own. Labels are
names of operations, doors, engines, states and codes of errors: nothing that a caller chooses. docs/reference/metrics.md lists all.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kdskills.app.logs import RequestRecord, in_request, note_request
from kdskills.errors import KdskillsError, MissingExtra
from kdskills.errors.traces import Trace, current_trace, in_trace

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from prometheus_client import CollectorRegistry

    from kdskills.app.upkeep import Pulse
    from kdskills.storage.database import Database

NAME: Final = "kdskills"


class Instrument(NamedTuple):
    """One metric. OpenTelemetry knows it by *name*, Prometheus by `metric` and by *labels* alone."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def metric(self) -> str:
        """The name Prometheus knows, without the endings that it gives counters and histograms itself."""
        return "_".join((self.name.replace(".", "_"), *({"s": "seconds", "By": "bytes"}.get(self.unit, ""),))).rstrip(
            "_"
        )


DEPTH: Final = "kdskills.queue.depth"
JOBS: Final = "kdskills.jobs"
OLDEST: Final = "kdskills.queue.oldest"
STARTS: Final = "kdskills.task.starts"
DELAYS: Final = "kdskills.task.start.delay"
RUNS: Final = "kdskills.run.duration"
OUTPUT: Final = "kdskills.task.output"
ARTIFACTS: Final = "kdskills.artifacts"
WORKERS: Final = "kdskills.workers"
LEASE: Final = "kdskills.lease.age"
REQUESTS: Final = "kdskills.requests"
CALLS: Final = "kdskills.operation.duration"
REFUSALS: Final = "kdskills.refusals"
RESPONSES: Final = "kdskills.http.responses"
TRAFFIC: Final = "kdskills.http.traffic"
REMOVED: Final = "kdskills.retention.removed"
POOL: Final = "kdskills.database.connections"
POOL_SIZE: Final = "kdskills.database.pool.size"
DATABASE: Final = "kdskills.database.up"

INSTRUMENTS: Final[Mapping[str, Instrument]] = {
    row.name: row
    for row in (
        Instrument(
            REQUESTS,
            "counter",
            "{request}",
            ("operation", "door", "code"),
            "Operations that were called; `ok` is a code.",
        ),
        Instrument(CALLS, "histogram", "s", ("operation",), "How long operations took, whatever came of them."),
        Instrument(
            REFUSALS, "counter", "{refusal}", ("operation", "code", "door"), "Operations that were refused, by code."
        ),
        Instrument(
            RESPONSES, "counter", "{response}", ("method", "status"), "Answers over HTTP, those of no operation too."
        ),
        Instrument(TRAFFIC, "counter", "By", ("direction",), "Bytes of bodies over HTTP, `in` and `out`."),
        Instrument(DEPTH, "gauge", "{item}", ("state",), "Tasks that wait or run, by state."),
        Instrument(JOBS, "gauge", "{job}", ("state",), "Jobs that wait or run, by state."),
        Instrument(OLDEST, "gauge", "s", (), "For how long the oldest task or job that is queued has been."),
        Instrument(STARTS, "counter", "{start}", (), "Tasks whose first program was started."),
        Instrument(
            DELAYS,
            "histogram",
            "s",
            (),
            "From the submit of a task to the start of its first program: queue and sandbox.",
        ),
        Instrument(RUNS, "histogram", "s", ("engine", "status"), "How long commands ran, by engine and status."),
        Instrument(OUTPUT, "counter", "By", (), "Bytes that tasks that are over have printed."),
        Instrument(ARTIFACTS, "counter", "By", (), "Bytes of the files kept of tasks that are over."),
        Instrument(WORKERS, "gauge", "{worker}", (), "Workers that are heard of."),
        Instrument(LEASE, "gauge", "s", (), "Seconds since the worker that was silent longest was heard of."),
        Instrument(
            REMOVED,
            "counter",
            "{record}",
            ("kind",),
            "What was old and was removed: `version`, `hold` of a version, `audit_row`, `conversation`.",
        ),
        Instrument(DATABASE, "gauge", "1", (), "Whether the database of the work answered at the last look."),
        Instrument(POOL, "gauge", "{connection}", ("database", "state"), "Connections to a database, in use or idle."),
        Instrument(
            POOL_SIZE, "gauge", "{connection}", ("database",), "Connections to a database that are kept open at most."
        ),
    )
}
"""Every metric there is, by OpenTelemetry's name."""

SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Bounds of the buckets of histograms."""
WORD: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_VALUES: Final = 256
"""Values that one label has at most: what is more, or no word, is `other`."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
STATUSES: Final = frozenset(HTTPStatus)
UNFORESEEN: Final = "internal_error"


class ScrapedMetrics:
    """The registry of one Host, as Prometheus reads it. Raises MissingExtra."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
        except ImportError:
            raise MissingExtra("metrics as Prometheus reads them", "service") from None
        self.registry: CollectorRegistry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._values: dict[tuple[str, str], set[str]] = {}
        self._metrics: dict[str, Any] = {}
        for row in INSTRUMENTS.values():
            options: dict[str, Any] = {"labelnames": row.labels, "registry": self.registry}
            if row.kind == "histogram":
                self._metrics[row.name] = Histogram(row.metric, row.meaning, buckets=SECONDS, **options)
            else:
                self._metrics[row.name] = {"gauge": Gauge, "counter": Counter}[row.kind](
                    row.metric, row.meaning, **options
                )

    def tell(self, instrument: str, value: float, facts: Mapping[str, str]) -> None:
        """Set a gauge, add to a counter, or count in a histogram; facts that are no label are left out."""
        row, metric = INSTRUMENTS[instrument], self._metrics[instrument]
        if row.labels:
            metric = metric.labels(*(self._bounded(instrument, label, facts[label]) for label in row.labels))
        getattr(metric, {"gauge": "set", "counter": "inc", "histogram": "observe"}[row.kind])(value)

    def _bounded(self, instrument: str, label: str, value: str) -> str:
        """Return *value*, or `other`, so that nothing fills the memory with names, whoever comes to choose them one day."""
        values = self._values.setdefault((instrument, label), set())
        if value not in values and (len(values) >= MAX_VALUES or not WORD.fullmatch(value)):
            return "other"
        values.add(value)
        return value

    def text(self) -> str:
        """Return everything in the text format of Prometheus."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()


class Telemetry:
    """What one Host tells of itself. Prometheus is told from `scraped` on, which the service makes when it starts."""

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
        recorders: dict[str, Callable[[float, dict[str, str]], None]] = {}
        for row in INSTRUMENTS.values():
            if row.kind == "gauge":
                recorders[row.name] = meter.create_gauge(row.name, row.unit, row.meaning).set
            elif row.kind == "counter":
                recorders[row.name] = meter.create_counter(row.name, row.unit, row.meaning).add
            else:
                recorders[row.name] = meter.create_histogram(row.name, row.unit, row.meaning).record
        return recorders

    @cached_property
    def scraped(self) -> ScrapedMetrics:
        """What Prometheus reads; it counts from the first time this is asked for. Raises MissingExtra."""
        return ScrapedMetrics()

    def _tell(self, instrument: str, value: float, **facts: str) -> None:
        if instrument in self._instruments:
            self._instruments[instrument](value, facts)
        if "scraped" in self.__dict__:
            self.scraped.tell(instrument, value, facts)

    @contextmanager
    def span(
        self, name: str, parent: Trace | None = None, facts: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Any, Trace]]:
        """Do the block as a step of the trace of *parent*, else of the one this is in, else of a new one.

        Yields OpenTelemetry's span, None where its API is not installed, and the step. Where an SDK records spans the step is the
        span, and a span of the program's own, of that trace or when there is no parent, is what it is in.
        """
        parent = parent or current_trace()
        try:
            from opentelemetry import trace
        except ImportError:
            step = Trace.new() if parent is None else parent.child()
            with in_trace(step):
                yield None, step
            return
        before, context = trace.get_current_span().get_span_context(), None
        if parent is not None and (not before.is_valid or before.trace_id != int(parent.trace_id, 16)):
            numbers, flags = (int(parent.trace_id, 16), int(parent.span_id, 16)), trace.TraceFlags(parent.flags)
            before = trace.SpanContext(*numbers, is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(before))
        tracer = trace.get_tracer(NAME)
        with tracer.start_as_current_span(
            name, context, attributes=facts, record_exception=False, set_status_on_exception=False
        ) as span:
            ids = span.get_span_context()
            if ids.is_valid and ids.span_id != before.span_id:  # an SDK made it
                step = Trace.of_span(ids)
            else:
                step = Trace.new() if parent is None else parent.child()
            with in_trace(step):
                yield span, step

    @contextmanager
    def request(self, door: str, number: str, traceparent: object = None) -> Iterator[RequestRecord]:
        """Serve one request in the block: it has a number, is a step of a trace, and one line of the log when it is over.

        *traceparent* is what the caller sent, of which anything but a good one is let be: the trace is a new one then.
        """
        began = time.monotonic()
        with in_request(number) as record, self.span(f"request {door}", Trace.read(traceparent)) as (_, step):
            record.trace, facts = step, record.facts
            try:
                yield record
            except BaseException as error:
                facts.setdefault("code", code_of(error))
                raise
            finally:
                facts.setdefault("code", "ok")
                facts |= {"door": door, "duration_ms": round((time.monotonic() - began) * 1000, 1)}
                words = record.words or f"{facts.get('operation', door)}: {facts['code']}"
                logging.getLogger(f"{NAME}.{door}").log(record.level, "%s", words, extra={"facts": facts})

    @contextmanager
    def operation(self, name: str, door: str) -> Iterator[None]:
        """Measure one operation; a refusal is counted by its code, and its words are told to nobody."""
        began, code, outcome = time.monotonic(), "ok", "ok"
        note_request(operation=name)
        with self.span(f"operation {name}", facts={"kdskills.operation": name, "kdskills.door": door}) as (span, _):
            try:
                yield
            except BaseException as error:
                code = code_of(error)
                outcome = code if isinstance(error, KdskillsError) else type(error).__name__
                if span is not None:
                    from opentelemetry.trace import Status, StatusCode

                    span.set_attribute("error.type", outcome)
                    span.set_status(Status(StatusCode.ERROR))
                if isinstance(error, KdskillsError):
                    self._tell(REFUSALS, 1, operation=name, code=outcome, door=door)
                raise
            finally:
                self._tell(REQUESTS, 1, operation=name, door=door, code=code)
                self._tell(CALLS, time.monotonic() - began, operation=name, door=door, outcome=outcome)

    def answered(self, method: str, status: int, received: int, sent: int) -> None:
        """Record an answer over HTTP, and the bytes of both bodies."""
        code = str(int(status)) if status in STATUSES else "other"  # services answer what they like
        self._tell(RESPONSES, 1, method=method if method in METHODS else "other", status=code)
        self._tell(TRAFFIC, received, direction="in")
        self._tell(TRAFFIC, sent, direction="out")

    def removed(self, kind: str, count: int) -> None:
        """Record how many records of a kind were let go of or removed because they were old."""
        self._tell(REMOVED, count, kind=kind)

    def ran(self, engine: str, status: str, seconds: float) -> None:
        """Record how long a command ran."""
        self._tell(RUNS, seconds, engine=engine, status=status)

    def pulse(self, measurement: Pulse) -> None:
        """Record how the work stands, and what ended."""
        for instrument, counts in ((DEPTH, measurement.depth), (JOBS, measurement.jobs)):
            for state, count in counts.items():
                self._tell(instrument, count, state=state)
        self._tell(OLDEST, measurement.oldest_s)
        self._tell(WORKERS, measurement.workers)
        self._tell(LEASE, measurement.lease_age_s)
        self._tell(STARTS, measurement.starts)
        for run in measurement.ran:
            self.ran(run.engine, run.status, run.seconds)
            self._tell(DELAYS, run.delay_s)
            self._tell(OUTPUT, run.output)
            self._tell(ARTIFACTS, run.artifacts)

    def databases(self, *, up: bool, **databases: Database) -> None:
        """Record whether the work's database answers, and the connections that this process has to each."""
        self._tell(DATABASE, up)
        for name, database in databases.items():
            in_use, idle, size = database.connections()
            self._tell(POOL, in_use, database=name, state="in_use")
            self._tell(POOL, idle, database=name, state="idle")
            self._tell(POOL_SIZE, size, database=name)


def code_of(error: BaseException) -> str:
    """Return the code that an error is counted and logged by."""
    if isinstance(error, KdskillsError):
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else UNFORESEEN
