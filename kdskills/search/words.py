"""Words of texts and questions: split, folded and stemmed, the same for skills and for what is asked of them.

A run of letters, digits and marks is split where case or digits begin (`cudaStream2`); Chinese, Japanese, Korean, Thai and
Khmer runs are split into pairs of characters. Language is never guessed beyond the script.
"""

from __future__ import annotations

import re
import threading
import unicodedata
import zlib
from functools import cache
from operator import itemgetter
from typing import ClassVar, Final

import Stemmer

MAX_WORD: Final = 64
"""Characters of a word that count."""

STOP_WORDS: Final = frozenset(
    """
    a about all also am an and any are as at be been being but by can could did do does don done each for from had has
    have he her here his how i if in into is it its just may me might more most must my no not now of on only or other
    our own s same shall she should so some such t than that the their them then there these they this to too up us very
    was we were what when where which while who why will with would you your
    """.split()  # noqa: SIM905 - a page of words reads better than a list of strings
)
"""Words of grammar, which say nothing of what a skill is for. More words (please, need, want, help, use) changed no figure."""

_SCRIPTS: Final = (
    (0x0370, 0x03FF, "greek"),
    (0x0400, 0x052F, "russian"),
    (0x0530, 0x058F, "armenian"),
    (0x0600, 0x06FF, "arabic"),
    (0x0900, 0x097F, "hindi"),
    (0x0B80, 0x0BFF, "tamil"),
)
"""First and last code point of a script, and its stemmer; every other script has the English one, which knows no such word."""

# Marks belong to their word: `\w` leaves out vowel signs of Hindi or Tamil, and accents that NFKC cannot join.
_RUN = re.compile(
    r"[^\W_\u0300-\u036f]"
    r"(?:[^\W_]|[\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0eff\u1000-\u1049\u1780-\u17d3])*"
)
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]+"
)
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PLURAL = re.compile(r"([A-Z]{2,})s(?![a-z])")
_GROUP = itemgetter(1)  # a pattern is substituted by a function several times faster than by a text with a reference
_ASCII: Final = bytes(range(128))
_SEPARATORS: Final = bytes(code if code < 128 and chr(code).isalnum() else 32 for code in range(256))
_MOST_WORDS: Final = 150_000
"""Runs and stems that a lexicon takes before another one is begun."""


def runs(text: str) -> list[bytes]:
    """Return the runs of letters, digits and marks of *text*, in order, in UTF-8; compatibility forms are unified (NFKC)."""
    # Most texts are ASCII but for dashes and quotes: bytes are split several times faster than characters are classified.
    data = text.encode("utf-8", "surrogatepass")
    if data.isascii():
        return data.translate(_SEPARATORS).split()
    foreign = set(data.translate(None, _ASCII).decode("utf-8", "surrogatepass"))
    if any(map(str.isalnum, foreign)):
        unified = unicodedata.normalize("NFKC", text)[: 2 * len(text)]  # one character may become eighteen
        return [run.encode() for run in _RUN.findall(unified)]
    return data.translate(_SEPARATORS).split()


def _parts(run: str) -> list[str]:
    if run.isascii():
        return _PART.findall(_PLURAL.sub(_GROUP, run) if "s" in run else run)
    parts: list[str] = []
    start = 0
    for match in _UNSPACED.finditer(run):
        parts += _parts_of_letters(run[start : match.start()])
        parts += [match[0][at : at + 2] for at in range(max(1, len(match[0]) - 1))]
        start = match.end()
    return parts + _parts_of_letters(run[start:])


def _parts_of_letters(run: str) -> list[str]:
    """Split a run of a script that puts blanks between words where case or digits begin."""
    starts = [
        at
        for at in range(1, len(run))
        if run[at - 1].isdigit() != run[at].isdigit() or (run[at - 1].islower() and run[at].isupper())
    ]
    return [run[start:end] for start, end in zip([0, *starts], [*starts, len(run)], strict=True) if start < end]


