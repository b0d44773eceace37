"""The catalog: what a model is told is there, within a budget of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from kdskills.errors import Diagnostic
from kdskills.prompts.blocks import cut, is_shipped, one_line, render, xml_value
from kdskills.skills.model import TokenCounter, estimate_tokens

if TYPE_CHECKING:
    import jinja2

CatalogFormat = Literal["gallery", "xml", "json"]
Locations = Literal["host", "logical", "none"]

LEVELS = ("full", "trimmed", "short", "names", "partial", "ranked")
"""What is left out, by level: nothing, lists, long descriptions, descriptions, skills, and all that fit a request less."""

LISTED_LENGTH = 240
"""Characters of a description where not all skills are listed."""

_SHORT_LENGTHS = (240, 120, 60)
_FIRST_TRY = 32
_GUESSES = 6


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One listed skill as a catalog shows it.

    Attributes:
        short_id: `SK<n>`, given by the view; never by the catalog.
        full_id: `<namespace>.<id>`.
        display_name: The skill's key in `view.names`.
        location: `skill://…`, the same on every host.
        path: The skill file on this host, or None.
        tools: Pairs of tool id and whether it is required.
    """

    short_id: str
    full_id: str
    name: str
    display_name: str
    description: str
    version: str | None = None
    category: str | None = None
    tags: tuple[str, ...] = ()
    when_to_use: tuple[str, ...] = ()
    tools: tuple[tuple[str, bool], ...] = ()
    location: str = ""
    path: str | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """A rendered catalog.

    Attributes:
        text: What the model reads; `""` when not even the frame fits.
        level: Index into `LEVELS`.
        shown: Skills in the text.
        total: Skills there are.
        tokens: Size of `text` by the counter used.
        diagnostics: `budget_too_small` when nothing could be shown.
        listed: Full ids of the skills in the text, in order; empty where it shows them all.
    """

    text: str
    level: int
    shown: int
    total: int
    tokens: int
    diagnostics: tuple[Diagnostic, ...] = ()
    listed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogDraft:
    """What every rendering of one catalog shares."""

    entries: tuple[CatalogEntry, ...]
    format: CatalogFormat
    locations: Locations
    hint: str
    environment: jinja2.Environment | None

    def rows(self, entries: Sequence[CatalogEntry], level: int, length: int | None) -> list[dict[str, object]]:
        """Return *entries* as the form shows them at *level*, descriptions cut to *length*."""
        if self.format == "xml":  # most catalogs are this one, and it shows three fields only
            return [_xml_row(entry, _description(entry, level, length), level, self.locations) for entry in entries]
        form = _FORMS[self.format]
        return [form(self._at_level(entry, level, length)) for entry in entries]

    def estimable(self, count: TokenCounter) -> bool:
        """Whether a text's size can be bounded from below without rendering it.

        The shipped XML template shows all values, and no escape makes one shorter. So where the estimate counts, bytes by
        four, the frame and the bare values are a lower bound.
        """
        return count is estimate_tokens and self.format == "xml" and is_shipped(_TEMPLATES["xml"], self.environment)

    def bare_size(self) -> int:
        """Return the characters of the frame, names and locations of all entries with descriptions."""
        names = sum(len(entry.display_name) for entry in self.entries)
        locations = sum(len(_location(entry, self.locations) or "") for entry in self.entries)
        return len(self.entries) * _frame_size(self.locations != "none") + names + locations

    def described_size(self, level: int, length: int | None, most: int) -> int:
        """Return the characters of the descriptions at *level*, or some number above *most* once they are more."""
        size = 0
        for entry in self.entries:
            size += len(_description(entry, level, length))
            if size > most:
                break
        return size

    def render(self, rows: list[dict[str, object]], *, partial: bool = False) -> str:
        """Return the text of *rows*, which are all there are unless it is *partial*."""
        if self.format == "json":
            if partial:
                counts: dict[str, object] = {"shown": len(rows), "total": len(self.entries)}
                rows = [*rows, counts | ({"more": self.hint} if self.hint else {})]
            return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
        hint = xml_value(self.hint) if self.format == "xml" else self.hint
        values = {"entries": rows, "total": len(self.entries), "partial": partial, "hint": hint, **_ALL_LISTED}
        return render(_TEMPLATES[self.format], self.environment, values)

    def render_listed(self, entries: Sequence[CatalogEntry], lines: Sequence[str], length: int = LISTED_LENGTH) -> str:
        """Return a text of some entries in this order, over *lines* that tell what else there is.

        A skill is shown in the same characters whatever stands beside it.
        """
        rows, total, rest = self.rows(entries, 2, length), len(self.entries), len(self.entries) - len(entries)
        if self.format == "json":
            head: dict[str, object] = {"total": total} | ({"namespaces": list(lines)} if lines else {})
            tail: dict[str, object] = {"not_listed": rest} | ({"more": self.hint} if self.hint else {})
            return json.dumps([head, *rows, tail], ensure_ascii=False, separators=(",", ":"))
        shown = xml_value if self.format == "xml" else str
        values = {"entries": rows, "total": total, "partial": True, "hint": shown(self.hint), "listed": True}
        values |= {"lines": list(map(shown, lines)), "rest": f"{rest:,}" if rest else ""}
        return render(_TEMPLATES[self.format], self.environment, values)

    def _at_level(self, entry: CatalogEntry, level: int, length: int | None) -> CatalogEntry:
        """Leave out what the level leaves out; the number stays."""
        if level == 0:
            return entry
        first = entry.when_to_use[:1] if level == 1 else ()
        entry = replace(entry, when_to_use=first, category=None, tags=(), tools=())
        if level == 2:
            return replace(entry, description=cut(one_line(entry.description), length) if length else "")
        return entry if level == 1 else replace(entry, description="", version=None, digest="")


