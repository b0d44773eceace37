"""Fuzzes the spelling of URLs and what becomes a link."""

from __future__ import annotations

import html.parser
import os
import re
import sys
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw

from kdskills.sources import SourcesPool, normalize_url, render_citations
from kdskills.sources.rows import parse_url, usable_url

WORDS = (
    "http://", "https://", "HTTPS:", "mailto:", "javascript:", "data:", "ftp://", "file:///", "//", "www.", "a.b", "/",
    "?", "#", "&", "utm_a=1", "gclid=", "fbclid", ":80", ":443", ":0", ":65536", "@", "[::1]", "[", "]", "\\", "%0a",
    "%", "\t", "\n", "\r", " ", "\xa0", "\u200b", "\u3000", "\u2028", "\ufeff", "\u202e", "..", "xn--", "\u00df", "\uff0e",
    '"', "'", "<", ">", "(", ")", "`", "|", "]]>", ";", "*", "_",
)  # fmt: skip
_SAFE = re.compile("(?:https?|mailto):[^\\s\x00-\x20\x7f-\xa0\"'<>()`\\\\|]+")


class _Links(html.parser.HTMLParser):
    """Collects the tags of a fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one tag."""
        self.tags.append((tag, dict(attrs)))


def check(data: bytes) -> None:
    """A normal spelling is its own normal spelling; a link is of a safe scheme and cannot be left."""
    text = Draw(data).pumped(30_000).decode("utf-8", "surrogateescape")
    normal = normalize_url(text)
    assert normalize_url(normal) == normal
    assert parse_url(normal).scheme_added is False
    link = usable_url(text)
    if link is not None:
        assert _SAFE.fullmatch(link), link
        assert usable_url(usable_url(link)) == usable_url(link)
    pool = SourcesPool.from_rows([{"sid": 1, "url": text, "title": "T"}])
    if 1 not in pool:
        return
    parser = _Links()
    parser.feed(render_citations("x [[S:1]]", pool, mode="html"))
    stored = usable_url(pool.get(1).url)
    assert [tag for tag, _ in parser.tags] == (["sup", "a"] if stored else ["sup"])
    assert not stored or parser.tags[1][1]["href"] == stored
    again = pool.merge([{"sid": 1, "url": pool.get(1).url}])
    assert again.added == ()
