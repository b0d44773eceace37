"""Figures, against values of published tables and by hand, and what holds for all numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.evals.figures import (
    NOTHING,
    Detection,
    confusion,
    mcnemar,
    mean_reciprocal_rank,
    ndcg,
    recall_at,
    share,
    spread,
)


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_of_known_tables(hits, total, low, high):
    """The bounds are those published for the method."""
    found = share(hits, total)
    assert (found.low, found.high) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_an_interval_holds_its_share(first, second):
    """It lies between 0 and 1, has the share in it, and mirrors the interval of what is left."""
    hits, total = sorted((first, second))
    found, mirrored = share(hits, total), share(total - hits, total)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert (found.low, found.high) == (pytest.approx(1 - mirrored.high), pytest.approx(1 - mirrored.low))


def test_no_share_of_less():
    """More hits than rows are a mistake, and none of none may be anything."""
    with pytest.raises(ValueError, match="no share"):
        share(3, 2)
    assert share(0, 0)[2:] == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (10, 2, 0.038574), (6, 6, 1.0), (1, 9, 0.021484)],
)
def test_mcnemar_of_known_pairs(first, second, p):
    """The exact two-sided values of the binomial."""
    assert mcnemar(first, second) == pytest.approx(p, abs=5e-7)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial(first, second):
    """The same as exact fractions give, whichever is named first, and never beyond 1."""
    pairs = first + second
    tail = sum(math.comb(pairs, k) for k in range(min(first, second) + 1))
    assert mcnemar(first, second) == pytest.approx(float(min(Fraction(1), Fraction(2 * tail, 2**pairs))))
    assert mcnemar(first, second) == pytest.approx(mcnemar(second, first))


def test_precision_recall_and_f1():
    """By hand: 6 of 8 done were right, 6 of 9 right ones were done."""
    found = Detection(6, 2, 3, 4)
    assert (found.precision.value, found.recall.value) == (0.75, pytest.approx(2 / 3))
    assert found.f1 == pytest.approx(2 * 0.75 * (2 / 3) / (0.75 + 2 / 3))
    assert Detection().f1 == 0.0


@given(st.builds(Detection, *[st.integers(0, 1000)] * 4))
def test_f1_lies_between_precision_and_recall(found):
    """It is their harmonic mean."""
    values = sorted((found.precision.value, found.recall.value))
    assert values[0] - 1e-12 <= found.f1 <= values[1] + 1e-12


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from(["a", "b", None]))))
def test_a_confusion_table_counts_every_pair(pairs):
    """Each pair stands in one cell; none is a name of its own."""
    table = confusion(pairs)
    assert sum(row.total() for row in table.values()) == len(pairs)
    for expected, picked in pairs:
        assert table[expected or NOTHING][picked or NOTHING] == pairs.count((expected, picked))


def test_mean_and_deviation():
    """Sample deviation; of one value or none it is 0."""
    assert spread([2, 4, 4, 4, 5, 5, 7, 9]) == (5, pytest.approx(math.sqrt(32 / 7)))
    assert (spread([3]), spread([])) == ((3, 0), (0, 0))


def test_measures_of_ranks():
    """By hand: first, third, eleventh and not found."""
    ranks = [1, 3, 11, None]
    assert [recall_at(ranks, first).value for first in (1, 3, 5)] == [0.25, 0.5, 0.5]
    assert mean_reciprocal_rank(ranks) == pytest.approx((1 + 1 / 3 + 1 / 11) / 4)
    assert ndcg(ranks) == pytest.approx((1 + 0.5) / 4)
    assert (mean_reciprocal_rank([]), ndcg([])) == (0, 0)


@given(st.lists(st.none() | st.integers(1, 50), min_size=1))
def test_measures_of_ranks_lie_in_order(ranks):
    """A deeper look finds no less, and each measure lies between the recalls it is between."""
    recalls = [recall_at(ranks, first).value for first in (1, 3, 5, 10, 50)]
    assert recalls == sorted(recalls)
    assert recalls[0] - 1e-12 <= ndcg(ranks) <= recalls[3] + 1e-12
    assert recalls[0] - 1e-12 <= mean_reciprocal_rank(ranks) <= recalls[4] + 1e-12
