"""Metrics and traces over HTTP, with a real server and real runs: what Prometheus reads, and one trace from request to artifact."""

from __future__ import annotations

import asyncio
import io
import json
from functools import partial

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from kdskills.app import Host
from kdskills.app.identity import OPEN_SCOPES
from kdskills.app.logs import json_logs
from kdskills.app.telemetry import INSTRUMENTS, METHODS, Telemetry
from kdskills.doors.web.entrance import Accounted
from kdskills.doors.web.events import Drain
from kdskills.errors.traces import Trace
from kdskills.storage.database import DatabaseUnavailable

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def samples(text):
    """Return {name: {labels: value}} of an answer, by Prometheus' own parser; no label twice."""
    rows = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rows.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return rows


def scraped(client):
    """Ask as Prometheus does."""
    answer = client.get("/metrics", headers={"Accept": "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(answer.text)


def test_only_administrators_read_metrics(service, serve, settings):
    """Without a token it is 401, without `admin` 403; with --no-auth they are open, and nothing else of the operator's is."""
    with service.client() as stranger, service.client(service.token(scopes=OPEN_SCOPES)) as caller:
        assert (stranger.get("/metrics").status_code, stranger.get("/metrics").json()["code"]) == (
            401,
            "unauthenticated",
        )
        assert (caller.get("/metrics").status_code, caller.get("/metrics").json()["code"]) == (403, "scope_missing")
    with service.client(service.token(project="acme")) as boss:
        rows = scraped(boss)
    assert rows["kdskills_http_responses_total"][("method", "GET"), ("status", "401")] == 2
    own = settings.model_copy(update={"state_dir": settings.state_dir / "open"})
    with serve(Host(own, entry_points=False), open_on_loopback=True) as opened, opened.client() as client:
        assert "kdskills_requests_total" not in scraped(client)
        refused = client.post("/projects/local/tools/metrics.show", json={})
        assert refused.json()["code"] == "scope_missing"


def lines_of(out):
    """Return what was logged."""
    return [json.loads(line) for line in out.getvalue().splitlines()]


def _programs_of_others_belong_to_it(client, headers):
    """Check that steps of a job, and a script that a model runs at once, find the trace of the request that began them."""
    tools = "/projects/local/tools"
    body = {"skill_name": "public.brief", "session_id": "s2", "workdir": "session"}
    body["steps"] = [{"name": "one", "command": 'printf %s "$TRACEPARENT"'}]
    made = client.post(f"{tools}/skills.start_job", json=body, headers=headers).json()
    job = client.post(f"{tools}/skills.job_watch", json={"job_id": made["job_id"], "timeout_sec": 60}).json()
    assert job["trace_id"] == Trace.read(job["steps"][0]["stdout_tail"]).trace_id == TRACE
    client.post(f"{tools}/skills.load", json={"names": ["brief"], "session_id": "s3"})
    script = {"path": "scripts/show.sh", "skill": "brief", "session_id": "s3"}
    ran = client.post(f"{tools}/skills.run_script", json=script, headers=headers)
    assert TRACE in ran.text, ran.text


def test_a_run_is_one_trace_and_is_measured(service, archive):
    """The trace of a request is that of its answer, its task, its program, its artifact and its line of the log."""
    out, token, before = io.StringIO(), service.token(agent="boss"), service.run(service.host.upkeep.measure())
    call = {"skill_name": "public.brief", "session_id": "s1", "workdir": "session", "outputs": ["out.txt"]}
    tools, headers = "/projects/local/tools", {"traceparent": SENT, "X-Request-Id": "r1"}
    with service.client(token) as client, json_logs(out):
        files = {"scripts/show.sh": 'printf %s "$TRACEPARENT"'}
        with archive("brief", **files).open("rb") as zipped:
            client.post("/projects/local/skills:upload", files={"file": zipped})
        call["command"] = 'printf %s "$TRACEPARENT" | tee out.txt'
        ran = client.post(f"{tools}/skills.run_cmd", json=call, headers=headers)
        assert ran.json()["status"] == "succeeded", ran.text
        _programs_of_others_belong_to_it(client, headers)
        answered, inside = Trace.read(ran.headers["traceresponse"]), Trace.read(ran.json()["stdout"])
        (task,) = client.get("/projects/local/tasks?session_id=s1").json()["tasks"]
        artifact = ran.json()["created_artifacts"][0]["artifact_id"]
        views = [
            client.get(f"/projects/local/tasks/{task['task_id']}").json(),
            client.post(f"{tools}/artifacts.get", json={"artifact_id": artifact}).json(),
        ]
        service.run(service.host.upkeep.measure(before))
        rows = scraped(client)
    assert {answered.trace_id, inside.trace_id, *(each["trace_id"] for each in views)} == {TRACE}
    assert len({answered.span_id, inside.span_id, SENT[36:52]}) == 3
    (line,) = [each for each in lines_of(out) if each.get("operation") == "skills.run_cmd"]
    told = {
        name: line[name] for name in ("trace_id", "request_id", "project", "agent", "token", "code", "status", "door")
    }
    assert told == {
        "trace_id": TRACE,
        "request_id": "r1",
        "project": "local",
        "agent": "boss",
        "token": token.split("_")[1],
        "code": "ok",
        "status": 200,
        "door": "http",
    }
    assert line["duration_ms"] > 0
    engine = (("engine", views[0]["engine"]), ("status", "succeeded"))
    assert rows["kdskills_run_duration_seconds_count"] == {engine: 2}
    assert rows["kdskills_task_start_delay_seconds_count"] == rows["kdskills_task_starts_total"] == {(): 2}
    assert (rows["kdskills_task_output_bytes_total"], rows["kdskills_artifacts_bytes_total"]) == ({(): 110}, {(): 55})
    assert rows["kdskills_queue_depth"][(("state", "queued"),)] == rows["kdskills_queue_oldest_seconds"][()] == 0
    assert rows["kdskills_requests_total"][("code", "ok"), ("door", "http"), ("operation", "skills.run_cmd")] == 1
    assert rows["kdskills_workers"][()] == rows["kdskills_database_up"][()] == 1
    assert rows["kdskills_database_pool_size"][(("database", "work"),)] > 0
    assert rows["kdskills_http_traffic_bytes_total"][(("direction", "in"),)] > 100


def test_tools_of_mcp_take_a_trace_and_tell_it(service):
    """`traceparent` in `_meta` goes before the header; the result's `_meta` has a step of the same trace."""
    out, token = io.StringIO(), service.token()

    async def call(meta):
        headers = {"Authorization": f"Bearer {token}", "traceparent": SENT.replace("4bf9", "aaaa")}
        transport = partial(streamable_http_client, f"{service.url}/mcp")
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as carrier,
            Client(transport(http_client=carrier)) as client,
        ):
            return await client.call_tool("skills_list", {}, meta=meta)

    with json_logs(out):
        results = [asyncio.run(call({"traceparent": SENT})), asyncio.run(call(None))]
    steps = [Trace.read(each.meta["traceparent"]) for each in results]
    assert [step.trace_id[:4] for step in steps] == ["4bf9", "aaaa"]
    told = [line for line in lines_of(out) if line.get("operation") == "skills.list" and line["door"] == "mcp"]
    assert [line["trace_id"] for line in told] == [step.trace_id for step in steps]
    assert {(line["agent"], line["project"], line["code"]) for line in told} == {("local", "local", "ok")}


async def test_websockets_are_accounted_for():
    """One is a line of the log with its trace and id, an answer and bytes, as a request is, whether it was taken or not."""
    telemetry, out, sent = Telemetry(), io.StringIO(), []
    taken = [{"type": "websocket.accept", "headers": [(b"a", b"b")]}, {"type": "websocket.send", "text": "\u00e4"}]
    denied = [{"type": "websocket.http.response.start", "status": 401, "headers": []}]
    scope = {"type": "websocket", "path": "/services/x/1", "headers": [(b"traceparent", SENT.encode())]}

    async def receive():
        return {"type": "websocket.receive", "bytes": b"12345"}

    async def send(message):
        sent.append(message)

    with json_logs(out):
        for messages in (taken, denied, [{"type": "websocket.close"}]):

            async def app(scope, receive, send, messages=messages):
                await receive()
                for message in messages:
                    await send(message)

            await Accounted(app, Drain(), telemetry, frozenset())(dict(scope), receive, send)
    lines = lines_of(out)
    assert [(line["status"], line["method"], line["path"]) for line in lines] == [
        (status, "GET", "/services/x/1") for status in (101, 401, 403)
    ]
    assert {line["trace_id"] for line in lines} == {TRACE}
    for message, line in zip((sent[0], sent[2]), lines, strict=False):
        headers = dict(message["headers"])
        assert headers[b"x-request-id"].decode() == line["request_id"]
        assert Trace.read(headers[b"traceresponse"].decode()).trace_id == TRACE
    rows = samples(telemetry.scraped.text())
    told = rows["kdskills_http_responses_total"]
    assert told == {(("method", "GET"), ("status", status)): 1 for status in ("101", "401", "403")}
    assert rows["kdskills_http_traffic_bytes_total"] == {(("direction", "in"),): 15, (("direction", "out"),): 2}


def test_a_websocket_that_is_refused_is_told(service):
    """Without a token it is 401 over a real server, with the id that its line of the log has."""
    out = io.StringIO()
    with json_logs(out), service.client() as client:
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws{service.url.removeprefix('http')}/services/x/1", proxy=None)
        client.get("/healthz")  # the line comes after the answer, and before another one
    answer = refused.value.response
    (line,) = [line for line in lines_of(out) if line.get("path") == "/services/x/1"]
    assert (answer.status_code, line["status"], line["code"]) == (401, 401, "unauthenticated")
    assert answer.headers["x-request-id"] == line["request_id"]


HOSTILE = (
    *("", "00", SENT.upper(), SENT[:-1], f"{SENT}-more", SENT.replace("00-", "ff-", 1), f"{SENT}\u00e9".encode()),
    *(f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE}-{'0' * 16}-01", "00-" + "a" * 60_000, "'; DROP TABLE x; --"),
)


def test_hostile_traces_are_replaced(service):
    """What is no trace begins a new one, whatever it is; twice the header is none; one of a later version is understood."""
    with service.client(service.token()) as client:
        for text in HOSTILE:
            answer = client.get("/healthz", headers={"traceparent": text})
            assert TRACE not in Trace.read(answer.headers["traceresponse"]).trace_id, text
        twice = client.get("/healthz", headers=[("traceparent", SENT), ("traceparent", SENT)])
        assert Trace.read(twice.headers["traceresponse"]).trace_id != TRACE
        later = client.get("/healthz", headers={"traceparent": SENT.replace("00-", "cc-", 1) + "-what-ever-follows"})
        assert Trace.read(later.headers["traceresponse"]).trace_id == TRACE


def test_callers_choose_no_label(service):
    """However many operations, agents, projects, sessions, methods and paths a caller invents, no metric has a row of them."""
    with service.client(service.token()) as client:
        scraped(client)
        for number in range(30):
            evil = f"evil{number}"
            client.post(f"/projects/local/tools/{evil}", json={evil: evil}, headers={"X-Agent-Id": evil})
            client.post(f"/projects/{evil}/tools/skills.list", json={})
            client.request(evil.upper(), f"/{evil}?{evil}", headers={evil: evil, "X-Session-Alias": evil})
            client.post("/projects/local/tools/skills.load", json={"names": [evil], "session_id": evil})
            client.post("/projects/local/tools/skills.run_cmd", json={"skill_name": evil, "command": evil})
        answer = client.get("/metrics").text
    assert "evil" not in answer.lower()
    labels = {}
    for name, rows in samples(answer).items():
        for row in rows if name.startswith("kdskills_") else ():
            for label, value in row:
                labels.setdefault(label, set()).add(value)
    assert labels["operation"] <= set(service.host.operations)
    assert labels["door"] == {"http"}
    assert labels["method"] <= METHODS | {"other"}
    assert labels["code"] <= {"ok", "skill_not_found", "unknown_skill", "not_found"}
    assert labels.keys() <= {label for row in INSTRUMENTS.values() for label in row.labels} | {"le"}


def test_the_log_of_requests_holds_no_secret(service):
    """Tokens, arguments, variables, queries and headers of a request are nowhere in what is logged of it."""
    out, token = io.StringIO(), service.token()
    words = {name: f"{name}-5ecret-{'x' * 20}" for name in ("env", "argument", "query", "header", "stdin", "basic")}
    with json_logs(out), service.client(token) as client:
        body = {"skill_name": "public.brief", "command": words["argument"], "env": {"KEY": words["env"]}}
        client.post("/projects/local/tools/skills.run_cmd", json=body, headers={"X-Secret": words["header"]})
        client.get(f"/projects/local/tasks?session_id={words['query']}")
        client.get("/metrics", headers={"Authorization": f"Basic {words['basic']}"})
        client.post("/projects/local/tools/skills.load", json={"names": [token], "nothing": words["stdin"]})
    text = out.getvalue()
    assert token.split("_")[1] in text
    assert token not in text
    assert [name for name, word in words.items() if word in text] == []
    refused = [line for line in lines_of(out) if line.get("code") == "unauthenticated"]
    assert [(line["path"], line["status"]) for line in refused] == [("/metrics", 401)]


def test_metrics_are_told_while_the_database_is_away(service, monkeypatch):
    """A database that does not answer is a metric, not an error: that is when somebody looks at metrics."""
    with service.client(service.token()) as client:
        assert scraped(client)["kdskills_database_up"] == {(): 1}
        work = service.run(service.host.work.client.work())

        async def away(_question):
            raise DatabaseUnavailable("gone")

        monkeypatch.setattr(work.database, "read", away)
        rows = scraped(client)
    assert rows["kdskills_database_up"] == {(): 0}
    assert (("database", "service"),) in rows["kdskills_database_pool_size"]
