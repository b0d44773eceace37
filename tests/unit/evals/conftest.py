"""Bundles with evaluations, written for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.evals.files import EvalSet, read


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
