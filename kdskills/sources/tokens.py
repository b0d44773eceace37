"""The grammar of citation tokens, and where a text is code.

One scanner serves whole texts and texts that arrive in pieces: it says which tokens it found and how far the text is
decided. What is undecided, at most the rest of a line, is given to it again with more text. Every pattern here is
linear: neighbouring repeats are possessive or match different characters, and runs within a token are bounded.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

BLANKS = " \t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
ZERO_WIDTH = "\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"

MAX_ITEMS = 200
MAX_INLINE_CODE = 2000
MAX_FREE_RANGE = 1000
MAX_WRITTEN_OUT = 100_000
"""Most sids the ranges of one text stand for in all: a small text must not grow into a gigabyte."""

_OPEN, _CLOSE = "[\\[\uff3b]", "[\\]\uff3d]"
_DASHES = "\u2010-\u2015\u2212"


_GAP = f"[{BLANKS}{ZERO_WIDTH}]{{0,200}}+"
_JOINT = f"[{ZERO_WIDTH}]{{0,200}}+"
_COLON, _ITEMS = "[:\uff1a]", "[^\\[\\]\uff3b\uff3d\n\r\v\f\x85\u2028\u2029]"
_START = f"(?:[Ss]{_GAP}(?:{_COLON}(?:{_ITEMS}{{0,{MAX_ITEMS}}}|{_ITEMS}{{1,{MAX_ITEMS}}}{_CLOSE}{_JOINT}))?)?"

EVENT = f"`+|{_OPEN}|<"  # where something may begin: code, a token, its HTML spelling
TOKEN = f"{_OPEN}{_JOINT}{_OPEN}{_GAP}[Ss]{_GAP}{_COLON}({_ITEMS}{{1,{MAX_ITEMS}}}){_CLOSE}{_JOINT}{_CLOSE}"
TOKEN_PREFIX = f"{_OPEN}{_JOINT}(?:{_OPEN}{_GAP}{_START})?"  # a token that has not ended yet
TOKEN_TAIL = f"{_OPEN}{_JOINT}(?:{_OPEN}{_GAP})?{_START}"  # likewise, and what looks like one behind a single bracket
SUP = r'<sup[ \t]+class="cite"[ \t]+data-sids="([^"<>\n\r]*)"[^<>\n\r]*>'
SUP_PREFIX = r"<(?:s(?:u(?:p(?:[ \t][^<>\n\r]*)?)?)?)?"
_ITEM = f"([0-9]{{1,9}})(?:[{BLANKS}]*-[{BLANKS}]*([0-9]{{1,9}}))?"
_IGNORABLE = f"[{ZERO_WIDTH}]"
_BLANK = f"[{BLANKS}]"
_FENCE_CLOSE = "[ \t>]*+(`*+|~*+)[ \t]*+"
_PLAIN = {0xFF0C: ","} | {0xFF10 + digit: str(digit) for digit in range(10)}
_PLAIN |= dict.fromkeys((*range(8208, 8214), 8722, 65293), "-")


@cache
def pattern(source: str) -> re.Pattern[str]:
    """Return a pattern, compiled on first use to keep `import kdskills` light."""
    return re.compile(source)


def parse_items(text: str) -> list[tuple[int, int]]:
    """Return the items of a token as ranges (first, last), a single number as (n, n), in order."""
    ranges = []
    for item in pattern(_IGNORABLE).sub("", text).translate(_PLAIN).split(","):
        match = pattern(_ITEM).fullmatch(item.strip())
        if match:
            first = int(match[1])
            last = int(match[2] or first)
            ranges.append((min(first, last), max(first, last)))
    return ranges


@dataclass(frozen=True, slots=True)
class CitationToken:
    """A token in a text: where it stands, and its items as ranges."""

    start: int
    end: int
    items: tuple[tuple[int, int], ...]


class TokenScanner:
    """Finds tokens outside code, in a text given at once or in pieces.

    With *lookahead* a token is undecided until the character after it is known.
    """

    def __init__(self, *, lookahead: bool = False) -> None:
        self._lookahead = lookahead
        self._fence: tuple[str, int] | None = None
        self._mid_line = False  # the beginning of this line was decided before

    def scan(self, text: str, *, final: bool) -> tuple[list[CitationToken], int]:
        """Return the tokens of what was undecided before and new text, and how far it is decided; *final*: nothing follows."""
        tokens: list[CitationToken] = []
        position = 0
        while position < len(text):
            line_break = pattern("[\n\r]").search(text, position)
            end = line_break.start() if line_break else len(text)
            complete = final or end < len(text)
            code = self._is_code(text, position, end, complete=complete)
            if code is None:
                return tokens, position
            decided = end if code else self._inline(text, position, end, tokens, complete=complete)
            if decided > position:
                self._mid_line = True
            if decided < end:
                return tokens, decided
            position = end
            if end < len(text):
                self._mid_line = False
                position += 1
        return tokens, position

    def _is_code(self, text: str, start: int, end: int, *, complete: bool) -> bool | None:
        """Say whether the line is fenced code or a fence, and keep track of fences; None when not yet known."""
        if self._mid_line:
            return self._fence is not None
        if self._fence is not None:
            mark, length = self._fence
            closing = pattern(_FENCE_CLOSE).fullmatch(text, start, end)
            if closing and not complete:
                return None
            if closing and len(closing[1]) >= length and closing[1][0] == mark:
                self._fence = None
            return True
        margin = pattern("[ \t>]*+").match(text, start, end)
        first = margin.end() if margin else start
        if first == end:
            return False if complete else None
        mark = text[first]
        if mark not in "`~":
            return False
        after = first
        while after < end and text[after] == mark:
            after += 1
        if after == end and not complete:
            return None
        if after - first < 3 or (mark == "`" and text.find("`", after, end) >= 0):
            return False
        if mark == "`" and not complete:
            return None
        self._fence = (mark, after - first)
        return True

    def _inline(self, text: str, start: int, end: int, tokens: list[CitationToken], *, complete: bool) -> int:
        """Find the tokens of one line or the rest of one; return how far it is decided."""
        code = _InlineCode(text, end, complete=complete)
        closer = -1
        position = start
        while event := pattern(EVENT).search(text, position, end):
            start_of_event = event.start()
            mark = text[start_of_event]
            if mark == "`":
                after = code.after(start_of_event, event.end())
                if after is None:
                    return start_of_event
                position = after
                continue
            match = pattern(SUP if mark == "<" else TOKEN).match(text, start_of_event, end)
            stop = match.end() if match else -1
            if match and mark == "<":
                if closer < stop:
                    closer = text.find("</sup>", stop, end)
                    closer = end if closer < 0 else closer
                stop = closer + len("</sup>") if closer < end else -1
                if stop < 0 and not complete:
                    return start_of_event
            if match and stop > 0:
                if stop == end and self._lookahead and not complete:
                    return start_of_event
                tokens.append(CitationToken(start_of_event, stop, tuple(parse_items(match[1]))))
                position = stop
                continue
            prefix = pattern(SUP_PREFIX if mark == "<" else TOKEN_PREFIX)
            if not complete and prefix.fullmatch(text, start_of_event, end):
                return start_of_event
            position = start_of_event + 1
        return end


class _InlineCode:
    """Pairs the backtick runs of a line: each closes with the next run of equal length near enough."""

    def __init__(self, text: str, end: int, *, complete: bool) -> None:
        self._text = text
        self._end = end
        self._complete = complete
        self._runs: dict[int, list[int]] | None = None  # length to starts, the last one first
        self._growing: tuple[int, int] | None = None  # start and length of a run that touches the end

    def after(self, start: int, stop: int) -> int | None:
        """Return where the code that the run opens ends, or the run's own end if it opens none; None: not yet known."""
        if self._runs is None:
            self._runs = self._find(start)
        length = stop - start
        starts = self._runs.get(length, [])
        while starts and starts[-1] < stop:
            starts.pop()
        if starts and starts[-1] - stop <= MAX_INLINE_CODE:
            return starts[-1] + length
        if not self._complete:  # it may still close
            until = self._end
            if self._growing is not None and self._growing[1] <= length:
                until = self._growing[0]
            if until - stop <= MAX_INLINE_CODE:
                return None
        return stop

    def _find(self, start: int) -> dict[int, list[int]]:
        runs: dict[int, list[int]] = {}
        for run in pattern("`+").finditer(self._text, start, self._end):
            if run.end() == self._end and not self._complete:
                self._growing = (run.start(), run.end() - run.start())
            else:
                runs.setdefault(run.end() - run.start(), []).append(run.start())
        for starts in runs.values():
            starts.reverse()
        return runs


