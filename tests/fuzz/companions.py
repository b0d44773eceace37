"""Fuzzes the files beside a skill file, and what is made of the rows of `sources.yaml`."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw, scratch

from kdskills.skills import parse_skill, validate_skill
from kdskills.skills.folder import read_compact, read_sources, read_tools
from kdskills.skills.model import Verdict
from kdskills.sources import SourcesPool, adopt_citations, normalize_sources, render_citations
from kdskills.sources.rows import MAX_SID

NAMES = ("sources.yaml", "tools.yaml", "compact.md")
VERDICTS: tuple[Verdict, ...] = ("lenient", "spec", "skills-ref")
WORDS = (
    "sources:\n", "items:\n", "- url: ", "- sid: 1\n  url: ", "sid: ", "1: {", "title: ", "text: ", "body: ", "href: ",
    "value: ", "value_preview: ", "physical_path: ", "local_path: ", "https://a.b/", "999999999", "tools:\n",
    "tool_ids:\n", "- id: ", "required: ", "hard_required: ", "availability: optional\n", "role: ", "why: ", "reqired: ",
    "---\n", "null", "0x", "true", "{", "}", "[", "]", ", ", ": ", "\n", "\xa0", "\x85", '"\\u0000"',
)  # fmt: skip
PRIOR = ({"sid": 1, "url": "https://a.b/", "title": "One"}, {"sid": 7, "physical_path": "a/b.txt"})
SKILL = b"---\nname: s\ndescription: Text.\n---\nBody.\n"


@cache
def _place() -> Path:
    """Return the folder of a sound skill."""
    place = scratch() / "s"
    place.mkdir()
    (place / "SKILL.md").write_bytes(SKILL)
    return place


def check(data: bytes) -> None:
    """No companion raises; a broken `tools.yaml` refuses; rows merge into pools that keep their numbers."""
    draw = Draw(data)
    name = draw.choice(NAMES)
    written = draw.pumped(60_000)
    for verdict in VERDICTS:
        if name == "compact.md":
            compact = read_compact(written, verdict=verdict)
            assert compact.value is None or not compact.diagnostics
            assert compact.value is not None or compact.diagnostics or verdict != "lenient"
        elif name == "tools.yaml":
            tools = read_tools(written, verdict=verdict)
            assert not (tools.value and tools.diagnostics)
            assert all(tool.id.strip() for tool in tools.value)
            assert all(found.severity == "error" for found in tools.diagnostics)
        else:
            _rows(read_sources(written, verdict=verdict).value)
    if name == "sources.yaml":
        _rows(written.decode("utf-8", "replace"))
    _folder(name, written)


def _folder(name: str, written: bytes) -> None:
    place = _place()
    path = place / name
    path.write_bytes(written)
    try:
        for verdict in VERDICTS:
            found = validate_skill(place, verdict=verdict)
            refused = any(f.code == "tools_invalid" for f in found)
            assert parse_skill(place, verdict=verdict).ok == (not refused)
    finally:
        path.unlink()


def _rows(rows: object) -> None:
    normal, _ = normalize_sources(rows)
    for row in normal:
        assert row.sid is None or 1 <= row.sid <= MAX_SID
        assert row.identity
        assert row.title.strip()
        json.dumps(row.to_json(), allow_nan=False, ensure_ascii=False).encode()
    again, findings = normalize_sources([row.to_json() for row in normal])
    assert again == normal, findings
    pool = SourcesPool.from_rows(rows)
    assert SourcesPool.from_json(json.loads(json.dumps(pool.to_json()))) == pool
    prior = SourcesPool.from_rows(PRIOR)
    merged = prior.merge(rows)
    assert set(merged.sid_map) == {row.sid for row in normal if row.sid is not None}
    assert all(sid in merged.pool for sid in merged.sid_map.values())
    assert all(merged.pool.get(sid).identity == prior.get(sid).identity for sid in prior.rows)
    twice = merged.pool.merge(rows)
    assert (twice.added, twice.sid_map, len(twice.pool)) == ((), merged.sid_map, len(merged.pool))
    text = "One [[S:1]] and [[S:1-9]]."
    adopted = adopt_citations(text, rows, prior)
    render_citations(adopted.text, adopted.pool, mode="html")
    render_citations(text, pool, embed_images=True)
