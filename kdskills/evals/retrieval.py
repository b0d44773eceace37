"""The kind `retrieval`: does the search that models use find the right skill for a request. No model is asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from kdskills.evals.figures import mean_reciprocal_rank, ndcg, recall_at
from kdskills.evals.files import Eval
from kdskills.evals.results import RowResult
from kdskills.search import SearchHit, SearchResult

DEPTH: Final = 100
"""How many skills of an answer are looked at; a right one behind them counts as not found."""

PICKED: Final = 10


class Search(Protocol):
    """What `SkillView.search` is: the search that the tool and the operation `skills.search` use."""

    def __call__(self, query: str, *, limit: int) -> SearchResult:
        """Return the skills that fit *query*, the best first."""
        ...


def rank_rows(evals: Iterable[Eval], search: Search) -> Iterator[RowResult]:
    """Yield the result of each evaluation, in order, as soon as it is ranked.

    A row is passed when a right skill stands first or, where none is right, no skill that must not be loaded does.
    `facts` has `rank`, from 1, where one is right and found, and of a miss `pulled`: the words that put the wrong skill first.
    """
    for eval_ in evals:
        begun = time.monotonic()
        hits = search(eval_.prompt, limit=DEPTH).hits
        yield _result(eval_, hits, round(1000 * (time.monotonic() - begun)))


def _result(eval_: Eval, hits: tuple[SearchHit, ...], duration_ms: int) -> RowResult:
    right = {name for name in (eval_.skill, *eval_.acceptable) if name}
    rank = next((number for number, hit in enumerate(hits, 1) if hit.full_id in right), None)
    first = hits[0] if hits else None
    clear = first is None or bool(eval_.must_not and first.full_id not in eval_.must_not)
    passed = rank == 1 if right else clear
    facts: dict[str, Any] = {"expects": True, "rank": rank} if right else {"expects": False}
    if not passed and first is not None:
        right_hit = hits[rank - 1] if rank else None
        facts["pulled"] = {first.full_id: pulling_words(first, right_hit)}
    return RowResult(
        eval=eval_.id,
        skill=eval_.skill or eval_.owner,
        status="passed" if passed else "failed",
        picked=tuple(hit.full_id for hit in hits[:PICKED]),
        duration_ms=duration_ms,
        facts=facts,
    )


def pulling_words(wrong: SearchHit, right: SearchHit | None) -> Mapping[str, tuple[str, ...]]:
    """Return `{field: words}` of the request that stand in the *wrong* skill and not in that field of the *right* one.

    Where the right one has them all, those of the wrong one: then it is shorter, or has them more often.
    """
    has = {} if right is None else right.why
    only = {
        name: words
        for name, words in (
            (name, tuple(w for w in all_ if w not in has.get(name, ()))) for name, all_ in wrong.why.items()
        )
        if words
    }
    return only or dict(wrong.why)


def retrieval_figures(rows: Iterable[RowResult]) -> dict[str, Any]:
    """Return figures of ranked rows: `recall@1`, `@3`, `@5` with intervals, `mrr`, `ndcg@10`, `confused`, `misses`.

    Rows for which no skill is right count in `refused` alone: how many kept clear of what must not be loaded.
    """
    rows = list(rows)
    expecting = [row for row in rows if row.facts.get("expects")]
    ranks = [row.facts.get("rank") for row in expecting]
    refusing = [row for row in rows if not row.facts.get("expects")]
    misses = [row for row in expecting if row.status != "passed"]
    confused = Counter((row.skill or "", row.picked[0]) for row in misses if row.picked)
    return {
        **{f"recall@{first}": recall_at(ranks, first).to_json() for first in (1, 3, 5)},
        "mrr": round(mean_reciprocal_rank(ranks), 4),
        "ndcg@10": round(ndcg(ranks), 4),
        "rows": len(expecting),
        "refused": {"hits": sum(row.status == "passed" for row in refusing), "total": len(refusing)},
        "confused": [
            {"expected": expected, "picked": picked, "times": times}
            for (expected, picked), times in sorted(confused.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        "misses": [
            {
                "eval": row.eval,
                "expected": row.skill,
                "rank": row.facts.get("rank"),
                "pulled": row.facts.get("pulled", {}),
            }
            for row in misses
        ],
    }
