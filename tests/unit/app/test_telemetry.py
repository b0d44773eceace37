"""Metrics and spans through the OpenTelemetry API, and metrics as Prometheus reads them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import prometheus_client
import pytest
from click.testing import CliRunner
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.identity import Identity
from kdskills.app.logs import json_logs
from kdskills.app.operations import Context
from kdskills.app.telemetry import INSTRUMENTS, MAX_VALUES, ScrapedMetrics, Telemetry
from kdskills.app.upkeep import Pulse, Ran
from kdskills.doors.cli.main import build_cli
from kdskills.errors import KdskillsError
from kdskills.errors.traces import current_trace

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENT = f"00-{TRACE}-00f067aa0ba902b7-01"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


@pytest.fixture
def spans(monkeypatch):
    """Spans that have ended, of a provider of this test's own."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


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
    host.telemetry.pulse(Pulse({"queued": 3, "running": 1}, 2, 4.5, (Ran("e", "failed", 1.0),)))
    rows = collected(reader)
    assert rows["kdskills.queue.depth"] == {(("state", "queued"),): 3, (("state", "running"),): 1}
    assert rows["kdskills.workers"] == {(): 2}
    assert rows["kdskills.lease.age"] == {(): 4.5}


async def test_a_database_is_measured(host, reader):
    """A database without work says so in zeros."""
    try:
        assert await host.upkeep.measure() == (frozenset(), frozenset())
    finally:
        await host.work.aclose()
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
    with telemetry.request("http", "r", SENT) as record, telemetry.operation("x", "http"):
        assert current_trace().trace_id == record.trace.trace_id == TRACE
        assert current_trace().span_id not in {record.trace.span_id, SENT[36:52]}


def test_the_page_lists_every_metric():
    """The reference has each metric of the registry: both names, kind, labels, unit and meaning; nothing else is told."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `kdskills_")]
    units = {"s": "seconds", "By": "bytes", "1": ""}
    expected = []
    for row in INSTRUMENTS.values():
        name = row.metric + ("_total" if row.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in row.labels)
        unit = units.get(row.unit, row.unit.strip("{}"))
        expected.append(f"| `{name}` | `{row.name}` | {row.kind} | {labels} | {unit} | {row.meaning} |")
    assert rows == expected
    families = [family for family in ScrapedMetrics().registry.collect() if not family.name.startswith("process_")]
    assert [(family.name, family.type) for family in families] == [
        (row.metric, row.kind) for row in INSTRUMENTS.values()
    ]


def test_each_host_has_a_registry(host, tmp_path):
    """Two Hosts share nothing, and nothing is in the registry of the process."""
    second = Host(Settings(state_dir=tmp_path / "second", bundle=None), entry_points=False)
    for each in (host, second):
        assert each.telemetry.scraped.registry is not prometheus_client.REGISTRY
    with host.telemetry.operation("plugins", "cli"):
        pass
    assert 'operation="plugins"' in host.telemetry.scraped.text()
    assert 'operation="plugins"' not in second.telemetry.scraped.text()
    assert b"kdskills" not in prometheus_client.generate_latest()


def test_a_label_has_so_many_values():
    """Should somebody come to choose names one day: no words, and what is more than the bound, are `other`; counts stay right."""
    metrics = ScrapedMetrics()
    for number in range(2 * MAX_VALUES):
        metrics.tell("kdskills.run.duration", 1.0, {"engine": f"e{number}", "status": "failed"})
    for engine in ("", "a b", "x" * 65, 'a"b\\n', "\ud800", "é"):
        metrics.tell("kdskills.run.duration", 1.0, {"engine": engine, "status": "failed"})
    lines = [line for line in metrics.text().splitlines() if line.startswith("kdskills_run_duration_seconds_count{")]
    assert len(lines) == MAX_VALUES + 1
    assert f'kdskills_run_duration_seconds_count{{engine="other",status="failed"}} {MAX_VALUES + 6}.0' in lines


def test_spans_are_steps_of_the_trace(host, spans):
    """With an SDK the trace that a request brought has its spans, one below the other; what it has begun is the span's own."""
    for sent in (SENT, "garbage"):
        with host.telemetry.request("http", "r", sent) as record, host.telemetry.operation("plugins", "http"):
            step = current_trace()
        operation, request = spans()[-2:]
        assert (operation.name, request.name) == ("operation plugins", "request http")
        assert operation.parent.span_id == request.context.span_id == int(record.trace.span_id, 16)
        assert operation.context.span_id == int(step.span_id, 16)
        assert {step.trace_id, record.trace.trace_id} == {f"{request.context.trace_id:032x}"}
        assert (step.trace_id == TRACE) == (sent == SENT)
        assert (request.parent and request.parent.span_id) == (int(SENT[36:52], 16) if sent == SENT else None)


def test_a_program_that_traces_is_joined(host, spans):
    """A span that the program is in is what ours are in, and what scripts are told without any operation."""
    with trace.get_tracer("program").start_as_current_span("outer") as outer:
        ids = outer.get_span_context()
        assert str(current_trace()) == f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
        with host.telemetry.operation("plugins", "library"):
            pass
    assert spans()[0].parent.span_id == ids.span_id


def test_the_command_line_takes_a_trace(host):
    """`TRACEPARENT` of the shell is the trace of a command; `kdskills metrics` prints text, and makes no database."""
    out = io.StringIO()
    with json_logs(out):
        done = CliRunner().invoke(get_command(build_cli(host)), ["metrics"], obj=host, env={"TRACEPARENT": SENT})
    assert (done.exit_code, host.storage.present) == (0, False)
    assert "# TYPE kdskills_requests_total counter" in done.stdout
    (line,) = map(json.loads, out.getvalue().splitlines())
    assert (line["trace_id"], line["door"], line["operation"], line["code"]) == (TRACE, "cli", "metrics.show", "ok")


def test_statuses_that_services_invent_are_one(host):
    """A status that HTTP knows is told; whatever else a service answers with is `other`, and takes no room of other metrics."""
    metrics = host.telemetry.scraped
    for status in (200, 404, *range(600, 999)):
        host.telemetry.answered("GET", status, 0, 0)
    host.telemetry.ran("bubblewrap", "failed", 1.0)
    text = metrics.text()
    assert {
        line.split('status="')[1].split('"')[0]
        for line in text.splitlines()
        if "responses" in line and 'status="' in line
    } == {
        "200",
        "404",
        "other",
    }
    assert 'engine="bubblewrap",status="failed"' in text
