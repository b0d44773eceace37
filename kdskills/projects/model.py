"""Projects, skills and versions as values, and the grammar of their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from kdskills.errors import BadRequest, Diagnostic
from kdskills.skills.archives import TreeFile

PROJECT: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def check_project(project: str) -> str:
    """Return *project* when it is a project's name: lower-case letters, digits, `-`, `_`, at most 64.

    Raises:
        BadRequest: `project_invalid`.
    """
    if not PROJECT.fullmatch(project):
        message = f"{project!r} is no project: lower-case letters, digits, - and _, at most 64 of them"
        raise BadRequest(message, code="project_invalid", project=project[:100])
    return project


@dataclass(frozen=True, slots=True)
class Project:
    """One project.

    Attributes:
        name: Its name.
        bundle: Folder of its bundle on the service's machine, or None.
        generation: Grows with every change of what its agents see.
        created_at: When it was made.
    """

    name: str
    bundle: str | None
    generation: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class SkillState:
    """An uploaded skill of a project.

    Attributes:
        name: Its name, which is that of its folder.
        full_id: What the policy knows it as.
        enabled: Whether the gate may grant it; uploading and activating never change it.
        active: The version in use, or None.
        description: Of the active version, else of the latest.
        created_at: First upload.
        changed_at: Last change of any kind.
    """

    name: str
    full_id: str
    enabled: bool
    active: str | None
    description: str
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class SkillVersion:
    """One version of an uploaded skill.

    Attributes:
        skill: The skill's name.
        version: Hash of the normalised tree.
        full_id: What the policy knows it as.
        description: What it says it does.
        files: All its files.
        tree_digest: The digest without execute bits, as exports and mounts compare it.
        active: Whether it is the one in use.
        pins: How many pieces of running work hold it.
        created_at: When it was first uploaded.
        created_by: By whom.
        diagnostics: What was found on upload.
    """

    skill: str
    version: str
    full_id: str
    description: str
    files: tuple[TreeFile, ...]
    tree_digest: str
    active: bool
    pins: int
    created_at: datetime
    created_by: str
    diagnostics: tuple[Diagnostic, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What an upload came to.

    Attributes:
        skill: Name of the skill.
        version: Hash of its normalised tree.
        diagnostics: What was left out, and findings about its files.
        created: Whether the version is new to the project.
        active: Whether it is the version in use now.
        enabled: Whether the gate may grant the skill.
    """

    skill: str
    version: str
    diagnostics: tuple[Diagnostic, ...]
    created: bool
    active: bool
    enabled: bool


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A version that stays until its holder lets go: `folder` is the skill's, read-only and hash-addressed."""

    skill: str
    version: str
    full_id: str
    folder: Path
    tree_digest: str


@dataclass(frozen=True, slots=True)
class SkillFile:
    """One file of a version, on this machine."""

    path: Path
    file: TreeFile


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Who changed what, when, with which hashes; `facts` is JSON."""

    at: datetime
    project: str
    who: str
    action: str
    subject: str
    facts: dict[str, str | bool | None]
    request_id: str


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What retention removed: `skill@version` texts, and leftovers of processes that died."""

    versions: tuple[str, ...]
    leftovers: int
