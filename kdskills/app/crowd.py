"""Generated skills, as many as somebody needs to see what happens where a few would be lost among thousands.

They are put together from the tables of `crowd.yaml`: what a team does (task), with what (topics), and how (tool). No two
are alike, and the same number gives the same skills on every machine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Final

import yaml

from kdskills.bundle import Bundle
from kdskills.bundle.load import NAMES
from kdskills.errors import BadRequest, Conflict

MAX_CROWD: Final = 10_000
_SKILL: Final = """\
---
name: {name}
description: "{does}; for {team}, {how}. Use it when {use}."
---
# {title}

{care}

## Steps

{steps}

{note}

## What comes of it

{gives}
"""


def _skills() -> Iterator[tuple[str, str, str]]:
    """Yield namespace, name and text of `MAX_CROWD` skills, all of them different, the teams by turns."""
    tables = yaml.safe_load(resources.files("kdskills.app").joinpath("crowd.yaml").read_text(encoding="utf-8"))
    teams, tasks, tools = (list(table.items()) for table in tables.values())
    for number in range(MAX_CROWD):
        turn, position = divmod(number, len(teams))
        (namespace, team), (task_name, task) = teams[position], tasks[(7 * turn + position) % len(tasks)]
        tool_name, tool = tools[(3 * turn + turn // 125 + position) % len(tools)]
        topic = team["topics"][(turn + turn // len(tasks) + position) % len(team["topics"])]
        name = f"{task_name}-{topic.lower().replace(' ', '-')}-{tool_name}"
        words = {"name": name, "title": f"{task_name.capitalize()} {topic}", "how": tool["with"], "note": tool["note"]}
        steps = "\n".join(f"{place}. {step}" for place, step in enumerate(task["steps"], 1))
        yield namespace, name, _SKILL.format(**words | team | task | {"steps": steps}).replace("{topics}", topic)


def write_crowd(folder: Path, count: int) -> tuple[str, ...]:
    """Write *count* generated skills below *folder*, at most `MAX_CROWD`, and return their namespaces.

    A skill whose folder is there already is passed over for the next one. Raises OSError.
    """
    absent = (skill for skill in _skills() if not os.path.lexists(folder.joinpath(*skill[:2])))
    namespaces = {}
    for namespace, name, text in islice(absent, count):
        skill = folder / namespace / name
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text(text, encoding="utf-8")
        namespaces[namespace] = True
    return tuple(namespaces)


def bundle_in_crowd(bundle: Bundle, target: Path, count: int, consumer: str) -> None:
    """Make a bundle at *target*, whole or not at all: that of *bundle* with *count* generated skills around its own.

    Where *consumer* has an allow-list, what was generated is on it; nobody else's rules change. Hidden files and links are
    not copied. Raises BadRequest, `path_missing`: nothing is there to make *target* in; Conflict, `path_exists`: *target*
    is there and no empty folder.
    """
    if not target.parent.is_dir():
        raise BadRequest(f"{target.parent} is not a folder", code="path_missing", path=str(target.parent))
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} is there already and is no empty folder", code="path_exists", path=str(target))
    root = str(bundle.descriptor.custom_skills_root or "skills")
    descriptor = bundle.descriptor.to_json() | {"custom_skills_root": root}
    for key in ("bundle_root", "allow_outside_bundle"):  # for the caller of `load_bundle` to say
        descriptor.pop(key, None)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        shutil.copytree(bundle.root, work, ignore=_uncopied, dirs_exist_ok=True)
        namespaces = write_crowd(work / root, count)
        enabled = descriptor.get("agents_config", {}).get(consumer, {}).get("enabled")
        if isinstance(enabled, list):
            enabled += [f"{namespace}.*" for namespace in namespaces]
        for name in NAMES:
            (work / name).unlink(missing_ok=True)
        (work / "skills_descriptor.json").write_text(json.dumps(descriptor, indent=2), encoding="utf-8")
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _uncopied(folder: str, names: list[str]) -> list[str]:
    """Return what of a bundle's folder is not copied: what is hidden, a link, or neither file nor folder."""
    paths = ((name, Path(folder, name)) for name in names)
    return [n for n, path in paths if n[0] == "." or path.is_symlink() or not (path.is_file() or path.is_dir())]
