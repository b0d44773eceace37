"""Names that nearly fit: consumers that no agent is, and references that may have been meant for another skill."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from itertools import filterfalse
from typing import TYPE_CHECKING, Final

from kdskills.bundle.descriptor import CODEGEN, DECISION, EVERYONE, is_group
from kdskills.bundle.load import MAX_DESCRIPTOR
from kdskills.bundle.load import NAMES as DESCRIPTOR_NAMES
from kdskills.errors import Diagnostic, FileRefused, Severity
from kdskills.skills.refs import parse_ref
from kdskills.skills.safe_open import read_file
from kdskills.skills.selection import Refused

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.turn.subsystem import SkillsSubsystem
    from kdskills.turn.view import SkillView

SOLVER: Final = (DECISION, CODEGEN)
TYPO: Final = 0.92
"""From here on two names are one, mistyped: a letter or two of a name of usual length."""
ALIKE: Final = 0.85
LEAST: Final = 0.7
"""Below this, two names are not compared letter by letter."""
MOST_SUGGESTED: Final = 3
_WORD: Final = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'|[^\s\"',:{}()\[\]#]+(?::[^\s\"',:{}()\[\]#]+)*")


class WordLines:
    """The lines of a file that names stand in, comments aside, so that findings can point at what was written."""

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[int]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            for word in () if line.lstrip().startswith("#") else _words(line):
                self._lines.setdefault(word, []).append(number)

    def after(self, *words: str) -> int | None:
        """Return the line of the last of *words*, each looked for from the line of the one before; None without the first."""
        line = 0
        for word in words:
            lines = self._lines.get(word, [])
            index = bisect_left(lines, line)
            if index == len(lines):
                break
            line = lines[index]
        return line or None


def _words(line: str) -> Iterator[str]:
    """Yield what is quoted in a line of a descriptor or frontmatter, the words in it, and every other word."""
    for match in _WORD.finditer(line):
        quoted_text = match[1] or match[2]
        yield quoted_text or match[0]
        if quoted_text and " " in quoted_text:
            yield from quoted_text.split()


def descriptor_words(bundle: Bundle) -> tuple[str | None, WordLines]:
    """Return the name of a bundle's descriptor, None without one, and the lines of what it says."""
    for name in DESCRIPTOR_NAMES:
        try:
            return name, WordLines(read_file(bundle.root, name, limit=MAX_DESCRIPTOR).data.decode("utf-8", "replace"))
        except FileRefused:
            continue
    return None, WordLines("")


def rule_findings(bundle: Bundle, recorded: Iterable[str] = ()) -> list[Diagnostic]:
    """Return what is wrong with the consumers that a bundle's rules name.

    Known are the solver's own consumers, those *recorded*, and the bundle's `consumers`. Where it lists any, every
    other one is an error; else a known name mistyped is an error, and one merely like it a warning.
    """
    listed = bundle.descriptor.consumers
    consumers = dict.fromkeys((*listed, *SOLVER, *recorded))
    findings = []
    path, lines = descriptor_words(bundle)
    for consumer in filterfalse(is_group, bundle.descriptor.agents_config):
        nearest_name, ratio = nearest(consumer, consumers)
        if consumer == EVERYONE or consumer in consumers or (not listed and ratio < ALIKE):
            continue
        severity: Severity = "error" if listed or ratio >= TYPO else "warning"
        like = f"is like {nearest_name}, and no agent has that name"
        reason = "is not among the consumers of this bundle" if listed else like
        advice = f"write {nearest_name!r}, or " if ratio >= ALIKE else ""
        fix = f"{advice}list {consumer!r} under `consumers` in the descriptor"
        message, ref = f"{consumer} {reason}: its rules hold for nobody", f"agents_config.{consumer}"
        line = lines.after(consumer)
        findings.append(Diagnostic("consumer_unknown", severity, message, path=path, line=line, ref=ref, fix=fix))
    return findings


def asker_findings(
    subsystem: SkillsSubsystem, consumer: str | None, recorded: Iterable[str] = ()
) -> tuple[Diagnostic, ...]:
    """Return a warning when nothing names the consumer that asks: no rule is its own, only those for all hold.

    Those *recorded* are known; an anonymous consumer is never unknown.
    """
    terms = subsystem.descriptor
    consumers = dict.fromkeys((*filterfalse(is_group, terms.agents_config), *terms.consumers, *SOLVER, *recorded))
    if consumer is None or consumer in consumers or consumer == EVERYONE:
        return ()
    patterns = [entry for skill in subsystem.registry.values() for entry in skill.include_for]
    if any(fnmatchcase(consumer.lower(), entry) for entry in patterns):
        return ()
    nearest_name, ratio = nearest(consumer, consumers)
    otherwise = "list it under `consumers` in the descriptor, or give it rules"
    fix = f"ask as {nearest_name!r}" if ratio >= ALIKE else otherwise
    message = f"no rule, skill or agent names {consumer}: only what holds for every consumer is in force"
    return (Diagnostic("consumer_unknown", "warning", message, ref=consumer, fix=fix),)


def nearest(name: str, candidates: Iterable[str]) -> tuple[str, float]:
    """Return the known name most like *name*, and how alike they are, from 0 to 1; case does not count."""

    def likeness(candidate: str) -> float:
        first, second = name.casefold(), candidate.casefold()
        total = len(first) + len(second)
        if not total or 2 * min(len(first), len(second)) < LEAST * total:
            return 0.0  # cannot be alike: a name of a megabyte is not even compared
        return SequenceMatcher(None, first, second, autojunk=False).ratio()

    rated = ((candidate, likeness(candidate)) for candidate in candidates if candidate != EVERYONE)
    return max(rated, key=lambda pair: pair[1], default=("", 0.0))


def meant_id(subsystem: SkillsSubsystem, view: SkillView, ref: str) -> str:
    """Return the full id a reference means: *ref* itself, but the one skill of a bare id that the view does not know.

    A bare id means a skill of namespace `public` where nothing else is said. To people it means the only skill of that
    id, whatever its namespace and whether it is granted or not.
    """
    answer = view.resolve(ref, by="code")
    if not isinstance(answer, Refused) or answer.code != "unknown_skill" or parse_ref(ref).kind != "bare":
        return ref
    full_ids = _of_id(subsystem, parse_ref(ref).value)
    return full_ids[0] if len(full_ids) == 1 else ref


def suggestions(subsystem: SkillsSubsystem, ref: str) -> tuple[str, ...]:
    """Return full ids that *ref* may have been meant for: those of its id, else those of a name like it."""
    parsed = parse_ref(ref)
    if parsed.kind not in {"bare", "full"}:
        return ()
    full_ids = _of_id(subsystem, parsed.value.rpartition(".")[2])
    if full_ids:
        return tuple(full_ids[:MOST_SUGGESTED])
    candidates = {*subsystem.registry, *subsystem.snapshot.invalid}
    rated = [(nearest(parsed.value, (full_id, full_id.partition(".")[2]))[1], full_id) for full_id in candidates]
    similar = sorted((-ratio, full_id) for ratio, full_id in rated if ratio >= LEAST)
    return tuple(full_id for _, full_id in similar[:MOST_SUGGESTED])


def _of_id(subsystem: SkillsSubsystem, bare: str) -> list[str]:
    """Return the full ids of skills of that id, those refused at load among them."""
    full_ids = {*subsystem.registry, *subsystem.snapshot.invalid}
    return sorted(full_id for full_id in full_ids if full_id.partition(".")[2] == bare)
