"""Bundles with evaluations, written for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.evals.files import EvalSet, read
from kdskills.evals.runs import run
from kdskills.solver import PlainWiring
from tests.unit.evals.planted import PlantedModel
from tests.unit.solver.conftest import FakeExecutor

SKILLS = {"sales": "Reads sales figures.", "brief": "Writes briefs.", "letter": "Writes letters."}


class EvalBundle:
    """A bundle with the skills `acme.hello` and `acme.bye`, and what a test writes into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("hello", "bye"):
            self.put(
                f"skills/acme/{name}/SKILL.md", f"---\nname: {name}\ndescription: Says {name}.\n---\nSay {name}.\n"
            )

    def put(self, path: str, content: Any) -> Path:
        """Write a file: text and bytes as they are, anything else as JSON."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            target.write_text(content if isinstance(content, str) else json.dumps(content))
        return target

    def rows(self, content: Any, path: str = "skills/acme/hello/evals/evals.json") -> EvalSet:
        """Write a file of evaluations and read the bundle."""
        self.put(path, content)
        return read(self.root)


@pytest.fixture
def bundle(tmp_path: Path) -> EvalBundle:
    """A bundle to write to."""
    return EvalBundle(tmp_path / "bundle")


@pytest.fixture
def codes() -> Callable[[EvalSet], list[str]]:
    """Gives the codes of what could not be understood."""
    return lambda found: [finding.code for finding in found.diagnostics]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundle's folder."""
    root = tmp_path / "shop"
    for name, description in SKILLS.items():
        target = root / "skills/acme" / name / "SKILL.md"
        target.parent.mkdir(parents=True)
        target.write_text(f"---\nname: {name}\ndescription: {description}\n---\nDo {name}.\n")
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    return root


@pytest.fixture
def evaluate(folder, tmp_path):
    """Return a function that runs evaluations with planted replies by id, and gives the iteration.

    `.model` and `.wiring` are those of the last run, `.place` is the workspace.
    """

    async def make(evals, planted, kind="trigger", **options):
        replies = {name if name.startswith("prompt") else f"prompt {name}": each for name, each in planted.items()}
        make.model = options.pop("model", None) or PlantedModel(replies)
        make.wiring = PlainWiring(executors={"fake": FakeExecutor()}, models=options.pop("models", {}))
        given = {"workspace": make.place, "wiring": make.wiring, "model": make.model} | options
        return await run(given.pop("bundle", folder), evals, kind, **given)

    make.place = tmp_path / "work"
    return make
