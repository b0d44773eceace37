"""Values as HTML: nothing of a stranger's text is HTML, nothing of it is hidden, and none of it takes long or is long."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from kdskills.doors.ui.rendering import (
    LEAST,
    MAX_COMPARED,
    MAX_LINE,
    ROOM,
    UNSEEN,
    PageLinks,
    PageRoom,
    age,
    ansi,
    cited,
    clipped,
    count,
    diff,
    diff_lines,
    markdown,
    moment,
    page_environment,
    size,
    span,
    static_files,
    visible,
)

FILTERS = {
    "clipped": clipped,
    "markdown": markdown,
    "cited": lambda text: cited(text, {1: object()}),
    "ansi": ansi,
    "diff_lines": diff_lines,
    "short": lambda text: PageRoom().short(text),
}
ELEMENTS = {
    "div",
    "span",
    "p",
    "pre",
    "code",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "em",
    "strong",
    "a",
    "blockquote",
    "hr",
    "br",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "s",
    "sup",
}
ATTRIBUTES = {"class", "href", "rel", "title", "tabindex", "start", "style"}
HOSTILE = [
    "<script>alert(1)</script>",
    "<svg onload=alert(1)>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&#58;alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](data:text/html,<script>)",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](//evil.example) [r](relative)",
    "<javascript:alert(1)>",
    "[x]: javascript:alert(1)\n\n[x]",
    '[x](http://a "\\" onclick=alert(1)")',
    '![x" onerror="alert(1)](http://evil.example/a.png)',
    "[x](http://[) <http://[> ![y](http://[)",
    '"><script>alert(1)</script>',
    "\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\",
    "\x1b[31m<b>red</b>\x1b[0m",
    '|a|\n|-|\n|<td onclick="x">|',
    "```<script>\n</code></pre><script>\n```",
    "kdcite0123456789abcdef [S:1] <b>[S:1]</b>",
    "`<b>`" * 50,
    "\u202etxt.exe\u202c \u2066x\u2069 \u200bhidden \ufeff \U000e0041\U000e01ef",
    "\x00\x07\x08\x0b\x0c\x7f\x85\x9b31m",
    "\ud800 half \udcff",
    "]]>--><!--<![CDATA[<script>",
]
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(HOSTILE), max_size=4).map("\n\n".join),
    st.text(alphabet="<>&\"'[]()!`*_|-#\x1b;m0139\r\n\u202e\u200b\x00a:/"),
    st.characters().map(lambda each: f"a{each}b"),
)


class Reading(HTMLParser):
    """What a browser would make of a piece of HTML: elements, attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.odd: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.odd.append(data)

    handle_decl = unknown_decl = handle_pi = handle_comment


def require_harmless(html: str) -> Reading:
    """Check that a piece of HTML holds what the console writes, and nothing else."""
    read = Reading(html)
    assert not read.odd
    assert {tag for tag, _ in read.elements} <= ELEMENTS, html
    for _, attributes in read.elements:
        assert set(attributes) <= ATTRIBUTES, html
        assert attributes.get("style", "text-align:left") in {
            f"text-align:{side}" for side in ("left", "right", "center")
        }
        href = attributes.get("href")
        assert href is None or href.startswith("#source-") or re.match("(https?|mailto):", href, re.IGNORECASE), html
    assert UNSEEN.search(html) is None, html
    return read


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_text(name, text):
    """Each kind of attack is words on the page, in every filter."""
    require_harmless(FILTERS[name](text))


@settings(deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("name", FILTERS)
def test_nothing_of_a_text_is_html_and_nothing_of_it_unseen(name, text):
    """No element, attribute, comment or link of a text survives in any filter, and no character that cannot be seen."""
    html = FILTERS[name](text)
    assert isinstance(html, Markup)
    require_harmless(html)
    html.encode()


@given(st.text())
def test_clipped_text_reads_as_it_was(text):
    """What is short enough is on the page whole: its text is that of the file, with unseen characters named."""
    assert Reading(clipped(text)).text == visible(text)


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), *range(0x200B, 0x2010), *range(0x202A, 0x202F)])
def test_controls_are_named(code):
    """Every control and direction is shown by its number, but the ends of lines and tabs."""
    assert visible(chr(code)) == (chr(code) if chr(code) in "\t\n\r" else f"[U+{code:04X}]")


