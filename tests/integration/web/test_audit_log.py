"""The audit log over HTTP and MCP: the address a change came from stands in its row."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client


def test_changes_over_http_tell_token_and_address(service):
    """An upload by the form, a call of a tool and a revoked token: each row names token, agent, address and request."""
    token = service.token(agent="boss")
    public_id = token.split("_")[1]
    with service.client(token) as client:
        tools = "/projects/local/tools"
        made = client.post(f"{tools}/tokens.create", json={"agent": "x", "scopes": ["skills:read"]})
        ended = client.post(f"{tools}/tokens.revoke", json={"id": made.json()["id"]})
        answer = client.post(f"{tools}/audit_log.list", json={"who": public_id}).json()
    assert [event["action"] for event in answer["events"]] == ["token.revoke", "token.create"]
    for event, sent in zip(answer["events"], (ended, made), strict=True):
        assert (event["token"], event["agent"], event["address"]) == (public_id, "boss", "127.0.0.1")
        assert event["request_id"] == sent.headers["x-request-id"]
        assert event["project"] == "local"
    assert made.json()["token"] not in str(answer)


def test_changes_over_mcp_tell_the_address(service):
    """A tool that was called by a client of MCP says where that was."""
    token = service.token(agent="boss")

    async def call():
        headers = {"Authorization": f"Bearer {token}"}
        transport = partial(streamable_http_client, f"{service.url}/mcp?profile=operator")
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as carrier,
            Client(transport(http_client=carrier)) as client,
        ):
            return await client.call_tool("tokens_create", {"agent": "x", "scopes": ["skills:read"]})

    assert not asyncio.run(call()).is_error
    with service.client(token) as client:
        found = client.post("/projects/local/tools/audit_log.list", json={"action": "token.create"}).json()
    assert (found["events"][0]["who"].split(":")[0], found["events"][0]["address"]) == ("mcp", "127.0.0.1")
