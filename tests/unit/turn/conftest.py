"""Folders of skills, written for a test."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.skills.roots import SkillRoot
from kdskills.turn import SkillsSubsystem

Write = Callable[..., Path]
Build = Callable[..., SkillsSubsystem]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a skill: `write("acme.brief", body="...", imports=["x"], tools=[...])`; returns its folder."""

    def make(
        full_id: str,
        *,
        body: str | None = None,
        root: str = "bundle/skills",
        files: dict[str, str] | None = None,
        **front: Any,
    ) -> Path:
        namespace, _, name = full_id.partition(".")
        tools = front.pop("tools", None)
        folder = tmp_path / root / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        fields = {"name": name, "description": f"About {name}."} | front
        lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())
        (folder / "SKILL.md").write_text(f"---\n{lines}\n---\n{body if body is not None else f'Do {name}.'}\n")
        if tools is not None:
            (folder / "tools.yaml").write_text(json.dumps(tools))
        for place, text in (files or {}).items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return make


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The bundle's folder."""
    folder = tmp_path / "bundle"
    (folder / "skills").mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def build(bundle: Path) -> Build:
    """Build a subsystem over the bundle: `build({"w": {...}}, filters=...)`."""

    def make(agents: dict[str, Any] | None = None, **options: Any) -> SkillsSubsystem:
        settings = {"index_dir": None, "auto_refresh": None, "roots": (), "bundle_root": bundle} | options
        return SkillsSubsystem({"agents_config": agents or {}}, **settings)

    return make


@pytest.fixture
def root(tmp_path: Path) -> Callable[..., SkillRoot]:
    """Make a further root: `root("user", "more")` over `<tmp>/more`."""

    def make(kind: str, folder: str, **options: Any) -> SkillRoot:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        return SkillRoot(f"{kind}://{folder}", path, folder, kind, **options)

    return make


@pytest.fixture
def alone() -> Callable[..., Any]:
    """Run a function in a context of its own: `alone(fn, ...)`, so that what it leaves active stays there."""
    return lambda fn, *args, **kwargs: contextvars.Context().run(fn, *args, **kwargs)
