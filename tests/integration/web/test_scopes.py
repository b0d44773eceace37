"""Who may do what: tokens x projects x operations."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kdskills.app.identity import SCOPES, TokenLimits
from kdskills.app.operations import OPERATIONS
from kdskills.storage.database import utc_now

ELSEWHERE = sorted(name for name, operation in OPERATIONS.items() if not operation.local)
LOCAL = sorted(set(OPERATIONS) - set(ELSEWHERE))
RESOURCES = [
    ("GET", "skills", "skills:read"),
    ("GET", "skills/brief", "skills:read"),
    ("GET", "skills/brief/versions", "skills:read"),
    ("GET", "skills/brief/archive", "skills:read"),
    ("GET", "skills/brief/files/SKILL.md", "skills:read"),
    ("PATCH", "skills/brief", "skills:write"),
    ("DELETE", "skills/brief", "skills:write"),
    ("POST", "skills/brief:activate", "skills:write"),
    ("POST", "skills:upload", "skills:write"),
    ("GET", "tasks", "work:read"),
    ("GET", "jobs", "work:read"),
    ("GET", "tasks/task_1", "work:read"),
    ("GET", "jobs/job_1", "work:read"),
    ("GET", "tasks/task_1/logs", "work:read"),
    ("GET", "jobs/job_1/logs", "work:read"),
    ("GET", "tasks/task_1/events", "work:read"),
    ("GET", "jobs/job_1/events", "work:read"),
    ("GET", "turns/turn_1/events", "work:read"),
]
BODIES = {"PATCH": {"enabled": True}, "POST": {"version_hash": "sha256:0"}}


def problem(answer):
    """Return status and code of a refusal, whose shape is the one of every refusal."""
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, body["code"]


def send(client, project, name):
    """Call an operation without arguments."""
    return client.post(f"/projects/{project}/tools/{name}", json={})


def test_without_a_token_nothing_answers(service):
    """No token, no answer, whatever is asked for; health aside."""
    with service.client() as client:
        for name in OPERATIONS:
            assert problem(send(client, "local", name)) == (401, "unauthenticated")
        for method, path, _ in RESOURCES:
            found = client.request(method, f"/projects/local/{path}", json=BODIES.get(method))
            assert problem(found) == (401, "unauthenticated")
        assert problem(client.get("/openapi.json")) == (401, "unauthenticated")
        assert client.get("/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "token", ["kd", "kd_0123456789abcdef_" + "A" * 43, "Basic dTpw", "kd_" + "0" * 16 + "_" + "é" * 43, "x" * 5000]
)
def test_tokens_nobody_made(service, token):
    """A wrong token is refused like none at all."""
    with service.client() as client:
        found = client.get("/projects/local/skills", headers={"Authorization": f"Bearer {token}".encode()})
        assert problem(found) == (401, "unauthenticated")


def test_ended_tokens_open_nothing(service):
    """A revoked or expired token is refused from the next request on."""
    made, text = service.run(service.host.tokens.create("local", "a", ["skills:read"], who="test"))
    with service.client(text) as client:
        assert client.get("/projects/local/skills").status_code == 200
        service.run(service.host.tokens.revoke(made.id, who="test"))
        assert problem(client.get("/projects/local/skills")) == (401, "unauthenticated")
    late = service.token(expires_at=utc_now() - timedelta(seconds=1))
    with service.client(late) as client:
        assert problem(client.get("/projects/local/skills")) == (401, "unauthenticated")


@pytest.mark.parametrize("scope", sorted(SCOPES))
def test_a_scope_opens_what_it_is_for(service, scope):
    """Each operation is refused exactly to callers whose token lacks its scope; `admin` has all.

    What tells of every skill is for `admin` alone, whatever its scope.
    """
    opened = {name for name in ELSEWHERE if OPERATIONS[name].scope == scope and not OPERATIONS[name].sees_all}
    with service.client(service.token(scopes=[scope])) as client:
        refused = {name for name in ELSEWHERE if problem_or_none(send(client, "local", name)) == (403, "scope_missing")}
        assert refused == (set() if scope == "admin" else set(ELSEWHERE) - opened)
        for method, path, needed in RESOURCES:
            found = client.request(method, f"/projects/local/{path}", json=BODIES.get(method))
            assert (problem_or_none(found) == (403, "scope_missing")) == (scope not in {"admin", needed}), path
        for name in LOCAL:
            assert problem(send(client, "local", name)) == (403, "local_only")


def problem_or_none(answer):
    """Return status and code of a refusal, or None for an answer."""
    return None if answer.status_code < 400 else problem(answer)


def test_other_projects_read_like_none(service):
    """A token of one project finds nothing in another, whether that is there or not."""
    service.token("acme")
    with service.client(service.token("local")) as client:
        for project in ("acme", "nobody"):
            for name in OPERATIONS:
                assert problem(send(client, project, name)) == (404, "not_found")
            for method, path, _ in RESOURCES:
                found = client.request(method, f"/projects/{project}/{path}", json=BODIES.get(method))
                assert problem(found) == (404, "not_found")
            told = client.get(f"/projects/{project}/skills").json()["detail"]
            assert told == f"there is no project '{project}'"


def test_a_project_in_the_arguments_is_no_way_round(service):
    """Arguments cannot name what the path and the token do not."""
    service.token("acme")
    with service.client(service.token("local")) as client:
        for name in ("project_skills.list", "tokens.list"):
            found = client.post(f"/projects/local/tools/{name}", json={"project": "acme"})
            assert problem(found) == (404, "not_found")


def test_work_of_another_project_or_agent_is_not_found(service):
    """Ids are no keys: whoever guesses one of another project or agent finds nothing."""
    from kdskills.jobs.model import Command, Placement, Scope, TaskSpec

    spec = TaskSpec(
        scope=Scope(project="acme", agent="writer"),
        session_id=None,
        command=Command(argv=("true",), timeout_s=1),
        placement=Placement(engine="none", skill_name="public.x", version_hash="0" * 64, skills=()),
    )

    async def submit():
        work = await service.host.work.client.work()
        client = service.host.work.client
        client._spawn = None
        assert work is not None
        return await client.submit(spec)

    head = service.run(submit())
    paths = [f"tasks/{head.id}", f"tasks/{head.id}/logs", f"tasks/{head.id}/events"]
    asked = [("local", "local", ["work:read"], 404), ("acme", "other", ["work:read"], 404)]
    asked += [("acme", "writer", ["work:read"], 200), ("acme", "other", ["admin"], 200)]
    for project, agent, scopes, status in asked:
        with service.client(service.token(project, agent, scopes)) as client:
            for path in paths[:2]:
                assert client.get(f"/projects/{project}/{path}").status_code == status, (project, agent, path)
            if status == 404:
                assert problem(client.get(f"/projects/{project}/{paths[2]}")) == (404, "not_found")
                found = client.post(f"/projects/{project}/tools/skills.task_cancel", json={"task_id": head.id})
                assert found.status_code in {403, 404}


def test_allowed_tools_are_enforced_when_run(service):
    """A token with a list of tools runs those and no others, by whichever route."""
    token = service.token(allowed_tools=["project_skills.list"])
    with service.client(token) as client:
        for name in ELSEWHERE:
            expected = None if name == "project_skills.list" else (403, "tool_not_allowed")
            assert problem_or_none(send(client, "local", name)) == expected
        for method, path, _ in RESOURCES:
            found = client.request(method, f"/projects/local/{path}", json=BODIES.get(method))
            assert problem_or_none(found) == (
                None if (method, path) == ("GET", "skills") else (403, "tool_not_allowed")
            )


@pytest.mark.needs("bubblewrap")
def test_a_token_that_only_reads_runs_no_query(service):
    """With `work:read` alone a task's status is told and a query command refused, and not run; with `work:run` it runs."""
    path = "/projects/local/tools/skills.task_status"
    query = {"provider": "cmd", "query_command": "echo asked", "skill_name": "profile"}
    with service.client(service.token(scopes=["work:read"])) as client:
        assert problem(client.post(path, json=query)) == (403, "scope_missing")
        assert problem(client.post(path, json={"task_id": "task_1"})) == (404, "not_found")
    with service.client(service.token(scopes=["work:run"])) as client:
        assert problem(client.post(path, json=query)) == (403, "scope_missing")
    with service.client(service.token(scopes=["work:read", "work:run"])) as client:
        assert client.get("/projects/local/tasks").json()["tasks"] == []
        assert client.post(path, json=query).json()["query"]["stdout"] == "asked\n"


