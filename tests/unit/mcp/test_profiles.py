"""What a client of MCP is offered: by profile, bounded by its token, and nothing of the operator's without one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import mcp_types as types
import pytest
from pydantic import BaseModel

from kdskills.app import Host, Settings
from kdskills.app.authentication import Unauthenticated, of_header
from kdskills.app.identity import LOCAL, SCOPES, SCOPES_OF, Identity, TokenLimits, own_client
from kdskills.app.operations import OPERATIONS
from kdskills.app.operations.calling import HOST_WORDS
from kdskills.doors.mcp import McpHttp
from kdskills.doors.mcp.server import Tools, client_identity, command, http_app, profile_of_query, safe_name, within
from kdskills.errors import BadRequest, CallRefused, NotFound

CTX = SimpleNamespace(request_id="1", request=None)
LIST_BYTES = 32 * 1024


@pytest.fixture
async def host(tmp_path):
    """A Host with a state folder of its own."""
    made = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    yield made
    await made.storage.aclose()


def tools_of(host: Host, identity: Identity) -> Tools:
    """Return the tools of one caller."""
    return Tools(host.operations, host.invoke, lambda ctx: identity, None)


async def listed(host: Host, identity: Identity) -> types.ListToolsResult:
    """Return what a caller's client lists."""
    return await tools_of(host, identity).list(CTX, None)


async def code_of(host: Host, identity: Identity, name: str, arguments: dict[str, Any] | None = None) -> str | None:
    """Call a tool and return the code of its refusal."""
    params = types.CallToolRequestParams(name=safe_name(name), arguments=arguments or {})
    answer = await tools_of(host, identity).call(CTX, params)
    return json.loads(answer.content[0].text)["error"]["code"] if answer.is_error else None


def names(*profiles: str) -> set[str]:
    """Return the tools of profiles."""
    return {safe_name(name) for name, row in OPERATIONS.items() if row.profile in profiles}


@pytest.mark.parametrize("profile", ["skills", "author"])
async def test_a_client_without_a_token(host, profile):
    """On standard input and on loopback a client gets what its profile is for, and can call nothing of the operator's."""
    stdio = await client_identity(host, own_client(profile, "local", "local", None))
    loopback = within(await of_header(host.storage, None, open_on_loopback=True), profile)
    expected = names("skills") if profile == "skills" else names("skills", "author")
    assert {tool.name for tool in (await listed(host, stdio)).tools} == expected
    elsewhere = {safe_name(name) for name, row in OPERATIONS.items() if row.local or row.sees_all}
    assert {tool.name for tool in (await listed(host, loopback)).tools} == expected - elsewhere
    for identity in (stdio, loopback):
        assert not identity.may("admin")
        for name, row in OPERATIONS.items():
            if row.profile == "operator":
                assert await code_of(host, identity, name) in {"scope_missing", "local_only"}, name
    assert await host.tokens.list() == []


async def test_the_operators_profile_needs_an_administrators_token(host, tmp_path):
    """Neither the account on standard input, nor loopback, nor a lesser token has it; an administrator's token has."""
    for identity in (LOCAL, await of_header(host.storage, None, open_on_loopback=True), Identity(scopes=SCOPES)):
        with pytest.raises(CallRefused) as caught:
            within(identity, "operator")
        assert caught.value.code == "scope_missing"
    with pytest.raises(CallRefused):
        await client_identity(host, own_client("operator", "local", "local", None))
    _, lesser = await host.tokens.create("local", "a", sorted(SCOPES - {"admin"}), who="op")
    _, admin = await host.tokens.create("local", "a", ["admin"], allowed_tools=["tokens.list"], who="op")
    for text, works in ((lesser, False), (admin, True)):
        other = Host(Settings(state_dir=host.settings.state_dir, stdio_token=text), entry_points=False)
        try:
            identity = await client_identity(other, own_client("operator", "local", "local", None))
        except CallRefused:
            assert not works
        else:
            assert works
            assert [tool.name for tool in (await listed(other, identity)).tools] == ["tokens_list"]
            assert await code_of(other, identity, "tokens.create") == "tool_not_allowed"
        await other.storage.aclose()


