"""What evaluations of a bundle are compared with: its skills described otherwise, or as they were at another commit."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import yaml

from kdskills.bundle import Bundle, load_bundle
from kdskills.errors import BadRequest
from kdskills.skills.frontmatter import repair_lines
from kdskills.skills.yaml_core import YamlRefused, load_yaml, to_python
from kdskills.supply.fetching import GitRepository

if TYPE_CHECKING:
    from kdskills.turn import SkillsSubsystem

WITH: Final = "with_skill"
WITHOUT: Final = "without_skill"
BASELINE: Final = "old_skill"


@dataclass(frozen=True)
class EvalSide:
    """One side of a comparison: a bundle, for `without` as it is when the skill in question is taken from it."""

    name: str
    bundle: Bundle
    without: bool = False


def folders_of(*sides: Bundle | str | None) -> tuple[Path, ...]:
    """Return the folders that skills of bundles read: their own, and those of their skills, which may lie outside."""
    bundles = [each for each in sides if isinstance(each, Bundle)]
    places = [(each.root, each.descriptor.resolve_root(each.root)) for each in bundles]
    return tuple(folder for pair in places for folder in pair if folder is not None)


def other_side(
    bundle: Bundle,
    subsystem: SkillsSubsystem,
    against: tuple[str, Mapping[str, str]] | None,
    baseline: Bundle | str | None,
    folder: Path,
) -> EvalSide:
    """Return what a bundle is compared with; copies are written below *folder*. Raises as `bundle_described`, `bundle_at`."""
    if against is not None:
        return EvalSide(against[0], bundle_described(bundle, subsystem, against[1], folder))
    if baseline is None:
        return EvalSide(WITHOUT, bundle, without=True)
    return EvalSide(BASELINE, bundle_at(bundle, baseline, folder) if isinstance(baseline, str) else baseline)


def descriptions_in(path: Path) -> Mapping[str, str]:
    """Return the descriptions in a file, by full id. Raises BadRequest, `descriptions_invalid`."""
    try:
        content = to_python(load_yaml(path.read_text(encoding="utf-8")).root)
    except (OSError, ValueError, YamlRefused) as error:
        raise BadRequest(f"{path} cannot be read: {error}", code="descriptions_invalid", path=str(path)) from None
    if not (isinstance(content, Mapping) and content and all(isinstance(text, str) for text in content.values())):
        raise BadRequest(f"{path} maps no full ids to descriptions", code="descriptions_invalid", path=str(path))
    return {str(full_id): text for full_id, text in content.items()}


_FRONTMATTER: Final = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---", re.DOTALL | re.MULTILINE)


def bundle_described(
    bundle: Bundle, subsystem: SkillsSubsystem, descriptions: Mapping[str, str], folder: Path
) -> Bundle:
    """Return a copy of a bundle below *folder* in which skills have other descriptions, by full id.

    Raises BadRequest, `descriptions_invalid`, for a skill that is none of the bundle's own.
    """
    copy = folder / "described" / bundle.name
    shutil.copytree(bundle.root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    for full_id, description in descriptions.items():
        skill = subsystem.registry.get(full_id)
        path = None if skill is None or skill.file is None else Path(skill.file).resolve()
        if path is None or not path.is_relative_to(bundle.root):
            message = f"{full_id} is no skill of {bundle.name} that could be described otherwise"
            raise BadRequest(message, code="descriptions_invalid", skill=full_id)
        target = copy / path.relative_to(bundle.root)
        target.write_text(redescribed(target.read_text(encoding="utf-8"), description), encoding="utf-8")
    return _copied(bundle, copy)


def redescribed(text: str, description: str) -> str:
    """Return the text of a skill file with another description; everything else stays as it is written."""
    written = f"description: {json.dumps(description, ensure_ascii=False)}\n"
    match = _FRONTMATTER.match(text)
    if match is None:
        raise BadRequest("a skill file has no frontmatter to describe it in", code="descriptions_invalid")
    head, _ = repair_lines(match[1])
    node = yaml.compose(head, Loader=yaml.SafeLoader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    start, end = next(
        ((key.start_mark.index, value.end_mark.index) for key, value in pairs if key.value == "description"), (0, 0)
    )
    after = head[end:].removeprefix("\n") if end else head
    return text[: match.start(1)] + head[:start] + written + after + text[match.end(1) :]


def bundle_at(bundle: Bundle, ref: str, folder: Path) -> Bundle:
    """Return a bundle as it is at a branch, tag or commit of the repository it lies in, written below *folder*.

    Raises BadRequest, `side_invalid`, for a digest or without a repository, and SourceFailed as git says.
    """
    top = next((path for path in (bundle.root, *bundle.root.parents) if (path / ".git").exists()), None)
    if top is None or ref.startswith("sha256:"):
        message = (
            f"a baseline is the folder of a bundle, or a branch, tag or commit of a repository it lies in: not {ref}"
        )
        raise BadRequest(message, code="side_invalid")
    repository = GitRepository(str(top), "" if ref == "HEAD" else ref, folder, lambda *step: None)
    below = bundle.root.relative_to(top).as_posix()
    rows, objects = repository.rows(repository.fetch(), "" if below == "." else below)
    copy = folder / "baseline" / bundle.name
    for row, data in zip(rows, repository.contents(objects), strict=True):
        target = copy / os.fsdecode(row.raw)
        if stat.S_ISREG(row.mode) and target.resolve().is_relative_to(copy):  # links are left out
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(row.mode & 0o755)
    return _copied(bundle, copy)


def _copied(bundle: Bundle, copy: Path) -> Bundle:
    """Return the bundle in a copy of its folder, trusted as it is itself."""
    python: Literal["execute", "read"] = "execute" if bundle.trusted else "read"
    return load_bundle(copy, python=python, allow_outside_bundle=bundle.descriptor.allow_outside_bundle)
