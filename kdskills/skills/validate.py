"""Everything that can be said about one skill folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kdskills.errors import Diagnostic
from kdskills.errors.arguments import StrPath
from kdskills.skills.companions import COMPACT_FILE, SOURCES_FILES, read_compact, read_sources
from kdskills.skills.folder import read_companion
from kdskills.skills.model import Verdict
from kdskills.skills.parse import parse_skill
from kdskills.skills.safe_open import is_folder


def validate_skill(
    path: StrPath, *, verdict: Verdict = "lenient", extra_fields: Collection[str] = ()
) -> list[Diagnostic]:
    """Return all findings about the skill at *path* and its companions, sorted by path, line and code.

    Args:
        path: A skill folder or its `SKILL.md`.
        verdict: `lenient`, `spec` or `skills-ref`.
        extra_fields: Further keys that are expected.

    Raises:
        TypeError: An argument is of the wrong type. No content and no file-system state raises.
    """
    findings = list(parse_skill(path, verdict=verdict, extra_fields=extra_fields).diagnostics)
    place = Path(path)
    folder = place.parent if place.name in {"SKILL.md", "skill.md"} and not is_folder(place) else place
    if is_folder(folder):
        findings.extend(_companions(folder, verdict))
    return sorted(findings, key=lambda found: (found.path or "", found.line or 0, found.code, found.column or 0))


def _companions(folder: Path, verdict: Verdict) -> list[Diagnostic]:
    _, data, found = read_companion(folder, (COMPACT_FILE,), verdict)
    findings = list(found)
    if data is not None:
        findings.extend(read_compact(data, verdict=verdict).findings)
    name, data, found = read_companion(folder, SOURCES_FILES, verdict)
    findings.extend(found)
    if data is not None:
        findings.extend(read_sources(data, name=name, verdict=verdict).findings)
    return findings
