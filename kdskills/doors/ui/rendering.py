"""Values as HTML. Whatever a page shows was written by strangers: it is escaped, and what would not be seen is made visible."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import jinja2
import yaml
from jinja2.runtime import Context
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markupsafe import Markup, escape

from kdskills.sources.citations import find_citations

HERE: Final = Path(__file__).parent

UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e01ef]"
)
"""Characters that change what a reader sees without being seen: controls, directions, joiners, fillers, tags, halves."""

ROOM: Final = 56 * 1024
"""Bytes of HTML that the texts of one page take together, unless it says otherwise; pages stay below 100 KiB."""
LEAST: Final = 240
"""Bytes that every text may take, however little room is left."""
MAX_SHORT: Final = 4_000
"""Bytes of a text that is no text of its own, such as a name or a reason."""
MAX_LINE: Final = 4_000
MAX_MARKDOWN: Final = 40_000
"""Characters that are rendered; behind them stands how many more there are."""
MAX_BRACKETS: Final = 4_000
"""Brackets that may open a link: the time for them grows with the square of their number."""
WIDE: Final = re.compile(r"^(?:[^|\n]*+\|){60}", re.MULTILINE)
"""A line of a table that nobody reads: each line below it would be as wide."""
SCHEMES: Final = frozenset({"http", "https", "mailto"})


def visible(text: str) -> str:
    """Return *text* with characters that cannot be seen as `[U+202E]`."""
    return UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text)


def shown(text: str) -> Markup:
    """Return *text* as HTML that shows it as it is."""
    return escape(visible(text))


def html_size(html: str) -> int:
    """Return the bytes of a piece of HTML."""
    return len(html.encode())


def fitted(text: str, most: int, render: Callable[[str], Markup], joint: str = "\n") -> Markup:
    """Return *text* as *render* shows it, cut where it would take more than *most* bytes, which is said there."""
    end = min(len(text), most)
    html = render(text[:end])
    while end and (taken := html_size(html)) > most:
        end = min(end - 1, end * most // taken)
        html = render(text[:end])
    return html + f"{joint}[… {len(text) - end:,} more characters]" if end < len(text) else html


def clipped(text: str, most: int = ROOM) -> Markup:
    """Return *text*, seen as it is, and cut where it or one of its lines is too long for a page, which is said there."""
    return fitted(text, most, lambda piece: Markup("\n").join(shown(_cut(line)) for line in piece.split("\n")))


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} [… {len(line) - MAX_LINE:,} more]"


@dataclass(slots=True)
class PageRoom:
    """What the texts of a page may still take, so that no text of a stranger makes a page that nobody can load."""

    left: int = ROOM

    def take(self, html: Markup) -> Markup:
        """Count a text that is on the page."""
        self.left -= html_size(html)
        return html

    def most(self, limit: int = ROOM) -> int:
        """Return how many bytes the next text may take, of so many that it asks for."""
        return max(min(limit, self.left), LEAST)

    def short(self, text: str) -> Markup:
        """Return a text that is no text of its own."""
        if len(text) <= LEAST // 10:  # what most values are
            return self.take(shown(text))
        return self.take(fitted(text, self.most(MAX_SHORT), shown, " "))


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file that pages load; its digest is part of its address, so that browsers may keep it."""

    path: Path
    digest: str
    media_type: str

    @property
    def url(self) -> str:
        """Its address."""
        return f"/ui/static/{self.digest}/{self.path.name}"


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the files that pages load, by name."""
    kinds = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
    files = (path for path in sorted((HERE / "static").iterdir()) if path.suffix in kinds)
    return {
        path.name: StaticFile(path, hashlib.sha256(path.read_bytes()).hexdigest()[:16], kinds[path.suffix])
        for path in files
    }


@dataclass(frozen=True, slots=True)
class PageLinks:
    """Links to this page with other words behind its `?`."""

    path: str
    query: Mapping[str, str]

    def __call__(self, **changes: object) -> str:
        """Return the address of this page with *changes*; None takes a word away, and so does what is empty."""
        words = {**self.query, **{key: "" if value is None else str(value) for key, value in changes.items()}}
        words = {key: value for key, value in words.items() if value}
        return f"{self.path}{'?' if words else ''}{urlencode(words)}"


# Times, sizes and numbers, each with its unit.


def moment(value: object) -> datetime | None:
    """Return a moment, given as one or as ISO 8601; None for what is none."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if not isinstance(value, datetime):
        return None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def span(seconds: float) -> str:
    """Return a length of time in its two largest units, such as `2 min 5 s` or `340 ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    remaining, words = round(seconds), list[str]()
    for unit, size in units:
        number, remaining = divmod(remaining, size)
        if number and len(words) < 2:
            words.append(f"{number} {unit}")
    return " ".join(words)


def age(value: object, now: datetime | None = None) -> Markup:
    """Return when something was, as its age, with the moment and its zone behind it for who points at it."""
    when = moment(value)
    if when is None:
        return Markup('<span class="faint">never</span>')
    apart = (now or datetime.now(UTC)) - when
    ahead, seconds = apart < timedelta(0), abs(apart.total_seconds())
    words = span(seconds) if seconds >= 1 else "now"
    words = words if seconds < 1 else f"in {words}" if ahead else f"{words} ago"
    exact = when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(when.isoformat(), exact, words)


def size(number: int | None) -> str:
    """Return a number of bytes with its unit."""
    value = float(number or 0)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as `1 skill` or `2,351 skills`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


# Texts in forms of their own.


def _no_image(renderer: RendererHTML, tokens: Any, index: int, options: Any, env: Any) -> str:
    """Name an image instead of loading it: a picture of a stranger's server tells that server who looks."""
    token = tokens[index]
    words = renderer.renderInlineAsText(token.children or [], options, env)
    return str(Markup('<span class="image">[image: {} {}]</span>').format(words, token.attrs.get("src", "")))


