"""What may be wrong with a skill, told before anybody loads it: static, offline, bounded and the same every time.

`audit_folder` reads the files of a skill and runs nothing of them. Text is compared in a plain form: letters without marks,
compatibility forms and invisible characters, in lower case. What is encoded in it is decoded and compared, too. Every
pattern is matched in linear time. What is not read is a finding itself. The rules are the table of `audit_rules`.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import html
import itertools
import json
import re
import tomllib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import re2

from kdskills.bundle.descriptor import AuditPolicy
from kdskills.errors import AuthorMustAct, CallerMustAct, Diagnostic, FileRefused
from kdskills.errors.reports import ReportRow, ReportRule, sarif_log
from kdskills.skills.folder import SKILL_FILES
from kdskills.skills.safe_open import open_file, printable_path, read_file, tree_digest, walk_tree
from kdskills.supply import audit_rules as table
from kdskills.supply.audit_rules import RANKS, RULES, AuditSeverity, Rule, compiled, plain_marks

REVIEW_FILE: Final = "kdskills.audit.toml"
MAX_REVIEW: Final = 1024 * 1024
FILE_BYTES: Final = 1024 * 1024
SKILL_BYTES: Final = 16 * 1024 * 1024
MAX_FILES: Final = 2000
"""Bytes of a file, bytes of a skill, and files of a skill that are read."""
RULE_HITS: Final = 5
"""Findings of one rule and severity in one file; more say nothing new."""
PATTERN_HITS: Final = 200
"""Places in one file that one pattern is asked for."""
EXCERPT: Final = 160
LAYERS: Final = 512
"""Encoded pieces of a file that are decoded."""
NEARBY: Final = 12
"""Lines around a finding in which another one makes it worse."""


class AuditRefused(CallerMustAct, code="audit_refused"):
    """A skill has findings that the setting `audit` does not let in; `details["findings"]` has them."""


class AuditReviewInvalid(AuthorMustAct, code="audit_review_invalid"):
    """A reviewer's file is none, or has an entry that is not understood; nothing is accepted then."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One finding: `line` is 1-based, 0 for a file as a whole; `accepted` is a reviewer's reason to let it be.

    `excerpt` is the text of the file with what cannot be seen written out, at most 160 characters; of a secret it has only
    the beginning.
    """

    rule: str
    severity: AuditSeverity
    path: str
    line: int
    excerpt: str
    accepted: str | None = None

    @property
    def why(self) -> str:
        """Why it is told."""
        return RULES[self.rule].why

    @property
    def cure(self) -> str:
        """What mends it."""
        return RULES[self.rule].cure

    def diagnostic(self, policy: AuditPolicy = "warn") -> Diagnostic:
        """Return it as checks and reports of uploads have findings: an error only where the policy refuses it."""
        worst = "error" if policy == "block-high" else "warning"
        severity: Any = {"high": worst, "medium": "warning"}.get(self.severity, "info")
        message = f"{self.severity}: {self.why} Here: {self.excerpt}"
        return Diagnostic(f"audit_{self.rule}", severity, message, self.path, self.line or None, fix=self.cure)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was found in one skill, the worst first; `digest` is that of its tree, empty when it could not be taken."""

    skill: str
    digest: str
    files: int
    size: int
    findings: tuple[AuditFinding, ...]

    def of(self, severity: str) -> tuple[AuditFinding, ...]:
        """Return findings of *severity* that no reviewer has accepted."""
        return tuple(each for each in self.findings if each.severity == severity and each.accepted is None)

    def require(self, policy: AuditPolicy) -> None:
        """Raise AuditRefused when *policy* refuses the skill: `block-high` one with a finding of severity `high`."""
        if policy == "block-high" and (worst := self.of("high")):
            rules = ", ".join(sorted({each.rule for each in worst}))
            rows = [asdict(each) for each in worst]
            raise AuditRefused(f"the audit of {self.skill!r} has {len(worst)} high: {rules}", findings=rows)


