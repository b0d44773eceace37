"""From the bytes of a skill file to its frontmatter and body."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from kdskills.skills.findings import Findings
from kdskills.skills.model import Verdict
from kdskills.skills.yaml_core import Document, Fields, YamlRefused, load_yaml

if TYPE_CHECKING:
    from kdskills.skills.repair import Repair

MAX_SKILL_BYTES = 2 * 1024 * 1024
BOM = "\ufeff"

_FENCE = re.compile(r"^---[^\S\n]*$", re.MULTILINE)
_FENCE_OR_DOTS = re.compile(r"^(?:---|\.\.\.)[^\S\n]*$", re.MULTILINE)
_LEADING_BLANK = re.compile(r"(?:[^\S\n]*\n)+")


class Split(NamedTuple):
    """A skill file cut at its fences; offsets count characters of `text`.

    Attributes:
        text: The whole text, without BOM, with LF as line ends.
        start: Where the frontmatter begins.
        end: Where the closing fence begins.
        after: Where the body begins.
        dots: Whether a line of dots closes it.
    """

    text: str
    start: int
    end: int
    after: int
    dots: bool

    @property
    def frontmatter(self) -> str:
        """The text between the fences."""
        return self.text[self.start : self.end]


class Frontmatter(NamedTuple):
    """Fields as nodes, and the body."""

    fields: Fields
    document: Document
    body: str
    repairs: tuple[Repair, ...] = ()


def decode(data: bytes, findings: Findings) -> str | None:
    """Return the text of a skill file without BOM and with LF as line ends, or None after an error."""
    if len(data) > MAX_SKILL_BYTES:
        findings.add("too_large", f"The skill file has {len(data):,} bytes, more than {MAX_SKILL_BYTES:,}.")
        return None
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        findings.add("nul_byte", "The file holds a NUL byte.", place=(line, 1))
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        findings.add("not_utf8", f"The file is not UTF-8 from byte {error.start} on.", place=(line, 1))
        return None
    if text.startswith(BOM):
        text = text[1:]
        findings.add("bom", "The file begins with a byte order mark.", place=(1, 1))
        if findings.verdict == "skills-ref":
            findings.add("no_frontmatter", "A byte order mark stands before the opening `---`.", place=(1, 1))
            return None
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def split(text: str, findings: Findings) -> Split | None:
    """Cut *text* at its fences, or return None after an error."""
    lenient = findings.verdict == "lenient"
    position = text.find("\n---", 3) if text.startswith("---\n") else -1
    if text.startswith("\n---\n", position) and not (lenient and text.find("\n...", 3, position + 1) >= 0):
        return Split(text, 4, position + 1, position + 5, dots=False)  # as nearly all are written
    opening = _FENCE.match(text)
    if opening is None:
        findings.add("no_frontmatter", "The first line is not `---`.", place=(1, 1))
        return None
    start = min(opening.end() + 1, len(text))
    fence = _FENCE_OR_DOTS if lenient else _FENCE
    closing = fence.search(text, start) if opening.end() < len(text) else None
    if closing is None:
        if not lenient:
            dots = _FENCE_OR_DOTS.search(text, start)
            if dots is not None:
                _report_dots(text, dots.start(), findings)
        findings.add("unclosed_frontmatter", "No line `---` closes the frontmatter.", place=(1, 1))
        return None
    dots_close = text[closing.start()] == "."
    if dots_close:
        _report_dots(text, closing.start(), findings)
    return Split(text, start, closing.start(), min(closing.end() + 1, len(text)), dots_close)


def _report_dots(text: str, position: int, findings: Findings) -> None:
    line = text.count("\n", 0, position) + 1
    findings.add("dots_close", "A line `...` stands where `---` should close the frontmatter.", place=(line, 1))


def trim_body(text: str) -> str:
    """Return *text* without leading blank lines and trailing whitespace."""
    text = text.rstrip()
    leading = _LEADING_BLANK.match(text)
    return text[leading.end() :] if leading else text


def read_body(data: bytes, verdict: Verdict = "lenient") -> str:
    """Return the body of a skill file that parsed before under *verdict*; "" when it has no closed frontmatter."""
    findings = Findings(verdict, "")
    text = decode(data, findings)
    parts = split(text, findings) if text is not None else None
    return trim_body(parts.text[parts.after :]) if parts is not None else ""


def read_frontmatter(data: bytes, findings: Findings) -> Frontmatter | None:
    """Return fields and body of a skill file, or None after an error."""
    text = decode(data, findings)
    parts = split(text, findings) if text is not None else None
    if parts is None:
        return None
    loaded = _load(parts.frontmatter, findings)
    if loaded is None:
        return None
    document, repairs = loaded
    if not isinstance(document.root, Fields) or not document.root.items:
        findings.add("not_a_mapping", "The frontmatter is empty or no mapping of fields.", place=(2, 1))
        return None
    if document.duplicates:
        _report_duplicates(document, findings)
        if findings.verdict != "lenient":
            return None
    return Frontmatter(document.root, document, trim_body(parts.text[parts.after :]), repairs)


def _load(text: str, findings: Findings) -> tuple[Document, tuple[Repair, ...]] | None:
    try:
        return load_yaml(text, text_only=findings.verdict == "skills-ref"), ()
    except YamlRefused as refusal:
        failure = refusal
    if findings.verdict == "lenient" and failure.repairable:
        from kdskills.skills.repair import repair_lines

        mended, repairs = repair_lines(text)
        if repairs:
            try:
                document = load_yaml(mended)
            except YamlRefused:
                pass  # the first failure says more about what the author wrote
            else:
                keys = ", ".join(f"`{repair.key}`" for repair in repairs)
                message = f"The frontmatter parses only with {keys} quoted."
                findings.add("yaml_repaired", message, place=(repairs[0].line + 2, 1))
                return document, repairs
    place = (failure.place[0] + 2, failure.place[1] + 1) if failure.place else None
    findings.add("invalid_yaml", f"The frontmatter is no YAML a skill may use: {failure.message}.", place=place)
    return None


def _report_duplicates(document: Document, findings: Findings) -> None:
    for key, mark in document.duplicates:
        place = (mark.line + 2, mark.column + 1)
        findings.add("duplicate_key", f"The key `{key}` stands twice; the first one counts.", place=place, ref=key)
    if findings.verdict != "lenient":
        mark = document.duplicates[0][1]
        place = (mark.line + 2, mark.column + 1)
        findings.add("invalid_yaml", "The frontmatter has a key twice.", place=place)
