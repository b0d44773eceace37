"""Finding the skills that fit a question: the words of texts, one table of weights, a kept index, and the answer.

Nothing here knows policy: a view hands in what may be found.
"""

from __future__ import annotations

from kdskills.errors import OperatorMustAct
from kdskills.exports import tell_homes

try:
    from kdskills.search.index import JoinedIndex, SearchIndex
    from kdskills.search.ranking import CANDIDATES, MAX_QUERY
    from kdskills.search.search import Match, Matches, Searcher, SearchHit, SearchResult
    from kdskills.search.vectors import Embedder, EmbedderFactory, EmbedderGuard, SkillVectors
except ModuleNotFoundError as missing:
    # As in an image that somebody made for generated code: everything else works there.
    raise OperatorMustAct(
        f"skills cannot be searched here, because {missing.name} is not installed",
        code="search_unavailable",
        module=missing.name,
    ) from missing

__all__ = [
    "CANDIDATES",
    "MAX_QUERY",
    "Embedder",
    "EmbedderFactory",
    "EmbedderGuard",
    "JoinedIndex",
    "Match",
    "Matches",
    "SearchHit",
    "SearchIndex",
    "SearchResult",
    "Searcher",
    "SkillVectors",
]

tell_homes(__name__)
