"""From the bytes of a skill file to its frontmatter and body, with plain values quoted where they keep it from parsing."""

from __future__ import annotations

import re
from typing import NamedTuple

from kdskills.skills.findings import FileFindings
from kdskills.skills.model import Verdict
from kdskills.skills.yaml_core import Document, Fields, YamlRefused, load_yaml

_LINE = re.compile(r"(?P<head>(?P<key>[^\s#\-?:,\[\]{}&*!|>'\"%@`][^:#]*+):[ \t]++)(?P<rest>\S.*+)")  # linear
_COMMENT = re.compile(r"[ \t]#")
_DOUBLE = re.compile(r'"(?:[^"\\]|\\.)*"')
_SINGLE = re.compile(r"'(?:[^']|'')*'")
_HINTS = frozenset({"argument-hint", "argument_hint", "description", "compatibility", "license"})
_CLOSERS = {"[": "]", "{": "}"}


class Repair(NamedTuple):
    """One line that was quoted: `line` is 0-based, `key` the field."""

    line: int
    key: str
    before: str
    after: str


def repair_lines(text: str) -> tuple[str, tuple[Repair, ...]]:
    """Return *text* with the top-level one-line values quoted which need it, and what was changed.

    A plain value is quoted if it contains `: `, ends in `:` or begins with `@`, `%` or a backtick; a quoted one if it
    goes on after its closing quote, and a bracketed one if it is no YAML by itself in a field that is text
    (`argument-hint: [file] [options]`). Flow collections, block scalars and comments stay as they are.
    """
    lines = text.split("\n")
    repairs: list[Repair] = []
    waiting = ""  # what closes a quoted or flow value that runs over several lines
    for number, line in enumerate(lines):
        if waiting:
            waiting = "" if waiting in line else waiting
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        key, written = match["key"].rstrip(" \t"), match["rest"].rstrip(" \t")
        value, comment = _without_comment(written)
        waiting = _opens(value)
        following = lines[number + 1] if number + 1 < len(lines) else ""
        goes_on = following[:1] in {" ", "\t"} and bool(following.strip())
        if waiting or goes_on or not _needs_quotes(key, value):
            continue
        lines[number] = f"{match['head']}{single_quoted(value)}{comment}{match['rest'][len(written) :]}"
        repairs.append(Repair(number, key, line, lines[number]))
    return "\n".join(lines), tuple(repairs)


def single_quoted(value: str) -> str:
    """Return *value* as a single-quoted YAML scalar."""
    return "'" + value.replace("'", "''") + "'"


def _without_comment(value: str) -> tuple[str, str]:
    """Return the value and the comment after it; quoted texts may hold a number sign."""
    quoted = _quoted(value)
    start = quoted.end() if quoted else 0
    comment = _COMMENT.search(value, start)
    if comment is None:
        return value, ""
    bare_value = value[: comment.start()].rstrip(" \t")
    return bare_value, value[len(bare_value) :]


def _quoted(value: str) -> re.Match[str] | None:
    if value.startswith('"'):
        return _DOUBLE.match(value)
    return _SINGLE.match(value) if value.startswith("'") else None


def _opens(value: str) -> str:
    """Return what closes *value* when it does not end on its line, else ""."""
    first = value[0]
    if first in "\"'":
        return "" if _quoted(value) else first
    closer = _CLOSERS.get(first)
    return closer if closer is not None and closer not in value else ""


def _needs_quotes(key: str, value: str) -> bool:
    first = value[0]
    if first in "\"'":
        quoted = _quoted(value)
        return quoted is not None and quoted.end() < len(value)
    if first in _CLOSERS:
        try:
            if key in _HINTS:
                load_yaml(f"key: {value}")
        except YamlRefused as refusal:  # the field cannot hold the value, for a slip of syntax
            return refusal.repairable
        return False
    if first in "|>&*!#":
        return False
    return first in "@%`" or value.endswith(":") or ": " in value or ":\t" in value


MAX_SKILL_BYTES = 2 * 1024 * 1024
BOM = "\ufeff"

_FENCE = re.compile(r"^---[^\S\n]*$", re.MULTILINE)
_FENCE_OR_DOTS = re.compile(r"^(?:---|\.\.\.)[^\S\n]*$", re.MULTILINE)
_LEADING_BLANK = re.compile(r"(?:[^\S\n]*\n)+")


class Frontmatter(NamedTuple):
    """Fields as nodes, and the body."""

    fields: Fields
    document: Document
    body: str
    repairs: tuple[Repair, ...] = ()


