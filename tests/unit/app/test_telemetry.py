"""Metrics and spans through the OpenTelemetry API."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kdskills.app import Host, Settings
from kdskills.app.identity import Identity
from kdskills.app.operations import Context
from kdskills.app.telemetry import Telemetry
from kdskills.app.upkeep import Pulse, Ran
from kdskills.errors import KdskillsError


@pytest.fixture
def reader():
    """Collects what instruments record."""
    found = InMemoryMetricReader()
    yield found
    found.shutdown()


@pytest.fixture
def host(reader, tmp_path, monkeypatch):
    """A Host whose meter is a real one of its own."""
    made = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    meter = MeterProvider(metric_readers=[reader]).get_meter("kdskills")
    monkeypatch.setitem(made.telemetry.__dict__, "_meter", meter)
    return made


def collected(reader):
    """Return {attributes: value} by instrument, once: a gauge is told of once; a histogram's value is its count."""
    data = reader.get_metrics_data()
    rows = {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    count = getattr(point, "count", None)
                    values = rows.setdefault(metric.name, {})
                    values[tuple(sorted(point.attributes.items()))] = point.value if count is None else count
    return rows


def recorded(reader, name):
    """Return {attributes: value} of one instrument."""
    return collected(reader).get(name, {})


async def test_refusals_are_counted_by_code(host, reader):
    """A refusal is one more of its code; an answer is none."""
    stranger = Context(identity=Identity(door="http"))
    for _ in range(2):
        with pytest.raises(KdskillsError):
            await host.invoke("skills.list", {}, stranger)
    await host.call("plugins")
    assert recorded(reader, "kdskills.refusals") == {
        (("code", "scope_missing"), ("door", "http"), ("operation", "skills.list")): 2
    }


async def test_operations_are_measured(host, reader):
    """Every operation is measured by name, door and outcome, whatever that was."""
    await host.call("plugins")
    with pytest.raises(KdskillsError):
        await host.invoke("plugins", {}, Context(identity=Identity(door="mcp")))
    found = recorded(reader, "kdskills.operation.duration")
    assert found == {
        (("door", "library"), ("operation", "plugins"), ("outcome", "ok")): 1,
        (("door", "mcp"), ("operation", "plugins"), ("outcome", "scope_missing")): 1,
    }


async def test_unknown_names_are_no_attributes(host, reader):
    """Callers cannot make rows of metrics by inventing operations."""
    with pytest.raises(KdskillsError):
        await host.call("made.up")
    assert recorded(reader, "kdskills.operation.duration") == {}


def test_runs_are_told_by_engine(host, reader):
    """The histogram of runs knows engine and status."""
    host.telemetry.ran("bubblewrap", "succeeded", 1.5)
    assert recorded(reader, "kdskills.run.duration") == {(("engine", "bubblewrap"), ("status", "succeeded")): 1}


def test_a_pulse_sets_the_gauges(host, reader):
    """Depth by state, workers and their longest silence."""
    at = datetime.now(UTC)
    host.telemetry.pulse(Pulse(at, {"queued": 3, "running": 1}, 2, 4.5, (Ran("e", "failed", 1.0),)))
    rows = collected(reader)
    assert rows["kdskills.queue.depth"] == {(("state", "queued"),): 3, (("state", "running"),): 1}
    assert rows["kdskills.workers"] == {(): 2}
    assert rows["kdskills.lease.age"] == {(): 4.5}


async def test_a_database_is_measured(host, reader):
    """A database without work says so in zeros."""
    try:
        at = await host.upkeep.measure(datetime.now(UTC))
    finally:
        await host.work.aclose()
    assert at.tzinfo is UTC
    states = ("queued", "running", "starting")
    assert recorded(reader, "kdskills.queue.depth") == {(("state", state),): 0 for state in states}


def test_without_the_package_nothing_happens(monkeypatch):
    """Where the API is not installed, operations run as ever."""
    for name in ("opentelemetry", "opentelemetry.metrics", "opentelemetry.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    telemetry = Telemetry()
    with telemetry.operation("x", "cli"):
        telemetry.ran("e", "failed", 1.0)
    with pytest.raises(KdskillsError), telemetry.operation("x", "cli"):
        raise KdskillsError("no")
