"""However a text is cut, the stream gives what the whole text gives."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.sources import CitationStream, SourcesPool, render_citations

FOUR = {4: {"title": "Four", "url": "https://four.example/x"}}


def streamed(pieces, sources, **options):
    """The joined outputs of a stream fed with the pieces."""
    stream = CitationStream(sources, **options)
    return "".join([*(stream.feed(piece) for piece in pieces), stream.flush()])


SEEDS = [
    "a [[S:4]] b", "[[S:9]] b", "a [[S:9]]", "a [[S:9]].", "a  [[S:9]][[S:8]] b", "`[[S:4]]` [[S:4]]", "`[[S:4]]", "``` a`b [[S:4]]",
    "```\n[[S:4]]\n```\n[[S:4]]", "~~~ [[S:4]]\n[[S:4]]\n  ~~~  \n[[S:4]]", "> ```\r\n> [[S:4]]\r\n> ```\r\n[[S:4]]", "``\n```\n[[S:4]]",
    '<sup class="cite" data-sids="4">x</sup> <sup class="cite" data-sids="4"> <sup', "[[[S:4]]]", "[[S:4]", "[[S:4\n]]", "［［Ｓ：４］］［［S：４］］",
    " \u200b[\u200b[S:4]\u200b]\u200b ", "a [[S:9]]\r\nb", "[[S:4]]\n\n", "```\n[[S:4]]\n``` x\n```\n[[S:4]]", "`` ` [[S:4]] `` `",
    "`" + "x" * 2000 + "` [[S:4]] `", "`" + "x" * 2001 + "` [[S:4]] `", "[[S:" + "4" * 200 + "]] [[S:4]]", "[[S:" + " " * 199 + "4]]",
]  # fmt: skip

OPTIONS = [
    {}, {"keep_unresolved": False}, {"mode": "footnotes"}, {"mode": "html", "keep_unresolved": False}, {"mark_unknown": True},
    {"mode": "superscript", "embed_images": True, "keep_unresolved": False},
]  # fmt: skip


@pytest.mark.parametrize("text", SEEDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_cut_of_known_texts(text, options, pool):
    """Cut in two at every place, and cut into single characters, the joined outputs are the same."""
    whole = render_citations(text, pool, **options)
    step = max(1, len(text) // 60)
    for cut in {*range(0, len(text) + 1, step), *range(max(0, len(text) - 20), len(text) + 1)}:
        assert streamed([text[:cut], text[cut:]], pool, **options) == whole
    assert streamed(text, pool, **options) == whole


def test_every_cut_of_any_text(texts, pool):
    """For texts of every kind, any cuts and any options."""
    flags = st.fixed_dictionaries(
        {name: st.booleans() for name in ("keep_unresolved", "first_only", "embed_images", "mark_unknown")}
        | {"mode": st.sampled_from(["links", "superscript", "html", "footnotes"])}
    )

    @settings(max_examples=400)
    @given(texts, st.lists(st.integers(0, 150), max_size=5), flags)
    def check(text, cuts, options):
        whole = render_citations(text, pool, **options)
        places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
        pieces = [text[a:b] for a, b in itertools.pairwise(places)]
        assert streamed(pieces, pool, **options) == whole
        assert streamed(text, pool, **options) == whole

    check()


@given(st.text(alphabet="`~[]S:4, \n<sup>x9", max_size=60), st.booleans())
def test_every_cut_of_small_alphabets(text, keep):
    """Single characters of the grammar in any order."""
    assert streamed(text, FOUR, keep_unresolved=keep) == render_citations(text, FOUR, keep_unresolved=keep)


@pytest.mark.parametrize(
    ("text", "at_once"),
    [
        ("plain text", "plain text"),
        ("see [[S:4]]", "see [Four](https://four.example/x)"),
        ("see [[S:", "see "),
        ("see [", "see "),
        ("see [[S:9]]", "see [[S:9]]"),
        ("see [x", "see [x"),
        ("see `code", "see "),
        ("see `code` and", "see `code` and"),
        ("a\n```py\n[[S:4]]", "a\n```py\n[[S:4]]"),
        ("a\n``", "a\n"),
    ],
)
def test_what_is_decided_comes_at_once(text, at_once):
    """Only what may still become a citation or code is held."""
    assert CitationStream(FOUR).feed(text) == at_once


def test_no_more_than_a_line_is_held(texts):
    """What `flush` gives back is at most the last line."""

    @given(texts)
    def check(text):
        stream = CitationStream({})
        for character in text:
            stream.feed(character)
        held = stream.flush()
        assert text.endswith(held)
        assert not set(held) & {"\n", "\r"}

    check()


def test_flush_loses_nothing_and_begins_anew():
    """After a flush the stream takes another text: fences, footnotes and held pieces are gone."""
    stream = CitationStream(FOUR, mode="footnotes")
    assert stream.feed("```\n[[S:4]] [[S:") + stream.flush() == "```\n[[S:4]] [[S:"
    assert stream.feed("x [[S:4]]") + stream.flush() == "x [1]\n\nSources:\n[1] Four - https://four.example/x"
    assert stream.feed("y [[S:4]]\n") + stream.flush() == "y [1]\n\nSources:\n[1] Four - https://four.example/x"
    assert stream.flush() == ""


@pytest.mark.parametrize("piece", ['<sup class="cite" data-sids="4">', "[[" + " " * 150, "`` ", "<sup ", "[[S:", "`"])
def test_a_long_undecided_line_is_not_scanned_anew_each_time(piece, monkeypatch):
    """Fed character by character, the characters scanned stay in proportion to the text: counted, not timed."""
    from kdskills.sources.tokens import TokenScanner

    scanned = 0
    scan = TokenScanner.scan

    def counted(self, text, *, final):
        nonlocal scanned
        scanned += len(text)
        return scan(self, text, final=final)

    monkeypatch.setattr(TokenScanner, "scan", counted)
    text = piece * (40_000 // len(piece))
    assert streamed(text, FOUR) == render_citations(text, FOUR)
    assert scanned <= 3000 * len(text)


@pytest.mark.parametrize(
    ("text", "safe", "held"),
    [
        ("a", "a", 0),
        ("", "", 0),
        ("a [", "a ", 1),
        ("a [[", "a ", 2),
        ("a [[[", "a [", 2),
        ("a [[S", "a ", 3),
        ("a [[ s ", "a ", 5),
        ("a [[S:", "a ", 4),
        ("a [[S: 4,6-", "a ", 9),
        ("a [[S:4]", "a ", 6),
        ("a [[S:4]]", "a [[S:4]]", 0),
        ("a [[S:]", "a [[S:]", 0),
        ("[S", "", 2),
        ("a [S:4", "a ", 4),
        ("a [S:4]", "a ", 5),
        ("a [S:4] ", "a [S:4] ", 0),
        ("a [Sx", "a [Sx", 0),
        ("a [x", "a [x", 0),
        ("a [[x", "a [[x", 0),
        ("a [[S:4\n", "a [[S:4\n", 0),
        ("a [[S:" + "4" * 200, "a ", 204),
        ("a [[S:" + "4" * 201, "a [[S:" + "4" * 201, 0),
        ("a  [[S", "a  ", 3),
        ("a \u200b [[S", "a", 6),
        ("a\u200b[", "a", 2),
        ("a ［[", "a ", 2),
        ("a [\u200b[S", "a ", 4),
        ("\u200b", "\u200b", 0),
    ],
)
def test_split(text, safe, held):
    """The tail that may become a token is cut off, with blanks before it only if a zero-width one is among them."""
    assert CitationStream.split(text) == (safe, held)


@given(st.text(alphabet="[]［S:4, \u200bx", max_size=30))
def test_split_cuts_one_tail(text):
    """Safe text and held tail are the text; a token that is complete is never held."""
    safe, held = CitationStream.split(text)
    assert (safe + text[len(safe) :], held) == (text, len(text) - len(safe))
    assert CitationStream.split(text + "x]]x") == (text + "x]]x", 0)


def test_a_pool_need_not_know():
    """An empty pool leaves every token, or drops it."""
    assert streamed("a [[S:1]].", SourcesPool()) == "a [[S:1]]."
    assert streamed("a [[S:1]].", SourcesPool(), keep_unresolved=False) == "a."