def test_an_agent_is_the_tokens_own(service):
    """A header may narrow who asks, and never widens it."""
    with service.client(service.token(agent="writer", scopes=["skills:read"])) as client:
        found = client.get("/projects/local/skills", headers={"X-Agent-Id": "editor"})
        assert problem(found) == (403, "not_yours_to_say")
        assert client.get("/projects/local/skills", headers={"X-Agent-Id": "writer"}).status_code == 200
        assert problem(client.get("/projects/local/skills", headers={"X-Agent-Id": "a b"}))[0] == 400
        assert problem(client.get("/projects/local/skills", headers={"X-Session-Alias": "a/b"}))[0] == 400
    with service.client(service.token(agent="writer", scopes=["admin"])) as client:
        assert client.get("/projects/local/skills", headers={"X-Agent-Id": "editor"}).status_code == 200


def test_a_token_has_its_own_rate_and_body(service):
    """What a token is limited to beats the service's settings, and is told with the time to wait."""
    text = service.token(limits=TokenLimits(requests_per_minute=2, body_bytes=2048))
    with service.client(text) as client:
        big = client.post("/projects/local/tools/skills.list", content=b" " * 2049)
        assert problem(big) == (413, "body_too_large")
        chunked = client.post("/projects/local/tools/skills.list", content=iter([b" " * 1500, b" " * 1500]))
        assert problem(chunked) == (413, "body_too_large")
        limited = client.get("/projects/local/skills")
        assert problem(limited) == (429, "rate_limited")
        assert int(limited.headers["retry-after"]) >= 1
    with service.client(service.token()) as client:
        assert client.get("/projects/local/skills").status_code == 200