def _decoded(data: bytes, findings: FileFindings) -> str | None:
    """Return the text of a skill file without BOM and with LF as line ends, or None after an error."""
    if len(data) > MAX_SKILL_BYTES:
        findings.add("too_large", f"The skill file has {len(data):,} bytes, more than {MAX_SKILL_BYTES:,}.")
        return None
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        findings.add("nul_byte", "The file holds a NUL byte.", position=(line, 1))
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        findings.add("not_utf8", f"The file is not UTF-8 from byte {error.start} on.", position=(line, 1))
        return None
    if text.startswith(BOM):
        text = text[1:]
        findings.add("bom", "The file begins with a byte order mark.", position=(1, 1))
        if findings.verdict == "skills-ref":
            findings.add("no_frontmatter", "A byte order mark stands before the opening `---`.", position=(1, 1))
            return None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _split(data: bytes, findings: FileFindings) -> tuple[str, str] | None:
    """Return what stands between the fences of a skill file and what stands behind them, or None after an error."""
    text = _decoded(data, findings)
    if text is None:
        return None
    lenient = findings.verdict == "lenient"
    position = text.find("\n---", 3) if text.startswith("---\n") else -1
    if text.startswith("\n---\n", position) and not (lenient and text.find("\n...", 3, position + 1) >= 0):
        return text[4 : position + 1], text[position + 5 :]  # as nearly all are written
    opening = _FENCE.match(text)
    if opening is None:
        findings.add("no_frontmatter", "The first line is not `---`.", position=(1, 1))
        return None
    start = min(opening.end() + 1, len(text))
    closing = (_FENCE_OR_DOTS if lenient else _FENCE).search(text, start)
    marker = closing or _FENCE_OR_DOTS.search(text, start)  # dots that close nothing are told, too
    if marker is not None and marker[0].startswith("."):
        line = text.count("\n", 0, marker.start()) + 1
        message = "A line `...` stands where `---` should close the frontmatter."
        findings.add("dots_close", message, position=(line, 1))
    if closing is None:
        findings.add("unclosed_frontmatter", "No line `---` closes the frontmatter.", position=(1, 1))
        return None
    return text[start : closing.start()], text[closing.end() + 1 :]


def trim_body(text: str) -> str:
    """Return *text* without leading blank lines and trailing whitespace."""
    text = text.rstrip()
    leading = _LEADING_BLANK.match(text)
    return text[leading.end() :] if leading else text


def read_body(data: bytes, verdict: Verdict = "lenient") -> str:
    """Return the body of a skill file that parsed before under *verdict*; "" when it has no closed frontmatter."""
    parts = _split(data, FileFindings(verdict, ""))
    return trim_body(parts[1]) if parts is not None else ""


def read_frontmatter(data: bytes, findings: FileFindings) -> Frontmatter | None:
    """Return fields and body of a skill file, or None after an error."""
    parts = _split(data, findings)
    loaded = _load(parts[0], findings) if parts is not None else None
    if parts is None or loaded is None:
        return None
    document, repairs = loaded
    if not isinstance(document.root, Fields) or not document.root.items:
        findings.add("not_a_mapping", "The frontmatter is empty or no mapping of fields.", position=(2, 1))
        return None
    twice = [(key, (mark.line + 2, mark.column + 1)) for key, mark in document.duplicates]
    for key, position in twice:
        message = f"The key `{key}` stands twice; the first one counts."
        findings.add("duplicate_key", message, position=position, ref=key)
    if twice and findings.verdict != "lenient":
        findings.add("invalid_yaml", "The frontmatter has a key twice.", position=twice[0][1])
        return None
    return Frontmatter(document.root, document, trim_body(parts[1]), repairs)


def _load(text: str, findings: FileFindings) -> tuple[Document, tuple[Repair, ...]] | None:
    try:
        return load_yaml(text, text_only=findings.verdict == "skills-ref"), ()
    except YamlRefused as refusal:
        failure = refusal
    if findings.verdict == "lenient" and failure.repairable:
        mended, repairs = repair_lines(text)
        if repairs:
            try:
                document = load_yaml(mended)
            except YamlRefused:
                pass  # the first failure says more about what the author wrote
            else:
                keys = ", ".join(f"`{repair.key}`" for repair in repairs)
                message = f"The frontmatter parses only with {keys} quoted."
                findings.add("yaml_repaired", message, position=(repairs[0].line + 2, 1))
                return document, repairs
    position = (failure.position[0] + 2, failure.position[1] + 1) if failure.position else None
    findings.add("invalid_yaml", f"The frontmatter is no YAML a skill may use: {failure.message}.", position=position)
    return None
