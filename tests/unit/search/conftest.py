"""Folders of skills to search in, written for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.turn import SkillsSubsystem

Write = Callable[..., Path]
Build = Callable[..., SkillsSubsystem]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a skill: `write("acme.brief", "About briefs.", body="…", files={"scripts/a.py": "…"}, tags=["x"])`."""

    def make(
        full_id: str, description: str, *, body: str = "", files: dict[str, str] | None = None, **front: Any
    ) -> Path:
        namespace, _, name = full_id.partition(".")
        folder = tmp_path / "skills" / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        fields = {"name": name, "description": description} | front
        lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())
        (folder / "SKILL.md").write_text(f"---\n{lines}\n---\n{body}\n")
        for path, text in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build a subsystem over what was written, with its index in `tmp_path/index`: `build({"writer": {...}})`."""

    def make(agents: dict[str, Any] | None = None, **options: Any) -> SkillsSubsystem:
        (tmp_path / "skills").mkdir(exist_ok=True)
        options.setdefault("index_dir", tmp_path / "index")
        options.setdefault("auto_refresh", None)
        return SkillsSubsystem({"agents_config": agents or {}}, bundle_root=tmp_path, **options)

    return make