@pytest.mark.parametrize(
    "char", "\u00ad\u034f\u061c\u115f\u3164\uffa0\ufe00\U000e0020\U000e0100\U000e01ef\u2066\ufeff\ud800"
)
def test_fillers_and_selectors_are_named(char):
    """Characters of no width, in which words can be hidden from people and not from models, are shown."""
    assert visible(char) == f"[U+{ord(char):04X}]"


def test_what_people_write_stays():
    """Letters of any script, and signs with their colour, are no attack."""
    text = "Übung 日本語 עברית ❤\ufe0f → “quoted”\tx\n"
    assert visible(text) == text


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "&",
        '"',
        "\u202e",
        "\U000e0041",
        "日",
        "\n",
        "\x1b[31mX",
        "[",
        "![",
        "*a **a ",
        "- a\n",
        ">",
        "| a ",
        "[a](",
        "~~a",
        "+\n",
    ],
)
def test_long_texts_are_cut_and_cost_little(name, unit):
    """A million characters of whatever kind take less than the room of a page, and no time that grows with the square."""
    text = unit * (1_000_000 // len(unit))
    began = time.process_time()
    html = FILTERS[name](text)
    assert time.process_time() - began < 5
    assert len(html.encode()) <= ROOM + 400
    assert "more" in html
    require_harmless(html)


def test_tables_of_a_thousand_columns_stay_text():
    """A table whose lines would each be filled up to a thousand cells is no table; one of three columns is."""
    wide = "|" + "a|" * 1000 + "\n|" + "-|" * 1000 + "\n" + "|\n" * 10_000
    began = time.process_time()
    assert "<table>" not in markdown(wide)
    assert time.process_time() - began < 5
    assert "<table>" in markdown("|a|b|c|\n|-|-|-|\n|1|2|3|")


def test_a_long_line_is_cut_and_says_so():
    """A line of a million characters is shown by its beginning; the lines around it are whole."""
    html = clipped(f"one\n{'x' * 50_000}\nthree")
    first, long, third = html.split("\n")
    assert (first, third) == ("one", "three")
    assert long == "x" * MAX_LINE + " [… 46,000 more]"
    assert "996,000 more" not in ansi(
        "x" * 1_000_000
    )  # cut as a whole first: only what could be on the page is looked at
    assert "more characters]" in ansi("x" * 1_000_000)


def test_links_and_images_of_markdown():
    """Links lead to pages with nothing told to them; images are named and not loaded."""
    html = markdown("[a](https://example.org/x?y=1&z=2) ![alt](http://evil.example/p.png)")
    read = Reading(html)
    link = next(attributes for tag, attributes in read.elements if tag == "a")
    assert link == {"rel": "noopener noreferrer nofollow", "href": "https://example.org/x?y=1&z=2"}
    assert "[image: alt http://evil.example/p.png]" in read.text
    assert "img" not in {tag for tag, _ in read.elements}


def test_markdown_is_rendered():
    """Heads, lists, code and tables are what they are meant to be."""
    names = [tag for tag, _ in Reading(markdown("# A\n\n- b\n\n`c`\n\n|d|\n|-|\n|e|\n\n~~f~~")).elements]
    assert {"h1", "ul", "li", "code", "table", "td", "s"} <= set(names)


def test_citations_lead_to_their_rows():
    """A number with a source is a link to it, one without is marked, and code is left alone."""
    html = cited("One [[S:1]] two [[S:1,7]], `[[S:1]]`.", {1: object()})
    assert html.count('href="#source-1"') == 2
    assert '<span class="cite unknown">7?</span>' in html
    assert "<code>[[S:1]]</code>" in html


def test_ten_thousand_citations_take_no_time():
    """An answer of nothing but citations is shown within a moment, and within a page."""
    began = time.process_time()
    html = cited("[[S:1]]" * 10_000, {1: object()})
    assert time.process_time() - began < 5
    assert len(html.encode()) < 100 * 1024


# Output of programs.


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m plain", '<span class="ansi-red">red</span> plain'),
        ("\x1b[1;92mok\x1b[22m!", '<span class="ansi-green ansi-bold">ok</span><span class="ansi-green">!</span>'),
        ("\x1b[31ma\nb\x1b[39mc", '<span class="ansi-red">a\nb</span>c'),
        ("\x1b[38;5;4mx\x1b[38;5;200my", '<span class="ansi-blue">x</span>y'),
        ("\x1b[38;2;1;2;3mx\x1b[48;5;1my", "xy"),
        ("\x1b[38m\x1b[38;5m\x1b[;;;m\x1b[<1m\x1b[1:2mx", "x"),
        ("a\x1b[2Kb\x1b[10;10Hc\x1b[?25ld", "abcd"),
        ("\x1b]0;title\x07a\x1b]8;;http://e\x1b\\b\x1b]8;;\x1b\\c", "abc"),
        ("\x1b(Ba\x1b=b\x1bMc\x1b7d", "abcd"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("10 %\r50 %\rdone", "10 %\n50 %\ndone"),
        ("hidden\rshown", "hidden\nshown"),
        ("a\x08b", "a[U+0008]b"),
        ("\x1b", "[U+001B]"),
        ("\x1b[31", "[U+001B][31"),
        ("\x1b[31\nx", "[U+001B][31\nx"),
        ("\x1b]0;never ended\nnext", "[U+001B]]0;never ended\nnext"),
        ("\x9b31mx", "[U+009B]31mx"),
        ("\x1b[" + "9" * 5000 + "mx", "x"),
        ("\x1b[" + "1;" * 500 + "1mx", '<span class="ansi-bold">x</span>'),
    ],
)
def test_sequences(text, html):
    """Colours are shown, other sequences are left out, and what is none, or a part of one, is shown as characters."""
    if len(text) > MAX_LINE:
        require_harmless(ansi(text))
        return
    assert ansi(text) == html


