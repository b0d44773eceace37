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
from kdskills.sources.tokens import CitationToken, KnownSids
from kdskills.sources.urls import usable_url

RenderMode = Literal["links", "superscript", "html", "footnotes"]
MODES = ("links", "superscript", "html", "footnotes")

Sources = SourcesPool | Mapping[int, Mapping[str, Any]]
"""A pool, or `{sid: row}` with rows as `sources.yaml` writes them."""

_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".avif", ".bmp")
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class _ShownSource:
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
        self._shown: dict[int, _ShownSource | None] = {}
        self._notes: dict[int, int] = {}
        rows: Mapping[int, Any] = {} if isinstance(sources, SourcesPool) else {int(s): sources[s] for s in sources}
        self._rows = rows
        sids = [*sources.rows, *sources.aliases] if isinstance(sources, SourcesPool) else [*rows]
        self._known = KnownSids(sids)

    def show(self, token: CitationToken) -> str | None:
        """Return what stands in the place of a token, or None if none of its sids resolves."""
        cited: dict[int, _ShownSource | int] = {}
        for first, last in token.items:
            sids = self._known.within(first, last)
            if first == last and not sids and self._options.mark_unknown:
                cited[-first] = first
            for sid in sids:
                source = self._get(sid)
                cited.setdefault(source.sid, source)
                if self._options.first_only:
                    return self._join([source])
        return self._join(list(cited.values())) if cited else None

    def notes(self) -> str:
        """Return the list of footnotes used so far, or `""`."""
        lines = []
        for sid, number in self._notes.items():
            source = self._get(sid)
            lines.append(f"[{number}] {_title(source.title)}" + (f" - {source.url}" if source.url else ""))
        return "\n".join(["Sources:", *lines]) if lines else ""

    def _get(self, sid: int) -> _ShownSource:
        source = self._shown.get(sid)
        if source is None:
            source = self._shown[sid] = self._read(sid)
        return source

    def _read(self, sid: int) -> _ShownSource:
        row: Mapping[str, Any] | None = self._rows.get(sid)
        if isinstance(self._sources, SourcesPool):
            sid = self._sources.aliases.get(sid, sid)
            row = self._sources.get(sid)
        if not isinstance(row, Mapping):
            raise TypeError(f"source {sid} is not a mapping")
        url = first_text(row, "url")
        title = first_text(row, "title") or url or first_text(row, "physical_path") or f"Source {sid}"
        return _ShownSource(sid, title.strip(), usable_url(url))

    def _join(self, cited: list[_ShownSource | int]) -> str:
        mode = self._options.mode
        if mode == "html":
            return self._html(cited)
        glue = {"links": " ", "superscript": ",", "footnotes": ""}[mode]
        text, block = "", True
        for source in cited:
            if not isinstance(source, int) and self._options.embed_images and source.is_image and mode != "footnotes":
                text += f"\n\n![{_title(source.title)}]({source.url})\n*Source {source.sid}: {_title(source.title)}*\n"
                block = True
                continue
            text += ("" if block else glue) + self._source_text(source)
            block = False
        return text

    def _source_text(self, source: _ShownSource | int) -> str:
        if isinstance(source, int):
            return f"[?{source}]"
        if self._options.mode == "footnotes":
            return f"[{self._notes.setdefault(source.sid, len(self._notes) + 1)}]"
        title = _title(source.title)
        if self._options.mode == "links":
            return f"[{title}]({source.url})" if source.url else title
        number = str(source.sid).translate(_SUPERSCRIPT)
        return f'[{number}]({source.url} "{_quoted(title)}")' if source.url else number

    def _html(self, cited: list[_ShownSource | int]) -> str:
        rows = [source for source in cited if not isinstance(source, int)]
        links = []
        for source in cited:
            if isinstance(source, int):
                links.append(f"[?{source}]")
            elif source.url:
                link = f'<a href="{html.escape(source.url)}" target="_blank" rel="noopener noreferrer">'
                links.append(f"{link}[S:{source.sid}]</a>")
            else:
                links.append(f"[S:{source.sid}]")
        sids = ",".join(str(source.sid) for source in rows)
        return f'<sup class="cite" data-sids="{sids}">{" ".join(links)}</sup>'


@cache
def _line_breaks() -> re.Pattern[str]:
    return re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def _title(text: str) -> str:
    """Escape a title for Markdown: it can neither end its brackets nor its line nor its table cell."""
    return re.sub(r"([\\\[\]|])", r"\\\1", _line_breaks().sub(" ", text))


def _quoted(title: str) -> str:
    return title.replace('"', '\\"')
