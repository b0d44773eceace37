"""Tokens, extraction and rewriting: the grammar, code, removal, and texts that try to forge a citation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.sources import SourcesPool, adopt_citations, extract_citations, find_citations, rewrite_citations
from kdskills.sources import tokens as grammar
from kdskills.sources.tokens import MAX_WRITTEN_OUT, KnownSids, find_tokens

ZERO_WIDTH = "\u200b"


def rewritten(text, sid_map):
    """The text after rewriting."""
    return rewrite_citations(text, sid_map).text


@pytest.mark.parametrize(
    ("text", "sids"),
    [
        ("[[S:4]]", [4]),
        ("[[s:4]]", [4]),
        ("[[ S : 4 ]]", [4]),
        ("[[\tS\u00a0:\u30004 ]]", [4]),
        ("[[S:4,6]]", [4, 6]),
        ("[[S: 4 , 6 ,4]]", [4, 6]),
        ("[[S:6,4]] and [[S:4,9]]", [6, 4, 9]),
        ("[[S:2-4]]", [2, 3, 4]),
        ("[[S:4-2]]", [2, 3, 4]),
        ("[[S:4 - 2]]", [2, 3, 4]),
        ("[[S:5,2-3,1]]", [5, 2, 3, 1]),
        ("[[S:4,x,5.1,-3,1-,+7,4-5-6,６]]", [4, 6]),
        ("[[S:123456789]]", [123456789]),
        ("[[S:1234567890]]", []),
        ("[[S:x]]", []),
        ("[[S:,]]", []),
        ("［［S：４，６］］", [4, 6]),
        ("[［s：１－3］]", [1, 2, 3]),
        *[(f"[[S:1{dash}3]]", [1, 2, 3]) for dash in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"],
        (f"[{ZERO_WIDTH}[{ZERO_WIDTH}S{ZERO_WIDTH}:{ZERO_WIDTH}1{ZERO_WIDTH}2\ufeff]{ZERO_WIDTH}]", [12]),
        ('<sup class="cite" data-sids="4,6"><a href="x">[S:4]</a> <a href="y">[S:6]</a></sup>', [4, 6]),
        ('<sup class="cite" data-sids="2-3"></sup>', [2, 3]),
        ("[[[S:4]]]", [4]),
        ("[[S:4]][[S:5]]", [4, 5]),
        ("[[S:" + "4," * 99 + "5]]", [4, 5]),
        ("[S:4]", []),
        ("[[USAGE:4]]", []),
        ("[[ſ:4]]", []),
        ("[[S:4", []),
        ("[[S:4]", []),
        ("[[S:]]", []),
        ("[ [S:4]]", []),
        ("[[S:4] ]", []),
        ("[[S4]]", []),
        ("[[S:4\n]]", []),
        ("[[S\r:4]]", []),
        ("[[S:4[5]]]", []),
        ("[[S:" + "4" + " " * 200 + "]]", []),
        ("<sup data-sids='4'>x</sup>", []),
        ('<sup class="cite" data-sids="4">open', []),
        ('<sup class="cite" data-sids="4">\n</sup>', []),
        ('<support class="cite" data-sids="4"></sup>', []),
    ],
)
def test_what_is_a_token(text, sids):
    """Two brackets, S, a colon and items on one line, in any case and width; everything else is text."""
    assert extract_citations(text) == sids


@pytest.mark.parametrize(
    "text",
    [
        "`[[S:4]]`", "``a ` [[S:4]]``", "x `` [[S:4]] `` y", "`" + "x" * 1991 + "[[S:4]]`",
        "```\n[[S:4]]\n```", "~~~\n[[S:4]]\n~~~", "```py [[S:4]]\n[[S:4]]", "   ```\n[[S:4]]\n ```", "\t\t```\n[[S:4]]",
        "> ```\n> [[S:4]]\n> ```", ">> ~~~~\n>> [[S:4]]\n>> ~~~\n>> [[S:4]]", "````\n```\n[[S:4]]\n```\n[[S:4]]\n````",
        "```\n~~~\n[[S:4]]\n``` x\n[[S:4]]", "~~~ a`b\n[[S:4]]", "```\r\n[[S:4]]\r\n```", "```\r[[S:4]]\r```",
        "`<sup class=\"cite\" data-sids=\"4\"></sup>`",
    ],
)  # fmt: skip
def test_code_is_untouched(text):
    """Neither extraction nor rewriting sees fenced or inline code."""
    assert extract_citations(text) == []
    assert rewritten(text, {}) == text


@pytest.mark.parametrize(
    "text",
    [
        "```\nx\n```\n[[S:4]]", "~~~\nx\n~~~~~\n[[S:4]]", "`` [[S:4]] `", "`a\n[[S:4]]`", "`" + "x" * 1995 + "[[S:4]]`",
        "`x` [[S:4]] `y`", "``` a`b\n[[S:4]]", "x ```\n[[S:4]]", "``\n[[S:4]]\n``", "~~~\nx\n> ~~~\n[[S:4]]",
        "> ```\n> x\n> ```  \n[[S:4]]", "\\`[[S:4]]",
    ],
)  # fmt: skip
def test_what_is_no_code(text):
    """Fences end, backtick runs pair on one line only, with equal length and within 2,000 characters."""
    assert extract_citations(text) == [4]


@pytest.mark.parametrize(
    ("text", "sid_map", "result"),
    [
        ("a [[S:1]] b [[s: 2 ]]", {1: 2, 2: 1}, "a [[S:2]] b [[S:1]]"),
        ("[[S:1,2]]", {1: 5, 2: 5}, "[[S:5]]"),
        ("[[S:3-1]]", {1: 7, 2: 8, 3: 9}, "[[S:7,8,9]]"),
        ("[[S:1-999999999]]", {2: 4, 6: 3}, "[[S:4,3]]"),
        ("[[S:1,9]]", {1: 1}, "[[S:1]]"),
        ('<sup class="cite" data-sids="1,2">[S:1]</sup>', {1: 3, 2: 4}, "[[S:3,4]]"),
        ("［［S：１］］", {1: 3}, "[[S:3]]"),
        ("a [[S:9]] b", {}, "a b"),
        ("a [[S:9]].", {}, "a."),
        ("a [[S:9]], b", {}, "a, b"),
        ("(a [[S:9]])", {}, "(a)"),
        ("a [[S:9]]", {}, "a"),
        ("a [[S:9]]\nb", {}, "a\nb"),
        ("a [[S:9]]\r\nb", {}, "a\r\nb"),
        ("a [[S:9]]b", {}, "a b"),
        ("a[[S:9]] b", {}, "a b"),
        ("a[[S:9]]b", {}, "ab"),
        ("[[S:9]] b", {}, "b"),
        ("x\n[[S:9]] b", {}, "x\nb"),
        ("a  [[S:9]]  b", {}, "a   b"),
        ("a [[S:9]](b)", {}, "a (b)"),
        ("a [[S:9]] [[S:8]] b", {}, "a b"),
        ("a [[S:9]][[S:8]].", {}, "a."),
        ("[[S:9]] [[S:8]] b", {}, "b"),
        ("a [[S:9]] [[S:1]].", {1: 2}, "a [[S:2]]."),
        ("a [[S:x]] b", {1: 1}, "a b"),
        ("a\u3000[[S:9]]。", {}, "a。"),
    ],
)
def test_rewriting(text, sid_map, result):
    """All at once; unknown ids go; a token without ids goes with one blank."""
    assert rewritten(text, sid_map) == result


def test_used_and_dropped():
    """The result tells new sids used and old ones dropped in order, each once, with a finding for each loss."""
    result = rewrite_citations("[[S:9,2]] [[S:1,8]] [[S:9]] [[S:20-30]]", {1: 5, 2: 4, 25: 4})
    assert (result.used, result.dropped) == ((4, 5), (9, 8))
    assert [(f.code, f.severity, f.ref) for f in result.diagnostics] == [
        ("citation_dropped", "warning", ref) for ref in ("9", "8", "20-30")
    ]


def test_keys_may_come_from_json():
    """A map read back from JSON, with text keys, works."""
    assert rewritten("[[S:1]]", {"1": 2}) == "[[S:2]]"


def test_long_lists_stay_citable():
    """A range written out is cut into tokens that can be read again."""
    result = rewrite_citations("[[S:1-500]]", {n: n for n in range(1, 501)})
    assert extract_citations(result.text) == list(range(1, 501)) == list(result.used)
    assert max(map(len, result.text.split())) <= 206


@pytest.mark.parametrize(
    "text",
    [
        "[[[[S:9]]S:4]]",
        "[[[S:9]][S:4]]",
        "[[S:4][[S:9]]]",
        "[[S:[[S:9]]4]]",
        "[[[[[[S:9]]S:9]]S:4]]",
        '<sup class="cite" [[S:9]]data-sids="4"></sup>',
        "``[[S:9]]` [[S:4]] `",
        "~~[[S:9]]~\n~~~\n[[S:4]]",
        "[[S:9]]~~~\n~~~\n[[S:4]]\n~~~",
        "> [[S:9]]```\n```\n[[S:4]]",
        "`" + "x" * 1995 + "[[S:9]]` [[S:4]] `",
        "`" + "x" * 1993 + "[[   S:9]]`[[S:4]]`",
        "[[[S:9]]" * 50 + "[S:4]]" * 50,
        "[" * 60 + "[[S:9]]" + "S:4]]" * 30,
    ],
)
def test_no_token_is_forged_from_pieces(text):
    """What a dropped token leaves never joins into a live one, whether brackets, code or fences are broken up."""
    assert extract_citations(rewritten(text, {})) == []
    kept = rewrite_citations(text + "\n\n[[S:1]]", {1: 3})
    assert set(extract_citations(kept.text)) <= {3}


def test_forged_tokens_are_reported():
    """Parting pieces leaves a finding."""
    assert [f.ref for f in rewrite_citations("[[[[S:9]]S:4]]", {}).diagnostics] == ["9", "joined"]


@pytest.mark.parametrize("text", ["[[S:9]]~~~\n[[S:1]]", "``[[S:9]]` [[S:1]] ```", "``` [[S:`]]\n[[S:1]]"])
def test_citations_that_became_code_are_not_used(text):
    """Where a dropped token's neighbours make the rest code, what is code counts as uncited, and a finding says so."""
    result = rewrite_citations(text, {1: 5})
    assert (result.used, extract_citations(result.text)) == ((), [])
    assert result.diagnostics[-1].ref == "code"
    assert rewrite_citations(f"[[S:1]] {text}", {1: 5}).used == (5,)


