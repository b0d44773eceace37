"""`normalize_sources` takes what `sources.yaml` may hold and never raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.sources import SourceRow, normalize_sources
from kdskills.sources.rows import MAX_FIELD, MAX_SID

ROW = {"title": "T", "url": "https://e.org/a", "text": ""}


def codes(found):
    """The codes of the findings, in order."""
    return [finding.code for finding in found]


@pytest.mark.parametrize(
    "value",
    [
        [{"sid": 4, "title": "T", "url": "https://e.org/a"}],
        {4: {"title": "T", "url": "https://e.org/a"}},
        {"4": {"title": "T", "url": "https://e.org/a"}},
        {"sources": [{"sid": 4, "title": "T", "url": "https://e.org/a"}]},
        {"items": {"4": {"title": "T", "url": "https://e.org/a"}}},
        json.dumps({"sources": {"4": {"title": "T", "url": "https://e.org/a"}}}),
        ({"sid": "4", "title": "T", "url": "https://e.org/a"},),
    ],
)
def test_every_shape_gives_the_same_rows(value):
    """A list, a mapping of sids, either under `sources` or `items`, and JSON text mean the same."""
    assert normalize_sources(value) == (({"sid": 4, **ROW},), ())


@pytest.mark.parametrize("value", [3, "no json", "[[[" * 5000, object(), b"[]", True, 1.5])
def test_other_values_give_a_finding(value):
    """What holds no rows is said to hold none."""
    rows, found = normalize_sources(value)
    assert (rows, codes(found)) == ((), ["sources_not_rows"])


def test_nothing_is_nothing():
    """An empty file has no rows and no findings."""
    assert normalize_sources(None) == ((), ()) == normalize_sources([])


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ({"url": "https://e.org/1", "href": "https://e.org/2", "value": "x"}, "url", "https://e.org/1"),
        ({"href": "https://e.org/2", "value": "https://e.org/3"}, "url", "https://e.org/2"),
        ({"value": "https://e.org/3"}, "url", "https://e.org/3"),
        ({"url": "", "href": None, "value": "https://e.org/3"}, "url", "https://e.org/3"),
        ({"url": "https://e.org/1", "description": "D"}, "title", "D"),
        ({"url": "https://e.org/1", "title": " T ", "description": "D"}, "title", "T"),
        ({"url": "https://e.org/1", "title": 2024}, "title", "2024"),
        ({"url": "https://e.org/1", "body": "b", "value_preview": "v"}, "text", "b"),
        ({"url": "https://e.org/1", "value_preview": "v"}, "text", "v"),
        ({"local_path": "a/b.csv"}, "physical_path", "a/b.csv"),
        ({"physical_path": "p", "local_path": "l"}, "physical_path", "p"),
        ({"local_path": "a/b.csv"}, "title", "a/b.csv"),
        ({"url": "HTTPS://E.org"}, "title", "https://e.org/"),
        ({"url": "https://e.org/1"}, "text", ""),
        ({"url": "HTTPS://E.org:443/x/#y"}, "url", "https://e.org/x"),
    ],
)
def test_the_first_present_key_counts(row, field, value):
    """Each field may stand under several keys; title falls back to URL or path, text to nothing."""
    assert normalize_sources([row])[0][0][field] == value


def test_all_other_keys_are_kept():
    """Unknown keys, and known ones that did not count, stay with the row."""
    row = {
        "url": "https://e.org/a",
        "title": "T",
        "description": "D",
        "score": 0.5,
        "meta": {"a": [1, None]},
        "content": "C",
    }
    assert normalize_sources([row])[0] == (
        {**ROW, "description": "D", "score": 0.5, "meta": {"a": [1, None]}, "content": "C"},
    )


def test_a_row_without_identity_is_dropped():
    """Neither URL nor path: no source, and a finding says so."""
    rows, found = normalize_sources([{"title": "T", "sid": 1}, {"url": "  "}, {"url": 5}])
    assert (rows, codes(found)) == (
        (),
        ["source_without_identity"] * 2 + ["source_field_type", "source_without_identity"],
    )


@pytest.mark.parametrize("sid", [0, -1, "0", "x", "", True, 1.0, "1.0", "٧", MAX_SID + 1, "1" * 400, [1]])
def test_a_bad_sid_is_none(sid):
    """Only a whole number from 1, or its digits, is a sid; the row stays, with a finding."""
    rows, found = normalize_sources([{"url": "https://e.org/a", "sid": sid}])
    assert (rows[0].sid, "sid" in rows[0], codes(found)) == (None, False, ["source_bad_sid"])


@pytest.mark.parametrize(("sid", "number"), [(1, 1), ("7", 7), (" 007 ", 7), (MAX_SID, MAX_SID)])
def test_a_good_sid_is_an_int(sid, number):
    """Whole numbers and their digits are sids."""
    rows, found = normalize_sources([{"url": "https://e.org/a", "sid": sid}])
    assert (rows[0].sid, found) == (number, ())


def test_the_key_of_a_mapping_is_the_sid():
    """A row's own `sid` must not contradict the key the body cites it by."""
    rows, found = normalize_sources(
        {3: {"url": "https://e.org/a", "sid": 4}, "x": {"url": "https://e.org/b", "sid": 5}}
    )
    assert ([row.sid for row in rows], codes(found)) == ([3, 5], ["source_bad_sid", "source_bad_sid"])