class Acceptance(NamedTuple):
    """What a reviewer lets be: findings of a rule in a skill whose tree has this digest."""

    rule: str
    skill: str
    digest: str
    reason: str


def read_review(folder: Path) -> tuple[Acceptance, ...]:
    """Return what `kdskills.audit.toml` in *folder* accepts, nothing when it is not there.

    The folder is the one of the lock; a skill's own folder must never be given. Raises AuditReviewInvalid.
    """
    try:
        data = read_file(folder, REVIEW_FILE, limit=MAX_REVIEW).data
    except FileRefused as error:
        if error.code == "file_missing":
            return ()
        raise AuditReviewInvalid(f"{REVIEW_FILE} cannot be read: {error.message}", path=str(folder)) from None
    try:
        document = tomllib.loads(data.decode("utf-8"))
        acceptances = tuple(Acceptance(**{"reason": "", **row}) for row in document.get("accept", ()))
    except (ValueError, TypeError, RecursionError) as error:
        raise _review_invalid(folder, str(error)[:300]) from None
    if document.keys() - {"accept"}:
        raise _review_invalid(folder, "it has something else than [[accept]] tables")
    for row in acceptances:
        if not all(isinstance(value, str) for value in row) or not (row.skill and row.digest):
            raise _review_invalid(folder, "an [[accept]] table needs the texts rule, skill and digest")
        if row.rule not in RULES:
            raise _review_invalid(folder, f"there is no rule {row.rule[:100]!r}")
    return acceptances


def _review_invalid(folder: Path, reason: str) -> AuditReviewInvalid:
    return AuditReviewInvalid(f"{REVIEW_FILE} in {folder} is not understood: {reason}", path=str(folder))


def judge_folder(folder: Path, policy: AuditPolicy) -> tuple[Diagnostic, ...]:
    """Return what *policy* tells of a skill's folder, nothing where it is `off`. Raises AuditRefused."""
    if policy == "off":
        return ()
    report = audit_folder(folder)
    report.require(policy)
    return tuple(each.diagnostic(policy) for each in report.findings if each.severity != "info")


def audit_folder(folder: Path, *, skill: str = "", accepted: Sequence[Acceptance] = ()) -> AuditReport:
    """Return what is found in the skill's *folder*, whose name is *skill* or that of the folder.

    *accepted* is a reviewer's. No file and no folder raises: what cannot be read is a finding.
    """
    findings: list[AuditFinding] = []
    budget, read, digest = SKILL_BYTES, 0, ""
    try:
        entries = walk_tree(folder)
    except FileRefused as error:
        entries = []
        findings.append(_finding("not_read", ".", 0, error.message, "high"))
    if len(entries) > MAX_FILES:
        words = f"{len(entries) - MAX_FILES} of {len(entries)} files are not read"
        findings.append(_finding("not_read", ".", 0, words, "high"))
    entries.sort(key=lambda each: each.path not in SKILL_FILES)  # the skill file is read whatever lies beside it
    names = frozenset(each.path for each in entries)
    for entry in entries[:MAX_FILES]:
        path = printable_path(entry.path)
        if entry.kind != "file":
            words = f"link to {printable_path(entry.target)}" if entry.kind == "link" else "neither file nor folder"
            findings.append(_finding("link_or_device", path, 0, words))
            continue
        try:
            with open_file(folder, entry.path) as stream:
                data = stream.read(min(FILE_BYTES, budget))
        except FileRefused as error:
            findings.append(_finding("not_read", path, 0, error.message))
            continue
        budget -= len(data)
        read += 1
        if len(data) < entry.size:
            findings.append(_finding("not_read", path, 0, f"{len(data)} of {entry.size} bytes are read"))
        findings += audit_file(path, data, executable=bool(entry.mode & 0o111), names=names)
    try:
        digest = tree_digest(folder)
    except FileRefused as error:
        findings.append(_finding("not_read", ".", 0, error.message))
    name = skill or folder.name
    reasons = {row.rule: row.reason or "accepted" for row in accepted if (row.skill, row.digest) == (name, digest)}
    judged = {replace(each, accepted=reasons.get(each.rule)) for each in findings}
    ordered = sorted(judged, key=lambda each: (-RANKS[each.severity], each.path, each.line, each.rule, each.excerpt))
    return AuditReport(name, digest, read, SKILL_BYTES - budget, tuple(ordered))