def find_tokens(text: str) -> list[CitationToken]:
    """Return every token of a whole text, outside code."""
    return TokenScanner().scan(text, final=True)[0]


def held_back(text: str) -> int:
    """Return how many characters at the end of *text* may belong to a token that has not ended yet.

    These are one or two `[` with any beginning of `S`, `:`, items and `]`, and the blanks and zero-width characters
    before it if a zero-width one is among them. A single `[` counts in every such tail, so that the rule is one
    for both.
    """
    ignorable, tail = pattern(_IGNORABLE), pattern(TOKEN_TAIL)
    last = max(text.rfind("["), text.rfind("\uff3b"))
    if last < 0:
        return 0
    before = last
    while before > 0 and ignorable.match(text[before - 1]):
        before -= 1
    start = before - 1 if before > 0 and text[before - 1] in "[\uff3b" else last
    if not tail.fullmatch(text, start):
        start = last
    if not tail.fullmatch(text, start):
        return 0
    margin, invisible = start, False
    while margin > 0 and (is_blank(text[margin - 1]) or ignorable.match(text[margin - 1])):
        margin -= 1
        invisible = invisible or bool(ignorable.match(text[margin]))
    return len(text) - (margin if invisible else start)


class KnownSids:
    """The known sids, with which ranges are intersected so that a huge range costs no more than they do; for one text.

    None for *sids*: any number may be, and a range of over 1,000 of them is ignored.
    """

    def __init__(self, sids: Iterable[int] | None) -> None:
        self._sids = None if sids is None else sorted(set(sids))
        self._left = MAX_WRITTEN_OUT
        self.ignored = False  # whether the last range stood for too many

    def within(self, first: int, last: int) -> Sequence[int]:
        """Return the known sids from *first* to *last*, ascending; none, and `ignored` set, for a range of too many."""
        self.ignored = False
        if self._sids is not None:
            start, stop = bisect_left(self._sids, first), bisect_right(self._sids, last)
        else:
            start, stop = first, last + 1
        if first != last:
            self.ignored = stop - start > (self._left if self._sids is not None else min(self._left, MAX_FREE_RANGE))
            if self.ignored:
                return ()
            self._left -= stop - start
        return range(start, stop) if self._sids is None else self._sids[start:stop]


