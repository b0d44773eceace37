"""Answering a question: which skills of a view fit it best, and why."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kdskills.errors import Diagnostic
from kdskills.search.index import IndexDamaged, SearchIndex
from kdskills.search.ranking import (
    CANDIDATES,
    FIELDS,
    IMPACT_STEPS,
    MAX_TERMS,
    Question,
    is_too_low,
    pair_share,
    question_of,
    rarity,
)
from kdskills.search.words import SIGNS
from kdskills.skills.model import Skill


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A skill that fits a question.

    Attributes:
        tokens: What loading it costs, about.
        score: How well it fits; higher is better, and only scores of one answer compare.
        why: `{field: words of the question that stand in it}`.
    """

    full_id: str
    short_id: str
    name: str
    description: str
    tokens: int
    score: float
    why: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer to a question.

    Attributes:
        hits: The best first; equal scores by full id.
        total: Skills in which any word of the question stands.
        more: Whether there are hits after these.
        abstained: Whether nothing fits well enough, so that `hits` is empty.
        diagnostics: What was wrong with the kept index.
    """

    hits: tuple[SearchHit, ...]
    total: int
    more: bool
    abstained: bool = False
    diagnostics: tuple[Diagnostic, ...] = ()


class Match(NamedTuple):
    """A skill in which words of a question stand: its score, and `{field: words}`."""

    full_id: str
    score: float
    why: dict[str, tuple[str, ...]]


class Matches(NamedTuple):
    """One page of matches, how many there are in all, and whether even the best is too weak to be an answer."""

    page: tuple[Match, ...]
    total: int
    abstained: bool


class Searcher:
    """The skills of one view, ready to be searched. Safe from any thread.

    Args:
        index: Where their terms are.
        known: All skills of the snapshot, which the index is to hold.
        listed: Full ids of the skills that may be found; rarity is counted among them alone.
    """

    def __init__(self, index: SearchIndex, known: Mapping[str, Skill], listed: Collection[str]) -> None:
        self._index = index
        self._known = known
        self._listed = listed
        self._lock = threading.Lock()
        self._generation = -1
        self._owners: dict[int, str] = {}

    def find(self, query: str, *, limit: int, offset: int = 0, within: Callable[[str], bool] | None = None) -> Matches:
        """Return the skills that fit *query*, the best first, equal ones by full id.

        Args:
            query: Words; nothing in it is a command, and of more than 4,000 characters the rest is not read.
            limit: Most matches of the page.
            offset: Matches to pass over.
            within: Says of a full id whether it may stand in the answer; it changes no score.
        """
        question = question_of(query)
        with self._lock:
            try:
                return self._find(question, limit, offset, within)
            except IndexDamaged as damage:
                self._index.discard(str(damage))
                return self._find(question, limit, offset, within)

    def _find(self, question: Question, limit: int, offset: int, within: Callable[[str], bool] | None) -> Matches:
        owners = self._current_owners()
        rows = self._index.postings(question.words, owners)
        rarities = {term: rarity(len(owners), len(rows.get(term, ()))) for term in question.words}
        terms = sorted(rarities, key=lambda term: (-rarities[term], term))[:MAX_TERMS]
        scores: dict[int, float] = defaultdict(float)
        for term in terms:
            factor = rarities[term] / IMPACT_STEPS
            for number, impact, _ in rows.get(term, ()):
                scores[number] += factor * impact
        last = len(scores) if within is not None else max(CANDIDATES, offset + limit)
        first = _best(scores, owners, last)
        numbers = {number for _, _, number in first}
        holders = {
            term: {number: bits for number, _, bits in rows[term] if number in numbers}
            for term in terms
            if term in rows
        }
        ranked = self._with_pairs(question, holders, first[:CANDIDATES], len(owners)) + first[CANDIDATES:]
        if not ranked or is_too_low(-ranked[0][0], sum(rarities[term] for term in terms), len(owners)):
            return Matches((), 0, abstained=bool(ranked))
        if within is not None:
            ranked = [entry for entry in ranked if within(entry[1])]
        page = [
            Match(
                full_id, -score, _why(question, {term: row[number] for term, row in holders.items() if number in row})
            )
            for score, full_id, number in ranked[offset : offset + limit]
        ]
        return Matches(tuple(page), len(scores) if within is None else len(ranked), abstained=False)

    def _with_pairs(
        self, question: Question, holders: Mapping[str, Collection[int]], candidates: list[Ranked], total: int
    ) -> list[Ranked]:
        """Order the best by words anew: neighbours of the question that are neighbours in a skill count by their rarity there."""
        pairs = [(a, b, weight) for (a, b), weight in question.pairs.items() if a in holders and b in holders]
        if not pairs or not candidates:
            return candidates
        streams = self._index.streams([number for _, _, number in candidates])
        shares = {number: pair_share(stream) for number, stream in streams.items()}
        bonuses = dict.fromkeys(streams, 0.0)
        for first, second, weight in pairs:
            pair = SIGNS[first] + SIGNS[second]
            both = [number for number in holders[first] if number in holders[second] and number in streams]
            neighbours = [number for number in both if pair in streams[number]]
            factor = weight * rarity(total, len(neighbours))
            for number in neighbours:
                bonuses[number] += factor * shares[number]
        return sorted((round(score - bonuses[number], 6), full_id, number) for score, full_id, number in candidates)

    def _current_owners(self) -> dict[int, str]:
        """Return `{number in the index: full id}` of the listed skills."""
        if self._generation != self._index.ready():
            numbers = self._index.numbers(self._known)
            self._owners = {numbers[full_id]: full_id for full_id in self._listed}
            self._generation = self._index.generation
        return self._owners


Ranked = tuple[float, str, int]
"""A negative score, a full id and its number in the index: sorted, the best stands first, and equal ones by id."""


def _best(scores: Mapping[int, float], owners: Mapping[int, str], count: int) -> list[Ranked]:
    """Return the *count* best, or all with the last one's score cut by id."""
    # Rounded, so that the last digit of a logarithm, which machines differ in, decides nothing.
    ordered = sorted(scores.values(), reverse=True)
    bound = ordered[count - 1] - 2e-6 if len(ordered) > count else 0.0
    return sorted((-round(score, 6), owners[n], n) for n, score in scores.items() if score >= bound)[:count]


def _why(question: Question, fields: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return `{field: words of the question}`, fields in the order of their table, given the fields of each term as bits."""
    why: dict[str, tuple[str, ...]] = {}
    for position, name in enumerate(FIELDS):
        words = [word for term, word in question.words.items() if fields.get(term, 0) >> position & 1]
        if words and name != "lead":  # which is told as the body it begins
            why[name] = tuple(dict.fromkeys(words))
    return why
