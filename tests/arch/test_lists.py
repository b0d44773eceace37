"""Every list has pages, in the table of operations and at the doors that name arguments of their own."""

from __future__ import annotations

import pytest
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.operations import OPERATIONS

WHOLE = {
    "plugins": "what is installed beside this program",
    "mcp.published": "what one server shows: as long as its catalog",
}
"""Lists without pages, and why."""

LISTS = sorted(name for name, row in OPERATIONS.items() if (row.summary or "").startswith("List "))


def test_the_lists_are_found() -> None:
    """The rule below looks at lists, and nothing is excused that is no list."""
    assert {"tasks.list", "jobs.list", "projects.list", "project_skills.list", "project_skills.versions"} < set(LISTS)
    assert WHOLE.keys() <= set(LISTS)


@pytest.mark.parametrize("name", [name for name in LISTS if name not in WHOLE])
def test_a_list_has_pages(name: str) -> None:
    """It takes `limit` and `cursor`, and answers with `next_cursor`."""
    row = OPERATIONS[name]
    assert {"limit", "cursor"} <= row.input.model_fields.keys()
    assert "next_cursor" in row.output.model_fields


def test_pages_through_http(tmp_path) -> None:
    """Every route that answers with a page takes `limit` and `cursor`."""
    from kdskills.doors.web.application import build_app

    schema = build_app(Host(Settings(state_dir=tmp_path), entry_points=False)).openapi()
    paged = {name for name, model in schema["components"]["schemas"].items() if "next_cursor" in model["properties"]}
    seen = 0
    for path, methods in schema["paths"].items():
        answer = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        told = answer.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        if told in paged:
            seen += 1
            assert {"limit", "cursor"} <= {each["name"] for each in methods["get"]["parameters"]}, path
    assert seen >= 4


@pytest.mark.parametrize("words", [("jobs", "list"), ("token", "list")])
def test_pages_on_the_command_line(words) -> None:
    """Commands that list take `--limit` and `--cursor`."""
    from kdskills.doors.cli.main import build_cli

    command = get_command(build_cli(Host(Settings(), entry_points=False)))
    for word in words:
        command = command.commands[word]
    assert {"limit", "cursor"} <= {each.name for each in command.params}