_ALL_LISTED: Mapping[str, object] = {"lines": (), "rest": "", "listed": False}
_TEMPLATES = {"gallery": "gallery.j2", "xml": "available_skills.xml.j2"}


def render_catalog(
    entries: Sequence[CatalogEntry],
    format: CatalogFormat = "gallery",  # noqa: A002 - the published name of the argument
    *,
    budget: int | None = None,
    count: TokenCounter = estimate_tokens,
    locations: Locations = "logical",
    pinned: Collection[str] = (),
    search_hint: str | None = None,
    names_only: bool = False,
    environment: jinja2.Environment | None = None,
) -> Catalog:
    """Render the listed skills at the first level that fits the budget.

    Args:
        entries: The skills, with the numbers their view gave them.
        format: `gallery` (sorted by full id), `xml` (the published shape, sorted by name, then location) or `json`.
        budget: Most tokens the text may have; None means no bound. Never exceeded, whatever *count* is.
        count: Counts the tokens of a text.
        locations: Which location XML shows: this host's path, the `skill://` URI, or none.
        pinned: Full ids, names or short ids shown first when not all skills fit.
        search_hint: How the model finds what is left out.
        names_only: Whether descriptions are left out though they would fit.
        environment: Templates to use instead of the shipped ones.

    Raises:
        ValueError: *format* or *locations* is none of the above.
    """
    draft = draft_of(entries, format, locations, search_hint, environment)
    total = len(draft.entries)
    room = 4 * budget if budget is not None and draft.estimable(count) else None
    bare = draft.bare_size() if room is not None else 0
    described = ((0, None), (1, None), *((2, length) for length in _SHORT_LENGTHS))
    for level, length in (*(() if names_only else described), (3, None)):
        if level == 1 and format == "xml":
            continue  # XML shows no lists, so without them it is as long as before
        if room is not None and level < 3 and bare + draft.described_size(level, length, room - bare) > room:
            continue  # it cannot fit, which need not be rendered to be known
        text = draft.render(draft.rows(draft.entries, level, length))
        tokens = count(text)
        if budget is None or tokens <= budget:
            return Catalog(text, level, total, total, tokens)
        if not total:
            break
    return _partial(draft, frozenset(pinned), budget or 0, count)


def draft_of(
    entries: Sequence[CatalogEntry],
    format: CatalogFormat,  # noqa: A002 - as `render_catalog` calls it
    locations: Locations,
    search_hint: str | None = None,
    environment: jinja2.Environment | None = None,
) -> CatalogDraft:
    """Return what every rendering of these skills shares; arguments and errors are those of `render_catalog`."""
    if format != "xml" and format not in _FORMS:
        raise ValueError(f"unknown catalog format {format!r}: gallery, xml or json")
    if locations not in {"host", "logical", "none"}:
        raise ValueError(f"unknown locations {locations!r}: host, logical or none")
    order = (lambda e: (e.display_name, e.location)) if format == "xml" else (lambda e: (e.full_id, ""))
    return CatalogDraft(tuple(sorted(entries, key=order)), format, locations, one_line(search_hint or ""), environment)