def test_rewriting_properties(texts):
    """Rewriting twice is rewriting once under the identity; only mapped sids are ever live; an empty map leaves none."""
    sids = st.sampled_from([1, 2, 3, 4, 9])

    @settings(max_examples=300)
    @given(texts, st.dictionaries(sids, st.sampled_from([1, 4, 5, 77, 100])))
    def check(text, sid_map):
        once = rewrite_citations(text, sid_map)
        again = rewrite_citations(once.text, {sid: sid for sid in sid_map.values()})
        assert again.text == once.text
        assert again.dropped == ()
        assert set(extract_citations(once.text)) <= set(once.used) <= set(sid_map.values())
        if not sid_map:
            assert find_tokens(once.text) == []

    check()


def test_code_survives_rewriting(texts):
    """What stands in code before stands there after, byte for byte."""

    @given(texts, texts)
    def check(before, inside):
        code = inside.replace("`", "").replace("~", "")
        text = before.replace("`", "").replace("~", "") + "\n```\n" + code + "\n```\nend [[S:1]]"
        assert rewritten(text, {1: 2}).endswith("\n```\n" + code + "\n```\nend [[S:2]]")

    check()


def test_text_without_tokens_is_the_same(texts):
    """Rewriting changes nothing but tokens."""

    @given(texts)
    def check(text):
        if not find_tokens(text):
            assert rewritten(text, {1: 2}) == text

    check()


