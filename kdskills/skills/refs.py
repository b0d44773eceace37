"""What a written reference means, and which full ids a rule matches: pure text, no files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import translate
from typing import Literal, NamedTuple

DEFAULT_NAMESPACE = "public"
INTERNAL_NAMESPACE = "internal"

MOST_SAID = 200

RefKind = Literal["invalid", "number", "full", "bare"]

_PREFIXES = ("skills.skills.", "skills.", "skill:", "sk:")  # the longest first: one prefix is taken off, once
_NUMBER = re.compile(r"SK[0-9]+")
_DIGITS = re.compile(r"[0-9]+")
_WILD = re.compile(r"[*?\[]")


class Ref(NamedTuple):
    """A reference taken apart: its kind, its value, and the text as it was written.

    `number` is for short ids, `full` with one dot, `bare` without, `invalid` when blank or with more dots. The value is
    without blanks and prefix; a number's always `SK<n>`.
    """

    kind: RefKind
    value: str
    text: str

    def full_id(self, namespace: str = DEFAULT_NAMESPACE) -> str | None:
        """Return the full id, a bare id being one of *namespace*; None for numbers and invalid refs."""
        if self.kind == "full":
            return self.value
        return f"{namespace}.{self.value}" if self.kind == "bare" else None


def parse_ref(written: object) -> Ref:
    """Take a reference apart; nothing is looked up, so any id may come out of it.

    It is `[sk:|skill:|skills.|skills.skills.]` and a full id, a bare id or `SK<n>`; outer blanks are ignored.
    """
    text = written if isinstance(written, str) else ""  # models and callers pass anything
    value = text.strip()
    for prefix in _PREFIXES:
        if value.startswith(prefix):
            value = value[len(prefix) :]
            if prefix == "sk:" and _DIGITS.fullmatch(value):
                value = f"SK{value}"
            break
    if not value or value.count(".") > 1:
        return Ref("invalid", value, text)
    if _NUMBER.fullmatch(value):
        return Ref("number", value, text)
    return Ref("full" if "." in value else "bare", value, text)


def quoted(ref: object) -> str:
    """Return a reference in quotes for a message, cut when it is longer than any id: it may be anything."""
    return repr(ref[:MOST_SAID] + "…" if isinstance(ref, str) and len(ref) > MOST_SAID else ref)


def is_pattern(entry: str) -> bool:
    """Whether a rule is a pattern over full ids rather than a reference."""
    return _WILD.search(entry) is not None


def is_number(entry: str) -> bool:
    """Whether *entry* is a short id: one view's number, which no rule may hold."""
    return not is_pattern(entry) and parse_ref(entry).kind == "number"


class RuleMatcher(NamedTuple):
    """Rules, made ready to be asked for many full ids."""

    entries: tuple[str, ...]
    exact: dict[str, str]
    anywhere: dict[str, str]
    patterns: tuple[str, ...]
    joined: re.Pattern[str] | None

    def match(self, full_id: str) -> str | None:
        """Return the rule that matches *full_id*, or None. Exact rules are named before patterns."""
        rule = self.exact.get(full_id)
        if rule is not None:
            return rule
        if self.anywhere:
            rule = self.anywhere.get(full_id.partition(".")[2])
            if rule is not None:
                return rule
        pattern_match = None if self.joined is None else self.joined.match(full_id)
        # Each alternative is one group and holds none of its own: the group's number is the pattern's.
        number = None if pattern_match is None else pattern_match.lastindex
        return None if number is None else self.patterns[number - 1]

    def unmatched(self, full_ids: Collection[str]) -> tuple[str, ...]:
        """Return the rules that match none of *full_ids*, in the order written."""
        bare = {full_id.partition(".")[2] for full_id in full_ids} if self.anywhere else set()
        used = {rule for full_id, rule in self.exact.items() if full_id in full_ids}
        used |= {rule for bare_id, rule in self.anywhere.items() if bare_id in bare}
        for rule in self.patterns:
            matches = re.compile(translate(rule.strip())).match
            if any(matches(full_id) for full_id in full_ids):
                used.add(rule)
        return tuple(entry for entry in self.entries if entry not in used)


def compile_rules(entries: Iterable[str], *, bare: Literal["public", "anywhere"]) -> RuleMatcher:
    """Make patterns and references ready for matching; what is neither matches nothing, and stays among the entries.

    A bare id means one of namespace `public` (allowing), or that id in every namespace (denying).
    """
    exact: dict[str, str] = {}
    anywhere: dict[str, str] = {}
    patterns: list[str] = []
    written_rules = tuple(entries)
    for entry in written_rules:
        if is_pattern(entry):
            patterns.append(entry)
            continue
        ref = parse_ref(entry)
        if ref.kind == "bare" and bare == "anywhere":
            anywhere.setdefault(ref.value, entry)
        elif (full_id := ref.full_id()) is not None:
            exact.setdefault(full_id, entry)
    joined = re.compile("|".join(f"({translate(entry.strip())})" for entry in patterns)) if patterns else None
    return RuleMatcher(written_rules, exact, anywhere, tuple(patterns), joined)
