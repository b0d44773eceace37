"""The routes of the service: looking one up is trying all of them, only quicker."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from kdskills.app import Host, Settings
from kdskills.doors.web import build_app
from kdskills.doors.web.application import PREFIX, RoutesByPath

METHODS = ["GET", "POST", "PATCH", "DELETE", "HEAD"]


@pytest.fixture
def routes(tmp_path: Path) -> list:
    """Return the routes of a service, the index of them first."""
    return build_app(Host(Settings(state_dir=tmp_path), entry_points=False)).router.routes


def scope_of(path: str, method: str, kind: str = "http") -> dict:
    """Return what a server tells of a request."""
    return {"type": kind, "path": path, "root_path": "", "method": method, "headers": []}


def tried(routes: list, scope: dict) -> tuple[Match, object]:
    """Return what trying each of *routes* in turn finds: whoever takes the request, or else would with another method."""
    answers = [(route.matches(dict(scope))[0], route) for route in routes]
    for wanted in (Match.FULL, Match.PARTIAL):
        for match, route in answers:
            if match == wanted:
                return match, route
    return Match.NONE, None


def test_a_route_is_the_one_that_trying_all_finds(routes: list) -> None:
    """Every path without a parameter is looked up, to the same end for every method, in any project."""
    index, *others = routes
    assert isinstance(index, RoutesByPath)
    paths = {route.path for route in others if isinstance(route, APIRoute) and route.path.startswith(PREFIX)}
    plain = {path.replace("{project}", "acme") for path in paths if "{" not in path.removeprefix(PREFIX)}
    assert {"/projects/acme/tools/skills.run_cmd_async", "/projects/acme/skills", "/projects/acme/tasks"} <= plain
    for path in plain:
        for method in METHODS:
            match, child = index.matches(scope_of(path, method))
            assert (match, child["route"]) == tried(others, scope_of(path, method))
            assert child["path_params"] == {"project": "acme"}


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/projects/acme/tools/nothing.here", "/projects/acme/tasks/task_1", "/projects/acme/skills/", "/skills",
     "/else/acme/skills", "/projects/acme/x/skills"],
)  # fmt: skip
def test_other_paths_are_left_to_the_routes_behind(routes: list, path: str) -> None:
    """What the index does not know, and what is no request, it leaves alone."""
    for method in METHODS:
        assert routes[0].matches(scope_of(path, method)) == (Match.NONE, {})
    assert routes[0].matches(scope_of("/projects/acme/skills", "GET", "websocket")) == (Match.NONE, {})
