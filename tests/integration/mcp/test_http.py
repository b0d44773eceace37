"""What stands around MCP over HTTP: tokens, statuses, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kdskills.app import Host
from kdskills.app.authentication import RateLimited, Unauthenticated
from kdskills.doors.mcp import McpHttp
from kdskills.errors import BadRequest
from kdskills.storage.database import DatabaseUnavailable

VERSION = "2026-07-28"


def post(url: str, method: str, **params: Any) -> httpx.Response:
    """Ask as a client of the newer protocol does, without the SDK's help."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": VERSION,
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    headers = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": VERSION,
        "Mcp-Method": method,
    }
    if method == "resources/read":
        headers["Mcp-Name"] = params["uri"]
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=60)


@pytest.mark.parametrize("method", ["skills/get", "resources/read", "resources/directory/read"])
def test_unknown_uris_are_400(bundle, tmp_path, serve, method):
    """What is not there, refused or hostile is HTTP 400 with -32602 and one text, whatever it is."""
    bundle.skill("public/tidy")
    bundle.skill("internal/core")
    said = set()
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        assert post(url, "skills/get", uri="skill://public/tidy/SKILL.md").status_code == 200
        for uri in (
            "skill://public/none/SKILL.md",
            "skill://internal/core/SKILL.md",
            "skill://public/tidy/../../internal/core/SKILL.md",
            "skill://public/tidy/%2e%2e/tidy/SKILL.md",
            "skill://public%2ftidy/SKILL.md",
            "file:///etc/passwd",
        ):
            answer = post(url, method, uri=uri)
            error = answer.json()["error"]
            said.add((answer.status_code, error["code"], error["message"]))
    assert len(said) == 1
    assert next(iter(said))[:2] == (400, -32602)


def test_bytes_that_are_no_text_are_a_blob(bundle, tmp_path, serve):
    """Text is given as text, everything else in base64, both as listed."""
    bundle.skill("public/tidy", data=b"\x00\xff", note_txt="grüße\r\n".encode())
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        blob = post(url, "resources/read", uri="skill://public/tidy/data").json()["result"]["contents"][0]
        text = post(url, "resources/read", uri="skill://public/tidy/note_txt").json()["result"]["contents"][0]
    assert (blob["blob"], text["text"]) == ("AP8=", "grüße\r\n")


async def test_without_a_token_nothing_is_read(bundle, tmp_path):
    """Who is not known gets 401 and our error, before the body is looked at."""

    async def nobody(header: str | None) -> Any:
        raise Unauthenticated("this token is not known")

    app = McpHttp(Host(bundle.settings(tmp_path), entry_points=False), nobody)
    async with (
        app.running(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        answer = await client.post("/mcp", content=b"\x00 no json")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "unauthenticated"


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [(DatabaseUnavailable("away"), 503, "5"), (RateLimited("wait", retry_after=7), 429, "7")],
)
async def test_good_credentials_are_kept(bundle, tmp_path, error, status, retry):
    """Who is not at fault is told when to come again, as at the other doors, and asked for no other token."""

    async def refuse(header: str | None) -> Any:
        raise error

    app = McpHttp(Host(bundle.settings(tmp_path), entry_points=False), refuse)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post("/mcp", content=b"{}")
    assert (answer.status_code, answer.headers["retry-after"]) == (status, retry)
    assert "www-authenticate" not in answer.headers
    assert answer.json()["error"]["code"] == error.code


def test_roots_nobody_opens(bundle, tmp_path: Path):
    """A root of the settings that no plugin opens is an error that names it, not a missing root."""
    for uri, code in (("git+https://host/x#a", "skill_root_unknown"), ("mcp+http://host/x#a", "mcp_root_invalid")):
        host = Host(bundle.settings(tmp_path, skill_roots=(uri,)), entry_points=False)
        with pytest.raises(BadRequest) as caught:
            host.subsystem(None)
        assert caught.value.code == code
