"""Hostile text over HTTP: refused with a code, and never kept."""

import json

import pytest

HALF = "a\ud800"


def post(client, operation, arguments):
    """Send arguments as JSON with escapes, as a browser sends half a character."""
    body = json.dumps(arguments).encode()
    return client.post(f"/projects/local/tools/{operation}", content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    "arguments",
    [
        {"agent": HALF, "scopes": ["admin"]},
        {"agent": "a", "scopes": [HALF]},
        {"agent": "a", "scopes": ["admin"], "label": HALF},
        {"agent": "a", "scopes": ["admin"], "label": "a\0"},
        {"agent": "a", "scopes": ["admin"], "allowed_tools": [HALF]},
        {"agent": "a", "scopes": ["admin"], HALF: 1},
    ],
)
def test_half_a_character_is_a_wrong_call(service, arguments):
    """Half a character anywhere in the arguments is 400, and tokens can be listed as before."""
    with service.client(service.token()) as client:
        found = post(client, "tokens.create", arguments)
        assert (found.status_code, found.json()["code"]) == (400, "bad_request")
        listed = post(client, "tokens.list", {})
        assert (listed.status_code, len(listed.json()["tokens"])) == (200, 1)


def test_tools_of_a_token_are_operations(service):
    """A token for a tool that is none is refused with the nearest name."""
    with service.client(service.token()) as client:
        wrong = {"agent": "a", "scopes": ["work:run"], "allowed_tools": ["skills.run_cmd", "skill.list"]}
        found = post(client, "tokens.create", wrong).json()
        assert (found["code"], found["details"]) == ("tool_unknown", {"unknown": ["skill.list"]})
        assert "skills.list" in found["detail"]


def test_what_was_kept_before_can_be_listed(service):
    """A row that holds half a character, from a version that kept it, breaks no list."""
    service.token(allowed_tools=[HALF])
    with service.client(service.token()) as client:
        found = post(client, "tokens.list", {})
        assert (
            found.status_code,
            [row["allowed_tools"] for row in found.json()["tokens"] if row["allowed_tools"]],
        ) == (
            200,
            [["a\ufffd"]],
        )


@pytest.mark.parametrize("path", ["skills/a%00", "skills/a%00/archive", "skills/a%00/files/x", "tasks/a%00/logs"])
def test_nul_in_a_path_is_a_wrong_call(service, path):
    """NUL in a part of the address is 400."""
    with service.client(service.token()) as client:
        found = client.get(f"/projects/local/{path}")
        assert (found.status_code, found.json()["code"]) == (400, "bad_request")
