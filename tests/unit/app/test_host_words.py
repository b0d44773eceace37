"""No caller elsewhere chooses its own gate, and what the gate keeps from a caller does not exist for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from nats.aio.client import Client

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, SCOPES, Identity
from kdskills.app.operations import OPERATIONS, Context
from kdskills.app.operations.calling import host_words
from kdskills.app.publication import NOT_FOUND
from kdskills.app.settings import BusSettings
from kdskills.doors.nats.gateway import Gateway
from kdskills.doors.nats.messages import identity_of, parse
from kdskills.errors import BadRequest, CallRefused, KdskillsError, NotFound

SKILLS = {
    "public/open": "description: Everybody's. OPENWORDS",
    "public/denied": "description: DENIEDWORDS",
    "public/veiled": "description: VEILEDWORDS\ndisclosure: hidden",
    "public/people": "description: PEOPLEWORDS\ndisable-model-invocation: true",
    "public/agents": "description: AGENTSWORDS\nuser-invocable: false",
    "public/gated": "description: GATEDWORDS",
    "internal/core": "description: COREWORDS",
}
SECRETS = ("DENIEDWORDS", "VEILEDWORDS", "COREWORDS", "public.denied", "public.veiled", "internal.core", "nomatch")
REFUSED = ("public.denied", "internal.core", "public.gated", "public.people", "public.veiled", "public.nothing")


@pytest.fixture
async def host(tmp_path):
    """A Host whose project has a skill of each kind that a gate tells apart."""
    for place, head in SKILLS.items():
        folder = tmp_path / "bundle" / "skills" / place
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {folder.name}\n{head}\n---\nBODY of {folder.name}\n")
    needs = tmp_path / "bundle" / "skills" / "public" / "gated" / "tools.yaml"
    needs.write_text("tools:\n  - id: web.search\n    role: look\n    why: It looks things up.\n    required: true\n")
    (tmp_path / "bundle" / "skills_descriptor.yaml").write_text(
        "agents_config:\n  bot:\n    disabled: [public.denied, nomatch]\n"
    )
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=tmp_path / "bundle")
    made = Host(settings, entry_points=False)
    yield made
    await made.storage.aclose()


def remote(*scopes: str, **facts) -> Context:
    """Return the context of a caller with a token."""
    told = {"agent": "bot", "scopes": frozenset(scopes or {"skills:read"}), "door": "http", "token": "t0"} | facts
    return Context(identity=Identity(**told))


#: Operations with an argument that is the host's; those of administrators have the view words by right.
WITH_WORDS = sorted(
    name
    for name, row in OPERATIONS.items()
    if not row.local and any(row.scope != "admin" or right != "view" for right in host_words(row).values())
)
VALUES = {
    "consumer": "another",
    "consumers": ["another"],
    "tools": ["web.search"],
    "roles": ["accountants"],
    "include_internal": True,
    "by": "code",
    "bundle": "/etc",
    "out": "/etc",
    "path": "/etc/passwd",
    "binary": "/bin/sh",
    "model": "openai:large",
    "judge": "openai:large",
    "baseline": "/etc",
    "against": "/etc/passwd",
    "workspace": "/etc",
    "executor": "bare",
}
NEEDED = {"ref": "public.open", "query": "open", "kind": "retrieval", "number": 1, "path": "SKILL.md"}


@pytest.mark.parametrize("door", ["http", "mcp", "nats"])
@pytest.mark.parametrize("name", WITH_WORDS)
async def test_the_hosts_words_are_refused_elsewhere(host, name, door):
    """Every argument by which a caller would choose its gate is refused, at every door and before anything is looked at."""
    operation = OPERATIONS[name]
    fields = operation.input.model_fields
    needed = {name: value for name, value in NEEDED.items() if name in fields and fields[name].is_required()}
    for word, right in host_words(operation).items():
        if operation.sees_all and right == "view":
            continue  # whoever may run it sees everything
        scopes = (
            ["admin"]
            if operation.scope == "admin" or right != "view"
            else ["skills:read", "skills:write", operation.scope]
        )
        given, context = {**needed, word: VALUES[word]}, remote(*scopes, door=door)
        with pytest.raises(CallRefused) as caught:
            await host.invoke(name, given, context)
        assert (caught.value.code, caught.value.details["argument"]) == ("not_yours_to_say", word)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("internal.core", {"include_internal": True}),
        ("public.people", {"by": "code"}),
        ("public.people", {"by": "user"}),
        ("public.gated", {"tools": ["web.search"]}),
        ("public.denied", {"consumer": "another"}),
    ],
)
@pytest.mark.parametrize("name", ["skills.show", "skills.why"])
async def test_no_body_is_opened_by_words(host, name, ref, words):
    """Internal, gated, denied and people's skills stay shut whatever a reader's request says."""
    with pytest.raises(CallRefused) as caught:
        await host.invoke(name, {"ref": ref, **words}, remote())
    assert caught.value.code == "not_yours_to_say"
    with pytest.raises(BadRequest) as shut:
        await host.invoke("skills.show", {"ref": ref}, remote())
    assert shut.value.code == "unknown_skill"


async def test_the_bus_has_no_words_either(host):
    """A read over the bus that chooses its gate is answered with the same refusal."""
    gateway = Gateway(host, Client())
    for words in ({"include_internal": True}, {"by": "code"}, {"tools": ["web.search"]}, {"consumer": "another"}):
        body = {"tool_call_id": "c1", "tool_name": "skills.show", "arguments": {"ref": "public.open", **words}}
        answer = await gateway._read("cg.v1.local.bot.req.tool.skills.show", json.dumps(body).encode())
        assert (answer.operation, answer.error and answer.error.code) == ("skills.show", "not_yours_to_say")


def test_the_bus_has_settings_instead_of_tokens():
    """Who starts skills over the bus, and what callers hold, is the operator's word; unsaid means models without tools."""
    address = parse("cg.v1.local.bot.req.tool.skills.show")
    plain = identity_of(address, BusSettings())
    told = identity_of(address, BusSettings(person=True, tools=("web.search",)))
    assert (plain.starter, plain.tools, plain.may("admin")) == ("model", frozenset(), False)
    assert (told.starter, told.tools) == ("user", {"web.search"})


