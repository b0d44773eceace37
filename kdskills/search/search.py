"""Answering a question: which skills of a view fit it best, and why."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, NamedTuple

from kdskills.errors import Diagnostic, OperatorMustAct
from kdskills.search.cache_file import IndexDamaged
from kdskills.search.index import JoinedIndex, Postings, SearchIndex
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
from kdskills.search.vectors import Nearest, SkillVectors
from kdskills.search.words import sign_of
from kdskills.skills.model import Skill


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A skill that fits a question.

    Attributes:
        tokens: What loading it costs, about.
        score: How well it fits; higher is better, and only scores of one answer compare.
        why: `{field: words of the question that stand in it}`; empty where only vectors are near.
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
        total: Skills in which any word of the question stands, and those that only vectors are near to.
        more: Whether there are hits after these.
        abstained: Whether nothing fits well enough, so that `hits` is empty.
        diagnostics: What was wrong with the kept index, a plugin or the embedder.
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
    """One page of matches, how many there are in all, whether even the best is too weak to be an answer, and what went wrong."""

    page: tuple[Match, ...]
    total: int
    abstained: bool
    diagnostics: tuple[Diagnostic, ...] = ()


class Searcher:
    """The skills of one view, ready to be searched. Safe from any thread.

    Args:
        index: Where their terms are.
        known: All skills of the snapshot, which the index is to hold.
        listed: Full ids of the skills that may be found; rarity is counted among them alone.
        vectors: Says which of them are near a question in meaning; None ranks by words alone.
    """

    def __init__(
        self,
        index: SearchIndex | JoinedIndex,
        known: Mapping[str, Skill],
        listed: Collection[str],
        vectors: SkillVectors | None = None,
    ) -> None:
        self._index = index
        self._known = known
        self._listed = listed
        self._vectors = vectors
        self._lock = threading.Lock()
        self._generation = -1
        self._owners: list[str] = []
        self._members: list[int] = []
        self._number_of: dict[str, int] = {}
        self._mask = b""
        self._holders: dict[str, int] = {}

    def find(self, query: str, *, limit: int, offset: int = 0, within: Callable[[str], bool] | None = None) -> Matches:
        """Return the skills that fit *query*, the best first, equal ones by full id.

        Args:
            query: Words; nothing in it is a command, and of more than 4,000 characters the rest is not read.
            limit: Most matches of the page.
            offset: Matches to pass over.
            within: Says of a full id whether it may stand in the answer; it changes no score.

        Raises:
            OperatorMustAct: `search_unavailable`; a disk or memory gives back something else than was written.
        """
        question = question_of(query)
        # Before the lock: an embedder may take seconds, and other questions do not wait for it.
        near = Nearest() if self._vectors is None else self._vectors.nearest(query, self._listed, self._known)
        reason = "other searches of this moment find it damaged, too"
        with self._lock:
            for _ in range(_TRIES):
                try:
                    matches = self._find(question, limit, offset, within, near)
                except IndexDamaged as damage:
                    reason = str(damage)
                    self._index.discard(reason, self._index.generation)
                else:
                    if self._generation == self._index.generation:  # else another thread found it damaged meanwhile
                        return matches
        raise OperatorMustAct(
            f"skills cannot be searched: their index is damaged however often it is built anew ({reason})",
            code="search_unavailable",
        )

    def _find(
        self, question: Question, limit: int, offset: int, within: Callable[[str], bool] | None, near: Nearest
    ) -> Matches:
        self._learn_numbers()
        owners = self._owners
        rows = {term: row.before(len(owners)) for term, row in self._index.postings(question.words).items()}
        rarities = {
            term: rarity(len(self._members), self._count(term, rows[term]) if term in rows else 0)
            for term in question.words
        }
        terms = sorted(rarities, key=lambda term: (-rarities[term], term))[:MAX_TERMS]
        rows = {term: rows[term] for term in terms if self._holders.get(term)}
        scores = [0.0] * len(owners)
        for term, row in rows.items():
            factor = rarities[term] / IMPACT_STEPS
            steps = [factor * impact for impact in range(IMPACT_STEPS + 1)]
            for number, impact in zip(row.numbers, row.impacts, strict=True):
                scores[number] += steps[impact]
        matching = [number for number in self._members if scores[number]]
        first = _best(scores, owners, matching, CANDIDATES)
        ranked = self._with_pairs(question, rows, first)
        if not ranked or is_too_low(-ranked[0][0], sum(rarities[term] for term in terms), len(self._members)):
            if not near.full_ids:
                return Matches((), 0, bool(ranked), near.diagnostics)
            first, ranked, matching = [], [], []
        if near.full_ids:
            taken = {number for _, _, number in first}
            rest = [number for number in matching if number not in taken]
            first = ranked = self._fused([*ranked, *_best(scores, owners, rest, len(rest))], near.full_ids)
            matching = [number for _, _, number in ranked]
        if within is not None:
            ranked = [entry for entry in ranked if within(entry[1])]
        if within is not None or offset + limit > len(ranked):
            taken = {number for _, _, number in first}
            rest = [number for number in matching if number not in taken and (within is None or within(owners[number]))]
            total = len(ranked) + len(rest)
            ranked += _best(scores, owners, rest, offset + limit - len(ranked))
        else:
            total = len(matching)
        page = tuple(
            Match(full_id, -score, _why(question, {term: row.fields_in(number) for term, row in rows.items()}))
            for score, full_id, number in ranked[offset : offset + limit]
        )
        return Matches(page, total, False, near.diagnostics)

    def _fused(self, ranked: Sequence[Ranked], nearest: Sequence[str]) -> list[Ranked]:
        """Return the skills of both orders, by the sum of their reciprocal ranks; words and nearness have no common scale."""
        fused: dict[str, float] = defaultdict(float)
        for order in ([full_id for _, full_id, _ in ranked], nearest):
            for rank, full_id in enumerate(order, 1):
                fused[full_id] += 1 / (RANK_OFFSET + rank)
        return sorted((-round(score, 12), full_id, self._number_of[full_id]) for full_id, score in fused.items())

    def _count(self, term: str, row: Postings) -> int:
        """Return how many listed skills have a term."""
        count = self._holders.get(term)
        if count is None:
            count = sum(map(self._mask.__getitem__, row.numbers))
            if len(self._holders) > _MOST_COUNTS:
                self._holders.clear()
            self._holders[term] = count
        return count

    def _with_pairs(self, question: Question, rows: Mapping[str, Postings], candidates: list[Ranked]) -> list[Ranked]:
        """Order the best by words anew: neighbours of the question that are neighbours in a skill count by their rarity there."""
        pairs = [(a, b, weight) for (a, b), weight in question.pairs.items() if a in rows and b in rows]
        if not pairs or not candidates:
            return candidates
        numbers = [number for _, _, number in candidates]
        streams = dict(zip(numbers, self._index.streams(numbers), strict=True))
        shares = {number: pair_share(stream) for number, stream in streams.items()}
        bonuses = dict.fromkeys(streams, 0.0)
        signs = {term: sign_of(term) for pair in pairs for term in pair[:2]}
        signed = {
            term: {number for number, stream in streams.items() if sign in stream} for term, sign in signs.items()
        }
        for first, second, weight in pairs:
            pair = signs[first] + signs[second]
            neighbours = [
                number
                for number in signed[first] & signed[second]
                if pair in streams[number] and rows[first].fields_in(number) and rows[second].fields_in(number)
            ]
            factor = weight * rarity(len(self._members), len(neighbours))
            for number in neighbours:
                bonuses[number] += factor * shares[number]
        return sorted((round(score - bonuses[number], 6), full_id, number) for score, full_id, number in candidates)

    def _learn_numbers(self) -> None:
        """Ask for the numbers of the listed skills, where those known hold no longer."""
        if self._generation == self._index.ready():
            return
        numbers = self._index.numbers(self._known)
        self._generation = self._index.generation
        self._owners = [""] * (1 + max(numbers.values(), default=-1))
        for full_id in self._listed:
            self._owners[numbers[full_id]] = full_id
        self._members = [number for number, full_id in enumerate(self._owners) if full_id]
        self._number_of = {self._owners[number]: number for number in self._members}
        self._mask = bytes(map(bool, self._owners))
        self._holders = {}


RANK_OFFSET: Final = 60
"""Added to ranks before they are turned over, so that the first of one order does not outweigh what both know."""

_TRIES: Final = 20
"""How often an answer is looked for in an index that others renew, or that is built anew: a file, then one in memory."""

_MOST_COUNTS: Final = 4096
"""Terms of which it is remembered how many listed skills have them."""

Ranked = tuple[float, str, int]
"""A negative score, a full id and its number in the index: sorted, the best stands first, and equal ones by id."""


def _best(scores: Sequence[float], owners: Sequence[str], numbers: Sequence[int], count: int) -> list[Ranked]:
    """Return the *count* best of the skills with these numbers; equal scores by id decide who is the last."""
    bound = 0.0
    if len(numbers) > count > 0:
        # Rounded, so that the last digit of a logarithm, which machines differ in, decides nothing.
        bound = nlargest(count, map(scores.__getitem__, numbers))[-1] - 2e-6
    return sorted((-round(scores[n], 6), owners[n], n) for n in numbers if scores[n] >= bound)[: max(0, count)]


def _why(question: Question, fields: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return `{field: words of the question}`, fields in the order of their table, given the fields of each term as bits."""
    why: dict[str, tuple[str, ...]] = {}
    for position, name in enumerate(FIELDS):
        words = [word for term, word in question.words.items() if fields.get(term, 0) >> position & 1]
        if words and name != "lead":  # which is told as the body it begins
            why[name] = tuple(dict.fromkeys(words))
    return why