@given(st.text(max_size=200))
def test_any_text_can_be_searched(text):
    """No text raises, and spans are those of the text."""
    for citation in find_citations(text):
        assert 0 <= citation.start < citation.end <= len(text)


# ---- ranges ------------------------------------------------------------------------------------------------------


def test_a_range_costs_what_is_known():
    """A huge range is looked up by its ends: nothing is counted through."""
    known = KnownSids([5, 7, 10**9])
    assert (known.within(1, 999_999_999), known.within(8, 999_999_999)) == ([5, 7], [])
    pool = SourcesPool.from_rows([{"sid": 3, "url": "https://a.example"}, {"sid": 8, "url": "https://a.example"}])
    assert extract_citations("[[S:1-999999999]]", known=pool) == [3, 8]
    assert extract_citations("[[S:999999999-0]]", known={4: "x"}) == [4]
    assert extract_citations("[[S:1-999999999]]", known=[2, 1]) == [1, 2]


def test_without_a_pool_long_ranges_are_ignored():
    """1,000 numbers are a range, 1,001 are not, and a finding says so."""
    assert len(extract_citations("[[S:1-1000]]")) == 1000
    (citation,) = find_citations("x [[S:7,1-1001]]")
    assert (citation.start, citation.end, citation.sids) == (2, 16, (7,))
    assert [(f.code, f.ref) for f in citation.diagnostics] == [("citation_range_ignored", "1-1001")]


def test_single_numbers_are_found_whether_known_or_not():
    """`known` bounds ranges only, so that a caller can tell citations without a source."""
    assert extract_citations("[[S:9,1-5]]", known={2: "x"}) == [9, 2]


def test_many_ranges_do_not_blow_up():
    """The ranges of one text stand for a bounded number of sids, in every function."""
    sid_map = {n: n for n in range(1, 2001)}
    text = "[[S:1-2000]]" * 200
    result = rewrite_citations(text, sid_map)
    assert sum(len(c.sids) for c in find_citations(result.text)) == MAX_WRITTEN_OUT
    assert "1-2000" in {f.ref for f in result.diagnostics}
    assert sum(len(c.sids) for c in find_citations("[[S:1-1000]]" * 500)) == MAX_WRITTEN_OUT
    assert sum(len(c.sids) for c in find_citations(text, known=sid_map)) == MAX_WRITTEN_OUT


