"""One citation as a reader sees it: links, superscripts, HTML or footnotes."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from urllib.parse import urlsplit

from kdskills.sources.pool import SourcesPool
from kdskills.sources.rows import first_text
from kdskills.sources.tokens import Known, Token
from kdskills.sources.urls import usable_url

RenderMode = Literal["links", "superscript", "html", "footnotes"]
MODES = ("links", "superscript", "html", "footnotes")

Sources = SourcesPool | Mapping[int, Mapping[str, Any]]
"""A pool, or `{sid: row}` with rows as `sources.yaml` writes them."""

_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".avif", ".bmp")
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A source as it is shown: `url` only if it may become a link."""

    sid: int
    title: str
    url: str | None

    @property
    def is_image(self) -> bool:
        return bool(self.url) and urlsplit(self.url or "").path.lower().endswith(_IMAGES)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How citations are shown; the keywords of `render_citations`."""

    mode: RenderMode = "links"
    keep_unresolved: bool = True
    first_only: bool = False
    embed_images: bool = False
    mark_unknown: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}: {', '.join(MODES)}")


class Renderer:
    """Shows the tokens of one text; footnotes are numbered as they come."""

    def __init__(self, sources: Sources, options: RenderOptions) -> None:
        self._sources = sources
        self._options = options
        self._shown: dict[int, _Shown | None] = {}
        self._notes: dict[int, int] = {}
        rows: Mapping[int, Any] = {} if isinstance(sources, SourcesPool) else {int(s): sources[s] for s in sources}
        self._rows = rows
        known = [*sources.rows, *sources.aliases] if isinstance(sources, SourcesPool) else [*rows]
        self._known = Known(known)

    def show(self, token: Token) -> str | None:
        """Return what stands in the place of a token, or None if none of its sids resolves."""
        found: dict[int, _Shown | int] = {}
        for first, last in token.items:
            known = self._known.within(first, last)
            if first == last and not known and self._options.mark_unknown:
                found[-first] = first
            for sid in known:
                shown = self._get(sid)
                found.setdefault(shown.sid, shown)
                if self._options.first_only:
                    return self._join([shown])
        return self._join(list(found.values())) if found else None

    def notes(self) -> str:
        """Return the list of footnotes used so far, or `""`."""
        lines = []
        for sid, number in self._notes.items():
            shown = self._get(sid)
            lines.append(f"[{number}] {_title(shown.title)}" + (f" - {shown.url}" if shown.url else ""))
        return "\n".join(["Sources:", *lines]) if lines else ""

    def _get(self, sid: int) -> _Shown:
        shown = self._shown.get(sid)
        if shown is None:
            shown = self._shown[sid] = self._read(sid)
        return shown

    def _read(self, sid: int) -> _Shown:
        row: Mapping[str, Any] | None = self._rows.get(sid)
        if isinstance(self._sources, SourcesPool):
            sid = self._sources.aliases.get(sid, sid)
            row = self._sources.get(sid)
        if not isinstance(row, Mapping):
            raise TypeError(f"source {sid} is not a mapping")
        url = first_text(row, "url")
        title = first_text(row, "title") or url or first_text(row, "physical_path") or f"Source {sid}"
        return _Shown(sid, title.strip(), usable_url(url))

    def _join(self, found: list[_Shown | int]) -> str:
        mode = self._options.mode
        if mode == "html":
            return self._html(found)
        glue = {"links": " ", "superscript": ",", "footnotes": ""}[mode]
        text, block = "", True
        for shown in found:
            if not isinstance(shown, int) and self._options.embed_images and shown.is_image and mode != "footnotes":
                text += f"\n\n![{_title(shown.title)}]({shown.url})\n*Source {shown.sid}: {_title(shown.title)}*\n"
                block = True
                continue
            text += ("" if block else glue) + self._one(shown)
            block = False
        return text

    def _one(self, shown: _Shown | int) -> str:
        if isinstance(shown, int):
            return f"[?{shown}]"
        if self._options.mode == "footnotes":
            return f"[{self._notes.setdefault(shown.sid, len(self._notes) + 1)}]"
        title = _title(shown.title)
        if self._options.mode == "links":
            return f"[{title}]({shown.url})" if shown.url else title
        number = str(shown.sid).translate(_SUPERSCRIPT)
        return f'[{number}]({shown.url} "{_quoted(title)}")' if shown.url else number

    def _html(self, found: list[_Shown | int]) -> str:
        rows = [shown for shown in found if not isinstance(shown, int)]
        shown_as = []
        for shown in found:
            if isinstance(shown, int):
                shown_as.append(f"[?{shown}]")
            elif shown.url:
                link = f'<a href="{html.escape(shown.url)}" target="_blank" rel="noopener noreferrer">'
                shown_as.append(f"{link}[S:{shown.sid}]</a>")
            else:
                shown_as.append(f"[S:{shown.sid}]")
        sids = ",".join(str(shown.sid) for shown in rows)
        return f'<sup class="cite" data-sids="{sids}">{" ".join(shown_as)}</sup>'


@cache
def _line_breaks() -> re.Pattern[str]:
    return re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def _title(text: str) -> str:
    """Escape a title for Markdown: it can neither end its brackets nor its line nor its table cell."""
    return re.sub(r"([\\\[\]|])", r"\\\1", _line_breaks().sub(" ", text))


def _quoted(title: str) -> str:
    return title.replace('"', '\\"')