def audit_file(
    path: str, data: bytes, *, executable: bool = False, names: frozenset[str] = frozenset()
) -> list[AuditFinding]:
    """Return what is found in the bytes of one file; *names* are the paths of the skill's files."""
    text, encoding = _decoded(data)
    findings = []
    if text is None or b"\0" in data[:512] or encoding == "latin-1":  # a text may begin as a picture does
        kind = next((row for row in table.MAGICS if data.startswith(row[0], row[1])), None)
        program = executable or Path(path).suffix.lower() in table.CODE_FILES
        if kind is not None and kind[2]:
            findings.append(_finding(kind[2], path, 0, kind[3]))
        elif text is None and (kind is None or program):
            words = f"{len(data)} bytes that are no text"
            findings.append(_finding("binary_file", path, 0, words, "medium" if program else ""))
        if not program and (text is None or kind is not None):
            return findings
        text = data.decode("latin-1") if text is None else text  # what a shell would run all the same
    if encoding != "utf-8":
        findings.append(_finding("odd_encoding", path, 0, f"read as {encoding}"))
    page = _Page(path, text)
    findings += [*_unseen(page), *_matches(page), *_layers(page), *_hooks(page, names)]
    return _escalated(findings)


def _finding(rule: str, path: str, line: int, excerpt: str, severity: str = "") -> AuditFinding:
    words = visible(" ".join(excerpt.split()))
    short = words if len(words) <= EXCERPT else words[: EXCERPT - 1] + "…"
    return AuditFinding(rule, severity or RULES[rule].severity, path, line, short)  # type: ignore[arg-type]


def _decoded(data: bytes) -> tuple[str | None, str]:
    """Return a file's text and its encoding; None for what is no text."""
    for mark, encoding in ((codecs.BOM_UTF8, "utf-8"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if data.startswith(mark):
            return data.removeprefix(codecs.BOM_UTF8).decode(encoding, "replace"), encoding
    try:
        if b"\0" not in data:
            return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError as error:
        if error.start >= len(data) - 3:  # a letter that was cut where reading ends
            return data[: error.start].decode("utf-8"), "utf-8"
    for encoding in ("utf-16-le", "utf-16-be"):
        if data[1:64:2].count(0) > 16 if encoding.endswith("le") else data[:64:2].count(0) > 16:
            return data.decode(encoding, "replace"), encoding
    controls = sum(byte < 9 or 13 < byte < 32 for byte in data[:4096])
    return (None, "") if controls * 20 > len(data[:4096]) else (data.decode("latin-1"), "latin-1")


_TAGS = re.compile("[\U000e0000-\U000e007f]+")
_FLAG = re.compile("\U0001f3f4[\U000e0020-\U000e007e]{1,16}\U000e007f")
_VARIATIONS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]{3,}")
_INVISIBLE = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
_UNSEEN = re.compile(f"[{_INVISIBLE}\U000e0000-\U000e0fff\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]")
_WIDTHLESS = re.compile("[\u00ad\u034f\u180e\u200b-\u200d\u2060-\u2064\ufeff\u3164\u115f\u1160\uffa0]+")
_TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]+")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]+")
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_FAR: Final = re2.compile(r"(?:[ \t\x{3000}\x{a0}]{160,}|(?:[ \t]*\n){45,}[ \t]*)([^\s][^\n]*)")
_LOOKALIKES = str.maketrans("аеорсухіјѕԁһԛԝьαοτυνρικ", "aeopcyxijsdhqwbaotuvpik")
_STAND_INS = re.compile("[аеорсухіјѕԁһԛԝαοτυνρικ]")
_MIXED: Final = re2.compile(
    "[a-z]*[аеорсухіјѕԁһԛԝαοτυνρικ]+[a-z][a-zа-яіјѕԁһԛԝα-ω0-9]*|[a-z]+[аеорсухіјѕԁһԛԝαοτυνρικ][a-zа-яіјѕԁһԛԝα-ω0-9]*"
)
_CYRILLIC = re.compile("[\u0400-\u052f]")


