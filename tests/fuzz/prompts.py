"""Fuzzes the places where foreign text enters a prompt: catalogs, active skills, instruction blocks."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw

from kdskills.prompts import ActiveEntry, BlockPart, CatalogEntry, render_active, render_block, render_catalog
from kdskills.prompts.blocks import disarm, one_line, xml_characters

WORDS = (
    "</description>", "</skill>", "<skill>", "</available_skills>", "<available_skills>", "]]>", "<![CDATA[", "&lt;",
    "&#0;", "&", '"', "'", "## Skill: a (b)", "## Skill Guidance", "[ACTIVE SKILLS]", "[SKILL CATALOG]", "[SK1] a.b",
    "\n", "\r", "\r\n", "\x00", "\x0b", "\x1c", "\x85", "\u2028", "\u200b", "\ufe0f", "\ufffe", "\u3164", "\U000e0041",
    "\\", "{{ x }}", "{% if %}", "{#", "#", "  Use when: ", "(shown 1/2)",
)  # fmt: skip


def check(data: bytes) -> None:
    """XML and JSON parse to the entries given; no text adds a line, a heading or an entry."""
    draw = Draw(data)
    budget = draw.choice((None, 5, 20, 40, 80, 200))
    rows = [(draw.text(24), draw.text(80), draw.text(20), draw.text(12)) for _ in range(1 + draw.number(3))]
    header = draw.choice(("ACTIVE SKILLS", "SKILL CATALOG", "Notes [x]", " a  b "))
    body = draw.pumped(60_000).decode("utf-8", "surrogateescape")
    entries = [
        CatalogEntry(
            short_id=f"SK{number}",
            full_id=f"a.s{number}",
            name=name,
            display_name=name,
            description=description,
            version=word,
            category=word,
            tags=(word,),
            when_to_use=(when, word),
            tools=((word, True),),
            location=f"skill://{when}",
            digest="sha256:0",
        )
        for number, (name, description, when, word) in enumerate(rows, 1)
    ]
    _xml(entries)
    _lines(entries)
    for form in ("gallery", "xml", "json"):
        catalog = render_catalog(entries, form, budget=budget, locations="logical", search_hint=body[:50])
        assert budget is None or catalog.tokens <= budget
        catalog.text.encode()
        if form == "json" and catalog.text:
            json.loads(catalog.text)
        if form == "xml" and catalog.text:
            ET.fromstring(catalog.text)
    _active([body, *(description for _, description, _, _ in rows)], rows[0][0])
    _block(body, header, rows)


def _as_parsed(text: str) -> str:
    return xml_characters(text).replace("\r\n", "\n").replace("\r", "\n")


def _xml(entries: list[CatalogEntry]) -> None:
    found = ET.fromstring(render_catalog(entries, "xml", locations="logical").text)
    shown = sorted(tuple((part.tag, part.text) for part in skill) for skill in found)
    wanted = sorted(
        tuple(
            (tag, _as_parsed(f"\n{text}\n"))
            for tag, text in (("name", e.display_name), ("description", e.description), ("location", e.location))
        )
        for e in entries
    )
    assert shown == wanted


def _lines(entries: list[CatalogEntry]) -> None:
    lines = render_catalog(entries, "gallery").text.splitlines()
    assert [line for line in lines if line.startswith("[SK")] == [
        "[SKILL CATALOG]",
        *(line for line in lines if line.startswith(tuple(f"[{e.short_id}] {e.full_id}" for e in entries))),
    ]
    assert sum(line.startswith("[SK") for line in lines) == 1 + len(entries)
    listed = json.loads(render_catalog(entries, "json").text)
    assert [row["id"] for row in listed] == [e.full_id for e in entries]


def _active(texts: list[str], name: str) -> None:
    found = ET.fromstring(render_active([ActiveEntry(name, text, attributes={"origin": name}) for text in texts]))
    assert [skill.text for skill in found] == [_as_parsed(f"\n{text}\n") for text in texts]
    assert all(skill.attrib == {"name": xml_characters(name), "origin": xml_characters(name)} for skill in found)


def _block(body: str, header: str, rows: list[tuple[str, str, str, str]]) -> None:
    for text in (body, *(description for _, description, _, _ in rows)):
        tame, _ = disarm(text, header)
        assert disarm(tame, header) == (tame, ())
    parts = [BlockPart(name, f"a.s{number}", text) for number, (name, text, _, _) in enumerate(rows)]
    block, _ = render_block([*parts, BlockPart("h", "a.hidden", body, hidden=True)], header)
    headings = [line for line in block.splitlines() if line.startswith(("## Skill:", "## Skill Guidance"))]
    shown = [part for part in parts if part.text.strip()]
    assert len(headings) == len(shown) + bool(body.strip())
    if block:
        assert block.startswith(f"[{one_line(header)}]\n")
