"""Citations rendered in a whole text, or while it is still being written."""

from __future__ import annotations

from kdskills.sources.render import Renderer, RenderMode, RenderOptions, Sources
from kdskills.sources.tokens import CitationToken, TokenScanner, held_back
from kdskills.sources.writer import Writer

_EAGER = 4096


def render_citations(
    text: str,
    sources: Sources,
    *,
    mode: RenderMode = "links",
    keep_unresolved: bool = True,
    first_only: bool = False,
    embed_images: bool = False,
    mark_unknown: bool = False,
) -> str:
    """Show the citations of a text as a reader wants them.

    Args:
        text: The text; its code stays as it is.
        sources: A pool, or `{sid: row}`.
        mode: `links`, `superscript`, `html` or `footnotes`.
        keep_unresolved: Leave tokens in place of which nothing can be shown; else they go, with one blank.
        first_only: Show only the first sid of a token that resolves.
        embed_images: Show sources that are images as images, in the Markdown modes `links` and `superscript`.
        mark_unknown: Show a single number without a source as `[?7]`.

    Raises:
        ValueError: *mode* is none of the above.
        TypeError: A row of *sources* is not a mapping.
    """
    stream = CitationStream(
        sources,
        mode=mode,
        keep_unresolved=keep_unresolved,
        first_only=first_only,
        embed_images=embed_images,
        mark_unknown=mark_unknown,
    )
    return stream.feed(text) + stream.flush()


class CitationStream:
    """Renders citations of a text that arrives in pieces.

    However the text is cut, the joined outputs of `feed` and `flush` equal `render_citations` of the whole.

    The arguments are those of `render_citations`.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        mode: RenderMode = "links",
        keep_unresolved: bool = True,
        first_only: bool = False,
        embed_images: bool = False,
        mark_unknown: bool = False,
    ) -> None:
        options = RenderOptions(mode, keep_unresolved, first_only, embed_images, mark_unknown)
        self._begin(sources, options)

    def _begin(self, sources: Sources, options: RenderOptions) -> None:
        self._sources = sources
        self._options = options
        self._renderer = Renderer(sources, options)
        self._scanner = TokenScanner(lookahead=not options.keep_unresolved)
        self._writer = Writer()
        self._skip = False  # the next character goes with a removed token
        self._pieces: list[str] = []
        self._held = 0
        self._worth = 0  # scanning again pays off once this much is held
        self._tail = ""  # the last characters given back, for the blank line before footnotes

    def feed(self, chunk: str) -> str:
        """Take the next piece of the text; return what can be shown for certain."""
        self._pieces.append(chunk)
        self._held += len(chunk)
        # A long undecided line is not scanned anew for each small piece: the work stays linear.
        if self._held < self._worth and "\n" not in chunk and "\r" not in chunk:
            return ""
        return self._advance(final=False)

    def flush(self) -> str:
        """Return what is still held, and end the text; the stream may then be fed another one."""
        text = self._advance(final=True)
        notes = self._renderer.notes()
        if notes:
            blank_line = "\n" * (2 - len(self._tail) + len(self._tail.rstrip("\n")))
            text += blank_line + notes
        self._begin(self._sources, self._options)
        return text

    @staticmethod
    def split(text: str) -> tuple[str, int]:
        """Return *text* without a tail that may belong to a token, and the length of that tail.

        The tail is one or two `[` with any beginning of `S`, `:`, items and `]`, such as `[S` or `[[S:4`, and the blanks
        and zero-width characters before it if a zero-width one is among them.
        """
        tail = held_back(text)
        return text[: len(text) - tail], tail

    def _advance(self, *, final: bool) -> str:
        text = "".join(self._pieces)
        tokens, decided = self._scanner.scan(text, final=final)
        position = 0
        for token in tokens:
            self._copy(text[position : token.start])
            position = token.end
            self._show(token, text)
        self._copy(text[position:decided])
        undecided = text[decided:]
        self._pieces = [undecided] if undecided else []
        self._held = len(undecided)
        self._worth = self._held + self._held // 2 if self._held > _EAGER else 0
        output = self._writer.take(everything=final or self._options.keep_unresolved)
        self._tail = (self._tail + output)[-2:]
        return output

    def _copy(self, text: str) -> None:
        if self._skip and text:
            text, self._skip = text[1:], False
        self._writer.write(text)

    def _show(self, token: CitationToken, text: str) -> None:
        rendered = self._renderer.show(token)
        if rendered is None and not self._options.keep_unresolved:
            self._skip = bool(self._writer.remove(text[token.end : token.end + 1]))
        else:
            self._writer.write(text[token.start : token.end] if rendered is None else rendered)