def visible(text: str) -> str:
    """Return *text* with what cannot be seen written out: `<U+200B>`, and tag characters as the text they write."""

    def tags(run: re.Match[str]) -> str:
        letters = "".join(chr(ord(each) - 0xE0000) for each in run.group())
        return f"<tags: {''.join(each if each.isprintable() else '?' for each in letters)}>"

    shown = _TAGS.sub(tags, text)
    return "".join(f"<U+{ord(c):04X}>" if _UNSEEN.match(c) or not c.isprintable() else c for c in shown)


class _Page:
    """A text in the form that patterns meet, and what is known about its lines."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        suffix = Path(path).suffix.lower()
        self.prose = suffix in table.PROSE_FILES
        self.code = suffix in table.CODE_FILES

    @cached_property
    def lines(self) -> list[str]:
        """Its lines as they are."""
        return self.text.split("\n")

    @cached_property
    def letters(self) -> str:
        """The text in lower case, without marks and what is not seen, with the lines of the original."""
        return self.text.lower() if self.text.isascii() else plain_marks(_UNSEEN.sub("", self.text)).lower()

    @cached_property
    def mixed(self) -> list[Any]:
        """Words in which letters of another script stand in for Latin ones."""
        return list(_MIXED.finditer(self.letters)) if _STAND_INS.search(self.letters) else []

    @cached_property
    def plain(self) -> str:
        """The text as patterns meet it."""
        mended: str = _MIXED.sub(lambda word: word.group().translate(_LOOKALIKES), self.letters) if self.mixed else ""
        return mended or self.letters

    @cached_property
    def plain_lines(self) -> list[str]:
        """The lines of the plain text."""
        return self.plain.split("\n")

    def line_of(self, offset: int) -> int:
        """Return the 1-based line of a place in the plain text."""
        return bisect_left(self.ends, offset) + 1

    @cached_property
    def ends(self) -> list[int]:
        """Where lines of the plain text end."""
        return [match.start() for match in re.finditer("\n", self.plain)]

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """Line numbers and texts of headings."""
        lines = zip(itertools.count(1), self.plain_lines, self.fences, strict=False)
        return [(number, line[:400]) for number, line, fenced in lines if line.startswith("#") and not fenced]

    @cached_property
    def hidden(self) -> list[tuple[int, int]]:
        """Spans of the plain text that a page of it does not show."""
        return (
            [span for span in map(self._unquoted, compiled(table.CONCEALED, exact=True).finditer(self.plain)) if span]
            if self.prose
            else []
        )

    def _unquoted(self, match: Any) -> tuple[int, int] | None:
        line = self.line_of(match.start())
        quoted = self.plain[match.start() - 1 : match.start()] == "`" or self.fences[line - 1]
        return None if quoted else match.span()

    def owns(self, url: str) -> bool:
        """Whether a host over HTTPS is called as the skill says it is called, as the maker of a program would be."""
        parts = url.removeprefix("https://").partition("/")[0].split(".")
        front = self.plain[:2000].partition("\n---")[0] + self.path.lower()
        return url.startswith("https://") and any(len(part) > 3 and part in front for part in parts[-3:-1])

    @cached_property
    def fences(self) -> list[bool]:
        """Whether each line stands in a fenced block."""
        inside, fenced = "", []
        for line in self.plain_lines:
            mark = line.lstrip(" >\t")[:3]
            if mark in {"```", "~~~"} and inside in {"", mark}:
                inside = "" if inside else mark
                fenced.append(True)
            else:
                fenced.append(bool(inside))
        return fenced

    def context(self, start: int, end: int) -> tuple[bool, str]:
        """Return whether a hit is quoted, and the words that lead to it and follow it."""
        line = self.line_of(start)
        own = self.plain_lines[line - 1]
        begin = self.plain.rfind("\n", 0, start) + 1
        before, after = self.plain[begin:start], self.plain[end : end + 400].partition("\n")[0]
        quoted = self.fences[line - 1] if self.prose else False
        quoted |= own.lstrip().startswith((">", "|")) or before.count("`") % 2 == 1
        quoted |= any(mark in before[-60:] and mark in after[:200] for mark in ('"', "'"))
        lead = [self.path.lower(), before[-400:], after]
        lead += [each[:400] for each in self.plain_lines[max(line - 8, 0) : line - 1]]
        if self.prose:
            above = bisect_left(self.headings, (line, ""))
            lead += [text for _, text in self.headings[max(above - 2, 0) : above]]
            lead += [each[:400] for each in self.plain_lines[:30] if each.startswith(("# ", "description:", "name:"))]
        return quoted, "\n".join(lead)


def _unseen(page: _Page) -> Iterator[AuditFinding]:
    """Yield what a reader of the text does not see."""
    text = page.text
    for far in itertools.islice(_FAR.finditer(text), PATTERN_HITS) if page.prose else ():
        yield _finding("far_text", page.path, text.count("\n", 0, far.start(1)) + 1, far.group(1))
    words = [word for word in page.mixed if _CYRILLIC.search(word.group())]
    for word in words[:PATTERN_HITS]:
        yield _finding("mixed_letters", page.path, page.line_of(word.start()), word.group())
    if not (_UNSEEN.search(text) or _VARIATIONS.search(text)):
        return
    looks: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
        ("tag_characters", _TAGS, lambda run: "high"),
        ("variation_text", _VARIATIONS, lambda run: "high"),
        ("bidirectional_characters", _TURNS, _turns),
        ("invisible_characters", _WIDTHLESS, _widthless),
        ("terminal_controls", _CONTROLS, lambda run: "medium" if "\x1b" in run.group() else "low"),
    )
    flagless = _FLAG.sub(lambda flag: " " * len(flag.group()), text)
    for rule, pattern, judge in looks:
        runs = ((run, judge(run)) for run in pattern.finditer(flagless))
        for run, severity in itertools.islice((row for row in runs if row[1]), PATTERN_HITS):
            line = text.count("\n", 0, run.start()) + 1
            excerpt = text[max(run.start() - 40, text.rfind("\n", 0, run.start()) + 1) : run.end() + 40]
            hidden = _smuggled(run.group()) if rule == "variation_text" else ""
            yield _finding(rule, page.path, line, excerpt.partition("\n")[0] + hidden, severity)


def _turns(run: re.Match[str]) -> str:
    """Return how bad characters are that turn the direction of text; in scripts from right to left they are common."""
    line = run.string[run.string.rfind("\n", 0, run.start()) + 1 :].partition("\n")[0]
    return "low" if _RIGHT_TO_LEFT.search(line) else "high" if set(run.group()) & set("\u202d\u202e") else "medium"


def _widthless(run: re.Match[str]) -> str:
    """Return how bad characters without width are: none where a script or a picture needs them."""
    before, after = run.string[run.start() - 1 : run.start()], run.string[run.end() : run.end() + 1]
    if len(run.group()) >= 4:
        return "high"
    if run.group() in {"\u200c", "\u200d"} and not (before.isascii() and after.isascii()):
        return ""
    inside = before.isascii() and before.isalpha() and after.isascii() and after.isalpha()
    return "medium" if inside and run.group() != "\u00ad" else "low"


def _smuggled(run: str) -> str:
    """Return the bytes that variation selectors carry, as text."""
    numbers = (ord(each) - (0xFE00 if ord(each) < 0xFE10 else 0xE0100 - 16) for each in run)
    return f" <carries: {bytes(number % 256 for number in numbers).decode('ascii', 'replace')}>"


class _Machines(NamedTuple):
    """Patterns of the table, and what tells in one pass which of them may match."""

    sieve: Any
    patterns: tuple[tuple[str, str], ...]


_CANARY: Final = "kdskills audit canary"


@cache
def _machines(*, exact: bool) -> _Machines:
    """Return the machines of rules that look at plain text, or at exact text."""
    pairs = [(rule.id, pattern) for rule in RULES.values() if rule.exact == exact for pattern in rule.patterns]
    pairs += [] if exact else [("", pattern) for pattern in table.WAYS_OUT]
    sieve = re2.Filter()
    for _, pattern in pairs:
        sieve.Add(compiled(pattern, exact=exact).pattern)
    sieve.Add(_CANARY)
    sieve.Compile()
    return _Machines(sieve, tuple(pairs))


def _hits(text: str, *, exact: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield rules and matches in a text; the rule is empty for a way out."""
    sieve, patterns = _machines(exact=exact)
    maybe = sieve.Match(f"{text}\n{_CANARY}", True) or ()
    # The sieve may run out of memory and then finds nothing, the canary too: every pattern is asked instead.
    numbers = sorted(maybe) if len(patterns) in maybe else range(len(patterns))
    for number in numbers:
        if number < len(patterns):
            rule, pattern = patterns[number]
            for match in itertools.islice(compiled(pattern, exact=exact).finditer(text), PATTERN_HITS):
                yield rule, match


