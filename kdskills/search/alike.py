"""Skills that cannot be told apart by what they say: each is the other's best answer to its own description.

Only skills with much of a description in common are compared, so that ordinary ones cost their descriptions and nothing
more, and thousands that are alike cost a bounded time. How the bound was chosen is told in `docs/explanation/search.md`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from contextlib import closing
from typing import Final, NamedTuple

from kdskills.search.index import SearchIndex
from kdskills.search.ranking import stems_of
from kdskills.search.search import Match, Searcher
from kdskills.search.words import Lexicon, runs
from kdskills.skills.model import Skill

ALIKE_SCORE: Final = 0.7
"""What another skill scores for a description, as a share of what the described one scores, on average of both directions.
Of 1,240 public skills 248 pairs are each other's best other answer, and 11 are told: by reading, seven do one job twice, and
four are siblings that differ by one word which is in both descriptions or in no id. 0.6 adds seven, most of them ordinary
siblings; 0.8 leaves out four that do one job twice."""

COMMON_SHARE: Final = 0.75
"""Terms of the shorter description that both must have to be compared; pairs that reach the bound have 0.8 or more."""

MAX_TEXT: Final = 1024
"""Characters of a description that decide whether skills are compared."""

MAX_HOLDERS: Final = 100
"""A term in more descriptions than this leads to no comparison."""

MAX_PAIRS: Final = 500
"""Pairs that are compared, those with most in common first."""

MIN_AROUND: Final = 200
"""Skills among which rarity is counted, where there are as many: among two alone no word is rare. From ten on a share of a
score stays within 0.05 of what it is among a thousand."""

MAX_SHARED: Final = 8
"""Shared words that are told."""


class AlikePair(NamedTuple):
    """Two skills, by their keys in order, and the first words of the first's description that stand in the other, too."""

    first: str
    second: str
    shared: tuple[str, ...]


def alike_skills(skills: Mapping[str, Skill]) -> list[AlikePair]:
    """Return the pairs of *skills*, by any keys, that a model cannot tell apart; sorted, and the same on every machine.

    Such a pair is mutual: of all others each answers the other's description best, and nearly as well as the described
    skill. Told apart are two each of which has a word in its id and description that the other has in neither, since that is what a
    model reads, and two of which one names the other in its description. Nothing is written but a temporary file.
    """
    pairs = _pairs_in_common(skills)
    compared = dict.fromkeys(key for pair in pairs for key in pair)
    best: dict[str, tuple[str, float, Match]] = {}
    with closing(SearchIndex()) as index:
        rest = sorted(skills.keys() - compared)[: max(0, MIN_AROUND - len(compared))] if compared else ()
        around = {key: skills[key] for key in (*compared, *rest)}
        searcher = Searcher(index, around, around)
        for key in compared:
            page = searcher.find(skills[key].description, limit=2).page
            own = next((match.score for match in page if match.full_id == key), 0.0)
            other = next((match for match in page if match.full_id != key), None)
            if own > 0 and other is not None:
                best[key] = (other.full_id, min(other.score / own, 1.0), other)
    alike = []
    for first in sorted(best):
        second, score, match = best[first]
        back, other_score, _ = best.get(second, ("", 0.0, None))
        mutual = back == first and first < second and score + other_score >= 2 * ALIKE_SCORE
        if mutual and not _told_apart(skills[first], skills[second]):
            words = dict.fromkeys(word for name in match.why for word in match.why[name])
            alike.append(AlikePair(first, second, tuple(words)[:MAX_SHARED]))
    return alike


def _pairs_in_common(skills: Mapping[str, Skill]) -> list[tuple[str, str]]:
    """Return the pairs whose descriptions have much in common, most first."""
    terms = {key: frozenset(stems_of(skills[key].description[:MAX_TEXT])) for key in sorted(skills)}
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for key, held in terms.items():
        for term in held:
            holders[term].append(key)
    rows = []
    for first, held in terms.items():
        rare = [term for term in held if len(holders[term]) <= MAX_HOLDERS]
        counts = Counter(key for term in rare for key in holders[term] if key > first)
        for second, count in counts.items():
            if (
                2 * count >= min(len(rare), len(terms[second]))
                and (share := _share(held, terms[second])) >= COMMON_SHARE
            ):
                rows.append((-share, first, second))
    return [(first, second) for _, first, second in sorted(rows)[:MAX_PAIRS]]


def _share(first: Set[str], second: Set[str]) -> float:
    return len(first & second) / min(len(first), len(second))


def _told_apart(first: Skill, second: Skill) -> bool:
    """Whether id and description of both have a word that those of the other lack, or a description names the other skill."""
    pairs = ((first, second), (second, first))
    return any(_names(one.description, other) for one, other in pairs) or all(_own_words(*pair) for pair in pairs)


def _names(text: str, skill: Skill) -> bool:
    """Whether *text* has the full id of *skill*, or the id where that is no plain word."""
    ids = (skill.full_id,) if skill.id.isalnum() else (skill.full_id, skill.id)
    return any(re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", text, re.IGNORECASE) for each in ids)


def _own_words(skill: Skill, other: Skill) -> Set[str]:
    """Return the words that *skill* has in its id and in its description, and *other* in neither."""
    others = {*stems_of(other.id), *stems_of(other.description)}
    words = _words(skill.id) & _words(skill.description)
    return {word for word in words if not others.issuperset(Lexicon.latest()[word.encode()].stems)}


def _words(text: str) -> Set[str]:
    return frozenset(run.decode().casefold() for run in runs(text))