_CLOSING = frozenset({"Pe", "Pf", "Po"})  # punctuation that closes or separates


class Writer:
    """Collects output and holds its last blank back, because the next token may take it along."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._blank = ""
        self._last = ""  # the last character before the held blank
        self.length = 0  # of all that was written, the held blank not counted

    def write(self, text: str) -> int:
        """Append *text*; return the offset it begins at."""
        if not text:
            return self.length + len(self._blank)
        if self._blank:
            self._append(self._blank)
        begins = self.length
        self._blank = text[-1] if is_blank(text[-1]) else ""
        self._append(text[: len(text) - len(self._blank)])
        return begins

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._last = text[-1]
            self.length += len(text)

    def remove(self, following: str) -> int:
        """Note that a token was removed; return how many of the following characters must be removed with it.

        *following* is the character after the token, or `""` at the end of the text.
        """
        blank_next = is_blank(following)
        closes = following in {"", "\n", "\r"} or unicodedata.category(following) in _CLOSING
        if self._blank and (blank_next or closes):
            self._blank = ""
            return 0
        begins_line = not self._blank and self._last in {"", "\n", "\r"}
        return 1 if blank_next and begins_line else 0

    def take(self, *, everything: bool) -> str:
        """Return what was written since the last call; the held blank only if *everything* is asked for."""
        if everything and self._blank:
            self._append(self._blank)
            self._blank = ""
        text = "".join(self._parts)
        self._parts.clear()
        return text


def is_blank(character: str) -> bool:
    """Say whether a character, or `""`, is a blank within a line."""
    return character == " " or (bool(character) and pattern(_BLANK).match(character) is not None)
