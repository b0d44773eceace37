"""Fuzzes the grammar of citations: finding, rewriting, rendering whole and in pieces."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw

from kdskills.sources import (
    CitationStream,
    SourcesPool,
    extract_citations,
    find_citations,
    render_citations,
    rewrite_citations,
)
from kdskills.sources.citations import MODES

WORDS = (
    "[[S:1]]", "[[S:1,2]]", "[[S:1-3]]", "[[S:9-1]]", "[[", "]]", "[S:", "S:", "s :", "\uff3b\uff3bS\uff1a\uff11\uff3d\uff3d",
    "\u200b", "\u00ad", "\ufeff", "\u3000", "\xa0", "`", "``", "```\n", "~~~\n", "    ", "> ", "```py\n", "\n", "\r",
    "\r\n", "\u2028", "\x85", '<sup class="cite" data-sids="1,2">', "</sup>", "<sup ", "[[S:99]]", "[[S:999999999]]",
    "[[S:1-999999999]]", "\u2013", "\u2212", "\uff0d", "\uff0c", "[[S:\u0661]]", ".", ",", " ",
)  # fmt: skip
ROWS = (
    {"sid": 1, "url": "https://a.b/c", "title": "On [e]"}, {"sid": 2, "physical_path": "a/b.txt"},
    {"sid": 3, "url": "https://a.b/i.png", "title": "Pic"}, {"sid": 4, "url": "https://a.b/c"},
    {"sid": 12, "url": "javascript:alert(1)", "title": "`[[S:1]]`\n"},
)  # fmt: skip
MAPS: tuple[dict[int, int], ...] = (
    {sid: sid for sid in range(1, 20)},
    {sid: sid + 100 for sid in range(1, 20)},
    {},
    {1: 2, 2: 1, 3: 3},
    dict.fromkeys(range(1, 12), 5),
    {sid: 999_999_999 - sid for sid in range(1, 3000)},
)


def check(data: bytes) -> None:
    """Rewriting twice is rewriting once, and a stream shows what the whole text shows."""
    draw = Draw(data)
    sid_map = draw.choice(MAPS)
    mode = draw.choice(MODES)
    switches = draw.number(16)
    cuts = draw.number(1 << 16)
    text = draw.pumped(20_000).decode("utf-8", "surrogateescape")
    _found(text)
    _rewritten(text, sid_map)
    options = {
        name: bool(switches >> bit & 1)
        for bit, name in enumerate(("keep_unresolved", "first_only", "embed_images", "mark_unknown"))
    }
    pool = SourcesPool.from_rows(ROWS)
    whole = render_citations(text, pool, mode=mode, **options)
    stream = CitationStream(pool, mode=mode, **options)
    streamed = "".join(stream.feed(piece) for piece in _cut(text, cuts)) + stream.flush()
    assert streamed == whole
    head, held = CitationStream.split(text)
    assert text.startswith(head)
    assert len(head) + held == len(text)


def _found(text: str) -> None:
    end = 0
    for citation in find_citations(text):
        assert end <= citation.start < citation.end <= len(text)
        end = citation.end
    known = {1, 2, 5, 12}
    assert all(sid >= 0 for sid in extract_citations(text, known=known))


def _rewritten(text: str, sid_map: dict[int, int]) -> None:
    once = rewrite_citations(text, sid_map)
    assert set(once.used) <= set(sid_map.values())
    assert not set(once.dropped) & set(sid_map)
    assert extract_citations(once.text) == list(once.used)
    twice = rewrite_citations(once.text, {sid: sid for sid in once.used})
    assert twice.text == once.text
    assert (twice.used, twice.dropped) == (once.used, ())
    if not find_citations(text):
        assert once.text == text


def _cut(text: str, seed: int) -> list[str]:
    """Cut *text* into pieces of 1 to 7 characters, or of about a thousand when it is long."""
    pieces, at = [], 0
    step = 1 if len(text) < 4_000 else 997
    while at < len(text):
        seed = (seed * 75 + 74) % 65_537
        size = (1 + seed % 7) * step
        pieces.append(text[at : at + size])
        at += size
    return pieces
