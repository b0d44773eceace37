"""Draw a bar or line chart from a CSV table as a self-contained SVG file.

Usage: chart.py TABLE.csv --x COLUMN --y COLUMN --out FIGURE.svg --title TEXT [--kind bar|line] [--series COLUMN]
                [--unit TEXT] [--highlight VALUE] [--note TEXT]

Each row is drawn as it stands. Exit codes: 0 drawn, 2 the table cannot be drawn.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 110, 56, 64
INK, MUTED, ACCENT = "#1f2933", "#9aa5b1", "#b4371f"
PALETTE = ("#2f6690", "#7a5195", "#bc5090", "#5f8a3c", "#c77f1a", "#52606d")


class ChartError(Exception):
    """The table cannot be drawn; the message says why in one sentence."""


@dataclass
class Figure:
    """What to draw: categories along x, values by series, and the words around them."""

    categories: list[str]
    series: dict[str, list[float | None]]
    args: argparse.Namespace

    @property
    def top(self) -> float:
        return max(v for values in self.series.values() for v in values if v is not None)

    @property
    def bottom(self) -> float:
        low = min(v for values in self.series.values() for v in values if v is not None)
        return min(0.0, low) if self.args.kind == "bar" or low >= 0 else low


def load(args: argparse.Namespace) -> Figure:
    """Read the table into categories and series."""
    try:
        with args.table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ChartError(f"{args.table}: cannot be read: {error}") from None
    if not rows:
        raise ChartError(f"{args.table}: no rows")
    for name in filter(None, (args.x, args.y, args.series)):
        if name not in rows[0]:
            raise ChartError(f"no column is named {name!r}; there are {', '.join(rows[0])}")
    categories = list(dict.fromkeys(row[args.x] for row in rows))
    names = list(dict.fromkeys(row[args.series] for row in rows)) if args.series else [args.y]
    if len(names) > len(PALETTE):
        raise ChartError(f"{len(names)} series are too many; keep {len(PALETTE)}")
    series: dict[str, list[float | None]] = {name: [None] * len(categories) for name in names}
    for row in rows:
        name = row[args.series] if args.series else args.y
        try:
            value = float(row[args.y]) if row[args.y] else None
        except ValueError:
            raise ChartError(f"column {args.y!r} holds {row[args.y]!r}, which is no number") from None
        if value is not None and not math.isfinite(value):
            raise ChartError(f"column {args.y!r} holds {row[args.y]!r}, which cannot be drawn")
        series[name][categories.index(row[args.x])] = value
    if all(value is None for values in series.values() for value in values):
        raise ChartError(f"column {args.y!r} is empty")
    return Figure(categories, series, args)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round values spanning low to high."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.floor(low / step)
    return [step * index for index in range(first, math.ceil(high / step) + 1)]


def label(value: float) -> str:
    """Write a number without needless zeros."""
    return f"{value:.10g}"


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start", weight: str = "normal") -> str:
    """Return one SVG text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def draw_bars(figure: Figure, at_x: float, width: float, at_y) -> list[str]:
    """Draw grouped bars, each with its value above it."""
    out = []
    names = list(figure.series)
    each = width * 0.72 / len(names)
    for column, category in enumerate(figure.categories):
        for index, name in enumerate(names):
            value = figure.series[name][column]
            if value is None:
                continue
            x = at_x + column * width + width * 0.14 + index * each
            y, zero = at_y(value), at_y(0)
            chosen = figure.args.highlight in {category, name}
            fill = ACCENT if chosen else (PALETTE[index] if len(names) > 1 or not figure.args.highlight else MUTED)
            out.append(f'<rect x="{x:.1f}" y="{min(y, zero):.1f}" width="{each * 0.94:.1f}" height="{abs(zero - y):.1f}" fill="{fill}"/>')
            if len(names) == 1:
                out.append(text(x + each * 0.47, min(y, zero) - 5, label(value), size=11, anchor="middle"))
    return out


def draw_lines(figure: Figure, at_x: float, width: float, at_y) -> list[str]:
    """Draw one line per series with its name at its end; a gap in the data is a gap in the line."""
    out = []
    for index, (name, values) in enumerate(figure.series.items()):
        colour = ACCENT if figure.args.highlight == name else (MUTED if figure.args.highlight else PALETTE[index])
        pen, path, last = False, [], (0.0, 0.0)
        for column, value in enumerate(values):
            if value is None:
                pen = False
                continue
            last = (at_x + (column + 0.5) * width, at_y(value))
            path.append(f"{'L' if pen else 'M'}{last[0]:.1f} {last[1]:.1f}")
            pen = True
        out.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2.4"/>')
        if len(figure.series) > 1:
            out.append(text(last[0] + 6, last[1] + 4, name, fill=colour, weight="bold"))
    return out


def render(figure: Figure) -> str:
    """Return the figure as SVG text."""
    args = figure.args
    marks = ticks(figure.bottom, figure.top)
    low, high = marks[0], marks[-1]
    plot = HEIGHT - TOP - BOTTOM
    right = RIGHT if args.kind == "line" and len(figure.series) > 1 else 24

    def at_y(value: float) -> float:
        return TOP + plot * (1 - (value - low) / ((high - low) or 1))

    width = (WIDTH - LEFT - right) / len(figure.categories)
    described = "; ".join(
        f"{name}: " + ", ".join(f"{c} {label(v)}" for c, v in zip(figure.categories, values, strict=True) if v is not None)
        for name, values in figure.series.items()
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(args.title)}</title>",
        f"<desc>{escape(described)}</desc>",
        f'<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(LEFT - 40, 26, args.title, size=17, weight="bold"),
    ]
    if args.unit:
        out.append(text(LEFT - 40, 45, args.unit, fill="#52606d"))
    for mark in marks:
        y = at_y(mark)
        out.append(f'<path d="M{LEFT} {y:.1f} L{WIDTH - right} {y:.1f}" stroke="#e4e7eb" stroke-width="1"/>')
        out.append(text(LEFT - 8, y + 4, label(mark), fill="#52606d", anchor="end"))
    out += (draw_bars if args.kind == "bar" else draw_lines)(figure, LEFT, width, at_y)
    every = max(1, math.ceil(len(figure.categories) * 52 / (WIDTH - LEFT - right)))
    for column, category in enumerate(figure.categories):
        if column % every == 0:
            out.append(text(LEFT + (column + 0.5) * width, HEIGHT - BOTTOM + 18, category, size=11, anchor="middle"))
    if args.kind == "bar" and len(figure.series) > 1:
        for index, name in enumerate(figure.series):
            out.append(text(LEFT + index * 90, HEIGHT - BOTTOM + 38, f"\u25a0 {name}", fill=PALETTE[index]))
    if args.note:
        out.append(text(LEFT - 40, HEIGHT - 12, args.note, size=11, fill="#52606d"))
    return "\n".join([*out, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    for name in ("--x", "--y", "--title"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=["bar", "line"], default="bar")
    for name in ("--series", "--unit", "--highlight", "--note"):
        parser.add_argument(name)
    args = parser.parse_args(argv)
    try:
        svg = render(load(args))
    except ChartError as error:
        print(error, file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(svg, encoding="utf-8")
    print(f"{args.out} ({len(svg.encode())} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
