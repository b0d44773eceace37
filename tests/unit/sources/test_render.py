"""Citations as a reader sees them, and titles and URLs that try to be more than that."""

import html.parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.sources import SourcesPool, render_citations

PLAIN = {4: {"title": "Four", "url": "https://four.example/x"}, 6: {"title": "Six", "url": "https://six.example/y"}}
IMAGE = {1: {"title": "Chart", "url": "https://e.org/c.png?w=1"}, **PLAIN}


@pytest.mark.parametrize(
    ("mode", "text", "shown"),
    [
        ("links", "a [[S:4,6]].", "a [Four](https://four.example/x) [Six](https://six.example/y)."),
        ("links", "a [[S:6-4]].", "a [Four](https://four.example/x) [Six](https://six.example/y)."),
        ("superscript", "a [[S:4,6]]", 'a [⁴](https://four.example/x "Four"),[⁶](https://six.example/y "Six")'),
        (
            "html",
            "[[S:4,6]]",
            (
                '<sup class="cite" data-sids="4,6"><a href="https://four.example/x" target="_blank" rel="noopener noreferrer">[S:4]</a> '
                '<a href="https://six.example/y" target="_blank" rel="noopener noreferrer">[S:6]</a></sup>'
            ),
        ),
        (
            "footnotes",
            "a [[S:6]] b [[S:4,6]].",
            "a [1] b [2][1].\n\nSources:\n[1] Six - https://six.example/y\n[2] Four - https://four.example/x",
        ),
        ("footnotes", "a [[S:6]]\n", "a [1]\n\nSources:\n[1] Six - https://six.example/y"),
        ("footnotes", "a [[S:6]]\n\n", "a [1]\n\nSources:\n[1] Six - https://six.example/y"),
        ("footnotes", "a", "a"),
    ],
)
def test_modes(mode, text, shown):
    """Each mode has its own form, for pools and for plain rows alike."""
    assert render_citations(text, PLAIN, mode=mode) == shown
    assert render_citations(text, SourcesPool.from_rows(PLAIN), mode=mode) == shown


@pytest.mark.parametrize(
    ("row", "mode", "shown"),
    [
        ({"title": "T", "physical_path": "a.csv"}, "links", "T"),
        ({"physical_path": "a.csv"}, "links", "a.csv"),
        ({"title": "T"}, "links", "T"),
        ({}, "links", "Source 12"),
        ({"title": "T", "url": "javascript:alert(1)"}, "links", "T"),
        ({"title": "T", "url": "javascript:alert(1)"}, "superscript", "¹²"),
        ({"title": "T", "url": "java\tscript:alert(1)"}, "html", '<sup class="cite" data-sids="12">[S:12]</sup>'),
        ({"title": "T", "url": "data:text/html,x"}, "footnotes", "[1]\n\nSources:\n[1] T"),
        ({"title": "T", "url": "mailto:a@e.org"}, "links", "[T](mailto:a@e.org)"),
        ({"description": "T", "href": "e.org/a"}, "links", "[T](https://e.org/a)"),
        ({"title": "T", "url": "https://e.org/a b(c)\"'<>"}, "links", "[T](https://e.org/a%20b%28c%29%22%27%3C%3E)"),
        ({"title": "a[b]c\\d|e", "url": "https://e.org/"}, "links", "[a\\[b\\]c\\\\d\\|e](https://e.org/)"),
        ({"title": 'say "x"', "url": "https://e.org/"}, "superscript", '[¹²](https://e.org/ "say \\"x\\"")'),
        ({"title": 'end\\" onx="', "url": "https://e.org/"}, "superscript", '[¹²](https://e.org/ "end\\\\\\" onx=\\"")'),
        ({"title": "a\r\nb\u2028c\x0bd\ne", "url": "https://e.org/"}, "links", "[a b c d e](https://e.org/)"),
        ({"title": "x](javascript:alert(1))", "url": "https://e.org/"}, "links", "[x\\](javascript:alert(1))](https://e.org/)"),
        ({"title": "x\n\nSources:\n[9] y", "url": "https://e.org/"}, "footnotes", "[1]\n\nSources:\n[1] x  Sources: \\[9\\] y - https://e.org/"),
        ({"url": "https://e.org/?a=1&b=2"}, "html",
         '<sup class="cite" data-sids="12"><a href="https://e.org/?a=1&amp;b=2" target="_blank" rel="noopener noreferrer">[S:12]</a></sup>'),
    ],
)  # fmt: skip
def test_titles_and_urls_are_escaped(row, mode, shown):
    """No title ends its brackets, its quotes or its line; no URL but http, https and mailto is a link."""
    assert render_citations("[[S:12]]", {12: row}, mode=mode) == shown


