"""Drawings: a graph of any shape is drawn within a moment and within a page, and names are only names."""

from __future__ import annotations

import time
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.doors.ui.drawing import LETTERS, MAX_EDGES, MAX_NODES, graph, import_graph, layers
from kdskills.doors.ui.rendering import PageRoom, page_environment

GRAPHS = st.dictionaries(st.sampled_from("abcdefgh"), st.lists(st.sampled_from("abcdefgh"), max_size=5), max_size=8)


def svg(drawing) -> str:
    """Return a drawing as a page has it."""
    environment = page_environment()
    text = '{% import "parts.html.j2" as parts with context %}{{ parts.drawing(d) }}'
    return environment.from_string(text).render(d=drawing, room=PageRoom())


@given(GRAPHS)
def test_every_node_has_one_column(edges):
    """Each node is there once, circles or not, and where there is no circle it stands behind all that lead to it."""
    column = layers(edges)
    assert set(column) == set(edges) | {node for nodes in edges.values() for node in nodes}
    if not circular(edges):
        assert all(column[start] < column[end] for start, nodes in edges.items() for end in nodes)


def circular(edges) -> bool:
    """Tell whether somebody comes back to where they began."""

    def reach(node, path):
        return node in path or any(reach(each, path | {node}) for each in edges.get(node, ()))

    return any(reach(node, frozenset()) for node in edges)


@pytest.mark.parametrize(
    ("edges", "columns"),
    [
        ({}, {}),
        ({"a": ["a"]}, {"a": 0}),
        ({"a": ["b"], "b": ["a"]}, {"a": 0, "b": 1}),
        ({"a": ["b", "c"], "b": ["c"], "c": ["b"]}, {"a": 0, "b": 1, "c": 2}),
        ({"a": ["b", "c"], "b": ["d"], "c": ["b"], "d": []}, {"a": 0, "c": 1, "b": 2, "d": 3}),
        ({"a": ["b", "b"]}, {"a": 0, "b": 1}),
        ({"a": [], "b": []}, {"a": 0, "b": 0}),
    ],
)
def test_columns(edges, columns):
    """Small graphs stand as somebody would draw them."""
    assert layers(edges) == columns


def test_graphs_made_to_take_long_do_not():
    """A chain of ten thousand, everything behind everything, and a circle of all take a moment."""
    everything = {f"{i:03}": [f"{j:03}" for j in range(299, i, -1)] for i in range(300)}
    chain = {str(i): [str(i + 1)] for i in range(10_000)}
    circle = {str(i): [str((i + 1) % 10_000)] for i in range(10_000)}
    began = time.process_time()
    assert max(layers(everything).values()) == 299
    assert layers(chain)["10000"] == 10_000
    assert len(layers(circle)) == 10_000
    assert time.process_time() - began < 5


def test_five_hundred_nodes_are_bounded():
    """So many are drawn, the rest is told, and the page stays one that can be loaded."""
    edges = {f"n{i:03}": [f"n{j:03}" for j in range(i + 1, 500)] for i in range(500)}
    drawing = graph(edges, "; ".join(edges))
    assert len(drawing.nodes) == MAX_NODES
    assert len(drawing.edges) <= MAX_EDGES
    assert drawing.undrawn == 500 - MAX_NODES
    html = svg(drawing)
    assert f"{drawing.undrawn} more not drawn" in html
    assert len(html) < 90 * 1024


def test_hostile_names_are_names():
    """Names that would be markup, links or a mile long are cut text, and lead to a page of this console."""
    names = [
        '"><script>alert(1)</script>',
        "a\nb\x00\u202e",
        "x" * 100_000,
        "javascript:alert(1)",
        "\udcff",
        "../../etc",
    ]
    drawing = import_graph("top", [("top", name) for name in names])
    root = ET.fromstring(svg(drawing))
    assert {element.tag for element in root.iter()} <= {"div", "svg", "path", "rect", "text", "a"}
    links = [element.get("href") for element in root.iter("a")]
    assert len(links) == len(names) + 1
    assert all(link.startswith("/ui/skills/") and "<" not in link for link in links)
    assert all(len(node.text) <= LETTERS for node in drawing.nodes)


def test_a_drawing_is_told_in_words():
    """Who cannot see it is told what imports what."""
    assert import_graph("a.b", [("a.b", "c"), ("a.b", "d")]).label == "a.b imports c and d"
    assert import_graph("a.b", []).label == "a.b imports nothing"


@given(GRAPHS)
def test_boxes_do_not_lie_on_each_other(edges):
    """Each box has a place of its own within the picture."""
    drawing = graph(edges, "x")
    places = sorted((node.x, node.y) for node in drawing.nodes)
    assert all(one != other for one, other in pairwise(places))
    assert all(0 <= x < drawing.width and 0 <= y < drawing.height for x, y in places)