@pytest.mark.parametrize(
    "unit", ["\x1b]", "\x1b[", "\x1b[1;", "\x1bP", "\x1b[m\n", "\n", "\r", "\x1b[31mX\x1b[32m", "\x1b(", "\x1b]0;\n"]
)
def test_sequences_take_linear_time(unit):
    """A piece of a log of nothing but beginnings of sequences is shown within a moment."""
    began = time.process_time()
    html = ansi(unit * (64 * 1024 // len(unit)))
    assert time.process_time() - began < 2
    assert len(html.encode()) < ROOM + 400


# Differences.


def test_differences():
    """Lines that are gone, new and around them are marked; two alike texts have none."""
    html = diff_lines(diff("a\nb\n<c>", "a\nB\n<c>"))
    assert [tuple(attributes["class"].split()) for _, attributes in Reading(html).elements] == [
        ("line", "hunk"),
        ("line", "same"),
        ("line", "del"),
        ("line", "ins"),
        ("line", "same"),
    ]
    assert "&lt;c&gt;" in html
    assert diff_lines(diff("a", "a")) == ""


def test_texts_too_long_to_compare_say_so():
    """Two texts of a hundred thousand lines are not compared, and that is said; alike they are alike."""
    long = "x\n" * MAX_COMPARED
    assert "too long" in diff_lines(diff(long, f"{long}y"))
    assert diff(long, long) == ""


# Times, sizes and numbers.


NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (0.34, "340 ms"),
        (1, "1.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (90061, "1 d 1 h"),
        (86400 * 400, "400 d"),
    ],
)
def test_spans(seconds, words):
    """Lengths of time are in their two largest units."""
    assert span(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (NOW, "now"),
        (NOW - timedelta(minutes=5), "5 min ago"),
        (NOW + timedelta(hours=2), "in 2 h"),
        ((NOW - timedelta(days=1)).isoformat(), "1 d ago"),
        (NOW.replace(tzinfo=None), "now"),
        (None, "never"),
        ("no moment", "never"),
        ("<script>", "never"),
        (7, "never"),
    ],
)
def test_ages(value, words):
    """Moments are shown by their age with the moment itself behind it; what is none is never."""
    read = Reading(age(value, NOW))
    assert read.text == words
    assert words == "never" or read.elements[0][1]["title"].endswith(" UTC")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (None, "0 B"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (10240, "10 KiB"),
        (5 * 1024**3, "5.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
    ],
)
def test_sizes(number, words):
    """Numbers of bytes have their unit."""
    assert size(number) == words


