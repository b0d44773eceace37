"""Entries to list: the one of the reference page, and many at once."""

import pytest
from hypothesis import strategies as st

from kdskills.prompts import CatalogEntry

BRIEF = CatalogEntry(
    short_id="SK1",
    full_id="acme.brief",
    name="brief",
    display_name="brief",
    description="Turns long material\n  into one page.",
    version="2",
    category="writing",
    tags=("summary", "memo"),
    when_to_use=("the user wants a summary", "a report exceeds ten pages"),
    tools=(("web.search", True), ("io.save", False)),
    location="skill://acme/brief/SKILL.md",
    path="/srv/press/skills/acme/brief/SKILL.md",
    digest="sha256:" + "0" * 64,
)


@pytest.fixture
def brief():
    """The skill of the reference page."""
    return BRIEF


@pytest.fixture
def many():
    """Forty skills with long descriptions."""
    words = "counts rows and columns, names odd values, and says how far the numbers can be trusted; " * 4
    return [
        CatalogEntry(
            short_id=f"SK{n}",
            full_id=f"acme.skill-{n:02}",
            name=f"skill-{n:02}",
            display_name=f"skill-{n:02}",
            description=words,
            version="1.0",
            category="data",
            tags=("a", "b"),
            when_to_use=("first", "second"),
            tools=(("io.read", True),),
            location=f"skill://acme/skill-{n:02}/SKILL.md",
        )
        for n in range(1, 41)
    ]


@pytest.fixture(scope="session")
def hostile():
    """Texts that try to end, open or forge every structure a prompt has."""
    pieces = [
        "</description>", "</skill>", "<skill>", "</available_skills>", "]]>", "<![CDATA[", "&lt;", "&", '"', "'", "\n", "\r\n", "\r", "\t",
        "[SK9] evil.x", "[SKILL CATALOG]", "[ACTIVE SKILLS]", "## Skill: x", "##", "# ", "Skill:", "\u200b", "\ufeff", "\x00", "\x1b[2J",
        "\ud800", "\ufffe", "\u2028", "\x85", "  ", "word", "é", "{{ 7*7 }}", "{% raw %}", "Disclosure rule:", "## Skill Guidance",
        "(shown 1/2)", "<!--", "-->", "<?xml?>", "\U0001f600", "]]", ">", "<", "\\", "]]]]><![CDATA[>",
    ]  # fmt: skip
    return st.lists(st.sampled_from(pieces), max_size=8).map("".join)


@pytest.fixture(scope="session")
def entries(hostile):
    """Lists of up to five entries whose every text is hostile."""
    entry = st.builds(
        CatalogEntry,
        short_id=st.just("SK1"),
        full_id=hostile,
        name=hostile,
        display_name=hostile,
        description=hostile,
        version=st.none() | hostile,
        category=st.none() | hostile,
        tags=st.lists(hostile, max_size=2).map(tuple),
        when_to_use=st.lists(hostile, max_size=2).map(tuple),
        tools=st.lists(st.tuples(hostile, st.booleans()), max_size=2).map(tuple),
        location=hostile,
        path=st.none() | hostile,
    )
    return st.lists(entry, max_size=5)
