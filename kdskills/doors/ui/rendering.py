"""Values as HTML. Whatever a page shows was written by strangers: it is escaped, and what would not be seen is made visible."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import jinja2
import yaml
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markupsafe import Markup, escape
from rich.text import Text

from kdskills.sources.citations import find_citations

HERE: Final = Path(__file__).parent

UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Characters that change what a reader sees without being seen: controls, directions, joiners, tags, halves."""

MAX_TEXT: Final = 200_000
"""Characters of one text that a page shows; behind it stands how many more there are."""
MAX_LINE: Final = 4_000
SCHEMES: Final = frozenset({"http", "https", "mailto"})


def visible(text: str) -> str:
    """Return *text* with characters that cannot be seen as `[U+202E]`."""
    return UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text)


def clipped(text: str, most: int = MAX_TEXT) -> Markup:
    """Return *text*, seen as it is, and cut where it or one of its lines is too long for a page, which is said there."""
    lines = text[:most].split("\n")
    shown = "\n".join(
        line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} [… {len(line) - MAX_LINE:,} more]" for line in lines
    )
    rest = f"\n[… {len(text) - most:,} more characters]" if len(text) > most else ""
    return escape(visible(shown)) + rest


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
    left, words = round(seconds), list[str]()
    for unit, size in units:
        number, left = divmod(left, size)
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
def _markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": False}).enable("table").enable("strikethrough")
    parser.validateLink = _allowed_link  # type: ignore[method-assign]  # the parser's own way to say which links it takes
    parser.add_render_rule("image", _no_image)
    return parser


def _allowed_link(url: str) -> bool:
    """Whether a link leads where a reader means to go: to a page or an address, and nowhere by itself."""
    return urlsplit(url.strip()).scheme.lower() in SCHEMES


def markdown(text: str) -> Markup:
    """Return Markdown as HTML without any HTML of its own, with links to pages alone, and with images named, not loaded."""
    whole = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n\n[… {len(text) - MAX_TEXT:,} more characters]"
    rendered = _markdown().render(visible(whole))
    rendered = rendered.replace("<a href=", '<a rel="noopener noreferrer nofollow" href=')
    rendered = rendered.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )
    return Markup(f'<div class="prose">{rendered}</div>')  # noqa: S704 - the parser escaped every text


def cited(text: str, sources: Mapping[int, object]) -> Markup:
    """Return an answer as Markdown whose citations lead to their rows; numbers without a row are shown as what they are."""
    pieces, places, end = [], dict[str, Markup](), 0
    for citation in find_citations(text):
        mark = f"kdcite{secrets.token_hex(8)}"  # nothing that the answer could hold, and nothing to Markdown
        places[mark] = Markup("<sup>{}</sup>").format(Markup(" ").join(_cite(sid, sources) for sid in citation.sids))
        pieces += [text[end : citation.start], mark]
        end = citation.end
    rendered = str(markdown("".join([*pieces, text[end:]])))
    for mark, link in places.items():
        rendered = rendered.replace(mark, str(link))
    return Markup(rendered)  # noqa: S704 - `markdown` escaped the text, `format` the links


def _cite(sid: int, sources: Mapping[int, object]) -> Markup:
    known = Markup('<a class="cite" href="#source-{0}">{0}</a>')
    return (known if sid in sources else Markup('<span class="cite unknown">{0}?</span>')).format(sid)


COLOURS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def ansi(text: str) -> Markup:
    """Return a program's output with its sixteen colours and bold; every other sequence is left out."""
    parts = []
    for line in text.split("\n"):
        cut = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}\x1b[0m [… {len(line) - MAX_LINE:,} more]"
        decoded = Text.from_ansi(cut)
        pieces, end = [], 0
        for start, stop, classes in _styled(decoded):
            pieces += [escape(visible(decoded.plain[end:start])), Markup('<span class="{}">').format(classes)]
            pieces += [escape(visible(decoded.plain[start:stop])), Markup("</span>")]
            end = stop
        parts.append(Markup("").join([*pieces, escape(visible(decoded.plain[end:]))]))
    return Markup("\n").join(parts)


def _styled(text: Text) -> Iterable[tuple[int, int, str]]:
    end = 0
    for piece in sorted(text.spans, key=lambda each: each.start):
        style = piece.style
        if isinstance(style, str) or piece.start < end or not piece.end > piece.start:
            continue
        number = None if style.color is None else style.color.number
        names = [f"ansi-{COLOURS[number % 8]}"] if number is not None and number < 16 else []
        names += ["ansi-bold"] if style.bold else []
        if names:
            yield piece.start, piece.end, " ".join(names)
            end = piece.end


def diff(before: str, after: str, context: int = 3) -> Markup:
    """Return what differs between two texts, line by line; empty where nothing does."""
    lines = list(unified_diff(before.splitlines(), after.splitlines(), "before", "after", n=context, lineterm=""))[2:]
    return diff_lines("\n".join(lines))


def diff_lines(text: str) -> Markup:
    """Return a unified diff, its lines marked as added, removed and heads of pieces."""
    kinds = {"+": "ins", "-": "del", "@": "hunk"}
    rows = [
        Markup('<span class="line {}">{}</span>').format(kinds.get(line[:1], "same"), clipped(line) or " ")
        for line in text.split("\n")
    ]
    return Markup("").join(rows) if text else Markup("")  # each is a line of its own by the stylesheet


def as_yaml(value: object) -> str:
    """Return facts as YAML, in their own order."""
    return yaml.safe_dump(value, allow_unicode=True, sort_keys=False, width=100)


def page_environment() -> jinja2.Environment:
    """Return what pages are rendered with: everything is escaped, and a name that is not there is an error."""

    def seen(value: object) -> object:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

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
        "ansi": ansi,
        "cited": cited,
        "clipped": clipped,
        "count": count,
        "diff_lines": diff_lines,
        "markdown": markdown,
        "segment": lambda text: quote(str(text), safe=""),
        "segments": lambda text: quote(str(text), safe="/"),
        "is_link": lambda text: isinstance(text, str) and _allowed_link(text),
        "as_yaml": as_yaml,
        "past": lambda value: (moment(value) or datetime.max.replace(tzinfo=UTC)) <= datetime.now(UTC),
        "twice": lambda value: (value, value),
        "size": size,
        "span": span,
    }
    environment.globals |= {"static": static_files(), "diff": diff, "count": count, "max": max, "min": min}
    return environment