def test_counts():
    """One is one, and many have a plural."""
    assert [count(1, "skill"), count(2351, "skill"), count(2, "try", "tries")] == ["1 skill", "2,351 skills", "2 tries"]


def test_moments_have_a_zone():
    """A moment without a zone is one of UTC."""
    assert moment("2026-03-01T12:00:00") == NOW


# Pages.


def test_links_keep_what_is_behind_the_question_mark():
    """A link changes a word, takes one away, and quotes what strangers wrote."""
    links = PageLinks("/ui/skills", {"q": 'a&b="<', "offset": "50"})
    assert links(offset=100) == "/ui/skills?q=a%26b%3D%22%3C&offset=100"
    assert links(q=None, offset=None) == "/ui/skills"


def test_names_of_static_files_hold_their_digest():
    """Each file is there under its digest, with its media type, and the licences of what is not ours beside them."""
    files = static_files()
    assert {"console.css", "console.js", "htmx.min.js", "mark.svg"} <= set(files)
    for name, file in files.items():
        assert re.fullmatch(f"/ui/static/[0-9a-f]{{16}}/{re.escape(name)}", file.url)
        assert file.path.read_bytes()
        assert file.media_type.partition(";")[0] in {"text/css", "text/javascript", "image/svg+xml"}


def render(text: str, room: PageRoom | None = None, **values: object) -> str:
    """Render a template as pages are."""
    return page_environment().from_string(text).render(room=room or PageRoom(), **values)


def test_every_value_of_a_page_is_escaped_seen_and_short():
    """A value that no filter was thought of for is escaped, made visible and cut, in texts and in attributes."""
    html = render('<a title="{{ x }}">{{ x }}</a>{{ n }}', x='"><script>\u202e' + "x" * 1_000_000, n=7)
    (element,) = Reading(html).elements
    assert element[0] == "a"
    assert len(html) < 10_000
    assert "\u202e" not in html
    assert html.endswith("7")


def test_a_name_that_is_not_there_is_an_error():
    """A page with a hole in it is not sent."""
    with pytest.raises(jinja2.UndefinedError):
        render("{{ absent }}")


def test_texts_of_a_page_share_its_room():
    """A hundred long texts take the room of one, and each of them shows its beginning."""
    html = render("{% for x in texts %}<pre>{{ x | clipped }}</pre>{% endfor %}", texts=["<" * 100_000] * 100)
    assert html.count("<pre>&lt;&lt;") == 100
    assert len(html) < ROOM + 100 * (LEAST + 60)


@pytest.mark.parametrize("name", ["\udcff\ud800", 'a"b<c>', "a/../b", "ü", "a\nb"])
def test_parts_of_addresses_are_quoted(name):
    """Whatever a name holds, in an address it is letters, digits and signs, and breaks no page."""
    html = render("{{ x | segment }} {{ x | segments }}", x=name)
    assert re.fullmatch(r"[\w.~%-]+ [\w.~%/-]+", html, re.ASCII)


def test_form_values_are_whole():
    """What somebody wrote into a form is in it again, to the last character."""
    assert len(render("{{ x | whole }}", x="x" * 50_000)) == 50_000


@pytest.mark.parametrize(
    "url", ["http://[", "javascript:alert(1)", " javascript:x", "", "//evil", "data:x", "\x00http:x", "ftp://x"]
)
def test_what_is_no_link(url):
    """Sources lead to pages alone, and an address that cannot be read leads nowhere."""
    assert render("{{ x | is_link }}", x=url) == "False"


@pytest.mark.parametrize("url", ["http://a", "HTTPS://a/b?c", "mailto:a@b.example", " https://a"])
def test_what_is_a_link(url):
    """Pages and addresses are links."""
    assert render("{{ x | is_link }}", x=url) == "True"
