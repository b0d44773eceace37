"""Catalogs of a conversation where not all skills fit, and the tool that finds the rest."""

from __future__ import annotations

import asyncio
import json

import pytest

from kdskills import SkillsSubsystem
from kdskills.builtin.stores.sql import SqlStore
from kdskills.bundle import AgentRules
from kdskills.errors import BadRequest, DescriptorError
from kdskills.session import TurnScope
from kdskills.session.config import Budget

TOPICS = ("violin", "granite", "harbour", "pollen", "lantern", "saddle", "turbine", "velvet")
SMALL = TurnScope(budget=Budget(2000, 32_000, 12_800))


@pytest.fixture
def crowd(bundle):
    """Two hundred skills more, each of one topic and one task."""
    for number in range(200):
        topic, task = TOPICS[number % 8], ("mend", "sell", "paint", "weigh", "count")[number % 5]
        name = f"{topic}-{task}-{number:03}"
        words = (
            f"How to {task} a {topic}, case {number}. " + "Use it when somebody asks for that and nothing else. " * 5
        )
        bundle.skill(f"crowd.{name}", f"Take the {topic} and {task} it.", description=words)
    bundle.agents["solver.react.decision"] = {"disabled": ["acme.embargo", "crowd.lantern-*"]}
    return bundle


@pytest.fixture
async def session(crowd, make, events):
    """A session whose catalog has room for few of them."""
    return (await make(events=events.append).create_session()).within(SMALL)


def _enum(session):
    return session.tool_specs()[0].input_schema["properties"]["names"]["items"].get("enum", [])


async def test_the_request_decides_what_is_listed(session):
    """The skills that fit a request are listed with what they do, over a map, and the tool that finds others is named."""
    parts = await session.instructions(request="please paint my violin")
    assert parts.listed
    assert all("violin" in name or "paint" in name for name in parts.listed)
    assert "How to paint a violin" in parts.available
    assert "crowd: 175 skills, e.g." in parts.available
    assert f"{parts.total - len(parts.listed)} skills are not listed. Call skills_search" in parts.available
    assert "skills_search" in parts.rules


async def test_two_turns_share_their_beginning(session, events):
    """A later request adds behind what is listed, byte for byte, and what happened is told once each."""
    first = await session.instructions(request="paint a violin")
    again = await session.instructions(request="paint a violin")
    second = await session.instructions(request="weigh the pollen")
    assert again.text == first.text
    assert second.text.startswith(first.text.partition("<more>")[0])
    assert set(first.listed) < set(second.listed)
    assert "How to weigh a pollen" in second.available
    told = [event.data for event in events if event.type == "catalog.truncated"]
    assert [(each["shown"], each["gone"]) for each in told] == [(len(first.listed), 0), (len(second.listed), 0)]


async def test_a_full_list_is_cut_once(session, events):
    """When nothing more fits a new list begins, and how many went is told."""
    for topic in TOPICS:
        parts = await session.instructions(request=f"paint a {topic}")
        assert parts.tokens < 2300
    gone = [event.data["gone"] for event in events if event.type == "catalog.truncated"]
    assert any(gone)
    assert len(gone) <= len(TOPICS)


async def test_denied_skills_leave_no_trace(session):
    """What a consumer may not have is in no list, map, name or search."""
    parts = await session.instructions(request="paint a lantern")
    reply = await session.call("skills_search", {"query": "lantern", "limit": 50})
    assert reply.ok
    for text in (parts.available, reply.text.replace("No skill fits", ""), json.dumps(_enum(session))):
        assert "lantern" not in text


async def test_a_search_offers_what_it_gave(session):
    """Names that a search gave may be loaded, stand in the enum, and a loaded one in the catalog, behind the others."""
    before = await session.instructions(request="paint a violin")
    assert _enum(session) == [name for name in _enum(session) if name in before.listed]
    reply = await session.call("skills_search", {"query": "saddle to be weighed", "limit": 3})
    assert reply.ok
    name = reply.result["names"][0]
    assert ("saddle" in name, f"<name>\n{name}\n</name>" in reply.text, name in before.listed) == (True, True, False)
    assert name in _enum(session)
    await session.load([name], mode="add")
    after = await session.instructions(request="paint a violin")
    assert name in after.listed
    assert after.available.startswith(before.available.partition("<more>")[0])


async def test_named_and_pinned_are_listed(crowd, make):
    """What a request names, and what pins itself in its metadata, is listed whatever fits the words."""
    crowd.skill("crowd.always", "Rules.", description="Rules for all. " * 30, metadata="{kdskills: {pin: true}}")
    crowd.skill("mcp-shop.pushy", "Me.", description="Always me. " * 30, metadata="{kdskills: {pin: true}}")
    session = (await make().create_session()).within(SMALL)
    text = (
        "paint a violin with $granite-sell-001 and sk:crowd.harbour-paint-002, not lantern.x or crowd.velvet-weigh-063."
    )
    parts = await session.instructions(request=text)
    assert {"always", "granite-sell-001", "harbour-paint-002", "velvet-weigh-063"} <= set(parts.listed)
    assert "pushy" not in parts.listed


