"""The ranking: one table of constants, what a skill's texts weigh, and what is asked.

A term's impact in a skill is its weighted, length-normalised count over all fields, saturated (BM25F); it depends on that
skill alone. Its rarity is counted among the skills of the searching view. So nothing outside the view changes a score. The
best by words are ordered anew by the neighbours they share with the question. How the constants were chosen, with figures,
is told in `docs/explanation/search.md`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

from kdskills.search.words import Lexicon, Word, runs


class FieldWeight(NamedTuple):
    """How a field counts.

    Attributes:
        weight: Of one mention in a field of the usual length.
        length: The usual length, in words.
        mentions: How many mentions count, so that saying a word again and again raises no skill.
    """

    weight: float
    length: float
    mentions: int


FIELDS: Final[Mapping[str, FieldWeight]] = MappingProxyType(
    {
        "name": FieldWeight(5.0, 3, 1),
        "description": FieldWeight(3.0, 40, 1),
        "keywords": FieldWeight(3.0, 10, 1),
        "lead": FieldWeight(0.7, 200, 5),
        "body": FieldWeight(0.5, 900, 10),
        "files": FieldWeight(0.5, 40, 2),
    }
)
"""Fields in the order they are told of. The lead is the beginning of the body and counts there, too."""

LENGTH_NORM: Final = 0.6
"""From 0, length plays no part, to 1, a mention in a field twice as long counts half."""

_BITS: Final = {name: 1 << number for number, name in enumerate(FIELDS)}
_OTHERS: Final = tuple(name for name in FIELDS if name != "body")

_DIGIT: Final = 20
"""Bits for a count: more than the words of a body can be."""

_DIGIT_MASK: Final = (1 << _DIGIT) - 1
_ONE: Final = {name: 1 << _DIGIT * place for place, name in enumerate(("body", *_OTHERS))}
"""A mention in each field. A sum of mentions is a number whose digits are counts, the last one that of the body."""

_IN_LEAD: Final = _ONE["lead"] + _ONE["body"]
"""A mention in the lead is one in the body, too."""

SATURATION: Final = 3.0
"""The weighted count at which an impact is half of what it can be."""

LEAD: Final = 2048
"""Characters of the lead."""

PAIR_WEIGHT: Final = 0.5
GAP_WEIGHT: Final = 0.25
"""What neighbours add, against a word as rare: those of the question, and those with one word between them there."""

CANDIDATES: Final = 100
"""How many of the best by words are ordered anew by pairs."""

MAX_QUERY: Final = 4000
"""Characters of a question that are read."""

MAX_TERMS: Final = 64
"""Terms of a question that count: the rarest."""

LOW_SCORE: Final = 0.9
LOW_SHARE: Final = 0.4
"""Below both, in roots of the rarity asked for and as a share of it, the best score is no answer. Of 404 requests that a skill
serves 0.5 % are refused; of 72 that none serves 83 %, of 404 whose publisher's skills were taken away 15 %."""

FEW_SKILLS: Final = 20
"""Among fewer, rarity tells too little to refuse an answer."""

IMPACT_STEPS: Final = 255


class SkillTerms(NamedTuple):
    """What a skill is found by.

    Attributes:
        mentions: `{word of one stem: how often which fields say it}`, as one number.
        entries: `{such a number: entry}`; times 256, how much the skill says of a term, from 1 to `IMPACT_STEPS`; added to it
            the fields the term stands in, as bits in the order of FIELDS.
        stream: One sign for each word of each field, with a line feed between fields.
    """

    mentions: dict[Word, int]
    entries: dict[int, int]
    stream: str


