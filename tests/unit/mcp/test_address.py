"""URIs of MCP roots."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdskills.builtin.roots.mcp import kdskills_open_skill_root
from kdskills.builtin.roots.mcp.wire import McpAddress, parse_address
from kdskills.errors import BadRequest


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("mcp+https://host.example/mcp?x=1#acme", McpAddress("acme", url="https://host.example/mcp?x=1")),
        ("mcp+http://127.0.0.1:8/mcp#a-1", McpAddress("a-1", url="http://127.0.0.1:8/mcp")),
        ("mcp+http://[::1]:8/#a", McpAddress("a", url="http://[::1]:8/")),
        ("mcp+http://localhost/#a", McpAddress("a", url="http://localhost/")),
        ("mcp+stdio:npx -y 'a server'#b", McpAddress("b", command=("npx", "-y", "a server"))),
        ("mcp+stdio:npx%20-y#b", McpAddress("b", command=("npx", "-y"))),
        ("mcp+https://host/mcp#a;allow_dynamic", McpAddress("a", url="https://host/mcp", allow_dynamic=True)),
    ],
)
def test_addresses(uri, expected):
    """Every form the page names is read as it says."""
    assert parse_address(uri) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "mcp+https://host/mcp",
        "mcp+https://host/mcp#",
        "mcp+https://host/mcp#Acme",
        "mcp+https://host/mcp#../up",
        "mcp+https://host/mcp#a.b",
        "mcp+https://host/mcp#-a",
        "mcp+https://host/mcp#" + "a" * 33,
        "mcp+https://host/mcp#a;trust_all",
        "mcp+https:///mcp#a",
        "mcp+https://user:secret@host/mcp#a",
        "mcp+https://host:port/mcp#a",
        "mcp+http://host.example/mcp#a",
        "mcp+http://127.0.0.1.example/mcp#a",
        "mcp+http://0.0.0.0/mcp#a",
        "mcp+stdio:#a",
        "mcp+stdio:'open#a",
        "mcp+stdio:a%00b#a",
    ],
)
def test_refused(uri):
    """What is no address, or would carry text in the clear over a network, is refused without its password."""
    with pytest.raises(BadRequest) as caught:
        parse_address(uri)
    assert caught.value.code == "mcp_root_invalid"
    assert "secret" not in caught.value.message


def test_other_schemes_are_left_alone(tmp_path):
    """The hook answers for its own schemes only."""
    assert kdskills_open_skill_root("git+https://host/x#a", tmp_path) is None


def test_opening_asks_nobody(tmp_path: Path):
    """A root is opened without a connection, in a namespace of its own that no local name can take."""
    root = kdskills_open_skill_root("mcp+https://host.invalid/mcp#acme", tmp_path)
    assert root is not None
    assert (root.uri, root.namespace, root.kind) == ("mcp://acme", "mcp-acme", "user")
    assert list(tmp_path.iterdir()) == []