@pytest.mark.parametrize(
    ("keep", "text", "shown"),
    [
        (True, "a [[S:9]] b", "a [[S:9]] b"),
        (False, "a [[S:9]] b", "a b"),
        (False, "a [[S:9]].", "a."),
        (False, "[[S:9]] b", "b"),
        (False, "a [[S:9]] [[S:4]]", "a [Four](https://four.example/x)"),
        (True, "[[S:9,4]]", "[Four](https://four.example/x)"),
        (True, "[[S:x]]", "[[S:x]]"),
        (False, "a [[S:x]]", "a"),
        (True, '<sup class="cite" data-sids="9">[S:9]</sup>', '<sup class="cite" data-sids="9">[S:9]</sup>'),
        (True, '<sup class="cite" data-sids="4">old</sup>', "[Four](https://four.example/x)"),
    ],
)
def test_unresolved_tokens_stay_or_go(keep, text, shown):
    """A token of which nothing resolves stays as written, or goes by the removal rule."""
    assert render_citations(text, PLAIN, keep_unresolved=keep) == shown


def test_first_only():
    """The first id that resolves stands for the token."""
    assert render_citations("[[S:9,6,4]] [[S:1-999999999]]", PLAIN, first_only=True) == (
        "[Six](https://six.example/y) [Four](https://four.example/x)"
    )


def test_unknown_numbers_can_be_marked():
    """`mark_unknown` shows what has no source, beside what has one."""
    assert (
        render_citations("a [[S:7]] [[S:7,4]].", PLAIN, mark_unknown=True)
        == "a [?7] [?7] [Four](https://four.example/x)."
    )
    assert (
        render_citations("[[S:7]]", PLAIN, mark_unknown=True, mode="html")
        == '<sup class="cite" data-sids="">[?7]</sup>'
    )


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("links", "a \n\n![Chart](https://e.org/c.png?w=1)\n*Source 1: Chart*\n[Four](https://four.example/x) b"),
        (
            "superscript",
            'a \n\n![Chart](https://e.org/c.png?w=1)\n*Source 1: Chart*\n[⁴](https://four.example/x "Four") b',
        ),
    ],
)
def test_images_are_embedded(mode, shown):
    """A source that is an image is shown as one, with its number and title; only where asked for."""
    assert render_citations("a [[S:1,4]] b", IMAGE, mode=mode, embed_images=True) == shown
    assert "![" not in render_citations("a [[S:1,4]] b", IMAGE, mode=mode)


@pytest.mark.parametrize("url", ["javascript:x.png", "data:image/png,x.png", "c.png"])
def test_unusable_images_are_not_embedded(url):
    """An image needs a usable URL as a link does."""
    assert render_citations("[[S:1]]", {1: {"title": "T", "url": url}}, embed_images=True) == "T"


def test_aliases_show_their_owner():
    """An alias is shown as the row it stands for, once."""
    pool = SourcesPool.from_rows(
        [{"sid": 2, "title": "T", "url": "https://e.org/a"}, {"sid": 5, "url": "https://e.org/a"}]
    )
    assert render_citations("[[S:5,2]]", pool) == "[T](https://e.org/a)"
    assert 'data-sids="2"' in render_citations("[[S:5]]", pool, mode="html")


@pytest.mark.parametrize("mode", ["links", "superscript", "html", "footnotes"])
def test_code_is_shown_as_it_is(mode):
    """Nothing within code is a citation."""
    text = "`[[S:4]]`\n```\n[[S:4]]\n```\n"
    assert render_citations(text, PLAIN, mode=mode) == text


def test_keys_may_come_from_json():
    """`{sid: row}` read back from JSON, with text keys, works."""
    assert render_citations("[[S:4]]", {"4": PLAIN[4]}) == "[Four](https://four.example/x)"


def test_misuse_raises():
    """An unknown mode and a row that is no mapping are the caller's mistakes."""
    with pytest.raises(ValueError, match="unknown mode"):
        render_citations("", PLAIN, mode="latex")
    with pytest.raises(TypeError, match="source 1"):
        render_citations("[[S:1]]", {1: "https://e.org"})


def test_ranges_do_not_blow_up_the_answer():
    """Even a text of nothing but huge ranges is shown within bounds."""
    rows = {n: {"title": "T"} for n in range(1, 2001)}
    assert len(render_citations("[[S:1-999999999]]" * 300, rows)) < 250_000


class Links(html.parser.HTMLParser):
    """Collects every tag with its attributes."""

    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attrs):
        """Note the tag."""
        self.tags.append((tag, dict(attrs)))


@given(st.text(max_size=40), st.text(alphabet="ab\"'<>&()[] :/#?\n`\\", max_size=40))
def test_html_holds_one_link_whatever_the_row_says(title, tail):
    """Title and URL cannot add a tag or an attribute."""
    parser = Links()
    parser.feed(render_citations("[[S:1]]", {1: {"title": title, "url": "https://e.org/" + tail}}, mode="html"))
    assert [tag for tag, _ in parser.tags] == ["sup", "a"]
    assert set(parser.tags[1][1]) == {"href", "target", "rel"}
    assert parser.tags[1][1]["href"].startswith("https://e.org/")


@given(st.text(max_size=40))
def test_a_title_stays_within_its_brackets(title):
    """In Markdown every bracket of a title is escaped, and it is one line."""
    shown = render_citations("[[S:1]]", {1: {"title": "T" + title, "url": "https://e.org/"}})
    inside = shown.removeprefix("[").removesuffix("](https://e.org/)")
    bare = inside.replace("\\\\", "").replace("\\[", "").replace("\\]", "").replace("\\|", "")
    assert not set(bare) & set("[]|\\\n\r\u2028\u2029")
