"""Press Markdown with figures and citations into a self-contained HTML file and a PDF.

Usage: press.py REPORT.md [--html FILE] [--pdf FILE] [--source "n|title|url"]...

Exit codes: 0 pressed, 2 the text, a figure or a citation cannot be used; then no file is written. Without fpdf2 there is
no PDF: a note says so beside the HTML, and without any HTML to press it is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from document import Document, PressError, Source, read_document
from to_html import to_html


def source(text: str) -> Source:
    """Read one `n|title|url` argument."""
    number, _, rest = text.partition("|")
    title, _, url = rest.rpartition("|")
    if not number.strip().isdigit() or not title.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form n|title|url")
    return Source(int(number), title.strip(), url.strip())


def pdf_of(document: Document, path: Path, *, needed: bool) -> list[tuple[Path, bytes]]:
    """Return the PDF and its path; nothing, with a note, where it cannot be written and is not *needed*."""
    try:
        from to_pdf import to_pdf  # a heavy library, loaded only when a PDF is wanted
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fpdf":
            raise
        message = f"{path} was not written: a PDF needs fpdf2, pip install 'kdskills[documents]'"
        if needed:
            raise PressError(message) from None
        print(f"note: {message}", file=sys.stderr)
        return []
    data, replaced = to_pdf(document)
    if replaced:
        print(f"note: {replaced} characters without a glyph in the PDF fonts were replaced", file=sys.stderr)
    return [(path, data)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--pdf", type=Path)
    parser.add_argument("--source", type=source, action="append", default=[])
    args = parser.parse_args(argv)
    if not (args.html or args.pdf):
        parser.error("nothing to press: give --html, --pdf or both")
    try:
        document = read_document(args.report, {item.number: item for item in args.source})
        made: list[tuple[Path, bytes]] = []
        if args.html:
            made.append((args.html, to_html(document).encode("utf-8")))
        if args.pdf:
            made += pdf_of(document, args.pdf, needed=not args.html)
    except PressError as error:
        print(error, file=sys.stderr)
        return 2
    for path, data in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{path} ({len(data)} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
