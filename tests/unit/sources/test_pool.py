"""The pool: a sid never changes owner, prior rows never vanish."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given

from kdskills.errors import BadRequest
from kdskills.sources import SourcesPool
from kdskills.sources.rows import MAX_SID

A, B, C, D = ({"url": f"https://{name}.example/x"} for name in "abcd")


def test_numbers_of_new_rows():
    """Prior 1, 7 and new 7 (other URL), 3, none give 8, 3, 9."""
    pool = SourcesPool.from_rows([{"sid": 1, **A}, {"sid": 7, **B}])
    result = pool.merge([{"sid": 7, **C}, {"sid": 3, **D}, {"url": "https://e.example/x"}])
    assert (result.added, dict(result.sid_map)) == ((8, 3, 9), {7: 8, 3: 3})
    assert list(result.pool.rows) == [1, 3, 7, 8, 9]


def test_known_sources_keep_their_number():
    """A row of a known source gets that source's sid, whatever its file calls it."""
    pool = SourcesPool.from_rows([{"sid": 5, **A}])
    result = pool.merge([{"sid": 1, "url": "HTTPS://A.example:443/x/#top"}])
    assert (dict(result.sid_map), result.added, result.merged) == ({1: 5}, (), (5,))
    assert result.pool is pool


def test_two_rows_of_one_new_source():
    """Within one file too, a source has one number; both sids lead to it."""
    result = SourcesPool().merge([{"sid": 4, **A}, {"sid": 2, **A}, A])
    assert (dict(result.sid_map), result.added, result.merged, list(result.pool.rows)) == ({4: 4, 2: 4}, (4,), (), [4])


def test_rows_without_sid_are_in_no_map():
    """They join the pool but no body can cite them."""
    result = SourcesPool().merge([A, {"sid": 1, **B}])
    assert (result.added, dict(result.sid_map)) == ((1, 2), {1: 2})


def test_path_rows_live():
    """A path is an identity as good as a URL, and comes second to one."""
    pool = SourcesPool.from_rows([{"sid": 1, "physical_path": "a.csv"}, {"sid": 2, "physical_path": "a.csv", **A}])
    assert [row.identity for row in pool] == ["a.csv", "https://a.example/x"]


def test_raw_prior_duplicates_become_aliases():
    """Of several prior rows of one source the lowest sid has it, whatever the order; the others still resolve."""
    pool = SourcesPool.from_rows([{"sid": 9, "title": "a long title", **A}, {"sid": 4, **A}, {"sid": 6, **B}])
    assert (list(pool.rows), dict(pool.aliases)) == ([4, 6], {9: 4})
    assert pool.get(9) is pool.get(4)
    assert pool.get(9)["title"] == "a long title"
    assert (9 in pool, 5 in pool, pool.get(5), len(pool)) == (True, False, None, 2)


def test_aliases_are_never_issued_again():
    """An alias counts as issued, for wanted numbers and for the highest."""
    pool = SourcesPool.from_rows([{"sid": 2, **A}, {"sid": 5, **A}])
    assert pool.merge([{"sid": 5, **B}, C]).added == (6, 7)


@pytest.mark.parametrize(
    ("prior", "new", "title"),
    [
        ({}, {}, "https://a.example/x"),
        ({}, {"title": "T"}, "T"),
        ({"title": "T"}, {}, "T"),
        ({"title": "T"}, {"title": "Longer"}, "Longer"),
        ({"title": "Longer"}, {"title": "T"}, "Longer"),
        ({"title": "One"}, {"title": "Two"}, "One"),
    ],
)
def test_the_better_title_wins(prior, new, title):
    """The longer of two titles wins; a title that is only the URL never beats a real one."""
    assert SourcesPool.from_rows([{"sid": 1, **prior, **A}]).merge([{**new, **A}]).pool.get(1)["title"] == title


@pytest.mark.parametrize("field", ["text", "content"])
def test_the_longer_text_wins(field):
    """Text and content are replaced by longer ones only."""
    pool = SourcesPool.from_rows([{"sid": 1, field: "some", **A}])
    assert pool.merge([{field: "more text", **A}]).pool.get(1)[field] == "more text"
    assert pool.merge([{field: "few", **A}]).pool.get(1)[field] == "some"