def _matches(page: _Page) -> Iterator[AuditFinding]:
    """Yield what patterns find in a text."""
    sources: list[tuple[int, Any]] = []
    exits: list[tuple[int, Any]] = []
    places: Counter[str] = Counter()
    for rule, match in _hits(page.plain):
        line = page.line_of(match.start())
        places[rule] += 1
        if rule and places[rule] == PATTERN_HITS:
            yield _finding("not_read", page.path, line, f"{rule} after its first {PATTERN_HITS} places")
        if not rule:
            exits.append((line, match))
            continue
        if rule == "credential_read":
            if compiled(table.NOT_A_SOURCE).search(page.plain_lines[line - 1]):
                continue
            sources.append((line, match))
        severity = _severity(page, RULES[rule], match, line)
        if severity:
            yield _finding(rule, page.path, line, _excerpt(page, match, line), severity)
    for line, match in sources:
        near = [each for each, _ in exits if abs(each - line) <= (NEARBY if page.prose else 4 * NEARBY)]
        if near:
            level = _severity(page, RULES["credentials_sent"], match, line) or "low"
            yield _finding("credentials_sent", page.path, line, _excerpt(page, match, line), level)
    for rule, match in _hits(page.text, exact=True):
        if not re2.search(table.STAND_INS, match.group()[-400:]):
            line = page.text.count("\n", 0, match.start()) + 1
            yield _finding(rule, page.path, line, f"{match.group()[:8]}… ({len(match.group())} characters)")
    for start, end in page.hidden:
        if compiled(table.DIRECTED).search(page.plain[start:end]):
            line = page.line_of(start)
            worse = "high" if "://" in page.plain[start:end] else ""
            yield _finding("hidden_instructions", page.path, line, page.lines[line - 1][:EXCERPT], worse)


