"""Draws which room imports which: `python -m tests.arch.rooms` writes docs/explanation/rooms.svg from the imports.

A row for each package of `kdskills`, the highest layer first, with the first sentence of its docstring; a dot in a column says
that the row's room imports the column's. Rooms import only what is below them; a dot above the diagonal is for types alone.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

from tests.arch.house import ROOT, House

PAGE = ROOT / "docs" / "explanation" / "rooms.svg"
ROW, CELL, TOP, LEFT, LABELS = 26, 22, 96, 16, 560


def layers(root: Path = ROOT) -> list[list[str]]:
    """Return the rooms of each layer, the highest first, as the import contracts name them."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    written = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in written]


def imports_between_rooms(house: House) -> set[tuple[str, str]]:
    """Return pairs of rooms of which the first imports the second."""
    pairs = {
        (importer.split(".")[1], module.split(".")[1])
        for module, importers in house.importers().items()
        for importer in importers
        if module.startswith("kdskills.") and importer.startswith("kdskills.")
    }
    return {pair for pair in pairs if pair[0] != pair[1]}


def summary(room: str, root: Path = ROOT) -> str:
    """Return the first sentence of a room's docstring."""
    path = root / "kdskills" / room / "__init__.py"
    source = (path if path.exists() else path.parent.with_suffix(".py")).read_text(encoding="utf-8")
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    sentence = text.partition(". ")[0].partition(": ")[0].rstrip(".")
    return sentence if len(sentence) <= 72 else f"{sentence[:70].rsplit(' ', 1)[0]} …"


def draw(house: House) -> str:
    """Return the picture as SVG."""
    ordered = layers(house.root)
    rooms = [room for layer in ordered for room in layer]
    pairs = imports_between_rooms(house)
    width, height = LEFT + LABELS + CELL * len(rooms) + 24, TOP + ROW * len(rooms) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-size="13">',
        "<title>Which room imports which</title>",
        '<g font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    shaded = {room for layer in ordered[::2] for room in layer}
    for index, room in enumerate(rooms):
        y = TOP + ROW * index
        if room in shaded:
            parts.append(f'<rect x="0" y="{y}" width="{width}" height="{ROW}" fill="#eef2f6"/>')
        parts.append(f'<text x="{LEFT}" y="{y + 18}" font-weight="600" fill="#1b2733">{room}</text>')
        parts.append(f'<text x="{LEFT + 88}" y="{y + 18}" fill="#4a5a6a">{escape(summary(room, house.root))}</text>')
        x = LEFT + LABELS + CELL * index + CELL // 2
        parts.append(
            f'<text x="{x}" y="{TOP - 8}" fill="#1b2733" transform="rotate(-60 {x} {TOP - 8})">{escape(room)}</text>'
        )
        parts.append(f'<rect x="{x - 4}" y="{y + 9}" width="8" height="8" fill="#c3ccd6"/>')
        for column, target in enumerate(rooms):
            if (room, target) in pairs:
                centre = LEFT + LABELS + CELL * column + CELL // 2
                parts.append(f'<circle cx="{centre}" cy="{y + ROW // 2}" r="5" fill="#1f6feb"/>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    PAGE.write_text(draw(House()), encoding="utf-8")
