"""The report as one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from document import Block, Document, Span

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MEDIA = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}


def span_html(span: Span, numbers: dict[int, int]) -> str:
    """Write one span; a citation becomes small linked numbers."""
    if span.cited:
        return "<sup>" + ",".join(f'<a href="#source-{n}">{numbers[n]}</a>' for n in span.cited) + "</sup>"
    text = escape(span.text).replace("\n", "<br>")
    for wanted, tag in ((span.code, "code"), (span.italic, "em"), (span.bold, "strong")):
        text = f"<{tag}>{text}</{tag}>" if wanted else text
    return f'<a href="{escape(span.href)}" rel="noopener noreferrer">{text}</a>' if span.href else text


def block_html(block: Block, numbers: dict[int, int]) -> str:
    """Write one block."""
    inner = "".join(span_html(span, numbers) for span in block.spans)
    match block.kind:
        case "heading":
            return f"<h{block.level}>{inner}</h{block.level}>"
        case "item":
            return f'<p style="margin-left:{1.4 * block.level}em;text-indent:-1.1em">{escape(block.marker or " ")} {inner}</p>'
        case "quote":
            return f"<blockquote>{inner}</blockquote>"
        case "code":
            return f"<pre>{inner}</pre>"
        case "rule":
            return "<hr>"
        case "figure":
            data = f"data:{MEDIA[block.suffix]};base64,{base64.b64encode(block.figure).decode()}"
            words = escape("".join(span.text for span in block.spans))
            return f'<figure><img src="{data}" alt="{words}"><figcaption>{inner}</figcaption></figure>'
        case "table":
            head, *body = block.rows
            lines = ["<tr>" + "".join(f"<th>{cells(cell, numbers)}</th>" for cell in head) + "</tr>"]
            lines += ["<tr>" + "".join(f"<td>{cells(cell, numbers)}</td>" for cell in row) + "</tr>" for row in body]
            return "<table>\n" + "\n".join(lines) + "\n</table>"
    return f"<p>{inner}</p>"


def cells(spans: tuple[Span, ...], numbers: dict[int, int]) -> str:
    """Write the content of one table cell."""
    return "".join(span_html(span, numbers) for span in spans)


def to_html(document: Document) -> str:
    """Return the whole page."""
    css = (Path(__file__).parent.parent / "assets" / "report.css").read_text(encoding="utf-8")
    numbers = {source.number: index for index, source in enumerate(document.sources, start=1)}
    listed = "\n".join(
        f'<li id="source-{s.number}">'
        + (f'<a href="{escape(s.href)}" rel="noopener noreferrer">{escape(s.title)}</a>' if s.href else escape(s.title))
        + "</li>"
        for s in document.sources
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(document.title)}</title>",
        f"<style>\n{css}</style></head><body>",
        *(block_html(block, numbers) for block in document.blocks),
    ]
    if listed:
        parts.append(f'<section class="sources"><h2>Sources</h2><ol>\n{listed}\n</ol></section>')
    return "\n".join([*parts, "</body></html>"]) + "\n"