def _excerpt(page: _Page, match: Any, line: int) -> str:
    """Return the original line around a match; a match over lines shows the first."""
    begin = page.plain.rfind("\n", 0, match.start()) + 1
    column = max(match.start() - begin - 40, 0)
    return page.lines[line - 1][column : column + 2 * EXCERPT]


_URL = re.compile(r"https?://[^\s\"'`<>)|;]+")
_TALKED_ABOUT = frozenset({"imitation and override", "orders against the user", "hidden instructions"})


def _severity(page: _Page, rule: Rule, match: Any, line: int) -> AuditSeverity | None:
    """Return how bad a match is where it stands; None when it is none."""
    own = page.plain_lines[line - 1]
    severity = rule.severity
    urls = _URL.findall(match.group()) or _URL.findall(own)
    if rule.id == "raw_address" and table.OWN_NETWORKS.search(match.group().rpartition("/")[2]):
        return None
    if rule.family == "running what is fetched":
        if urls and all(compiled(table.KNOWN_INSTALLERS).match(url) for url in urls):
            return "low"
        if page.prose and severity == "high" and all(page.owns(url) for url in urls):
            severity = "medium"  # of no address, or of the maker of what the skill is about
    elif rule.near and compiled(rule.near).search(own):
        severity = "high"
    before = bisect_left(page.hidden, (match.start() + 1, 0)) - 1
    if before >= 0 and match.start() < page.hidden[before][1]:
        return "high" if RANKS[severity] else severity
    if RANKS[severity] and (page.prose or rule.family in _TALKED_ABOUT):
        quoted, lead = page.context(match.start(), match.end())
        talked = bool(re2.search(table.DISCUSSED, lead))
        sentence = re.split(r"[.!?:\n]\s|\n\n", page.plain[max(match.start() - 120, 0) : match.start()])[-1]
        introduced = bool(compiled(table.INTRODUCED).search(sentence))
        if talked and (quoted or introduced):
            return "low"
        if introduced and severity == "high":
            return "medium"
    return severity


