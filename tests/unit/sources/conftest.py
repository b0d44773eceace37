"""Texts made of everything that means something to the citation grammar, and pools to go with them."""

import pytest
from hypothesis import strategies as st

from kdskills.sources import SourcesPool

PIECES = [
    "[[S:4]]", "[[S:9]]", "[[s: 1 , 2-3 ]]", "[[S:3-1]]", "[[S:1-999999999]]", "[[S:]]", "[[S:x]]", "[S:4]", "[[USAGE:4]]",
    "[[S:4", "[[S:", "[[S", "[[", "[", "]", "]]", "S", ":", "4", "1-3", ",", "［［S：４］］", "［", "］", "\u200b", "\ufeff",
    "`", "``", "```", "~~~", "~", "\n```\n", "\n~~~\n", "\n", "\r\n", "\r", " ", "\t", ">", "> ", "\n    ", ".", "word", "é",
    '<sup class="cite" data-sids="4,6">', "</sup>", '<sup class="cite" data-sids="9">[S:9]</sup>', "<su", "<", "\\", "*", "(", ")",
    "\n# ", "\n- ", "\u3000", "\u2013", "[[S:2\u20133]]", "[[\u200bS:\u200b2]]", "[\u200b[S:1]\u200b]",
]  # fmt: skip

ROWS = {
    1: {"title": "One [1]", "url": "https://one.example/a"},
    2: {"title": 'Two "2" | \\', "url": "https://two.example/pic.PNG"},
    3: {"title": "Three\nlines", "physical_path": "data/three.csv"},
    4: {"url": "javascript:alert(1)"},
    6: {"title": "Six", "url": "mailto:six@example.org"},
}


@pytest.fixture
def pool():
    """A pool of five sources: a page, an image, a file, an unusable URL, a mail address."""
    return SourcesPool.from_rows(ROWS)


@pytest.fixture(scope="session")
def texts():
    """Texts joined from pieces that mean something, of up to 25 pieces."""
    return st.lists(st.sampled_from(PIECES), max_size=25).map("".join)


@pytest.fixture(scope="session")
def raw_rows():
    """Rows as files of all kinds write them, many of one source, with and without numbers."""
    urls = st.sampled_from(
        ["https://a.example/x", "HTTPS://A.example:443/x/", "a.example/x", "https://b.example", "data/c.csv", ""]
    )
    words = st.sampled_from(["", "T", "Title", "a longer title"])
    row = st.fixed_dictionaries(
        {},
        optional={
            "sid": st.one_of(st.integers(0, 9), st.sampled_from(["3", "x", True, None, 10**12])),
            "url": urls,
            "href": urls,
            "physical_path": st.sampled_from(["c.csv", "d.csv", "", None]),
            "title": words,
            "text": words,
            "content": words,
            "kept": st.sampled_from([1, [1, {"a": None}], {"b": "c"}, 1.5, None]),
        },
    )
    return st.lists(row, max_size=6)
