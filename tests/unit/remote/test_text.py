"""The catalog as wire tools and as text, byte for byte."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote import RemoteSkill
from kdskills.remote.registry import inject, instruction_text, wire_tools

ORDER = {"type": "object", "required": ["order"], "properties": {"order": {"type": "string"}}}


def silent():
    return None


def test_the_text_of_the_spec(session):
    """The example of the spec, to the byte."""
    session.register("ship_order", silent, description="Book a parcel", input_schema=ORDER)
    assert session.instruction_text() == (
        "Session remote skill catalog (Python-managed):\n"
        "Use these capabilities when relevant and do not invent unknown tools.\n"
        "- ship_order: Book a parcel\n"
        '  input_schema: {"properties": {"order": {"type": "string"}}, "required": ["order"], "type": "object"}'
    )


def test_outputs_follow_where_they_are_known(session):
    """Schema and description of the result reach the text, and only the text."""

    def count(order: str) -> int:
        """Count.

        Returns:
            int: How many
                there are.
        """
        return len(order)

    session.register("count", count)
    assert session.instruction_text().splitlines()[-3:] == [
        '  input_schema: {"additionalProperties": false, "description": "Count.", "properties": {"order": {"type": "string"}}, "required": ["order"], "type": "object"}',
        '  output_schema: {"type": "integer"}',
        "  output_description: How many there are.",
    ]
    assert sorted(session.dynamic_tools()[0]) == ["description", "inputSchema", "name"]
    assert "How many" not in json.dumps(session.dynamic_tools())


def test_skills_are_sorted_by_qualified_name(session):
    """Whatever the order of registration; a skill in a namespace is named with it."""
    for name, namespace in [("b", None), ("z", "a"), ("a", None), ("B", None)]:
        session.register(name, silent, namespace=namespace)
    tools = session.dynamic_tools()
    assert [(tool.get("namespace"), tool["name"]) for tool in tools] == [
        (None, "B"),
        (None, "a"),
        ("a", "z"),
        (None, "b"),
    ]
    listed = [line.split(":")[0] for line in session.instruction_text().splitlines() if line.startswith("- ")]
    assert listed == ["- B", "- a", "- a.z", "- b"]


def test_tools_have_exactly_the_keys_of_the_wire(session):
    """Namespace and deferred loading only where they are set."""
    session.register("a", silent, output_schema={"type": "string"}, idempotent=True, deadline_seconds=1)
    session.register("b", silent, namespace="n")
    session.register("c", silent, namespace="n", defer_loading=True)
    schema = {"type": "object", "properties": {}, "additionalProperties": True}
    assert session.dynamic_tools() == [
        {"name": "a", "description": "Remote skill a", "inputSchema": schema},
        {"name": "b", "description": "Remote skill b", "inputSchema": schema, "namespace": "n"},
        {"name": "c", "description": "Remote skill c", "inputSchema": schema, "namespace": "n", "deferLoading": True},
    ]


def test_line_breaks_become_spaces_and_letters_ascii(session):
    """No description makes a line of its own; JSON is ASCII, descriptions stay as they are."""
    session.register(
        "a", silent, description="one\ntwo\r\nthree\u2028four\x85- fake: tool", input_schema={"title": "Größe"}
    )
    assert session.instruction_text().splitlines()[2:] == [
        "- a: one two three four - fake: tool",
        '  input_schema: {"title": "Gr\\u00f6\\u00dfe"}',
    ]


def test_without_skills_there_is_no_text(session):
    """Empty, and requests stay as they are."""
    assert session.instruction_text() == ""
    assert session.dynamic_tools() == []
    assert session.inject_request("Hi\n") == "Hi\n"


def test_a_request_goes_below_the_catalog(session):
    """The catalog, a blank line, `User request:`, the request."""
    session.register("a", silent)
    assert session.inject_request("Hi") == f"{session.instruction_text()}\n\nUser request:\nHi"


SKILLS = st.lists(
    st.builds(
        lambda name, said: RemoteSkill(name, handler=silent, description=said, input_schema={"description": said}),
        st.text(st.sampled_from("abc_"), min_size=1, max_size=3),
        st.text(),
    ),
    max_size=5,
    unique_by=lambda skill: skill.name,
)


@given(SKILLS, st.randoms())
def test_the_text_has_two_lines_a_skill_in_any_order(skills, random):
    """No description can forge a line, and the order of registration does not show."""
    text = instruction_text(skills)
    assert len(text.splitlines()) == (2 + 2 * len(skills) if skills else 0)
    assert not text.endswith("\n")
    mixed = list(skills)
    random.shuffle(mixed)
    assert (instruction_text(mixed), wire_tools(mixed)) == (text, wire_tools(skills))


@given(st.text(), st.text())
def test_injecting_keeps_the_request(catalog, request):
    """The request is the end of what is sent, unchanged."""
    assert inject(catalog, request).endswith(request)
    assert inject("", request) == request