# ---- work ------------------------------------------------------------------------------------------------------


class CountingText(str):
    """A text that counts the characters its `find` looks through."""

    __slots__ = ()
    looked = 0

    def find(self, sub, start=0, end=None):
        """Count, then find."""
        stop = len(self) if end is None else end
        found = str.find(self, sub, start, stop)
        CountingText.looked += (stop if found < 0 else found) - start
        return found


@pytest.mark.parametrize(
    "piece",
    [
        '<sup class="cite" data-sids="4">',
        "[[S:",
        "`",
        "`` `",
        "[",
        "[[",
        "[[S:4",
        "> ",
        "~~~\n",
        "```a`\n",
        "[\u200b",
        "\r",
        "</sup>",
    ],
)
def test_work_grows_with_the_text(piece, monkeypatch):
    """Hostile texts cost a bounded number of looks per character, counted, not timed."""
    calls = 0
    items = grammar.parse_items

    def counted(text):
        nonlocal calls
        calls += 1
        return items(text)

    monkeypatch.setattr(grammar, "parse_items", counted)
    CountingText.looked = 0
    text = CountingText(piece * 4000)
    grammar.TokenScanner().scan(text, final=True)
    assert CountingText.looked <= 4 * len(text)
    assert calls <= len(text)


@pytest.mark.parametrize(
    "text",
    [
        "[[" + " " * 300_000, "[" * 300_000, "[[S:" * 75_000, "[[S" + " " * 300_000 + ":4]]", " " * 300_000 + "x", ">" * 300_000,
        "`" * 300_000 + "x", "` `` " * 60_000, "<sup " * 60_000, '<sup class="cite" data-sids="' + "4," * 100_000, "\u200b" * 300_000,
        "[\u200b" * 150_000, "[[S:" + "1-" * 150_000, "```\n" + " " * 300_000 + "x", "]" * 300_000, ('<sup class="cite" data-sids="4">' * 9000),
        "[[S:9]]" * 40_000, "[[[S:9]]" * 30_000 + "[S:4]]" * 30_000,
    ],
)  # fmt: skip
def test_large_hostile_texts_end(text):
    """A few hundred thousand characters of the worst kind are rewritten within the test's time limit."""
    assert extract_citations(rewritten(text, {})) == []


# ---- adopting ----------------------------------------------------------------------------------------------------


def test_adopting_merges_then_rewrites():
    """A skill's body comes out in the pool's numbers, with the pool that holds its rows."""
    pool = SourcesPool.from_rows([{"sid": 1, "url": "https://a.example/x"}])
    rows = [
        {"sid": 1, "url": "https://b.example/x"},
        {"sid": 2, "url": "https://a.example/x"},
        {"url": "https://c.example"},
    ]
    adopted = adopt_citations("b [[S:1]], a [[S:2]], none [[S:7]].", rows, pool)
    assert adopted.text == "b [[S:2]], a [[S:1]], none."
    assert (dict(adopted.sid_map), adopted.dropped, list(adopted.pool.rows)) == ({1: 2, 2: 1}, (7,), [1, 2, 3])
    assert [f.code for f in adopted.diagnostics] == ["citation_dropped"]
    assert list(pool.rows) == [1]


def test_no_sources_no_live_tokens():
    """A skill cannot cite the turn's sources by guessing their numbers."""
    pool = SourcesPool.from_rows([{"sid": n, "url": f"https://a.example/{n}"} for n in range(1, 9)])
    adopted = adopt_citations("trust me [[S:1-8]] [[S:3]]", None, pool)
    assert (adopted.text, adopted.pool is pool, adopted.dropped) == ("trust me", True, (3,))


def test_findings_of_rows_and_text_are_joined():
    """What was wrong with the rows comes before what was wrong with the text."""
    adopted = adopt_citations("[[S:1]]", [{"sid": 1, "title": "no place"}], SourcesPool())
    assert [f.code for f in adopted.diagnostics] == ["source_without_identity", "citation_dropped"]


def test_adopting_twice_gives_the_same(raw_rows, texts):
    """Loading a skill again changes neither the pool nor its text."""

    @given(texts, raw_rows, raw_rows)
    def check(text, rows, prior):
        first = adopt_citations(text, rows, SourcesPool.from_rows(prior))
        second = adopt_citations(text, rows, first.pool)
        assert (second.text, second.pool) == (first.text, first.pool)
        assert set(extract_citations(first.text)) <= set(first.pool.rows)

    check()