def skill_terms(texts: Mapping[str, str], lexicon: Lexicon) -> SkillTerms:
    """Return what a skill with these `{field: text}` is found by; the lead is taken from the body."""
    words = {name: lexicon.words(text) for name, text in texts.items() if name != "body"}
    body = texts.get("body", "")
    # What the cut parts in two is read as two words, which harms nothing.
    lead, rest = lexicon.words(body[:LEAD]), lexicon.words(body[LEAD:])
    signs = {name: "".join(said) for name, said in words.items()}
    signs["lead"] = "".join(lead)
    signs["body"] = signs["lead"] + "".join(rest)
    mentions = Counter(lead)
    for word, count in mentions.items():
        mentions[word] = count * _IN_LEAD
    mentions.update(rest)  # in C, where one is one mention in the body
    for name, said in words.items():
        one = _ONE[name]
        for word in said:
            mentions[word] = mentions.get(word, 0) + one
    for word in [word for word in mentions if not word.stem]:
        count = mentions.pop(word)
        for part in word.parts:
            mentions[part] = mentions.get(part, 0) + count
    entries = _entries(set(mentions.values()), {name: len(line) for name, line in signs.items()})
    stream = "\n".join([signs[name] for name in FIELDS if name != "lead" and name in signs])
    return SkillTerms(mentions, entries, stream)


def _entries(sums: Set[int], lengths: Mapping[str, int]) -> dict[int, int]:
    """Return the entry for each of these sums of mentions, in fields of so many words; a skill has some fifty different ones."""
    fields = [(_steps(name, lengths.get(name, 0)), _BITS[name]) for name in _OTHERS]
    in_body, most = _steps("body", lengths["body"]), FIELDS["body"].mentions
    elsewhere: dict[int, tuple[float, int]] = {}
    entries = {}
    for mentions in sums:
        others = mentions >> _DIGIT
        if others not in elsewhere:
            elsewhere[others] = _elsewhere(others, fields)
        weight, bits = elsewhere[others]
        if count := mentions & _DIGIT_MASK:
            weight += in_body[count] if count < most else in_body[most]
            bits |= _BITS["body"]
        entries[mentions] = (round(IMPACT_STEPS * weight / (SATURATION + weight)) or 1) << 8 | bits
    return entries


def _elsewhere(mentions: int, fields: Sequence[tuple[list[float], int]]) -> tuple[float, int]:
    """Return what these mentions, all but those of the body, weigh in these fields, and in which of them they are, as bits."""
    weight, bits = 0.0, 0
    for steps, bit in fields:
        if count := mentions & _DIGIT_MASK:
            weight += steps[count] if count < len(steps) else steps[-1]
            bits |= bit
        mentions >>= _DIGIT
    return weight, bits


def stems_of(text: str) -> list[str]:
    """Return the stems of *text* in order, without words of grammar."""
    return [stem for word in Lexicon.latest().words(text) for stem in word.stems]


def _steps(name: str, length: int) -> list[float]:
    """Return what 0, 1, 2, … mentions weigh in a field of this many words."""
    weight, usual, most = FIELDS[name]
    share = weight / (1 - LENGTH_NORM + LENGTH_NORM * length / usual)
    return [share * count for count in range(most + 1)]


class Question(NamedTuple):
    """What is asked, as terms.

    Attributes:
        words: `{term: the word it was asked with}`, in the order asked.
        pairs: `{two terms: what they add as neighbours}`.
    """

    words: dict[str, str]
    pairs: dict[tuple[str, str], float]


def question_of(query: str) -> Question:
    """Return the terms of the first 4,000 characters of *query*; any text has an answer."""
    words: dict[str, str] = {}
    sequence: list[str] = []
    lexicon = Lexicon.latest()
    for run in runs(query[:MAX_QUERY]):
        for stem in lexicon[run].stems:
            words.setdefault(stem, run.decode())
            sequence.append(stem)
    pairs = dict.fromkeys(zip(sequence, sequence[2:], strict=False), GAP_WEIGHT)
    return Question(words, pairs | dict.fromkeys(pairwise(sequence), PAIR_WEIGHT))


def pair_share(stream: str) -> float:
    """Return what one pair of neighbours counts in a skill with this stream."""
    return 1 / (2 - LENGTH_NORM + LENGTH_NORM * len(stream) / FIELDS["body"].length)


def rarity(total: int, holders: int) -> float:
    """Return how much a term says that *holders* of *total* skills have."""
    return math.log(1 + (total - holders + 0.5) / (holders + 0.5))


def is_too_low(score: float, reachable: float, total: int) -> bool:
    """Whether the best score among *total* skills is no answer to a question whose terms have this rarity in sum."""
    return total >= FEW_SKILLS and score < LOW_SCORE * math.sqrt(reachable) and score < LOW_SHARE * reachable
