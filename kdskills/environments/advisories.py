"""Known faults of locked packages, from a file of advisories in the OSV format; nothing is asked of anybody.

The file is one JSON object, a list of them, one a line, or a zip of files with one each. Versions of Python packages are
compared by PEP 440, those of Node by the rules of semantic versions. A range whose versions cannot be read counts as one that
a package is in: a fault that may be there is told.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kdskills.environments.codes import EnvironmentFailed
from kdskills.errors import FileRefused
from kdskills.skills.safe_open import read_file

MAX_ADVISORIES: Final = 512 * 1024 * 1024
"""Bytes of the file; of a zip those that it unpacks to are bounded by eight times as many."""

MAX_ADVISORY: Final = 16 * 1024 * 1024

Severity = Literal["low", "medium", "high", "critical", "unknown"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""From the least; what is unknown may be the worst."""

_WORDS: Final[Mapping[str, Severity]] = {
    "LOW": "low", "MODERATE": "medium", "MEDIUM": "medium", "IMPORTANT": "high", "HIGH": "high", "CRITICAL": "critical",
}  # fmt: skip
_SEMVER = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")
Order = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Advisory:
    """A known fault of one version of a package.

    Attributes:
        id: The advisory's id.
        aliases: Other ids of the same fault, sorted.
        fixed: The first version after it without the fault; empty when none is known.
    """

    id: str
    package: str
    version: str
    severity: Severity
    fixed: str = ""
    summary: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackageVersion:
    """One version of a package of an ecosystem, `PyPI` or `npm`."""

    ecosystem: str
    name: str
    version: str


def audit(path: Path, packages: Iterable[PackageVersion]) -> dict[PackageVersion, tuple[Advisory, ...]]:
    """Return what the file at *path* knows of each of *packages*, the worst first; packages without faults are left out.

    Raises EnvironmentFailed, `environment_advisories_invalid`, for a file that is none, or too large.
    """
    by_name: dict[tuple[str, str], list[PackageVersion]] = {}
    for package in packages:
        by_name.setdefault((package.ecosystem, _name(package.ecosystem, package.name)), []).append(package)
    faults: dict[PackageVersion, list[Advisory]] = {}
    try:
        for table in _tables(path):
            for affected in [] if table.get("withdrawn") else table.get("affected") or []:
                about = affected.get("package") or {}
                ecosystem = str(about.get("ecosystem", "")).partition(":")[0]
                for package in by_name.get((ecosystem, _name(ecosystem, str(about.get("name", "")))), ()):
                    fixed = _fix(affected, package)
                    if fixed is not None:
                        _add(faults.setdefault(package, []), _advisory(table, affected, package, fixed))
    except (AttributeError, TypeError, KeyError) as error:
        raise _invalid(path, f"an advisory is not of the OSV format: {type(error).__name__}: {error}") from None
    return {package: tuple(sorted(each, key=_worst_first)) for package, each in faults.items()}


def _worst_first(fault: Advisory) -> tuple[int, str]:
    return -SEVERITIES.index(fault.severity), fault.id


def _name(ecosystem: str, name: str) -> str:
    return canonicalize_name(name) if ecosystem == "PyPI" else name


