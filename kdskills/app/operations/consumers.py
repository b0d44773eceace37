"""Consumers that nobody is: a mistyped name in rules or in a call loses every denial, and says so here."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.bundle.load import NAMES as DESCRIPTOR_NAMES
from kdskills.bundle.terms import CODEGEN, DECISION, EVERYONE
from kdskills.errors import Diagnostic, FileRefused, ReplayError, Severity
from kdskills.models.cassette import Cassette, read_cassette
from kdskills.skills.safe_open import read_file

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.turn import SkillsSubsystem

SOLVER: Final = (DECISION, CODEGEN)
TYPO: Final = 0.92
"""From here on two names are one, mistyped: a letter or two of a name of usual length."""
ALIKE: Final = 0.85
LEAST: Final = 0.7
"""Below this, two names are not compared letter by letter."""
MAX_DEMO: Final = 4 * 1024 * 1024


def rule_findings(bundle: Bundle) -> list[Diagnostic]:
    """Return what is wrong with the consumers that a bundle's rules name.

    Known are the solver's own consumers, those of `demo.yaml`, and what the bundle lists as its `consumers`. Where it
    lists any, every other one is an error. Where it lists none, a name is an error when it is a known one mistyped, and
    a warning when it is merely like one.
    """
    listed = bundle.descriptor.consumers
    consumers = dict.fromkeys((*listed, *SOLVER, *demo_consumers(demo_of(bundle.root))))
    findings = []
    for consumer in bundle.descriptor.agents_config:
        if consumer == EVERYONE or consumer in consumers:
            continue
        nearest_name, ratio = nearest(consumer, consumers)
        if not listed and ratio < ALIKE:
            continue
        severity: Severity = "error" if listed or ratio >= TYPO else "warning"
        reason = (
            "is not among the consumers of this bundle"
            if listed
            else f"is like {nearest_name}, and no agent has that name"
        )
        advice = f"write {nearest_name!r}, or " if ratio >= ALIKE else ""
        path, line = _descriptor_line(bundle, consumer)
        findings.append(
            Diagnostic(
                "consumer_unknown",
                severity,
                f"{consumer} {reason}: its rules hold for nobody",
                path=path,
                line=line,
                ref=f"agents_config.{consumer}",
                fix=f"{advice}list {consumer!r} under `consumers` in the descriptor",
            )
        )
    return findings


def asker_findings(subsystem: SkillsSubsystem, consumer: str | None, demo: Cassette | None) -> tuple[Diagnostic, ...]:
    """Return a warning when nothing names the consumer that asks: no rule is its own, only those for all hold.

    Args:
        subsystem: Skills and rules.
        consumer: Who asks; an anonymous consumer is never unknown.
        demo: The bundle's recording, whose roles are known.
    """
    terms = subsystem.descriptor
    consumers = dict.fromkeys((*terms.agents_config, *terms.consumers, *SOLVER, *demo_consumers(demo)))
    if consumer is None or consumer in consumers or consumer == EVERYONE:
        return ()
    patterns = [entry for skill in subsystem.registry.values() for entry in skill.include_for]
    if any(fnmatchcase(consumer.lower(), entry) for entry in patterns):
        return ()
    nearest_name, ratio = nearest(consumer, consumers)
    fix = (
        f"ask as {nearest_name!r}"
        if ratio >= ALIKE
        else "list it under `consumers` in the descriptor, or give it rules"
    )
    message = f"no rule, skill or agent names {consumer}: only what holds for every consumer is in force"
    return (Diagnostic("consumer_unknown", "warning", message, ref=consumer, fix=fix),)


def demo_of(folder: Path | None) -> Cassette | None:
    """Return the recording of the bundle in *folder*; None without one that can be read, which a replay will say."""
    if folder is None:
        return None
    path = folder / "demo.yaml"
    try:
        status = path.lstat()
        return read_cassette(path) if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_DEMO else None
    except (ReplayError, OSError, ValueError):
        return None


def demo_consumers(demo: Cassette | None) -> tuple[str, ...]:
    """Return the consumers that a recording was made with."""
    if demo is None:
        return ()
    role = demo.expect.get("answer_role")
    return tuple(dict.fromkeys((*(reply.role for reply in demo.replies), *((role,) if isinstance(role, str) else ()))))


def nearest(name: str, candidates: Iterable[str]) -> tuple[str, float]:
    """Return the known name most like *name*, and how alike they are, from 0 to 1; case does not count."""
    rated = (
        (candidate, _likeness(name.casefold(), candidate.casefold()))
        for candidate in candidates
        if candidate != EVERYONE
    )
    return max(rated, key=lambda pair: pair[1], default=("", 0.0))


def _likeness(name: str, candidate: str) -> float:
    shorter, total = min(len(name), len(candidate)), len(name) + len(candidate)
    if not total or 2 * shorter < LEAST * total:  # cannot be alike: a name of a megabyte is not even compared
        return 0.0
    return SequenceMatcher(None, name, candidate, autojunk=False).ratio()


def _descriptor_line(bundle: Bundle, consumer: str) -> tuple[str | None, int | None]:
    """Return the descriptor's file and the line a consumer stands in, as far as they can be seen."""
    for name in DESCRIPTOR_NAMES:
        try:
            lines = read_file(bundle.root, name, limit=1 << 20).data.decode("utf-8", "replace").splitlines()
        except FileRefused:
            continue
        return name, next((number for number, text in enumerate(lines, 1) if consumer in text), None)
    return None, None