async def test_a_wrong_token_is_no_token(host):
    """A token of the settings that is not known opens nothing, instead of being left out."""
    other = Host(Settings(state_dir=host.settings.state_dir, stdio_token="kd_wrong"), entry_points=False)
    with pytest.raises(Unauthenticated):
        await client_identity(other, own_client("skills", "local", "local", None))
    await other.storage.aclose()


async def test_a_profile_narrows_an_administrator(host):
    """With an administrator's token the default profile is still what a model works with; a call of another is refused."""
    admin = within(Identity(scopes=SCOPES, token="t0"), "skills")
    assert {tool.name for tool in (await listed(host, admin)).tools} == names("skills")
    assert await code_of(host, admin, "tokens.create", {"agent": "a", "scopes": ["admin"]}) == "not_in_profile"


async def test_an_address_never_widens_what_is_served(host):
    """Without a token an address names the served profile or a narrower one; what the operator did not choose is refused."""
    served = Identity(scopes=SCOPES_OF["skills"], profile="skills")
    assert within(served, "skills").profile == "skills"
    for wider in ("author", "operator"):
        with pytest.raises(CallRefused):
            within(served, wider)
    assert within(replace(served, profile="author"), "skills").profile == "skills"


async def test_an_author_stays_in_its_project(host):
    """On standard input a client without a token works on the one project it was started for, whatever its profile."""
    for project in ("own", "other"):
        await host.projects.create(project, bundle=None, who="op")
    author = await client_identity(host, own_client("author", "own", "bot", None))
    assert not author.account
    for name in ("project_skills.list", "project_skills.get", "project_skills.delete"):
        given = {"project": "other"} | ({} if name.endswith("list") else {"skill": "brief"})
        assert await code_of(host, author, name, given) == "not_found"
    assert await code_of(host, author, "project_skills.list", {"project": "own"}) is None


