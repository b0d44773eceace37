"""Citations found in a text, and rewritten from a skill's own numbers to the pool's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kdskills.errors import Diagnostic
from kdskills.sources.pool import SourceKey, SourcesPool
from kdskills.sources.tokens import MAX_ITEMS, CitationToken, KnownSids, find_tokens, grammar
from kdskills.sources.writer import Writer

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
        while foreign := [match.start() for match in _written_tokens(text) if match.start() not in own_starts]:
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


def _written_tokens(text: str) -> list[re.Match[str]]:
    patterns = grammar()
    return sorted([*patterns.token.finditer(text), *patterns.sup.finditer(text)], key=lambda found: found.start())
