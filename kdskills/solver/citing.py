"""The citations of an answer: which resolve, which do not, and how the answer is shown."""

from __future__ import annotations

from kdskills.solver.result import CitationIssue
from kdskills.sources import SourcesPool, find_citations, render_citations, rewrite_citations
from kdskills.sources.tokens import find_tokens


def cited_sids(text: str, pool: SourcesPool) -> tuple[int, ...]:
    """Return the sids *text* cites that resolve, in order of first appearance."""
    citations = find_citations(text, known=pool)
    return tuple(dict.fromkeys(sid for citation in citations for sid in citation.sids if sid in pool))


def issues_of(text: str, pool: SourcesPool) -> tuple[CitationIssue, ...]:
    """Return one issue for each sid of each citation that names no source; for a wholly unknown range, its first sid."""
    issues = []
    for citation in find_citations(text, known=pool):
        span = (citation.start, citation.end)
        sids = citation.sids or tuple(
            low for token in find_tokens(text[citation.start : citation.end]) for low, _ in token.items
        )
        issues += [CitationIssue(sid=sid, span=span) for sid in dict.fromkeys(sids) if sid not in pool]
    return tuple(issues)


def unknown_sids(text: str, pool: SourcesPool) -> tuple[int, ...]:
    """Return the sids *text* cites that name no source, each once."""
    return tuple(dict.fromkeys(issue.sid for issue in issues_of(text, pool)))


def drop_unknown(text: str, pool: SourcesPool) -> str:
    """Return *text* without citations that name no source; an untouched text stays as it is written."""
    if not unknown_sids(text, pool):
        return text
    return rewrite_citations(text, {sid: sid for sid in (*pool.rows, *pool.aliases)}).text


def rendered(text: str, pool: SourcesPool) -> str:
    """Return *text* with citations as links, those of no source as `[?7]`."""
    unknown: dict[tuple[int, int], list[int]] = {}
    for issue in issues_of(text, pool):
        unknown.setdefault(issue.span, []).append(issue.sid)
    known_sids = {(c.start, c.end): [sid for sid in c.sids if sid in pool] for c in find_citations(text, known=pool)}
    pieces, position = [], 0
    for start, end in sorted(unknown):
        sids = known_sids[(start, end)]
        token = f"[[S:{','.join(map(str, sids))}]]" if sids else ""
        marks = "".join(f"[?{sid}]" for sid in unknown[(start, end)])
        pieces.append(f"{text[position:start]}{token}{marks}")
        position = end
    return render_citations("".join([*pieces, text[position:]]), pool)