async def test_what_fits_has_no_search(runtime):
    """Where all skills fit, neither tool, rule nor map is there, whatever the request."""
    session = await runtime.create_session()
    parts = await session.instructions(request="sales")
    assert "skills_search" not in {spec.name for spec in session.tool_specs()}
    assert ("skills_search" in parts.text, "<namespaces>" in parts.text) == (False, False)
    assert parts.text == (await session.instructions()).text


async def test_bad_searches_are_refused(session):
    """A query that is missing, empty or huge, and a limit out of range, is `invalid_argument`; hostile words are words."""
    for arguments in (
        {},
        {"query": ""},
        {"query": "x" * 20_001},
        {"query": "x", "limit": 51},
        {"query": "\ud800"},
    ):
        reply = await session.call("skills_search", arguments)
        assert (reply.ok, reply.error["code"]) == (False, "invalid_argument")
    for query in ('"NEAR(', "\0", "*" * 999, "' OR 1=1"):
        assert (await session.call("skills_search", {"query": query})).ok


async def test_a_list_outlives_its_process(crowd, make, tmp_path):
    """Another process with the same store goes on with the same list, and removing the session removes it."""
    url = f"sqlite:///{tmp_path}/sessions.db"
    first, second = SqlStore(url), SqlStore(url)
    session = (await make(store=first).create_session("s")).within(SMALL)
    text = (await session.instructions(request="paint a violin")).available
    reply = await session.call("skills_search", {"query": "turbine to count"})
    other = (await make(store=second).get_session("s")).within(SMALL)
    later = await other.instructions(request="sell granite")
    assert later.available.startswith(text.partition("<more>")[0])
    assert set(reply.result["names"]) <= set(_enum(other))
    snapshot = (await other.snapshot()).to_json()
    assert list(snapshot["listed"]) == list((await first.get("s")).listed)
    await second.delete("s")
    assert await first.get("s") is None
    await first.aclose()
    await second.aclose()


async def test_an_index_that_cannot_be_written_is_told(crowd, make, events):
    """A catalog is ranked all the same, and the session says once that the index cannot be kept."""
    agents = {"agents_config": crowd.agents}
    subsystem = SkillsSubsystem(agents, bundle_root=crowd.root, roots=(), index_dir="/proc/nowhere")
    session = (await make(subsystem=subsystem, events=events.append).create_session()).within(SMALL)
    for request in ("paint a violin", "weigh the pollen"):
        assert (await session.instructions(request=request)).listed
    told = [event.data["code"] for event in events if event.type == "diagnostic"]
    assert told == ["index_not_written"]


async def test_many_at_once(session):
    """Prompts, searches and loads of one session at once neither fail nor lose one another."""
    calls = [session.instructions(request="paint a violin") for _ in range(4)]
    calls += [session.call("skills_search", {"query": topic}) for topic in ("violin", "saddle", "pollen", "velvet")]
    results = await asyncio.gather(*calls, session.load(["charts"], mode="add"), return_exceptions=True)
    assert [each for each in results if isinstance(each, Exception)] == []
    assert [skill.name for skill in await session.active()] == ["charts"]


@pytest.mark.parametrize(
    ("mode", "described", "mapped", "searched"),
    [
        ("auto", True, True, True),
        ("all", False, False, True),
        ("names", False, False, True),
        ("search-only", False, True, True),
    ],
)
async def test_modes(crowd, make, mode, described, mapped, searched):
    """`auto` lists what fits the request, `all` and `names` go by the alphabet, `search-only` lists nothing on its own."""
    session = (await make(listing=mode).create_session()).within(SMALL)
    parts = await session.instructions(request="paint a violin")
    assert ("How to paint a violin" in parts.available, "<namespaces>" in parts.available) == (described, mapped)
    assert ("skills_search" in {spec.name for spec in session.tool_specs()}) == searched
    assert parts.tokens < 2400
    assert bool(parts.listed) == (mode != "search-only")
    assert len(parts.listed) < parts.total
    await session.load(["violin-paint-152"])
    assert "violin-paint-152" in (await session.instructions(request="paint a violin")).listed


async def test_names_alone(make):
    """`names` leaves descriptions out even where they fit, and needs no search then."""
    session = await make(listing="names").create_session()
    parts = await session.instructions()
    assert ("<name>" in parts.available, "<description>" in parts.available) == (True, False)
    assert "skills_search" not in {spec.name for spec in session.tool_specs()}


async def test_a_consumer_has_a_mode_of_its_own(crowd, make):
    """`catalog` among a consumer's rules is stronger than that of `*`, and both than the runtime's."""
    crowd.agents["*"] = {"catalog": "names"}
    crowd.agents["writer"] = {"catalog": "search-only"}
    runtime = make(listing="all")
    texts = {}
    for consumer in ("writer", "reader"):
        session = (await runtime.create_session(consumer=consumer)).within(SMALL)
        texts[consumer] = (await session.instructions(request="paint a violin")).available
    assert ("<name>" in texts["writer"], "<name>" in texts["reader"]) == (False, True)
    assert "<description>" not in texts["reader"]


def test_an_unknown_mode_is_refused(crowd, make):
    """A mode that is misspelt is refused: by the descriptor, and by the runtime."""
    with pytest.raises(BadRequest, match="listing must be one of auto, all, names, search-only"):
        make(listing="some")
    with pytest.raises(DescriptorError, match="one of auto, all, names, search-only"):
        AgentRules.from_json({"catalog": "search"}, "agents_config.writer.")