def _layers(page: _Page) -> Iterator[AuditFinding]:
    """Yield what patterns find in text that is encoded, written apart or put together."""
    pieces: dict[str, int] = {}
    count = 0
    for match in re2.finditer(table.ENCODED, page.text):
        if count == LAYERS:
            line = page.text.count("\n", 0, match.start()) + 1
            yield _finding("not_read", page.path, line, f"encoded pieces after the first {LAYERS}", "info")
            break
        kind = next(name for name, value in match.groupdict().items() if value is not None)
        decoded = _plain_of(kind, match, page.text)
        if decoded:
            count += 1
            pieces.setdefault(decoded, match.start())
    if re2.search(r"rot[ -]?13|caesar", page.plain):
        pieces.setdefault(codecs.encode(page.text, "rot13"), 0)
    for decoded, start in pieces.items():
        inner = _Page("", decoded)
        for rule, hit in _hits(inner.plain):
            if rule and RANKS[RULES[rule].severity] >= RANKS["medium"]:
                line = (
                    page.text.count("\n", 0, start) + inner.line_of(hit.start())
                    if not start
                    else page.text.count("\n", 0, start) + 1
                )
                words = f"{RULES[rule].id}: {decoded[max(hit.start() - 20, 0) : hit.end() + 40]}"
                yield _finding("encoded_text", page.path, line, words)
                break


def _plain_of(kind: str, match: Any, text: str) -> str:
    """Return what an encoded piece says, empty when it is no text."""
    piece = match.group()[:65536]
    if kind == "base64":
        try:
            padded = piece.rstrip("=").translate({45: 43, 95: 47})
            data = base64.b64decode(padded + "=" * (-len(padded) % 4))
        except (binascii.Error, ValueError):
            data = b""
        try:
            hexed = bytes.fromhex(piece)
        except ValueError:
            hexed = b""
        for bytes_read in (data, hexed):
            decoded = bytes_read.decode("utf-16-le" if bytes_read[1:9:2] == b"\0\0\0\0" else "utf-8", "replace")
            if decoded and sum(each.isprintable() or each.isspace() for each in decoded) > 0.9 * len(decoded):
                return decoded if "\ufffd" not in decoded else ""
        return ""
    if kind == "escapes":
        return codecs.decode(piece, "unicode_escape")
    if kind in {"percent", "entities"}:
        return unquote(html.unescape(piece))
    if kind == "apart":
        return re.sub(r"(?<=\b\w)[ ._*-](?=\w\b)", "", piece)
    begin = text.rfind("\n", 0, match.start()) + 1
    line = text[begin:].partition("\n")[0][:4000]
    if kind == "parted":
        return table.PARTED.sub(lambda name: re.sub(r"\$\{\w*\}|\W", "", name.group()), line)
    return re.sub(r"[\"']\s?\+\s?[\"']", "", line)


