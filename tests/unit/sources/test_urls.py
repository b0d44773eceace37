"""`normalize_url` gives one spelling for one place; `usable_url` lets only harmless ones become links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.sources.rows import normalize_url, parse_url, usable_url

PIECES = [
    "http", "HTTPS", "://", "//", "a", "B.com", "www.", ":80", ":443", ":", "/", "?", "#", "utm_x=1", "&", "a=1", "gclid=2", " ",
    "\t", "\n", "@", "[", "]", "::1", "\\", "é", "\u200b", "İ", "mailto:", "javascript:", "%20", ".", "..", "\u00a0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("HTTPS://Example.COM/Path", "https://example.com/Path"),
        ("http://example.com:80/a", "http://example.com/a"),
        ("http://example.com:8080/a", "http://example.com:8080/a"),
        ("http://example.com:443/a", "http://example.com:443/a"),
        ("https://example.com:443", "https://example.com/"),
        ("https://example.com:0443/x", "https://example.com/x"),
        ("https://example.com:/x", "https://example.com/x"),
        ("https://example480.com:4480/x", "https://example480.com:4480/x"),
        ("https://user:pw@example.com/x", "https://example.com/x"),
        ("https://u@v@example.com/x", "https://example.com/x"),
        ("https://example.com/x#part", "https://example.com/x"),
        ("https://example.com/x?utm_source=a&b=%20+C&gclid=1&fbclid=2&b=", "https://example.com/x?b=%20+C&b="),
        ("https://example.com/x?UTM_SOURCE=a", "https://example.com/x?UTM_SOURCE=a"),
        ("https://example.com/x?xutm_a=1", "https://example.com/x?xutm_a=1"),
        ("https://example.com/x?a&&b", "https://example.com/x?a&&b"),
        ("https://example.com/x?utm_medium=1", "https://example.com/x"),
        ("https://example.com", "https://example.com/"),
        ("https://example.com?a=1", "https://example.com/?a=1"),
        ("https://example.com/", "https://example.com/"),
        ("https://example.com/a/", "https://example.com/a"),
        ("https://example.com/a/?b=/", "https://example.com/a?b=/"),
        ("https://example.com/a//", "https://example.com/a//"),
        ("http://[2001:DB8::1]:80/x", "http://[2001:db8::1]/x"),
        ("//Example.com/a", "https://example.com/a"),
        ("example.org/a", "https://example.org/a"),
        ("www.Example.org", "https://www.example.org/"),
        ("münchen.de/a", "https://münchen.de/a"),
        ("example.org", "example.org"),
        ("1.2/a", "1.2/a"),
        ("data/x.com/y", "data/x.com/y"),
        ("../x.com/y", "../x.com/y"),
        ("./a.b/c", "./a.b/c"),
        ("docs/Notes #1.md", "docs/Notes #1.md"),
        ("mailto:A@Example.org", "mailto:A@Example.org"),
        ("MAILTO:a@b.c?subject=x", "mailto:a@b.c?subject=x"),
        ("file:///srv/data/", "file:///srv/data"),
        ("  https://example.com/a\n", "https://example.com/a"),
        ("java\nscript:alert(1)", "javascript:alert(1)"),
    ],
)
def test_one_spelling(written, stored):
    """Scheme, host, port, user info, fragment, tracking and slashes are normalised; everything else stays byte-equal."""
    assert normalize_url(written) == stored


@pytest.mark.parametrize(
    "text",
    [
        "http://[bad",
        "https://example.com:x/",
        "https://h:99999/",
        "https://",
        "http:foo",
        "http:///x",
        "https://:80/",
        "https://@/",
    ],
)
def test_what_does_not_parse_stays_text(text):
    """A URL that cannot be parsed is kept as written, is said to be bad, and is never a link."""
    parsed = parse_url(text)
    assert (parsed.text, parsed.bad, usable_url(text)) == (text, True, None)


@pytest.mark.parametrize("text", ["//example.com", "example.com/x", "www.example.com"])
def test_added_scheme_is_told(text):
    """`https` is never added in silence."""
    assert parse_url(text).scheme_added


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("https://a/x/ /", "https://a/x"),
        ("https://a/x/ / /\u3000", "https://a/x"),
        ("https://a/x// /", "https://a/x//"),
        ("https://a/x/ /?q", "https://a/x/ ?q"),
        ("https://a/ /", "https://a/"),
    ],
)
def test_blanks_between_trailing_slashes_go_with_them(text, normal):
    """What the end of a path leaves behind is an end again."""
    assert (normalize_url(text), normalize_url(normal)) == (normal, normal)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=10).map("".join)))
def test_normalising_twice_is_normalising_once(text):
    """A stored URL is its own stored spelling, whatever it was made from."""
    once = normalize_url(text)
    assert normalize_url(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "javascript:alert(1)", "JavaScript:alert(1)", "java\tscript:alert(1)", " \x01javascript:alert(1)", "data:text/html,x",
        "vbscript:x", "file:///etc/passwd", "data/x.csv", "", None, "mailto:", "ftp://example.com/x", "skill://a/b",
        "https", "http", "mailto", " https\n",
    ],
)  # fmt: skip
def test_only_http_https_and_mailto_become_links(text):
    """No other scheme, and no path, is a usable target."""
    assert usable_url(text) is None


def test_usable_urls_cannot_leave_their_place():
    """Blanks, quotes, brackets of a link, backslashes, bars, backticks and controls are percent-encoded."""
    assert usable_url("https://e.org/a b\"'<>()\\`|\x01\u2028é") == (
        "https://e.org/a%20b%22%27%3C%3E%28%29%5C%60%7C%01%E2%80%A8é"
    )


@given(st.lists(st.sampled_from([*PIECES, "(", ")", '"', "<", ">", "\u2028"]), max_size=10).map("".join))
def test_usable_urls_hold_no_delimiter(text):
    """Whatever was written, a usable URL has a known scheme and none of the characters that end a link."""
    url = usable_url("https://e.org/" + text)
    assert url is None or (url.startswith("https://") and not set(url) & set(" \t\n\"'<>()\\`|\u2028"))
