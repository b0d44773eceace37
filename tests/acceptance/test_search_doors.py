"""Search through every door, as a caller of less rights: the same answers, and no trace of what a consumer may not have."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from kdskills.app import Host, Settings

pytestmark = [pytest.mark.needs("nats"), pytest.mark.timeout(300)]

DOORS = ("http", "mcp", "nats")
RULES = "agents_config:\n  writer: {disabled: [secret.denied-*]}\n  reader: {}\n"
QUESTIONS = [
    {"query": "minutes of a meeting"},
    {"query": "scanned bills", "limit": 1},
    {"query": "trains", "offset": 1},
    {"query": "pull request", "namespace": "office"},
    {"query": "page\0of minutes"},
    {"query": 'minutes NEAR/2 ("meeting" OR trai*) AND NOT {name}: -- ; DROP TABLE term'},
    {"query": "minutes " * 90_000},
    {"query": ""},
    {"query": "zyzzyva"},
]
HALF = "a\ud800"
REFUSED = [
    ({}, "bad_request"),
    ({"query": "x", "limit": 0}, "bad_request"),
    ({"query": "x", "limit": 101}, "bad_request"),
    ({"query": "x", "offset": -1}, "bad_request"),
    ({"query": "x", "offset": 10**7}, "bad_request"),
    ({"query": "x", "limit": "many"}, "bad_request"),
    ({"query": "x", "namespace": "a\0"}, "bad_request"),
    ({"query": HALF}, "bad_request"),
    ({"query": 1}, "bad_request"),
    ({"query": "x", "consumer": "reader"}, "not_yours_to_say"),
    ({"query": "x", "tools": ["io.save"]}, "not_yours_to_say"),
    ({"query": "x", "include_internal": True}, "not_yours_to_say"),
    ({"query": "x", "bundle": "/etc"}, "not_yours_to_say"),
]


@pytest.fixture
def doors() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The doors of the scenario that goes through every one, the bus among them."""
    modules = []
    for name in ("test_every_door", "test_every_door_nats"):
        spec = importlib.util.spec_from_file_location(f"search_{name}", Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        sys.modules[spec.name] = modules[-1]
        spec.loader.exec_module(modules[-1])
    yield modules[0], modules[1]
    for module in modules:
        del sys.modules[module.__name__]


@pytest.fixture(autouse=True)
def channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bus be the agent `writer`, who may read."""
    monkeypatch.setenv("KDSKILLS_BUS__SCOPES", '["skills:read"]')
    monkeypatch.setenv("KDSKILLS_BUS__CHANNELS", '{"main": "writer"}')


def write(bundle: Path, full_id: str, description: str, body: str = "", front: str = "", tools: str = "") -> None:
    """Write a skill of a bundle."""
    namespace, _, name = full_id.partition(".")
    folder = bundle / "skills" / namespace / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {description}\n{front}---\n{body}\n")
    if tools:
        (folder / "tools.yaml").write_text(tools)


def office(parent: Path) -> Path:
    """Make a bundle of a few skills that everybody has."""
    bundle = parent / "desk"
    write(bundle, "office.invoice-reader", "Reads invoices and extracts amounts.", "For scanned bills.")
    write(bundle, "office.meeting-minutes", "Writes minutes of a meeting.", "List decisions.")
    write(bundle, "office.trip-planner", "Plans trips.", "Minutes between trains and flights. A pull request.")
    write(bundle, "code.reviewer", "Reviews pull requests.", "Look for trains of thought.")
    (bundle / "skills_descriptor.yaml").write_text(RULES)
    return bundle


def add_secrets(bundle: Path) -> None:
    """Add skills of every kind that `writer` is not shown, which say what is asked for."""
    words = "Minutes of a meeting, scanned bills, trains, pull request, zyzzyva."
    for number in range(8):
        write(bundle, f"secret.denied-{number}", words, words)
        write(bundle, f"secret.hidden-{number}", words, words, "agent_disclosure: hidden\n")
        write(bundle, f"secret.gated-{number}", words, words, tools="- {id: io.save, required: true}\n")
        write(bundle, f"office.others-{number}", words, words, "include_for: [reader]\n")
        write(bundle, f"secret.people-{number}", words, words, "disable-model-invocation: true\n")
        write(bundle, f"internal.part-{number}", words, words)
        write(bundle, f"secret.invalid-{number}", "", words)


@contextlib.asynccontextmanager
async def opened(door: str, host: Host, doors: tuple[ModuleType, ModuleType], bus: Any) -> AsyncIterator[Any]:
    """Give what calls operations as the agent `writer`, with the right to read and no other."""
    table, on_bus = doors
    if door == "nats":
        async with on_bus.door(table, bus)(host) as call:
            yield call
        return
    async with table.served(host) as (url, _):
        _, token = await host.tokens.create("local", "writer", ["skills:read"], who="test")
        headers = {"Authorization": f"Bearer {token}"}
        if door == "http":
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http:

                async def post(name: str, arguments: dict[str, Any]) -> Any:
                    content = json.dumps(arguments).encode()  # with escapes: half a character has no UTF-8
                    kind = {"Content-Type": "application/json"}
                    answer = await http.post(f"/projects/local/tools/{name}", content=content, headers=kind)
                    value = answer.json()
                    ok = answer.status_code == 200
                    return table.Said(ok, value) if ok else table.refusal({**value, "message": value["detail"]})

                yield post
            return
        carrier = httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False)
        transport = streamable_http_client(f"{url}/mcp", http_client=carrier)
        async with carrier, Client(transport) as client:

            async def tool(name: str, arguments: dict[str, Any]) -> Any:
                answer = await client.call_tool(name.replace(".", "_"), arguments)
                if not answer.is_error:
                    return table.Said(ok=True, value=answer.structured_content)
                return table.refusal(json.loads(answer.content[0].text)["error"])

            yield tool


def host_of(bundle: Path, state: Path) -> Host:
    """Return a Host over a bundle, which keeps its index."""
    return Host(Settings(state_dir=state, index_dir=state / "index", bundle=bundle), entry_points=False)


async def asked(
    door: str, host: Host, doors: tuple[ModuleType, ModuleType], bus: Any, calls: list[dict[str, Any]]
) -> list[Any]:
    """Ask all of *calls* at a door, and let go of the Host."""
    try:
        async with opened(door, host, doors, bus) as call:
            return [await call("skills.search", arguments) for arguments in calls]
    finally:
        await host.work.aclose()
        await host.storage.aclose()


@pytest.mark.parametrize("door", DOORS)
async def test_what_a_caller_may_not_have_leaves_no_trace(door: str, doors: Any, bus: Any, tmp_path: Path) -> None:
    """A caller's answers are those of the library for its agent, whatever else there is: hits, scores, totals, numbers."""
    bundle = office(tmp_path)
    library = Host(Settings(state_dir=tmp_path / "l", index_dir=None, bundle=bundle), entry_points=False)
    expected = [
        (await library.call("skills.search", bundle=bundle, consumer="writer", tools=[], **question)).model_dump(
            mode="json"
        )
        for question in QUESTIONS
    ]
    assert [len(answer["hits"]) for answer in expected] == [2, 1, 1, 1, 2, 2, 2, 0, 0]
    for state in ("few", "many"):
        said = await asked(door, host_of(bundle, tmp_path / state), doors, bus, QUESTIONS)
        assert [one.ok for one in said] == [True] * len(QUESTIONS), said
        assert [one.value for one in said] == expected
        if state == "few":
            add_secrets(bundle)


@pytest.mark.parametrize("door", DOORS)
async def test_wrong_calls_and_others_rights_are_refused(door: str, doors: Any, bus: Any, tmp_path: Path) -> None:
    """Bounds, shapes and half characters are wrong calls; another consumer, its tools or a folder are not a caller's to say."""
    host = host_of(office(tmp_path), tmp_path / "state")
    # The SDK's client of MCP cannot send half a character, and to the bus a message with one is no message.
    calls = [row for row in REFUSED if door == "http" or row[0].get("query") != HALF]
    said = await asked(door, host, doors, bus, [arguments for arguments, _ in calls])
    assert [(one.ok, one.value["code"]) for one in said] == [(False, code) for _, code in calls]
    if door != "nats":  # whose server carries no message of that size
        host = host_of(tmp_path / "desk", tmp_path / "state")
        (large,) = await asked(door, host, doors, bus, [{"query": "x" * (1024 * 1024 + 1)}])
        assert (large.ok, large.value["code"]) == (False, "bad_request")


@pytest.mark.parametrize("door", DOORS)
async def test_findings_are_for_who_sees_all(door: str, doors: Any, bus: Any, tmp_path: Path) -> None:
    """What is wrong with the kept index is told to no caller elsewhere; the account is told, without a path."""
    bundle, state = office(tmp_path), tmp_path / "state"
    (await asked(door, host_of(bundle, state), doors, bus, QUESTIONS[:1]),)
    (file,) = (state / "index").glob("*.search")

    def damage() -> None:
        file.write_bytes(b"no database")

    damage()
    (said,) = await asked(door, host_of(bundle, state), doors, bus, QUESTIONS[:1])
    assert (said.value["diagnostics"], len(said.value["hits"])) == ([], 2)
    damage()
    host = host_of(bundle, state)
    (finding,) = (await host.call("skills.search", **QUESTIONS[0])).diagnostics
    assert (finding.code, str(tmp_path) in finding.message) == ("index_ignored", False)


def test_an_index_that_cannot_be_written_is_told_without_its_path(
    tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder of the index is a file, the search answers, and says so without the machine's path."""
    bundle = office(tmp_path)
    (tmp_path / "index").write_text("in the way")
    monkeypatch.setenv("KDSKILLS_INDEX_DIR", str(tmp_path / "index"))
    done = run("search", bundle, "minutes", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, len(answer["hits"])) == (0, 2)
    codes = {finding["code"] for finding in answer["diagnostics"]}
    assert codes == {"index_not_written"}
    assert [f["message"] for f in answer["diagnostics"] if str(tmp_path) in f["message"]] == []