def test_doors_under_a_path_have_the_same_tokens_and_limits(service):
    """MCP asks for the token of every other route, and its requests are counted with them."""
    with service.client(service.token(limits=TokenLimits(requests_per_minute=1))) as client:
        assert client.get("/projects/local/skills").status_code == 200
        found = client.post("/mcp", json={})
        assert (found.status_code, found.json()["error"]["code"]) == (429, "rate_limited")
    with service.client() as client:
        found = client.post("/mcp", json={})
        assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")


def test_without_auth_on_loopback_everything_is_open(settings, serve):
    """`--no-auth` asks for no token; a wrong one is refused all the same."""
    from kdskills.app import Host

    with serve(Host(settings, entry_points=False), open_on_loopback=True) as service, service.client() as client:
        assert client.get("/projects/local/skills").status_code == 200
        assert client.get("/openapi.json").status_code == 200
        found = client.get("/projects/local/skills", headers={"Authorization": "Bearer wrong"})
        assert problem(found) == (401, "unauthenticated")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", (404, "not_found")),
        ("GET", "/projects/local/nothing", (404, "not_found")),
        ("PUT", "/projects/local/skills", (405, "method_not_allowed")),
        ("POST", "/projects/local/tools/nothing", (404, "unknown_operation")),
        ("GET", "/projects/local/tools/skills.list", (405, "method_not_allowed")),
    ],
)
def test_unknown_routes_are_problems_too(service, method, path, expected):
    """There is one shape of refusal, also for what no route takes."""
    with service.client(service.token()) as client:
        assert problem(client.request(method, path)) == expected