def test_a_sid_twice_belongs_to_the_first():
    """The second row joins without a number."""
    rows, found = normalize_sources([{"sid": 2, "url": "https://e.org/a"}, {"sid": "2", "url": "https://e.org/b"}])
    assert ([row.sid for row in rows], codes(found)) == ([2, None], ["duplicate_sid"])


def test_large_fields_are_dropped():
    """A field over 64 KiB goes, its row stays; sizes are bytes, and of the JSON for what is no text."""
    row = {
        "url": "https://e.org/a",
        "text": "é" * (MAX_FIELD // 2 + 1),
        "list": ["x" * MAX_FIELD],
        "fits": "y" * MAX_FIELD,
    }
    rows, found = normalize_sources([row])
    assert (sorted(rows[0]), rows[0].text) == (["fits", "text", "title", "url"], "")
    assert codes(found) == ["source_field_too_large"] * 2


def test_a_large_url_is_no_identity():
    """An oversized URL is dropped like any field; the next key counts."""
    rows, _ = normalize_sources([{"url": "https://e.org/" + "x" * MAX_FIELD, "href": "https://e.org/b"}])
    assert rows[0].url == "https://e.org/b"


def test_urls_are_judged():
    """An added scheme is told, a URL that does not parse is kept as text and told."""
    rows, found = normalize_sources([{"url": "e.org/a"}, {"url": "http://[x"}])
    assert [row.url for row in rows] == ["https://e.org/a", "http://[x"]
    assert [(f.code, f.severity) for f in found] == [("url_scheme_added", "info"), ("source_bad_url", "warning")]


def test_rows_that_are_no_mappings_are_dropped():
    """A bad row costs only itself."""
    rows, found = normalize_sources(["https://e.org/a", None, 3, {"url": "https://e.org/a"}])
    assert (len(rows), codes(found)) == (1, ["source_bad_row"] * 3)


def test_values_become_json():
    """What JSON cannot hold becomes text, in bounded depth."""
    deep = leaf = []
    for _ in range(200):
        leaf.append([])
        leaf = leaf[0]
    row = {"url": "https://e.org/a", "nan": float("nan"), "set": {1}, 5: "five", "deep": deep, "tuple": (1, 2)}
    found = normalize_sources([row])[0][0]
    assert (found["nan"], found["set"], found["5"], found["tuple"]) == ("nan", "{1}", "five", [1, 2])
    assert json.loads(json.dumps(found.to_json())) == found


def test_a_row_is_a_frozen_mapping():
    """Rows compare with dicts, cannot be written to, and give copies."""
    row = normalize_sources([{"url": "https://e.org/a", "sid": 1, "physical_path": "p"}])[0][0]
    assert (row.sid, row.url, row.path, row.title, row.text) == (1, "https://e.org/a", "p", "https://e.org/a", "")
    assert (row.title_is_fallback, len(row), repr(row)[:10]) == (True, 5, "SourceRow(")
    with pytest.raises(TypeError):
        row["url"] = "x"
    row.to_json()["url"] = "x"
    assert row.url == "https://e.org/a"
    assert row.numbered(None).numbered(7) == {**row, "sid": 7}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["sid", "url", "title", "sources", "x"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON)
def test_nothing_in_a_file_raises(value):
    """Any value gives rows and findings; each row has a title and a text, and can be written as JSON."""
    rows, _ = normalize_sources(value)
    for row in rows:
        assert isinstance(row, SourceRow)
        assert row.title
        assert isinstance(row.text, str)
        json.dumps(row.to_json(), allow_nan=False)


def test_normalising_rows_again_changes_nothing(raw_rows):
    """A normalised row is its own normal form."""

    @given(raw_rows)
    def check(value):
        rows, _ = normalize_sources(value)
        assert normalize_sources([row.to_json() for row in rows])[0] == rows
        assert normalize_sources(rows) == (rows, ())

    check()


def test_what_nothing_can_store_is_replaced():
    """Halves of characters and numbers of thousands of digits, in fields and in keys, become text that can be written."""
    rows, _ = normalize_sources('[{"url": "a", "title": "x\\ud800\\ud83d\\ude00", "\\udc00": ["\\udfff"]}]')
    assert rows == ({"title": "x\ufffd\U0001f600", "url": "a", "text": "", "\ufffd": ["\ufffd"]},)
    huge = 10**5000
    (row,), _ = normalize_sources([{"url": "a", "x": huge, "y": [-huge], "z": {huge: 1}, huge: 2, "title": huge}])
    assert (row["x"], row["y"], row["z"], row[hex(huge)]) == (hex(huge), [hex(-huge)], {hex(huge): 1}, 2)
    assert row.title == hex(huge)
    json.dumps(row.to_json(), ensure_ascii=False).encode()
