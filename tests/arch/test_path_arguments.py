"""Every public path argument takes text and `os.PathLike`, and says in one sentence when it is given something else."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kdskills
from kdskills.app import Host, Settings
from kdskills.errors import KdskillsError
from kdskills.execution import ExecutionOptions, InputFile, SkillMount
from kdskills.session import FolderWorkspace, SkillCatalog
from kdskills.skills import SkillRoot, agent_skill_roots, parse_skill, validate_skill
from kdskills.solver import SolverSystem, TurnResult
from kdskills.turn import SkillsSubsystem, remap_mounts, set_skills_descriptor

ROOMS = (
    "",
    ".app",
    ".bundle",
    ".execution",
    ".models",
    ".remote",
    ".session",
    ".skills",
    ".solver",
    ".sources",
    ".turn",
)


class Place:
    """A path that is neither text nor a `Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def exported() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Give every exported function, and every constructor and method of exported classes."""
    for room in ROOMS:
        module = import_module(f"kdskills{room}")
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found):
                if not is_dataclass(found) and not hasattr(found, "model_fields") and "__init__" in vars(found):
                    yield f"{module.__name__}.{name}", found.__init__
                public = [key for key in vars(found) if not key.startswith("_")]
                yield from ((f"{module.__name__}.{name}.{key}", getattr(found, key)) for key in public)
            elif callable(found):
                yield f"{module.__name__}.{name}", found


def test_exported_signatures_take_both() -> None:
    """No parameter of an exported function or method names `Path` where text and `os.PathLike` do not go, too."""
    narrow = []
    for name, function in exported():
        try:
            parameters = inspect.signature(function).parameters.values() if callable(function) else ()
        except (TypeError, ValueError):
            continue  # not written in Python
        for parameter in parameters:
            words = str(parameter.annotation).replace("StrPath", "").replace("PathLike", "")
            if "Path" in words:
                narrow.append(f"{name}({parameter.name}: {parameter.annotation})")
    assert narrow == []


@pytest.fixture
def skill(tmp_path: Path) -> Path:
    """A skill in a folder `skills`."""
    folder = tmp_path / "skills" / "hello"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: hello\ndescription: Says hello. Use when asked.\n---\nSay hello.\n")
    return folder


def calls(skill: Path) -> dict[str, tuple[Path, Callable[[Any], object]]]:
    """Return the calls that take a path, each with a path it can use."""
    top = skill.parents[1]
    descriptor = {"custom_skills_root": "skills"}
    return {
        "load_bundle": (top, kdskills.load_bundle),
        "Host.bundle": (top, Host(Settings(), entry_points=False).bundle),
        "SolverSystem": (top, lambda path: SolverSystem(bundle=path)),
        "parse_skill": (skill, parse_skill),
        "validate_skill": (skill, validate_skill),
        "index_dir": (top / "index", lambda path: SkillsSubsystem(roots=(), index_dir=path).registry),
        "bundle_root": (top, lambda path: SkillsSubsystem(descriptor, bundle_root=path, index_dir=None).registry),
        "set_skills_descriptor": (top, lambda path: set_skills_descriptor(descriptor, bundle_root=path).__exit__),
        "resolve_root": (top, lambda path: kdskills.SkillsDescriptor(**descriptor).resolve_root(path)),
        "remap_mounts": (top, lambda path: remap_mounts({}, {"bundle://": path})),
        "SkillRoot": (top, lambda path: SkillRoot("root://x", path, "x", "plugin").path.name),
        "start": (top, lambda path: agent_skill_roots(path, trusted=())),
        "home": (top, lambda path: agent_skill_roots(top, home=path, trusted=())),
        "trusted": (top, lambda path: agent_skill_roots(top, trusted=[path])),
        "SkillCatalog": (skill.parent, SkillCatalog.from_directory),
        "FolderWorkspace": (top / "turn", lambda path: FolderWorkspace(path).files()),
        "mounts": (top, lambda path: FolderWorkspace(top / "turn", mounts={"data": path}).inputs()),
        "cache_dir": (top, lambda path: ExecutionOptions(cache_dir=path, state_dir=path).cache_dir),
        "SkillMount": (skill, lambda path: SkillMount("public.hello", path, "").root.name),
        "InputFile": (skill / "SKILL.md", lambda path: InputFile("x", path).content),
    }


NAMES = tuple(calls(Path("/a/b/c")))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "set_skills_descriptor"])
def test_paths_are_taken_in_every_form(skill: Path, name: str) -> None:
    """Text, a `Path` and any other `os.PathLike` are one and the same path."""
    path, call = calls(skill)[name]
    for form in (os.fspath(path), path, Place(path)):
        call(form)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [7, b"bytes", 1.5, ["list"]], ids=repr)
def test_a_wrong_type_is_one_clear_sentence(skill: Path, name: str, value: object) -> None:
    """What is no path is a TypeError that names the argument and what it was."""
    if name == "InputFile" and isinstance(value, bytes):
        return  # bytes are the content itself
    with pytest.raises(TypeError) as caught:
        calls(skill)[name][1](value)
    said = str(caught.value)
    assert ("must be a path" in said, said.endswith(f"not {type(value).__name__}"), "\n" in said) == (True, True, False)


def test_a_transcript_is_taken_in_every_form(tmp_path: Path) -> None:
    """A transcript's path may be text or `os.PathLike`; what is not there is an error of the caller, not a traceback."""
    for form in (str(tmp_path / "no"), tmp_path / "no", Place(tmp_path / "no")):
        with pytest.raises(KdskillsError) as caught:
            TurnResult.from_transcript(form)
        assert caught.value.code == "transcript_missing"