def _tables(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the advisories of a file."""
    try:
        data = read_file(path.parent, path.name, limit=MAX_ADVISORIES).data
    except FileRefused as error:
        raise _invalid(path, error.message) from None
    texts: Iterable[bytes]
    if data.startswith(b"PK"):
        texts = _zipped(path)
    else:
        first = data.split(b"\n", 1)[0].strip()
        lines = first.startswith(b"{") and first.endswith(b"}")
        texts = filter(None, map(bytes.strip, data.split(b"\n"))) if lines else [data]
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid(path, str(error)[:200]) from None
        for table in value if isinstance(value, list) else [value]:
            if not isinstance(table, dict) or not isinstance(table.get("id"), str):
                raise _invalid(path, "it holds something that is no object with an id")
            yield table


def _zipped(path: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".json")]
            if sum(entry.file_size for entry in entries) > 8 * MAX_ADVISORIES:
                raise _invalid(path, f"it unpacks to more than {8 * MAX_ADVISORIES} bytes")
            for entry in entries:
                with archive.open(entry) as stream:
                    text = stream.read(MAX_ADVISORY + 1)
                if len(text) > MAX_ADVISORY:
                    raise _invalid(path, f"an advisory has more than {MAX_ADVISORY} bytes")
                yield text
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise _invalid(path, str(error)[:200]) from None


def _invalid(path: Path, reason: str) -> EnvironmentFailed:
    message = f"{path} is no file of advisories: {reason}"
    return EnvironmentFailed(message, code="environment_advisories_invalid", path=str(path))


def _fix(affected: Mapping[str, Any], package: PackageVersion) -> str | None:
    """Return the version that mends *package*, empty when none is known; None when it is not affected."""
    order: Order = Version if package.ecosystem == "PyPI" else semantic_version
    hit, fixes = package.version in (affected.get("versions") or ()), []
    for span in affected.get("ranges") or ():
        if span.get("type") == "GIT":
            continue
        try:
            inside, fix = _in_range(span.get("events") or (), package.version, order)
        except InvalidVersion:
            inside, fix = True, ""
        hit = hit or inside
        fixes += [fix] if fix else []
    return min(fixes, key=order, default="") if hit else None


def _in_range(events: Iterable[Mapping[str, str]], text: str, order: Order) -> tuple[bool, str]:
    """Return whether a version lies in a range, and the first later one that mends it."""
    version, inside, later = order(text), False, []
    rows = [(kind, value) for event in events for kind, value in event.items()]
    limits = [value for kind, value in rows if kind == "limit" and value != "*"]
    if limits and all(version >= order(limit) for limit in limits):
        return False, ""
    ranks = {"fixed": 0, "introduced": 1, "last_affected": 2}
    marks = [(kind, value) for kind, value in rows if kind in ranks]
    begins_anywhere = [pair for pair in marks if pair[1] == "0"]
    marks = sorted((pair for pair in marks if pair[1] != "0"), key=lambda pair: (order(pair[1]), ranks[pair[0]]))
    for kind, value in (*begins_anywhere, *marks):
        point = None if value == "0" else order(value)
        reached = point is None or version >= point
        if kind == "introduced":
            inside = inside or reached
        elif reached and (kind == "fixed" or version != point):
            inside = False
        if kind == "fixed" and point is not None and version < point:
            later.append(value)
    return inside, next(iter(later), "")


def semantic_version(text: str) -> tuple[Any, ...]:
    """Return what orders a version of Node's packages: numbers, then what comes before the release. Raises InvalidVersion."""
    match = _SEMVER.fullmatch(text)
    if match is None:
        raise InvalidVersion(f"{text[:100]!r} is no semantic version")
    numbers = tuple(int(part or 0) for part in match.groups()[:3])
    if match[4] is None:
        return (*numbers, (1,))
    parts = ((0, int(part), "") if part.isdigit() else (1, 0, part) for part in match[4].split("."))
    return (*numbers, (0, *parts))


def _advisory(table: Mapping[str, Any], affected: Mapping[str, Any], package: PackageVersion, fixed: str) -> Advisory:
    aliases = tuple(sorted(str(alias) for alias in table.get("aliases") or ()))
    summary = " ".join(str(table.get("summary") or table.get("details") or "").split())[:200]
    severity = _severity(table, affected)
    return Advisory(table["id"], package.name, package.version, severity, fixed, summary, aliases)


def _severity(table: Mapping[str, Any], affected: Mapping[str, Any]) -> Severity:
    for part in (affected.get("ecosystem_specific"), affected.get("database_specific"), table.get("database_specific")):
        word = part.get("severity") if isinstance(part, dict) else None
        if isinstance(word, str) and word.upper() in _WORDS:
            return _WORDS[word.upper()]
    scores = [row.get("score") for row in (*(affected.get("severity") or ()), *(table.get("severity") or ()))]
    numbers = [score for score in map(base_score, map(str, scores)) if score is not None]
    if not numbers:
        return "unknown"
    bounds: tuple[tuple[float, Severity], ...] = ((9.0, "critical"), (7.0, "high"), (4.0, "medium"))
    return next((word for bound, word in bounds if max(numbers) >= bound), "low")


_WEIGHTS: Final[Mapping[str, Mapping[str, float]]] = {
    "AV": {"N": 0.85, "A": 0.62, "L": 0.55, "P": 0.2},
    "AC": {"L": 0.77, "H": 0.44},
    "UI": {"N": 0.85, "R": 0.62},
    "C": {"H": 0.56, "L": 0.22, "N": 0.0},
}


def base_score(text: str) -> float | None:
    """Return the base score that a CVSS vector of version 3 stands for, or a plain number; None for anything else."""
    if re.fullmatch(r"\d{1,2}(\.\d+)?", text):
        return float(text)
    parts = [part.partition(":") for part in text.split("/")]
    metrics = {name: value for name, _, value in parts} if text.startswith("CVSS:3") else {}
    try:
        impact = 1.0
        for name in "CIA":
            impact *= 1 - _WEIGHTS["C"][metrics[name]]
        impact, changed = 1 - impact, metrics["S"] == "C"
        privileges = {"N": 0.85, "L": 0.68 if changed else 0.62, "H": 0.5 if changed else 0.27}[metrics["PR"]]
        ease = 8.22 * privileges
        for name in ("AV", "AC", "UI"):
            ease *= _WEIGHTS[name][metrics[name]]
    except KeyError:
        return None
    weight = 7.52 * (impact - 0.029) - 3.25 * (impact - 0.02) ** 15 if changed else 6.42 * impact
    total = min((1.08 if changed else 1.0) * (weight + ease), 10.0) if weight > 0 else 0.0
    return -(-round(total * 100_000) // 10_000) / 10


def _add(faults: list[Advisory], fault: Advisory) -> None:
    """Add a fault, or what it says more of one that is there under another of its ids."""
    ids = {fault.id, *fault.aliases}
    for number, known in enumerate(faults):
        every = {known.id, *known.aliases}
        if ids & every:
            severity = fault.severity if known.severity == "unknown" else known.severity
            aliases = tuple(sorted((ids | every) - {known.id}))
            fixed, summary = known.fixed or fault.fixed, known.summary or fault.summary
            faults[number] = replace(known, severity=severity, aliases=aliases, fixed=fixed, summary=summary)
            return
    faults.append(fault)