@cache
def _markdown(*, tables: bool) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": False}).enable("strikethrough")
    if tables:
        parser.enable("table")
    parser.validateLink = _allowed_link  # type: ignore[method-assign]  # the parser's own way to say which links it takes
    parser.add_render_rule("image", _no_image)
    return parser


def _allowed_link(url: str) -> bool:
    """Whether a link leads where a reader means to go: to a page or an address, and nowhere by itself."""
    try:
        return urlsplit(url.strip()).scheme.lower() in SCHEMES
    except ValueError:  # such as a bracket that is never closed
        return False


def markdown(text: str, most: int = ROOM) -> Markup:
    """Return Markdown as HTML without any HTML of its own, with links to pages alone, and with images named, not loaded.

    A text that would take more than *most* bytes so, or too long, as one can that is made for it, is returned as it is
    written.
    """
    cut = min(MAX_MARKDOWN, most)
    if text.count("[", 0, cut) > MAX_BRACKETS:
        return Markup('<pre class="code" tabindex="0">{}</pre>').format(clipped(text, most))
    source = text if len(text) <= cut else f"{text[:cut]}\n\n[… {len(text) - cut:,} more characters]"
    rendered = _markdown(tables=WIDE.search(source) is None).render(visible(source))
    if html_size(rendered) > most:
        return Markup('<pre class="code" tabindex="0">{}</pre>').format(clipped(text, most))
    rendered = rendered.replace("<a href=", '<a rel="noopener noreferrer nofollow" href=')
    rendered = rendered.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )
    return Markup(f'<div class="prose">{rendered}</div>')  # noqa: S704 - the parser escaped every text


MAX_CITATIONS: Final = 500
MARK: Final = re.compile(r"kdcite[0-9a-f]{16}")


def cited(text: str, sources: Mapping[int, object], most: int = ROOM) -> Markup:
    """Return an answer as Markdown whose citations lead to their rows; numbers without a row are shown as what they are."""
    text = (
        text
        if len(text) <= MAX_MARKDOWN
        else f"{text[:MAX_MARKDOWN]}\n\n[… {len(text) - MAX_MARKDOWN:,} more characters]"
    )
    pieces, places, end = [], dict[str, Markup](), 0
    for citation in find_citations(text)[:MAX_CITATIONS]:
        mark = f"kdcite{secrets.token_hex(8)}"  # nothing that the answer could hold, and nothing to Markdown
        places[mark] = Markup("<sup>{}</sup>").format(Markup(" ").join(_cite(sid, sources) for sid in citation.sids))
        pieces += [text[end : citation.start], mark]
        end = citation.end
    rendered = str(markdown("".join([*pieces, text[end:]]), most))
    rendered = MARK.sub(lambda mark: str(places.get(mark[0], mark[0])), rendered)
    return Markup(rendered)  # noqa: S704 - `markdown` escaped the text, `format` the links


def _cite(sid: int, sources: Mapping[int, object]) -> Markup:
    linked = Markup('<a class="cite" href="#source-{0}">{0}</a>')
    return (linked if sid in sources else Markup('<span class="cite unknown">{0}?</span>')).format(sid)


COLOURS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
ESCAPES: Final = re.compile(
    r"\x1b\[([0-?]*+)[ -/]*+([@-~])"  # a control sequence, such as one that colours
    r"|\x1b[]PX^_][^\x07\x1b\n]*+(?:\x07|\x1b\\)"  # a string, such as a link, to its end
    r"|\x1b[ -/]*+[0-OQ-WYZ\\`-~]"
)
"""Sequences that are whole; a part of one is shown as the characters it is."""


def ansi(text: str, most: int = ROOM) -> Markup:
    """Return a program's output with its sixteen colours and bold; every other sequence is left out.

    A carriage return begins a line: what a terminal would write over stays to be read.
    """
    return fitted(text, most, _coloured)


