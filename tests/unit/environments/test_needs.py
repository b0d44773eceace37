"""What a script needs, read from what its author wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdskills.environments.model import EnvironmentSpec
from kdskills.environments.needs import needs_of, spec_of
from kdskills.skills import Skill, parse_skill

HEX = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a skill with one script."""
    folder = tmp_path / "forms"
    write(folder, "SKILL.md", "---\nname: forms\ndescription: Fills forms.\n---\nFill.\n")
    write(folder, "scripts/fill.py", "print(1)\n")
    return folder


def write(folder: Path, path: str, text: str | bytes) -> None:
    """Write a file of the skill."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def front(folder: Path, fields: str) -> None:
    """Write the skill file with further fields."""
    write(folder, "SKILL.md", f"---\nname: forms\ndescription: Fills forms.\n{fields}---\nFill.\n")


def skill_in(folder: Path) -> Skill:
    """Return the skill."""
    skill = parse_skill(folder).skill
    assert skill is not None
    return skill


def spec(folder: Path, script: str | None = "scripts/fill.py") -> EnvironmentSpec:
    """Return what is declared."""
    return spec_of(skill_in(folder), script)


def problems(folder: Path, script: str | None = "scripts/fill.py") -> list[tuple[str | None, int | None, str]]:
    """Return what cannot be honoured: path, line and sentence of each."""
    found = needs_of(skill_in(folder), script).diagnostics
    assert {finding.code for finding in found} <= {"environment_invalid"}
    return [(finding.path, finding.line, finding.message) for finding in found]


BLOCK = "# /// script\n# requires-python = '>=3.11'\n# dependencies = ['Pandas>=2', 'pypdf[Crypto] >= 5,<6']\n# ///\n"


def test_nothing_is_needed_where_nothing_is_said(folder: Path) -> None:
    """A skill without declarations has an empty spec, also one that has no folder at all."""
    assert spec(folder) == spec(folder, None) == EnvironmentSpec()


def test_a_block_of_a_script_speaks_alone(folder: Path) -> None:
    """The script's own block wins over every file, canonical and sorted, and is told as the origin."""
    write(folder, "scripts/fill.py", f"#!/usr/bin/env python3\n{BLOCK}import pandas\n")
    write(folder, "requirements.txt", "numpy\n")
    found = spec(folder)
    assert found.requirements == ("pandas>=2", "pypdf[crypto]<6,>=5")
    assert (found.requires_python, found.origins) == (">=3.11", ("scripts/fill.py",))
    assert spec(folder, None).requirements == ("numpy",)


def test_an_empty_block_says_that_nothing_is_needed(folder: Path) -> None:
    """A block without packages is a word, too: the files of the skill do not count for the script."""
    write(folder, "scripts/fill.py", "# /// script\n# dependencies = []\n# ///\n")
    write(folder, "requirements.txt", "numpy\n")
    assert spec(folder).requirements == ()


@pytest.mark.parametrize(
    ("files", "origin"),
    [
        (("scripts/sub/requirements.txt", "scripts/requirements.txt", "requirements.txt"), 0),
        (("scripts/requirements.txt", "requirements.txt", "pyproject.toml"), 0),
        (("requirements.txt", "pyproject.toml", "tools.yaml"), 0),
        (("pyproject.toml", "tools.yaml"), 0),
        (("tools.yaml",), 0),
    ],
)
def test_the_first_file_speaks(folder: Path, files: tuple[str, ...], origin: int) -> None:
    """Files are asked in their order, nearest first, and only one is heard."""
    for path in files:
        name = path.replace("/", "-").partition(".")[0]
        text = {
            "pyproject.toml": f"[project]\ndependencies = ['{name}']\n",
            "tools.yaml": f"tools: []\npython: {name}\n",
        }
        write(folder, path, text.get(path, f"{name}\n"))
    write(folder, "scripts/sub/fill.py", "print(1)\n")
    found = spec(folder, "scripts/sub/fill.py")
    name = files[origin].replace("/", "-").partition(".")[0]
    assert (found.requirements, found.origins) == ((name,), (files[origin],))
