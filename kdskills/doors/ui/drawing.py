"""Drawings as SVG, made here: which skills import which, and which steps of a job wait for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

COLUMN: Final = 230
ROW: Final = 46
WIDTH: Final = 190
HEIGHT: Final = 30
LETTERS: Final = 24
"""Letters of a name that fit into a box."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A box: its place in pixels, its text, cut to fit, where it leads, and its state as a class of the stylesheet."""

    x: int
    y: int
    text: str
    name: str
    href: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """A graph from left to right; `edges` are paths of SVG."""

    width: int
    height: int
    nodes: tuple[GraphNode, ...]
    edges: tuple[str, ...]
    label: str


def layers(edges: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the column of each node: behind everything that leads to it. Nodes of a circle stand behind its first."""
    column: dict[str, int] = {}

    def place(node: str, depth: int, above: frozenset[str]) -> None:
        if column.get(node, -1) >= depth or node in above:
            return
        column[node] = depth
        for following in edges.get(node, ()):
            place(following, depth + 1, above | {node})

    starts = set(edges) - {following for nodes in edges.values() for following in nodes}
    for start in sorted(starts) or sorted(edges)[:1]:
        place(start, 0, frozenset())
    for node in edges:
        column.setdefault(node, 0)
    return column


def graph(
    edges: Mapping[str, Sequence[str]],
    label: str,
    *,
    hrefs: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> GraphDrawing:
    """Return the drawing of a graph: *edges* lead from each node to others; *hrefs* and *kinds* are by node."""
    columns = layers(edges)
    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for node, column in sorted(columns.items(), key=lambda item: (item[1], item[0])):
        row = rows.get(column, 0)
        rows[column] = row + 1
        places[node] = column * COLUMN + 1, row * ROW + 1
    nodes = tuple(
        GraphNode(
            x,
            y,
            node if len(node) <= LETTERS else f"{node[: LETTERS - 1]}…",
            node,
            (hrefs or {}).get(node, ""),
            (kinds or {}).get(node, ""),
        )
        for node, (x, y) in places.items()
    )
    paths = []
    for start, following_nodes in edges.items():
        for following in following_nodes:
            if start in places and following in places:
                (x1, y1), (x2, y2) = places[start], places[following]
                x1, y1, y2 = x1 + WIDTH, y1 + HEIGHT // 2, y2 + HEIGHT // 2
                paths.append(f"M{x1} {y1} C{x1 + 22} {y1} {x2 - 22} {y2} {x2} {y2}")
    width = max((x for x, _ in places.values()), default=0) + WIDTH + 2
    height = max((y for _, y in places.values()), default=0) + HEIGHT + 2
    return GraphDrawing(width, height, nodes, tuple(paths), label)


def import_graph(full_id: str, pairs: Iterable[tuple[str, str]]) -> GraphDrawing:
    """Return the drawing of what a skill brings along: *pairs* are importer and imported."""
    edges: dict[str, list[str]] = {full_id: []}
    for importer, imported in pairs:
        edges.setdefault(importer, []).append(imported)
        edges.setdefault(imported, [])
    hrefs = {name: f"/ui/skills/{quote(name, safe='')}" for name in edges}
    words = "; ".join(f"{start} imports {' and '.join(nodes)}" for start, nodes in edges.items() if nodes)
    return graph(edges, words or f"{full_id} imports nothing", hrefs=hrefs, kinds={full_id: "here"})
