"""`skills.check`: every finding about a skill, a folder of skills or a bundle."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kdskills.app.operations.table import Finding, Input, Operation, Output
from kdskills.bundle.load import NAMES as DESCRIPTOR_NAMES
from kdskills.errors import BadRequest, Diagnostic
from kdskills.skills import parse_skill, validate_skill

if TYPE_CHECKING:
    from kdskills.app.host import Emit, Host

SKILL_FILES = ("SKILL.md", "skill.md")
DEPTH = 6


class CheckInput(Input):
    """What to check, and how strictly."""

    path: Path = Field(description="A skill folder or file, a folder of skills, or a bundle.")
    verdict: Literal["lenient", "spec", "skills-ref"] = Field("lenient", description="Rules to judge by.")
    extra_fields: tuple[str, ...] = Field((), description="Further frontmatter keys the strict verdicts accept.")


class CheckOutput(Output):
    """Findings sorted by path, line and code; `ok` means that there is no error."""

    path: str
    kind: Literal["skill", "folder", "bundle"]
    verdict: str
    skills: int
    errors: int
    warnings: int
    infos: int
    ok: bool
    diagnostics: tuple[Finding, ...]


def skill_folders(top: Path) -> list[Path]:
    """Return the folders below *top* that hold a skill file, at most six levels down, hidden ones left out."""
    found = []
    for where, names, files in os.walk(top):
        folder = Path(where)
        depth = len(folder.relative_to(top).parts)
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in {"node_modules", "__pycache__"})
        if any(name in files for name in (*SKILL_FILES, "skill.yaml")):
            found.append(folder)
            names.clear()
        elif depth >= DEPTH:
            names.clear()
    return found


async def check(host: Host, given: CheckInput, emit: Emit | None = None) -> CheckOutput:
    """Check a skill, a folder of skills or a bundle."""
    path = given.path
    if not path.exists() and not path.is_symlink():
        raise BadRequest(f"{path} is not there", code="path_missing", path=str(path))
    kind: Literal["skill", "folder", "bundle"]
    findings: list[Diagnostic] = []
    if path.is_file() or path.is_symlink() or any((path / name).exists() for name in SKILL_FILES):
        kind, folders, base = "skill", [path], path if path.is_dir() else path.parent
    elif any((path / name).exists() for name in DESCRIPTOR_NAMES) or (path / "skills").is_dir():
        bundle = host.bundle(path)
        subsystem = host.subsystem(bundle)
        findings += [*bundle.diagnostics, *(d for d in subsystem.diagnostics if d.path is None)]
        for consumer in (None, *bundle.descriptor.agents_config):
            findings += subsystem.view(None if consumer == "*" else consumer).diagnostics
        roots = subsystem.snapshot.roots
        root = Path(roots[-1].root.path) if roots else path / "skills"
        kind, folders, base = "bundle", skill_folders(root), root
    else:
        kind, folders, base = "folder", skill_folders(path), path
    for folder in folders:
        place = "" if folder == base or kind == "skill" else folder.relative_to(base).as_posix() + "/"
        found = validate_skill(folder, verdict=given.verdict, extra_fields=given.extra_fields)
        skill = parse_skill(folder).skill
        found += host.answers.check_skill(skill) if skill is not None else ()
        findings += [replace(d, path=place + (d.path or "SKILL.md")) for d in found]
    unique = sorted(set(findings), key=lambda d: (d.path or "", d.line or 0, d.code, d.message))
    counts = [sum(d.severity == name for d in unique) for name in ("error", "warning", "info")]
    return CheckOutput(
        path=str(path),
        kind=kind,
        verdict=given.verdict,
        skills=len(folders),
        errors=counts[0],
        warnings=counts[1],
        infos=counts[2],
        ok=counts[0] == 0,
        diagnostics=tuple(Finding.of(d) for d in unique),
    )


CHECK = Operation(
    "skills.check", "Check a skill, a folder of skills or a bundle.", CheckInput, CheckOutput, ("path_missing",), check
)
