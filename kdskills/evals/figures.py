"""Figures of evaluations, as pure functions: shares with their intervals, tests of pairs, measures of rankings.

What each figure says, and what it does not, is in `docs/explanation/eval-figures.md`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

Z_95: Final = 1.959963984540054
"""How many standard deviations the middle 95 % of a normal distribution reach to each side."""


class Share(NamedTuple):
    """How many of a total, as a share from 0 to 1, with the bounds of its 95 % interval; of nothing, 0 in 0 to 1."""

    hits: int
    total: int
    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Return the share as JSON, rounded to four digits."""
        return {name: round(number, 4) for name, number in self._asdict().items()}

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f}; {self.hits} of {self.total})"


def share(hits: int, total: int, z: float = Z_95) -> Share:
    """Return *hits* of *total* with its interval by Wilson's score, which holds for few rows and near 0 and 1, too.

    Raises ValueError unless 0 <= hits <= total.
    """
    if not 0 <= hits <= total:
        raise ValueError(f"{hits} of {total} is no share")
    if not total:
        return Share(0, 0, 0.0, 0.0, 1.0)
    value, spread = hits / total, z * z / total
    middle = (value + spread / 2) / (1 + spread)
    reach = z / (1 + spread) * math.sqrt(value * (1 - value) / total + spread / (4 * total))
    # At the ends the bound is the end itself; the last digit of a root must not move it.
    return Share(
        hits,
        total,
        value,
        0.0 if not hits else max(0.0, middle - reach),
        1.0 if hits == total else min(1.0, middle + reach),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value that two variants are equally good, by the pairs in which only one was right.

    Pairs in which both were right, or both wrong, say nothing about it. Raises ValueError for counts below 0.
    """
    if min(only_first, only_second) < 0:
        raise ValueError("counts are 0 or more")
    pairs, fewer = only_first + only_second, min(only_first, only_second)
    logs = (
        math.lgamma(pairs + 1) - math.lgamma(k + 1) - math.lgamma(pairs - k + 1) - pairs * math.log(2)
        for k in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


class Detection(NamedTuple):
    """How often something was done where it was right and where it was wrong to, and not done likewise."""

    true_positives: int = 0
    false_positives: int = 0
    false_negatives: int = 0
    true_negatives: int = 0

    @property
    def precision(self) -> Share:
        """How much of what was done was right."""
        return share(self.true_positives, self.true_positives + self.false_positives)

    @property
    def recall(self) -> Share:
        """How much of what was right to do was done."""
        return share(self.true_positives, self.true_positives + self.false_negatives)

    @property
    def f1(self) -> float:
        """The harmonic mean of both; 0 where nothing was done right."""
        weight = 2 * self.true_positives + self.false_positives + self.false_negatives
        return 2 * self.true_positives / weight if weight else 0.0


NOTHING: Final = "(none)"
"""Name of the row and the column of a confusion table where no skill was right, or none was picked."""

Confusion = dict[str, Counter[str]]
"""`{expected: {picked: times}}`, both sorted."""


def confusion(pairs: Iterable[tuple[str | None, str | None]]) -> Confusion:
    """Return the table of pairs of what was expected and what was picked; None is `NOTHING`."""
    table: dict[str, list[str]] = {}
    for expected, picked in pairs:
        table.setdefault(expected or NOTHING, []).append(picked or NOTHING)
    return {expected: Counter(sorted(table[expected])) for expected in sorted(table)}


class Spread(NamedTuple):
    """Mean and sample standard deviation; the latter is 0 of fewer than two values."""

    mean: float
    stddev: float


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of *values*; of none, 0."""
    if not values:
        return Spread(0.0, 0.0)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


Ranks = Sequence[int | None]
"""For each row the rank of the first right skill, from 1; None where it was not found."""


def recall_at(ranks: Ranks, first: int) -> Share:
    """Return in how many rows a right skill is among the *first*."""
    return share(sum(rank is not None and rank <= first for rank in ranks), len(ranks))


def mean_reciprocal_rank(ranks: Ranks) -> float:
    """Return the mean of 1 / rank: 1 when all are first, 0.5 when all are second; what was not found counts 0."""
    return math.fsum(1 / rank for rank in ranks if rank) / len(ranks) if ranks else 0.0


def ndcg(ranks: Ranks, first: int = 10) -> float:
    """Return the normalised gain among the *first*: with one right skill a row, the mean of 1 / log2(1 + rank)."""
    gains = (1 / math.log2(1 + rank) for rank in ranks if rank and rank <= first)
    return math.fsum(gains) / len(ranks) if ranks else 0.0
