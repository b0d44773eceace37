"""What OpenAPI says of the service is true, judged by schemathesis."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kdskills.app.operations import OPERATIONS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
BOUNDED = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ROUTES = [
    ("/projects/{project}/skills:upload", "post"),
    ("/projects/{project}/skills", "get"),
    ("/projects/{project}/skills/{name}", "get"),
    ("/projects/{project}/skills/{name}", "patch"),
    ("/projects/{project}/skills/{name}", "delete"),
    ("/projects/{project}/skills/{name}:activate", "post"),
    ("/projects/{project}/skills/{name}/versions", "get"),
    ("/projects/{project}/skills/{name}/archive", "get"),
    ("/projects/{project}/skills/{name}/files/{path}", "get"),
    ("/projects/{project}/tasks", "get"),
    ("/projects/{project}/tasks/{item}", "get"),
    ("/projects/{project}/tasks/{item}/logs", "get"),
    ("/projects/{project}/tasks/{item}/events", "get"),
    ("/projects/{project}/jobs", "get"),
    ("/projects/{project}/jobs/{item}", "get"),
    ("/projects/{project}/jobs/{item}/logs", "get"),
    ("/projects/{project}/jobs/{item}/events", "get"),
    ("/projects/{project}/artifacts/{item}/content", "get"),
    ("/projects/{project}/turns/{item}/events", "get"),
    *(
        (f"/projects/{{project}}/tools/{name}", "post")
        for name, operation in sorted(OPERATIONS.items())
        if not operation.local
    ),
]


def test_every_route_is_judged(service):
    """The list this file runs over is the list of the service."""
    paths = service.app.openapi()["paths"]
    found = {(path, method) for path, item in paths.items() for method in item}
    assert sorted(found) == sorted(ROUTES)


def _judge(service, path, method, headers, project):
    """Send what schemathesis thinks of, and let it judge the answers."""
    schema = openapi.from_dict(service.app.openapi())
    operation = schema[path][method.upper()]

    @BOUNDED
    @seeded(20)
    @given(case=operation.as_strategy())
    def judged(case):
        if project is not None:
            case.path_parameters = {**(case.path_parameters or {}), "project": project}
        case.call_and_validate(base_url=service.url, headers=headers, checks=CHECKS, timeout=60)

    judged()


@pytest.mark.needs("bubblewrap")
def test_answers_are_as_documented(service, archive, subtests):
    """No answer is a 5xx, and each has a documented status, kind and shape: with a token that may do everything."""
    headers = {"Authorization": f"Bearer {service.token()}"}
    with service.client(service.token()) as client, archive("brief").open("rb") as zipped:
        assert client.post("/projects/local/skills:upload", files={"file": zipped}).status_code == 201
    for path, method in ROUTES:
        with subtests.test(path=path, method=method):
            _judge(service, path, method, headers, "local")


def test_refusals_are_as_documented(service, subtests):
    """Without a token, and in projects of others, every answer is a documented refusal."""
    for path, method in ROUTES[::5]:
        with subtests.test(path=path, method=method):
            _judge(service, path, method, {}, "local")
            _judge(service, path, method, {"Authorization": f"Bearer {service.token()}"}, None)
