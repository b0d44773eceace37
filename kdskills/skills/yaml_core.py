"""YAML 1.2 core values from libyaml's events, with positions and the characters written.

One pass over the events of the C parser makes light nodes. Anchors, aliases, tags, directives and depth are refused
while they come in, so nothing can be expanded. Without libyaml PyYAML's own parser gives the same events.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import yaml

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_DEPTH = 20
MAX_NODES = 2_000
MAX_BYTES = 64 * 1024

_BREAKS = re.compile("[\x85\u2028\u2029]")
_HALVES = re.compile("[\ud800-\udfff]")
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_TYPED_START = frozenset("~nNtTfF-+.0123456789")
_NUMBER_START = frozenset("-+.0123456789")
_MOST_DIGITS = 500  # Python always writes numbers of 640 decimal digits, however it is set up


# Most frontmatters are nothing but lines `key: text`, texts that go on in indented lines, and mappings of such lines.
# Those need no YAML parser: they mean to every YAML 1.2 parser what is written there, at positions that can be
# counted. Everything else, and whatever is in doubt (comments, escapes, indicators, empty values), goes to libyaml.
_QUIET = "\x20-\x22\x24-\x39\x3b-\x7e"
"""Characters of ASCII that mean nothing in the middle of a plain scalar: printable ones without `:` and `#`."""
_BEYOND = "\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff"
_NOT_INSIDE = r"\x80-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff"
_FOLD = re.compile(r"\n +")


class _Lines(NamedTuple):
    """What lines are like: those of the top mapping, and those of a mapping in it."""

    outer: re.Pattern[str]
    inner: re.Pattern[str]


@cache  # classes beyond ASCII cost milliseconds to compile and slow every match; most texts never need them
def _lines(ascii_only: bool) -> _Lines:
    first, beyond = ("", "") if ascii_only else ("\xc0-\u2027", _BEYOND)
    plain = rf"[A-Za-z0-9(/.$+^_{first}](?:[{_QUIET}{beyond}]++|:(?![ \n])|(?<! )#)*+(?<! )"
    inside = r"\x00-\x1f\x7f" + ("" if ascii_only else _NOT_INSIDE)
    quoted = rf"\"[^\"\\{inside}]*+\"|'[^'{inside}]*+'"
    key = "([A-Za-z][A-Za-z0-9_-]{0,63})"
    return _Lines(
        re.compile(rf"{key}:(?: ({plain}(?:\n +{plain})*|{quoted})\n|\n(?=( +)[A-Za-z]))"),
        re.compile(rf"( +){key}: ({plain}|{quoted})\n"),
    )


_VALUE = re.compile(r"( *)(?:- +)*(?:[\w-][\w .-]{0,99}:[ \t]+)?(?=[\"'\[{])")
_UNQUOTED = re.compile(r"(?:[^\"'\n]|(?<=\w)'|\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\n]|'')*+')*+")
"""Values that begin with a quote or bracket, and the part of a line in which each quote is closed."""


class YamlLimits(NamedTuple):
    """Bounds of one YAML text."""

    depth: int = MAX_DEPTH
    nodes: int = MAX_NODES
    size: int = MAX_BYTES


FRONTMATTER_LIMITS = YamlLimits()


class YamlRefused(Exception):  # internal to this room: every caller turns it into a finding
    """A YAML text cannot be used, from a 0-based line and column on; quoting may mend it when it is repairable."""

    def __init__(self, message: str, position: tuple[int, int] | None = None, *, repairable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        self.repairable = repairable


class Scalar:
    """A scalar: `text` is what is written after unquoting and folding; `plain` means without quotes."""

    __slots__ = ("mark", "plain", "text")

    def __init__(self, text: str, plain: bool, mark: Any) -> None:
        self.text = text
        self.plain = plain
        self.mark = mark

    @property
    def value(self) -> Any:
        """The value by the core schema: text, bool, int, float or None."""
        return core_value(self.text) if self.plain else self.text

    @property
    def null(self) -> bool:
        """Whether it is a plain null."""
        return self.plain and self.text in _WORDS and _WORDS[self.text] is None


class Items:
    """A sequence of nodes; `start` and `end` bound its text when it is written in flow style."""

    __slots__ = ("end", "flow", "items", "mark")

    def __init__(self, mark: Any, flow: bool) -> None:
        self.items: list[Node] = []
        self.mark = mark
        self.flow = flow
        self.end = mark.index


class Fields:
    """A mapping of texts to nodes, in the order written; `keys` has the mark of each key."""

    __slots__ = ("end", "flow", "items", "keys", "mark")

    def __init__(self, mark: Any, flow: bool) -> None:
        self.items: dict[str, Node] = {}
        self.keys: dict[str, Any] = {}
        self.mark = mark
        self.flow = flow
        self.end = mark.index


Node = Scalar | Items | Fields


class Document:
    """A YAML text as nodes: the top one (None for an empty text), the text, and keys that stand twice in one mapping.

    Of those the first one is kept; `duplicates` has them with their marks.
    """

    __slots__ = ("duplicates", "root", "text")

    def __init__(self, root: Node | None, text: str, duplicates: list[tuple[str, Any]]) -> None:
        self.root = root
        self.text = text
        self.duplicates = duplicates

    def source(self, node: Items | Fields) -> str:
        """Return how a flow collection is written."""
        return self.text[node.mark.index : node.end]


def core_value(text: str) -> Any:
    """Return the value of a plain scalar by the YAML 1.2 core schema.

    Numbers that JSON or Python cannot hold (infinite, or of over 500 digits) stay text.
    """
    if text and text[0] not in _TYPED_START:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_START:
        return text
    if _INT.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            return text
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return text if number in (float("inf"), float("-inf")) else number
    return text


def to_python(node: Node | None, *, text_only: bool = False) -> Any:
    """Return plain JSON-able values of *node*; with *text_only* every scalar is text."""
    if node is None:
        return None
    if node.__class__ is Scalar:
        return node.text if text_only or not node.plain else core_value(node.text)
    if node.__class__ is Items:
        return [to_python(item, text_only=text_only) for item in node.items]
    assert isinstance(node, Fields)
    fields: dict[str, Any] = {}
    for key, item in node.items.items():  # scalars here, without a call each: this is most of a frontmatter
        if item.__class__ is Scalar:
            fields[key] = item.text if text_only or not item.plain else core_value(item.text)
        else:
            fields[key] = to_python(item, text_only=text_only)
    return fields


def load_yaml(text: str, limits: YamlLimits = FRONTMATTER_LIMITS, *, text_only: bool = False) -> Document:
    """Return one YAML document, with LF as line ends, as nodes; text-only YAML has no flow collections.

    Raises YamlRefused: a slip of syntax, a bound exceeded, or an anchor, alias, tag, directive or non-scalar key.
    """
    if len(text) > limits.size or (not text.isascii() and len(text.encode("utf-8")) > limits.size):
        raise YamlRefused(f"there are more than {limits.size} bytes of YAML")
    document = _LineReader(text).read(limits)
    if document is not None:
        return document
    # libyaml still breaks lines at U+0085, U+2028 and U+2029, which YAML 1.2 calls plain characters. Where they occur they
    # travel as private-use characters the text does not hold.
    back: dict[int, str] = {}
    shielded = text
    if not text.isascii() and _BREAKS.search(text):
        free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
        marks = {ord(character): next(free, character) for character in "\x85\u2028\u2029"}
        shielded, back = text.translate(marks), {ord(stand_in): chr(code) for code, stand_in in marks.items()}
    try:
        builder = _Builder(LOADER(shielded), limits, text_only)
        document = Document(builder.run(text), text, builder.duplicates)
    except yaml.MarkedYAMLError as error:
        opened = _open_quote(text)
        if opened is not None:
            raise YamlRefused("a quote that opens there is not closed", opened, repairable=True) from error
        mark = error.problem_mark
        position = (mark.line, mark.column) if mark is not None else None
        raise YamlRefused(
            str(error.problem or error.context or "it cannot be read"), position, repairable=True
        ) from error
    except yaml.reader.ReaderError as error:
        at = error.position
        known = 0 <= at <= len(text)
        position = (text.count("\n", 0, at), at - text.rfind("\n", 0, at) - 1) if known else None
        raise YamlRefused("a character there may not stand in YAML", position) from error
    except yaml.YAMLError as error:  # pragma: no cover - PyYAML raises nothing else today
        raise YamlRefused(str(error)) from error
    except (ValueError, OverflowError) as error:  # PyYAML's own parser, from "\Uffffffff"
        raise YamlRefused("an escape there is no character", repairable=True) from error
    if LOADER is yaml.SafeLoader:
        _refuse_halves(document.root)
    if back:
        _unshield(document.root, back)
        document.duplicates = [(key.translate(back), mark) for key, mark in document.duplicates]
    return document


def _open_quote(text: str) -> tuple[int, int] | None:
    """Return where a quote opens that does not close on its line, though the text does not go on further in; None without one."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        match = _VALUE.match(line)
        opened = None if match is None else _UNQUOTED.match(line, match.end())
        if match is None or opened is None or opened.end() == len(line):
            continue
        following = next((later for later in lines[number + 1 :] if later.strip()), "")
        if len(following) - len(following.lstrip(" ")) <= len(match[1]):
            return number, opened.end()
    return None