def _coloured(text: str) -> Markup:
    text = "\n".join(_cut(line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    pieces, style, end = list[str](), AnsiStyle(), 0
    for match in ESCAPES.finditer(text):
        pieces.append(style.around(text[end : match.start()]))
        end = match.end()
        if match[2] == "m":
            style.change(match[1])
    return Markup("".join([*pieces, style.around(text[end:])]))  # noqa: S704 - `around` escapes


@dataclass(slots=True)
class AnsiStyle:
    """What a program's output looks like from here on."""

    colour: int | None = None
    bold: bool = False

    def change(self, parameters: str) -> None:
        """Do what a sequence says that selects how output looks."""
        numbers = iter([int(text) if text.isdecimal() and len(text) < 4 else 0 for text in parameters.split(";")])
        for number in numbers:
            if number in {38, 48}:  # a colour of many, by its number, or mixed
                mode = next(numbers, 0)
                mixed = [next(numbers, 0) for _ in range({5: 1, 2: 3}.get(mode, 0))]
                if number == 38:
                    self.colour = mixed[0] if mode == 5 and mixed[0] < 16 else None
            elif number == 0:
                self.colour, self.bold = None, False
            elif number in {1, 22}:
                self.bold = number == 1
            elif 30 <= number < 38 or 90 <= number < 98:
                self.colour = number % 10
            elif number == 39:
                self.colour = None

    def around(self, text: str) -> str:
        """Return *text* as HTML that looks like this."""
        names = [] if self.colour is None else [f"ansi-{COLOURS[self.colour % 8]}"]
        names += ["ansi-bold"] if self.bold else []
        html = shown(text)
        return f'<span class="{" ".join(names)}">{html}</span>' if names and text else html


MAX_COMPARED: Final = 4_000
"""Lines of two texts that are compared: what that takes grows with the square of their number."""


def diff(before: str, after: str, context: int = 3) -> str:
    """Return what differs between two texts, as a unified diff without its head; empty where nothing does."""
    texts = before.splitlines(), after.splitlines()
    if sum(map(len, texts)) > MAX_COMPARED:
        return "" if before == after else "@@ the two texts are too long to be compared line by line @@"
    return "\n".join(list(unified_diff(*texts, "before", "after", n=context, lineterm=""))[2:])


def diff_lines(text: str, most: int = ROOM) -> Markup:
    """Return a unified diff, its lines marked as added, removed and heads of pieces."""
    return fitted(text, most, _marked) if text else Markup("")


def _marked(text: str) -> Markup:
    kinds = {"+": "ins", "-": "del", "@": "hunk"}
    line_html = Markup('<span class="line {}">{}</span>').format  # each is a line of its own by the stylesheet
    return Markup("").join(
        line_html(kinds.get(line[:1], "same"), shown(_cut(line)) or " ") for line in text.split("\n")
    )


def as_yaml(value: object) -> str:
    """Return facts as YAML, in their own order."""
    return yaml.safe_dump(value, allow_unicode=True, sort_keys=False, width=100)


def _within_room(render: Callable[..., Markup], limit: int = ROOM) -> Callable[..., Markup]:
    """Return a filter that shows a text in what room its page has left, or in less where the page says so."""

    @jinja2.pass_context
    def filtered(context: Context, text: object, *words: Any, most: int = limit) -> Markup:
        room: PageRoom = context["room"]
        return room.take(render(str(text), *words, most=room.most(most)))

    return filtered


def page_environment() -> jinja2.Environment:
    """Return what pages are rendered with: everything is escaped, and a name that is not there is an error.

    A page is rendered with a `room`, a `PageRoom`.
    """

    @jinja2.pass_context
    def seen(context: Context, value: object) -> object:
        room: PageRoom = context["room"]
        ours = isinstance(value, Markup | int | float)  # anything else is a text, such as a path
        return value if ours else room.short(str(value))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=seen,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "age": age,
        "ansi": _within_room(ansi),
        "cited": _within_room(cited),
        "clipped": _within_room(clipped),
        "count": count,
        "diff_lines": _within_room(diff_lines),
        "markdown": _within_room(markdown),
        "segment": lambda text: _quoted(text, ""),
        "segments": lambda text: _quoted(text, "/"),
        "whole": lambda text: shown(str(text)),
        "is_link": lambda text: isinstance(text, str) and not UNSEEN.search(text) and _allowed_link(text),
        "as_yaml": as_yaml,
        "past": lambda value: (moment(value) or datetime.max.replace(tzinfo=UTC)) <= datetime.now(UTC),
        "twice": lambda value: (value, value),
        "size": size,
        "span": span,
    }
    environment.globals |= {"static": static_files(), "diff": diff, "count": count, "max": max, "min": min}
    return environment


def _quoted(text: object, safe: str) -> Markup:
    """Return a part of an address, which is never cut; a name that is no UTF-8 leads nowhere."""
    return Markup(quote(str(text), safe=safe, errors="replace"))  # noqa: S704 - letters, digits and `%` alone