async def told(host: Host, identity: Identity, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Send one request over HTTP as a caller and return the answer."""

    async def authenticate(header: str | None) -> Identity:
        return identity

    app = McpHttp(host, authenticate)
    headers = {"accept": "application/json, text/event-stream"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    async with (
        app.running(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client,
    ):
        begun = await client.post(
            "/mcp", headers=headers, json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        )
        headers["mcp-session-id"] = begun.headers["mcp-session-id"]
        await client.post("/mcp", headers=headers, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        asked = {"jsonrpc": "2.0", "id": 2, "method": method, "params": params}
        answer: dict[str, Any] = (await client.post("/mcp", headers=headers, json=asked)).json()
    return answer


@pytest.mark.parametrize(
    ("powers", "code"),
    [
        ({"scopes": frozenset({"work:read"})}, "scope_missing"),
        (
            {"scopes": frozenset({"skills:read"}), "allowed_tools": frozenset({"project_skills.list"})},
            "tool_not_allowed",
        ),
        ({"scopes": frozenset({"skills:read"})}, None),
    ],
)
async def test_resources_are_bounded_like_tools(tmp_path, powers, code):
    """Skills as resources are for callers who may list, load and read skills as tools; scope and allowed tools bound both."""
    folder = tmp_path / "bundle" / "skills" / "public" / "open"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: open\ndescription: OPENWORDS\n---\nOPENWORDS\n")
    (tmp_path / "bundle" / "skills_descriptor.yaml").write_text("{}\n")
    made = Host(Settings(state_dir=tmp_path / "state", bundle=tmp_path / "bundle"), entry_points=False)
    caller, uri = Identity(agent="bot", token="t0", **powers), "skill://public/open/SKILL.md"
    for method, params in (
        ("resources/list", {}),
        ("resources/templates/list", {}),
        ("prompts/list", {}),
        ("prompts/get", {"name": "public.open"}),
        ("skills/list", {}),
        ("skills/get", {"uri": uri}),
        ("resources/directory/read", {"uri": "skill://public/open"}),
        ("resources/read", {"uri": uri}),
    ):
        answer = await told(made, caller, method, params)
        if code is None:
            assert "error" not in answer, method
        else:
            assert answer["error"]["data"]["code"] == code, method
            assert "OPENWORDS" not in json.dumps(answer)
    await made.storage.aclose()


@pytest.mark.parametrize(
    ("powers", "runs"),
    [
        ({"scopes": frozenset({"work:read"})}, False),
        ({"scopes": frozenset({"work:read", "work:run"}), "allowed_tools": frozenset({"skills.task_status"})}, False),
        ({"scopes": frozenset({"work:read", "work:run"})}, True),
    ],
)
async def test_a_tool_that_reads_runs_no_command(host, powers, runs):
    """The mark of a read is true: who may run commands gets the arguments without it, others the tool without them."""
    caller = Identity(agent="bot", token="t0", **powers)
    found = await listed(host, caller)
    (tool,) = [tool for tool in found.tools if tool.name == "skills_task_status"]
    words = {"provider", "query_command", "skill_name", "env", "timeout_sec"}
    assert tool.input_schema["properties"].keys() & words == (words if runs else set())
    assert tool.input_schema["properties"].keys() >= {"task_id", "tail_bytes"}
    assert tool.annotations.read_only_hint is not runs
    query = {"provider": "cmd", "query_command": "true", "skill_name": "public.x"}
    refused = await code_of(host, caller, "skills.task_status", query)
    if runs:
        assert refused == "no_bundle"  # past the gate: there is nothing to run here
    else:
        assert refused == ("tool_not_allowed" if "allowed_tools" in powers else "scope_missing")
    assert await code_of(host, caller, "skills.task_status", {"task_id": "nothing"}) == "not_found"


GATED = "tools:\n  - id: web.search\n    role: look\n    why: It looks things up.\n    required: true\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["gated", "open"]),
        ({"tools": ()}, ["open"]),
        ({"tools": ("web.search",)}, ["gated", "open"]),
        ({"tools": (), "profile": "author"}, ["open", "people"]),
        ({"token": {}}, ["open"]),
        ({"token": {"person": True}}, ["open", "people"]),
        ({"token": {"tools": ["web.search"]}}, ["gated", "open"]),
        ({"token": {"scopes": ["work:read"]}}, "scope_missing"),
        ({"token": {"allowed_tools": ["skills.load"]}}, "tool_not_allowed"),
    ],
)
async def test_a_preview_is_what_the_client_sees(tmp_path, given, expected):
    """`mcp.published` lists what a client with those tools, that profile or that token is told, and refuses where it is refused."""
    for name, head in (("open", ""), ("people", "disable-model-invocation: true\n"), ("gated", "")):
        folder = tmp_path / "bundle" / "skills" / "public" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: D.\n{head}---\nBody.\n")
    (tmp_path / "bundle" / "skills" / "public" / "gated" / "tools.yaml").write_text(GATED)
    (tmp_path / "bundle" / "skills_descriptor.yaml").write_text("{}\n")
    made = Host(Settings(state_dir=tmp_path / "state", bundle=tmp_path / "bundle"), entry_points=False)
    if "token" in given:
        powers = {"scopes": ["skills:read"], **given["token"]}
        token, text = await made.tokens.create("local", "bot", powers.pop("scopes"), who="test", **powers)
        asked, caller = {"token": token.id}, within(await made.tokens.authenticate(text), "skills")
    else:
        asked, profile, tools = given, given.get("profile", "skills"), given.get("tools")
        caller = await client_identity(
            made, own_client(profile, "local", "local", None if tools is None else frozenset(tools))
        )
    answer = await told(made, caller, "skills/list", {})
    if isinstance(expected, str):
        assert answer["error"]["data"]["code"] == expected
        with pytest.raises(CallRefused) as caught:
            await made.call("mcp.published", **asked)
        assert caught.value.code == expected
    else:
        uris = [skill["uri"] for skill in answer["result"]["skills"]]
        assert uris == [f"skill://public/{name}/SKILL.md" for name in expected]
        assert [row.uri for row in (await made.call("mcp.published", **asked)).published] == uris
    await made.storage.aclose()


async def test_a_preview_of_a_token_that_opens_nothing(host):
    """A token that nobody made, or that was revoked, has no client; beside one nothing else is said."""
    token, _ = await host.tokens.create("local", "bot", ["skills:read"], who="test")
    await host.tokens.revoke(token.id, who="test")
    for name in (token.id, "0123456789abcdef"):
        with pytest.raises(NotFound):
            await host.call("mcp.published", token=name)
    with pytest.raises(BadRequest):
        await host.call("mcp.published", token=token.id, agent="bot")


async def test_the_list_is_small(host):
    """What the default profile lists takes at most 32 KiB of a client's room."""
    found = await listed(host, await client_identity(host, own_client("skills", "local", "local", None)))
    size = len(found.model_dump_json(by_alias=True, exclude_none=True).encode())
    assert size <= LIST_BYTES, f"{size} bytes"
    properties = {name for tool in found.tools for name in tool.input_schema.get("properties", {})}
    assert properties & set(HOST_WORDS) == set()


async def test_schemas_are_made_once(host, monkeypatch):
    """Listing again, and calling, makes no schema anew."""
    made: list[str] = []
    real = BaseModel.model_json_schema.__func__

    def counted(cls, *args, **more):
        made.append(cls.__name__)
        return real(cls, *args, **more)

    monkeypatch.setattr(BaseModel, "model_json_schema", classmethod(counted))
    tools = tools_of(host, await client_identity(host, own_client("skills", "local", "local", None)))
    first = await tools.list(CTX, None)
    count = len(made)
    assert count == len(first.tools)
    assert [tool is again for tool, again in zip(first.tools, (await tools.list(CTX, None)).tools, strict=True)] == [
        True
    ] * count
    await tools.call(CTX, types.CallToolRequestParams(name="skills_list", arguments={}))
    assert len(made) == count


@pytest.mark.parametrize("query", [b"profile=root", b"profile=", b"profile=skills&profile=operator"])
def test_profiles_nobody_knows(query):
    """An address that names no profile, or two, is refused."""
    with pytest.raises(BadRequest) as caught:
        profile_of_query(query, "skills")
    assert caught.value.code == "profile_unknown"
    assert profile_of_query(b"x=1", "author") == "author"


async def test_over_http(host):
    """The address may name a profile; who may not have it gets 403 and the code, a profile nobody knows 400."""

    async def loopback(header: str | None) -> Identity:
        return await of_header(host.storage, header, open_on_loopback=True)

    app = McpHttp(host, loopback)
    async with (
        app.running(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        told = {}
        for query in ("", "?profile=operator", "?profile=root"):
            answer = await client.post(f"/mcp{query}", json={})
            told[query] = (answer.status_code, answer.json().get("error", {}).get("code"))
    assert told["?profile=operator"] == (403, "scope_missing")
    assert told["?profile=root"] == (400, "profile_unknown")
    assert told[""][0] not in {401, 403, 421}


async def test_a_tokens_limits_hold_over_http(host):
    """`kdskills mcp --http` counts a token's requests, and takes no longer body than the token allows."""
    app = http_app(host, "127.0.0.1", own_client("skills", "local", "local", None))
    _, few = await host.tokens.create(
        "local", "a", ["skills:read"], limits=TokenLimits(requests_per_minute=1), who="op"
    )
    _, small = await host.tokens.create("local", "b", ["skills:read"], limits=TokenLimits(body_bytes=10), who="op")
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):

        async def status(token: str) -> int:
            return (
                await client.post("/mcp", json={"long": "x" * 50}, headers={"Authorization": f"Bearer {token}"})
            ).status_code

        assert [await status(few), await status(few)][1] == 429
        assert await status(small) == 413


def test_the_command_refuses_before_it_serves(host):
    """`kdskills mcp --profile operator` without a token ends with the refusal, not with a server."""
    with pytest.raises(CallRefused):
        command(host, profile="operator")
    with pytest.raises(BadRequest):
        command(host, profile="everything")
    assert asyncio.run(host.tokens.list()) == []


def test_scopes_without_a_token():
    """No profile gives a client without a token the operator's scope."""
    assert [profile for profile, scopes in SCOPES_OF.items() if "admin" in scopes] == []
