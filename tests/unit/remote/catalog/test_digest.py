"""A catalog's identity and its shape on the wire."""

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.names import (
    difference,
    fingerprints,
    flat_tools,
    qualified_name,
    text_digest,
    tools_digest,
    tools_text,
    wire_tools,
)

NAMES = st.text(alphabet="abcxyz_-", min_size=1, max_size=6)
TOOLS = st.lists(
    st.builds(
        lambda name, description, namespace, key: {
            "name": name,
            "description": description,
            "inputSchema": {"type": "object", "properties": {key: {}}},
            **({"namespace": namespace} if namespace else {}),
        },
        NAMES,
        st.text(max_size=20),
        st.none() | NAMES,
        NAMES,
    ),
    max_size=6,
    unique_by=lambda tool: (tool.get("namespace"), tool["name"]),
)


def tool(name, **more):
    """Return a flat tool."""
    return {"name": name, "description": "d", "inputSchema": {"type": "object"}, **more}


def test_the_digest_is_that_of_the_spec():
    """16 hex digits of SHA-256 over the sorted tools as canonical JSON."""
    tools = [tool("b"), tool("a", namespace="n")]
    text = json.dumps([tool("b"), tool("a", namespace="n")], sort_keys=True, separators=(",", ":"))
    assert [qualified_name(one) for one in flat_tools(tools)] == ["b", "n.a"]
    assert tools_digest(tools) == hashlib.sha256(text.encode()).hexdigest()[:16]


@given(TOOLS, st.randoms())
def test_the_digest_does_not_depend_on_order_or_shape(tools, random):
    """Shuffled tools, and the same tools in wire shape, have the same digest; any change has another."""
    shuffled = random.sample(tools, len(tools))
    assert tools_digest(shuffled) == tools_digest(tools)
    assert tools_digest(wire_tools(tools, namespaces=True)) == tools_digest(tools)
    assert tools_digest([*tools, tool("an-other-name-altogether")]) != tools_digest(tools)


@given(TOOLS)
def test_flat_and_wire_shapes_hold_the_same(tools):
    """Nothing is lost on the way to the wire and back."""
    assert flat_tools(wire_tools(tools, namespaces=True)) == flat_tools(tools)


def test_the_wire_has_functions_and_namespaces_with_nothing_optional():
    """Functions first, one entry per namespace, each with exactly the keys the server demands."""
    found = wire_tools(
        [tool("z"), tool("b", namespace="n", deferLoading=True), tool("a", namespace="n")], namespaces=True
    )
    assert found == [
        {"type": "function", "name": "z", "description": "d", "inputSchema": {"type": "object"}},
        {
            "type": "namespace",
            "name": "n",
            "description": "Remote skills of n",
            "tools": [
                {"type": "function", "name": "a", "description": "d", "inputSchema": {"type": "object"}},
                {
                    "type": "function",
                    "name": "b",
                    "description": "d",
                    "inputSchema": {"type": "object"},
                    "deferLoading": True,
                },
            ],
        },
    ]


def test_servers_without_namespaces_get_flattened_names():
    """An old server gets `ns__name` and entries without `type`."""
    assert wire_tools([tool("a", namespace="n"), tool("b")], namespaces=False) == [
        {"name": "b", "description": "d", "inputSchema": {"type": "object"}},
        {"name": "n__a", "description": "d", "inputSchema": {"type": "object"}},
    ]


def test_a_changed_tool_came_and_went():
    """Added and removed name what differs; a tool with another body is in both."""
    old = fingerprints([tool("same"), tool("gone"), tool("changed")])
    new = fingerprints([tool("same"), tool("new", namespace="n"), tool("changed", inputSchema={})])
    assert difference(old, new) == (["changed", "n.new"], ["changed", "gone"])
    assert difference(old, old) == ([], [])


def test_plain_text_of_a_catalog():
    """Callers without an instruction text get one; no tools give none."""
    assert tools_text([]) == ""
    assert tools_text([tool("a", description="two\nlines")]).splitlines()[2:] == [
        "- a: two lines",
        '  input_schema: {"type": "object"}',
    ]


def test_texts_with_lone_surrogates_have_digests():
    """No text is without a digest."""
    assert len(text_digest("\ud800")) == 16
