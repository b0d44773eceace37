"""The report as blocks: Markdown parsed once, figures read, citations checked. Both outputs are written from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

CITATION = re.compile(r"\[\[[Ss]:\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*\]\]")
FIGURE_LIMIT = 5 * 1024 * 1024
SCHEMES = {"http", "https", "mailto"}


class PressError(Exception):
    """The report cannot be pressed; the message says why in one sentence."""


@dataclass(frozen=True)
class Source:
    """One row of the list of sources."""

    number: int
    title: str
    url: str

    @property
    def href(self) -> str | None:
        """The address if it is of a safe scheme, percent-encoded, else None."""
        return safe_url(self.url)


@dataclass(frozen=True)
class Span:
    """A run of text: its words and how they are set. `cited` holds source numbers instead of words."""

    text: str = ""
    bold: bool = False
    italic: bool = False
    code: bool = False
    href: str | None = None
    cited: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """A heading, paragraph, list item, quote, code block, figure or table."""

    kind: str
    spans: tuple[Span, ...] = ()
    level: int = 0
    marker: str = ""
    rows: tuple[tuple[tuple[Span, ...], ...], ...] = ()
    figure: bytes = b""
    suffix: str = ""


@dataclass
class Document:
    """A report: its title, blocks, and the sources it cites in order of first use."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


def safe_url(url: str) -> str | None:
    """Return *url* percent-encoded when its scheme is safe, else None."""
    try:
        scheme = urlsplit(url).scheme.lower()
    except ValueError:
        return None
    return quote(url, safe=":/?#[]@!$&'()*+,;=%-._~") if scheme in SCHEMES else None


def spans_of(inline: Token, cited: dict[int, None]) -> tuple[Span, ...]:
    """Turn an inline token into spans; citations are noted in *cited*."""
    out: list[Span] = []
    bold = italic = 0
    href: str | None = None
    for token in inline.children or []:
        match token.type:
            case "strong_open" | "strong_close":
                bold += token.nesting
            case "em_open" | "em_close":
                italic += token.nesting
            case "link_open":
                href = safe_url(str(token.attrs.get("href", "")))
            case "link_close":
                href = None
            case "code_inline":
                out.append(Span(token.content, code=True))
            case "softbreak":
                out.append(Span(" ", bold=bold > 0, italic=italic > 0))
            case "hardbreak":
                out.append(Span("\n"))
            case "image":
                out.append(Span(token.content, italic=True))
            case _:
                out += cite(token.content, Span(bold=bold > 0, italic=italic > 0, href=href), cited)
    return tuple(joined(out))


def joined(spans: list[Span]) -> list[Span]:
    """Join neighbours that are set alike, so that a soft line break leaves no seam."""
    out: list[Span] = []
    for span in spans:
        if out and not span.cited and not out[-1].cited and replace(out[-1], text="") == replace(span, text=""):
            out[-1] = replace(span, text=out[-1].text + span.text)
        else:
            out.append(span)
    return out


def cite(text: str, style: Span, cited: dict[int, None]) -> list[Span]:
    """Split *text* at its citations."""
    out, position = [], 0
    for match in CITATION.finditer(text):
        before = text[position : match.start()].rstrip(" ")
        if before:
            out.append(Span(before, style.bold, style.italic, href=style.href))
        numbers = tuple(dict.fromkeys(int(item) for item in match.group(1).split(",")))
        cited.update(dict.fromkeys(numbers))
        out.append(Span(cited=numbers))
        position = match.end()
    if text[position:]:
        out.append(Span(text[position:], style.bold, style.italic, href=style.href))
    return out


def read_figure(base: Path, target: str) -> tuple[bytes, str]:
    """Read a figure below *base*."""
    suffix = Path(target).suffix.lower()
    if suffix not in {".svg", ".png", ".jpg", ".jpeg"}:
        raise PressError(f"figure {target!r}: only svg, png and jpg are pressed")
    path = (base / target).resolve()
    if not path.is_relative_to(base.resolve()):
        raise PressError(f"figure {target!r} lies outside the report's folder")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PressError(f"figure {target!r} cannot be read: {error.strerror}") from None
    if len(data) > FIGURE_LIMIT:
        raise PressError(f"figure {target!r} is larger than 5 MiB")
    return data, suffix


