"""Drawings as SVG, made here: which skills import which, and which steps of a job wait for which."""

from __future__ import annotations

from collections import deque
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
MAX_NODES: Final = 120
MAX_EDGES: Final = 300
"""Lines there may be between them: more are nothing that anybody could follow."""


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
    """A graph from left to right; `edges` are paths of SVG; `undrawn` nodes are not drawn."""

    width: int
    height: int
    nodes: tuple[GraphNode, ...]
    edges: tuple[str, ...]
    label: str
    undrawn: int = 0


def layers(edges: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the column of each node: behind everything that leads to it. Nodes of a circle stand behind its first."""
    column = dict.fromkeys([*edges, *(node for nodes in edges.values() for node in nodes)], 0)
    above = dict.fromkeys(column, 0)
    for nodes in edges.values():
        for node in nodes:
            above[node] += 1
    free = deque(sorted(node for node, number in above.items() if not number))
    waiting = dict.fromkeys(edges)  # who is taken first where only circles are left
    placed = set[str]()
    while len(placed) < len(column):
        node = free.popleft() if free else next(iter(waiting))
        waiting.pop(node, None)
        if node in placed:
            continue
        placed.add(node)
        for following in edges.get(node, ()):
            above[following] -= 1
            if following not in placed:
                column[following] = max(column[following], column[node] + 1)
                if not above[following]:
                    free.append(following)
    return column


def graph(
    edges: Mapping[str, Sequence[str]],
    label: str,
    *,
    hrefs: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> GraphDrawing:
    """Return the drawing of a graph: *edges* lead from each node to others; *hrefs* and *kinds* are by node."""
    columns = dict(sorted(layers(edges).items(), key=lambda item: (item[1], item[0])))
    undrawn = len(columns) - MAX_NODES
    if undrawn > 0:
        columns = dict(list(columns.items())[:MAX_NODES])
        label = f"{undrawn:,} more are not drawn; {label}"
    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for node, column in columns.items():
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
    return GraphDrawing(width, height, nodes, tuple(paths[:MAX_EDGES]), label, max(undrawn, 0))


def import_graph(full_id: str, pairs: Iterable[tuple[str, str]]) -> GraphDrawing:
    """Return the drawing of what a skill brings along: *pairs* are importer and imported."""
    edges: dict[str, list[str]] = {full_id: []}
    for importer, imported in pairs:
        edges.setdefault(importer, []).append(imported)
        edges.setdefault(imported, [])
    hrefs = {name: f"/ui/skills/{quote(name, safe='', errors='replace')}" for name in edges}
    words = "; ".join(f"{start} imports {' and '.join(nodes)}" for start, nodes in edges.items() if nodes)
    return graph(edges, words or f"{full_id} imports nothing", hrefs=hrefs, kinds={full_id: "here"})