class _Mark:
    """A position in a text, as libyaml tells it: all from 0."""

    __slots__ = ("column", "index", "line")

    def __init__(self, line: int, column: int, index: int) -> None:
        self.line = line
        self.column = column
        self.index = index


class _LineReader:
    """Reads lines of keys and texts; `read` gives None for everything else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = _lines(text.isascii())
        self._count = 0
        self.duplicates: list[tuple[str, Any]] = []

    def read(self, limits: YamlLimits) -> Document | None:
        """Return the text as nodes; None sends it to libyaml, also when a bound may be exceeded."""
        text, size = self._text, len(self._text)
        root = Fields(_Mark(0, 0, 0), flow=False)
        match = self._lines.outer.match
        position = number = 0
        while position < size:
            line = match(text, position)
            if line is None:
                return None
            key, value, indentation = line.groups()
            mark = _Mark(number, 0, position)
            node: Scalar | Fields | None
            if value is not None:
                start = line.start(2)
                node = _scalar(value, number, start - position, start)
                number += 1 + value.count("\n")
                position = line.end()
            else:
                node = self._inner(line.end(), number + 1, indentation)
                if node is None:
                    return None
                number += 1 + len(node.items)
                position = node.end
            self._count += 1
            key = sys.intern(key)
            if key in root.items:
                self.duplicates.append((key, mark))
            else:
                root.items[key] = node
                root.keys[key] = mark
        if not 0 < 2 * self._count < limits.nodes or limits.depth < 2:
            return None
        root.end = size
        return Document(root, text, self.duplicates)

    def _inner(self, position: int, number: int, indentation: str) -> Fields | None:
        """Return the mapping whose lines begin at *position*; None when a line is another kind or a key stands twice."""
        text, width = self._text, len(indentation)
        inner = Fields(_Mark(number, width, position + width), flow=False)
        match = self._lines.inner.match
        while text.startswith(" ", position):
            line = match(text, position)
            if line is None or line.group(1) != indentation or line.group(2) in inner.items:
                return None
            key = sys.intern(line.group(2))
            inner.keys[key] = _Mark(number, width, position + width)
            inner.items[key] = _scalar(line.group(3), number, line.start(3) - position, line.start(3))
            position = line.end()
            number += 1
        self._count += len(inner.items)
        inner.end = position
        return inner


def _scalar(value: str, line: int, column: int, index: int) -> Scalar:
    mark = _Mark(line, column, index)
    if value[0] in "\"'":
        return Scalar(value[1:-1], plain=False, mark=mark)
    return Scalar(_FOLD.sub(" ", value) if "\n" in value else value, plain=True, mark=mark)


class _Builder:
    """Makes nodes of events."""

    def __init__(self, loader: Any, limits: YamlLimits, text_only: bool) -> None:
        self._next = loader.get_event
        self._limits = limits
        self._text_only = text_only
        self.duplicates: list[tuple[str, Any]] = []

    def run(self, text: str) -> Node | None:
        """Return the top node of the only document, or None."""
        self._next()  # the start of the stream
        event = self._next()
        if event.__class__ is yaml.StreamEndEvent:
            return None
        if event.explicit and (event.version or event.tags or _DIRECTIVE.search(text)):
            raise YamlRefused("directives are not allowed", (event.start_mark.line, event.start_mark.column))
        root = self._nodes()
        self._next()  # the end of the document
        event = self._next()
        if event.__class__ is not yaml.StreamEndEvent:
            raise YamlRefused("there is more than one document", (event.start_mark.line, event.start_mark.column))
        return root

    def _nodes(self) -> Node:
        """Return the node that begins at the next event, with everything in it."""
        stack: list[tuple[Items | Fields, Scalar | None]] = []
        holder: Items | Fields | None = None
        key: Scalar | None = None
        count = 0
        follow, most = self._next, self._limits.nodes
        while True:
            event = follow()
            kind = event.__class__
            node: Node
            if kind is yaml.ScalarEvent:
                if event.anchor is not None or event.tag is not None:
                    self._refuse_properties(event)
                count += 1
                if count > most:
                    raise YamlRefused(f"there are more than {most} values")
                node = Scalar(event.value, event.implicit[0], event.start_mark)
                if holder is None:
                    return node
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                assert holder is not None
                holder.end = event.end_mark.index
                node = holder
                holder, key = stack.pop() if stack else (None, None)
                if holder is None:
                    return node
            else:
                count += 1
                if count > most:
                    raise YamlRefused(f"there are more than {most} values")
                opened = self._open(event, kind, len(stack), holder, key)
                if holder is not None:
                    stack.append((holder, key))
                holder, key = opened, None
                continue
            if holder.__class__ is Items:
                holder.items.append(node)
            elif key is None:
                assert isinstance(node, Scalar)  # a collection as a key is refused when it opens
                key = node
            else:
                assert isinstance(holder, Fields)
                text = sys.intern(key.text)  # thousands of skills share their keys
                if text in holder.items:
                    self.duplicates.append((text, key.mark))
                else:
                    holder.items[text], holder.keys[text] = node, key.mark
                key = None

    def _open(
        self, event: Any, kind: Any, depth: int, holder: Items | Fields | None, key: Scalar | None
    ) -> Items | Fields:
        position = (event.start_mark.line, event.start_mark.column)
        if kind is yaml.AliasEvent:
            raise YamlRefused(f"aliases (`*{event.anchor}`) are not allowed", position)
        if event.anchor is not None or event.tag is not None:
            self._refuse_properties(event)
        if holder.__class__ is Fields and key is None:
            raise YamlRefused("a key is no text", position)
        if depth + (holder is not None) >= self._limits.depth:
            raise YamlRefused(f"values are nested deeper than {self._limits.depth}", position)
        if self._text_only and event.flow_style:
            raise YamlRefused("flow collections are not allowed in text-only YAML", position)
        return (Fields if kind is yaml.MappingStartEvent else Items)(event.start_mark, event.flow_style)

    @staticmethod
    def _refuse_properties(event: Any) -> None:
        properties = f"anchors (`&{event.anchor}`)" if event.anchor is not None else f"tags (`{event.tag}`)"
        raise YamlRefused(f"{properties} are not allowed", (event.start_mark.line, event.start_mark.column))


def _nodes(node: Node | None) -> Iterator[Node]:
    """Yield *node* and every node in it, those above first."""
    if node is not None:
        yield node
    if isinstance(node, Items | Fields):
        for item in node.items if isinstance(node, Items) else node.items.values():
            yield from _nodes(item)


def _refuse_halves(root: Node | None) -> None:
    r"""Refuse halves of characters (`"\ud800"`), which libyaml refuses by itself."""
    for node in _nodes(root):
        texts = [(node.text, node.mark)] if isinstance(node, Scalar) else []
        for text, mark in node.keys.items() if isinstance(node, Fields) else texts:
            if _HALVES.search(text):
                raise YamlRefused("an escape there is no character", (mark.line, mark.column), repairable=True)


def _unshield(root: Node | None, back: dict[int, str]) -> None:
    """Put the characters back for which others stood."""
    for node in _nodes(root):
        if isinstance(node, Scalar):
            node.text = node.text.translate(back)
        elif isinstance(node, Fields):
            node.items = {key.translate(back): item for key, item in node.items.items()}
            node.keys = {key.translate(back): mark for key, mark in node.keys.items()}
