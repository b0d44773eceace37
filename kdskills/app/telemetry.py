"""Metrics and traces through the OpenTelemetry API: nothing comes of them unless the process configures an SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from kdskills.app.upkeep import Pulse

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
    def _instruments(self) -> dict[str, Any]:
        meter = self._meter
        if meter is None:
            return {}
        return {
            DEPTH: meter.create_gauge(DEPTH, "{item}", "Tasks and jobs that wait or run, by state."),
            LEASE: meter.create_gauge(LEASE, "s", "Seconds since the worker that was silent longest was heard of."),
            WORKERS: meter.create_gauge(WORKERS, "{worker}", "Workers that are heard of."),
            RUNS: meter.create_histogram(RUNS, "s", "How long commands ran, by engine and status."),
            CALLS: meter.create_histogram(CALLS, "s", "How long operations took, by name, door and outcome."),
            REFUSALS: meter.create_counter(REFUSALS, "{refusal}", "Operations that were refused, by code."),
        }

    @contextmanager
    def operation(self, name: str, door: str) -> Iterator[None]:
        """Measure one operation; a refusal is counted by its code, and its words are told to nobody."""
        began, outcome = time.monotonic(), "ok"
        with self._span(name, door) as failed:
            try:
                yield
            except KdskillsError as error:
                outcome = error.code
                failed(outcome)
                self._add(REFUSALS, 1, {"operation": name, "code": outcome, "door": door})
                raise
            except BaseException as error:
                outcome = type(error).__name__
                failed(outcome)
                raise
            finally:
                self._record(CALLS, time.monotonic() - began, {"operation": name, "door": door, "outcome": outcome})

    def ran(self, engine: str, status: str, seconds: float) -> None:
        """Record how long a command ran."""
        self._record(RUNS, seconds, {"engine": engine, "status": status})

    def pulse(self, measurement: Pulse) -> None:
        """Record how the work stands, and what ended."""
        for state, count in measurement.depth.items():
            self._set(DEPTH, count, {"state": state})
        self._set(WORKERS, measurement.workers, {})
        self._set(LEASE, measurement.lease_age_s, {})
        for run in measurement.ran:
            self.ran(run.engine, run.status, run.seconds)

    @contextmanager
    def _span(self, name: str, door: str) -> Iterator[Any]:
        try:
            from opentelemetry import trace
        except ImportError:
            yield lambda code: None
            return
        facts = {"kdskills.operation": name, "kdskills.door": door}
        tracer = trace.get_tracer(NAME)
        with tracer.start_as_current_span(
            f"operation {name}", attributes=facts, record_exception=False, set_status_on_exception=False
        ) as span:

            def failed(code: str) -> None:
                span.set_attribute("error.type", code)
                span.set_status(trace.Status(trace.StatusCode.ERROR))

            yield failed

    def _add(self, name: str, amount: int, facts: dict[str, str]) -> None:
        if name in self._instruments:
            self._instruments[name].add(amount, facts)

    def _record(self, name: str, amount: float, facts: dict[str, str]) -> None:
        if name in self._instruments:
            self._instruments[name].record(amount, facts)

    def _set(self, name: str, amount: float, facts: dict[str, str]) -> None:
        if name in self._instruments:
            self._instruments[name].set(amount, facts)