def test_absent_fields_are_filled_and_present_ones_stay():
    """Merging adds what was not known and changes nothing else."""
    pool = SourcesPool.from_rows([{"sid": 1, "kept": "old", "blank": "", **A}])
    row = pool.merge(
        [{"sid": 3, "kept": "longer new", "blank": "b", "author": "N", "physical_path": "p", **A}]
    ).pool.get(1)
    assert (row["kept"], row["blank"], row["author"], row["physical_path"], row["sid"]) == ("old", "b", "N", "p", 1)


def test_the_last_number_does_not_end_the_pool():
    """A file that claims the largest sid leaves later sources citable: they fill the gaps."""
    result = SourcesPool().merge([{"sid": MAX_SID, **A}, {"sid": 1, **B}, C, D])
    assert result.added == (MAX_SID, 1, 2, 3)


def test_a_key_function_decides_what_is_one_source():
    """A plugin's key merges rows of different URLs; None means the usual key."""

    def key(row):
        return row.get("doi")

    result = SourcesPool.from_rows([{"sid": 1, "doi": "x", **A}], key=key).merge(
        [{"sid": 2, "doi": "x", **B}, {"sid": 3, **C}], key=key
    )
    assert (dict(result.sid_map), result.added) == ({2: 1, 3: 3}, (3,))
    assert dict(SourcesPool.from_rows([{"sid": 1, "doi": "x", **A}, {"sid": 2, "doi": "x", **B}], key=key).aliases) == {
        2: 1
    }


def test_findings_are_kept():
    """What was wrong with rows is told by the merge, and by a pool built from them; equality does not ask."""
    bad = [{"title": "nothing"}, {"sid": 1, **A}]
    assert [f.code for f in SourcesPool().merge(bad).diagnostics] == ["source_without_identity"]
    pool = SourcesPool.from_rows([*bad, B])
    assert [f.code for f in pool.diagnostics] == ["source_without_identity"]
    assert pool == SourcesPool.from_rows([{"sid": 1, **A}, {"sid": 2, **B}])


def test_a_pool_is_frozen():
    """Merging leaves the old pool as it was; its mappings cannot be written to; it copies and pickles."""
    pool = SourcesPool.from_rows([{"sid": 1, **A}])
    pool.merge([{"sid": 1, "text": "t", **A}, B])
    assert [row.text for row in pool] == [""]
    with pytest.raises(TypeError):
        pool.rows[2] = B
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool.diagnostics = ()
    assert copy.deepcopy(pool) == pool == pickle.loads(pickle.dumps(pool))
    assert repr(pool) == "SourcesPool(1 rows, 0 aliases)"


@pytest.mark.parametrize(
    "data",
    [
        {}, {"rows": 3, "aliases": {}}, {"rows": [], "aliases": []}, {"rows": [A], "aliases": {}},
        {"rows": [{"sid": 1, **A}], "aliases": {"2": 3}}, {"rows": [{"sid": 1, **A}], "aliases": {"1": 1}},
        {"rows": [{"sid": 1, **A}, {"sid": 1, **B}], "aliases": {}}, {"rows": [{"sid": 1}], "aliases": {}}, [],
    ],
)  # fmt: skip
def test_other_json_is_no_pool(data):
    """`from_json` takes what `to_json` wrote and nothing else."""
    with pytest.raises(BadRequest):
        SourcesPool.from_json(data)


def test_merge_properties(raw_rows):
    """SIDs are immutable under merge, prior rows never vanish, JSON round-trips, merging again adds nothing."""

    @given(raw_rows, raw_rows, raw_rows)
    def check(first, second, third):
        pool = SourcesPool.from_rows(first)
        for rows in (second, third):
            result = pool.merge(rows)
            for sid, row in pool.rows.items():
                assert result.pool.rows[sid].identity == row.identity
                fixed = {k: v for k, v in row.items() if k not in {"title", "text", "content"} and v not in ("", None)}
                assert {key: result.pool.rows[sid][key] for key in fixed} == fixed
            assert result.pool.aliases == pool.aliases
            assert not set(result.added) & {*pool.rows, *pool.aliases}
            assert len({row.identity for row in result.pool}) == len(result.pool)
            assert set(result.sid_map.values()) <= set(result.pool.rows)
            assert SourcesPool.from_json(result.pool.to_json()) == result.pool
            again = result.pool.merge(rows)
            assert (again.added, dict(again.sid_map)) == ((), dict(result.sid_map))
            pool = result.pool

    check()