async def test_what_stands_in_the_token_opens(host):
    """A person's token starts what people start, a holder's of a tool what needs it, and an administrator sees everything."""
    person, holder = remote(person=True), remote(tools=frozenset({"web.search"}))
    assert (await host.invoke("skills.show", {"ref": "public.people"}, person)).full_id == "public.people"
    assert (await host.invoke("skills.show", {"ref": "public.gated"}, holder)).full_id == "public.gated"
    with pytest.raises(BadRequest):
        await host.invoke("skills.show", {"ref": "public.agents"}, person)
    given = {"ref": "internal.core", "include_internal": True, "by": "code"}
    assert (await host.invoke("skills.show", given, remote("admin"))).full_id == "internal.core"
    with pytest.raises(CallRefused):
        await host.invoke("skills.show", {"ref": "public.people", "by": "model"}, person)


async def test_runtime_tools_ask_the_same_gate(host):
    """Loading, and starting commands of, a skill goes by the token's starter and tools, too."""
    for ref in ("public.people", "public.gated", "internal.core", "public.denied"):
        with pytest.raises(KdskillsError) as caught:
            await host.invoke("skills.load", {"names": [ref]}, remote())
        assert caught.value.code == "skill_not_found"
        with pytest.raises(NotFound):
            await host.invoke("skills.activate", {"skill_name": ref}, remote("work:run"))
    loaded = await host.invoke("skills.load", {"names": ["public.people"]}, remote(person=True, agent="ann"))
    assert loaded.instructions[0].body.strip() == "BODY of people"
    held = remote(tools=frozenset({"web.search"}), agent="cat")
    assert (await host.invoke("skills.load", {"names": ["public.gated"]}, held)).instructions


async def test_a_list_tells_of_nothing_refused_or_hidden(host):
    """Ids, descriptions and rules of what a caller may not have are in no answer; an administrator's has them all."""
    found = await host.invoke("skills.list", {}, remote())
    text = found.model_dump_json()
    assert [row.full_id for row in found.skills] == ["public.agents", "public.open"]
    assert [word for word in (*SECRETS, "public.people", "public.gated") if word in text] == []
    person = await host.invoke("skills.list", {}, remote(person=True))
    assert [row.full_id for row in person.skills] == ["public.open", "public.people"]
    everything = await host.invoke("skills.list", {}, remote("admin"))
    assert {row.full_id for row in everything.skills} == {place.replace("/", ".") for place in SKILLS}
    assert any("nomatch" in note.message for note in everything.diagnostics)