def _partial(draft: CatalogDraft, pinned: frozenset[str], budget: int, count: TokenCounter) -> Catalog:
    """Show as many names as fit. Only texts that were counted and fit are returned, so no counter can fool it."""
    first = {e.full_id for e in draft.entries if pinned & {e.full_id, e.display_name, e.short_id}}
    order = sorted(draft.entries, key=lambda e: e.full_id not in first)
    total = len(order)
    rows = draft.rows(order, 4, None)  # made once, for every try shows the beginning of the same list
    best: tuple[int, str, int] | None = None
    low, high, tries = 0, total - 1, 0
    middle = min(_FIRST_TRY, high)
    while low <= high and total:
        text = draft.render(rows[:middle], partial=True)
        tokens = count(text)
        if tokens <= budget:
            best, low = (middle, text, tokens), middle + 1
        else:
            high = middle - 1
        tries += 1
        # Rows cost about the same: a guess by what this try took is nearly right. Should guesses lead nowhere, halve.
        guess = middle * budget // tokens if tokens > 0 and tries <= _GUESSES else (low + high) // 2
        middle = min(max(guess, low), high)
    if best is None and draft.hint:
        return _partial(replace(draft, hint=""), pinned, budget, count)
    if best is None:
        return Catalog("", 4, 0, total, 0, (too_small(budget),))
    row_count, text, tokens = best
    return Catalog(text, 4, row_count, total, tokens, listed=tuple(entry.full_id for entry in order[:row_count]))


def too_small(budget: int) -> Diagnostic:
    """Return the finding about a budget that nothing fits."""
    message = f"a budget of {budget} tokens has no room for the frame of a catalog"
    return Diagnostic("budget_too_small", "warning", message, fix="raise the budget")


def _lines(items: Sequence[str]) -> list[str]:
    return [line for line in map(one_line, items) if line]


def _gallery_row(entry: CatalogEntry) -> dict[str, object]:
    labels = "; ".join(filter(None, (one_line(entry.category or ""), ", ".join(_lines(entry.tags)))))
    tools = [(one_line(tool), required) for tool, required in entry.tools]
    version = one_line(entry.version or "")
    if version and not (version[0] in "vV" and version[1:2].isdigit()):
        version = f"v{version}"
    return {
        "short_id": one_line(entry.short_id),
        "full_id": one_line(entry.full_id),
        "version": f" {version}" if version else "",
        "labels": f" ({labels})" if labels else "",
        "description": one_line(entry.description),
        "when_to_use": "; ".join(_lines(entry.when_to_use)),
        "tools": ", ".join(f"{tool} (required)" if required else tool for tool, required in tools if tool),
    }


def _description(entry: CatalogEntry, level: int, length: int | None) -> str:
    """Return what the XML form shows of a description, not yet escaped."""
    if level < 2:
        return entry.description
    return cut(entry.description.strip(), length) if level == 2 and length else ""


def _location(entry: CatalogEntry, locations: Locations) -> str | None:
    return None if locations == "none" else entry.location if locations == "logical" else entry.path or entry.location


@cache
def _frame_size(located: bool) -> int:
    """Return the characters the shipped XML template adds to the values of one skill with a description."""
    row = {"name": "", "description": "", "location": "" if located else None}
    values = {"total": 1, "partial": False, "hint": "", **_ALL_LISTED}
    sizes = [len(render(_TEMPLATES["xml"], None, {"entries": rows, **values})) for rows in ([row], [])]
    return sizes[0] - sizes[1]


def _xml_row(entry: CatalogEntry, description: str, level: int, locations: Locations) -> dict[str, object]:
    location = _location(entry, locations)
    named_only = level >= 3
    return {
        "name": xml_value(entry.display_name),
        "description": None if named_only else xml_value(description),
        "location": None if named_only or location is None else xml_value(location),
    }


def _json_row(entry: CatalogEntry) -> dict[str, object]:
    row: dict[str, object] = {
        "short_id": one_line(entry.short_id),
        "id": one_line(entry.full_id),
        "name": one_line(entry.display_name),
        "version": one_line(entry.version or ""),
        "category": one_line(entry.category or ""),
        "tags": _lines(entry.tags),
        "description": one_line(entry.description),
        "when_to_use": _lines(entry.when_to_use),
        "tools": [{"id": one_line(tool), "required": required} for tool, required in entry.tools],
        "digest": entry.digest,
    }
    return {key: value for key, value in row.items() if value}


_FORMS: Mapping[str, Callable[[CatalogEntry], dict[str, object]]] = {"gallery": _gallery_row, "json": _json_row}
