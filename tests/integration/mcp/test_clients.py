"""The SDK's own client over HTTP and over stdio, in both eras of the protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter

from kdskills.app import Host
from kdskills.builtin.roots.mcp.wire import SdkServer, ServerFailed, parse_address

ERAS = ("legacy", "auto")


async def ask(client: Client, method: str, **params: Any) -> dict[str, Any]:
    request = types.Request[dict[str, Any], str](method=method, params=params)
    return await client.session.send_request(request, TypeAdapter(dict[str, Any]))


def stdio(tmp_path: Path, bundle: Path) -> StdioServerParameters:
    env = {"KDSKILLS_BUNDLE": str(bundle), "KDSKILLS_STATE_DIR": str(tmp_path / "state"), "PATH": os.environ["PATH"]}
    return StdioServerParameters(command=str(Path(sys.executable).with_name("kdskills")), args=["mcp"], env=env)


@asynccontextmanager
async def connected(where: str, era: str, bundle, tmp_path, serve):
    """Give a client of the server, over HTTP or stdio."""
    if where == "stdio":
        async with Client(stdio(tmp_path, bundle.root), mode=era, cache=None) as client:
            yield client
        return
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        async with Client(url, mode=era, cache=None) as client:
            yield client


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("where", ["http", "stdio"])
async def test_tools_and_skills(where, era, bundle, tmp_path, serve):
    """What a model works with is a tool with a safe name; a skill is listed, loaded, read; failures are results."""
    bundle.skill("public/tidy", body="Tidy up.", guide=b"the guide")
    async with connected(where, era, bundle, tmp_path, serve) as client:
        offered = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"skills_list", "skills_load", "skills_read"} <= offered.keys()
        assert all(name.replace("_", "").replace("-", "").isalnum() and len(name) <= 64 for name in offered)
        rows = Host(entry_points=False).operations.values()
        expected = {operation.name.replace(".", "_") for operation in rows if operation.profile == "skills"}
        assert offered.keys() == expected
        session = {} if where == "stdio" else {"session_id": "mine"}
        loaded = await client.call_tool("skills_load", {"names": ["tidy"], **session})
        assert not loaded.is_error, loaded
        read = await client.call_tool("skills_read", {"path": "guide", **session})
        assert "the guide" in read.content[0].text
        missing = await client.call_tool("skills_read", {"path": "none", **session})
        assert missing.is_error
        assert json.loads(missing.content[0].text)["error"]["code"] == "resource_not_found"
        with pytest.raises(MCPError):
            await client.call_tool("no_such_tool", {})
        listed = await ask(client, "skills/list")
        assert [row["uri"] for row in listed["skills"]] == ["skill://public/tidy/SKILL.md"]


@pytest.mark.parametrize("era", ERAS)
async def test_pages_and_refusals(era, bundle, tmp_path, serve):
    """201 skills come in three pages; bad cursors and unknown uris are one text with -32602."""
    for number in range(201):
        bundle.skill(f"public/skill-{number:03}")
    async with connected("http", era, bundle, tmp_path, serve) as client:
        seen: list[str] = []
        sizes: list[int] = []
        params: dict[str, Any] = {}
        while True:
            page = await ask(client, "skills/list", **params)
            sizes.append(len(page["skills"]))
            seen += [row["uri"] for row in page["skills"]]
            if "nextCursor" not in page:
                break
            params = {"cursor": page["nextCursor"]}
        assert sizes == [100, 100, 1]
        assert seen == [f"skill://public/skill-{number:03}/SKILL.md" for number in range(201)]
        assert (page["ttlMs"], page["cacheScope"], page["resultType"]) == (0, "private", "complete")
        wrong = [("skills/list", {"cursor": cursor}) for cursor in ("x", "", "AAAA", "ünï", "Li4vLi4=")]
        uris = ("skill://public/none/SKILL.md", "skill://public/skill-000/%2e%2e/SKILL.md", "file:///etc/passwd", "")
        wrong += [("skills/get", {"uri": uri}) for uri in uris]
        wrong += [("resources/directory/read", {"uri": uri}) for uri in uris]
        said = set()
        for method, more in wrong:
            with pytest.raises(MCPError) as caught:
                await ask(client, method, **more)
            said.add((caught.value.error.code, caught.value.error.message))
        assert {code for code, _ in said} == {-32602}
        assert len(said) == 1


async def test_sessions_belong_to_connections(bundle, tmp_path, serve):
    """Over stdio each connection has a session of its own: what one loads is not active for another."""
    bundle.skill("public/tidy", guide=b"x")
    async with connected("stdio", "auto", bundle, tmp_path, serve) as one:
        assert not (await one.call_tool("skills_load", {"names": ["tidy"]})).is_error
        async with connected("stdio", "auto", bundle, tmp_path, serve) as two:
            answer = await two.call_tool("skills_read", {"path": "guide"})
            assert json.loads(answer.content[0].text)["error"]["code"] == "no_active_skills"
        assert not (await one.call_tool("skills_read", {"path": "guide"})).is_error


async def test_calls_sent_at_once_are_answered_in_order(bundle, tmp_path, serve):
    """A client that sends a read together with the load it needs gets the file, and what comes behind an unload is refused."""
    bundle.skill("public/tidy", guide=b"the guide")
    calls = [("skills_load", {"names": ["tidy"]}), ("skills_read", {"path": "guide"})]
    calls += [("skills_unload", {"all": True}), ("skills_read", {"path": "guide"})]
    async with connected("stdio", "auto", bundle, tmp_path, serve) as client:
        answers = await asyncio.gather(*(client.call_tool(name, given) for name, given in calls))
    assert [answer.is_error for answer in answers] == [False, False, False, True]
    assert "the guide" in answers[1].content[0].text


def test_other_hosts_and_origins_are_refused(bundle, tmp_path, serve):
    """A page in a browser reaches nothing: foreign Host and Origin headers are refused before anything is read."""
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        accept = {"Accept": "application/json, text/event-stream"}
        for extra in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
            answer = httpx.post(url, json=body, headers={**accept, **extra}, trust_env=False)
            assert answer.status_code in {403, 421}


def test_why_a_skill_is_missing_stands_in_the_log(bundle, tmp_path, serve, caplog):
    """A skill that cannot be published is told once."""
    bundle.skill("public/tidy", frontmatter="name: tidy\nid: other\ndescription: d")
    with caplog.at_level(logging.WARNING), serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        server = SdkServer(parse_address(f"mcp+{url}#x"))
        assert (server.entries(), server.entries()) == ([], [])
    assert sum("mcp_unpublishable" in record.getMessage() for record in caplog.records) == 1


def test_our_root_reads_our_server(bundle, tmp_path, serve):
    """The client and the server agree: a Host with the root in its settings has the skills of the other."""
    bundle.skill("public/tidy", body="Tidy up.", guide=b"\x00\xff")
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        other = Host(
            bundle.settings(tmp_path / "other", skill_roots=(f"mcp+{url}#acme",)), entry_points=False
        )  # fmt: skip
        subsystem = other.subsystem(None)
        skill = subsystem.registry["mcp-acme.tidy"]
        assert skill.body == "Tidy up."
        assert skill.content.fetch("guide", 100) == b"\x00\xff"
        assert other.subsystem(None).registry["mcp-acme.tidy"] is skill


def test_a_root_over_stdio(bundle, tmp_path):
    """A program is started for a question and gone after it; one that is no server is a failure with its label."""
    bundle.skill("public/tidy")
    program = Path(sys.executable).with_name("kdskills")
    command = f"env KDSKILLS_BUNDLE={bundle.root} KDSKILLS_STATE_DIR={tmp_path / 'state'} {program} mcp"
    rows = SdkServer(parse_address(f"mcp+stdio:{command}#local")).entries()
    assert [row["uri"] for row in rows] == ["skill://public/tidy/SKILL.md"]
    for broken in ("false", "/no/such/program"):
        with pytest.raises(ServerFailed) as caught:
            SdkServer(parse_address(f"mcp+stdio:{broken}#broken"), timeout_s=20).entries()
        assert "broken" in caught.value.message


@pytest.mark.parametrize("client", ["claude-code", "claude-desktop", "codex", "cursor", "gemini", "vscode", "zed"])
async def test_what_is_printed_for_a_client_starts_a_server(client, bundle, tmp_path):
    """The snippet is of the client's form, and its command, words and variables serve the bundle as asked, from any folder."""
    bundle.skill("public/tidy")
    program = Path(sys.executable).with_name("kdskills")
    state = {"KDSKILLS_STATE_DIR": str(tmp_path / "state"), "PATH": os.environ["PATH"]}
    words = [program, "mcp", "--tools", "", "--profile", "skills", "config", client]
    env = {**state, "KDSKILLS_BUNDLE": bundle.root.name}
    run = await asyncio.to_thread(
        subprocess.run, words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    snippet = tomllib.loads(run.stdout) if client == "codex" else json.loads(run.stdout)
    (servers,) = snippet.values()
    entry = servers["kdskills"]
    assert entry["args"] == ["mcp", "--tools", ""]
    assert run.stderr.startswith("for ")
    server = StdioServerParameters(command=entry["command"], args=entry["args"], env={**state, **entry["env"]}, cwd="/")
    async with Client(server, cache=None) as connection:
        assert [prompt.name for prompt in (await connection.list_prompts()).prompts] == ["public.tidy"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["config", "emacs"], "client_unknown"),
        (["--http", "127.0.0.1:1", "config", "zed"], "usage"),
        (["--profile", "root", "config", "zed"], "profile_unknown"),
    ],
)
def test_snippets_that_would_not_work_are_not_printed(words, code):
    """An unknown client or profile, and an address where a program is to be started, are wrong calls."""
    program = Path(sys.executable).with_name("kdskills")
    run = subprocess.run([program, "mcp", *words], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr.partition(":")[0]) == (2, "", code)