async def test_narrowing_a_list_tells_of_nothing_either(host):
    """No filter, state or order brings up what a caller may not have."""
    for state in ("hidden", "refused", "invalid"):
        found = await host.invoke("skills.list", {"state": state}, remote())
        assert (found.skills, found.visible) == ((), ())
        assert (await host.invoke("skills.list", {"state": state}, remote("admin"))).skills or state == "invalid"
    for words in ({"filter": "public.people"}, {"filter": "internal", "sort": "tokens"}, {"filter": "gated"}):
        assert (await host.invoke("skills.list", words, remote())).skills == ()
    (row,) = (await host.invoke("skills.list", {"filter": "OPEN", "sort": "state"}, remote())).skills
    assert (row.full_id, row.state) == ("public.open", "listed")


@pytest.mark.parametrize("name", ["skills.show", "skills.why", "skills.render"])
async def test_refused_reads_like_missing(host, name):
    """Denied, internal, gated, hidden and people's skills answer as one that nobody ever wrote."""
    said = set()
    for ref in REFUSED:
        given = {"refs": [ref]} if name == "skills.render" else {"ref": ref}
        try:
            answer = json.loads((await host.invoke(name, given, remote())).model_dump_json())
        except BadRequest as error:
            answer = error.to_json()
        said.add(json.dumps(answer).replace(ref, "REF"))
    assert len(said) == 1, said


async def test_why_tells_no_rule_elsewhere(host):
    """A granted skill is granted without the steps; the account of the machine is told each."""
    found = await host.invoke("skills.why", {"ref": "public.open"}, remote())
    assert (found.granted, found.steps, found.notes) == (True, (), ())
    told = await host.invoke("skills.why", {"ref": "public.denied", "consumer": "bot"}, Context(identity=LOCAL))
    assert (told.code, "public.denied" in (told.reason or "")) == ("denied", True)


async def test_resources_are_a_callers_own(host):
    """Skills published to MCP clients are those the caller may start, with one text for everything else."""
    model, person = remote().identity, remote(person=True).identity
    shown = {}
    for name, identity in (("model", model), ("person", person)):
        publication = await host.publication(replace(identity, door="mcp"), {})
        shown[name] = [entry.full_id for entry in publication.entries()[0]]
        for ref in ("public/denied", "internal/core", "public/veiled", "public/nothing", "public/gated"):
            with pytest.raises(NotFound) as caught:
                publication.get(f"skill://{ref}/SKILL.md")
            assert caught.value.message == NOT_FOUND
    assert shown == {"model": ["public.agents", "public.open"], "person": ["public.open", "public.people"]}


@pytest.mark.parametrize(
    ("powers", "code"),
    [
        ({"scopes": ("work:read",)}, "scope_missing"),
        ({"scopes": ("work:read", "work:run"), "allowed_tools": frozenset({"skills.task_status"})}, "tool_not_allowed"),
    ],
)
@pytest.mark.parametrize("door", ["http", "mcp", "nats"])
async def test_a_look_runs_no_command_its_caller_may_not(host, powers, code, door):
    """A status that runs a command is for callers who may run commands: scope and allowed tools are asked again."""
    caller = remote(*powers["scopes"], door=door, **{name: value for name, value in powers.items() if name != "scopes"})
    given = {"provider": "cmd", "query_command": ["true"], "skill_name": "public.open"}
    with pytest.raises(CallRefused) as caught:
        await host.invoke("skills.task_status", given, caller)
    assert caught.value.code == code


def test_reads_have_no_argument_that_runs_a_command():
    """Where an operation that is marked as a read takes a command, the arguments that belong to it are marked, too."""
    known = {
        name: set(row.input.model_fields) & {"command", "query_command", "env", "provider", "timeout_sec"}
        for name, row in OPERATIONS.items()
        if row.reads and row.input.model_fields.keys() & {"command", "query_command"}
    }
    assert {name: set(OPERATIONS[name].commands) - {"skill_name"} for name in known} == known
    assert list(known) == ["skills.task_status"]


async def test_a_quick_read_of_the_bus_runs_no_command(host):
    """What runs a command goes the way of commands, which has its effect once; a read is told so."""
    subject = "cg.v1.local.bot.req.tool.skills.task_status"
    query = {"provider": "cmd", "query_command": ["true"], "skill_name": "public.open"}
    for given, code in ((query, "not_a_read"), ({"task_id": "nothing"}, "not_found")):
        body = {"tool_call_id": "c", "tool_name": "skills.task_status", "arguments": given}
        answer = await Gateway(host, Client())._read(subject, json.dumps(body).encode())
        assert answer.error.code == code


def test_administrators_are_not_the_machine():
    """No scope lets a caller elsewhere name files or programs of the machine."""
    admin = Identity(scopes=SCOPES, token="t0")
    assert (admin.sees_all, admin.local, admin.account) == (True, False, False)
