"""A resolver completes rows before they get their numbers, and nothing it does loses a source."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import BadRequest
from kdskills.sources import SourceResolver, SourcesPool
from kdskills.sources.resolving import MAX_ROWS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def by_doi(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row with the URL and title of its DOI."""
    return {"url": f"https://doi.org/{row['doi']}", "title": "A paper", "sid": 77} if "doi" in row else None


def test_a_row_gets_what_its_doi_stands_for() -> None:
    """A row without URL or path becomes citable, under the number its file gave it; other rows stay as written."""
    rows = [{"sid": 4, "doi": "10.1/x"}, {"sid": 5, "url": "https://b.example/"}, {"doi": "10.1/y"}]
    complete, findings = SourceResolver(by_doi).complete(rows)
    assert complete == (
        {"sid": 4, "url": "https://doi.org/10.1/x", "title": "A paper"},
        rows[1],
        {"url": "https://doi.org/10.1/y", "title": "A paper"},
    )
    assert findings == ()
    assert SourcesPool().merge(complete).sid_map == {4: 4, 5: 5}


def test_an_answer_is_remembered() -> None:
    """One row is asked about once, in whichever skill it stands, and so is one that has no fuller form."""
    calls: list[Any] = []

    def count(row: Mapping[str, Any]) -> None:
        calls.append(row)

    resolver = SourceResolver(count)
    for rows in ([{"doi": "a"}], [{"doi": "a"}, {"doi": "b"}], [{"doi": "b"}]):
        assert resolver.complete(rows) == (tuple(rows), ())
    assert calls == [{"doi": "a"}, {"doi": "b"}]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no such DOI"), "source_unresolved"), (BadRequest("no"), "bad_request"), (SystemExit(3), "source_unresolved")],
)  # fmt: skip
def test_a_resolver_that_raises_loses_no_source(error: BaseException, code: str) -> None:
    """The row stays as written, its neighbours are resolved, and one finding says why; it is not asked again at once."""
    calls: list[Any] = []

    def raises(row: Mapping[str, Any]) -> Mapping[str, Any]:
        calls.append(row)
        if row["doi"] == "bad":
            raise error
        return {"url": "https://a.example/"}

    resolver = SourceResolver(raises)
    rows = [{"doi": "bad", "url": "https://b.example/"}, {"doi": "good"}]
    for _ in range(2):
        complete, findings = resolver.complete(rows)
        assert complete == (rows[0], {"url": "https://a.example/"})
        assert [(finding.code, finding.severity) for finding in findings] == [(code, "warning")]
    assert len(calls) == 2


def test_a_resolver_that_never_answers_is_not_waited_for() -> None:
    """The rows stay as written after the wait, no thread more than four is ever stuck, and a late answer counts."""
    release, late = threading.Event(), threading.Event()

    def hangs(row: Mapping[str, Any]) -> Mapping[str, Any]:
        release.wait()
        if row["doi"] == "3":
            late.set()
        return {"url": f"https://a.example/{row['doi']}"}

    resolver = SourceResolver(hangs, wait=0.01)
    before = threading.active_count()
    for number in range(6):
        rows = [{"doi": str(number)}]
        complete, (finding,) = resolver.complete(rows)
        assert (complete, finding.code) == (tuple(rows), "source_unresolved")
        assert ("within" in finding.message) == (number < 4)
    assert threading.active_count() <= before + 4
    workers = [thread for thread in threading.enumerate() if thread.name == "kdskills-sources"]
    release.set()
    for thread in workers:
        thread.join(10)
    assert late.is_set()
    assert resolver.complete([{"doi": "3"}]) == (({"url": "https://a.example/3"},), ())


def test_of_many_rows_the_first_are_resolved() -> None:
    """A skill with thousands of rows keeps them all; 200 are asked about, and a finding tells of the others."""
    rows = [{"doi": str(number)} for number in range(MAX_ROWS + 50)]
    complete, (finding,) = SourceResolver(by_doi).complete(rows)
    assert [("url" in row) for row in complete] == [True] * MAX_ROWS + [False] * 50
    assert finding.message.startswith("50 rows stay as written")


@given(st.lists(st.dictionaries(st.text() | st.integers(), JSON, max_size=4), max_size=5), JSON)
def test_whatever_rows_and_answers_there_are(rows: list[dict[Any, Any]], answer: Any) -> None:
    """As many rows come back as went in, each under its own number, and they can be merged."""
    complete, _ = SourceResolver(lambda _: answer).complete(rows)
    assert len(complete) == len(rows)
    assert [row.get("sid", "none") for row in complete] == [row.get("sid", "none") for row in rows]
    SourcesPool().merge(complete)