def _figure(token: Token, base: Path, cited: dict[int, None]) -> Block | None:
    children = token.children or []
    if len(children) == 1 and children[0].type == "image":
        data, suffix = read_figure(base, str(children[0].attrs.get("src", "")))
        return Block("figure", tuple(cite(children[0].content, Span(), cited)), figure=data, suffix=suffix)
    return None


class Reader:
    """Walks the tokens of one report and collects its blocks; figures are read from *base*."""

    def __init__(self, title: str, base: Path) -> None:
        self.document = Document(title)
        self.base = base
        self.cited: dict[int, None] = {}
        self.lists: list[int | None] = []  # the next number of each open list, None for bullets
        self.quotes = 0
        self.marker = ""
        self.table: list[list[tuple[Span, ...]]] = []

    def read(self, tokens: list[Token]) -> None:
        """Walk all *tokens*."""
        for before, token in zip([None, *tokens], tokens, strict=False):
            if token.type == "inline" and before is not None:
                self.inline(token, before)
            elif token.type.startswith(("bullet_list", "ordered_list", "list_item", "blockquote")):
                self.nest(token)
            else:
                self.content(token)

    def nest(self, token: Token) -> None:
        """Open and close lists, items and quotes."""
        if token.type.startswith("blockquote"):
            self.quotes += token.nesting
        elif token.type == "list_item_open":
            number = self.lists[-1]
            self.marker = "\u2022" if number is None else f"{number}."
            self.lists[-1] = None if number is None else number + 1
        elif token.type.endswith("list_open"):
            self.lists.append(int(token.attrs.get("start", 1)) if token.type.startswith("ordered") else None)
        elif token.type.endswith("list_close"):
            self.lists.pop()

    def content(self, token: Token) -> None:
        """Take tables, code and rules."""
        match token.type:
            case "table_open":
                self.table = []
            case "tr_open":
                self.table.append([])
            case "table_close":
                self.document.blocks.append(Block("table", rows=tuple(tuple(row) for row in self.table)))
            case "fence" | "code_block":
                self.document.blocks.append(Block("code", (Span(token.content.rstrip("\n"), code=True),)))
            case "hr":
                self.document.blocks.append(Block("rule"))

    def inline(self, token: Token, before: Token) -> None:
        """Take the text of a cell, heading, figure, item, quote or paragraph; *before* is the token that opened it."""
        blocks = self.document.blocks
        if before.type in {"th_open", "td_open"}:
            self.table[-1].append(spans_of(token, self.cited))
        elif before.type == "heading_open":
            spans = spans_of(token, self.cited)
            if before.tag == "h1" and not any(block.kind == "heading" for block in blocks):
                self.document.title = "".join(span.text for span in spans)
            blocks.append(Block("heading", spans, level=int(before.tag[1])))
        elif figure := _figure(token, self.base, self.cited):
            blocks.append(figure)
        else:
            kind = "item" if self.lists else "quote" if self.quotes else "paragraph"
            blocks.append(Block(kind, spans_of(token, self.cited), level=len(self.lists), marker=self.marker))
            self.marker = ""


def read_document(path: Path, sources: dict[int, Source]) -> Document:
    """Parse the Markdown at *path*; every citation must have its source."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PressError(f"{path}: cannot be read: {error}") from None
    reader = Reader(path.stem, path.parent)
    reader.read(MarkdownIt("commonmark", {"html": False}).enable("table").parse(text))
    missing = [number for number in reader.cited if number not in sources]
    if missing:
        raise PressError(
            f"no --source for citation {', '.join(map(str, missing))}: every number cited needs its source"
        )
    reader.document.sources = [sources[number] for number in reader.cited]
    return reader.document
