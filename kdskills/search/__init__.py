"""Finding the skills that fit a question: the words of texts, one table of weights, a kept index, and the answer.

Nothing here knows policy: a view hands in what may be found.
"""

from __future__ import annotations

from kdskills.search.index import SearchIndex
from kdskills.search.search import Match, Matches, Searcher, SearchHit, SearchResult

__all__ = ["Match", "Matches", "SearchHit", "SearchIndex", "SearchResult", "Searcher"]
