"""What a person at an MCP client may choose: skills as prompts, loaded when they are chosen, and templates of resources."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.shared.exceptions import MCPError

from kdskills.app import Host, Settings
from kdskills.app.identity import Identity, own_client
from kdskills.doors.mcp import build_server
from kdskills.hooks import hookimpl
from kdskills.session.approval import AccessRequest, Denial

MODEL = own_client("skills", "local", "local", None)
PERSON = Identity(agent="bot", token="t0", scopes=MODEL.scopes, tools=None, person=True, profile="skills")
GREET = "arguments:\n  - name: who\n    description: Whom to greet.\n  - name: tone\n    default: kindly\n"


class DenyWords:
    """A policy that refuses one skill."""

    @hookimpl
    def kdskills_deny(self, request: AccessRequest) -> Denial | None:
        if request.skill == "public.broken":
            raise RuntimeError("no such table: rules")
        if request.skill == "public.unloaded":
            return Denial("not at all", "not at all") if request.kind == "load" else None
        if request.skill == "public.partial" and request.kind == "read":
            return Denial("not this file", "not this file") if request.path == "guide.md" else None
        return Denial("not today", "not today") if request.skill == "public.denied" else None


def put(bundle: Path, name: str, head: str = "", body: str = "Body.") -> None:
    folder = bundle / "skills" / "public" / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}.\n{head}---\n{body}\n")
    (folder / "guide.md").write_text(f"Guide of {name}.")


@pytest.fixture
async def host(tmp_path):
    """A Host over skills of every kind that matters here."""
    bundle = tmp_path / "bundle"
    put(bundle, "greet", GREET, "Greet $who {{ tone }}, for \\$5 and $tone.")
    put(bundle, "hint", "argument-hint: '[file]'\n", "Look at $ARGUMENTS.")
    put(bundle, "people", "disable-model-invocation: true\n")
    put(bundle, "agents", "user-invocable: false\n")
    put(bundle, "hidden", "disclosure: hidden\n")
    put(bundle, "needy", "imports: [agents]\n", "Needs it.")
    put(bundle, "broken", "user-invocable: false\n")
    put(bundle, "partial", "user-invocable: false\n")
    put(bundle, "unloaded", "user-invocable: false\n")
    put(bundle, "denied")
    put(bundle, "large", "arguments: [x]\n", "$x" * 5_000)
    (bundle / "skills_descriptor.yaml").write_text("{}\n")
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=bundle)
    made = Host(settings, plugins=[DenyWords()], entry_points=False)
    yield made
    await made.storage.aclose()


@asynccontextmanager
async def connected(host: Host, identity: Identity) -> AsyncIterator[Client]:
    """Give the client of one caller."""
    async with Client(build_server(host, lambda ctx: identity, session="s"), cache=None) as client:
        yield client


async def refused(client: Client, name: str, **arguments: str) -> tuple[str, str | None]:
    """Return message and code of a prompt that is not given."""
    with pytest.raises(MCPError) as caught:
        await client.get_prompt(name, arguments)
    assert caught.value.error.code == -32602
    return caught.value.error.message, (caught.value.error.data or {}).get("code")


async def test_prompts_are_the_skills_a_person_may_start(host):
    """Each listed skill that people may start is a prompt with its arguments; a caller sees none it may not start itself."""
    async with connected(host, MODEL) as client:
        prompts = {prompt.name: prompt for prompt in (await client.list_prompts()).prompts}
    assert list(prompts) == [f"public.{name}" for name in ("denied", "greet", "hint", "large", "needy")]
    greet = prompts["public.greet"]
    assert (greet.title, greet.description) == ("greet", "About greet.")
    assert [(each.name, each.description, bool(each.required)) for each in greet.arguments] == [
        ("who", "Whom to greet.", False),
        ("tone", "", False),
    ]
    assert [(each.name, each.description) for each in prompts["public.hint"].arguments] == [("ARGUMENTS", "[file]")]
    async with connected(host, PERSON) as client:
        assert "public.people" in {prompt.name for prompt in (await client.list_prompts()).prompts}
        assert (await client.get_prompt("public.people", {})).messages[0].content.text == "Body."


async def test_a_chosen_prompt_is_a_loaded_skill(host):
    """Its text has the arguments filled in and comes as the person's words; its files can be read, beside those loaded before."""
    async with connected(host, MODEL) as client:
        assert (await client.call_tool("skills_load", {"names": ["hint"]})).is_error is False
        answer = await client.get_prompt("public.greet", {"who": "$tone {{ who }}"})
        (message,) = answer.messages
        assert (message.role, message.content.text) == ("user", "Greet $tone {{ who }} kindly, for $5 and kindly.")
        for skill in ("greet", "hint"):
            read = await client.call_tool("skills_read", {"skill": skill, "path": "guide.md"})
            assert f"Guide of {skill}." in read.content[0].text


async def test_imports_come_before_the_skill(host):
    """What a skill imports is part of its prompt, although no person may start that by itself."""
    async with connected(host, MODEL) as client:
        assert (await client.get_prompt("public.needy", {})).messages[0].content.text == "Body.\n\nNeeds it."
        await refused(client, "public.agents")


async def test_prompts_that_are_not_given(host):
    """Unknown and refused names are one answer; wrong arguments and a plugin's refusal are told, and nothing is loaded."""
    async with connected(host, MODEL) as client:
        for name in ("public.none", "public.people", "public.agents", "public.hidden", "", "../x"):
            assert await refused(client, name) == ("there is no such skill, file or directory for this caller", None)
        assert (await refused(client, "public.greet", whom="x"))[0] == "public.greet has no argument 'whom'"
        message, code = await refused(client, "public.large", x="y" * 1_000)
        assert (code, "more than 1,048,576 characters" in message) == ("bad_request", True)
        assert (await refused(client, "public.denied"))[1] == "skill_denied"
        read = await client.call_tool("skills_read", {"path": "guide.md"})
        assert "no_active_skills" in read.content[0].text


async def test_templates_of_resources(host):
    """Clients are told how the names of skills and their files are made; what is made so can be read."""
    async with connected(host, MODEL) as client:
        made = [each.uri_template for each in (await client.list_resource_templates()).resource_templates]
        assert made == ["skill://{namespace}/{skill}/SKILL.md", "skill://{namespace}/{skill}/{+path}"]
        uri = made[1].replace("{namespace}", "public").replace("{skill}", "greet").replace("{+path}", "guide.md")
        contents: Any = (await client.read_resource(uri)).contents
        assert contents[0].text == "Guide of greet."


@pytest.mark.parametrize(
    ("skill", "path", "given"),
    [
        ("denied", "SKILL.md", False),
        ("denied", "guide.md", False),
        ("broken", "SKILL.md", False),
        ("broken", "guide.md", False),
        ("unloaded", "SKILL.md", False),
        ("unloaded", "guide.md", False),
        ("partial", "SKILL.md", True),
        ("partial", "guide.md", False),
    ],
)
async def test_a_policy_holds_for_resources(host, skill, path, given):
    """What a plugin refuses to load or read is no resource either, nor what a failing plugin could not judge; one text for all."""
    async with connected(host, MODEL) as client:
        uri = f"skill://public/{skill}/{path}"
        if given:
            assert (await client.read_resource(uri)).contents
        else:
            with pytest.raises(MCPError) as caught:
                await client.read_resource(uri)
            assert caught.value.error.message == "there is no such skill, file or directory for this caller"
