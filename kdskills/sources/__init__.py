"""The turn's pool of sources, and citations: extraction, rewriting, rendering, streaming.

`rows` makes what `sources.yaml` holds citable and gives numbers that never change owner, `tokens` holds the grammar,
`citations` rewrites a skill's numbers to the pool's and shows them to a reader, `resolving` has a resolver complete rows first.
Everything is a frozen value or a pure function, `CitationStream` and `SourceResolver` aside.
"""

from kdskills.exports import tell_homes
from kdskills.sources.citations import (
    Adopted,
    Citation,
    CitationStream,
    RenderMode,
    RewriteResult,
    adopt_citations,
    extract_citations,
    find_citations,
    render_citations,
    rewrite_citations,
)
from kdskills.sources.resolving import ResolveSource, SourceResolver
from kdskills.sources.rows import MergeResult, SourceKey, SourceRow, SourcesPool, normalize_sources, normalize_url

__all__ = [
    "Adopted",
    "Citation",
    "CitationStream",
    "MergeResult",
    "RenderMode",
    "ResolveSource",
    "RewriteResult",
    "SourceKey",
    "SourceResolver",
    "SourceRow",
    "SourcesPool",
    "adopt_citations",
    "extract_citations",
    "find_citations",
    "normalize_sources",
    "normalize_url",
    "render_citations",
    "rewrite_citations",
]

tell_homes(__name__)