def _hooks(page: _Page, names: frozenset[str]) -> Iterator[AuditFinding]:
    """Yield what runs on its own once the folder is installed or opened."""
    name = page.path.rpartition("/")[2]
    if name == "package.json":
        try:
            scripts = json.loads(page.text).get("scripts", {})
        except (ValueError, AttributeError, RecursionError):
            scripts = {}
        for hook in ("preinstall", "install", "postinstall", "prepare", "prepublish"):
            command = scripts.get(hook) if isinstance(scripts, dict) else None
            if isinstance(command, str) and command:
                line = page.text[: max(page.text.find(f'"{hook}"'), 0)].count("\n") + 1
                severity = "high" if "install" in hook else "low"
                yield _finding("install_hook", page.path, line, f"{hook}: {command}", severity)
    elif name == "setup.py" and (match := table.RUN_BY_INSTALLING.search(page.text)):
        line = page.text.count("\n", 0, match.start()) + 1
        yield _finding("install_hook", page.path, line, page.lines[line - 1])
    elif name == "tasks.json" and "folderopen" in page.plain:
        yield _finding("install_hook", page.path, 0, "a task that starts when the folder is opened")
    elif table.STARTED_FILES.search(page.path):
        yield _finding("install_hook", page.path, 0, page.lines[0])
    elif table.CLIENT_FILES.search(page.path):
        yield _finding("client_hook", page.path, 0, page.lines[0])
    elif name in SKILL_FILES and (hooks := re2.match(table.FRONT_HOOKS, page.text[:20000])):
        line = hooks.group().count("\n") + 1
        yield _finding("client_hook", page.path, line, page.lines[line - 1])


def _escalated(findings: list[AuditFinding]) -> list[AuditFinding]:
    """Return findings of one file, few of a rule; what stands together with what makes it worse is `high`."""
    counts: Counter[tuple[str, str]] = Counter()
    first = []
    for each in sorted(set(findings), key=lambda each: (each.line, each.rule, each.excerpt)):
        counts[each.rule, each.severity] += 1
        first += [each] if counts[each.rule, each.severity] <= RULE_HITS else []
    worse = {"hidden_instructions", "hide_from_user", "unattended", "far_text", "download_file"}
    result = []
    for each in first:
        partners = (
            other
            for other in first
            if RULES[other.rule].family != RULES[each.rule].family
            and RANKS[other.severity] >= RANKS["low"]
            and other.rule != "credential_read"
            and abs(other.line - each.line) <= NEARBY
        )
        high = each.rule in worse and each.severity == "medium" and any(partners)
        result.append(replace(each, severity="high") if high else each)
    return result


def report_rows(reports: Mapping[str, AuditReport]) -> Iterator[ReportRow]:
    """Yield findings of reports by what stands before their paths, as other programs read them."""
    for below, report in reports.items():
        for each in report.findings:
            severity: Any = {"high": "error", "medium": "warning"}.get(each.severity, "info")
            words = f"{each.why} Here: {each.excerpt}"
            finding = Diagnostic(each.rule, severity, words, below + each.path, each.line or None, fix=each.cure)
            yield ReportRow(finding, each.accepted)


def sarif(reports: Mapping[str, AuditReport]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log of reports by what stands before their paths; what a reviewer accepted is suppressed."""
    rules = (
        ReportRule(
            rule.id,
            rule.why,
            rule.cure,
            {"high": "error", "medium": "warning"}.get(rule.severity, "note"),
            {"family": rule.family, "severity": rule.severity},
        )
        for rule in RULES.values()
    )
    return sarif_log("kdskills audit", rules, report_rows(reports))
