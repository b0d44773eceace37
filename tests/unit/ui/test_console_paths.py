"""Where forms lead back to, and what stands behind a question mark: of this console, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from kdskills.doors.ui.calls import HOME, ConsoleCall
from kdskills.doors.ui.console import own_path
from kdskills.errors import BadRequest

PIECES = st.lists(
    st.sampled_from(
        [
            "/ui/",
            "/",
            "\\",
            "..",
            ".",
            "%2e%2e",
            "%2F",
            "evil.example",
            "http:",
            "javascript:",
            "@",
            "?",
            "#",
            "\t",
            "\n",
            "[",
            "ui",
            ";",
        ]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "//evil.example",
        "///evil.example",
        "//evil.example/ui/",
        "http://evil.example/ui/",
        "https:/ui/",
        "javascript:alert(1)",
        "javascript:/ui/",
        "data:text/html,/ui/",
        "\\\\evil.example",
        "/\\evil.example",
        "/ui/\\evil.example",
        "/ui/\\..\\..\\x",
        "/ui/../projects/local",
        "/ui/./../x",
        "/ui/%2e%2e/x",
        "/ui/..%2f..%2fx",
        "/ui/..//evil.example",
        "/uix",
        "/ui",
        "/",
        "/projects/local/tools",
        "ui/skills",
        "//[",
        "http://[/ui/",
        "/\t/evil.example/ui/",
        " //evil.example",
    ],
)
def test_forms_lead_nowhere_else(text):
    """Whatever a form says to go back to, it is the first page if it is none of the console's."""
    assert own_path(text) == HOME


@pytest.mark.parametrize(
    "path",
    ["/ui/", "/ui/skills", "/ui/skills?q=a&state=listed", "/ui/skills/a.b/why?consumer=x%26y", "/ui/skills?q=a..b"],
)
def test_forms_lead_back(path):
    """A page of the console, with what stands behind its question mark, is gone back to."""
    assert own_path(path) == path


@given(st.one_of(st.text(), PIECES, PIECES.map(lambda text: f"/ui/{text}")))
def test_a_browser_stays_on_the_console(text):
    """However an address is put together, where a browser goes is on this origin and below the console."""
    led = own_path(text)
    there = urlsplit(urljoin("http://here.example/ui/sign-in", led))
    assert (there.scheme, there.netloc) == ("http", "here.example")
    assert there.path.startswith("/ui/")
    assert "\n" not in led
    assert "\r" not in led


def call_of(query: str) -> ConsoleCall:
    """Return a request with something behind its question mark."""
    scope = {"type": "http", "method": "GET", "path": "/ui/", "query_string": query.encode(), "headers": []}
    nothing = SimpleNamespace()
    return ConsoleCall(nothing, nothing, Request(scope), nothing, nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "number"),
    [("", None), ("n=", None), ("n=0", 0), ("n=50", 50), ("n=007", 7), ("n=1&n=2", 2), ("m=1", None)],
)
def test_numbers(query, number):
    """A number is read; one that is not there is none."""
    assert call_of(query).number("n") == number


@pytest.mark.parametrize(
    "text", ["-1", "1.0", "1e3", "x", "٣", "²", "0x1", "1_000", " 1", "9" * 16, "%00", "NaN", "1;drop"]
)
def test_what_is_no_number(text):
    """What is none, or larger than anything there is, is refused by its name."""
    with pytest.raises(BadRequest) as caught:
        call_of(f"n={text}").number("n")
    assert caught.value.details["errors"] == [{"path": "/n", "problem": "no number"}]