@cache
def _stemmer(language: str) -> Stemmer.Stemmer:
    return Stemmer.Stemmer(language, 0)  # its cache costs more than it saves here, where each word is asked once


_english: Final = _stemmer("english").stemWord

_STEMMING = threading.Lock()
"""A stemmer serves one thread at a time."""


def _stem(part: str) -> str:
    word = part.casefold()[:MAX_WORD]
    stem: str = _english(word) if word.isascii() else _stemmer(_language(ord(word[0]))).stemWord(word)
    return stem


def _language(code: int) -> str:
    return next((name for first, last, name in _SCRIPTS if first <= code <= last), "english")


_STOP_STEMS: Final = STOP_WORDS | {"ani", "doe", "onli", "veri", "whi"}
"""Words of grammar as they are stemmed."""


def sign_of(stem: str) -> str:
    """Return the character that stands for a stem, the same on every machine; two stems share one in 55,040 cases."""
    return chr(0x100 + zlib.crc32(stem.encode("utf-8", "surrogatepass")) % (0xD800 - 0x100))


class Word(str):
    """What a run says: as text the signs of its stems, so that joined words are a line of signs.

    Stems may share a sign, so a word equals itself alone; a lexicon has one for each stem.

    Attributes:
        stem: Its stem; "" where it has none or several.
        parts: Where it has several, a word for each.
    """

    __slots__ = ("parts", "stem")
    stem: str
    parts: tuple[Word, ...]
    __hash__ = object.__hash__  # several times quicker than any of our own
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    @property
    def stems(self) -> tuple[str, ...]:
        """All its stems, in order."""
        return (self.stem,) if self.stem else tuple([part.stem for part in self.parts])


class _StemWords(dict[str, Word]):
    """The word of each stem."""

    def __missing__(self, stem: str) -> Word:
        word = self[stem] = _word(sign_of(stem), stem, ())
        return word


class Lexicon(dict[bytes, Word]):
    """The word of each run, without words of grammar, worked out once. Safe from any thread.

    It forgets nothing: words are compared within one lexicon.
    """

    _latest: ClassVar[Lexicon]

    def __init__(self) -> None:
        super().__init__()
        self._of_stems = _StemWords()
        self._silent = _word("", "", ())

    @classmethod
    def latest(cls) -> Lexicon:
        """Return the one that others use, too, or a new one where that is full."""
        if cls._latest.full:
            cls._latest = cls()
        return cls._latest

    @property
    def full(self) -> bool:
        """Whether another one should be begun."""
        return len(self) + len(self._of_stems) >= _MOST_WORDS

    def words(self, text: str) -> list[Word]:
        """Return the words of *text* in order; those of grammar say nothing."""
        return list(map(self.__getitem__, runs(text)))

    def __missing__(self, run: bytes) -> Word:
        with _STEMMING:
            # Most runs are one part, of ASCII.
            if (run.isalpha() and (run.islower() or run.istitle() or run.isupper())) or run.isdigit():
                word = self._of_stems[_english(run[:MAX_WORD].lower().decode())]
                if word.stem in _STOP_STEMS:
                    word = self._silent
            else:
                word = self._of_parts(_parts(run.decode()))
            if len(run) <= MAX_WORD:
                self[run] = word
        return word

    def _of_parts(self, parts: list[str]) -> Word:
        stems = list(map(_stem, parts))
        if not _STOP_STEMS.isdisjoint(stems):
            # The one letter of a part stays: the s of S3 is no word of grammar.
            alone = len(stems) == 1
            stems = [stem for stem in stems if stem not in _STOP_STEMS or (len(stem) == 1 and not alone)]
        words = tuple(map(self._of_stems.__getitem__, stems))
        return words[0] if len(words) == 1 else _word("".join(words), "", words)


def _word(signs: str, stem: str, parts: tuple[Word, ...]) -> Word:
    word = Word(signs)
    word.stem, word.parts = stem, parts
    return word


Lexicon._latest = Lexicon()  # noqa: SLF001
