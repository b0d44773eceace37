"""Citations: found in a text, rewritten from a skill's own numbers to the pool's, and rendered for a reader.

A reader sees links, superscripts, HTML or footnotes, in a whole text or while it is still being written.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from kdskills.errors import Diagnostic
from kdskills.sources.rows import SourceKey, SourcesPool, first_text, usable_url
from kdskills.sources.tokens import (
    MAX_ITEMS,
    SUP,
    TOKEN,
    CitationToken,
    KnownSids,
    TokenScanner,
    Writer,
    find_tokens,
    held_back,
    pattern,
)

_PASSES = 16


@dataclass(frozen=True, slots=True)
class Citation:
    """One token of a text: its span, its sids in order without repeats, and what was ignored in it."""

    start: int
    end: int
    sids: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """A text with its citations rewritten.

    Attributes:
        text: The text.
        used: The new sids it cites, in order of first appearance.
        dropped: The old sids that had no new one, in order of first appearance.
        diagnostics: One `citation_dropped` for each of them, and for each range that is not wholly known.
    """

    text: str
    used: tuple[int, ...]
    dropped: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopted:
    """A skill's text in the numbers of the turn's pool.

    Attributes:
        text: The rewritten text.
        pool: The pool with the skill's rows.
        sid_map: The skill's sids to the pool's.
        dropped: Sids the text cites but the skill has no row for.
        diagnostics: Findings about the rows, then about the text.
    """

    text: str
    pool: SourcesPool
    sid_map: Mapping[int, int]
    dropped: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


def find_citations(
    text: str, *, known: SourcesPool | Mapping[int, object] | Collection[int] | None = None
) -> tuple[Citation, ...]:
    """Return every citation outside code, with its span.

    Args:
        text: The text.
        known: What ranges are intersected with; single numbers are returned whether known or not. Without it a range
            of over 1,000 numbers is ignored, which the citation's `diagnostics` say.
    """
    known_numbers = KnownSids(None if known is None else known_sids(known))
    citations = []
    for token in find_tokens(text):
        sids: dict[int, None] = {}
        findings = []
        for first, last in token.items:
            sids.update(dict.fromkeys((first,) if first == last else known_numbers.within(first, last)))
            if known_numbers.ignored and first != last:
                message = f"the range {first}-{last} stands for too many numbers and is ignored"
                findings.append(Diagnostic("citation_range_ignored", "warning", message, ref=f"{first}-{last}"))
        citations.append(Citation(token.start, token.end, tuple(sids), tuple(findings)))
    return tuple(citations)


def extract_citations(
    text: str, *, known: SourcesPool | Mapping[int, object] | Collection[int] | None = None
) -> list[int]:
    """Return the sids a text cites, in order of first appearance, each once.

    *known* is what ranges are intersected with; see `find_citations`, which also tells spans and what was ignored.
    """
    return list(dict.fromkeys(sid for citation in find_citations(text, known=known) for sid in citation.sids))


def known_sids(numbered: SourcesPool | Mapping[int, object] | Collection[int]) -> Iterable[int]:
    """Return every sid that means something: those of a pool with its aliases, or the keys of a mapping."""
    if isinstance(numbered, SourcesPool):
        return [*numbered.rows, *numbered.aliases]
    return numbered


def rewrite_citations(text: str, sid_map: Mapping[int, int]) -> RewriteResult:
    """Replace every sid by the one it maps to, all at once.

    Unknown sids go; a token without sids left goes with one blank. An empty map drops every token. No text can put a
    token together from the pieces around a removed one: such a token is broken up, and a finding says so.

    Args:
        text: The text, its code untouched.
        sid_map: Old sids to new ones.
    """
    run = _Rewriting(sid_map)
    position = 0
    for token in find_tokens(text):
        run.writer.write(text[position : token.start])
        position = token.end
        sids = run.map(token)
        if sids:
            run.write_token(sids)
        else:
            position += run.writer.remove(text[position : position + 1])
    run.writer.write(text[position:])
    new_text = run.settle()
    return RewriteResult(new_text, tuple(run.used), tuple(run.dropped), tuple(run.findings))


def adopt_citations(text: str, rows: object, pool: SourcesPool, *, key: SourceKey | None = None) -> Adopted:
    """Merge a skill's rows into the pool, then rewrite its text by its own map.

    Args:
        text: The skill's body, or a file of it.
        rows: The skill's sources as written.
        pool: The turn's pool.
        key: Overrides what makes two rows one source.
    """
    merged = pool.merge(rows, key=key)
    rewritten = rewrite_citations(text, merged.sid_map)
    findings = merged.diagnostics + rewritten.diagnostics
    return Adopted(rewritten.text, merged.pool, merged.sid_map, rewritten.dropped, findings)


class _Rewriting:
    """One run of `rewrite_citations`: what was written so far and what was found."""

    def __init__(self, sid_map: Mapping[int, int]) -> None:
        self.writer = Writer()
        self.used: dict[int, None] = {}
        self.dropped: dict[int, None] = {}
        self.findings: list[Diagnostic] = []
        self._map = {int(old): int(new) for old, new in sid_map.items()}
        self._known = KnownSids(self._map)
        self._own: set[int] = set()
        self._reported: set[str] = set()

    def map(self, token: CitationToken) -> list[int]:
        """Return the new sids of a token, and note what it loses."""
        sids: dict[int, None] = {}
        for first, last in token.items:
            skill_sids = self._known.within(first, last)
            sids.update(dict.fromkeys(self._map[sid] for sid in skill_sids))
            if self._known.ignored:
                self._report(
                    f"{first}-{last}", f"the ranges of the text stand for too many sources; {first}-{last} goes"
                )
            elif first == last and not skill_sids:
                self.dropped[first] = None
                self._report(str(first), f"source {first} is not among the skill's sources; the citation is dropped")
            elif len(skill_sids) <= last - first:
                self._report(f"{first}-{last}", f"not all of {first}-{last} are sources of the skill; the others go")
        self.used.update(sids)
        return list(sids)

    def _report(self, ref: str, message: str) -> None:
        if ref not in self._reported:
            self._reported.add(ref)
            self.findings.append(Diagnostic("citation_dropped", "warning", message, ref=ref))

    def write_token(self, sids: list[int]) -> None:
        """Write the sids as one token, or as several where one would be too long to be read again."""
        items = ""
        for sid in map(str, sids):
            if items and len(items) + 1 + len(sid) > MAX_ITEMS:
                self._own.add(self.writer.write(f"[[S:{items}]]"))
                self.writer.write(" ")
                items = ""
            items = f"{items},{sid}" if items else sid
        self._own.add(self.writer.write(f"[[S:{items}]]"))

    def settle(self) -> str:
        """Return the written text, in which only tokens written by this run are read as citations.

        What went may have joined the pieces of another token, or of the backticks that made one code.
        """
        text, own_starts = self.writer.take(everything=True), self._own
        for _ in range(_PASSES):
            tokens = find_tokens(text)
            foreign = [token.start for token in tokens if token.start not in own_starts]
            if not foreign:
                if len(tokens) < len(own_starts):
                    self._note_hidden(tokens)
                return text
            text, own_starts = self._break(text, foreign, own_starts)
        while foreign := sorted(
            {match.start() for source in (TOKEN, SUP) for match in pattern(source).finditer(text)} - own_starts
        ):
            text, own_starts = self._break(text, foreign, own_starts)
        self._note_hidden(find_tokens(text))
        return text

    def _note_hidden(self, live: list[CitationToken]) -> None:
        """Set `used` to what *live* tokens cite: a removed token may have joined backticks that make others code."""
        cited = dict.fromkeys(first for token in live for first, _ in token.items)
        if cited.keys() != self.used.keys():
            self._report("code", "a dropped citation left marks that make text behind it code, with its citations")
        self.used = cited

    def _break(self, text: str, starts: list[int], own_starts: set[int]) -> tuple[str, set[int]]:
        """Put a blank between the first two characters of each foreign token, so that it is never read as one."""
        pieces, position = [], 0
        for start in starts:
            pieces += [text[position : start + 1], " "]
            position = start + 1
        self._report("joined", "a dropped citation left pieces that would make another one; they were parted")
        shifted: set[int] = set()
        parted = 0
        for start in sorted(own_starts):
            while parted < len(starts) and starts[parted] < start:
                parted += 1
            shifted.add(start + parted)
        return "".join([*pieces, text[position:]]), shifted


RenderMode = Literal["links", "superscript", "html", "footnotes"]
MODES = get_args(RenderMode)

Sources = SourcesPool | Mapping[int, Mapping[str, Any]]
"""A pool, or `{sid: row}` with rows as `sources.yaml` writes them."""

_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".avif", ".bmp")
_LINE_BREAK = "\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class _ShownSource(NamedTuple):
    """A source as it is shown: `url` only if it may become a link."""

    sid: int
    title: str
    url: str | None


def _title(text: str) -> str:
    """Escape a title for Markdown: it can neither end its brackets nor its line nor its table cell."""
    return re.sub(r"([\\\[\]|])", r"\\\1", pattern(_LINE_BREAK).sub(" ", text))


_EAGER = 4096


def render_citations(
    text: str,
    sources: Sources,
    *,
    mode: RenderMode = "links",
    keep_unresolved: bool = True,
    first_only: bool = False,
    embed_images: bool = False,
    mark_unknown: bool = False,
) -> str:
    """Show the citations of a text as a reader wants them.

    Args:
        text: The text; its code stays as it is.
        sources: A pool, or `{sid: row}`.
        mode: `links`, `superscript`, `html` or `footnotes`.
        keep_unresolved: Leave tokens in place of which nothing can be shown; else they go, with one blank.
        first_only: Show only the first sid of a token that resolves.
        embed_images: Show sources that are images as images, in the Markdown modes `links` and `superscript`.
        mark_unknown: Show a single number without a source as `[?7]`.

    Raises:
        ValueError: *mode* is none of the above.
        TypeError: A row of *sources* is not a mapping.
    """
    stream = CitationStream(
        sources,
        mode=mode,
        keep_unresolved=keep_unresolved,
        first_only=first_only,
        embed_images=embed_images,
        mark_unknown=mark_unknown,
    )
    return stream.feed(text) + stream.flush()


@dataclass(eq=False, repr=False)
class CitationStream:
    """Renders citations of a text that arrives in pieces.

    However the text is cut, the joined outputs of `feed` and `flush` equal `render_citations` of the whole.

    The arguments are those of `render_citations`; without *listed* the footnotes are not listed at the end of the text. After
    `flush`, `footnotes` are the sids that its footnotes stand for, in the order of their numbers.
    """

    sources: Sources
    _: KW_ONLY
    mode: RenderMode = "links"
    keep_unresolved: bool = True
    first_only: bool = False
    embed_images: bool = False
    mark_unknown: bool = False
    listed: bool = True
    footnotes: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}: {', '.join(MODES)}")
        self._begin()

    def _begin(self) -> None:
        sources = self.sources
        self._rows: Mapping[int, Any] = (
            {} if isinstance(sources, SourcesPool) else {int(s): sources[s] for s in sources}
        )
        self._known = KnownSids([*sources.rows, *sources.aliases] if isinstance(sources, SourcesPool) else self._rows)
        self._shown: dict[int, _ShownSource] = {}
        self._notes: dict[int, int] = {}  # sid to the number of its footnote, in the order they come
        self._scanner = TokenScanner(lookahead=not self.keep_unresolved)
        self._writer = Writer()
        self._skip = False  # the next character goes with a removed token
        self._pieces: list[str] = []
        self._held = 0
        self._worth = 0  # scanning again pays off once this much is held
        self._tail = ""  # the last characters given back, for the blank line before footnotes

    def feed(self, chunk: str) -> str:
        """Take the next piece of the text; return what can be shown for certain."""
        self._pieces.append(chunk)
        self._held += len(chunk)
        # A long undecided line is not scanned anew for each small piece: the work stays linear.
        if self._held < self._worth and "\n" not in chunk and "\r" not in chunk:
            return ""
        return self._advance(final=False)

    def flush(self) -> str:
        """Return what is still held, and end the text; the stream may then be fed another one."""
        text = self._advance(final=True)
        self.footnotes = tuple(self._notes)
        if self._notes and self.listed:
            blank_line = "\n" * (2 - len(self._tail) + len(self._tail.rstrip("\n")))
            noted = [(number, self._get(sid)) for sid, number in self._notes.items()]
            lines = [f"[{number}] {_title(row.title)}" + (f" - {row.url}" if row.url else "") for number, row in noted]
            text += blank_line + "\n".join(["Sources:", *lines])
        self._begin()
        return text

    @staticmethod
    def split(text: str) -> tuple[str, int]:
        """Return *text* without a tail that may belong to a token, and the length of that tail.

        The tail is one or two `[` with any beginning of `S`, `:`, items and `]`, such as `[S` or `[[S:4`, and the blanks
        and zero-width characters before it if a zero-width one is among them.
        """
        tail = held_back(text)
        return text[: len(text) - tail], tail

    def _advance(self, *, final: bool) -> str:
        text = "".join(self._pieces)
        tokens, decided = self._scanner.scan(text, final=final)
        position = 0
        for token in tokens:
            self._copy(text[position : token.start])
            position = token.end
            self._show(token, text)
        self._copy(text[position:decided])
        undecided = text[decided:]
        self._pieces = [undecided] if undecided else []
        self._held = len(undecided)
        self._worth = self._held + self._held // 2 if self._held > _EAGER else 0
        output = self._writer.take(everything=final or self.keep_unresolved)
        self._tail = (self._tail + output)[-2:]
        return output

    def _copy(self, text: str) -> None:
        if self._skip and text:
            text, self._skip = text[1:], False
        self._writer.write(text)

    def _show(self, token: CitationToken, text: str) -> None:
        rendered = self._rendered(token)
        if rendered is None and not self.keep_unresolved:
            self._skip = bool(self._writer.remove(text[token.end : token.end + 1]))
        else:
            self._writer.write(text[token.start : token.end] if rendered is None else rendered)

    def _rendered(self, token: CitationToken) -> str | None:
        """Return what stands in the place of a token, or None if none of its sids resolves."""
        cited: dict[int, _ShownSource | int] = {}
        for first, last in token.items:
            sids = self._known.within(first, last)
            if first == last and not sids and self.mark_unknown:
                cited[-first] = first
            for sid in sids:
                source = self._get(sid)
                cited.setdefault(source.sid, source)
                if self.first_only:
                    return self._join([source])
        return self._join(list(cited.values())) if cited else None

    def _get(self, sid: int) -> _ShownSource:
        source = self._shown.get(sid)
        if source is not None:
            return source
        owner, row = sid, self._rows.get(sid)
        if isinstance(self.sources, SourcesPool):
            owner, row = self.sources.aliases.get(sid, sid), self.sources.get(sid)
        if not isinstance(row, Mapping):
            raise TypeError(f"source {owner} is not a mapping")
        url = first_text(row, "url")
        title = first_text(row, "title") or url or first_text(row, "physical_path") or f"Source {owner}"
        source = self._shown[sid] = _ShownSource(owner, title.strip(), usable_url(url))
        return source

    def _join(self, cited: list[_ShownSource | int]) -> str:
        if self.mode == "html":
            sids = ",".join(str(source.sid) for source in cited if not isinstance(source, int))
            links = " ".join(map(self._link, cited))
            return f'<sup class="cite" data-sids="{sids}">{links}</sup>'
        glue = {"links": " ", "superscript": ",", "footnotes": ""}[self.mode]
        text, block = "", True
        for source in cited:
            url = None if isinstance(source, int) or self.mode == "footnotes" else source.url
            if url and self.embed_images and urlsplit(url).path.lower().endswith(_IMAGES):
                assert not isinstance(source, int)
                text += f"\n\n![{_title(source.title)}]({url})\n*Source {source.sid}: {_title(source.title)}*\n"
                block = True
                continue
            text += ("" if block else glue) + self._link(source)
            block = False
        return text

    def _link(self, source: _ShownSource | int) -> str:
        if isinstance(source, int):
            return f"[?{source}]"
        if self.mode == "html":
            if not source.url:
                return f"[S:{source.sid}]"
            link = f'<a href="{html.escape(source.url)}" target="_blank" rel="noopener noreferrer">'
            return f"{link}[S:{source.sid}]</a>"
        if self.mode == "footnotes":
            return f"[{self._notes.setdefault(source.sid, len(self._notes) + 1)}]"
        title = _title(source.title)
        if self.mode == "links":
            return f"[{title}]({source.url})" if source.url else title
        number = str(source.sid).translate(_SUPERSCRIPT)
        quoted = title.replace('"', '\\"')
        return f'[{number}]({source.url} "{quoted}")' if source.url else number
